"""`torch_gtp.optim.Muon` is `torch.optim.Muon` on the unsharded matrices, each of them computed by one rank."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter

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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dist.twin import assert_local, gather_meter, local_part, on_ranks, plain_grads, randn, seeded, shard
from tests.harness import cached_mesh, current_double, run_ranks
from tests.models import CASES
from torch_gtp import WeightPlan
from torch_gtp._dtensor_layout import make_dtensor
from torch_gtp.optim import Muon, _muon

# The owner does what one process does, on the same bits: no tolerance. The exceptions say why.
EXACT = 0.0
FP32 = {"ns_dtype": torch.float32}

TOPOLOGIES = {
    "gtp4": ((4,), ("gtp_remat",)),
    "dp2-gtp2": ((2, 2), ("dp", "gtp_remat")),
    "dp4": ((4, 1), ("dp", "gtp_remat")),
    "tp2-gtp2": ((2, 2), ("tp", "gtp_remat")),
    "gtp2-tp2": ((2, 2), ("gtp_remat", "tp")),
    "dp2-tp2": ((2, 2, 1), ("dp", "tp", "gtp_remat")),
}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 7, 5))

    def forward(self, x):
        return x


class Net(nn.Module):
    """Tall, wide and square matrices, uneven rows, fewer rows than ranks, a stack, and what is not for Muon."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first = nn.Linear(6, 13)
        self.second = nn.Linear(13, 6)
        self.flat = nn.Linear(9, 3, bias=False)
        self.square = nn.Linear(9, 9, bias=False)
        self.across = nn.Linear(10, 5, bias=False)
        self.experts = Experts()
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, x):
        return x


HIDDEN = ["first.weight", "second.weight", "flat.weight", "square.weight", "across.weight", "experts.up"]
build = seeded(Net)


def make(topology="gtp4"):
    shape, names = TOPOLOGIES[topology]
    mesh, model = cached_mesh(shape, names), build()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    return shard(model, mesh, plan={"across.weight": WeightPlan(shard_dim=1)})


def full_grads(step, names=None):
    """Gradients of the plain model, the same on every rank; only those of `names` if given."""
    return {
        name: randn(*param.shape, seed=100 * step + index)
        for index, (name, param) in enumerate(build().named_parameters())
        if names is None or name in names
    }


def set_grads(model, grads):
    for name, param in model.named_parameters():
        if name not in grads:
            param.grad = None
        elif isinstance(param, DTensor):
            param.grad = make_dtensor(local_part(param, grads[name]), param._spec)
        else:
            param.grad = grads[name].clone()


def newton_schulz(matrix, steps=5):
    """Keller Jordan's, in the dtype of the matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x


class Oracle:
    """Muon on whole matrices in fp32, and AdamW for the rest: what `torch.optim.Muon` does, but for its bf16."""

    def __init__(self, params, hidden=HIDDEN, segments=None, lr=0.02):
        self.params = dict(params)
        self.hidden = [name for name in self.params if name in hidden]
        self.segments, self.lr = segments or {}, lr
        self.momentum = {name: torch.zeros_like(self.params[name]) for name in self.hidden}
        others = [param for name, param in self.params.items() if name not in hidden]
        self.adamw = torch.optim.AdamW(others, lr=lr, weight_decay=0.1) if others else None

    @torch.no_grad()
    def step(self):
        for name in self.hidden:
            param, momentum = self.params[name], self.momentum[name]
            if param.grad is None:
                continue
            momentum.lerp_(param.grad, 1 - 0.95)
            direction = param.grad.lerp(momentum, 0.95)
            param.mul_(1 - self.lr * 0.1)
            rows = self.segments.get(name, param.shape[-2:-1])
            for whole, stack in ((param, direction),) if param.ndim == 2 else zip(param, direction, strict=True):
                for target, part in zip(whole.split(rows), stack.split(rows), strict=True):
                    scale = math.sqrt(max(1, part.shape[0] / part.shape[1]))
                    target.add_(newton_schulz(part), alpha=-self.lr * scale)
        if self.adamw is not None:
            self.adamw.step()


def check_against_oracle(model, optimizer, *, segments=None, steps=range(3), plain=None, oracle=None):
    """Steps with the same gradients end in the same parameters and momentum."""
    plain = plain or build()
    oracle = oracle or Oracle(plain.named_parameters(), segments=segments)
    for step in steps:
        grads = full_grads(step)
        for each in (model, plain):
            set_grads(each, grads)
        optimizer.step()
        oracle.step()
        assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), EXACT, f"step {step}")
    params = dict(model.named_parameters())
    momentum = {name: optimizer.state[params[name]]["momentum_buffer"] for name in HIDDEN}
    assert_local(momentum, oracle.momentum, EXACT, "momentum")
    return plain, oracle


# ---- equal to one process


@pytest.mark.parametrize("round_bytes", [1, 1000])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@on_ranks(4)
def test_steps_in_fp32_equal_those_on_the_unsharded_matrices(rank, world, topology, round_bytes):
    """In rounds of one matrix per rank, and of several."""
    model = make(topology)
    check_against_oracle(model, Muon(Muon.groups_of(model), lr=0.02, round_bytes=round_bytes, **FP32))


OPTIONS = {
    "default": {},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "original": {"adjust_lr_fn": "original", "lr": torch.tensor(0.03)},
    "plain momentum": {"nesterov": False, "momentum": 0.8, "weight_decay": 0.0},
    "other iteration": {"ns_steps": 3, "ns_coefficients": (2.0, -1.5, 0.5), "eps": 1e-3},
}


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks(4)
def test_steps_in_bf16_are_those_of_pytorchs_muon_bit_by_bit(rank, world, options):
    """Both round momentum to bf16 once, element by element: before it travels, or before the iteration."""
    names = [name for name in HIDDEN if name != "experts.up"]
    model, plain = make("dp2-gtp2"), build()
    mine = Muon([(n, p) for n, p in model.named_parameters() if n in names], **OPTIONS[options])
    theirs = torch.optim.Muon([p for n, p in plain.named_parameters() if n in names], **OPTIONS[options])
    for step in range(3):
        for each, optimizer in ((model, mine), (plain, theirs)):
            set_grads(each, full_grads(step))
            optimizer.step()
        assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), EXACT, f"step {step}")


@pytest.mark.parametrize("topology", ["gtp4", "gtp2-tp2"])
@on_ranks(4)
def test_segments_are_orthogonalised_apart(rank, world, topology):
    """Shards straddle the segments: 13 rows are 4, 4, 4, 1 or 4, 3, 4, 2."""
    segments = {"first.weight": (5, 2, 6), "experts.up": (3, 4)}
    model = make(topology)
    check_against_oracle(model, Muon(Muon.groups_of(model), lr=0.02, segments=segments, **FP32), segments=segments)


@pytest.mark.parametrize("shard_dim", [0, 1, 2])
@on_ranks(4)
def test_each_expert_of_a_stack_is_a_matrix_however_the_stack_is_sharded(rank, world, shard_dim):
    model = shard(build(), plan={"experts.up": WeightPlan(shard_dim=shard_dim)})
    check_against_oracle(model, Muon(Muon.groups_of(model), lr=0.02, **FP32))


@pytest.mark.parametrize("topology", ["tp2-gtp2", "dp2-gtp2"])
@on_ranks(4)
def test_a_language_model_trains_as_on_one_process(rank, world, topology):
    """1e-5: gradients summed over ranks round otherwise, and five iterations amplify what is near zero by up to 485."""
    case = CASES["attention_lm"]
    shape, names = TOPOLOGIES[topology]
    mesh, model, plain = cached_mesh(shape, names), case.build(), case.build()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], case.plan())
    model = shard(model, mesh)
    optimizer = Muon(Muon.groups_of(model), lr=0.02, **FP32)
    hidden = [name for group in optimizer.param_groups[:1] for name in group["param_names"]]
    assert len(hidden) == 14
    oracle = Oracle(plain.named_parameters(), hidden)
    coordinates, coordinate = (2, rank % 2) if "tp" in names else (4, rank)
    for step in range(3):

        def run(each, index, step=step):
            case.loss(each, case.batch(10 * step + index)).backward()

        run(model, coordinate)
        optimizer.step()
        optimizer.zero_grad()
        grads = plain_grads(lambda: copy.deepcopy(plain), run, coordinates)
        set_grads(plain, grads)
        oracle.step()
        plain.zero_grad()
        assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), 1e-5, f"step {step}")


@on_ranks(4)
def test_parameters_without_a_gradient_are_skipped_and_the_plan_follows(rank, world):
    model, plain = make(), build()
    optimizer, oracle = Muon(Muon.groups_of(model), lr=0.02, **FP32), Oracle(plain.named_parameters())
    for step, names in enumerate([HIDDEN[:2], HIDDEN[1:4], [], ["norm.weight"], HIDDEN]):
        for each in (model, plain):
            set_grads(each, full_grads(step, names))
        optimizer.step()
        oracle.step()
        assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), EXACT, f"step {step}")


@on_ranks(4)
def test_parameters_on_several_meshes_and_plain_ones_mix(rank, world):
    meshes = {
        "flat.weight": cached_mesh((4,), ("gtp_remat",)),
        "square.weight": cached_mesh((4, 1), ("dp", "gtp_remat")),
    }
    plan = {name: WeightPlan(mesh=mesh) for name, mesh in meshes.items()}
    model, plain = nn.Module(), nn.Module()
    model.net, plain.net = shard(build(), cached_mesh((2, 2), ("dp", "gtp_remat")), plan=plan), build()
    for each in (model, plain):
        each.adapter = seeded(lambda: nn.Linear(4, 8))()
    hidden = [f"net.{name}" for name in HIDDEN] + ["adapter.weight"]
    optimizer = Muon(Muon.groups_of(model, adamw="net.head.weight"), lr=0.02, **FP32)
    oracle = Oracle(plain.named_parameters(), hidden)
    grads = {f"net.{name}": grad for name, grad in full_grads(0).items()}
    grads |= {"adapter.weight": randn(8, 4), "adapter.bias": randn(8)}
    for each, stepper in ((model, optimizer), (plain, oracle)):
        set_grads(each, grads)
        stepper.step()
    assert_local(dict(model.named_parameters()), dict(plain.named_parameters()), EXACT)


# ---- once, in bounded scratch, behind the arithmetic


@contextlib.contextmanager
def each_matrix(watch):
    """Call `watch` with every matrix that this rank orthogonalises."""
    original = _muon.orthogonalize
    _muon.orthogonalize = lambda matrix, *args: (watch(matrix), original(matrix, *args))[1]
    try:
        yield
    finally:
        _muon.orthogonalize = original


def count_computed(rank, world, topology):
    model, computed = make(topology), []
    set_grads(model, full_grads(0))
    with each_matrix(lambda matrix: computed.append(tuple(matrix.shape))):
        Muon(Muon.groups_of(model)).step()
    return computed


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_each_matrix_is_orthogonalised_once_over_all_ranks(topology):
    per_rank = run_ranks(count_computed, 4, topology)
    assert sum(map(Counter, per_rank), Counter()) == {
        (13, 6): 1, (6, 13): 1, (3, 9): 1, (9, 9): 1, (5, 10): 1, (7, 5): 3,
    }  # fmt: skip
    assert all(per_rank), "every rank has a share"


@pytest.mark.parametrize(("topology", "copies"), [("gtp4", 1), ("dp2-gtp2", 2), ("dp4", 4)])
@on_ranks(4)
def test_scratch_is_bounded_by_the_round_and_collectives_are_counted(rank, world, topology, copies):
    shape, names = TOPOLOGIES[topology]
    matrix_bytes, matrices = 12 * 20 * 4, 24
    model = nn.Sequential(*(nn.Linear(20, 12, bias=False) for _ in range(matrices)))
    model = shard(model, cached_mesh(shape, names))
    for per_round, rounds in ((1, 6), (2, 3), (6, 1)):
        optimizer = Muon(model.parameters(), round_bytes=per_round * matrix_bytes, **FP32)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        with gather_meter() as meter, current_double().section() as calls:
            optimizer.step()
        assert Counter(call.op for call in calls) == {"all_to_all": rounds * (1 + copies)}
        assert max(call.nbytes for call in calls) <= per_round * matrix_bytes
        assert meter.live_bytes == 0
        assert 2 * per_round * matrix_bytes <= meter.peak_bytes <= 8 * per_round * matrix_bytes


@on_ranks(4)
def test_transfers_are_in_flight_while_matrices_are_orthogonalised(rank, world):
    model = shard(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(12))))
    in_flight = []
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with each_matrix(lambda matrix: in_flight.append(len(current_double().outstanding()))):
        Muon(model.parameters(), round_bytes=1).step()
    # The first round has nothing to deliver yet, the last nothing left to collect
    assert in_flight == [1, 2, 1]


# ---- checkpoints


def save_and_load(rank, world, path, before, after):
    model = make(before)
    optimizer = Muon(Muon.groups_of(model), lr=0.02, **FP32)
    plain, oracle = check_against_oracle(model, optimizer, steps=range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=False)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    assert set(state["optimizer"]["state"]["first.weight"]) == {"momentum_buffer"}
    assert set(state["optimizer"]["state"]["norm.weight"]) == {"step", "exp_avg", "exp_avg_sq"}
    dcp.save(state, checkpoint_id=path)

    model = make(after)
    optimizer = Muon(Muon.groups_of(model), lr=0.5)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    assert optimizer.param_groups[0]["lr"] == 0.02
    assert optimizer.param_groups[0]["ns_dtype"] is torch.float32
    check_against_oracle(model, optimizer, steps=range(2, 4), plain=plain, oracle=oracle)


@pytest.mark.parametrize(
    ("before", "after"),
    [("gtp4", "tp2-gtp2"), ("tp2-gtp2", "dp2-gtp2"), ("dp2-gtp2", "gtp2-tp2"), ("gtp2-tp2", "gtp4")],
)
def test_a_checkpoint_continues_on_another_topology(tmp_path, before, after):
    run_ranks(save_and_load, 4, str(tmp_path / "checkpoint"), before, after)
