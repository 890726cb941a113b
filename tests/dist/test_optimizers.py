"""Optimizers over all parameters of a sharded model in one group, and the loop around them."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

from tests.dist.optimizer_models import OPTIMIZERS, build, full_grads, make, set_grads
from tests.dist.twin import assert_local, on_ranks, plain_grads, shard
from tests.harness import cached_mesh
from tests.models import CASES
from tests.unit.refusals import refuses
from torch_gtp.optim import shard_optimizer_states

# Each element is computed by one rank as by one process: no tolerance.
EXACT = 0.0
CASE = CASES["mlp"]


def check_steps(model, optimizer, plain, reference, rtol, steps=3):
    for step in range(steps):
        for each, stepper in ((model, optimizer), (plain, reference)):
            set_grads(each, full_grads(step, without=[[], ["first.weight"], ["up"]][step]))
            stepper.step()
        assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), rtol, f"step {step}")


@pytest.mark.parametrize("topology", ["gtp4", "dp2-gtp2", "tp2-gtp2"])
@on_ranks(4)
def test_steps_equal_the_plain_models(rank, world, topology):
    """Bit by bit, but for the fused kernel of the CPU: it rounds the last elements, fewer than a vector, otherwise."""
    for name in OPTIMIZERS if topology == "gtp4" else ("adamw foreach", "lion"):
        make_optimizer = OPTIMIZERS[name]
        plain, model = build(), make(topology)
        rtol = 2e-7 if "fused" in name else EXACT
        check_steps(model, make_optimizer(model.parameters()), plain, make_optimizer(plain.parameters()), rtol)


@pytest.mark.parametrize("foreach", [False, True])
@on_ranks(4)
def test_adafactor_is_refused_by_pytorch_instead_of_being_wrong(rank, world, foreach):
    """It squares a norm over shards in place, which DTensor does not allow."""
    model = make("gtp4")
    set_grads(model, full_grads(0))
    with pytest.raises(RuntimeError, match=r"placement changes|mixed torch\.Tensor and DTensor"):
        torch.optim.Adafactor(model.parameters(), foreach=foreach).step()


# ---- learning-rate schedulers, GradScaler, averages


def train_plain(plain, optimizer, step, coordinates, scale=1.0):
    grads = plain_grads(
        lambda: copy_of(plain), lambda m, c: CASE.loss(m, CASE.batch(10 * step + c)).backward(), coordinates
    )
    for name, param in plain.named_parameters():
        param.grad = grads[name] * scale
    optimizer.step()


def copy_of(plain):
    twin = CASE.build()
    twin.load_state_dict(plain.state_dict())
    return twin


@pytest.mark.parametrize("split", [False, True])
@on_ranks(2)
def test_learning_rate_schedules_are_the_plain_models(rank, world, split):
    model, plain = shard(CASE.build(), cached_mesh((2, 1), ("dp", "gtp_remat"))), CASE.build()
    optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    if split:
        shard_optimizer_states(optimizer)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, 0.05, total_steps=5) for each in (optimizer, reference)]
    for step in range(4):
        CASE.loss(model, CASE.batch(10 * step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        train_plain(plain, reference, step, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that the optimizer's step was not seen
            for scheduler in schedulers:
                scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
        assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), EXACT, f"step {step}")


@pytest.mark.parametrize("split", [False, True])
@on_ranks(2)
def test_a_grad_scaler_skips_the_step_on_all_ranks_or_on_none(rank, world, split):
    """The scaler of one rank sees infinity in its own shard only: `found_inf` must be everyone's."""
    axes = ("dp", "gtp_remat")
    model = shard(CASE.build(), cached_mesh((2, 1) if split else (1, 2), axes))
    plain = CASE.build()
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, plain))
    if split:
        shard_optimizer_states(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    for step in range(4):
        scaler.scale(CASE.loss(model, CASE.batch(10 * step + rank))).backward()
        overflow = step == 1
        if overflow and (split or rank == 0):
            model[0].weight.grad._local_tensor[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if not overflow:
            train_plain(plain, reference, step, 2)
        assert scaler.get_scale() == (8.0 if step < 1 else 4.0), "halved once, on every rank"
        # A power of two scales without rounding
        assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), EXACT, f"step {step}")


@on_ranks(2)
def test_an_average_of_the_weights_is_kept_in_a_second_sharded_model(rank, world):
    """`AveragedModel(model)` copies the module, which is refused; the average is a model of its own."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model, average = shard(CASE.build()), shard(CASE.build())
    plain = CASE.build()
    ema = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    with refuses(TypeError, "MLP", "Build a second model, call gtp_shard on it and load_state_dict"):
        AveragedModel(model)
    update = get_ema_multi_avg_fn(0.9)
    optimizer, reference = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    ema.update_parameters(plain)  # the first call copies
    for step in range(3):
        CASE.loss(model, CASE.batch(10 * step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        update(list(average.parameters()), list(model.parameters()), None)
        train_plain(plain, reference, step, 2)
        ema.update_parameters(plain)
    assert_local(dict(average.named_parameters()), dict(ema.module.named_parameters()), EXACT)
    batch = CASE.batch(99)
    with torch.no_grad():  # the average serves evaluation, with the model between two steps
        assert torch.equal(average(*batch), ema.module(*batch))
