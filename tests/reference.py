"""The oracle: the plain model on one process, and the means to compare a sharded model with it.

Nothing here uses torch_gtp, nor the parts of DTensor that compute layouts or communicate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

Loss = Callable[[nn.Module, Any], Tensor]
Batches = Sequence[Sequence[Sequence[Any]]]  # [step][microbatch][data coordinate]


@dataclass(frozen=True)
class ReferenceRun:
    """What the plain model did.

    `losses` is `[step][microbatch][coordinate]`; `grads` has one `{fqn: gradient}` per step, taken before the
    optimizer (parameters without a gradient are absent); `params` are the parameters after the last step.
    """

    losses: list[list[list[float]]]
    grads: list[dict[str, Tensor]]
    params: dict[str, Tensor]


def reference_step(
    build: Callable[[], nn.Module],
    batches: Batches,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    loss: Loss,
    *,
    reduction: str = "mean",
) -> ReferenceRun:
    """Train the plain model on one process, as if it were data parallel over the coordinates of `batches`.

    Gradients of the microbatches of a step add up; those of the coordinates are averaged (`"mean"`) or added
    (`"sum"`), pairwise as a tree, so that a power-of-two world that nests its axes the same way rounds the
    same way.
    """
    assert reduction in ("mean", "sum"), reduction
    model = build()
    params = dict(model.named_parameters())
    stepper = optimizer(model.parameters())
    losses, grads = [], []
    for microbatches in batches:
        coordinates = len(microbatches[0])
        losses.append([[0.0] * coordinates for _ in microbatches])
        by_coordinate: list[dict[str, Tensor]] = []
        for coordinate in range(coordinates):
            for index, micro in enumerate(microbatches):
                value = loss(model, micro[coordinate])
                losses[-1][index][coordinate] = value.item()
                value.backward()
            by_coordinate.append({name: p.grad for name, p in params.items() if p.grad is not None})
            stepper.zero_grad(set_to_none=True)
        reduced = _reduce(by_coordinate, 1 / coordinates if reduction == "mean" else 1.0)
        for name, param in params.items():
            param.grad = reduced[name].clone() if name in reduced else None
        grads.append(reduced)
        stepper.step()
        stepper.zero_grad(set_to_none=True)
    return ReferenceRun(losses, grads, {name: p.detach().clone() for name, p in params.items()})


def _reduce(parts: list[dict[str, Tensor]], scale: float) -> dict[str, Tensor]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _tree_sum([part[name] for part in parts if name in part]) * scale for name in names}


def _tree_sum(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    half = (len(parts) + 1) // 2
    return _tree_sum(parts[:half]) + _tree_sum(parts[half:])


# ---- from shards to full tensors


def gather_full(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor from the local shards of all ranks. All ranks must call it."""
    return gather_full_dict({"tensor": tensor})["tensor"]


def gather_full_dict(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`gather_full` for many tensors in one exchange. Plain tensors have to be equal on all ranks, as
    replicas do.

    `DTensor.full_tensor` is of no use as an oracle: with unevenly nested shards it can return wrong rows.
    """
    mine = {
        name: (
            t.device_mesh.mesh.flatten().tolist(),
            t.device_mesh.get_coordinate(),
            t.to_local().detach().cpu(),
        )
        if isinstance(t, DTensor)
        else ([], None, t.detach().cpu())
        for name, t in tensors.items()
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    full = {}
    for name, tensor in tensors.items():
        ranks = mine[name][0]
        peers = [theirs[name] for theirs in everyone if theirs[name][0] == ranks]
        if isinstance(tensor, DTensor):
            assert tuple(tensor.shape) == tuple(tensor._spec.shape), name
            pieces = [(tuple(coordinate), piece) for _, coordinate, piece in peers]
            full[name] = reassemble(name, tensor.shape, tuple(tensor.device_mesh.shape), tensor.placements, pieces)
        else:
            full[name] = peers[0][2].clone()
            for rank, (_, _, piece) in enumerate(peers):
                assert _equal(piece, full[name]), f"{name}: rank {rank} holds another replica than rank 0"
    return full


def reassemble(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    pieces: Sequence[tuple[tuple[int, ...], Tensor]],
) -> Tensor:
    """Put `(mesh coordinate, local tensor)` pieces together; raises on wrong shapes, replicas or coverage."""
    assert len(pieces) == math.prod(mesh_shape), f"{name}: {len(pieces)} pieces for a mesh of {tuple(mesh_shape)}"
    full = torch.zeros(tuple(shape), dtype=pieces[0][1].dtype)
    partial_axes = [axis for axis, placement in enumerate(placements) if isinstance(placement, Partial)]
    written: dict[tuple[tuple[int, int], ...], dict[tuple[int, ...], Tensor]] = {}
    for coordinate, piece in pieces:
        region = shard_region(shape, mesh_shape, placements, coordinate)
        expected = tuple(length for _, length in region)
        assert tuple(piece.shape) == expected, (
            f"{name}: coordinate {coordinate} of {tuple(mesh_shape)} holds {tuple(piece.shape)}; "
            f"{placements} of {tuple(shape)} leave {expected}"
        )
        addend = tuple(coordinate[axis] for axis in partial_axes)
        replica = written.setdefault(region, {}).setdefault(addend, piece)
        assert _equal(replica, piece), f"{name}: coordinate {coordinate} holds another replica of {region}"
    covered = 0
    for region, addends in written.items():
        total = _tree_sum(list(addends.values()))
        if partial_axes and all(placements[axis].reduce_op == "avg" for axis in partial_axes):
            total = total / len(addends)
        full[tuple(slice(start, start + length) for start, length in region)] = total
        covered += math.prod(length for _, length in region)
    assert covered == math.prod(shape), f"{name}: shards cover {covered} of {math.prod(shape)} elements"
    return full


def shard_region(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """`(start, length)` per tensor dim of the part at one mesh coordinate: nested splits, each by
    `torch.chunk`'s rule.

    10 rows, tp 2 outside of gtp_remat 2:    tp 0: rows 0-2 | 3-4     tp 1: rows 5-7 | 8-9
    """
    region = []
    for dim, size in enumerate(shape):
        start, length = 0, size
        for axis in split_order(dim, mesh_shape, placements):
            step = -(-length // mesh_shape[axis])
            offset = min(coordinate[axis] * step, length)
            start, length = start + offset, min(step, length - offset)
        region.append((start, length))
    return tuple(region)


def split_order(dim: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Mesh axes that split a tensor dim, outermost first.

    A `Shard` splits outside of every axis to its right, a `_StridedShard` inside of as many of them as its
    split factor says.
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not isinstance(placement, Shard | _StridedShard) or placement.dim != dim:
            continue
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        position = 0
        while factor > math.prod(mesh_shape[other] for other in order[:position]):
            position += 1
            assert position <= len(order), f"split factor {factor} fits no axes of {tuple(mesh_shape)}, {placements}"
        order.insert(position, axis)
    return order


def split_local(
    full: Tensor, mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> Tensor:
    """The inverse of `reassemble`: the local tensor at one coordinate, as a copy."""
    assert all(isinstance(placement, Shard | _StridedShard | Replicate) for placement in placements)
    region = shard_region(full.shape, mesh_shape, placements, coordinate)
    return full[tuple(slice(start, start + length) for start, length in region)].clone()


# ---- comparing


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected magnitude: sums round relative to their largest terms."""
    if actual.shape != expected.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.detach().double(), expected.detach().double()
    difference = (actual - expected).abs().max().item()
    scale = expected.abs().max().item()
    return difference if difference == 0 else difference / scale if scale else math.inf


def assert_matches(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float, what: str) -> None:
    """Same names, and each tensor within `rtol` of the largest magnitude of the expected one."""
    assert actual.keys() == expected.keys(), (
        f"{what}: missing {sorted(expected.keys() - actual.keys())}, "
        f"unexpected {sorted(actual.keys() - expected.keys())}"
    )
    errors = {name: relative_error(actual[name], expected[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if not error <= rtol}
    assert not wrong, f"{what}: relative error above {rtol:g}: " + ", ".join(
        f"{name} {error:.2e}" for name, error in itertools.islice(sorted(wrong.items(), key=lambda x: -x[1]), 8)
    )


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )
