"""Meshes and layouts of any rank of any world, in one process and without process groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from torch_gtp._dtensor_layout import WeightLayout, axis_size, make_layout, make_spec


class OfflineMesh(DeviceMesh):
    """A mesh that knows where `rank` stands in it, and has no groups to communicate over."""

    def __init__(self, shape: tuple[int, ...], names: tuple[str, ...], rank: int):
        ranks = torch.arange(math.prod(shape)).view(shape)
        super().__init__("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)

    def get_local_rank(self, mesh_dim: str | None = None) -> int:
        return self.get_coordinate()[self.mesh_dim_names.index(mesh_dim)]


def offline_layout(
    mesh: OfflineMesh, shape: tuple[int, ...], shard_dim: int | None, tp_placement: Placement | None
) -> WeightLayout:
    """What `gtp_shard` computes for a parameter of `shape`, parallelized over `tp` by `tp_placement`."""
    tp_spec = None
    if tp_placement is not None:
        tp_mesh = OfflineMesh((axis_size(mesh, "tp"),), ("tp",), mesh.get_local_rank("tp"))
        tp_spec = make_spec(tp_mesh, (tp_placement,), shape, torch.float32)
    return make_layout(mesh, torch.Size(shape), torch.float32, shard_dim, tp_spec)


def layouts_of_all_ranks(
    mesh_shape: tuple[int, ...],
    names: tuple[str, ...],
    shape: tuple[int, ...],
    shard_dim: int | None,
    tp_placement: Placement | None = None,
) -> list[tuple[tuple[int, ...], WeightLayout]]:
    """`(mesh coordinate, layout)` of every rank, in rank order."""
    coordinates = itertools.product(*map(range, mesh_shape))
    return [
        (coordinate, offline_layout(OfflineMesh(mesh_shape, names, rank), shape, shard_dim, tp_placement))
        for rank, coordinate in enumerate(coordinates)
    ]


def tp_slices(full: torch.Tensor, tp_placement: Placement | None, size: int) -> Iterator[torch.Tensor]:
    """What tensor parallelism leaves on each of its ranks: `torch.chunk`'s parts, empty ones included."""
    if not isinstance(tp_placement, Shard):
        return itertools.repeat(full, size)
    parts = list(torch.chunk(full, size, tp_placement.dim))
    empty = full.narrow(tp_placement.dim, 0, 0)
    return iter(parts + [empty] * (size - len(parts)))
