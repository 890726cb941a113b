"""Dtypes of compute, of the wire, of gradients, inputs and outputs. Oracle: the plain model in the compute dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.dist.twin import assert_grads, gather_mesh, hybrid_mesh, on_ranks, randn, reduce_parts, seeded, shard
from tests.harness import cached_mesh, current_double
from tests.models import MLP
from torch_gtp import GTPPolicy, gtp_shard

BF16, FP32 = torch.bfloat16, torch.float32
# Of the largest element: an average of two numbers that is rounded to bf16 on the wire, and once more on its way
BF16_ROUNDING = 2**-8


class Net(nn.Module):
    """A norm (replicated), a buffer, integer inputs, and outputs in a dictionary."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.mlp = MLP(6, 10, 7)
        self.register_buffer("scale", torch.tensor(0.3))

    def forward(self, ids, x):
        self.seen = x.dtype
        h = self.norm(self.embed(ids) + x)
        return {"out": self.mlp(h) * self.scale.to(h.dtype), "ids": ids}


build = seeded(Net)


def batch(coordinate):
    return torch.arange(4) + coordinate, randn(4, 6, seed=coordinate)


def run(model, coordinate, dtype=FP32):
    ids, x = batch(coordinate)
    model(ids, x.to(dtype))["out"].float().square().mean().backward()


def plain_grads_in(dtype, reduce_dtype, coordinates):
    """Each rank's gradients of the plain model in `dtype`, averaged in `reduce_dtype`, in the parameters' own fp32."""
    parts = []
    for coordinate in range(coordinates):
        model = build().to(dtype)
        run(model, coordinate, dtype)
        parts.append({name: p.grad.to(reduce_dtype) for name, p in model.named_parameters()})
    return {name: grad.float() for name, grad in reduce_parts(parts).items()}


def mixed(**options):
    return GTPPolicy(mp=MixedPrecisionPolicy(**options), min_shard_numel=1)


def dtypes(calls, op):
    return {call.dtype for call in calls if call.op == op}


@pytest.mark.parametrize("reduce_dtype", [None, FP32, BF16], ids=str)
@on_ranks(2)
def test_compute_in_bf16_equals_the_plain_model_in_bf16(rank, world, reduce_dtype):
    model = gtp_shard(build(), gather_mesh(), policy=mixed(param_dtype=BF16, reduce_dtype=reduce_dtype))
    expected = plain_grads_in(BF16, reduce_dtype or BF16, world)
    for _ in range(3):
        with current_double().section() as calls:
            run(model, rank)
        assert dtypes(calls, "all_gather") == {BF16}
        assert dtypes(calls, "reduce_scatter") == dtypes(calls, "all_reduce") == {reduce_dtype or BF16}
        assert {p.grad.dtype for p in model.parameters()} == {p.dtype for p in model.parameters()} == {FP32}
        # In fp32 an average of two bf16 numbers is exact
        assert_grads(model, expected, 0.0 if reduce_dtype is FP32 else BF16_ROUNDING)
        model.zero_grad()


@on_ranks(2)
def test_gradients_may_be_reduced_in_bf16_after_computing_in_fp32(rank, world):
    model = gtp_shard(build(), gather_mesh(), policy=mixed(reduce_dtype=BF16))
    expected = plain_grads_in(FP32, BF16, world)
    for _ in range(2):
        with current_double().section() as calls:
            run(model, rank)
        assert dtypes(calls, "all_gather") == {FP32}
        assert dtypes(calls, "reduce_scatter") == dtypes(calls, "all_reduce") == {BF16}
        assert_grads(model, expected, BF16_ROUNDING)
        model.zero_grad()


@on_ranks(4)
def test_both_reductions_of_a_hybrid_mesh_use_the_reduction_dtype(rank, world):
    model = gtp_shard(build(), hybrid_mesh(), policy=mixed(param_dtype=BF16, reduce_dtype=FP32))
    expected = plain_grads_in(BF16, FP32, world)
    for _ in range(2):
        with current_double().section() as calls:
            run(model, rank)
        assert dtypes(calls, "reduce_scatter") == dtypes(calls, "all_reduce") == {FP32}
        assert_grads(model, expected)  # two exact averages, one after the other, as in the oracle's tree
        model.zero_grad()


@on_ranks(1)
def test_one_rank_computes_in_bf16_too(rank, world):
    model = gtp_shard(build(), cached_mesh((1,), ("gtp_remat",)), policy=mixed(param_dtype=BF16))
    for _ in range(2):
        run(model, 0)
        assert_grads(model, plain_grads_in(BF16, BF16, 1))
        model.zero_grad()
    assert current_double().log == []


@on_ranks(2)
def test_the_gathered_bytes_are_those_of_the_compute_dtype(rank, world):
    model = gtp_shard(build(), gather_mesh(), policy=mixed(param_dtype=BF16))
    with current_double().section() as calls, torch.no_grad():
        model(*batch(rank))
    padded_rows = {"embed": 12 * 6, "mlp.0": 10 * 6, "mlp.2": 8 * 10}
    assert sorted(call.nbytes for call in calls) == sorted(2 * numel for numel in padded_rows.values())


# ---- inputs and outputs


@on_ranks(2)
def test_floating_point_inputs_are_cast_and_others_are_not(rank, world):
    model = gtp_shard(build(), gather_mesh(), policy=mixed(param_dtype=BF16))
    ids, x = batch(0)
    out = model(ids, x=x)
    assert model.seen == BF16
    assert out["ids"] is ids
    assert out["out"].dtype == BF16
    assert model.scale.dtype == FP32  # buffers stay as they are, as under fully_shard


@on_ranks(2)
def test_inputs_are_left_alone_when_asked(rank, world):
    model = gtp_shard(MLP(6, 10, 7), gather_mesh(), policy=mixed(param_dtype=BF16, cast_forward_inputs=False))
    assert model(randn(2, 6).bfloat16()).dtype == BF16
    with pytest.raises(RuntimeError, match="dtype"):
        model(randn(2, 6))
    assert model(randn(2, 6).bfloat16()).dtype == BF16


@pytest.mark.parametrize("dtype", [FP32, torch.float64], ids=str)
@on_ranks(2)
def test_floating_point_outputs_are_cast_and_others_are_not(rank, world, dtype):
    model = gtp_shard(build(), gather_mesh(), policy=mixed(param_dtype=BF16, output_dtype=dtype))
    out = model(*batch(0))
    assert out["out"].dtype == dtype
    assert out["ids"].dtype == torch.int64
    plain = build().bfloat16()(batch(0)[0], batch(0)[1].bfloat16())["out"].to(dtype)
    assert torch.equal(out["out"], plain)


@on_ranks(2)
def test_a_part_with_a_policy_of_its_own_casts_at_its_own_border(rank, world):
    """A head in fp32 behind a body in bf16: loss functions like it that way."""
    model = nn.Sequential(MLP(6, 10, 8), nn.Linear(8, 5))
    gtp_shard(model[0], gather_mesh(), policy=mixed(param_dtype=BF16, output_dtype=FP32))
    gtp_shard(model, gather_mesh(), policy=mixed())
    seen = {}
    model[0][0].register_forward_hook(lambda module, args, out: seen.update(body=out.dtype))
    model[1].register_forward_hook(lambda module, args, out: seen.update(head=out.dtype))
    for _ in range(2):
        with current_double().section() as calls:
            model(randn(3, 6)).square().mean().backward()
    assert seen == {"body": BF16, "head": FP32}
    by_shape = {call.shape: call.dtype for call in calls if call.op != "all_reduce"}
    assert by_shape == {(10, 6): BF16, (8, 10): BF16, (6, 8): FP32}
    assert {call.dtype for call in calls if call.op == "all_reduce"} == {BF16, FP32}


# ---- parameters that are not fp32


@on_ranks(2)
def test_a_model_in_bf16_is_gathered_as_it_is_stored(rank, world):
    model = shard(build().bfloat16())
    with current_double().section() as calls:
        run(model, rank, BF16)
    assert {call.dtype for call in calls} == {BF16}
    assert {p.grad.dtype for p in model.parameters()} == {BF16}


@on_ranks(2)
def test_a_gradient_dtype_that_the_user_asked_for_is_kept(rank, world):
    model = gtp_shard(build().bfloat16(), gather_mesh(), policy=mixed(reduce_dtype=FP32))
    for parameter in model.parameters():
        parameter.grad_dtype = FP32
    expected = plain_grads_in(BF16, FP32, world)
    for _ in range(2):
        with current_double().section() as calls:
            run(model, rank, BF16)
        assert dtypes(calls, "all_gather") == {BF16}
        assert dtypes(calls, "reduce_scatter") == {FP32}
        assert {p.grad.dtype for p in model.parameters()} == {FP32}
        assert_grads(model, expected)  # nothing was rounded to bf16 on the way
        model.zero_grad()


@on_ranks(2)
def test_weights_of_several_dtypes_live_in_one_model(rank, world):
    def build():
        model = MLP(6, 10, 8, 5)
        model[2].to(torch.float64)
        return model

    def forward(model, x):
        h = F.gelu(model[0](x)).double()
        return model[4](F.gelu(model[2](h)).float())

    model, plain = seeded(build)(), seeded(build)()
    shard(model)
    for _ in range(2):
        with current_double().section() as calls:
            forward(model, randn(3, 6)).square().mean().backward()
    forward(plain, randn(3, 6)).square().mean().mul(2).backward()
    assert {call.dtype for call in calls} == {FP32, torch.float64}
    assert_grads(model, {name: p.grad for name, p in plain.named_parameters()})


@on_ranks(2)
def test_integer_parameters_are_neither_cast_nor_reduced(rank, world):
    model = build()
    model.table = nn.Parameter(torch.arange(24).view(6, 4), requires_grad=False)
    gtp_shard(model, gather_mesh(), policy=mixed(param_dtype=BF16))
    model.mlp.register_forward_pre_hook(lambda module, args: torch.testing.assert_close(
        model.table, torch.arange(24).view(6, 4), rtol=0, atol=0
    ))  # fmt: skip
    with current_double().section() as calls:
        run(model, rank)
    assert dtypes(calls, "all_gather") == {BF16, torch.int64}
    assert dtypes(calls, "reduce_scatter") == {BF16}


@on_ranks(2)
def test_autocast_works_on_sharded_weights(rank, world):
    plain, model = build(), shard(build())

    def run_autocast(model):
        with torch.autocast("cpu", BF16):
            out = model(*batch(0))["out"]
        out.float().square().mean().backward()
        return out

    for _ in range(2):
        assert torch.equal(run_autocast(model), run_autocast(plain))
    assert_grads(model, {name: p.grad for name, p in plain.named_parameters()})


@pytest.mark.parametrize("make", ["net", "mlp"])
@on_ranks(2)
def test_a_forward_inside_gathered_computes_in_the_compute_dtype(rank, world, make):
    model, inputs = (build(), batch(0)) if make == "net" else (MLP(6, 10, 7), (randn(3, 6),))
    gtp_shard(model, gather_mesh(), policy=mixed(param_dtype=BF16))
    with torch.no_grad():
        outside = model(*inputs)
        with model.gathered():
            assert {p.dtype for p in model.parameters()} == {FP32}
            inside = model(*inputs)
    for ours, theirs in zip(*map(torch.utils._pytree.tree_leaves, (inside, outside)), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
