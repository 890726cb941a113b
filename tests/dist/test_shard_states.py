"""`shard_optimizer_states` changes where states are, and no number."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_gtp
from tests.dist.optimizer_models import OPTIMIZERS, TOPOLOGIES, Lion, build, full_grads, make, set_grads
from tests.dist.twin import Boom, assert_local, gather_meter, on_ranks, randn, shard
from tests.harness import cached_mesh, current_double, run_ranks
from tests.models import CASES
from tests.unit.refusals import refuses
from torch_gtp import WeightPlan
from torch_gtp.optim import Muon, _shard_states, shard_optimizer_states

# Each element is computed by one rank as by all of them: no tolerance.
EXACT = 0.0
SPLIT = [name for name, (_, axes) in TOPOLOGIES.items() if "dp" in axes]


def groups(model):
    """Two groups with options of their own, given with names."""
    named = list(model.named_parameters())
    return [
        {"params": [(n, p) for n, p in named if p.ndim > 1], "lr": 3e-2},
        {"params": [(n, p) for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]


def skipped(step):
    """Parameters without a gradient in a step."""
    return [[], ["first.weight", "scale"], ["up"]][step % 3]


def check_steps(model, optimizer, plain, reference, *, steps=range(3), rtol=EXACT, without=()):
    """Steps with the same gradients end in the same parameters and states."""
    for step in steps:
        grads = full_grads(step, without=[*skipped(step), *without])
        for each, stepper in ((model, optimizer), (plain, reference)):
            set_grads(each, grads)
            stepper.step()
        assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), rtol, f"step {step}")
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_local(optimizer.state[param], reference.state[other], rtol, f"states of {name}")


CASES_OF_STEPS = [("dp2-gtp2", name) for name in OPTIMIZERS if name not in ("adamw", "sgd", "sgd nesterov")]
CASES_OF_STEPS += [(topology, "adamw") for topology in SPLIT if topology != "dp2-gtp2"]


@pytest.mark.parametrize(("topology", "optimizer"), CASES_OF_STEPS)
@on_ranks(4)
def test_parameters_and_states_equal_the_plain_models_bit_by_bit(rank, world, topology, optimizer):
    """But for the fused kernel of the CPU, which rounds the last elements of a tensor, fewer than a vector, otherwise."""
    plain, model, kind = build(), make(topology), OPTIMIZERS[optimizer]
    split = shard_optimizer_states(kind(groups(model)))
    rtol = 2e-7 if "fused" in optimizer else EXACT
    check_steps(model, split, plain, kind(groups(plain)), rtol=rtol)


@on_ranks(4)
def test_training_equals_training_without_the_split(rank, world):
    """From one use of the weights to the next, with clipping between."""
    case, mesh = CASES["attention_lm"], cached_mesh((2, 2), ("dp", "gtp_remat"))
    models = [shard(case.build(), mesh) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    shard_optimizer_states(optimizers[1])
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            case.loss(model, case.batch(4 * step + rank)).backward()
            torch_gtp.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one._local_tensor, other._local_tensor), f"step {step}"


# ---- memory and communication


def state_bytes(optimizer):
    return sum(
        value._local_tensor.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, DTensor)
    )


@pytest.mark.parametrize(("topology", "axes", "share"), [
    ("dp2-gtp2", None, 2), ("dp4", None, 4), ("pod2-dp2", None, 4), ("pod2-dp2", "dp", 2), ("pod2-dp2", ("dp", "pod"), 4),
    ("gtp4", None, 1),
])  # fmt: skip
@on_ranks(4)
def test_states_take_the_share_of_one_replica(rank, world, topology, axes, share):
    shape, names = TOPOLOGIES[topology]
    model = shard(nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 16, bias=False)), cached_mesh(shape, names))
    optimizer = shard_optimizer_states(torch.optim.AdamW(model.parameters()), axes)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    shards = sum(param._local_tensor.nbytes for param in model.parameters())
    assert state_bytes(optimizer) == 2 * shards // share


@pytest.mark.parametrize(
    ("bucket_bytes", "gathers"), [(1 << 20, [4 * (32 + 16 + 5 + 12)]), (1, [4 * 32, 4 * 16, 4 * 5, 4 * 12])]
)
@on_ranks(4)
def test_gathers_are_counted_and_even_shards_are_gathered_where_they_lie(rank, world, bucket_bytes, gathers):
    """Shards of 32x4 and 16x4 over four replicas, 17 elements padded to 20, 9x4 padded to 12x4."""
    model = nn.ParameterList([torch.ones(32, 4), torch.ones(16, 4), torch.ones(17), torch.ones(9, 4)])
    model = shard(model, cached_mesh((4, 1), ("dp", "gtp_remat")))
    optimizer = shard_optimizer_states(torch.optim.SGD(model.parameters(), lr=1.0))
    for param in model.parameters():
        param.grad = torch.full_like(param, 0.5)
    before, _shard_states._BUCKET_BYTES = _shard_states._BUCKET_BYTES, bucket_bytes
    try:
        with current_double().section() as calls, gather_meter() as meter:
            optimizer.step()
    finally:
        _shard_states._BUCKET_BYTES = before
    assert [(call.op, call.shape) for call in calls] == [("all_gather", (numel,)) for numel in gathers]
    assert meter.live_bytes == 0
    assert meter.allocations == (1 if len(gathers) == 1 else 2), "only uneven shards need a buffer"
    assert all(torch.equal(p._local_tensor, torch.full_like(p._local_tensor, 0.5)) for p in model.parameters())


# ---- checkpoints

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=False)


def save_and_load(rank, world, path, before, after):
    (topology, is_split), plain = before, build()
    model, reference = make(topology), torch.optim.AdamW(groups(plain), lr=1e-2)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    if is_split:
        shard_optimizer_states(optimizer)
    check_steps(model, optimizer, plain, reference, steps=range(2))
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
    }
    dcp.save(state, checkpoint_id=path)

    topology, is_split = after
    model = make(topology)
    optimizer = torch.optim.AdamW(groups(model), lr=0.5)
    if is_split:
        shard_optimizer_states(optimizer)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=OPTIONS),
    }
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=OPTIONS)
    assert [group["lr"] for group in optimizer.param_groups] == [3e-2, 1e-2]
    check_steps(model, optimizer, plain, reference, steps=range(2, 4))


MOVES = [
    (("gtp4", True), ("dp2-gtp2", True)),
    (("dp4", True), ("gtp4", True)),
    (("dp2-gtp2", False), ("dp2-tp2", True)),
    (("pod2-dp2", True), ("gtp2-tp2", False)),
]


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_a_checkpoint_continues_on_another_topology(tmp_path, before, after):
    run_ranks(save_and_load, 4, str(tmp_path / "checkpoint"), before, after)


@on_ranks(4)
def test_full_states_are_those_of_the_plain_model_and_load(rank, world):
    plain, model = build(), make("dp2-gtp2")
    for each in (plain, model):  # PyTorch loads full states of parameters without dims as plain tensors
        each.scale.requires_grad_(False)
    reference, optimizer = OPTIMIZERS["adamw"](groups(plain)), OPTIMIZERS["adamw"](groups(model))
    shard_optimizer_states(optimizer)
    check_steps(model, optimizer, plain, reference, steps=range(2), without=["scale"])
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=False)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    for name, param in plain.named_parameters():
        if name != "scale":
            torch.testing.assert_close(
                state["state"][name]["exp_avg"], reference.state[param]["exp_avg"], rtol=0, atol=0
            )
    again = shard_optimizer_states(OPTIMIZERS["adamw"](groups(model)))
    again.zero_grad()  # or PyTorch would not make the states that it loads into
    set_optimizer_state_dict(model, again, state, options=options)
    for name, param in model.named_parameters():
        if name != "scale":
            loaded, kept = (each.state[param]["exp_avg"] for each in (again, optimizer))
            assert loaded._local_tensor.shape == kept._local_tensor.shape, name
    check_steps(model, again, plain, reference, steps=range(2, 4), without=["scale"])


@on_ranks(4)
def test_states_from_before_and_states_loaded_without_a_split_are_cut(rank, world):
    plain, model = build(), make("dp2-gtp2")
    reference, optimizer = OPTIMIZERS["adamw"](groups(plain)), OPTIMIZERS["adamw"](groups(model))
    check_steps(model, optimizer, plain, reference, steps=range(1))
    unsplit, whole = optimizer.state_dict(), state_bytes(optimizer)
    shard_optimizer_states(optimizer)
    assert state_bytes(optimizer) < 0.65 * whole, "uneven rows are not halved exactly"
    cut = state_bytes(optimizer)
    optimizer.load_state_dict(unsplit)
    assert state_bytes(optimizer) == cut
    check_steps(model, optimizer, plain, reference, steps=range(1, 3))


# ---- what stands around an optimizer


@on_ranks(2)
def test_hooks_closure_and_scheduler_see_the_optimizer_that_the_user_made(rank, world):
    model = shard(CASES["mlp"].build(), cached_mesh((2, 1), ("dp", "gtp_remat")))
    params, seen = list(model.parameters()), []

    def look(optimizer, args, kwargs):
        assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], params, strict=True))
        assert set(optimizer.state) <= set(params)
        seen.append([param._local_tensor.clone() for param in params])

    optimizer = torch.optim.AdamW(params, lr=1e-2)
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_post_hook(look)
    assert shard_optimizer_states(optimizer) is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)

    def closure():
        optimizer.zero_grad()
        loss = CASES["mlp"].loss(model, CASES["mlp"].batch(0))
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    assert len(seen) == 2, "each hook runs once"
    changed = [not torch.equal(*pair) for pair in zip(*seen, strict=True)]
    assert all(changed), "post-hooks see what all replicas have updated"
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@on_ranks(2)
def test_an_exception_in_the_step_leaves_the_parameters_in_their_place(rank, world):
    model = shard(CASES["mlp"].build(), cached_mesh((2, 1), ("dp", "gtp_remat")))

    class Failing(Lion):
        def step(self, closure=None):
            super().step()
            if self.fails:
                raise Boom

    optimizer = shard_optimizer_states(Failing(model.parameters()))
    params = list(model.parameters())
    for param in params:
        param.grad = torch.ones_like(param)
    for optimizer.fails in (False, True):
        with pytest.raises(Boom) if optimizer.fails else contextlib.nullcontext():
            optimizer.step()
        assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], params, strict=True))
        assert set(optimizer.state) == set(params)


@on_ranks(4)
def test_parameters_on_several_meshes_and_later_groups_are_split(rank, world):
    plain = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 7, bias=False), nn.Linear(7, 5, bias=False))
    plain.load_state_dict({f"{i}.weight": randn(*p.shape, seed=i) for i, p in enumerate(plain.parameters())})
    plan = {"1.weight": WeightPlan(mesh=cached_mesh((4, 1), ("edp", "gtp_remat")))}
    model = nn.Sequential(*(nn.Linear(p.shape[1], p.shape[0], bias=False) for p in plain.parameters()))
    model.load_state_dict(plain.state_dict())
    model = shard(model, cached_mesh((2, 2), ("dp", "gtp_remat")), plan=plan)
    optimizers = []
    for each in (model, plain):
        first, *others = each.parameters()
        optimizers.append(torch.optim.AdamW([first], lr=1e-2))
        if each is model:
            shard_optimizer_states(optimizers[0], "dp")
        for other in others:
            optimizers[-1].add_param_group({"params": [other], "lr": 2e-2})
    for step in range(2):
        grads = {name: randn(*p.shape, seed=step) for name, p in plain.named_parameters()}
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            set_grads(each, grads)
            optimizer.step()
    assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), EXACT)
    rows = [optimizers[0].state[p]["exp_avg"]._local_tensor.shape[0] for p in model.parameters()]
    assert rows == [2, 7, [2, 1, 1, 1][2 * (rank % 2) + rank // 2]]


@on_ranks(2)
def test_gradients_in_fp32_of_parameters_in_bf16_are_kept_in_fp32(rank, world):
    def run(model):
        for param in model.parameters():
            param.grad_dtype = torch.float32
            grad = randn(1, *param.shape)[0]
            param.grad = grad if not isinstance(param, DTensor) else torch.distributed.tensor.DTensor.from_local(
                grad, param.device_mesh, param.placements, run_check=False
            )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if isinstance(next(model.parameters()), DTensor):
            shard_optimizer_states(optimizer)
        optimizer.step()
        return optimizer

    plain = CASES["mlp"].build().bfloat16()
    model = shard(CASES["mlp"].build().bfloat16(), cached_mesh((2, 1), ("dp", "gtp_remat")))
    run(plain)
    optimizer = run(model)
    assert {state["momentum_buffer"].dtype for state in optimizer.state.values()} == {torch.float32}
    assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), EXACT)


# ---- refusals


@on_ranks(2)
def test_what_cannot_be_split_is_refused(rank, world):
    model = shard(CASES["mlp"].build(), cached_mesh((2, 1), ("dp", "gtp_remat")))
    named = list(model.named_parameters())

    def adamw():
        return torch.optim.AdamW(named)

    with refuses(TypeError, "expected a torch.optim.Optimizer, got MLP"):
        shard_optimizer_states(model)
    for optimizer in (
        torch.optim.Adafactor(model.parameters()), torch.optim.LBFGS(model.parameters()), Muon(Muon.groups_of(model)),
    ):  # fmt: skip
        with refuses(TypeError, type(optimizer).__name__, "element by element"):
            shard_optimizer_states(optimizer)
    with refuses(ValueError, "'gtp_remat' splits the parameters already", "'dp'"):
        shard_optimizer_states(adamw(), "gtp_remat")
    with refuses(ValueError, "no parameter has a mesh with a replicate axis 'pod'", "['dp']"):
        shard_optimizer_states(adamw(), ["dp", "pod"])
    for axes in ([], ["dp", "dp"]):
        with refuses(ValueError, "one or more different axes"):
            shard_optimizer_states(adamw(), axes)
    optimizer = adamw()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with refuses(ValueError, "step of this AdamW was replaced", "then build the scheduler"):
        shard_optimizer_states(optimizer)
    optimizer = shard_optimizer_states(adamw())
    with refuses(ValueError, "split already"):
        shard_optimizer_states(optimizer)
    named[0][1].grad = DTensor.from_local(
        torch.ones(named[0][1].shape), named[0][1].device_mesh, [Partial(), Replicate()], run_check=False
    )
    with refuses(ValueError, "shard_optimizer_states(0.weight)", "its gradient is laid out as", "redistribute"):
        optimizer.step()
    assert all(one is other for one, (_, other) in zip(optimizer.param_groups[0]["params"], named, strict=True))
    named[0][1].grad = None
    state = optimizer.state_dict()
    mesh = named[0][1].device_mesh
    foreign = DTensor.from_local(torch.zeros(10, 3), mesh, [Shard(1), Replicate()], run_check=False)
    state["state"][0] = {"step": torch.tensor(0.0), "exp_avg": foreign}
    with refuses(ValueError, "shard_optimizer_states(0.weight): state 'exp_avg'", "torch.distributed.checkpoint"):
        optimizer.load_state_dict(state)
