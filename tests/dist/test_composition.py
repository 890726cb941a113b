"""`gtp_shard` together with an outer data parallelism, on parts of a model, and on several models at once."""

from __future__ import annotations

import contextlib

import pytest
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.dist.twin import REORDERED, assert_grads, on_ranks, plain_grads, randn, seeded, shard
from tests.harness import cached_mesh, current_double, run_ranks
from tests.models import CASES, MLP, TiedLM, next_token_loss
from tests.parity import adamw
from tests.reference import assert_matches, gather_full_dict, reference_step
from torch_gtp import GTPModule, GTPPolicy, WeightPlan, gtp_shard

LM = CASES["attention_lm"]
STEPS = 3


def lm_batch(step, coordinate):
    return LM.batch(10 * step + coordinate)


def gather_only():
    return cached_mesh((2,), ("gtp_remat",))


# ---- inside an outer FSDP


@contextlib.contextmanager
def watched_gathers():
    """Every gather reads a shard that the outer unit has made whole: not one that belongs to a unit still closed."""
    from torch_gtp import _runtime

    original, seen = _runtime.issue_gather, []

    def issue_gather(root, param, direction, stored):
        owner = param.owners[0].module()._parameters[param.owners[0].name]
        assert owner is stored, f"{param.fqn} is gathered from a tensor that its module does not hold now"
        assert stored._local_tensor.shape == param.layout.shard_shape, f"{param.fqn}: its outer unit is closed"
        seen.append((direction, param))
        original(root, param, direction, stored)

    _runtime.issue_gather = issue_gather
    try:
        yield seen
    finally:
        _runtime.issue_gather = original


def wrap_outside(model, wrap, mesh):
    for layer in model.layers:
        wrap(layer, mesh=mesh)
    return wrap(model, mesh=mesh)


def train_inside(rank, world, wrap_name, axes, shape, tensor_parallel):
    mesh = cached_mesh(shape, axes)
    inner = mesh["tp", "gtp_remat"] if "tp" in axes else mesh["gtp_remat"]
    model = LM.build()
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], LM.plan())
    gtp_shard(model, inner, policy=GTPPolicy(min_shard_numel=1))
    wrap_outside(model, {"fully_shard": fully_shard, "replicate": replicate}[wrap_name], mesh["dp"])
    assert isinstance(model, FSDPModule)
    assert isinstance(model, GTPModule)
    optimizer = adamw(model.parameters())
    coordinate = mesh.get_local_rank("dp") * shape[-1] + mesh.get_local_rank("gtp_remat")
    grads = []
    with watched_gathers() as gathers:
        for step in range(STEPS):
            next_token_loss(model, lm_batch(step, coordinate)).backward()
            assert current_double().problems() == []
            grads.append(gather_full_dict({n: p.grad for n, p in model.named_parameters()}))
            optimizer.step()
            optimizer.zero_grad()
    ahead = {direction for direction, _ in gathers}
    units = {param.fqn: id(param.unit) for _, param in gathers}
    orders = [
        [model._gtp.root.params[index].fqn for index in order]
        for direction in ahead
        for order in model._gtp.root.chains.orders(direction)
    ]
    params = gather_full_dict(dict(model.named_parameters()))
    return (grads, params, len(set(units.values())), orders) if rank == 0 else None


@pytest.mark.parametrize("wrap", ["fully_shard", "replicate"])
@pytest.mark.parametrize(
    ("axes", "shape", "tensor_parallel"),
    [
        (("dp", "gtp_remat"), (2, 2), False),
        (("dp", "tp", "gtp_remat"), (2, 1, 2), False),
        (("dp", "tp", "gtp_remat"), (1, 2, 2), True),
    ],
    ids=["dp2-gtp2", "dp2-tp1-gtp2", "dp1-tp2-gtp2"],
)
def test_training_inside_an_outer_fsdp_equals_the_plain_model(wrap, axes, shape, tensor_parallel):
    grads, params, units, _ = run_ranks(train_inside, 4, wrap, axes, shape, tensor_parallel)[0]
    coordinates = shape[0] * shape[-1]
    batches = [[[lm_batch(step, c) for c in range(coordinates)]] for step in range(STEPS)]
    expected = reference_step(LM.build, batches, adamw, next_token_loss)
    for step in range(STEPS):
        assert_matches(grads[step], expected.grads[step], REORDERED, f"gradients of step {step}")
    assert_matches(params, expected.params, REORDERED, "parameters")
    assert units == 3  # two layers and the rest


@on_ranks(4)
def test_stored_parameters_inside_fully_shard_are_split_over_both_axes(rank, world):
    mesh = cached_mesh((2, 2), ("dp", "gtp_remat"))
    model = gtp_shard(LM.build(), mesh["gtp_remat"], policy=GTPPolicy(min_shard_numel=1))
    wrap_outside(model, fully_shard, mesh["dp"])
    weight = model.layers[0].mlp.up.weight  # 36 x 16
    assert weight.device_mesh == mesh
    assert weight.to_local().shape == (9, 16)
    assert str(weight.placements) == "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    assert model.norm.weight.placements == (Shard(0), Replicate())


@on_ranks(4)
def test_accumulation_inside_fully_shard_equals_the_plain_model(rank, world):
    mesh = cached_mesh((2, 2), ("dp", "gtp_remat"))
    model = gtp_shard(LM.build(), mesh["gtp_remat"], policy=GTPPolicy(min_shard_numel=1))
    wrap_outside(model, fully_shard, mesh["dp"])

    def run(model, coordinate):
        for micro in range(2):
            if isinstance(model, FSDPModule):
                FSDPModule.set_requires_gradient_sync(model, micro == 1)
            next_token_loss(model, lm_batch(micro, coordinate)).backward()

    expected = plain_grads(LM.build, run, world)
    for _ in range(2):
        run(model, rank)
        actual = gather_full_dict({n: p.grad for n, p in model.named_parameters()})
        assert_matches(actual, expected, REORDERED, "gradients")
        model.zero_grad()


# ---- parts and wholes


def lm_run(model, coordinate):
    next_token_loss(model, lm_batch(0, coordinate)).backward()


@on_ranks(2)
def test_blocks_that_were_sharded_first_become_part_of_their_parents_root(rank, world):
    model = LM.build()
    policy = GTPPolicy(min_shard_numel=1)
    for layer in model.layers:
        gtp_shard(layer, gather_only(), policy=policy)
    layer = model.layers[0]
    assert layer._gtp.root.params[0].fqn == "attention_norm.weight"
    gtp_shard(model, gather_only(), policy=policy)
    root = model._gtp.root
    assert layer._gtp.root is root
    assert sorted(param.fqn for param in root.params) == sorted(name for name, _ in model.named_parameters())
    assert isinstance(layer, GTPModule)
    expected = plain_grads(LM.build, lm_run, world)
    for _ in range(3):
        with current_double().section() as calls:
            lm_run(model, rank)
        assert_grads(model, expected)
        model.zero_grad()
    # One chain over all of it: 16 uses of forward, 14 gathers more in backward, one bucket of replicated parameters
    assert len(calls) == 16 + 14 + 16 + 1


@on_ranks(2)
def test_a_block_that_was_trained_alone_can_become_part_of_a_root(rank, world):
    model = LM.build()
    block = gtp_shard(model.layers[0], gather_only(), policy=GTPPolicy(min_shard_numel=1))
    block(randn(2, 5, 16)).sum().backward()
    block.zero_grad()
    gtp_shard(model, gather_only(), policy=GTPPolicy(min_shard_numel=1))
    lm_run(model, rank)
    assert_grads(model, plain_grads(LM.build, lm_run, world))


@on_ranks(2)
def test_a_root_and_its_block_keep_their_own_policies(rank, world):
    model = LM.build()
    gtp_shard(model.layers[0], gather_only(), policy=GTPPolicy(min_shard_numel=10**6), plan={
        "mlp.up.weight": WeightPlan(shard_dim=0)
    })  # fmt: skip
    gtp_shard(model, gather_only(), policy=GTPPolicy(min_shard_numel=1))
    assert model.layers[0].mlp.gate.weight.placements == (Replicate(),)
    assert model.layers[0].mlp.up.weight.placements == model.layers[1].mlp.up.weight.placements == (Shard(0),)
    lm_run(model, rank)
    assert_grads(model, plain_grads(LM.build, lm_run, world))


def tied_run(model, coordinate):
    next_token_loss(model, CASES["tied_lm"].batch(coordinate)).backward()


@on_ranks(2)
def test_tied_weights_that_were_sharded_one_by_one_are_one_parameter_of_the_root(rank, world):
    build = seeded(TiedLM)
    model = build()
    gtp_shard(model.embed, gather_only(), policy=GTPPolicy(min_shard_numel=1))
    gtp_shard(model.head, gather_only(), policy=GTPPolicy(min_shard_numel=1))
    gtp_shard(model, gather_only(), policy=GTPPolicy(min_shard_numel=1))
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in build().named_parameters()]
    expected = plain_grads(build, tied_run, world)
    for _ in range(3):
        tied_run(model, rank)
        assert_grads(model, expected, REORDERED)  # two uses, each averaged over ranks before they are added
        model.zero_grad()


@on_ranks(2)
def test_two_roots_interleave_in_one_graph_and_share_nothing(rank, world):
    """A generator and a discriminator, say: forwards nested one in the other, one backward through both."""
    build_first, build_second = seeded(lambda: MLP(6, 10, 6), 1), seeded(lambda: MLP(6, 9, 6), 2)

    def run(pair, coordinate):
        first, second = pair
        x = randn(3, 6, seed=coordinate)
        second(first(second(first(x)))).square().mean().backward()

    plain = [nn.ModuleList([build_first(), build_second()]) for _ in range(world)]
    for coordinate, pair in enumerate(plain):
        run(pair, coordinate)
    first, second = shard(build_first(), gather_only()), shard(build_second(), gather_only())
    assert first._gtp.root is not second._gtp.root
    for _ in range(3):
        run((first, second), rank)
        for index, model in enumerate((first, second)):
            parts = [{n: p.grad for n, p in pair[index].named_parameters()} for pair in plain]
            expected = {name: (parts[0][name] + parts[1][name]) / 2 for name in parts[0]}
            assert_grads(model, expected, REORDERED)  # two uses of every weight
            model.zero_grad()


@on_ranks(2)
def test_a_module_under_gtp_shard_inside_a_plain_one_and_around_another_root(rank, world):
    """A root that is entered while another root's forward is open, as a submodule of no root of its own."""
    build = seeded(lambda: nn.Sequential(MLP(6, 10, 6), nn.Linear(6, 5), MLP(5, 8, 4)))

    def run(model, coordinate):
        model(randn(3, 6, seed=coordinate)).square().mean().backward()

    expected = plain_grads(build, run, world)
    model = build()
    shard(model[0], gather_only())
    shard(model[2], gather_only())
    for _ in range(2):
        run(model, rank)
        sharded = {n: p.grad for n, p in model.named_parameters() if isinstance(p, DTensor)}
        assert_matches(gather_full_dict(sharded), {n: expected[n] for n in sharded}, 0.0, "gradients")
        model.zero_grad()


# ---- plans


@on_ranks(4)
def test_a_plan_puts_single_weights_on_another_mesh_dim_or_nowhere(rank, world):
    mesh = cached_mesh((2, 2), ("dp", "gtp_remat"))
    wide = cached_mesh((4,), ("gtp_remat",))
    plan = {
        "layers.*.mlp.up.weight": WeightPlan(mesh=wide),
        "layers.*.mlp.down.weight": WeightPlan(shard_dim=1),
        "layers.0.mlp.gate.weight": WeightPlan(mesh=wide, shard_dim=1),
        "layers.*.attention.q.weight": WeightPlan(replicate=True),
        "norm.weight": WeightPlan(replicate=False),
    }
    model = shard(LM.build(), mesh, plan=plan)
    layer = model.layers[0]
    assert layer.mlp.up.weight.to_local().shape == (9, 16)
    assert layer.mlp.up.weight.placements == (Shard(0),)
    assert layer.mlp.down.weight.to_local().shape == (16, 18)
    assert layer.mlp.gate.weight.to_local().shape == (36, 4)
    assert layer.attention.q.weight.placements == (Replicate(), Replicate())
    assert model.norm.weight.placements == (Replicate(), Shard(0))
    expected = plain_grads(LM.build, lm_run, world)
    for _ in range(3):
        lm_run(model, rank)
        assert_grads(model, expected, REORDERED)
        model.zero_grad()


@on_ranks(2)
def test_a_callable_plan_chooses_by_name_and_shape(rank, world):
    def plan(fqn, param):
        return WeightPlan(shard_dim=1) if param.ndim == 2 and param.shape[1] > param.shape[0] else None

    model = shard(LM.build(), gather_only(), plan=plan)
    dims = {name: p.placements[0].dim for name, p in model.named_parameters() if p.ndim == 2}
    assert dims["layers.1.mlp.down.weight"] == 1
    assert dims["layers.1.mlp.up.weight"] == 0
    lm_run(model, rank)
    assert_grads(model, plain_grads(LM.build, lm_run, world))


# ---- one rank


@on_ranks(1)
def test_one_rank_without_replicate_axis_leaves_the_module_alone(rank, world):
    model = LM.build()
    forward = {name: type(module).__call__ for name, module in model.named_modules()}
    before = dict(model.named_parameters())
    shard(model, cached_mesh((1,), ("gtp_remat",)))
    assert all(now is before[name] for name, now in model.named_parameters())
    hooked = {name: type(module).__call__ for name, module in model.named_modules() if name}
    assert hooked == {name: call for name, call in forward.items() if name}
    lm_run(model, 0)
    assert current_double().log == []
    expected = plain_grads(LM.build, lm_run, 1)
    assert_matches({n: p.grad for n, p in model.named_parameters()}, expected, 0.0, "gradients")


@on_ranks(2)
def test_one_gather_rank_with_a_replicate_axis_only_reduces(rank, world):
    model = shard(LM.build(), cached_mesh((2, 1), ("dp", "gtp_remat")))
    expected = plain_grads(LM.build, lm_run, world)
    for _ in range(2):
        with current_double().section() as calls:
            lm_run(model, rank)
        assert {(call.op, call.reduction) for call in calls} == {("all_reduce", "avg")}
        assert sum(call.nbytes for call in calls) == 4 * sum(p.numel() for p in LM.build().parameters())
        assert_grads(model, expected)
        model.zero_grad()
