"""``nn.Linear`` in one autograd node: what the two GEMMs of its backward need, in the order that hides the most.

The general path (a gathered weight that any operator may read) pays for being general: saved-tensor hooks, views, a node to hand
the weight out and one to transpose its gradient. A plain ``nn.Linear`` needs none of it. The gradient's GEMM also writes the
reduce-scatter's input itself, padding left over, instead of being copied there.
Everything else about a use (its turn, its landing node, its reduction) is the general path's; whatever is unusual takes that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from . import _hooks, _runtime
from ._autograd import reduce_scatter_differentiably, use_weight_node
from ._state import ModuleState, ParamState, Use

_TORCH_FORWARD = nn.Linear.forward


def applies_to(base: type[nn.Module]) -> bool:
    """Whether modules of this class compute what ``nn.Linear`` does."""
    return issubclass(base, nn.Linear) and base.forward is _TORCH_FORWARD


def forward(module: nn.Linear, input: Tensor) -> Tensor:
    """``nn.Linear.forward`` of a sharded module."""
    state: ModuleState | None = module.__dict__.get("_gtp")
    if state is None:
        return nn.Linear.forward(module, input)
    param = state.entries.get("weight")
    if param is None or not _is_usual(module, state, param, input):
        return nn.Linear.forward(module, input)
    root = state.root
    use = _hooks.take_turn(root, param, root.frames[-1], attach=True)
    bias = module.bias
    token, use.token = use.token, None
    use.packed = input.requires_grad  # whether backward will gather the weight again
    return linear_node(token, input, bias, use)


def _is_usual(module: nn.Linear, state: ModuleState, param: ParamState, input: Tensor) -> bool:
    """Plain tensors, a backward to come, and nobody who counts, transforms or rewrites operators."""
    frames = state.root.frames
    return (
        param.is_plain_matrix
        and bool(frames)
        and frames[-1].module is state
        and param.use is None
        and module._parameters["weight"] is param.param
        and type(input) in (Tensor, nn.Parameter)
        and input.dtype == param.wire_dtype
        and input.layout is torch.strided
        and input.ndim > 0
        and not input.is_nested
        and param.param.requires_grad
        and torch.is_grad_enabled()
        and not torch._C._is_any_autocast_enabled()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._is_torch_function_mode_enabled()
        and not torch._C._are_functorch_transforms_active()
        and nn.Linear.forward is _TORCH_FORWARD
    )


class GTPLinear(Function):
    """``input @ weight.T + bias``, with ``input`` of any rank and ``weight`` as gathered, of shape ``(out, in)``."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, input: Tensor, bias: Tensor | None, use: Use) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input)
        ctx.use, ctx.token, ctx.value = use, token, use.param.value_of(use.stored)
        assert use.full is not None
        return F.linear(input, use.full, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if grad is None:
            return None, None, None, None
        use: Use = ctx.use
        root, param = use.root, use.param
        (input,) = ctx.saved_tensors
        nodes = [node for node, _ in ctx.next_functions]  # of the tensors among the inputs
        wants_weight, wants_input = _is_wanted(nodes[0]), _is_wanted(nodes[1])
        wants_bias = len(nodes) == 3 and _is_wanted(nodes[2])
        grad_input: Tensor | None = None
        early = wants_weight and param.policy.wgrad_first and not torch.is_grad_enabled()
        if wants_input:
            turn = _hooks.begin_backward_turn(root, param, use.stored, ctx.value)
            # A gather that nobody foresaw, the first of most backwards, has this GEMM to hide behind.
            early = early or (wants_weight and not turn.was_foreseen and not torch.is_grad_enabled())
            if early:
                _reduce_weight_gradient(use, grad, input)
            full = _hooks.end_backward_turn(root, param, use.stored, turn)
            if torch.is_grad_enabled():
                weight = use_weight_node(ctx.token, use, [full.detach()])
                grad_input = grad.matmul(weight)
            else:
                grad_input = _rows(grad).mm(full).view(input.shape)
            del full
        elif early:
            _reduce_weight_gradient(use, grad, input)
        _runtime.release_backward(root, param)
        if wants_weight and not early:
            _reduce_weight_gradient(use, grad, input)
        return (
            root.token_grad(grad.device) if wants_weight else None,
            grad_input,
            _rows(grad).sum(0) if wants_bias else None,
            None,
        )


linear_node: Callable[..., Tensor] = super(Function, GTPLinear).apply


def _is_wanted(node: Any) -> bool:
    """Whether this backward needs the gradient that goes to ``node``."""
    try:
        return node is not None and bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # how the engine says that the gradient of a leaf is captured
        return True


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else tensor.unsqueeze(0) if tensor.ndim == 1 else tensor.flatten(0, -2)


def _reduce_weight_gradient(use: Use, grad: Tensor, input: Tensor) -> None:
    """Compute this rank's gradient of the full weight where the reduce-scatter reads it, and launch that."""
    layout, dtype = use.param.layout, use.param.reduce_dtype
    rows, inputs = _rows(grad), _rows(input)
    if torch.is_grad_enabled() and (grad.requires_grad or input.requires_grad):
        use.launched().append(reduce_scatter_differentiably(rows.t().mm(inputs), use.param))
        return
    if dtype == rows.dtype:
        chunks = rows.new_empty(layout.gathered_shape)
        torch.mm(rows.t(), inputs, out=chunks.narrow(0, 0, layout.tp_shape[0]) if layout.is_padded else chunks)
    else:
        chunks = layout.chunks_from_full(rows.t().mm(inputs), dtype)
    _runtime.issue_reduce(use, chunks)
