"""What the library says when ranks go different ways, and what it tells about a model that works."""

from __future__ import annotations

import datetime
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.dist.twin import assert_grads, gather_mesh, hybrid_mesh, on_ranks, plain_grads, randn, seeded, shard
from tests.harness import cached_mesh, current_double
from tests.models import CASES, MLP
from torch_gtp import GTPPolicy, WeightPlan, gtp_shard
from torch_gtp.debug import explain

# Ranks run different programs here, so each completes its transfers in order
different_programs = functools.partial(on_ranks, shuffle=False, check_leaks=False)


class Branches(nn.Module):
    """Which weights it uses, and in which order, is an argument."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(6, 6, bias=False) for name in "abc"})

    def forward(self, x, order):
        for name in order:
            x = F.gelu(self.parts[name](x))
        return x


def checked():
    return shard(seeded(Branches)(), check=True)


def step(model, order, seed=0):
    model(randn(2, 6, seed=seed).requires_grad_(), order).square().mean().backward()


def failure_of(run):
    with pytest.raises(RuntimeError) as caught:
        run()
    return str(caught.value)


# ---- ranks that disagree


def assert_explains(message, *lines):
    assert "ranks of one gtp_remat group do different things" in message
    assert "the same weights in the same order" in message
    assert [line.strip() for line in message.splitlines()[1:]] == list(lines)


@different_programs(2)
def test_another_weight_on_another_rank_is_named_on_every_rank(rank, world):
    message = failure_of(lambda: step(checked(), "ab" if rank == 0 else "ba"))
    assert_explains(
        message,
        "gtp_remat rank 0: forward gather of parts.a.weight",
        "gtp_remat rank 1: forward gather of parts.b.weight",
    )


@different_programs(2)
def test_a_rank_that_leaves_a_forward_early_is_named_on_every_rank(rank, world):
    model = checked()

    def forward():
        with torch.no_grad():
            model(randn(2, 6), "abc" if rank == 0 else "ab")

    assert_explains(
        failure_of(forward),
        "gtp_remat rank 0: forward gather of parts.c.weight",
        "gtp_remat rank 1: end of pass",
    )


@different_programs(2)
def test_a_rank_without_a_backward_is_named_on_every_rank(rank, world):
    model = checked()
    x = randn(2, 6).requires_grad_()

    def run():
        loss = model(x, "ab").square().mean()
        if rank == 0:
            loss.backward()
        else:
            model(x, "ab")

    assert_explains(
        failure_of(run),
        "gtp_remat rank 0: backward gather of parts.b.weight",
        "gtp_remat rank 1: forward gather of parts.a.weight",
    )


@different_programs(2)
def test_a_frozen_weight_on_one_rank_is_named_on_every_rank(rank, world):
    model = checked()
    if rank == 1:
        model.parts["b"].weight.requires_grad_(False)
    message = failure_of(lambda: step(model, "ab"))
    assert "gtp_remat rank 0: gradient reduction of parts.b.weight" in message
    assert "gtp_remat rank 1: " in message
    assert "rank 1: gradient reduction of parts.b" not in message


@different_programs(2)
def test_ranks_that_agree_again_go_on_after_a_disagreement(rank, world):
    model = checked()
    step(model, "abc")
    model.zero_grad()
    failure_of(lambda: step(model, "abc" if rank == 0 else "acb"))
    model.reset_iter_state()
    expected = plain_grads(seeded(Branches), lambda model, coordinate: step(model, "abc", coordinate), world)
    step(model, "abc", seed=rank)
    assert_grads(model, expected)


@on_ranks(4)
def test_ranks_of_different_gather_groups_may_go_different_ways(rank, world):
    """Only a gather group must agree; with a hybrid mesh the reduction over the other axis must match in the end."""
    model = shard(seeded(Branches)(), hybrid_mesh(), check=True)
    mine = hybrid_mesh().get_local_rank("dp")
    with torch.no_grad():
        model(randn(2, 6), "ab" if mine == 0 else "cba")


# ---- ranks that never come


@functools.cache
def impatient_mesh():
    ranks = list(range(dist.get_world_size()))
    group = dist.new_group(ranks, timeout=datetime.timedelta(seconds=0.5))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("gtp_remat",))


@on_ranks(2, double=False)
def test_a_collective_that_times_out_names_its_weight(rank, world):
    model = gtp_shard(seeded(Branches)(), impatient_mesh(), policy=GTPPolicy(min_shard_numel=1, prefetch=False))
    if rank == 1:
        return
    message = failure_of(lambda: step(model, "ba"))
    assert "torch_gtp: the forward gather of parts.b.weight did not complete" in message
    assert "GTPPolicy(check=True)" in message


# ---- explain


def two_blocks():
    return nn.Sequential(MLP(6, 10, 6), MLP(6, 8, 3))


@on_ranks(4)
def test_a_report_names_every_parameter_with_its_layout_and_bytes(rank, world):
    mesh = hybrid_mesh()
    model = shard(two_blocks(), mesh, plan={"1.0.weight": WeightPlan(shard_dim=1)})
    report = explain(model)
    by_name = {weight.fqn: weight for weight in report.weights}
    assert list(by_name) == [name for name, _ in model.named_parameters()]
    first = by_name["0.0.weight"]
    assert (first.shape, first.sharded, first.placements) == ((10, 6), True, "[R, S(0)]")
    assert (first.shard_bytes, first.full_bytes) == (4 * 5 * 6, 4 * 10 * 6)
    assert by_name["1.0.weight"].placements == "[R, S(1)]"
    bias = by_name["0.0.bias"]
    assert (bias.sharded, bias.shard_bytes, bias.hidden_behind) == (False, 40, "no gather")
    assert report.axes == {"dp": 2, "gtp_remat": 2}
    assert report.sharded_count == 4
    plain = sum(4 * p.numel() for p in two_blocks().parameters())
    assert report.bytes_plain == plain
    assert report.bytes_sharded == sum(p.to_local().nbytes for p in model.parameters())


@on_ranks(2)
def test_padding_shows_in_what_is_gathered(rank, world):
    report = explain(shard(MLP(6, 9, 3), gather_mesh()))
    assert {weight.fqn: weight.full_bytes for weight in report.weights if weight.sharded} == {
        "0.weight": 4 * 10 * 6,
        "2.weight": 4 * 4 * 9,
    }


@on_ranks(2)
def test_the_chains_fill_in_with_use(rank, world):
    model = shard(two_blocks())
    before = explain(model)
    assert {(w.forward, w.backward, w.hidden_behind) for w in before.weights if w.sharded} == {("-", "-", "-")}
    assert before.lookahead_bytes == 0
    model(randn(2, 6)).sum().backward()
    after = {weight.fqn: weight for weight in explain(model).weights}
    assert [after[f"{name}.weight"].forward for name in ("0.0", "0.2", "1.0", "1.2")] == ["0", "1", "2", "3"]
    # The first input needs no gradient, so its weight is not needed in backward
    backward = [after[f"{name}.weight"].backward for name in ("0.0", "0.2", "1.0", "1.2")]
    assert backward == ["-", "2", "1", "0"]
    assert after["0.0.weight"].hidden_behind == "nothing (first)"
    assert after["1.0.weight"].hidden_behind == "0.2.weight"


@on_ranks(2)
def test_a_weight_that_is_used_twice_shows_both_places(rank, world):
    case = CASES["shared_block"]
    model = shard(case.build())
    case.loss(model, case.batch(0)).backward()
    by_name = {weight.fqn: weight for weight in explain(model).weights}
    assert by_name["block.0.weight"].forward == "0,3"
    assert by_name["between.weight"].forward == "2"


@on_ranks(2)
def test_the_memory_line_is_one_weight_and_the_lookahead(rank, world):
    model = shard(two_blocks())
    model(randn(2, 6)).sum().backward()
    report = explain(model)
    block = 4 * (10 * 6 + 6 * 10)  # the larger block
    assert report.lookahead_bytes == block
    assert report.gathered_bytes == 4 * 10 * 6 + block
    assert report.fsdp2_gathered_bytes == 2 * block
    bounded = shard(two_blocks(), lookahead_bytes=10)
    bounded(randn(2, 6))
    report = explain(bounded)
    assert report.lookahead_bytes == 10
    assert report.gathered_bytes == 2 * 4 * 10 * 6  # at least one weight is always gathered ahead


@on_ranks(2)
def test_a_report_prints_as_a_table_with_its_totals(rank, world):
    model = shard(two_blocks())
    model(randn(2, 6)).sum().backward()
    text = str(explain(model))
    header, *rows = text.splitlines()
    assert header.split()[:3] == ["parameter", "shape", "placements"]
    assert [row.split()[0] for row in rows[:8]] == [name for name, _ in model.named_parameters()]
    assert "10x6" in rows[0]
    assert "4 of 8 parameters sharded; axes: gtp_remat=2" in text
    assert "gathered at most: 720 B, of it 480 B ahead" in text
    assert "gathered by FSDP2 per block (two blocks): 960 B" in text
    assert "policy: GTPPolicy(" in text
    assert all(line == line.rstrip() for line in text.splitlines())


@on_ranks(2)
def test_explaining_communicates_nothing_and_works_without_prefetch(rank, world):
    model = shard(two_blocks(), prefetch=False)
    model(randn(2, 6)).sum().backward()
    with current_double().section() as calls:
        report = explain(model)
    assert calls == []
    assert {weight.hidden_behind for weight in report.weights if weight.sharded} == {"nothing (first)"}


@on_ranks(4)
def test_a_report_of_a_tensor_parallel_model_counts_the_slice_of_this_rank(rank, world):
    mesh = cached_mesh((2, 2), ("tp", "gtp_remat"))
    case = CASES["mlp_even"]
    model = case.build()
    parallelize_module(model, mesh["tp"], case.plan())
    report = explain(shard(model, mesh))
    by_name = {weight.fqn: weight for weight in report.weights}
    up = by_name["0.weight"]  # 16 x 8 by rows: 8 x 8 per tp rank, 4 x 8 stored
    assert (up.shape, up.shard_bytes, up.full_bytes) == ((16, 8), 4 * 4 * 8, 4 * 8 * 8)
    assert up.placements == "[S(0), S(0)]"
    assert by_name["2.weight"].placements == "[S(1), S(0)]"
