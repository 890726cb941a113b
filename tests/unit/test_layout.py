"""Properties of layouts: where every element of a parameter lives, for any shape and any mesh."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.reference import reassemble, shard_region, split_local
from tests.unit.offline_mesh import OfflineMesh, layouts_of_all_ranks, offline_layout, tp_slices
from torch_gtp._dtensor_layout import (
    axis_coordinate,
    axis_size,
    chunk_bounds,
    combined_placements,
    contiguous_stride,
    replicate_axes,
)


@dataclass(frozen=True)
class Spot:
    """One parameter on one mesh. `axes` maps names to sizes, in the order of the mesh."""

    axes: tuple[tuple[str, int], ...]
    shape: tuple[int, ...]
    shard_dim: int
    tp_placement: Placement | None

    @property
    def names(self):
        return tuple(name for name, _ in self.axes)

    @property
    def mesh_shape(self):
        return tuple(size for _, size in self.axes)

    @property
    def sizes(self):
        return dict(self.axes)

    def layouts(self):
        return layouts_of_all_ranks(self.mesh_shape, self.names, self.shape, self.shard_dim, self.tp_placement)

    def full(self):
        return torch.arange(math.prod(self.shape), dtype=torch.float32).view(self.shape)

    def slice_of(self, coordinate):
        """The tensor-parallel slice at a mesh coordinate."""
        tp = self.sizes.get("tp", 1)
        index = coordinate[self.names.index("tp")] if "tp" in self.sizes else 0
        return list(tp_slices(self.full(), self.tp_placement, tp))[index]


@st.composite
def spots(draw, with_tp=True):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    dims = st.integers(0, len(shape) - 1)
    axes = [("gtp_remat", draw(st.integers(1, 5)))]
    tp_placement = None
    if with_tp and draw(st.booleans()):
        axes.append(("tp", draw(st.integers(1, 3))))
        tp_placement = draw(st.one_of(dims.map(Shard), st.just(Replicate()), st.none()))
    if draw(st.booleans()):
        axes.append(("dp", 2))
    return Spot(tuple(draw(st.permutations(axes))), shape, draw(dims), tp_placement)


UNEVEN = Spot((("tp", 2), ("gtp_remat", 2)), (10, 3), 0, Shard(0))
STRIDED = Spot((("gtp_remat", 2), ("tp", 2)), (10, 3), 0, Shard(0))
FEWER_ROWS_THAN_RANKS = Spot((("tp", 3), ("gtp_remat", 4)), (2, 3), 0, Shard(0))
many = settings(max_examples=40)


def both_orders(test):
    for spot in (UNEVEN, STRIDED, FEWER_ROWS_THAN_RANKS):
        test = example(spot)(test)
    return many(given(spots())(test))


@both_orders
def test_reassembled_shards_are_the_parameter(spot):
    full = spot.full()
    pieces = [(coordinate, layout.slice_shard(spot.slice_of(coordinate))) for coordinate, layout in spot.layouts()]
    placements = spot.layouts()[0][1].spec.placements
    assert torch.equal(reassemble("w", spot.shape, spot.mesh_shape, placements, pieces), full)


@both_orders
def test_every_rank_stores_what_the_placements_say(spot):
    for coordinate, layout in spot.layouts():
        stored = layout.slice_shard(spot.slice_of(coordinate))
        assert stored.shape == layout.shard_shape
        expected = split_local(spot.full(), spot.mesh_shape, layout.spec.placements, coordinate)
        assert torch.equal(stored, expected)


@both_orders
def test_placements_mean_to_dtensor_what_they_mean_here(spot):
    for coordinate, layout in spot.layouts():
        shape, offset = compute_local_shape_and_global_offset(layout.shape, layout.mesh, layout.spec.placements)
        assert shape == layout.shard_shape
        if 0 not in shape:  # DTensor puts empty shards at the end, we do so too, but no element says it
            region = shard_region(spot.shape, spot.mesh_shape, layout.spec.placements, coordinate)
            assert offset == tuple(start for start, _ in region)


@both_orders
def test_gathered_chunks_are_the_slice_of_every_rank(spot):
    """What a gather does: the padded chunks of one `gtp_remat` group stand one after another in memory."""
    layouts = spot.layouts()
    axis = spot.names.index("gtp_remat")
    for coordinate, layout in layouts:
        group = [other for other in layouts if all(
            other[0][i] == coordinate[i] for i in range(len(coordinate)) if i != axis
        )]  # fmt: skip
        memory = torch.full((layout.gathered_numel,), float("nan"))
        for member, theirs in group:
            numel = math.prod(theirs.chunk_shape)
            chunk = memory.narrow(0, theirs.gtp_rank * numel, numel).view(theirs.chunk_shape)
            theirs.shard_from_chunk(chunk).copy_(theirs.slice_shard(spot.slice_of(member)))
        full = layout.full_from_chunks(memory.view(layout.gathered_shape))
        assert torch.equal(full, spot.slice_of(coordinate))


@both_orders
def test_a_ranks_own_chunk_is_its_slot_in_the_memory_of_a_gather(spot):
    for _, layout in spot.layouts():
        memory = torch.arange(layout.gathered_numel)
        mine = layout.own_chunk(memory.view(layout.gathered_shape))
        assert mine.shape == layout.chunk_shape
        assert mine.is_contiguous()
        assert torch.equal(mine.reshape(-1), memory.view(layout.gtp_size, -1)[layout.gtp_rank])


@both_orders
def test_a_reduce_scatter_of_a_full_gradient_gives_every_rank_its_shard(spot):
    for coordinate, layout in spot.layouts():
        grad = spot.slice_of(coordinate) + 0.5
        chunks = layout.chunks_from_full(grad, torch.float32)
        assert chunks.shape == layout.gathered_shape
        assert chunks.is_contiguous()
        mine = chunks.view(layout.gtp_size, -1)[layout.gtp_rank].view(layout.chunk_shape)
        assert torch.equal(layout.shard_from_chunk(mine), layout.slice_shard(grad))


@both_orders
def test_chunks_of_a_full_tensor_give_it_back(spot):
    for coordinate, layout in spot.layouts():
        full = spot.slice_of(coordinate)
        before = full.clone()
        assert torch.equal(layout.full_from_chunks(layout.chunks_from_full(full, torch.float32)), full)
        assert torch.equal(full, before)


@both_orders
def test_padding_of_a_reduction_is_zero_and_of_the_least_length(spot):
    for coordinate, layout in spot.layouts():
        full = torch.ones_like(spot.slice_of(coordinate))
        chunks = layout.chunks_from_full(full, torch.float32)
        assert chunks.sum() == full.numel()
        rows = layout.tp_shape[layout.shard_dim]
        assert layout.is_padded == (rows % layout.gtp_size != 0)
        assert 0 <= layout.chunk * layout.gtp_size - rows < layout.gtp_size
        assert layout.gathered_numel == layout.gtp_size * math.prod(layout.chunk_shape)


@many
@given(spots())
def test_another_dtype_is_converted_while_packing(spot):
    for coordinate, layout in spot.layouts()[:2]:
        full = spot.slice_of(coordinate)
        chunks = layout.chunks_from_full(full, torch.float64)
        assert chunks.dtype == torch.float64
        assert torch.equal(layout.full_from_chunks(chunks), full.double())


@many
@given(spots(with_tp=False))
def test_a_gradient_that_needs_no_packing_is_not_copied(spot):
    for coordinate, layout in spot.layouts():
        full = spot.slice_of(coordinate).clone()
        is_same = layout.chunks_from_full(full, torch.float32).data_ptr() == full.data_ptr()
        # Uneven and inner-dim splits move elements
        if layout.shard_dim == 0:
            assert is_same == (not layout.is_padded)


@many
@given(spots())
def test_full_tensors_of_dim_0_shards_are_views_of_the_gathered_buffer(spot):
    for _, layout in spot.layouts()[:2]:
        buffer = torch.zeros(layout.gathered_shape)
        full = layout.full_from_chunks(buffer)
        assert full.shape == layout.tp_shape
        assert full.is_contiguous()
        if layout.shard_dim == 0 and full.numel():
            assert full.data_ptr() == buffer.data_ptr()


@many
@given(spots())
def test_a_dtensor_of_a_layout_has_its_shape_and_matches_it(spot):
    for coordinate, layout in spot.layouts()[:3]:
        stored = layout.dtensor(layout.slice_shard(spot.slice_of(coordinate)).clone())
        assert stored.shape == torch.Size(spot.shape)
        assert stored.stride() == contiguous_stride(spot.shape)
        assert stored.placements == layout.spec.placements
        assert layout.matches(stored)
        assert layout.dtensor(stored._local_tensor.double()).dtype == torch.float64


def test_a_dtensor_of_another_shape_or_placement_does_not_match():
    mesh = OfflineMesh((2,), ("gtp_remat",), 0)
    layout = offline_layout(mesh, (6, 4), 0, None)
    stored = layout.dtensor(torch.zeros(3, 4))
    assert layout.matches(stored)
    assert not offline_layout(mesh, (6, 5), 0, None).matches(stored)
    assert not offline_layout(mesh, (6, 4), 1, None).matches(stored)
    assert not offline_layout(mesh, (5, 4), 0, None).matches(stored)
    assert not offline_layout(OfflineMesh((2,), ("gtp_remat",), 1), (5, 4), 0, None).matches(stored)


def test_the_table_of_the_module_docstring_is_true():
    spot = Spot((("tp", 2), ("gtp_remat", 2)), (10,), 0, Shard(0))
    held = {c: layout.slice_shard(spot.slice_of(c)).tolist() for c, layout in spot.layouts()}
    assert held == {(0, 0): [0, 1, 2], (0, 1): [3, 4], (1, 0): [5, 6, 7], (1, 1): [8, 9]}


@pytest.mark.parametrize(
    ("axes", "tp_placement", "shard_dim", "expected"),
    [
        ((("tp", 2), ("gtp_remat", 3)), Shard(0), 0, "(Shard(dim=0), Shard(dim=0))"),
        ((("gtp_remat", 3), ("tp", 2)), Shard(0), 0, "(_StridedShard(dim=0, sf=2), Shard(dim=0))"),
        ((("gtp_remat", 3), ("tp", 2)), Shard(1), 0, "(Shard(dim=0), Shard(dim=1))"),
        ((("gtp_remat", 3), ("tp", 2)), Replicate(), 0, "(Shard(dim=0), Replicate())"),
        ((("gtp_remat", 3), ("tp", 1)), Shard(0), 0, "(Shard(dim=0), Shard(dim=0))"),
        ((("gtp_remat", 3), ("tp", 2)), Shard(0), None, "(Replicate(), Shard(dim=0))"),
        ((("dp", 2), ("gtp_remat", 3)), None, 1, "(Replicate(), Shard(dim=1))"),
    ],
)
def test_placements_of_known_meshes(axes, tp_placement, shard_dim, expected):
    mesh = OfflineMesh(tuple(size for _, size in axes), tuple(name for name, _ in axes), 0)
    assert str(combined_placements(mesh, tp_placement, shard_dim)) == expected


@given(st.integers(0, 30), st.integers(1, 9))
def test_chunk_bounds_are_those_of_torch_chunk(length, parts):
    ranges = [range(*chunk_bounds(length, parts, index)) for index in range(parts)]
    assert [i for part in ranges for i in part] == list(range(length))
    if length:
        sizes = [len(chunk) for chunk in torch.chunk(torch.empty(length), parts)]
        assert [len(part) for part in ranges] == sizes + [0] * (parts - len(sizes))


def test_axes_that_a_mesh_does_not_have_count_as_one():
    mesh = OfflineMesh((2, 3), ("dp", "gtp_remat"), 4)
    assert (axis_size(mesh, "tp"), axis_coordinate(mesh, "tp")) == (1, 0)
    assert (axis_size(mesh, "gtp_remat"), axis_coordinate(mesh, "gtp_remat")) == (3, 1)
    assert replicate_axes(mesh) == ("dp",)


def test_a_replicated_parameter_is_whole_on_every_rank():
    for _, layout in layouts_of_all_ranks((2, 2), ("dp", "gtp_remat"), (5, 3), None):
        assert layout.shard_shape == layout.tp_shape == (5, 3)
        assert not layout.is_padded
        assert layout.spec.placements == (Replicate(), Replicate())
        full = torch.rand(5, 3)
        assert layout.slice_shard(full) is full
