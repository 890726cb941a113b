"""The plan of `Muon`: owners, rounds and what travels, for all ranks of any mesh at once."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.flop_counter import FlopCounterMode

from tests.reference import shard_region
from tests.unit.offline_mesh import layouts_of_all_ranks
from torch_gtp.optim._newton_schulz import flops, orthogonalize
from torch_gtp.optim._plan import Holding, assign_owners, holding, make_plan, matrices_of, split_in_rounds


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_no_owner_has_more_than_the_mean_and_one_matrix(costs, ranks):
    loads = Counter()
    for cost, owner in zip(costs, assign_owners(costs, ranks), strict=True):
        loads[owner] += cost
    if costs:
        assert max(loads.values()) <= sum(costs) / ranks + max(costs) * (1 - 1 / ranks)


@pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5)])
def test_the_cost_of_a_matrix_is_what_pytorch_counts(shape):
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(shape), (3.0, -4.0, 2.0), 5, 1e-7)
    assert flops(*shape, 5) == counter.get_total_flops()


def test_orthogonalize_is_pytorchs_function_in_bf16():
    from torch.optim._muon import _zeropower_via_newtonschulz

    coefficients = (3.4445, -4.7750, 2.0315)
    for shape in ((8, 8), (5, 12), (12, 5), (1, 7)):
        matrix = torch.randn(shape)
        expected = _zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7)
        assert torch.equal(orthogonalize(matrix.bfloat16(), coefficients, 5, 1e-7), expected)


def test_orthogonalize_brings_singular_values_near_one():
    values = torch.linalg.svdvals(orthogonalize(torch.randn(20, 9), (3.4445, -4.7750, 2.0315), 5, 1e-7))
    assert values.min() > 0.6
    assert values.max() < 1.3


@st.composite
def sharded_parameters(draw):
    """A mesh, the parameters on it as every rank holds them, and their matrices."""
    names = draw(st.permutations(["dp", "tp", "gtp_remat"]))
    mesh_shape = draw(st.sampled_from([(1, 2, 2), (2, 2, 2), (3, 1, 2), (2, 3, 1), (1, 1, 4), (2, 1, 1)]))
    matrices, holdings, coordinates = [], [], list(itertools.product(*map(range, mesh_shape)))
    for index in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 9), min_size=2, max_size=3)))
        tp = draw(st.sampled_from([None, *map(Shard, range(len(shape)))]))
        shard_dim = draw(st.sampled_from([None, *range(len(shape))]))
        layouts = layouts_of_all_ranks(mesh_shape, tuple(names), shape, shard_dim, tp)
        spec = layouts[0][1].spec
        held = holding(shape, mesh_shape, spec.placements, coordinates)
        for (coordinate, layout), box in zip(layouts, held.boxes, strict=True):
            assert tuple(end - start for start, end in box) == tuple(layout.shard_shape)
            region = shard_region(shape, mesh_shape, spec.placements, coordinate)
            assert box == tuple((start, start + length) for start, length in region)
        cut = draw(st.integers(0, shape[-2]))
        matrices += matrices_of(index, shape, (cut, shape[-2] - cut), 5)
        holdings.append(held)
    return matrices, holdings, math.prod(mesh_shape)


def region_of(part):
    return (part.matrix, *((span.start, span.stop) for span in part.of_matrix))


@given(sharded_parameters(), st.integers(1, 200))
def test_every_element_is_collected_once_and_delivered_to_every_shard(drawn, round_numel):
    matrices, holdings, ranks = drawn
    plans = [make_plan(matrices, holdings, ranks, rank, round_numel) for rank in range(ranks)]
    assert all(plan.owners == plans[0].owners for plan in plans)
    assert len({len(plan.rounds) for plan in plans}) == 1
    computed = Counter(index for plan in plans for turn in plan.rounds for index in turn.mine)
    assert computed == dict.fromkeys(range(len(matrices)), 1)

    collected = {index: torch.zeros(matrix.shape) for index, matrix in enumerate(matrices)}
    delivered = [
        [torch.zeros([end - start for start, end in held.boxes[rank]]) for held in holdings] for rank in range(ranks)
    ]
    for turns in zip(*(plan.rounds for plan in plans), strict=True):
        assert len({len(turn.deliver) for turn in turns}) == 1
        for turn in turns:
            numels = [matrices[index].numel for index in turn.mine]
            assert len(numels) <= 1 or sum(numels) <= round_numel
            for part in turn.collect.matrices.parts:
                collected[part.matrix][part.of_matrix] += 1
        for hop in range(len(turns[0].deliver)):
            check_exchange([turn.deliver[hop] for turn in turns], [turn.mine for turn in turns], matrices)
            for rank, turn in enumerate(turns):
                for part in turn.deliver[hop].shards.parts:
                    delivered[rank][matrices[part.matrix].param][part.of_shard] += 1
    assert all((count == 1).all() for count in collected.values())
    assert all((count == 1).all() for shards in delivered for count in shards)


def check_exchange(exchanges, mine, matrices):
    """What one rank sends to another is what that one expects, in the same order; no buffer outgrows the matrices."""
    ranks = range(len(exchanges))
    most = max(sum(matrices[index].numel for index in each) for each in mine)
    for exchange in exchanges:
        assert sum(exchange.matrices.counts) <= most
        assert sum(exchange.shards.counts) <= sum(matrices[index].numel for each in mine for index in each)
    for owner, holder in itertools.product(ranks, ranks):
        sent, expected = exchanges[owner].matrices, exchanges[holder].shards
        assert sent.counts[holder] == expected.counts[owner]
        assert section(sent, holder) == section(expected, owner)


def section(side, peer):
    """The parts of one peer."""
    ends = list(itertools.accumulate(side.counts, initial=0))
    starts = itertools.accumulate((part.numel for part in side.parts), initial=0)
    return [region_of(part) for part, at in zip(side.parts, starts, strict=False) if ends[peer] <= at < ends[peer + 1]]


def test_a_buffer_of_shards_holds_no_more_than_the_owners_matrices_where_rows_divide():
    """One replica at a time: the buffers do not grow with the replicate axes."""
    coordinates = list(itertools.product(range(8), range(4)))
    held = holding((16, 8), (8, 4), (Replicate(), Shard(0)), coordinates)
    matrices = [matrix for index in range(64) for matrix in matrices_of(index, (16, 8), None, 5)]
    plan = make_plan(matrices, [held] * 64, 32, 0, 2 * 16 * 8)
    (turn,) = plan.rounds
    assert len(turn.deliver) == 8
    for exchange in turn.deliver:
        assert sum(exchange.shards.counts) == sum(exchange.matrices.counts) == 2 * 16 * 8


def test_rounds_take_the_costly_matrices_first():
    matrices = [matrix for size in (2, 8, 4) for matrix in matrices_of(0, (size, size), None, 5)]
    assert split_in_rounds(matrices, [0, 0, 1], 2, 1) == [[[1], [2]], [[0], []]]
    assert split_in_rounds(matrices, [0, 0, 1], 2, 68) == [[[1, 0], [2]]]


def test_an_empty_parameter_has_no_matrices():
    assert matrices_of(0, (0, 5), None, 5) == matrices_of(0, (2, 3, 0), None, 5) == []


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Partial(), Shard(0)), "not shards and replicas"),
        ((_StridedShard(0, split_factor=3), Shard(0)), "split factor"),
    ],
)
def test_placements_that_are_no_split_are_refused(placements, message):
    with pytest.raises(ValueError, match=message):
        holding((8, 8), (2, 2), placements, [(0, 0)])


def test_a_replicated_parameter_has_a_copy_per_rank():
    coordinates = list(itertools.product(range(2), range(3)))
    whole = ((0, 4), (0, 5))
    assert holding((4, 5), (2, 3), (Replicate(), Replicate()), coordinates) == Holding((whole,) * 6, tuple(range(6)), 6)
