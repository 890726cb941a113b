"""What is alive and when: gathered weights, graphs, and models."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dist.twin import (
    Boom,
    Fragile,
    assert_grads,
    gather_meter,
    library_objects,
    on_ranks,
    plain_grads,
    randn,
    run_fragile,
    seeded,
    shard,
    training_run,
)
from tests.harness import current_double
from tests.models import CASES, MLP, with_lora

run_mlp = training_run("mlp")


# ---- gathered weights


@on_ranks(2)
def test_nothing_gathered_survives_a_forward_or_a_backward_but_the_last_weight(rank, world):
    model = shard(MLP(8, 8, 8, 8, 8))
    with gather_meter() as meter:
        for step in range(3):
            loss = model(randn(4, 8)).sum()
            assert meter.live_count == (0 if step == 0 else 1)  # its backward follows at once
            loss.backward()
            assert meter.live_count == 0
            with torch.no_grad():
                model(randn(4, 8))
            assert meter.live_count == 0
        loss = model(randn(4, 8)).sum()
        with torch.no_grad():
            model(randn(4, 8))
        assert meter.live_count == 0  # another forward came first
        loss.backward()


class Watched(nn.Module):
    """Layers of equal size; notes how many weights are alive in forward and in backward after each."""

    def __init__(self, layers, meter, log):
        super().__init__()
        self.layers, self.meter, self.log = layers, meter, log

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.log.append(self.meter.live_count)
            if x.requires_grad:
                x.register_hook(lambda grad: self.log.append(self.meter.live_count))
        return x


@pytest.mark.parametrize("frozen", [(), range(8), range(1, 8), range(0, 8, 2), range(4, 8)], ids=str)
@on_ranks(2)
def test_memory_is_flat_in_depth_whatever_is_frozen(rank, world, frozen):
    """One weight in use and one ahead, in both directions. The shortest lookahead is one weight."""
    with gather_meter() as meter:
        log = []
        layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        for index in frozen:
            layers[index].requires_grad_(False)
        model = shard(Watched(layers, meter, log), lookahead_bytes=0)
        for _ in range(3):
            log.clear()
            meter.reset_peak()
            loss = model(randn(4, 8).requires_grad_()).sum()
            loss.backward()
            assert len(log) == 16
            assert meter.peak_count <= 2, log
            assert meter.live_count == 0
    grads = [layer.weight.grad is None for layer in layers]
    assert grads == [index in frozen for index in range(8)]


@on_ranks(2)
def test_a_frozen_weight_is_gathered_for_backward_only_where_a_gradient_passes_it(rank, world):
    model = shard(MLP(8, 8, 8, 8, 8, bias=False))
    for layer in (model[0], model[2]):
        layer.requires_grad_(False)
    for _ in range(2):
        model(randn(4, 8)).sum().backward()
    with current_double().section() as calls:
        model(randn(4, 8)).sum().backward()
    counts = Counter(call.op for call in calls)
    assert counts == {
        "all_gather": 4,
        "reduce_scatter": 2,
    }  # nothing before the first trained layer is read again
    with current_double().section() as calls:
        model(randn(4, 8).requires_grad_()).sum().backward()
    assert Counter(call.op for call in calls) == {"all_gather": 4 + 3, "reduce_scatter": 2}


@on_ranks(2)
def test_weights_may_be_frozen_and_thawed_between_steps(rank, world):
    model, plain = shard(CASES["mlp"].build()), CASES["mlp"].build()
    for names in ((), ("2.weight",), ("0.weight", "0.bias"), ("4.bias", "2.bias"), ()):
        for module in (model, plain):
            for name, param in module.named_parameters():
                param.requires_grad_(name not in names)
            run_mlp(module, 0)
        assert_grads(model, {name: p.grad for name, p in plain.named_parameters() if p.grad is not None})
        model.zero_grad()
        plain.zero_grad()


# ---- graphs and models


@contextlib.contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["mlp", "conditional", "tied_lm", "gan", "shared_block"])
@on_ranks(2)
def test_a_graph_is_freed_with_its_loss(rank, world, name):
    case = CASES[name]
    model = shard(case.build())
    for seed in range(2):
        case.loss(model, case.batch(seed)).backward()
    with without_collector():
        before = library_objects()
        for seed in range(6):  # odd and even: branches that a prediction gets wrong
            case.loss(model, case.batch(seed)).backward()
        assert library_objects() == before
        case.loss(model, case.batch(0))  # no backward at all
        with torch.no_grad():
            case.loss(model, case.batch(0)) if name != "gan" else model.reshard()
        assert library_objects() == before


@on_ranks(2)
def test_a_failed_pass_is_freed_with_its_exception(rank, world):
    model = shard(seeded(Fragile)())
    for _ in range(2):
        run_fragile(model, rank)
    with without_collector():
        before = library_objects()
        for fail in ("forward 1", "backward 1"):
            model.fail = fail
            with contextlib.suppress(Boom):
                run_fragile(model, rank)
            model.fail = ""
            run_fragile(model, rank)
        assert library_objects() == before


def train_once(model):
    run_mlp(model, 0)


def with_hooks(model):
    for param in model.parameters():
        param.register_hook(lambda grad: grad)
    run_mlp(model, 0)


def accumulated(model):
    model.set_requires_gradient_sync(False)
    run_mlp(model, 0)
    model.set_requires_gradient_sync(True)
    run_mlp(model, 0)


def checkpointed(model):
    checkpoint(model, randn(4, 6), use_reentrant=False).sum().backward()


def penalised(model):
    x = randn(4, 6).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters())
    run_mlp(model, 0)
    optimizer.step()


def gathered(model):
    with model.gathered():
        model(randn(4, 6))
    model.unshard()


@pytest.mark.parametrize(
    "use",
    [train_once, with_hooks, accumulated, checkpointed, penalised, stepped, gathered],
    ids=lambda f: f.__name__,
)
@on_ranks(2)
def test_a_model_is_freed_at_once_without_the_collector(rank, world, use):
    with without_collector():
        before = library_objects()
        model = shard(CASES["mlp"].build())
        use(model)
        use(model)
        references = [weakref.ref(thing) for thing in (model, model._gtp.root, *model.modules(), *model.parameters())]
        del model
        assert [reference() for reference in references] == [None] * len(references)
        assert library_objects() == before


@on_ranks(2)
def test_fast_weights_are_freed_with_their_graph(rank, world):
    """Shards with a history stood in for the parameters for one call: nothing may remember them."""
    with without_collector():
        before = library_objects()
        model = shard(CASES["mlp"].build())
        for _ in range(2):
            params = dict(model.named_parameters())
            grads = torch.autograd.grad(model(randn(4, 6)).sum(), list(params.values()), create_graph=True)
            fast = {name: p - grad for (name, p), grad in zip(params.items(), grads, strict=True)}
            torch.func.functional_call(model, fast, randn(4, 6)).sum().backward()
            references = [weakref.ref(tensor) for tensor in (*fast.values(), *grads)]
            del fast, grads, params
            assert [reference() for reference in references] == [None] * len(references)
        root = weakref.ref(model._gtp.root)
        del model
        assert root() is None
        assert library_objects() == before


@on_ranks(2)
def test_a_loss_keeps_what_it_needs_of_a_deleted_model(rank, world):
    """As in plain PyTorch: the backward of a graph whose model is gone still runs, and then everything is freed."""
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    with without_collector():
        before = library_objects()
        model = shard(CASES["mlp"].build())
        run_mlp(model, rank)
        model.zero_grad()
        params = dict(model.named_parameters())
        loss = CASES["mlp"].loss(model, CASES["mlp"].batch(2 * rank))
        del model
        loss.backward()
        holder = nn.ParameterDict({name.replace(".", "_"): p for name, p in params.items()})
        assert_grads(holder, {name.replace(".", "_"): grad for name, grad in expected.items()})
        del loss, params, holder
        assert library_objects() == before


@on_ranks(2)
def test_a_model_with_frozen_weights_and_adapters_is_freed_at_once(rank, world):
    with without_collector():
        before = library_objects()
        model = shard(with_lora(MLP(10, 14, 9)))
        for _ in range(2):
            model(randn(4, 10)).sum().backward()
        reference = weakref.ref(model._gtp.root)
        del model
        assert reference() is None
        assert library_objects() == before
