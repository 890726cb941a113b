"""Which rank orthogonalises which matrix, when, and which elements travel for it. Pure; every rank finds the same.

Four ranks (dp=2, gtp_remat=2), two matrices of 4 rows. ``A`` is owned by rank 0, ``B`` by rank 3::

    collect      rank 1 -> 0: A rows 2 3       rank 2 -> 3: B rows 0 1         (from the owner's own replica)
    deliver 0    rank 0 -> 1: A rows 2 3       rank 3 -> 2: B rows 0 1         (to the owner's own replica)
    deliver 1    rank 0 -> 2, 3: A             rank 3 -> 0, 1: B               (to the next replica)

Each of these lines is one all-to-all in which no rank sends or receives more than its round's matrices.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from .._dtensor_layout import chunk_bounds
from ._newton_schulz import flops

Box = tuple[tuple[int, int], ...]  # [start, end) per tensor dim
Region = tuple[int | slice, ...]  # an index that leaves a matrix


class Matrix(NamedTuple):
    """One matrix to orthogonalise: the box of a parameter's logical shape that it fills."""

    param: int
    box: Box
    flops: int

    @property
    def shape(self) -> tuple[int, int]:
        (top, bottom), (left, right) = self.box[-2:]
        return bottom - top, right - left

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def region(self) -> Region:
        """The matrix as an index into the whole parameter."""
        expert = tuple(start for start, _ in self.box[:-2])
        return (*expert, *(slice(start, end) for start, end in self.box[-2:]))


def matrices_of(param: int, shape: Sequence[int], segments: Sequence[int] | None, steps: int) -> list[Matrix]:
    """The matrices of one parameter: one, or one per expert, and each cut into row segments where there are any."""
    *experts, rows, columns = shape
    if not rows * columns:
        return []
    ends = list(itertools.accumulate(segments or (rows,)))
    spans = [(start, end) for start, end in itertools.pairwise([0, *ends]) if end > start]
    return [
        Matrix(param, (*((i, i + 1) for i in expert), span, (0, columns)), flops(span[1] - span[0], columns, steps))
        for expert in itertools.product(*map(range, experts))
        for span in spans
    ]


class Holding(NamedTuple):
    """Where the elements of one parameter are: per rank its box, and which whole copy of the parameter it is part of."""

    boxes: tuple[Box, ...]
    replicas: tuple[int, ...]
    copies: int


def holding(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Placement],
    coordinates: Sequence[Sequence[int]],
) -> Holding:
    """The ``Holding`` of a DTensor of this shape, for ranks at these mesh coordinates.

    Raises:
        ValueError: a placement is neither a replica nor a shard that PyTorch can order.
    """
    orders = [split_order(dim, mesh_shape, placements) for dim in range(len(shape))]
    split = set().union(*orders)
    whole = [axis for axis in range(len(mesh_shape)) if axis not in split]
    if any(not isinstance(placements[axis], Replicate) for axis in whole):
        raise ValueError(f"placements {tuple(placements)} are not shards and replicas")
    boxes, replicas = [], []
    for coordinate in coordinates:
        box = []
        for length, order in zip(shape, orders, strict=True):
            start, end = 0, length
            for axis in order:
                low, high = chunk_bounds(end - start, mesh_shape[axis], coordinate[axis])
                start, end = start + low, start + high
            box.append((start, end))
        boxes.append(tuple(box))
        replica = 0
        for axis in whole:
            replica = replica * mesh_shape[axis] + coordinate[axis]
        replicas.append(replica)
    return Holding(tuple(boxes), tuple(replicas), math.prod(mesh_shape[axis] for axis in whole))


def split_order(dim: int, mesh_shape: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """Mesh axes that split a tensor dim, outermost first.

    A shard splits outside of all axes to its right, a strided one inside of as many as make up its split factor.
    """
    order: list[int] = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if not isinstance(placement, Shard | _StridedShard) or placement.dim != dim:
            continue
        factor = placement.split_factor if isinstance(placement, _StridedShard) else 1
        inside_of = 0
        while math.prod(mesh_shape[other] for other in order[:inside_of]) < factor and inside_of < len(order):
            inside_of += 1
        if math.prod(mesh_shape[other] for other in order[:inside_of]) != factor:
            raise ValueError(f"the split factor of {placement} fits no axes to its right in {tuple(placements)}")
        order.insert(inside_of, axis)
    return order


def assign_owners(costs: Sequence[int], ranks: int) -> list[int]:
    """An owner per cost: the largest first, each to the rank with the least so far (longest processing time)."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = loads[0]
        owners[index] = rank
        heapq.heapreplace(loads, (load + costs[index], rank))
    return owners


def split_in_rounds(
    matrices: Sequence[Matrix], owners: Sequence[int], ranks: int, round_numel: int
) -> list[list[list[int]]]:
    """Per round and rank the matrices that it orthogonalises: as many as fit ``round_numel`` elements, at least one."""
    queues: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(matrices)), key=lambda i: (-matrices[i].flops, i)):
        queues[owners[index]].append(index)
    per_rank: list[list[list[int]]] = []
    for queue in queues:
        mine: list[list[int]] = []
        numel = 0
        for index in queue:
            if mine and numel + matrices[index].numel <= round_numel:
                mine[-1].append(index)
                numel += matrices[index].numel
            else:
                mine.append([index])
                numel = matrices[index].numel
        per_rank.append(mine)
    return [list(turn) for turn in itertools.zip_longest(*per_rank, fillvalue=[])]


class Part(NamedTuple):
    """What one rank's shard and one matrix have in common, as slices of both."""

    matrix: int
    of_shard: Region
    of_matrix: tuple[slice, slice]
    shape: tuple[int, int]
    numel: int


class Side(NamedTuple):
    """One end of an all-to-all: its parts in the order of the buffer, and the elements per peer."""

    parts: tuple[Part, ...]
    counts: list[int]

    @classmethod
    def of(cls, by_peer: Sequence[Sequence[Part]]) -> Side:
        return cls(tuple(itertools.chain(*by_peer)), [sum(part.numel for part in parts) for parts in by_peer])


class Exchange(NamedTuple):
    """One all-to-all seen from one rank: between its shards and others' matrices, its matrices and others' shards."""

    shards: Side
    matrices: Side


@dataclass(frozen=True)
class Round:
    """What one rank does in one round: ``collect`` momentum, orthogonalise ``mine``, ``deliver`` the updates."""

    mine: tuple[int, ...]
    collect: Exchange
    deliver: tuple[Exchange, ...]


@dataclass(frozen=True)
class Plan:
    """One rank's part in an optimizer step over the matrices of one mesh."""

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    rounds: tuple[Round, ...]


def make_plan(matrices: Sequence[Matrix], holdings: Sequence[Holding], ranks: int, rank: int, round_numel: int) -> Plan:
    """The part of ``rank`` in a step; ``holdings`` is indexed by ``Matrix.param``."""
    owners = assign_owners([matrix.flops for matrix in matrices], ranks)
    rounds = []
    for turn in split_in_rounds(matrices, owners, ranks, round_numel):
        copies = max(holdings[matrices[index].param].copies for index in itertools.chain(*turn))
        # Delivered to the owner's own replica first: these are the parts that were collected, so the plan is shared.
        deliver = tuple(_exchange(matrices, holdings, turn, rank, hop) for hop in range(copies))
        rounds.append(Round(tuple(turn[rank]), deliver[0], deliver))
    return Plan(tuple(matrices), tuple(owners), tuple(rounds))


def _exchange(
    matrices: Sequence[Matrix], holdings: Sequence[Holding], turn: Sequence[Sequence[int]], rank: int, hop: int
) -> Exchange:
    """What owners and shards exchange where a shard's replica is ``hop`` after its matrix's owner's."""

    def parts(owner: int, holder: int) -> Iterator[Part]:
        for index in turn[owner]:
            held = holdings[matrices[index].param]
            if hop < held.copies and held.replicas[holder] == (held.replicas[owner] + hop) % held.copies:
                yield from _common(index, matrices[index].box, held.boxes[holder])

    peers = range(len(turn))
    return Exchange(
        Side.of([tuple(parts(owner, rank)) for owner in peers]),
        Side.of([tuple(parts(rank, holder)) for holder in peers]),
    )


def _common(index: int, matrix: Box, shard: Box) -> Iterator[Part]:
    spans = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(matrix, shard, strict=True)]
    if any(start >= end for start, end in spans):
        return
    (top, bottom), (left, right) = spans[-2:]
    expert = tuple(start - origin for (start, _), (origin, _) in zip(spans[:-2], shard[:-2], strict=True))
    shape = (bottom - top, right - left)
    yield Part(index, (*expert, *_slices(spans, shard)), _slices(spans, matrix), shape, math.prod(shape))


def _slices(spans: Sequence[tuple[int, int]], box: Box) -> tuple[slice, slice]:
    rows, columns = (slice(s - origin, e - origin) for (s, e), (origin, _) in zip(spans[-2:], box[-2:], strict=True))
    return rows, columns
