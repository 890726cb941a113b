"""Which part of a parameter's local shard belongs to which replica, and the DTensors around such parts.

A local shard of rows is cut on dim 0 by the ``torch.chunk`` rule, inside every other split. Seven rows over dp=2, gtp_remat=2::

    gtp 0: rows 0 1 2 3     dp 0: 0 1    dp 1: 2 3
    gtp 1: rows 4 5 6       dp 0: 4 5    dp 1: 6

On a mesh whose last axis is ``dp`` that is ``[Shard(0), Shard(0)]``: DTensor nests shards of one dim from left to right. So
parts live on such a mesh, made of the same process groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from .. import _collectives
from .._dtensor_layout import chunk_bounds, make_dtensor, make_spec
from .._policy import GTP_AXIS, TP_AXIS


class SplitMesh:
    """A mesh beside the one of the parameters: the axes that states are split over come last."""

    def __init__(self, mesh: DeviceMesh, axes: tuple[str, ...]):
        names = mesh.mesh_dim_names
        assert names is not None
        others = [name for name in names if name not in axes]
        # Tensor parallelism is the outer split, wherever it stands in the mesh.
        others.sort(key=lambda name: (TP_AXIS, GTP_AXIS).index(name) if name in (TP_AXIS, GTP_AXIS) else -1)
        self.source, self.axes = mesh, axes
        self.order = tuple(names.index(name) for name in (*others, *axes))
        self.mesh = DeviceMesh.from_group(
            [mesh.get_group(axis) for axis in self.order],
            mesh.device_type,
            mesh.mesh.permute(self.order),
            mesh_dim_names=tuple(names[axis] for axis in self.order),
        )
        group = _collectives.axes_group(mesh, axes)
        assert group is not None
        self.group: dist.ProcessGroup = group
        self.sizes = tuple(mesh.size(names.index(name)) for name in axes)
        positions = [names.index(name) for name in axes]
        #: By rank of the group: its coordinates on the axes.
        self.coordinates = [
            tuple((mesh.mesh == rank).nonzero()[0].tolist()[position] for position in positions)
            for rank in dist.get_process_group_ranks(group)
        ]

    def bounds(self, rows: int) -> list[tuple[int, int]]:
        """Rows ``[start, end)`` of a local shard, by rank of the group."""
        found = []
        for coordinate in self.coordinates:
            start, end = 0, rows
            for size, index in zip(self.sizes, coordinate, strict=True):
                inner = chunk_bounds(end - start, size, index)
                start, end = start + inner[0], start + inner[1]
            found.append((start, end))
        return found

    def placements(self, param: DTensor, *, split: bool) -> tuple[Placement, ...]:
        """Those of ``param``, in the order of this mesh; ``split`` cuts dim 0 over the last axes too."""
        found: list[Placement] = []
        for axis in self.order:
            placement = param.placements[axis]
            is_strided = isinstance(placement, _StridedShard)
            found.append(Shard(placement.dim) if is_strided else placement)  # type: ignore[attr-defined]
        if split:
            found[-len(self.axes) :] = [Shard(0)] * len(self.axes)
        return tuple(found)


@dataclass(frozen=True)
class Split:
    """The parts of one parameter. ``bounds`` are rows of the local shard, by rank of the mesh's group."""

    where: SplitMesh
    spec: DTensorSpec
    bounds: tuple[tuple[int, int], ...]
    numel_per_row: int

    @classmethod
    def of(cls, param: DTensor, where: SplitMesh, name: str) -> Split:
        """Raises where the mesh of parts would hold other rows than the parameter does."""
        local = param._local_tensor
        whole = _box(param.shape, where.mesh, where.placements(param, split=False))
        # Offsets of strided shards are not comparable; only gtp_shard makes them here, nested as tp, then gtp_remat.
        is_strided = any(isinstance(placement, _StridedShard) for placement in param.placements)
        known = whole if is_strided else _box(param.shape, param.device_mesh, param.placements)
        if whole != known or whole[0] != tuple(local.shape):
            raise ValueError(
                f"{name}: laid out as {param.placements} on axes {param.device_mesh.mesh_dim_names}, which does not nest as "
                "tp, then gtp_remat; shard it with gtp_shard, or give it an optimizer of its own"
            )
        spec = make_spec(where.mesh, where.placements(param, split=param.ndim > 0), param.shape, param.dtype)
        if param.ndim == 0:  # nothing to cut: every replica updates it
            return cls(where, spec, (), 1)
        bounds = tuple(where.bounds(local.shape[0]))
        numel = 1
        for length in local.shape[1:]:
            numel *= length
        return cls(where, spec, bounds, numel)

    @property
    def chunk(self) -> int:
        """Elements of the largest part: what each rank sends."""
        return max(end - start for start, end in self.bounds) * self.numel_per_row

    @property
    def is_even(self) -> bool:
        rows = self.bounds[0][1]
        return all(bound == (i * rows, (i + 1) * rows) for i, bound in enumerate(self.bounds))

    def own(self, local: Tensor) -> Tensor:
        """This rank's part of a local shard, as a view."""
        return self.part(local, self.where.group.rank()) if self.bounds else local

    def part(self, local: Tensor, rank: int) -> Tensor:
        start, end = self.bounds[rank]
        return local[start:end]

    def wrap(self, part: Tensor) -> DTensor:
        spec = self.spec
        assert spec.tensor_meta is not None
        if part.dtype != spec.tensor_meta.dtype:
            spec = make_spec(spec.mesh, spec.placements, spec.shape, part.dtype)
        return make_dtensor(part, spec)


def _box(
    shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Local shape, and the place of its first element."""
    local, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(local), tuple(offset) if 0 not in local else ()
