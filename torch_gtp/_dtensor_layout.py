"""How a parameter is split: placements, padding and index arithmetic. Pure: no collective, no state.

A parameter of logical shape ``(out, in)`` split on dim 0 over ``tp`` (outer) and ``gtp_remat`` (inner), with
10 rows, tp=2, gtp_remat=2 (``torch.chunk`` rule at each level; ``.`` is padding that only a gather sees)::

    tp 0 | rows 0 1 2 3 4 |  gtp 0: 0 1 2    gtp 1: 3 4 .
    tp 1 | rows 5 6 7 8 9 |  gtp 0: 5 6 7    gtp 1: 8 9 .
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ._policy import GTP_AXIS, TP_AXIS


def axis_size(mesh: DeviceMesh, axis: str) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(axis)) if axis in names else 1


def axis_coordinate(mesh: DeviceMesh, axis: str) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.get_local_rank(axis) if axis in names else 0


def replicate_axes(mesh: DeviceMesh) -> tuple[str, ...]:
    """Axes of the mesh that are neither tensor parallel nor the gather axis."""
    return tuple(name for name in mesh.mesh_dim_names or () if name not in (TP_AXIS, GTP_AXIS))


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch._prims_common.make_contiguous_strides_for(tuple(shape)))


def chunk_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """``[start, end)`` of part ``index`` under the ``torch.chunk`` rule, empty parts at the end included."""
    size = math.ceil(length / parts)
    return min(index * size, length), min((index + 1) * size, length)


@dataclass(frozen=True, eq=False)
class WeightLayout:
    """Where the elements of one parameter live on one rank.

    ``shape`` is the logical shape, ``tp_shape`` this rank's tensor-parallel slice of it (what a GEMM reads),
    ``shard_shape`` what the rank stores. ``shard_dim`` is ``None`` for a parameter that is whole on every
    ``gtp_remat`` rank. ``chunk`` is the length along ``shard_dim`` that every rank sends, padding included.
    """

    mesh: DeviceMesh
    shape: torch.Size
    dtype: torch.dtype
    tp_shape: torch.Size
    shard_dim: int | None
    tp_spec: DTensorSpec | None
    spec: DTensorSpec
    gtp_size: int
    gtp_rank: int

    @cached_property
    def chunk(self) -> int:
        assert self.shard_dim is not None
        return math.ceil(self.tp_shape[self.shard_dim] / self.gtp_size)

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """Rows ``[start, end)`` of the TP slice that this rank stores."""
        assert self.shard_dim is not None
        return chunk_bounds(self.tp_shape[self.shard_dim], self.gtp_size, self.gtp_rank)

    @cached_property
    def shard_shape(self) -> torch.Size:
        if self.shard_dim is None:
            return self.tp_shape
        start, end = self.bounds
        return self._with_length(end - start)

    @cached_property
    def chunk_shape(self) -> torch.Size:
        return self._with_length(self.chunk)

    @cached_property
    def gathered_numel(self) -> int:
        """Elements of the gather's output, padding included."""
        return self.gtp_size * math.prod(self.chunk_shape)

    @cached_property
    def is_padded(self) -> bool:
        return self.shard_dim is not None and self.chunk * self.gtp_size != self.tp_shape[self.shard_dim]

    def _with_length(self, length: int) -> torch.Size:
        assert self.shard_dim is not None
        return torch.Size((*self.tp_shape[: self.shard_dim], length, *self.tp_shape[self.shard_dim + 1 :]))

    def slice_shard(self, tp_slice: Tensor) -> Tensor:
        """This rank's part of a TP slice, as a view."""
        if self.shard_dim is None:
            return tp_slice
        start, end = self.bounds
        return tp_slice.narrow(self.shard_dim, start, end - start)

    @cached_property
    def gathered_shape(self) -> torch.Size:
        """Shape of a gather's output: the chunks one after another on dim 0, as collectives want them.

        For ``shard_dim`` 0 that is the padded TP slice itself.
        """
        return torch.Size((self.gtp_size * self.chunk_shape[0], *self.chunk_shape[1:]))

    def own_chunk(self, buffer: Tensor) -> Tensor:
        """This rank's slot of a gathered buffer, padding included, as a view."""
        return buffer.narrow(0, self.gtp_rank * self.chunk_shape[0], self.chunk_shape[0])

    def full_from_chunks(self, buffer: Tensor) -> Tensor:
        """TP slice from a gathered buffer: itself or a view for dim 0, one copy for any other dim."""
        dim = self.shard_dim
        assert dim is not None
        if dim == 0:
            return buffer.narrow(0, 0, self.tp_shape[0]) if self.is_padded else buffer
        chunks = buffer.view(self.gtp_size, *self.chunk_shape)
        padded = chunks.movedim(0, dim).flatten(dim, dim + 1)
        return padded.narrow(dim, 0, self.tp_shape[dim]).contiguous()

    def chunks_from_full(self, full: Tensor, dtype: torch.dtype) -> Tensor:
        """A TP slice (a gradient) as the padded, contiguous input of a reduce-scatter, of ``gathered_shape``.

        Returns the tensor itself where nothing has to move; never writes into it.
        """
        dim = self.shard_dim
        assert dim is not None
        length = self.tp_shape[dim]
        if not self.is_padded and dim == 0:
            if full.dtype != dtype:
                full = full.to(dtype)
            return full if full.is_contiguous() else full.contiguous()
        if dim == 0:
            out = full.new_empty(self.gathered_shape, dtype=dtype)
            out[:length].copy_(full)
            out[length:].zero_()
            return out
        padded = full.new_zeros(
            (*self.tp_shape[:dim], self.gtp_size * self.chunk, *self.tp_shape[dim + 1 :]), dtype=dtype
        )
        padded.narrow(dim, 0, length).copy_(full)
        chunks = padded.unflatten(dim, (self.gtp_size, self.chunk)).movedim(dim, 0)
        return chunks.reshape(self.gathered_shape)

    def shard_from_chunk(self, chunk: Tensor) -> Tensor:
        """The rank's shard (itself or a view) from its padded chunk, of ``chunk_shape``."""
        assert self.shard_dim is not None
        start, end = self.bounds
        return chunk if end - start == self.chunk else chunk.narrow(self.shard_dim, 0, end - start)

    def dtensor(self, shard: Tensor) -> DTensor:
        """The stored DTensor around a local shard, built without communication."""
        spec = self.spec
        if shard.dtype != self.dtype:
            spec = make_spec(self.mesh, spec.placements, self.shape, shard.dtype)
        return make_dtensor(shard, spec)

    def matches(self, other: DTensor) -> bool:
        """Whether another DTensor could take this parameter's place unnoticed."""
        return (
            other._spec is self.spec
            or (
                other.placements == self.spec.placements
                and other.shape == self.shape
                and other.device_mesh == self.mesh
            )
        ) and other._local_tensor.shape == self.shard_shape


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    return DTensorSpec(mesh, tuple(placements), TensorMeta(torch.Size(shape), contiguous_stride(shape), dtype))


# ``__init__`` has nothing to add, and Dynamo's guard around it costs more than the rest of the construction.
_new_dtensor: Any = DTensor.__new__


def make_dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor from its parts. ``DTensor.from_local`` costs fifteen times more and rejects uneven strided shards."""
    return _new_dtensor(DTensor, local, spec, requires_grad=False)


def combined_placements(
    mesh: DeviceMesh, tp_placement: Placement | None, shard_dim: int | None
) -> tuple[Placement, ...]:
    """Placements on the whole mesh for a parameter with ``tp_placement`` whose slice is split on ``shard_dim``.

    ``tp`` is the outer split whatever the mesh order. DTensor nests shards of one dim from left to right, so where
    ``gtp_remat`` stands before ``tp`` in the mesh its placement is a strided shard.
    """
    names = mesh.mesh_dim_names or ()
    placements: list[Placement] = [Replicate()] * len(names)
    if TP_AXIS in names and tp_placement is not None:
        placements[names.index(TP_AXIS)] = tp_placement
    if shard_dim is not None:
        nested_outside = (
            TP_AXIS in names
            and names.index(GTP_AXIS) < names.index(TP_AXIS)
            and isinstance(tp_placement, Shard)
            and tp_placement.dim == shard_dim
            and axis_size(mesh, TP_AXIS) > 1
        )
        placements[names.index(GTP_AXIS)] = (
            _StridedShard(shard_dim, split_factor=axis_size(mesh, TP_AXIS)) if nested_outside else Shard(shard_dim)
        )
    return tuple(placements)


def make_layout(
    mesh: DeviceMesh, shape: torch.Size, dtype: torch.dtype, shard_dim: int | None, tp_spec: DTensorSpec | None
) -> WeightLayout:
    """Layout of a parameter of logical ``shape``; ``tp_spec`` is its 1-D tensor-parallel spec, if it has one."""
    tp_placement = tp_spec.placements[0] if tp_spec is not None else None
    tp_shape = list(shape)
    if isinstance(tp_placement, Shard):
        start, end = chunk_bounds(shape[tp_placement.dim], axis_size(mesh, TP_AXIS), axis_coordinate(mesh, TP_AXIS))
        tp_shape[tp_placement.dim] = end - start
    return WeightLayout(
        mesh=mesh,
        shape=shape,
        dtype=dtype,
        tp_shape=torch.Size(tp_shape),
        shard_dim=shard_dim,
        tp_spec=tp_spec,
        spec=make_spec(mesh, combined_placements(mesh, tp_placement, shard_dim), shape, dtype),
        gtp_size=axis_size(mesh, GTP_AXIS),
        gtp_rank=axis_coordinate(mesh, GTP_AXIS),
    )
