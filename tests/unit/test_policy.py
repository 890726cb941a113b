"""Options, plans and meshes are checked where they are written down."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.harness import fake_world
from tests.unit.refusals import refuses
from torch_gtp import GTPPolicy, WeightPlan, build_mesh
from torch_gtp._policy import PlanReader, cast_floats, small_numel_limit

# ---- GTPPolicy


def test_the_defaults_are_the_documented_ones():
    policy = GTPPolicy()
    assert (policy.prefetch, policy.async_reduction, policy.reshard_after_forward) == (True, True, True)
    assert (policy.lookahead_bytes, policy.min_shard_numel, policy.check) == (None, None, False)
    assert (policy.reduction, policy.reduce_op) == ("mean", "avg")
    assert policy.mp == MixedPrecisionPolicy()
    assert GTPPolicy(reduction="sum").reduce_op == "sum"


def test_a_policy_cannot_be_changed_and_equal_ones_are_equal():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GTPPolicy().prefetch = False
    assert GTPPolicy(lookahead_bytes=3) == GTPPolicy(lookahead_bytes=3) != GTPPolicy()
    assert dataclasses.replace(GTPPolicy(), check=True).check


@pytest.mark.parametrize("name", ["prefetch", "async_reduction", "reshard_after_forward", "check"])
@pytest.mark.parametrize("value", [1, None, "yes"])
def test_switches_take_bools_only(name, value):
    with refuses(TypeError, f"GTPPolicy({name}=...)", "expected a bool", repr(value)):
        GTPPolicy(**{name: value})


@pytest.mark.parametrize("name", ["lookahead_bytes", "coalesce_bytes", "min_shard_numel"])
@pytest.mark.parametrize("value", [1.5, True, "3"])
def test_numbers_take_ints_only(name, value):
    with refuses(TypeError, f"GTPPolicy({name}=...)", "expected an int or None", repr(value)):
        GTPPolicy(**{name: value})


@pytest.mark.parametrize("name", ["lookahead_bytes", "coalesce_bytes", "min_shard_numel"])
def test_numbers_are_not_negative(name):
    assert getattr(GTPPolicy(**{name: 0}), name) == 0
    with refuses(ValueError, f"GTPPolicy({name}=...)", "non-negative", "-1"):
        GTPPolicy(**{name: -1})


@pytest.mark.parametrize("value", ["avg", "SUM", None, 1])
def test_only_two_reductions_are_known(value):
    with refuses(ValueError, "GTPPolicy(reduction=...)", "'mean' or 'sum'", repr(value)):
        GTPPolicy(reduction=value)


def test_mixed_precision_is_pytorchs_own_class():
    with refuses(TypeError, "GTPPolicy(mp=...)", "torch.distributed.fsdp.MixedPrecisionPolicy", "dtype"):
        GTPPolicy(mp=torch.bfloat16)


@pytest.mark.parametrize("name", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_dtypes_of_mixed_precision_are_floating_point(name):
    with refuses(ValueError, "GTPPolicy(mp=...)", name, "floating-point", "torch.int8"):
        GTPPolicy(mp=MixedPrecisionPolicy(**{name: torch.int8}))
    with refuses(TypeError, "GTPPolicy(mp=...)", name, "'bfloat16'"):
        GTPPolicy(mp=MixedPrecisionPolicy(**{name: "bfloat16"}))


# ---- WeightPlan


@pytest.mark.parametrize("value", ["0", 0.0, False])
def test_a_plans_dim_is_an_int(value):
    with refuses(TypeError, "WeightPlan(shard_dim=...)", "expected an int or None", repr(value)):
        WeightPlan(shard_dim=value)


def test_a_plans_other_fields_have_their_types():
    with refuses(TypeError, "WeightPlan(replicate=...)", "expected a bool or None", "1"):
        WeightPlan(replicate=1)
    with refuses(TypeError, "WeightPlan(mesh=...)", "expected a DeviceMesh", "tuple"):
        WeightPlan(mesh=(2, 2))


def test_a_plan_does_not_ask_for_both_a_split_and_replicas():
    with refuses(ValueError, "replicate=True", "shard_dim", "drop one"):
        WeightPlan(replicate=True, shard_dim=0)
    assert WeightPlan(replicate=False, shard_dim=1).forces_shard


@pytest.mark.parametrize(
    ("plan", "forces"),
    [
        (WeightPlan(), False),
        (WeightPlan(replicate=True), False),
        (WeightPlan(replicate=False), True),
        (WeightPlan(shard_dim=0), True),
    ],
)
def test_which_plans_shard_whatever_the_size(plan, forces):
    assert plan.forces_shard == forces


# ---- which plan a parameter has

WEIGHT = nn.Parameter(torch.zeros(2, 2))
ROWS, COLUMNS, WHOLE = WeightPlan(shard_dim=0), WeightPlan(shard_dim=1), WeightPlan(replicate=True)


def test_an_exact_name_goes_before_any_pattern():
    reader = PlanReader({"layers.*.weight": ROWS, "layers.1.weight": COLUMNS, "head.weight": WHOLE})
    assert reader.of("layers.0.weight", WEIGHT) is ROWS
    assert reader.of("layers.1.weight", WEIGHT) is COLUMNS
    assert reader.of("other.weight", WEIGHT) == WeightPlan()
    assert reader.unmatched() == ["head.weight"]


def test_patterns_that_disagree_about_a_parameter_are_refused():
    reader = PlanReader({"layers.*": ROWS, "*.weight": COLUMNS})
    with refuses(ValueError, "layers.0.weight", "['layers.*', '*.weight']", "exclusive"):
        reader.of("layers.0.weight", WEIGHT)
    same = PlanReader({"layers.*": ROWS, "*.weight": WeightPlan(shard_dim=0)})
    assert same.of("layers.0.weight", WEIGHT) == ROWS
    assert same.unmatched() == []


def test_a_callable_plan_is_asked_for_every_parameter():
    asked = []

    def plan(fqn, param):
        asked.append((fqn, param))
        return WHOLE if fqn == "a" else None

    reader = PlanReader(plan)
    assert [reader.of("a", WEIGHT), reader.of("b", WEIGHT)] == [WHOLE, WeightPlan()]
    assert asked == [("a", WEIGHT), ("b", WEIGHT)]
    assert reader.unmatched() == []


def test_what_is_not_a_plan_is_refused():
    with refuses(TypeError, "plan=...", "a mapping of names to WeightPlan or a callable", "list"):
        PlanReader(["weight"])
    with refuses(TypeError, "plan=...", "str -> WeightPlan", "'weight' -> dict"):
        PlanReader({"weight": {"shard_dim": 0}})
    with refuses(TypeError, "plan=...", "str -> WeightPlan", "3 -> WeightPlan"):
        PlanReader({3: ROWS})
    with refuses(TypeError, "layers.0.weight", "returned int", "return a WeightPlan or None"):
        PlanReader(lambda fqn, param: 0).of("layers.0.weight", WEIGHT)


# ---- sizes and casts


@pytest.mark.parametrize(
    ("asked", "largest", "limit"),
    [(None, 0, 0), (None, 160, 10), (None, 161, 11), (None, 1 << 30, 1 << 16), (0, 1000, 0), (7, 1000, 7)],
)
def test_parameters_stay_whole_below_a_sixteenth_of_the_largest_and_65536(asked, largest, limit):
    assert small_numel_limit(GTPPolicy(min_shard_numel=asked), largest) == limit


def test_only_floating_point_tensors_are_cast():
    ids, mask, x = torch.arange(3), torch.ones(2, dtype=torch.bool), torch.rand(2)
    value = {"ids": ids, "more": [mask, (x, "text", None)]}
    cast = cast_floats(value, torch.bfloat16)
    assert cast["ids"] is ids
    assert cast["more"][0] is mask
    assert cast["more"][1][0].dtype == torch.bfloat16
    assert cast["more"][1][1:] == ("text", None)
    assert cast_floats(value, None) is value
    assert cast_floats(x, torch.float32) is x


# ---- build_mesh


@pytest.mark.parametrize(
    ("world", "tp", "shards", "shape"),
    [
        (8, 2, 4, (2, 2, 2)),
        (8, 1, 8, (1, 1, 8)),
        (8, 8, 8, (1, 8, 1)),
        (4, 1, 1, (4, 1, 1)),
        (1, 1, 1, (1, 1, 1)),
    ],
)
def test_a_mesh_has_dp_tp_and_gtp_remat_in_this_order(world, tp, shards, shape):
    with fake_world(world):
        mesh = build_mesh("cpu", tp=tp, num_weight_shards=shards)
        assert mesh.mesh_dim_names == ("dp", "tp", "gtp_remat")
        assert mesh.shape == shape
        assert mesh.mesh.flatten().tolist() == list(range(world))


def test_a_mesh_may_span_fewer_ranks_than_there_are():
    with fake_world(8):
        assert build_mesh("cpu", num_weight_shards=2, world_size=4).shape == (2, 1, 2)


@pytest.mark.parametrize("shards", [1, 3, 6])
def test_a_weight_has_a_multiple_of_tp_shards(shards):
    with refuses(ValueError, f"num_weight_shards={shards}", "tp=4", "multiple", "gtp_remat"):
        build_mesh("cpu", tp=4, num_weight_shards=shards, world_size=12)


def test_a_world_is_a_multiple_of_the_shards():
    with refuses(ValueError, "world_size=12", "num_weight_shards=8", "multiple", "dp"):
        build_mesh("cpu", tp=2, num_weight_shards=8, world_size=12)


@pytest.mark.parametrize("name", ["tp", "num_weight_shards", "world_size"])
def test_sizes_of_a_mesh_are_positive_ints(name):
    sizes = {"tp": 1, "num_weight_shards": 2, "world_size": 4}
    with refuses(TypeError, f"build_mesh({name}=...)", "expected an int", "2.0"):
        build_mesh("cpu", **{**sizes, name: 2.0})
    with refuses(TypeError, f"build_mesh({name}=...)", "expected an int", "True"):
        build_mesh("cpu", **{**sizes, name: True})
    with refuses(ValueError, f"build_mesh({name}=...)", "at least 1", "0"):
        build_mesh("cpu", **{**sizes, name: 0})
