"""Weights that stay gathered beyond one use: `unshard`, `gathered`, `reshard_after_forward`, `set_is_last_backward`."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.dist.twin import (
    assert_grads,
    gather_mesh,
    gather_meter,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    shard,
)
from tests.harness import cached_mesh, count, current_double
from tests.models import CASES, MLP, TiedLM
from tests.reference import gather_full_dict

WEIGHTS = 3
build = seeded(lambda: MLP(6, 10, 9, 3))


def run(model, coordinate):
    model(randn(4, 6, seed=coordinate)).square().mean().backward()


def gathers(calls):
    return count(calls)["all_gather"]


def output_of(params, x=None):
    """What the plain model with these full parameters computes."""
    model = build()
    model.load_state_dict(params)
    with torch.no_grad():
        return model(randn(4, 6) if x is None else x)


@contextlib.contextmanager
def counting():
    found = {}
    with current_double().section() as calls:
        yield found
    found.update(count(calls))


# ---- unshard and reshard


@on_ranks(2)
def test_unsharded_weights_serve_forwards_and_backwards_without_a_gather(rank, world):
    model, expected = shard(build()), plain_grads(build, run, world)
    with counting() as found:
        model.unshard()
    assert found == {"all_gather": WEIGHTS}
    for _ in range(2):
        with counting() as found:
            run(model, rank)
        assert found == {"reduce_scatter": WEIGHTS, "all_reduce": 1}
        assert_grads(model, expected)
        model.zero_grad()
    with counting() as found:
        model.unshard()
    assert found == {}


@on_ranks(2)
def test_resharding_frees_the_memory_and_gathers_return(rank, world):
    model = shard(build())
    with gather_meter() as meter:
        model.unshard()
        assert meter.live_count == WEIGHTS
        model.reshard()
        assert meter.live_count == 0
    with counting() as found:
        run(model, rank)
    assert found["all_gather"] > WEIGHTS
    assert_grads(model, plain_grads(build, run, world))


@on_ranks(2)
def test_an_asynchronous_unshard_is_in_flight_until_it_is_waited_for(rank, world):
    model, double = shard(build()), current_double()
    handle = model.unshard(async_op=True)
    assert len(double.outstanding()) == WEIGHTS
    handle.wait()
    handle.wait()
    assert double.problems() == []
    with counting() as found:
        run(model, rank)
    assert "all_gather" not in found
    assert_grads(model, plain_grads(build, run, world))


@on_ranks(2)
def test_a_forward_may_take_what_an_asynchronous_unshard_is_gathering(rank, world):
    model = shard(build())
    handle = model.unshard(async_op=True)
    run(model, rank)
    handle.wait()
    assert_grads(model, plain_grads(build, run, world))
    assert current_double().problems() == []


@on_ranks(2)
def test_unsharding_a_part_keeps_only_that_part(rank, world):
    model = shard(nn.Sequential(shard(MLP(6, 10, 6)), shard(MLP(6, 8, 3))))
    model[1].unshard()
    with counting() as found, torch.no_grad():
        model(randn(2, 6))
    assert found == {"all_gather": 2}
    model[0].reshard()
    with counting() as found, torch.no_grad():
        model(randn(2, 6))
    assert found == {"all_gather": 2}
    model.reshard()
    with counting() as found, torch.no_grad():
        model(randn(2, 6))
    assert found == {"all_gather": 4}


def step_of_sgd(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run(model, 0)
    optimizer.step()


def step_of_adam(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, foreach=True)
    run(model, 0)
    optimizer.step()


def load(model):
    other = MLP(6, 10, 9, 3)
    torch.nn.init.constant_(other[0].weight, 0.25)
    model.load_state_dict(shard(other).state_dict())


def assign(model):
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)


def write_in_place(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)


def initialise(model):
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.1)


def write_shard(model):
    for parameter in model.parameters():
        parameter.to_local().detach().mul_(3)


def replace(model):
    model[0].weight = nn.Parameter(model[0].weight.detach() + 1)


def set_data(model):
    model[0].weight.data = model[0].weight.detach() + 1


CHANGES = [step_of_sgd, step_of_adam, load, assign, write_in_place, initialise, write_shard, replace, set_data]


@pytest.mark.parametrize("change", range(len(CHANGES)), ids=[change.__name__ for change in CHANGES])
@on_ranks(2)
def test_an_unsharded_weight_is_never_older_than_its_shard(rank, world, change):
    model = shard(build())
    model.unshard()
    CHANGES[change](model)
    with torch.no_grad():
        ours = model(randn(4, 6))
    assert torch.equal(ours, output_of(gather_full_dict(model.state_dict())))


@on_ranks(2)
def test_unsharding_twice_after_a_change_gathers_again(rank, world):
    model = shard(build())
    model.unshard()
    write_in_place(model)
    model.unshard()
    with counting() as found, torch.no_grad():
        ours = model(randn(4, 6))
    assert found == {}
    assert torch.equal(ours, output_of(gather_full_dict(model.state_dict())))


# ---- reshard_after_forward=False


@on_ranks(2)
def test_weights_kept_from_forward_to_backward_are_gathered_once(rank, world):
    model, expected = shard(build(), reshard_after_forward=False), plain_grads(build, run, world)
    for _ in range(3):
        with gather_meter() as meter, counting() as found:
            loss = model(randn(4, 6, seed=rank)).square().mean()
            assert meter.live_count == WEIGHTS - 1  # the first input needs no gradient: its weight is not needed again
            loss.backward()
            assert meter.live_count == 0
        assert found == {"all_gather": WEIGHTS, "reduce_scatter": WEIGHTS, "all_reduce": 1}
        assert_grads(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_kept_weights_do_not_survive_an_optimizer_step_or_the_next_forward(rank, world):
    model = shard(build(), reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    run(model, rank)
    with gather_meter() as meter:
        graph = model(randn(4, 6))
        assert meter.live_count == WEIGHTS - 1
        optimizer.step()
        assert meter.live_count == 0
        del graph
        with torch.no_grad():
            ours = model(randn(4, 6))
        assert meter.live_count == 0  # nothing is kept where no backward can follow
    assert torch.equal(ours, output_of(gather_full_dict(model.state_dict())))


@pytest.mark.parametrize("keep", [False, True])
@on_ranks(2)
def test_backwards_that_are_not_the_last_leave_kept_weights(rank, world, keep):
    """Two forwards, then two backwards: the second one finds the weights that the first one left."""
    model = shard(build(), reshard_after_forward=False)
    run(model, rank)
    model.zero_grad()
    losses = [model(randn(4, 6, seed=rank + 2 * micro)).square().mean() for micro in range(2)]
    with gather_meter() as meter, counting() as found:
        model.set_is_last_backward(not keep)
        losses[0].backward()
        model.set_is_last_backward(True)
        losses[1].backward()
        assert meter.live_count == 0
    assert found.get("all_gather", 0) == (0 if keep else WEIGHTS - 1)

    def both(model, coordinate):
        for micro in range(2):
            run(model, coordinate + 2 * micro)

    assert_grads(model, plain_grads(build, both, world), 1e-6)  # two microbatches, averaged before they are added


# ---- gathered


@on_ranks(2)
def test_everything_is_full_and_plain_inside_gathered_and_as_before_outside(rank, world):
    model, plain = shard(build()), build()
    stored = dict(model.named_parameters())
    keys = list(model.state_dict())
    with model.gathered():
        assert list(model.state_dict()) == keys
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert type(ours) is nn.Parameter, name
            assert not ours.requires_grad
            assert torch.equal(ours, theirs), name
            assert torch.equal(model.get_parameter(name), model.state_dict()[name])
    assert all(now is stored[name] for name, now in model.named_parameters())
    assert all(isinstance(p, DTensor) and p.requires_grad for p in model.parameters())
    assert isinstance(model[0].weight, nn.Parameter)


@on_ranks(2)
def test_what_is_written_inside_gathered_is_written_back(rank, world):
    model, plain = shard(build()), build()
    checkpoint = {name: value + 1 for name, value in plain.state_dict().items()}
    with model.gathered():
        model.load_state_dict(checkpoint)
    assert all(torch.equal(value, checkpoint[name]) for name, value in gather_full_dict(model.state_dict()).items())
    with model.gathered():
        torch.manual_seed(7)
        for module in model:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    torch.manual_seed(7)
    for module in plain:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    ours = gather_full_dict(model.state_dict())
    assert all(torch.equal(ours[name], value) for name, value in plain.state_dict().items())
    run(model, rank)  # not a gathered value of before


@on_ranks(2)
def test_what_was_written_before_an_exception_is_written_back_too(rank, world):
    model = shard(build())
    with contextlib.suppress(KeyError), model.gathered():
        with torch.no_grad():
            model[0].bias.fill_(4)
            model[0].weight.fill_(5)
        raise KeyError
    ours = gather_full_dict(model.state_dict())
    assert ours["0.bias"].eq(4).all()
    assert ours["0.weight"].eq(5).all()
    run(model, rank)


@on_ranks(2)
def test_ranks_may_call_a_gathered_model_a_different_number_of_times(rank, world):
    """As `generate` does, whose texts end when they end. One collective more on one rank would hang."""
    model, plain = shard(build()), build()
    with counting() as found, model.gathered(), torch.no_grad():
        for length in range(1, 3 + 4 * rank):
            x = randn(length, 6, seed=rank)
            assert torch.equal(model(x), plain(x))
    assert found == {"all_gather": WEIGHTS}
    run(model, rank)
    assert_grads(model, plain_grads(build, run, world))


@on_ranks(2)
def test_no_gradient_flows_inside_gathered(rank, world):
    model = shard(build())
    x = randn(2, 6).requires_grad_()
    with model.gathered():
        model(x).sum().backward()  # inputs still get theirs, as for any frozen model
    assert x.grad is not None
    assert all(p.grad is None for p in model.parameters())


@on_ranks(2)
def test_gathering_a_part_leaves_the_rest(rank, world):
    model = shard(nn.Sequential(shard(MLP(6, 10, 6)), MLP(6, 8, 3)))
    with model[0].gathered():
        assert not isinstance(model[0][0].weight, DTensor)
        assert isinstance(model[1][0].weight, DTensor)
        with counting() as found, torch.no_grad():
            model(randn(2, 6))
        assert found == {"all_gather": 2}


@on_ranks(2)
def test_gathered_may_be_nested(rank, world):
    model = shard(nn.Sequential(shard(MLP(6, 10, 6)), MLP(6, 8, 3)))
    with model.gathered():
        with model[0].gathered():
            with torch.no_grad():
                model[0][0].bias.fill_(2)
        assert not isinstance(model[0][0].weight, DTensor)
        assert model[0][0].bias.eq(2).all()
    assert isinstance(model[0][0].weight, DTensor)
    assert gather_full_dict(model.state_dict())["0.0.bias"].eq(2).all()


@on_ranks(2)
def test_ties_stay_ties_inside_gathered(rank, world):
    model = shard(seeded(TiedLM)())
    with model.gathered():
        assert model.head.weight is model.embed.weight
        with torch.no_grad():
            model.head.weight.fill_(0.5)
    assert gather_full_dict(model.state_dict())["embed.weight"].eq(0.5).all()


@on_ranks(2)
def test_gathered_works_under_inference_mode(rank, world):
    model, plain = shard(build()), build()
    with torch.inference_mode(), model.gathered():
        assert torch.equal(model(randn(2, 6)), plain(randn(2, 6)))
    run(model, rank)
    assert_grads(model, plain_grads(build, run, world))


@on_ranks(4)
def test_a_tensor_parallel_model_shows_its_slices_inside_gathered(rank, world):
    mesh = cached_mesh((2, 2), ("tp", "gtp_remat"))
    case = CASES["mlp"]
    model = case.build()
    parallelize_module(model, mesh["tp"], case.plan())
    shard(model, mesh)
    plain = case.build()
    with model.gathered():
        assert model[0].weight.device_mesh == mesh["tp"]
        assert model[0].weight.to_local().shape == (5, 6)
        assert torch.equal(model[0].weight.full_tensor(), plain[0].weight)
        with torch.no_grad():
            torch.testing.assert_close(model(randn(3, 6)), plain(randn(3, 6)), rtol=0, atol=1e-6)
            model[0].weight.mul_(2)
    assert torch.equal(gather_full_dict(dict(model.named_parameters()))["0.weight"], plain[0].weight * 2)


@on_ranks(2)
def test_leaving_gathered_drops_weights_that_were_unsharded(rank, world):
    model = shard(build(), gather_mesh())
    model.unshard()
    with model.gathered():
        write_in_place(model)
    with torch.no_grad():
        assert torch.equal(model(randn(4, 6)), output_of(gather_full_dict(model.state_dict())))
