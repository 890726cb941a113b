"""Activation checkpointing and offloading around sharded weights: the numbers, the gathers and the memory.

A weight that is recomputed is gathered once more: in forward, for the recomputation, in backward. The last weight of
the forward is kept for the backward that follows at once, where autograd saves it.
"""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.dist.twin import (
    MESHES,
    REORDERED,
    assert_grads,
    check_twin,
    gather_meter,
    library_objects,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    settled_tensors,
    shard,
)
from tests.harness import current_double
from tests.reference import relative_error


class Block(nn.Module):
    def __init__(self, dim=6, hidden=10):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def save_matmuls(ctx, op, *args, **kwargs):
    is_matmul = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE


def plainly(block, x):
    return block(x)


def non_reentrant(block, x):
    return checkpoint(block, x, use_reentrant=False)


def without_early_stop(block, x):
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return checkpoint(block, x, use_reentrant=False)


def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


def selective(block, x):
    contexts = partial(create_selective_checkpoint_contexts, save_matmuls)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def offloaded(block, x):
    with torch.autograd.graph.save_on_cpu():
        return block(x)


def offloaded_inside(block, x):
    return checkpoint(offloaded, block, x, use_reentrant=False)


def nested(block, x):
    return checkpoint(non_reentrant, block, x, use_reentrant=False)


def nested_reentrant(block, x):
    return checkpoint(reentrant, block, x, use_reentrant=True)


def non_reentrant_in_reentrant(block, x):
    return checkpoint(non_reentrant, block, x, use_reentrant=True)


WAYS = [
    non_reentrant,
    without_early_stop,
    reentrant,
    selective,
    offloaded,
    offloaded_inside,
    nested,
    nested_reentrant,
    non_reentrant_in_reentrant,
]


class Stack(nn.Module):
    """Blocks, each called in a way of its own."""

    def __init__(self, *ways, build=Block):
        super().__init__()
        self.ways, self.blocks = ways, nn.ModuleList(build() for _ in ways)

    def forward(self, x):
        for way, block in zip(self.ways, self.blocks, strict=True):
            x = way(block, x)
        return x


def run(model, coordinate):
    # The input has a gradient, as after an embedding: reentrant checkpoints need one, and every weight is saved.
    model(randn(4, 6, seed=coordinate).requires_grad_()).square().mean().backward()


def gathers_of_a_step(model, rank=0, runner=run):
    with current_double().section() as calls:
        runner(model, rank)
    model.zero_grad()
    counts = Counter(call.op for call in calls)
    assert not current_double().outstanding()
    return counts["all_gather"], counts["reduce_scatter"]


# ---- parity


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@on_ranks(2)
def test_recomputed_blocks_have_the_gradients_of_the_plain_model(rank, world, way):
    check_twin(rank, world, seeded(lambda: Stack(way, way, way)), run)
    check_twin(rank, world, seeded(lambda: Stack(way, way)), run, prefetch=False, repeats=1)


@on_ranks(4)
def test_every_way_beside_every_other_has_the_gradients_of_the_plain_model(rank, world):
    for mesh in MESHES.values():
        check_twin(rank, world, seeded(lambda: Stack(*WAYS, plainly)), run, mesh=mesh(), rtol=REORDERED, repeats=2)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@on_ranks(2)
def test_recomputed_blocks_work_with_weights_kept_after_forward(rank, world, way):
    model = check_twin(rank, world, seeded(lambda: Stack(way, way)), run, reshard_after_forward=False)
    run(model, rank)
    assert not model._gtp.root.keepers


@pytest.mark.parametrize("way", [non_reentrant, reentrant])
@on_ranks(2)
def test_microbatches_of_recomputed_blocks_add_up(rank, world, way):
    def accumulate(model, coordinate):
        for sync in (False, False, True):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(sync)
            run(model, coordinate)

    check_twin(rank, world, seeded(lambda: Stack(way, plainly, way)), accumulate, rtol=REORDERED)


@on_ranks(2)
def test_random_numbers_are_the_same_in_the_recomputation(rank, world):
    def build():
        return nn.Sequential(nn.Linear(6, 10), nn.Dropout(0.5), nn.Linear(10, 6), nn.Dropout(0.5))

    def run_seeded(model, coordinate):
        torch.manual_seed(coordinate)
        run(model, coordinate)

    for way in (non_reentrant, reentrant, selective):
        check_twin(rank, world, seeded(lambda way=way: Stack(way, way, build=build)), run_seeded)


# ---- exact gathers

# Of 3 blocks with 2 weights each, from the second step on. "Saved": the last use of the forward is packed, and kept.
GATHERS = {
    plainly: 2 * 6 - 1,
    offloaded: 2 * 6 - 1,
    offloaded_inside: 2 * 6 - 1,  # only the innermost hooks of the caller apply: there is nothing to recompute
    # The kept weight serves the recomputation and the backward.
    non_reentrant: 3 * 6 - 2,
    without_early_stop: 3 * 6 - 2,
    selective: 3 * 6 - 2,
    nested: 3 * 6 - 2,  # the outer recomputation stops at the input of the inner one
    # The forward runs without a graph: nothing is saved, so nothing is kept.
    reentrant: 3 * 6,
    # Recomputed twice.
    nested_reentrant: 4 * 6,
    non_reentrant_in_reentrant: 4 * 6,
}


@pytest.mark.parametrize("way", GATHERS, ids=lambda way: way.__name__)
@on_ranks(2)
def test_a_recomputed_weight_is_gathered_exactly_once_more(rank, world, way):
    model = shard(Stack(way, way, way))
    gathers_of_a_step(model)
    for _ in range(3):
        assert gathers_of_a_step(model) == (GATHERS[way], 6)


@on_ranks(2)
def test_without_prefetching_every_use_is_one_gather(rank, world):
    for way, expected in {plainly: 12, non_reentrant: 18, reentrant: 18, nested: 18}.items():
        model = shard(Stack(way, way, way), prefetch=False)
        for _ in range(2):
            assert gathers_of_a_step(model) == (expected, 6), way.__name__


class Pair(nn.Module):
    """Two checkpointed blocks in a checkpoint: to recompute the second one, the first one is needed."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def run(self, x):
        for block in self.blocks:
            x = non_reentrant(block, x)
        return x

    def forward(self, x):
        return checkpoint(self.run, x, use_reentrant=False)


@on_ranks(2)
def test_what_is_recomputed_twice_is_gathered_twice_more(rank, world):
    model = check_twin(rank, world, seeded(Pair), run)
    for _ in range(2):
        assert gathers_of_a_step(model) == (4 * 2 + 3 * 2 - 2, 4)


@on_ranks(2)
def test_only_the_checkpointed_blocks_are_gathered_once_more(rank, world):
    """Every second block, of equal shapes: in the recomputation, weights far apart are neighbours."""
    for ways, expected in {
        (non_reentrant, plainly, non_reentrant, plainly): 2 * 8 - 1 + 4,
        (plainly, non_reentrant, plainly, non_reentrant): 2 * 8 - 1 + 4 - 1,
        (reentrant, plainly, reentrant, plainly): 2 * 8 - 1 + 4,
        (plainly, reentrant, plainly, reentrant): 2 * 8 + 4,
    }.items():
        model = check_twin(rank, world, seeded(lambda ways=ways: Stack(*ways)), run, repeats=2)
        assert gathers_of_a_step(model, rank) == (expected, 8), [way.__name__ for way in ways]


@on_ranks(2)
def test_the_hooks_of_others_never_see_a_gathered_weight(rank, world):
    """Offloading a gathered weight would move what the next gather brings anyway."""
    seen = []

    def watched(block, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t.shape) or t, lambda t: t):
            return block(x)

    plain, model = Stack(watched, watched), shard(Stack(watched, watched))
    run(plain, 0)
    of_plain = Counter(seen)
    for _ in range(2):
        seen.clear()
        run(model, 0)
        weights = Counter([torch.Size((6, 10)), torch.Size((10, 6))] * 2)
        assert of_plain - Counter(seen) == weights
        assert not Counter(seen) - of_plain


# ---- checkpoints inside of a module, over functions that read its weights


class ReadsOwnWeight(nn.Module):
    def __init__(self, dim=6, use_reentrant=False):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(dim, dim)), nn.Parameter(torch.randn(dim))
        self.inner, self.use_reentrant = nn.Linear(dim, dim), use_reentrant

    def part(self, x):
        return F.linear(torch.tanh(x), self.weight, self.bias)

    def forward(self, x):
        return checkpoint(self.part, self.inner(x), use_reentrant=self.use_reentrant)


class ReadsWeightOfChild(ReadsOwnWeight):
    def part(self, x):
        return F.linear(torch.tanh(x), self.inner.weight, self.bias) @ self.weight


class ReadsTwice(ReadsOwnWeight):
    def part(self, x):
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.mT, self.bias)


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", [ReadsOwnWeight, ReadsWeightOfChild, ReadsTwice])
@on_ranks(2)
def test_a_checkpointed_function_may_read_the_weights_of_its_module(rank, world, kind, use_reentrant):
    def build():
        return nn.Sequential(*(kind(use_reentrant=use_reentrant) for _ in range(3)))

    model = check_twin(rank, world, seeded(build), run, rtol=REORDERED)
    with gather_meter() as meter:
        run(model, rank)
        assert meter.live_count == 0
    # Read by a function that runs again: gathered for it in forward and in the recomputation, where the graph keeps
    # the weight for its backward, which follows at once. `inner` is an ordinary layer.
    if kind is ReadsOwnWeight:
        assert gathers_of_a_step(model, rank)[0] == 3 * (2 + 2)


# ---- calling conventions


@on_ranks(2)
def test_wrappers_put_on_before_or_after_sharding_are_the_same(rank, world):
    def build_wrapped(impl):
        model = Stack(plainly, plainly, plainly)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)
        return model

    keys = [*Stack(plainly, plainly, plainly).state_dict()]
    for impl in CheckpointImpl:
        names = [name for name, _ in build_wrapped(impl).named_parameters()]
        model = check_twin(rank, world, seeded(partial(build_wrapped, impl)), run)
        expected = plain_grads(seeded(partial(build_wrapped, impl)), run, world)
        late = shard(seeded(lambda: Stack(plainly, plainly, plainly))())
        apply_activation_checkpointing(
            late,
            checkpoint_wrapper_fn=partial(checkpoint_wrapper, checkpoint_impl=impl),
            check_fn=lambda module: isinstance(module, Block),
        )
        for wrapped in (model, late):
            assert [name for name, _ in wrapped.named_parameters()] == names
            assert [*wrapped.state_dict()] == keys
        for _ in range(2):
            run(late, rank)
            assert_grads(late, expected)
            assert gathers_of_a_step(late, rank)[1] == 6
            late.zero_grad()


@on_ranks(2)
def test_a_sequential_in_checkpointed_segments_equals_the_plain_model(rank, world):
    def run_segments(model, coordinate):
        x = randn(4, 6, seed=coordinate).requires_grad_()
        checkpoint_sequential(model, 2, x, use_reentrant=False).square().mean().backward()

    check_twin(rank, world, seeded(lambda: nn.Sequential(*(Block() for _ in range(4)))), run_segments)


@on_ranks(2)
def test_a_checkpoint_around_the_whole_model_equals_the_plain_model(rank, world):
    for use_reentrant in (False, True):

        def run_whole(model, coordinate, use_reentrant=use_reentrant):
            x = randn(4, 6, seed=coordinate).requires_grad_()
            checkpoint(model, x, use_reentrant=use_reentrant).square().mean().backward()

        check_twin(rank, world, seeded(lambda: Stack(plainly, plainly)), run_whole)


@on_ranks(2)
def test_a_checkpointed_block_may_run_twice_before_a_backward(rank, world):
    """As preference optimisation does with its two answers."""
    for way in (non_reentrant, reentrant):

        def run_twice(model, coordinate):
            first, second = (randn(4, 6, seed=coordinate + 9 * i).requires_grad_() for i in range(2))
            (model(first) * model(second)).mean().backward()

        check_twin(rank, world, seeded(lambda way=way: Stack(way, way)), run_twice, rtol=REORDERED)


@on_ranks(2)
def test_frozen_and_recomputed_weights_mix(rank, world):
    def freeze(model):
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.requires_grad_(False)
        model.blocks[2].down.requires_grad_(False)

    for way in (non_reentrant, reentrant, selective):
        check_twin(rank, world, seeded(lambda way=way: Stack(way, way, way)), run, prepare=freeze)


@on_ranks(2)
def test_autograd_grad_and_a_double_backward_pass_through_recomputed_blocks(rank, world):
    def penalise(model, coordinate):
        x = randn(4, 6, seed=coordinate).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().mean().backward()

    # A weight's gradient has two parts here, which are reduced on their own.
    build = seeded(lambda: Stack(non_reentrant, plainly, non_reentrant))
    check_twin(rank, world, build, penalise, rtol=REORDERED)


class PenaltyInForward(nn.Module):
    """A backward, with a recomputation, inside of a forward."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.discriminator, self.generator = Block(), Block()
        self.use_reentrant = use_reentrant

    def forward(self, x):
        fake = self.generator(x)
        blend = fake.detach().requires_grad_()
        (slope,) = torch.autograd.grad(non_reentrant(self.discriminator, blend).sum(), blend, create_graph=True)
        return checkpoint(self.discriminator, fake, use_reentrant=self.use_reentrant) + slope.square().sum()


@on_ranks(2)
def test_a_recomputation_may_run_inside_of_a_forward(rank, world):
    for use_reentrant in (False, True):
        check_twin(rank, world, seeded(partial(PenaltyInForward, use_reentrant)), run, rtol=REORDERED)


@on_ranks(2)
def test_the_output_of_a_recomputed_model_is_that_of_the_plain_model(rank, world):
    for way in WAYS:
        plain, model = (
            seeded(lambda way=way: Stack(way, way))(),
            shard(seeded(lambda way=way: Stack(way, way))()),
        )
        for context in (torch.enable_grad, torch.no_grad):
            with context():
                x = randn(4, 6).requires_grad_()
                assert relative_error(model(x), plain(x)) == 0, way.__name__


# ---- memory


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@on_ranks(2)
def test_twenty_steps_leave_nothing_behind(rank, world, way):
    with gather_meter() as meter:
        model = shard(Stack(way, plainly, way))
        sizes = []
        for step in range(22):
            run(model, rank)
            assert meter.live_count == 0
            model.zero_grad()
            if step in (1, 21):
                gc.collect()
                sizes.append((library_objects(), settled_tensors()))
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] <= sizes[0][1]  # the process is shared: what earlier tests left may go meanwhile


@pytest.mark.parametrize("way", [plainly, non_reentrant, reentrant, offloaded], ids=lambda way: way.__name__)
@on_ranks(2)
def test_the_peak_of_gathered_weights_does_not_grow_with_depth(rank, world, way):
    peaks = []
    for depth in (3, 6):
        with gather_meter() as meter:
            model = shard(Stack(*[way] * depth), lookahead_bytes=0)
            for _ in range(2):
                run(model, rank)
            meter.reset_peak()
            run(model, rank)
            peaks.append(meter.peak_count)
    assert peaks[0] == peaks[1]
    # In use and ahead; while a block is recomputed within a backward, one of the backward as well.
    assert peaks[0] <= (2 if way in (plainly, offloaded) else 3)
