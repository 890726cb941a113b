"""Initialisation of a model that was built on the meta device, the same bits on every topology."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from ._access import state_of
from ._state import ParamState


def materialize_meta(
    model: nn.Module,
    seed: int,
    init: Callable[[nn.Module], object] | None = None,
    *,
    device: torch.device | str | None = None,
) -> None:
    """Give every meta parameter and buffer of ``model`` memory and its initial value, one module at a time.

    After ``torch.manual_seed(seed)``, each module in ``model.modules()`` order gets its parameters as full tensors,
    ``init(module)`` (or ``module.reset_parameters()``, where there is one) fills them, and each rank keeps its shard. The
    result has the bits of the same loop on the unsharded model on one process, whatever the mesh; the peak is one module.
    Every rank ends with the same random state.

    Args:
        model: a module, after ``gtp_shard`` (or before: then its parameters stay whole).
        seed: for ``torch.manual_seed``.
        init: called with each module that has parameters or buffers of its own; what it must not touch (other modules'
            parameters) is not there. ``None``: ``reset_parameters``.
        device: of the result; ``None``: the mesh's, or the CPU.

    Raises:
        ValueError: without ``init``, a module with parameters has no ``reset_parameters``.

    Example::

        with torch.device("meta"):
            model = LlamaForCausalLM(config)
        gtp_shard(model, mesh)
        materialize_meta(model, seed=0, init=model._init_weights)
    """
    torch.manual_seed(seed)
    remaining = _uses_of_tied(model)
    full_of: dict[int, nn.Parameter] = {}  # tied parameters between their first and their last module
    for prefix, module in model.named_modules():
        own = {name: tensor for name, tensor in module._parameters.items() if tensor is not None}
        pending = {name: tensor for name, tensor in own.items() if tensor.is_meta or id(tensor) in full_of}
        _materialize_buffers(module, _device_of(module, device))
        if pending:
            _initialise(prefix, module, pending, init, device, full_of, remaining)
        elif init is not None and (own or module._buffers):
            init(module)


def _initialise(
    prefix: str,
    module: nn.Module,
    pending: dict[str, nn.Parameter],
    init: Callable[[nn.Module], object] | None,
    device: torch.device | str | None,
    full_of: dict[int, nn.Parameter],
    remaining: dict[int, int],
) -> None:
    where = _device_of(module, device)
    for name, stored in pending.items():
        full = full_of.get(id(stored))
        if full is None:
            full = nn.Parameter(
                torch.empty(stored.shape, dtype=stored.dtype, device=where), requires_grad=stored.requires_grad
            )
            full_of[id(stored)] = full
        module._parameters[name] = full
    try:
        if init is not None:
            init(module)
        elif hasattr(module, "reset_parameters"):
            cast(Any, module).reset_parameters()
        else:
            raise ValueError(
                f"materialize_meta: {prefix or 'the model'} ({type(module).__name__}) has parameters {sorted(pending)} and no "
                "reset_parameters(); pass init=..."
            )
    finally:
        # ``init`` may have put another parameter in place: that one counts.
        filled = {name: module._parameters[name] for name in pending}
        module._parameters.update(pending)
    state = state_of(module)
    for name, stored in pending.items():
        full = filled[name]
        assert full is not None
        remaining[id(stored)] -= 1
        param = state.entries.get(name) if state is not None else None
        _store(stored, full.detach(), param)
        if remaining[id(stored)] == 0:
            del full_of[id(stored)]


@torch.no_grad()
def _store(stored: nn.Parameter, full: Tensor, param: ParamState | None) -> None:
    """Give ``stored``, the same Python object, the memory and value of its part of ``full``."""
    if param is None:
        _become(stored, nn.Parameter(full.clone(), requires_grad=stored.requires_grad))
        return
    layout = param.layout
    part = full
    if layout.tp_spec is not None and not layout.tp_spec.placements[0].is_replicate():
        dim = cast(Shard, layout.tp_spec.placements[0]).dim
        chunks = torch.chunk(full, layout.tp_spec.mesh.size(), dim)
        rank = layout.tp_spec.mesh.get_local_rank()
        part = chunks[rank] if rank < len(chunks) else full.narrow(dim, 0, 0)
    local = layout.slice_shard(part).clone(memory_format=torch.contiguous_format)
    if stored.is_meta:
        _become(stored, nn.Parameter(layout.dtensor(local), requires_grad=stored.requires_grad))
    else:  # a tied parameter, initialised again by a later owner
        param.shard().copy_(local)


def _become(stored: nn.Parameter, value: nn.Parameter) -> None:
    value.__dict__.update(stored.__dict__)
    torch.utils.swap_tensors(stored, value)


def _materialize_buffers(module: nn.Module, where: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty_like(buffer, device=where)


def _device_of(module: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    state = state_of(module)
    for param in state.root.params if state is not None else ():
        kind = param.layout.mesh.device_type
        return (
            torch.device(kind, torch.get_device_module(kind).current_device()) if kind != "cpu" else torch.device("cpu")
        )
    return torch.device("cpu")


def _uses_of_tied(model: nn.Module) -> dict[int, int]:
    uses: dict[int, int] = {}
    for module in model.modules():
        for tensor in module._parameters.values():
            if tensor is not None:
                uses[id(tensor)] = uses.get(id(tensor), 0) + 1
    return uses
