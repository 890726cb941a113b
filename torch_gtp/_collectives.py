"""Collectives that return handles, the groups they run on, and every shim for a version of torch.

Callers use these functions through the module (``_collectives.all_gather``), so that tests and benchmarks can
put a double in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

ReduceOp = Literal["avg", "sum", "max"]


class Handle(Protocol):
    """A collective in flight. Its tensors may be read, written or freed only after ``wait``."""

    def wait(self) -> Any: ...


_OPS = MappingProxyType({"avg": dist.ReduceOp.AVG, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX})


def _options(kind: type, op: str | None = None) -> Any:
    options: Any = kind()
    options.asyncOp = True
    if op is not None:
        options.reduceOp = _OPS[op]
    return options


_EXCHANGE_OPTIONS = _options(c10d.AllToAllOptions)
_GATHER_OPTIONS = _options(c10d.AllgatherOptions)
_SCATTER_OPTIONS = MappingProxyType({op: _options(c10d.ReduceScatterOptions, op) for op in _OPS})
_REDUCE_OPTIONS = MappingProxyType({op: _options(c10d.AllreduceOptions, op) for op in _OPS})

# The process group's own methods: the functions of torch.distributed around them cost as much again in host time. Torch
# 2.13 renamed the ones for flat tensors.
_start_gather: Any = getattr(dist.ProcessGroup, "all_gather_single", None) or dist.ProcessGroup._allgather_base
_start_scatter: Any = (
    getattr(dist.ProcessGroup, "reduce_scatter_single", None) or dist.ProcessGroup._reduce_scatter_base
)
_start_exchange: Any = getattr(dist.ProcessGroup, "all_to_all_single", None) or dist.ProcessGroup.alltoall_base
_start_gathers: Any = (
    getattr(dist.ProcessGroup, "all_gather_single_coalesced", None) or dist.ProcessGroup.allgather_into_tensor_coalesced
)
_start_scatters: Any = (
    getattr(dist.ProcessGroup, "reduce_scatter_single_coalesced", None)
    or dist.ProcessGroup.reduce_scatter_tensor_coalesced
)


def all_gather(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> Handle:
    """Start gathering ``input`` of every rank into ``output``, in rank order; ``input`` may be this rank's slot of it."""
    handle: Handle = _start_gather(group, output, input, _GATHER_OPTIONS)
    return handle


def reduce_scatter(output: Tensor, input: Tensor, group: dist.ProcessGroup, op: ReduceOp) -> Handle:
    """Start reducing ``input`` over the group; this rank's part of it, in rank order, lands in ``output``."""
    handle: Handle = _start_scatter(group, output, input, _SCATTER_OPTIONS[op])
    return handle


def all_gather_batch(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> list[Handle]:
    """``all_gather`` of several tensors of one dtype in one call. Returns a handle for each; the first wait is for all."""
    handle: Handle = _start_gathers(group, outputs, inputs, _GATHER_OPTIONS)
    return [handle] * len(outputs)


def reduce_scatter_batch(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup, op: ReduceOp
) -> list[Handle]:
    """``reduce_scatter`` of several tensors of one dtype in one call. Returns a handle for each; the first wait is for all."""
    handle: Handle = _start_scatters(group, outputs, inputs, _SCATTER_OPTIONS[op])
    return [handle] * len(outputs)


def all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: ReduceOp) -> Handle:
    """Start reducing ``tensor`` in place."""
    handle: Handle = group.allreduce([tensor], _REDUCE_OPTIONS[op])
    return handle


def all_to_all(
    output: Tensor, input: Tensor, output_counts: Sequence[int], input_counts: Sequence[int], group: dist.ProcessGroup
) -> Handle:
    """Start sending ``input_counts[i]`` elements of ``input`` to rank i, receiving ``output_counts[i]`` from it.

    Both tensors are flat, their parts in rank order.
    """
    handle: Handle = _start_exchange(group, output, input, output_counts, input_counts, _EXCHANGE_OPTIONS)
    return handle


def exchange_ints(values: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """Every rank's integers, in rank order. Blocks the host."""
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    theirs = torch.empty(group.size() * mine.numel(), dtype=torch.int64, device=device)
    _start_gather(group, theirs, mine, _GATHER_OPTIONS).wait()
    return theirs.view(group.size(), -1).tolist()


def axes_group(mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup | None:
    """The group of ranks that differ from this one only along ``axes``; ``None`` if it is this rank alone.

    One axis has its group in the mesh. Several get a group of their own: a flattened mesh would do, but once two
    axes are flattened ``full_tensor`` of unevenly nested shards merges their gathers and returns wrong rows.
    Every rank of the mesh must call this in the same order.
    """
    names = mesh.mesh_dim_names or ()
    wide = [axis for axis in axes if mesh.size(names.index(axis)) > 1]
    if not wide:
        return None
    if len(wide) == 1:
        return mesh.get_group(wide[0])
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    index = tuple(slice(None) if name in wide else coordinate[i] for i, name in enumerate(names))
    ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
    # Kept with the mesh that it belongs to: roots and slices of one mesh share it, and it goes when the mesh goes.
    groups: dict[tuple[int, ...], dist.ProcessGroup] = mesh._get_root_mesh().__dict__.setdefault("_gtp_groups", {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(
            list(ranks), use_local_synchronization=True, group_desc="torch_gtp_" + "_".join(wide)
        )
    return groups[ranks]


def nccl_mesh_options(axes: int) -> dict[str, Any]:
    """Keyword arguments of ``init_device_mesh`` that give every axis a communicator on a high-priority stream."""
    if not dist.is_nccl_available():
        return {}
    overrides = {}
    for axis in range(axes):
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = True
        overrides[axis] = ("nccl", options)
    return {"backend_override": overrides}


def register_anomaly_rule() -> None:
    """Let anomaly mode look at DTensor gradients: each rank checks the elements that it holds.

    ``torch.autograd.detect_anomaly`` calls ``aten._is_any_true`` on every gradient, for which DTensor has no rule.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    @register_sharding(torch.ops.aten._is_any_true.default)
    def _(x: Any) -> Any:
        return [([Replicate()], [placement]) for placement in {Replicate(), *x.placements}]


def fast_label(name: str) -> Any:
    """A reusable profiler range; a quarter of a microsecond when nobody profiles."""
    return torch._C._profiler._RecordFunctionFast(name)
