"""What waits for the first call of a model: by then it is complete, and outer wrappers are in place."""

from __future__ import annotations

import itertools
import weakref

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ._replicate import make_buckets
from ._state import ModuleState, ParamState, RootState

COALESCE_ON_GPU = 8 * 2**20  # where a call's latency is a small part of its time: see docs/performance.md


def initialize(root: RootState) -> None:
    """Units, buckets and the default lookahead of a root. All ranks come here in the same call."""
    module = root.module()
    _find_units(root, module)
    make_buckets(root)
    root.largest_bytes = max(root.full_bytes, default=0)
    sharded = root.sharded()
    if root.policy.coalesce_bytes is None:
        on_gpu = bool(sharded) and sharded[0].layout.mesh.device_type != "cpu"
        root.coalesce = COALESCE_ON_GPU if on_gpu else 0
    if root.policy.lookahead_bytes is None:
        root.lookahead = max(block_bytes(root, module), 2 * root.coalesce)
    root.initialized = True


def _find_units(root: RootState, top: nn.Module | None) -> None:
    """Which outer FSDP unit each parameter belongs to, and each wrapped module's parent."""
    to_visit: list[tuple[nn.Module, object, nn.Module | None]] = [(top, None, None)] if top is not None else []
    while to_visit:
        module, unit, parent = to_visit.pop()
        if isinstance(module, FSDPModule):
            unit = weakref.ref(module)
        state: ModuleState | None = module.__dict__.get("_gtp")
        if state is not None and state.root is root:
            state.parent = weakref.ref(parent) if parent is not None else None
            for param in state.entries.values():
                param.unit = unit
                param.is_plain_matrix = unit is None and _is_plain_matrix(param)
        to_visit.extend((child, unit, module) for child in module.children())


def _is_plain_matrix(param: ParamState) -> bool:
    layout = param.layout
    return (
        layout.shard_dim == 0
        and len(layout.shape) == 2
        and layout.tp_spec is None
        and not param.partial_over_tp
        and param.wire_dtype.is_floating_point
    )


def block_bytes(root: RootState, top: nn.Module | None) -> int:
    """One block's worth of full weights: the most that an element of a list of modules holds.

    An element with a single weight is no block: two neighbours count then. Without lists: the two largest weights.
    """
    sizes = sorted((param.full_bytes for param in root.sharded()), reverse=True)
    best = 0
    for container in top.modules() if top is not None else ():
        if not isinstance(container, nn.ModuleList | nn.Sequential):
            continue
        held = [_weights_under(child, root) for child in container]
        held = [weights for weights in held if weights]
        totals = [sum(param.full_bytes for param in weights) for weights in held]
        if len(totals) < 2:
            continue
        if max(len(weights) for weights in held) == 1:
            totals = [first + second for first, second in itertools.pairwise(totals)]
        best = max(best, *totals)
    return best or sum(sizes[:2])


def _weights_under(module: nn.Module, root: RootState) -> list[ParamState]:
    found: dict[int, ParamState] = {}
    for child in module.modules():
        state: ModuleState | None = child.__dict__.get("_gtp")
        if state is not None and state.root is root:
            found.update((param.index, param) for param in state.entries.values() if param.is_sharded)
    return list(found.values())
