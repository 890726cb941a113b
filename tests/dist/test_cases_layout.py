"""Situations that other libraries got wrong, I: construction, tied weights, uneven and empty shards, dtypes.

Each test stands for a public bug report about another library; none of them may happen here.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.dist.twin import (
    REORDERED,
    assert_grads,
    assert_local,
    check_twin,
    gather_mesh,
    hybrid_mesh,
    on_ranks,
    plain_grads,
    randn,
    reduce_parts,
    seeded,
    shard,
    training_run,
)
from tests.harness import cached_mesh, count, current_double
from tests.models import CASES, MLP, TiedLM
from tests.reference import gather_full, gather_full_dict, relative_error


def square_run(*shape):
    def run(model, coordinate):
        model(randn(*shape, seed=coordinate)).square().mean().backward()

    return run


# ---- construction


@on_ranks(2)
def test_a_parameter_without_dimensions_stays_whole_and_its_gradient_is_averaged(rank, world):
    """A scalar beside a linear layer once broke sharding."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.tensor(1.5)), nn.Linear(6, 6)
            self.empty = nn.Parameter(torch.empty(0))

        def forward(self, x):
            return self.linear(x) * self.scale + self.empty.sum()

    model = check_twin(rank, world, seeded(Scaled), square_run(4, 6))
    assert model.scale._local_tensor.shape == ()
    assert model.empty._local_tensor.shape == (0,)


@on_ranks(4)
def test_initialisation_of_a_model_on_meta_equals_that_of_the_unsharded_model(rank, world):
    """In place on the shards, every rank once drew the same numbers: all shards were equal."""
    from torch_gtp import materialize_meta

    def build():
        return nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.LayerNorm(12), nn.Linear(12, 10))

    torch.manual_seed(3)
    plain = build()  # constructors draw in the order of modules, as the materialisation does
    for mesh in (gather_mesh(), hybrid_mesh(), cached_mesh((2, 2), ("tp", "gtp_remat"))):
        with torch.device("meta"):
            model = build()
        shard(model, mesh)
        materialize_meta(model, seed=3)
        found = gather_full_dict(dict(model.named_parameters()))
        assert all(torch.equal(found[name], p) for name, p in plain.named_parameters())
        rows = found["0.weight"].chunk(4)
        assert not any(torch.equal(rows[i], rows[j]) for i in range(4) for j in range(i))
        assert not torch.equal(found["0.weight"], found["1.weight"])


@on_ranks(2)
def test_an_optimizer_made_before_sharding_is_refused_at_its_first_step(rank, world):
    """It holds the tensors from before, and would train nothing, in silence."""
    model = CASES["mlp"].build()
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model)
    training_run("mlp")(model, rank)
    with pytest.raises(
        ValueError, match=r"AdamW holds 0\.weight as it was before gtp_shard .*build the optimizer after"
    ):
        optimizer.step()


@on_ranks(2)
def test_the_bias_of_a_sharded_linear_stays_whole(rank, world):
    """A weight that was built in its sharded size once made the bias 1/N too short."""
    model = check_twin(rank, world, seeded(lambda: nn.Sequential(nn.Linear(8, 10))), square_run(4, 8))
    square_run(4, 8)(model, rank)
    bias, weight = model[0].bias, model[0].weight
    assert weight._local_tensor.shape == (5, 8)
    for tensor in (bias, bias.grad, model.state_dict()["0.bias"]):
        assert tensor.shape == tensor._local_tensor.shape == (10,)
        assert all(placement.is_replicate() for placement in tensor.placements)
    with current_double().section() as calls:
        square_run(4, 8)(model, rank)
    assert count(calls)["all_reduce"] == 1


@on_ranks(4)
def test_two_models_on_different_meshes_do_not_know_of_each_other(rank, world):
    """Groups once came from the process, not from the mesh that was passed in."""
    run = training_run("attention_lm")
    meshes = {"wide": gather_mesh(), "hybrid": hybrid_mesh()}
    models = {name: shard(CASES["attention_lm"].build(), mesh) for name, mesh in meshes.items()}
    expected = plain_grads(CASES["attention_lm"].build, run, world)
    for _ in range(2):
        for model in models.values():
            run(model, rank)
        for model in models.values():
            assert_grads(model, expected, REORDERED)
            model.zero_grad()
    with current_double().section() as calls:
        run(models["hybrid"], rank)
    assert {call.group_size for call in calls if call.op != "all_reduce"} == {2}
    with current_double().section() as calls:
        run(models["wide"], rank)
    assert {call.group_size for call in calls} == {4}


@on_ranks(1)
def test_axes_of_size_one_give_the_bits_of_the_plain_model_without_a_collective(rank, world):
    """A group of one once took another path, and ignored options of the reduction."""
    for shape, names in (
        ((1,), ("gtp_remat",)),
        ((1, 1), ("dp", "gtp_remat")),
        ((1, 1, 1), ("dp", "tp", "gtp_remat")),
    ):
        for reduction in ("mean", "sum"):
            for name in ("attention_lm", "tied_lm"):
                mesh = cached_mesh(shape, names)
                run = training_run(name)
                model = check_twin(rank, world, CASES[name].build, run, mesh=mesh, reduction=reduction)
                for _ in range(3):
                    run(model, 0)
                single = plain_grads(CASES[name].build, run, 1)
                tripled = {name: grad + grad + grad for name, grad in single.items()}
                assert all(torch.equal(p.grad, tripled[name]) for name, p in model.named_parameters())
    assert not current_double().log


@on_ranks(2)
def test_a_gather_axis_of_size_one_beside_a_replicate_axis_is_data_parallelism(rank, world):
    mesh = cached_mesh((2, 1), ("dp", "gtp_remat"))
    for reduction in ("mean", "sum"):
        model = check_twin(
            rank, world, CASES["tied_lm"].build, training_run("tied_lm"), mesh=mesh, rtol=REORDERED, reduction=reduction
        )
        with current_double().section() as calls:
            training_run("tied_lm")(model, rank)
        assert count(calls) == {"all_reduce": 1}


# ---- tied weights


@pytest.mark.parametrize("order", ["root", "embedding, head, root", "head, root"])
@on_ranks(2)
def test_a_tied_weight_is_one_shard_gathered_per_use(rank, world, order):
    """Embedding and head in two groups once failed at the first forward."""
    model = CASES["tied_lm"].build()
    for part in order.split(", ")[:-1]:
        shard(model.embed if part == "embedding" else model.head)
    shard(model)
    run = training_run("tied_lm")
    expected = plain_grads(CASES["tied_lm"].build, run, world)
    for _ in range(3):
        with current_double().section() as calls:
            run(model, rank)
        assert model.embed.weight is model.head.weight
        assert_grads(model, expected, REORDERED)  # the sum of two averages, not the average of a sum
        model.zero_grad()
    assert count(calls)["reduce_scatter"] == 4
    assert sum(call.nbytes == 34 * 12 * 4 for call in calls if call.op == "all_gather") == 2


@on_ranks(4)
def test_tied_weights_of_two_pipeline_stages_are_combined_after_their_reductions(rank, world):
    """Partial sums of different rows were once mixed: both stages must hold equal slices by then."""
    mesh = cached_mesh((2, 2), ("pp", "gtp_remat"))
    stage, coordinate = mesh.get_local_rank("pp"), mesh.get_local_rank("gtp_remat")
    full = randn(33, 12, seed=1)
    ids, hidden = torch.arange(8) + 5 * coordinate, randn(4, 12, seed=2 + coordinate)

    def losses(embedding, head, ids, hidden):
        return F.embedding(ids, embedding).square().sum(), F.linear(hidden, head).square().sum()

    model = nn.Embedding(33, 12) if stage == 0 else nn.Linear(12, 33, bias=False)
    with torch.no_grad():
        model.weight.copy_(full)
    shard(model, mesh["gtp_remat"])
    (model(ids) if stage == 0 else model(hidden)).square().sum().backward()
    grad = model.weight.grad._local_tensor
    dist.all_reduce(grad, group=mesh.get_group("pp"))
    expected = torch.zeros(33, 12)
    for peer in range(2):
        both = full.clone().requires_grad_()
        sum(losses(both, both, torch.arange(8) + 5 * peer, randn(4, 12, seed=2 + peer))).backward()
        expected += both.grad / 2
    assert_local({"weight": model.weight.grad}, {"weight": expected}, REORDERED)


@on_ranks(2)
def test_a_tied_weight_counts_once_in_the_gradient_norm(rank, world):
    """The norm was once sqrt(1600) where it is sqrt(800)."""
    from torch_gtp import clip_grad_norm_

    model = shard(CASES["tied_lm"].build())
    for param in model.parameters():
        param.grad = param.detach().clone()
        param.grad._local_tensor.fill_(1)
    elements = sum(p.numel() for p in TiedLM().parameters())
    for norm in (
        clip_grad_norm_(model.parameters(), 1e9),
        torch.nn.utils.get_total_norm(p.grad for p in model.parameters()),
    ):
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        assert math.isclose(norm.item(), math.sqrt(elements), rel_tol=1e-6)


@on_ranks(2)
def test_a_tied_state_dict_loads_into_tied_and_untied_models(rank, world):
    """`KeyError: lm_head.weight` on the way back."""
    tied = shard(CASES["tied_lm"].build())
    state = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    assert {"embed.weight", "head.weight"} <= state.keys()

    other = shard(CASES["tied_lm"].build(seed=5))
    other.load_state_dict(state)
    assert other.embed.weight is other.head.weight

    untied = CASES["tied_lm"].build(seed=6)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    shard(untied).load_state_dict(state)
    assert untied.embed.weight is not untied.head.weight
    (ids,) = CASES["tied_lm"].batch(0)
    assert torch.equal(tied(ids), other(ids))
    assert torch.equal(tied(ids), untied(ids))


# ---- uneven and empty shards


@on_ranks(4)
def test_a_full_state_dict_loads_into_unevenly_nested_shards(rank, world):
    """17 rows over tensor parallelism of 2 and two shards of that: 5, 4, 4 and 4."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )

    mesh = cached_mesh((2, 2), ("tp", "gtp_remat"))

    def build(seed):
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 17)), seed)()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
        return shard(model, mesh)

    source = seeded(lambda: nn.Sequential(nn.Linear(3, 17)), 7)().state_dict()
    model = build(0)
    assert model[0].weight._local_tensor.shape == ((5, 3) if rank == 0 else (4, 3))
    set_model_state_dict(model, copy.deepcopy(source), options=StateDictOptions(full_state_dict=True))
    assert torch.equal(gather_full(model[0].weight), source["0.weight"])
    assert torch.equal(gather_full(model[0].bias), source["0.bias"])
    sharded = get_model_state_dict(model)
    fresh = build(1)
    set_model_state_dict(fresh, sharded)
    assert torch.equal(gather_full(fresh[0].weight), source["0.weight"])


@on_ranks(4)
def test_ranks_with_empty_shards_take_part_in_everything(rank, world):
    """Two rows over four ranks: an empty shard once stacked nothing on some ranks, and the rest waited for ever."""
    from torch_gtp import clip_grad_norm_, materialize_meta

    def build():
        return nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 9), nn.Linear(9, 1))

    model = check_twin(rank, world, seeded(build), square_run(4, 8), rtol=REORDERED)
    assert model[0].weight._local_tensor.shape == ((1, 8) if rank < 2 else (0, 8))
    assert model[2].weight._local_tensor.shape == ((1, 9) if rank < 1 else (0, 9))
    square_run(4, 8)(model, rank)
    expected = math.sqrt(sum(g.square().sum() for g in plain_grads(seeded(build), square_run(4, 8), world).values()))
    assert math.isclose(clip_grad_norm_(model.parameters(), 1e9).item(), expected, rel_tol=1e-6)
    for implementation in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        torch.optim.AdamW(model.parameters(), **implementation).step()
    model.load_state_dict(model.state_dict())
    torch.manual_seed(2)
    plain = build()
    with torch.device("meta"):
        fresh = build()
    materialize_meta(shard(fresh), seed=2)
    assert torch.equal(gather_full(fresh[0].weight), plain[0].weight)
    with fresh.gathered():
        assert torch.equal(fresh[2].weight, plain[2].weight)


@on_ranks(2)
def test_statistics_of_gradients_are_over_logical_rows(rank, world):
    """Padded rows were once counted among the zeros."""

    def run(model, coordinate):
        torch.relu(model(randn(4, 7, seed=coordinate))).sum().backward()

    build = seeded(lambda: nn.Sequential(nn.Linear(7, 5, bias=False)))
    model = check_twin(rank, world, build, run)
    expected = plain_grads(build, run, world)["0.weight"]
    run(model, rank)
    grad = model[0].weight.grad
    assert grad._local_tensor.shape == ((3, 7) if rank == 0 else (2, 7))
    zeros = torch.tensor([(grad._local_tensor == 0).sum(), grad._local_tensor.numel()])
    dist.all_reduce(zeros)
    assert zeros.tolist() == [(expected == 0).sum().item(), 35]


# ---- dtypes and the precision of reductions


def mixed(**dtypes):
    return MixedPrecisionPolicy(**{"param_dtype": torch.bfloat16, **dtypes})


def bfloat16_grads(build, run, coordinates, microbatches=1):
    """fp32 sums of the gradients that a model in bfloat16 has in each microbatch."""
    parts = []
    for coordinate in range(coordinates):
        total = {}
        for micro in range(microbatches):
            model = build().bfloat16()
            run(model, coordinate, micro)
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] = total.get(name, 0) + p.grad.float()
        parts.append(total)
    return reduce_parts(parts)


@on_ranks(2)
def test_a_parameter_first_used_in_the_last_microbatch_has_the_right_gradient_and_dtype(rank, world):
    """Mixed dtypes of gradients once met an assertion, with bfloat16 parameters reduced in fp32."""

    def run(model, coordinate, micro):
        model(randn(4, 10, seed=coordinate).bfloat16(), micro == 0).float().square().mean().backward()

    build = CASES["conditional"].build
    expected = bfloat16_grads(build, run, world, microbatches=2)
    for stored in (torch.float32, torch.bfloat16):
        # A bfloat16 parameter has a bfloat16 gradient: the fp32 sum, rounded once per landing.
        rtol = REORDERED if stored is torch.float32 else 2**-7
        for sync in ((True, True), (False, True)):
            model = shard(build().to(stored), mp=mixed(reduce_dtype=torch.float32))
            for micro, synchronise in enumerate(sync):
                model.set_requires_gradient_sync(synchronise)
                run(model, rank, micro)
            assert {p.grad.dtype for p in model.parameters()} == {stored}
            assert_grads(model, expected, rtol, f"{stored} {sync}")


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, torch.float64])
@on_ranks(4)
def test_the_dtype_on_the_wire_is_the_one_that_was_asked_for(rank, world, reduce_dtype):
    """fp32 was once requested, and bfloat16 sent."""
    model = shard(CASES["mlp"].build(), hybrid_mesh(), mp=mixed(reduce_dtype=reduce_dtype))
    with current_double().section() as calls:
        model(randn(4, 6, seed=rank)).sum().backward()
    assert {(call.op, call.dtype) for call in calls} == {
        ("all_gather", torch.bfloat16),
        ("reduce_scatter", reduce_dtype),
        ("all_reduce", reduce_dtype),
    }


@on_ranks(4)
def test_a_reduction_in_fp32_rounds_nothing_that_a_bfloat16_gradient_did_not(rank, world):
    def run(model, coordinate, micro=0):
        model(randn(4, 6, seed=coordinate).bfloat16()).float().square().mean().backward()

    expected = bfloat16_grads(CASES["mlp"].build, run, world)
    model = shard(CASES["mlp"].build(), mp=mixed(reduce_dtype=torch.float32))
    run(model, rank)
    assert_grads(model, expected, REORDERED)


@on_ranks(2)
def test_microbatches_accumulate_in_the_dtype_of_the_gradient(rank, world):
    """Eight microbatches added in bfloat16 once moved the norm by 3.5e-5 in the first step."""

    def run(model, coordinate, micro):
        x = randn(4, 6, seed=100 * coordinate + micro).bfloat16()
        model(x).float().square().mean().backward()

    expected = bfloat16_grads(CASES["mlp"].build, run, world, microbatches=8)
    for sync_every in (True, False):
        model = shard(CASES["mlp"].build(), mp=mixed(reduce_dtype=torch.float32))
        for micro in range(8):
            model.set_requires_gradient_sync(sync_every or micro == 7)
            run(model, rank, micro)
        assert_grads(model, expected, REORDERED)


@on_ranks(2)
def test_a_gradient_may_have_a_dtype_of_its_own(rank, world):
    """`grad_dtype`: fp32 gradients of a bfloat16 parameter."""
    model = shard(CASES["mlp"].build().bfloat16(), mp=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    for param in model.parameters():
        param.grad_dtype = torch.float32

    def run(model, coordinate, micro):
        model(randn(4, 6, seed=10 * coordinate + micro).bfloat16()).float().square().mean().backward()

    for micro in range(3):
        run(model, rank, micro)
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_grads(model, bfloat16_grads(CASES["mlp"].build, run, world, microbatches=3), REORDERED)


@on_ranks(2)
def test_autocast_computes_as_on_the_plain_model(rank, world):
    def run(model, coordinate):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(randn(4, 6, seed=coordinate))
        out.float().square().mean().backward()

    check_twin(rank, world, lambda: CASES["mlp"].build(), run)


@on_ranks(2)
def test_outputs_and_inputs_are_cast_as_the_policy_says(rank, world):
    model = shard(MLP(), mp=mixed(output_dtype=torch.float64))
    assert model(randn(4, 6)).dtype is torch.float64
    assert model[0](randn(4, 6).bfloat16()).dtype is torch.bfloat16  # only the module that was sharded casts
    uncast = shard(MLP(), mp=mixed(cast_forward_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        uncast(randn(4, 6))
    assert relative_error(model(randn(4, 6)), MLP()(randn(4, 6))) > 0


@on_ranks(4)
def test_ranks_with_fewer_rows_of_a_tensor_parallel_weight_shard_the_same_weights(rank, world):
    """The smaller slice of 5 rows over tp has 2 x 8 elements, below the limit of 20 that the larger one reaches."""
    mesh = cached_mesh((2, 2), ("tp", "gtp_remat"))
    model = nn.Sequential(nn.Linear(8, 5, bias=False), nn.Linear(8, 1, bias=False), nn.Linear(8, 8, bias=False))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
    shard(model, mesh, min_shard_numel=20)
    placements = [tuple(map(str, param.placements)) for param in model.parameters()]
    everyones = [None] * world
    dist.all_gather_object(everyones, placements)
    assert everyones == [placements] * world
    assert [param.placements[1].is_shard() for param in model.parameters()] == [True, False, True]
