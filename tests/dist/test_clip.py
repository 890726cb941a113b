"""`clip_grad_norm_` is PyTorch's own on the plain model, whatever the gradients are sharded over."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dist.twin import assert_grads, on_ranks, randn, shard
from tests.harness import cached_mesh, current_double, fake_world
from tests.models import CASES
from tests.unit.refusals import refuses
from torch_gtp import WeightPlan, clip_grad_norm_, grad_norm

# A norm is a sum of squares over shards instead of over tensors: a few units of fp32's 6e-8
RTOL = 1e-6
NORM_TYPES = [1.0, 2, 3.5, math.inf]
CASE = CASES["mlp"]

TOPOLOGIES = {
    "gtp4": ((4,), ("gtp_remat",), {}),
    "dp2-gtp2": ((2, 2), ("dp", "gtp_remat"), {}),
    "tp2-gtp2": ((2, 2), ("tp", "gtp_remat"), {}),
    "gtp2-tp2": ((2, 2), ("gtp_remat", "tp"), {}),
    "dp4": ((4, 1), ("dp", "gtp_remat"), {}),
    "two meshes": ((2, 2), ("dp", "gtp_remat"), {"2.weight": 4}),
    "replicas": ((2, 2), ("dp", "gtp_remat"), {"0.weight": None}),
}


def make(topology):
    shape, names, exceptions = TOPOLOGIES[topology]
    mesh = cached_mesh(shape, names)
    model = CASE.build()
    if "tp" in names:
        parallelize_module(model, mesh["tp"], CASE.plan())
    plan = {
        name: WeightPlan(replicate=True) if ranks is None else WeightPlan(mesh=cached_mesh((ranks,), ("gtp_remat",)))
        for name, ranks in exceptions.items()
    }  # fmt: skip
    return shard(model, mesh, plan=plan)


def run(model, scale=1.0):
    (scale * CASE.loss(model, CASE.batch(0))).backward()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@on_ranks(4)
def test_norms_and_clipped_gradients_equal_the_plain_models(rank, world, topology):
    model = make(topology)
    for norm_type in NORM_TYPES:
        for share in (0.3, 2.0):
            plain = CASE.build()
            run(plain)
            before = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
            limit = share * before.item()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit, norm_type)
            model.zero_grad()
            run(model)
            norm = clip_grad_norm_(model.parameters(), limit, norm_type)
            assert type(norm) is torch.Tensor
            assert norm.shape == ()
            torch.testing.assert_close(norm, expected, rtol=RTOL, atol=0)
            assert_grads(model, {name: p.grad for name, p in plain.named_parameters()}, RTOL)


@on_ranks(4)
def test_every_rank_gets_the_same_bits(rank, world):
    import torch.distributed as dist

    model = make("tp2-gtp2")
    run(model)
    norms = [torch.empty(()) for _ in range(world)]
    dist.all_gather(norms, clip_grad_norm_(model.parameters(), 0.1))
    assert all(torch.equal(norm, norms[0]) for norm in norms)


@pytest.mark.parametrize("foreach", [None, False, True])
@on_ranks(2)
def test_sharded_and_plain_parameters_mix(rank, world, foreach):
    """An adapter that was added after sharding is a plain tensor, equal on every rank."""
    plain = nn.ModuleList([CASE.build(), nn.Linear(3, 3)])
    model = nn.ModuleList([shard(CASE.build()), nn.Linear(3, 3)])
    model[1].load_state_dict(plain[1].state_dict())

    def run(pair):
        pair[1](pair[0](randn(4, 6))).square().mean().backward()

    run(plain)
    run(model)
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, foreach=foreach)
    norm = clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)
    torch.testing.assert_close(norm, expected, rtol=RTOL, atol=0)
    assert_grads(model[0], {name: p.grad for name, p in plain[0].named_parameters()}, RTOL)
    torch.testing.assert_close(model[1].weight.grad, plain[1].weight.grad, rtol=RTOL, atol=0)


@on_ranks(2)
def test_gradients_in_bf16_are_clipped_in_place_by_a_norm_in_fp32(rank, world):
    model, plain = shard(CASE.build().bfloat16()), CASE.build().bfloat16()
    for each in (model, plain):
        each(CASE.batch(0)[0].bfloat16()).float().square().mean().backward()
    grads = [p.grad for p in model.parameters()]
    norm = clip_grad_norm_(model.parameters(), 0.01)
    assert norm.dtype == torch.float32
    expected = torch.nn.utils.get_total_norm([p.grad.float() for p in plain.parameters()])
    torch.testing.assert_close(norm, expected, rtol=RTOL, atol=0)
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    scale = 0.01 / (expected + 1e-6)
    # One rounding to bf16, of the product
    assert_grads(model, {n: (p.grad.float() * scale).bfloat16() for n, p in plain.named_parameters()}, 2**-8)


@on_ranks(2)
def test_a_norm_that_is_not_finite_raises_when_asked(rank, world):
    model = shard(CASE.build())
    run(model)
    with torch.no_grad():
        if rank == 0:  # on one rank only: the norm is everyone's
            model[0].weight.grad.to_local()[0, 0] = math.inf
    with refuses(RuntimeError, "order 2.0", "not finite (inf)", "error_if_nonfinite=False"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(model.parameters(), 1.0).isinf()


@on_ranks(2)
def test_nan_on_one_rank_is_everyones_in_a_maximum_too(rank, world):
    for norm_type in NORM_TYPES:
        for name in ("0.weight", "0.bias"):  # a shard; a replica, of which coordinate 0 is counted
            model = shard(CASE.build())
            run(model)
            if rank == (1 if name == "0.weight" else 0):
                model.get_parameter(name).grad.to_local().view(-1)[0] = math.nan
            assert grad_norm(model.parameters(), norm_type).isnan(), (norm_type, name)


@on_ranks(2)
def test_gradients_stay_as_they_are_when_the_norm_raises(rank, world):
    model = shard(CASE.build())
    run(model)
    model[0].weight.grad.to_local()[0, 0] = math.nan
    before = [param.grad.to_local().clone() for param in model.parameters()]
    with refuses(RuntimeError, "not finite (nan)"):
        clip_grad_norm_(model.parameters(), 1e-3, error_if_nonfinite=True)
    for param, grad in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(param.grad.to_local(), grad, rtol=0, atol=0, equal_nan=True)


# ---- every element once


class Everything(nn.Module):
    """Sizes that divide by nothing: rows, columns, replicas, a tied weight, experts, a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 13), nn.Linear(13, 6)
        self.across = nn.Linear(7, 5, bias=False)
        self.whole = nn.Linear(3, 5, bias=False)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.experts = nn.Parameter(torch.ones(3, 7, 5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return x


ELEMENTS = 11 * 6 + (13 * 6 + 13) + (6 * 13 + 6) + 5 * 7 + 5 * 3 + 2 * 6 + 1 + 3 * 7 * 5

# Axes of the mesh, and of that of the experts if they have one of their own
ONES = {
    "gtp_remat=4": ({"gtp_remat": 4}, None),
    "dp=4": ({"dp": 4, "gtp_remat": 1}, None),
    "dp=2 gtp_remat=2": ({"dp": 2, "gtp_remat": 2}, None),
    "tp=4": ({"tp": 4, "gtp_remat": 1}, None),
    "tp=2 gtp_remat=2": ({"tp": 2, "gtp_remat": 2}, None),
    "gtp_remat=2 tp=2": ({"gtp_remat": 2, "tp": 2}, None),
    "dp=2 tp=2": ({"dp": 2, "tp": 2, "gtp_remat": 1}, None),
    "gtp_remat=4, experts edp=2 gtp_remat=2": ({"gtp_remat": 4}, {"edp": 2, "gtp_remat": 2}),
    "tp=2 gtp_remat=2, experts edp=2 gtp_remat=2": ({"tp": 2, "gtp_remat": 2}, {"edp": 2, "gtp_remat": 2}),
    "dp=2 gtp_remat=2, experts edp=4": ({"dp": 2, "gtp_remat": 2}, {"edp": 4, "gtp_remat": 1}),
}


def mesh_of(axes):
    return cached_mesh(tuple(axes.values()), tuple(axes))


def norm_of_ones(topology):
    """The norm of gradients of ones, and its collectives."""
    axes, expert_axes = ONES[topology]
    mesh, model = mesh_of(axes), Everything()
    plan = {"across.weight": WeightPlan(shard_dim=1), "whole.weight": WeightPlan(replicate=True)}
    if expert_axes is not None:
        plan["experts"] = WeightPlan(mesh=mesh_of(expert_axes), shard_dim=2)
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model = nn.ModuleList([shard(model, mesh, plan=plan), nn.Linear(3, 3)])  # the last as an adapter, not sharded
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with current_double().section() as calls:
        norm = grad_norm(model.parameters())
    return norm, calls


@pytest.mark.parametrize("topology", ONES)
@on_ranks(4)
def test_the_norm_of_ones_is_the_root_of_the_number_of_elements_in_one_collective(rank, world, topology):
    """Exactly: sums of squares are whole numbers in fp64, and the root is rounded once."""
    norm, calls = norm_of_ones(topology)
    assert norm == torch.tensor(ELEMENTS + 3 * 3 + 3, dtype=torch.float64).sqrt().float(), norm.item() ** 2
    assert [(call.op, call.reduction, call.nbytes, call.group_size) for call in calls] == [("all_reduce", "sum", 8, 4)]


@on_ranks(4)
def test_meshes_of_other_ranks_have_a_collective_of_their_own(rank, world):
    small = cached_mesh((2, 2), ("pp", "gtp_remat"))["gtp_remat"]
    model = shard(CASE.build(), plan={"2.weight": WeightPlan(mesh=small)})
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with current_double().section() as calls:
        norm = grad_norm(model.parameters(), 1.0)
    assert norm == sum(param.numel() for param in model.parameters())
    assert sorted(call.group_size for call in calls) == [2, 4]


def test_nothing_to_clip_has_norm_zero():
    assert clip_grad_norm_([], 1.0) == 0
    assert clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0) == 0


def test_a_single_tensor_and_a_generator_are_taken():
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    weight.grad = weight.detach().clone()
    assert clip_grad_norm_(weight, 1.0) == 5
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]))
    assert clip_grad_norm_((p for p in [weight]), 10.0) == pytest.approx(1.0, rel=1e-5)


def test_a_partial_gradient_is_refused():
    with fake_world(2):
        mesh = cached_mesh((2,), ("gtp_remat",))
        weight = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial()]))
        weight.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
        with refuses(ValueError, "clip_grad_norm_", "parameter 0, shape (2,)", "partial sum", "reduce it first"):
            clip_grad_norm_([weight], 1.0)


def test_a_norm_type_that_is_no_norm_and_sparse_gradients_are_refused():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    for norm_type in (0, -1.0, -math.inf, math.nan):
        with refuses(ValueError, "grad_norm(norm_type=...)", "positive", str(float(norm_type))):
            grad_norm([weight], norm_type)
    embedding = nn.Embedding(3, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with refuses(ValueError, "clip_grad_norm_: the gradient of parameter 1, shape (3, 2), is sparse", "sparse=False"):
        clip_grad_norm_([weight, embedding.weight], 1.0)


def test_the_norm_has_the_precision_of_the_widest_gradient():
    weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    assert grad_norm(weights[:1]).dtype == grad_norm(weights[:2]).dtype == torch.float32
    assert grad_norm(weights).dtype == torch.float64
