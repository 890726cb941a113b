"""What is alive and when: gathered weights, graphs, models, and all of it after an exception."""

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
    shard,
    training_run,
)
from tests.harness import current_double, state_leaks
from tests.models import CASES, MLP, with_lora
from tests.reference import relative_error

run_mlp = training_run("mlp")


# ---- exceptions


class Boom(Exception):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise Boom


class Fragile(nn.Module):
    """Three blocks with a place to fail between any two layers; `fail` names it, as "forward 1" or "backward 0"."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.fail = ""

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.fail == f"forward {index}":
                raise Boom
            if self.fail == f"backward {index}":
                x = RaisesInBackward.apply(x)
        return x


def run_fragile(model, coordinate):
    model(randn(4, 7, seed=coordinate)).square().sum().backward()


@pytest.mark.parametrize("mesh", MESHES)
def test_training_goes_on_after_an_exception_as_if_there_had_been_none(mesh, run2, run4):
    (run4 if mesh == "dp" else run2)(exceptions, mesh, REORDERED if mesh == "dp" else 0.0)


def exceptions(rank, world, mesh, rtol):
    build = seeded(Fragile)
    expected = plain_grads(build, run_fragile, world)
    model = shard(build(), MESHES[mesh]())
    root = model._gtp.root
    for fail in (
        "forward 0",
        "backward 0",
        "",
        "forward 2",
        "backward 3",
        "backward 0",
        "forward 3",
        "backward 1",
    ):
        model.fail = fail
        with pytest.raises(Boom) if fail else contextlib.nullcontext():
            run_fragile(model, rank)
        assert not root.frames
        assert root.session is None
        model.fail = ""
        model.zero_grad()
        run_fragile(model, rank)
        assert_grads(model, expected, rtol, f"gradients after {fail or 'nothing'}")
        assert not (leaks := state_leaks(current_double())), f"after {fail}: {leaks}"
        model.zero_grad()


@on_ranks(2)
def test_after_a_failed_backward_the_optimizer_may_step_at_once(rank, world):
    """No forward comes between: the step itself gives up what the backward left."""
    build = seeded(Fragile)
    model, plain = shard(build()), build()
    for index, module in enumerate((model, plain)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        run_fragile(module, 0)
        module.zero_grad()
        module.fail = "backward 0"
        with pytest.raises(Boom):
            run_fragile(module, 0)
        if index == 0:
            # The weights behind the failure have landed, as in the plain model; later ones have no gradient.
            assert model.layers[3].weight.grad is not None
        assert module.layers[0].weight.grad is None
        module.zero_grad()
        optimizer.step()
        module.fail = ""
        run_fragile(module, 0)
    assert_grads(model, {name: p.grad for name, p in plain.named_parameters()})


@on_ranks(2)
def test_reset_iter_state_gives_up_what_an_exception_left_in_flight(rank, world):
    model = shard(seeded(Fragile)())
    run_fragile(model, rank)
    with gather_meter() as meter:
        for fail in ("forward 1", "backward 1"):
            model.fail = fail
            with pytest.raises(Boom):
                run_fragile(model, rank)
            model.reset_iter_state()
            assert meter.live_count == 0
            assert not current_double().outstanding()


@on_ranks(2)
def test_an_exception_in_a_hook_of_a_parameter_ends_the_backward_cleanly(rank, world):
    model = shard(CASES["mlp"].build())
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)

    def fail(*_):
        raise Boom

    run_mlp(model, rank)
    for name in ("4.weight", "2.bias", "0.weight"):
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            handle = getattr(model.get_parameter(name), register)(fail)
            with pytest.raises(Boom):
                run_mlp(model, rank)
            handle.remove()
            model.zero_grad()
            run_mlp(model, rank)
            assert_grads(model, expected, what=f"gradients after {register} of {name} failed")


@on_ranks(2)
def test_a_retained_graph_runs_again_after_it_failed(rank, world):
    class FailsOnce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            attempts.append(1)
            if len(attempts) == 1:
                raise Boom
            return grad

    attempts = []
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    model = shard(CASES["mlp"].build())
    run_mlp(model, rank)
    model.zero_grad()
    handle = model[1].register_forward_hook(lambda module, inputs, output: FailsOnce.apply(output))
    loss = CASES["mlp"].loss(model, CASES["mlp"].batch(2 * rank))
    handle.remove()
    with pytest.raises(Boom):
        loss.backward(retain_graph=True)
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert_grads(model, expected)
    model.reset_iter_state()  # the next forward would do it: what the failed backward left in flight is given up


@on_ranks(2)
def test_an_exception_in_evaluation_leaves_nothing(rank, world):
    model = shard(seeded(Fragile)())
    run_fragile(model, rank)
    with gather_meter() as meter:
        for context in (torch.no_grad, torch.inference_mode):
            model.fail = "forward 2"
            with context(), pytest.raises(Boom):
                model(randn(4, 7))
            assert meter.live_count == 0
            assert not state_leaks(current_double())
    model.fail = ""
    model.zero_grad()
    run_fragile(model, rank)
    assert_grads(model, plain_grads(seeded(Fragile), run_fragile, world))


# ---- several forwards and backwards


def losses(model, coordinate, count):
    return [model(randn(4, 6, seed=10 * coordinate + index)).square().mean() for index in range(count)]


def in_order(model, coordinate):
    first, second = losses(model, coordinate, 2)
    first.backward()
    second.backward()


def in_reverse(model, coordinate):
    first, second, third = losses(model, coordinate, 3)
    third.backward()
    first.backward()
    second.backward()


def summed(model, coordinate):
    sum(losses(model, coordinate, 2)).backward()


def roots_of_one_backward(model, coordinate):
    torch.autograd.backward(losses(model, coordinate, 3))


def one_dropped(model, coordinate):
    losses(model, coordinate, 3)[1].backward()


def evaluated_between(model, coordinate):
    (loss,) = losses(model, coordinate, 1)
    with torch.no_grad():
        losses(model, coordinate, 2)
    loss.backward()


def fed_back(model, coordinate):
    """The output of one call is part of the input of the next."""
    x = randn(4, 6, seed=coordinate)
    h = model(x)
    model(torch.cat([h, x[:, 3:]], dim=1)).square().sum().backward()


@pytest.mark.parametrize(
    "run", [in_order, in_reverse, summed, roots_of_one_backward, one_dropped, evaluated_between, fed_back]
)
@pytest.mark.parametrize("mesh", MESHES)
def test_several_forwards_before_a_backward_equal_the_plain_model(mesh, run, run2, run4):
    (run4 if mesh == "dp" else run2)(several_forwards, mesh, run)


def several_forwards(rank, world, mesh, run):
    check_twin(rank, world, CASES["mlp"].build, run, mesh=MESHES[mesh](), rtol=REORDERED)
    assert not current_double().outstanding()


# ---- the weights that a backward reads are those of its forward


@on_ranks(2)
def test_an_optimizer_step_between_forward_and_backward_is_an_error(rank, world):
    model, other = (shard(CASES["mlp"].build()) for _ in range(2))
    sgd, fused = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.optim.AdamW(model.parameters(), fused=True),
    )
    run_mlp(other, rank)
    for optimizer in (sgd, fused, sgd):
        run_mlp(model, rank)
        for loss in losses(model, rank, 1):
            torch.optim.SGD(other.parameters(), lr=0.1).step()  # another model's step is none of this one's
            optimizer.step()
            with pytest.raises(RuntimeError, match=r"(4|2)\.weight: the weight was modified .*optimizer step"):
                loss.backward()
        model.zero_grad()


@on_ranks(2)
def test_any_change_of_a_weight_between_forward_and_backward_is_an_error(rank, world):
    model = shard(CASES["mlp"].build())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def in_place():
        with torch.no_grad():
            model[2].weight.mul_(2)

    for change in (in_place, lambda: model.load_state_dict(state)):
        for _ in range(2):
            (loss,) = losses(model, rank, 1)
            change()
            with pytest.raises(RuntimeError, match=r"\.weight: the weight was modified"):
                loss.backward()
    model.zero_grad()
    (loss,) = losses(model, rank, 1)
    model.load_state_dict(state, assign=True)  # as in plain PyTorch, the graph has the tensors that it was made of
    loss.backward()


@on_ranks(2)
def test_a_step_after_the_backward_is_seen_by_the_next_forward(rank, world):
    """Fused and foreach optimizers leave no trace in version counters."""
    for implementation in ({"fused": True}, {"foreach": True}):
        model, plain = shard(CASES["mlp"].build()), CASES["mlp"].build()
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.1, eps=1e-3, **implementation) for m in (model, plain)]
        for _ in range(3):
            values = []
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                (loss,) = losses(module, 0, 1)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                values.append(loss)
            # A kernel may round the tail of a tensor otherwise than its vectors, and shards have other tails.
            assert relative_error(*values) <= 1e-5


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


def live_at(meter, log):
    """A function that notes the number of live weights when the gradient of its argument is known."""
    return lambda tensor: tensor.register_hook(lambda grad: log.append(meter.live_count)) and tensor


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
