"""The two autograd nodes of a use, and the saved-tensor hooks that bring a weight back in backward.

[Note: one-step reduce deferral]
A use has two nodes: ``UseWeight`` where the weight is used, and ``LandGradient`` between it and the parameter, made
one weight *earlier* (more, if that one is too small to hide the reduction behind: ``_hooks._prepare_landings``). The
engine runs the ready node that was made last. When ``UseWeight`` of weight i has launched its reduction,
``LandGradient`` of weight i is ready but older than everything of weight i-1, so it runs right after ``UseWeight`` of
weight i-1 has launched the next one: each reduction has the backward of one weight to hide behind, and the gradient
reaches ``AccumulateGrad`` as a finished value, once, with every hook in its place.

What flows between the two nodes is an empty token. The gradient itself travels through ``Use.landings``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from . import _collectives, _runtime
from ._dtensor_layout import WeightLayout, make_dtensor
from ._state import ParamState, Use

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class LandGradient(Function):
    """Older node of a use: takes the reduced shard. See [Note: one-step reduce deferral].

    ``target`` is the parameter, or with a bucket the token of its landing node; ``launch`` that of the bucket's launch.
    """

    @staticmethod
    def forward(ctx: Any, target: Tensor, launch: Tensor | None, use: Use) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.use = use
        # On the parameter's device: the engine keeps one ready queue per device, and the order of nodes is per queue.
        return torch.empty(0, device=target.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        use: Use = ctx.use
        shard = _runtime.land_gradient(use)
        if shard is None:
            return None, None, None
        if use.bucket_use is None:
            return as_gradient(use.param, shard), None, None
        use.bucket_use.arrive(use.param, shard, ctx)
        token = use.root.token_grad(shard.device)
        return token, token, None


class UseWeight(Function):
    """Younger node of a use: its forward hands out the gathered weight, its backward launches the reduction."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, use: Use, full: list[Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.use = use
        return full.pop()  # not an argument of its own, else autograd would add a view

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor, None, None]:
        use: Use = ctx.use
        param = use.param
        _runtime.release_backward(use.root, param)
        if grad is not None:
            local, partial = local_gradient(grad, param.layout.tp_spec)
            if use.bucket_use is not None:
                local = use.bucket_use.settle_partial(param, local, partial)
            if torch.is_grad_enabled() and local.requires_grad:
                use.launched().append(reduce_scatter_differentiably(local, param))
            else:
                _runtime.issue_reduce(use, param.layout.chunks_from_full(local, param.reduce_dtype))
        return use.root.token_grad(param.shard().device), None, None


def local_gradient(grad: Tensor, tp_spec: DTensorSpec | None) -> tuple[Tensor, bool]:
    """The local part of a weight's gradient, and whether it still has to be summed over ``tp``."""
    if not isinstance(grad, DTensor):
        return grad, False
    partial = False
    if tp_spec is not None and grad.placements != tp_spec.placements:
        partial = isinstance(tp_spec.placements[0], Replicate) and is_sum(grad.placements[0])
        if not partial:
            grad = grad.redistribute(placements=tp_spec.placements)
    local = grad.to_local() if torch.is_grad_enabled() and grad.requires_grad else grad._local_tensor
    return (local.wait() if isinstance(local, AsyncCollectiveTensor) else local), partial


def is_sum(placement: Placement) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op == "sum"


def as_gradient(param: ParamState, shard: Tensor) -> Tensor:
    """A reduced local shard as the DTensor that ``AccumulateGrad`` expects."""
    if shard.dtype != param.layout.dtype or param.param.dtype != param.layout.dtype:
        shard = shard.to(param.grad_dtype)
    if shard.requires_grad:
        return cast(Tensor, ToDTensor.apply(shard, param.layout))
    return param.layout.dtensor(shard)


# Function.apply spends most of its time on functorch, whose transforms never come here (see _hooks._use).
land_gradient_node: Callable[[Tensor, Tensor | None, Use], Tensor] = super(Function, LandGradient).apply
use_weight_node: Callable[[Tensor, Use, list[Tensor]], Tensor] = super(Function, UseWeight).apply


# ---- create_graph: the same reductions as differentiable functions, waited for where they are issued
#
# Their derivatives follow what a gradient means under gtp_shard: that of a full tensor on one rank is this rank's
# contribution, to be reduced later; that of a shard, or of a reduced replica, is the reduced value already. So the
# derivative of a reduce-scatter is a plain all-gather, and that of an all-reduce the identity, for means and sums alike.


class ToDTensor(Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, layout: WeightLayout) -> Tensor:
        return layout.dtensor(shard.detach())

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        return grad.to_local(), None


class ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, chunks: Tensor, group: dist.ProcessGroup, op: _collectives.ReduceOp) -> Tensor:
        ctx.group, ctx.op = group, op
        out = chunks.new_empty(chunks.numel() // group.size())
        _collectives.reduce_scatter(out, chunks.contiguous(), group, op).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return cast(Tensor, AllGather.apply(grad, ctx.group, ctx.op)), None, None


class AllGather(Function):
    @staticmethod
    def forward(ctx: Any, chunk: Tensor, group: dist.ProcessGroup, op: _collectives.ReduceOp) -> Tensor:
        ctx.group, ctx.op = group, op
        out = chunk.new_empty(chunk.numel() * group.size())
        _collectives.all_gather(out, chunk.contiguous(), group).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return cast(Tensor, ReduceScatter.apply(grad, ctx.group, ctx.op)), None, None


class AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, op: _collectives.ReduceOp, divisor: int) -> Tensor:
        ctx.arguments = group, op, divisor
        out = value.clone(memory_format=torch.contiguous_format)
        if divisor != 1:
            out.div_(divisor)
        _collectives.all_reduce(out, group, op).wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return cast(Tensor, SpreadReplica.apply(grad, *ctx.arguments)), None, None, None


class SpreadReplica(Function):
    """A replica taken as this rank's own: the identity, whose derivative is the reduction again."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup, op: _collectives.ReduceOp, divisor: int) -> Tensor:
        ctx.arguments = group, op, divisor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return cast(Tensor, AllReduce.apply(grad, *ctx.arguments)), None, None, None


def reduce_scatter_differentiably(grad: Tensor, param: ParamState) -> Tensor:
    layout, dim = param.layout, param.layout.shard_dim
    assert param.group is not None and dim is not None
    chunks = grad.to(param.reduce_dtype)
    if layout.is_padded:
        padding = layout.chunk * layout.gtp_size - layout.tp_shape[dim]
        chunks = torch.nn.functional.pad(chunks, [0, 0] * (chunks.ndim - 1 - dim) + [0, padding])
    if dim != 0:
        chunks = chunks.unflatten(dim, (layout.gtp_size, layout.chunk)).movedim(dim, 0)
    out = cast(Tensor, ReduceScatter.apply(chunks.reshape(-1), param.group, param.policy.reduce_op))
    return layout.shard_from_chunk(out.view(layout.chunk_shape))


# ---- saved-tensor hooks


class PackedWeight:
    """A saved tensor that is a view of a gathered weight: enough to take the same view of the next gather."""

    __slots__ = ("node", "offset", "param", "root", "size", "spec", "stored", "stride", "value")

    def __init__(self, use: Use, local: Tensor, spec: DTensorSpec | None):
        self.root, self.param, self.node = use.root, use.param, use.node
        self.size, self.stride, self.offset, self.spec = local.size(), local.stride(), local.storage_offset(), spec
        self.stored, self.value = use.stored, use.param.value_of(use.stored)


class PackedElsewhere:
    """A saved tensor that the hooks outside ours packed (checkpointing, offloading, ...)."""

    __slots__ = ("unpack", "value")

    def __init__(self, value: object, unpack: Callable[[Any], Tensor]):
        self.value, self.unpack = value, unpack


class SavedTensorHooks:
    """The hooks of one root: they pack views of the weights in ``by_storage``, and pass everything else on.

    Only the innermost pair of hooks applies to a tensor, so what is no weight goes to the pair outside: checkpointing
    and offloading see the tensors that they would see without us.
    """

    def __init__(self, by_storage: dict[int, Use], rematerialize: Callable[[PackedWeight], Tensor]):
        self._by_storage = by_storage
        self._rematerialize = rematerialize
        self._alone = self._pair(None)  # made once: the common case

    def push(self) -> bool:
        """``False`` where ours are on top already, or hooks are forbidden."""
        outer = _top_hooks(True)
        if outer is None:
            pair = self._alone
        elif getattr(outer[0], "by_storage", None) is self._by_storage:
            return False
        else:
            pair = self._pair(outer)
        try:
            _push_hooks(*pair)
        except RuntimeError:
            return False  # functorch transforms forbid hooks: weights stay alive as saved, which is right, only larger
        return True

    def pop(self) -> None:
        _pop_hooks()

    def _pair(self, outer: Any) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        by_storage, rematerialize = self._by_storage, self._rematerialize

        def pack(tensor: Tensor) -> object:
            if by_storage:
                is_dtensor = type(tensor) is DTensor
                local = tensor._local_tensor if is_dtensor else tensor  # type: ignore[attr-defined]
                use = by_storage.get(local.untyped_storage()._cdata)
                # A view with another dtype would need more than as_strided to come back: it is kept as it is.
                if use is not None and local.dtype == use.full.dtype:  # type: ignore[union-attr]
                    use.packed = True
                    return PackedWeight(use, local, tensor._spec if is_dtensor else None)  # type: ignore[attr-defined]
            return tensor if outer is None else PackedElsewhere(outer[0](tensor), outer[1])

        def unpack(packed: object) -> Tensor:
            if type(packed) is PackedWeight:
                view = rematerialize(packed).as_strided(packed.size, packed.stride, packed.offset)
                return view if packed.spec is None else make_dtensor(view, packed.spec)
            if type(packed) is PackedElsewhere:
                return packed.unpack(packed.value)
            return cast(Tensor, packed)

        pack.by_storage = by_storage  # type: ignore[attr-defined]
        return pack, unpack
