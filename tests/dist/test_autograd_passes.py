"""Several forwards and backwards, passes that an exception ends, and weights that change between the two."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests.dist.twin import (
    MESHES,
    REORDERED,
    Boom,
    Fragile,
    assert_grads,
    check_twin,
    gather_meter,
    on_ranks,
    plain_grads,
    randn,
    run_fragile,
    seeded,
    shard,
    training_run,
)
from tests.harness import current_double, state_leaks
from tests.models import CASES
from tests.reference import relative_error

run_mlp = training_run("mlp")


# ---- exceptions


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
