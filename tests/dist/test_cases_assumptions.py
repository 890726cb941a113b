"""What a design with one fixed, process-wide order of weights assumes, II: order, passes, membership, lifetime.

Stable identity, a deterministic order, a single pass at a time, fixed membership, no sharing, build once and run for
ever: here every one of them is broken, and the numbers stay those of the plain model.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from tests.dist.twin import (
    REORDERED,
    assert_grads,
    assert_local,
    check_twin,
    gather_meter,
    library_objects,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    settled_tensors,
    shard,
    training_run,
)
from tests.harness import current_double, state_leaks
from tests.models import CASES, MLP

run_mlp = training_run("mlp")


# ---- a deterministic, fixed order


class Wandering(nn.Module):
    """Layers of equal size, visited in any order, as often as the path says; stops early."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))

    def forward(self, x, path):
        for index in path:
            x = torch.tanh(self.layers[index](x))
        return x


PATHS = ["01234", "43210", "0", "2", "00", "0101", "01432", "024", "0123401234", "3", "01234", "31", "01234"]


@pytest.mark.parametrize("lookahead", [0, 1 << 20])
@on_ranks(2)
def test_any_order_of_layers_equals_the_plain_model_whatever_was_predicted(rank, world, lookahead):
    """Early exits, skipped experts, repeated and reversed layers: a wrong prediction costs a gather, never a value."""
    model = shard(seeded(Wandering)(), lookahead_bytes=lookahead)
    with gather_meter() as meter:
        for path in PATHS:

            def run(module, coordinate, path=path):
                module(randn(4, 6, seed=coordinate), [int(index) for index in path]).square().sum().backward()

            run(model, rank)
            # A layer that is used more often adds averages where the oracle averages sums.
            assert_grads(model, plain_grads(seeded(Wandering), run, world), REORDERED, f"gradients of {path}")
            assert meter.live_count == 0
            assert not (leaks := state_leaks(current_double())), f"{path}: {leaks}"
            model.zero_grad()


@on_ranks(2)
def test_after_a_detour_the_old_order_is_followed_again_without_a_wasted_gather(rank, world):
    model = shard(seeded(Wandering)())
    for path in ("01234", "01234", "03124", "01234", "01234"):
        with current_double().section() as calls:
            model(randn(4, 6), [int(index) for index in path]).sum().backward()
    # 5 in forward; in backward the last one is there, and the first one is not needed.
    assert sum(call.op == "all_gather" for call in calls) == 5 + 3


@on_ranks(2)
def test_layers_may_be_dropped_at_random_if_all_ranks_drop_the_same(rank, world):
    def run(module, coordinate, path):
        module(randn(4, 6, seed=coordinate), path).square().sum().backward()

    model = shard(seeded(Wandering)())
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        path = [index for index in range(5) if torch.rand((), generator=generator) < 0.6]
        if path:
            run(model, rank, path)
            expected = plain_grads(seeded(Wandering), lambda m, c, path=path: run(m, c, path), world)
            assert_grads(model, expected, what=f"gradients of {path}")
            model.zero_grad()


# ---- a single pass at a time


@on_ranks(2)
def test_one_model_may_run_inside_the_forward_of_another(rank, world):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(3, 3)
            self.inner = [CASES["mlp"].build()]  # not a submodule

        def forward(self, x):
            x = self.inner[0](self.first(x))
            with torch.no_grad():
                y = self.inner[0](torch.ones(4, 6))
            return self.last(x + y)

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().sum().backward()
        model.inner_grads = {n: p.grad for n, p in model.inner[0].named_parameters()}

    plain = seeded(Outer)()
    plains = [seeded(Outer)() for _ in range(world)]
    for coordinate, plain in enumerate(plains):
        run(plain, coordinate)
    expected = {n: sum(p.inner_grads[n] for p in plains) / world for n in plains[0].inner_grads}
    model = seeded(Outer)()
    shard(model)
    shard(model.inner[0])
    for _ in range(3):
        run(model, rank)
        assert_grads(model, plain_grads(seeded(Outer), run, world))
        assert_grads(model.inner[0], expected)
        model.zero_grad()
        model.inner[0].zero_grad()


@on_ranks(2)
def test_several_models_take_turns_and_one_of_them_is_deleted(rank, world):
    builds = {name: CASES[name].build for name in ("mlp", "tied_lm", "attention_lm")}
    models = {name: shard(build()) for name, build in builds.items()}
    expected = {name: plain_grads(build, training_run(name), world) for name, build in builds.items()}

    def check():
        graphs = []
        for name, model in models.items():  # all forwards, then all backwards, in the same order
            graphs.append(CASES[name].loss(model, CASES[name].batch(2 * rank)))
        for graph in graphs:
            graph.backward()
        del graph, graphs
        for name, model in models.items():
            assert_grads(model, expected[name], REORDERED)
            model.zero_grad()

    check()
    check()
    root = weakref.ref(models["tied_lm"]._gtp.root)
    del models["tied_lm"]
    gc.collect()
    assert root() is None
    check()
    models["tied_lm"] = shard(builds["tied_lm"]())
    check()
    check()


@on_ranks(2)
def test_one_backward_may_pass_through_two_models(rank, world):
    """An encoder under one root and a decoder under another, on the same mesh."""

    def build():
        return nn.ModuleDict({"encoder": MLP(6, 10, 6), "decoder": MLP(6, 8, 3)})

    def run(pair, coordinate):
        pair["decoder"](pair["encoder"](randn(4, 6, seed=coordinate))).square().sum().backward()

    pair = seeded(build)()
    for part in pair.values():
        shard(part)
    for _ in range(3):
        run(pair, rank)
        assert_grads(pair, plain_grads(seeded(build), run, world))
        pair.zero_grad()


@on_ranks(2)
def test_a_forward_may_run_inside_a_backward(rank, world):
    """A hook that evaluates the model, or another one, while gradients flow."""
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    model, other = shard(CASES["mlp"].build()), shard(CASES["mlp"].build(seed=1))
    plain = CASES["mlp"].build()

    def evaluate(grad):
        x = torch.ones(2, 6)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
            other(x)

    def evaluate_in_backward(module, args, out):
        if out.requires_grad:
            out.register_hook(evaluate)

    model[2].register_forward_hook(evaluate_in_backward)
    for _ in range(3):
        run_mlp(model, rank)
        assert_grads(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_microbatches_may_be_interleaved_as_in_pipelines(rank, world):
    """One forward, one backward, with four in flight; the first ones run without a graph, to infer shapes."""

    def run(model, coordinate):
        xs = [randn(4, 6, seed=10 * coordinate + micro) for micro in range(6)]
        with torch.no_grad():
            model(xs[0])
        flying = []
        for x in xs:
            flying.append(model(x).square().mean())
            if len(flying) == 4:
                flying.pop(0).backward()
        for loss in flying:
            loss.backward()

    model = check_twin(rank, world, CASES["mlp"].build, run, rtol=REORDERED)
    assert not model._gtp.root.keepers


# ---- fixed, single membership


@on_ranks(2)
def test_a_weight_may_change_its_context_between_steps(rank, world):
    """Recomputed in one step and not in the next; frozen, trained; called alone, from its root, from a parent's parent."""

    class Modes(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.mode = nn.ModuleList(MLP(6, 8, 6) for _ in range(2)), ""

        def forward(self, x):
            for block in self.blocks:
                if self.mode in ("reentrant", "checkpointed"):
                    x = checkpoint(block, x, use_reentrant=self.mode == "reentrant")
                else:
                    x = block(x)
            return x

    model = shard(seeded(Modes)())
    plan = ("", "checkpointed", "frozen", "reentrant", "alone", "", "frozen", "checkpointed", "no grad", "")
    for mode in plan:

        def run(module, coordinate, mode=mode):
            module.mode = mode
            module.blocks[0].requires_grad_(mode != "frozen")
            x = randn(4, 6, seed=coordinate).requires_grad_()
            if mode == "no grad":
                with torch.no_grad():
                    module(x)
            (module.blocks[1] if mode == "alone" else module)(x).square().sum().backward()

        run(model, rank)
        assert_grads(model, plain_grads(seeded(Modes), run, world), what=f"gradients in mode {mode!r}")
        model.zero_grad()


@on_ranks(2)
def test_a_block_sharded_alone_becomes_part_of_the_root_of_its_parent(rank, world):
    model = CASES["attention_lm"].build()
    run = training_run("attention_lm")
    expected = plain_grads(CASES["attention_lm"].build, run, world)
    shard(model.layers[0])
    alone = model.layers[0]._gtp.root
    x = randn(2, 4, 16)
    model.layers[0](x).sum().backward()
    model.layers[0].zero_grad()
    shard(model)
    assert model.layers[0]._gtp.root is model._gtp.root is not alone
    assert model._gtp.root.params[1].fqn == "layers.0.attention_norm.weight"
    for _ in range(3):
        run(model, rank)
        assert_grads(model, expected)
        model.zero_grad()
    with current_double().section() as calls:
        run(model, rank)
    assert sum(call.op == "all_gather" for call in calls) == 16 + 15 - 1  # one order over the whole model


# ---- build once, run for ever


@on_ranks(2)
def test_twenty_models_built_used_and_deleted_leave_nothing(rank, world):
    x = randn(4, 6)
    plain = CASES["mlp"].build()
    sizes = []
    with gather_meter() as meter:
        for repeat in range(22):
            model = shard(CASES["mlp"].build())
            optimizer = torch.optim.AdamW(model.parameters())
            assert torch.equal(model(x), plain(x))  # nothing of the previous model is gathered in its place
            run_mlp(model, rank)
            optimizer.step()
            model(x)
            del model, optimizer
            assert meter.live_count == 0
            if repeat in (1, 21):
                gc.collect()
                hooks = len(_global_optimizer_pre_hooks)
                sizes.append(((library_objects(), hooks), settled_tensors()))
    assert sizes[0][0] == sizes[1][0]
    assert sizes[1][1] <= sizes[0][1]  # the process is shared: what earlier tests left may go meanwhile


@on_ranks(2)
def test_a_model_that_is_being_deleted_does_not_disturb_one_that_runs(rank, world):
    first = shard(CASES["mlp"].build())
    loss = CASES["mlp"].loss(first, CASES["mlp"].batch(2 * rank))
    params = list(first.named_parameters())
    second = shard(CASES["mlp"].build(seed=1))
    del first
    run_mlp(second, rank)
    loss.backward()
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    assert_local({name: p.grad for name, p in params}, expected)
    other = plain_grads(lambda: CASES["mlp"].build(seed=1), run_mlp, world)
    assert_grads(second, other)
