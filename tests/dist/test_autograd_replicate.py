"""Gradients over the replicate axes: buckets that launch and land one apart, unsynchronised microbatches."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.dist.twin import (
    MESHES,
    REORDERED,
    assert_grads,
    check_twin,
    events,
    hybrid_mesh,
    on_ranks,
    plain_grads,
    randn,
    reduce_parts,
    seeded,
    shard,
    training_run,
)
from tests.harness import cached_mesh, count, current_double
from tests.models import CASES, MLP, RMSNorm

run_mlp = training_run("mlp")


@contextlib.contextmanager
def bucket_bytes(nbytes):
    """Models whose first forward runs inside have buckets of this size."""
    from torch_gtp import _replicate

    before, _replicate.BUCKET_BYTES = _replicate.BUCKET_BYTES, nbytes
    try:
        yield
    finally:
        _replicate.BUCKET_BYTES = before


ONE_PER_BUCKET = 1


# ---- buckets


@on_ranks(2)
def test_a_bucket_lands_after_the_next_one_is_launched(rank, world):
    """Biases of 10, 9 and 3 elements, a bucket each: from the first step on, without any prediction."""
    with bucket_bytes(ONE_PER_BUCKET):
        model = shard(CASES["mlp"].build())
        expected = plain_grads(CASES["mlp"].build, run_mlp, world)
        for _ in range(2):
            with events() as log:
                run_mlp(model, rank)
            assert [event for event in log if event.startswith(("reduce", "land bucket"))] == [
                "reduce 3",
                *("reduce 9", "land bucket of 4.bias"),
                *("reduce 10", "land bucket of 2.bias"),
                "land bucket of 0.bias",
            ]
            assert_grads(model, expected)
            model.zero_grad()


@on_ranks(4)
def test_a_bucket_of_weights_launches_when_its_last_reduce_scatter_has_landed(rank, world):
    """Shards of 32, 32 and 16 elements in two buckets: the first two, and the last."""
    with bucket_bytes(4 * (32 + 32)):
        model = shard(MLP(8, 8, 8, 4, bias=False), hybrid_mesh())
        for _ in range(2):
            with events() as log:
                model(randn(4, 8, seed=rank)).sum().backward()
        assert [event for event in log if not event.startswith(("gather", "wait"))] == [
            *("launch 4.weight", "launch 2.weight", "land 4.weight", "reduce 16"),
            *("launch 0.weight", "land 2.weight", "land 0.weight", "reduce 64"),
            *("land bucket of 4.weight", "land bucket of 0.weight"),
        ]


@pytest.mark.parametrize("nbytes", [1, 100, 200])
@on_ranks(4)
def test_bucket_sizes_change_nothing_but_the_number_of_collectives(rank, world, nbytes):
    with bucket_bytes(nbytes):
        check_twin(
            rank,
            world,
            CASES["attention_lm"].build,
            training_run("attention_lm"),
            mesh=hybrid_mesh(),
            rtol=REORDERED,
        )


@on_ranks(4)
def test_a_bucket_with_several_dtypes_reduces_each_in_its_own(rank, world):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(6, 6).bfloat16(), nn.Linear(6, 6)

        def forward(self, x):
            return self.high(self.low(x.bfloat16()).float())

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().sum().backward()

    model = check_twin(rank, world, seeded(Mixed), run, mesh=hybrid_mesh(), rtol=2**-7)  # sums in bfloat16
    assert model.low.weight.grad is None
    run(model, rank)
    assert {name: p.grad.dtype for name, p in model.named_parameters()} == {
        **dict.fromkeys(["low.weight", "low.bias"], torch.bfloat16),
        **dict.fromkeys(["high.weight", "high.bias"], torch.float32),
    }


# ---- set_requires_gradient_sync


def microbatches(model, coordinate, sync, seeds=(0, 1, 2), zero_after=None):
    for index, (seed, synchronise) in enumerate(zip(seeds, sync, strict=True)):
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(synchronise)
        model(randn(4, 6, seed=10 * coordinate + seed)).square().mean().backward()
        if index == zero_after:
            model.zero_grad()


@on_ranks(4)
def test_without_synchronisation_only_the_replicate_axes_are_skipped(rank, world):
    model = shard(CASES["mlp"].build(), hybrid_mesh())
    for sync in (True, False):
        model.set_requires_gradient_sync(sync)
        with current_double().section() as calls:
            run_mlp(model, rank)
        assert count(calls)["reduce_scatter"] == 3
        assert {call.group_size for call in calls if call.op == "reduce_scatter"} == {2}
        # One bucket of weights over dp, one of biases over both axes.
        assert sorted(call.group_size for call in calls if call.op == "all_reduce") == ([2, 4] if sync else [])
    model.set_requires_gradient_sync(True)


PATTERNS = {
    "last": (False, False, True),
    "first and last": (True, False, True),
    "last two": (False, True, True),
    "all": (True, True, True),
}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_last_synchronised_microbatch_completes_the_sum_of_all(mesh, pattern, reduction, run2, run4):
    (run4 if mesh == "dp" else run2)(synchronised_sum, mesh, pattern, reduction)


def synchronised_sum(rank, world, mesh, pattern, reduction):
    def run(model, coordinate):
        microbatches(model, coordinate, PATTERNS[pattern])

    check_twin(
        rank,
        world,
        CASES["mlp"].build,
        run,
        mesh=MESHES[mesh](),
        rtol=REORDERED,
        repeats=2,
        reduction=reduction,
    )


@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_zeroed_before_synchronisation_are_gone(mesh, run2, run4):
    (run4 if mesh == "dp" else run2)(zeroed_between, mesh)


def zeroed_between(rank, world, mesh):
    def run(model, coordinate):
        microbatches(model, coordinate, (False, False, True), zero_after=0)

    check_twin(rank, world, CASES["mlp"].build, run, mesh=MESHES[mesh](), rtol=REORDERED, repeats=2)

    def zero_in_place(model, coordinate):
        microbatches(model, coordinate, (False, False), seeds=(0, 1))
        model.zero_grad(set_to_none=False)
        microbatches(model, coordinate, (True,), seeds=(2,))

    check_twin(rank, world, CASES["mlp"].build, zero_in_place, mesh=MESHES[mesh](), rtol=REORDERED, repeats=2)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("nbytes", [ONE_PER_BUCKET, 1 << 20])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_parameter_used_only_without_synchronisation_is_reduced_at_the_end(mesh, nbytes, reduction, run2, run4):
    (run4 if mesh == "dp" else run2)(used_only_unsynchronised, mesh, nbytes, reduction)


def used_only_unsynchronised(rank, world, mesh, nbytes, reduction):
    def run(model, coordinate):
        for sync, go_left in ((False, True), (False, False), (True, False)):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(sync)
            model(randn(4, 10, seed=coordinate), go_left).square().mean().backward()

    with bucket_bytes(nbytes):
        model = check_twin(
            rank,
            world,
            CASES["conditional"].build,
            run,
            mesh=MESHES[mesh](),
            rtol=REORDERED,
            reduction=reduction,
        )
    with current_double().section() as calls:
        run(model, rank)
    # 7 biases, and with a replicate axis 7 weights: what the last backward reaches, and then the others.
    kinds = 2 if mesh == "dp" else 1
    assert count(calls)["all_reduce"] == (7 * kinds if nbytes == ONE_PER_BUCKET else 2 * kinds)


@on_ranks(2)
def test_a_backward_of_selected_inputs_loses_nothing_that_was_accumulated(rank, world):
    def run(model, coordinate):
        sharded = hasattr(model, "set_requires_gradient_sync")
        for sync in (False, True):
            if sharded:
                model.set_requires_gradient_sync(sync)
            loss = model(randn(4, 6, seed=coordinate + 7 * sync)).square().mean()
            loss.backward(inputs=[model[0].bias, model[2].weight] if sync else None)

    for nbytes in (ONE_PER_BUCKET, 1 << 20):
        with bucket_bytes(nbytes):
            check_twin(rank, world, CASES["mlp"].build, run, rtol=REORDERED)


@on_ranks(2)
def test_until_the_last_backward_unreached_gradients_wait(rank, world):
    """`set_is_last_backward(False)`: a later backward of the step may still reach them."""
    expected = plain_grads(CASES["conditional"].build, both_branches, world)
    model = shard(CASES["conditional"].build())
    with bucket_bytes(ONE_PER_BUCKET):
        model.set_requires_gradient_sync(False)
        model(randn(4, 10, seed=rank), True).square().mean().backward()
    local = model.left[0].bias.grad._local_tensor.clone()
    model.set_requires_gradient_sync(True)
    model.set_is_last_backward(False)
    with current_double().section() as calls:
        model(randn(4, 10, seed=rank), False).square().mean().backward()
    assert count(calls)["all_reduce"] == 5  # stem, right, head
    assert torch.equal(model.left[0].bias.grad._local_tensor, local)
    model.set_is_last_backward(True)
    with current_double().section() as calls:
        (model(randn(4, 10, seed=rank), False).square().mean() * 0).backward()
    assert count(calls)["all_reduce"] == 5 + 2
    assert_grads(model, expected, REORDERED)


def both_branches(model, coordinate):
    for go_left in (True, False):
        model(randn(4, 10, seed=coordinate), go_left).square().mean().backward()


@on_ranks(4)
def test_hooks_fire_in_unsynchronised_microbatches_with_what_this_rank_has(rank, world):
    model = shard(CASES["mlp"].build(), hybrid_mesh())
    fired = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    microbatches(model, rank, (False, False, True))
    assert sorted(fired) == sorted(3 * [name for name, _ in model.named_parameters()])

    def run(model, coordinate):
        microbatches(model, coordinate, (False, False, True))

    assert_grads(model, plain_grads(CASES["mlp"].build, run, world), REORDERED)


@on_ranks(4)
def test_unsynchronised_gradients_of_a_low_precision_model_are_kept_in_the_dtype_of_the_parameter(rank, world):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(CASES["mlp"].build(), hybrid_mesh(), mp=mp)
    microbatches(model, rank, (False, False), seeds=(0, 1))
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    microbatches(model, rank, (True,), seeds=(2,))
    assert {call.dtype for call in current_double().log if call.op != "all_gather"} == {torch.float32}

    parts = []
    for coordinate in range(world):
        total = {}
        for seed in range(3):
            plain = CASES["mlp"].build().bfloat16()
            plain(randn(4, 6, seed=10 * coordinate + seed).bfloat16()).square().mean().backward()
            for name, p in plain.named_parameters():
                total[name] = total.get(name, 0) + p.grad.float()
        parts.append(total)
    assert_grads(model, reduce_parts(parts), REORDERED)  # fp32 from each microbatch's gradient on


@on_ranks(2)
def test_a_penalty_may_be_accumulated_without_synchronisation(rank, world):
    def run(model, coordinate):
        for sync in (False, True):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(sync)
            x = randn(4, 6, seed=coordinate + 5 * sync).requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            slope.square().mean().backward()

    check_twin(rank, world, CASES["mlp"].build, run, rtol=REORDERED)


# ---- partial sums over the tensor-parallel axis


class SequenceModel(nn.Module):
    """Two branches with a norm each, whose input is split over the sequence: partial gradients over `tp`."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (
            nn.ModuleDict({"norm": RMSNorm(8), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}) for _ in range(2)
        )

    def forward(self, x, go_left):
        branch = self.left if go_left else self.right
        return branch["down"](torch.tanh(branch["up"](branch["norm"](x))))


def parallel_sequence_model(mesh, **options):
    from torch.distributed.tensor import Replicate, Shard

    model = seeded(SequenceModel)()
    plan = {}
    for branch in ("left", "right"):
        plan[f"{branch}.norm"] = SequenceParallel(sequence_dim=1)
        plan[f"{branch}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"{branch}.down"] = RowwiseParallel(output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], plan)
    return shard(model, mesh, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@on_ranks(4)
def test_partial_sums_over_tp_are_completed_in_every_pattern_of_microbatches(rank, world, reduction):
    def run(model, coordinate):
        for sync, go_left in ((True, True), (False, True), (False, False), (True, False)):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(sync)
            model(randn(2, 4, 8, seed=coordinate), go_left).square().mean().backward()

    mesh = cached_mesh((2, 2), ("tp", "gtp_remat"))
    expected = plain_grads(seeded(SequenceModel), run, 2, reduction)
    model = parallel_sequence_model(mesh, reduction=reduction)
    for repeat in range(2):
        run(model, mesh.get_local_rank("gtp_remat"))
        assert_grads(model, expected, REORDERED, f"gradients of run {repeat}")
        model.zero_grad()
