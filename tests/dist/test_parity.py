"""A sharded model trains as the plain one does: the same losses, gradients and parameters.

Tolerance. Ranks run the kernels that the oracle runs, on the same numbers, so a rank's own gradients are
equal bit by bit; only sums over ranks, microbatches and tensor-parallel slices are rounded in another order.
`RTOL` is a few units of fp32's 6e-8, relative to the largest element of a tensor, after three steps of
feedback; the largest error seen is 6e-7.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.harness import cached_mesh, count, fake_world, run_ranks
from tests.models import CASES, MLP
from tests.module_trees import trees
from tests.parity import INTERLUDES, MESHES, PLANS, Setup, check_parity, counts, make_sharded, train
from torch_gtp import GTPPolicy, gtp_shard

RTOL = 1e-6

MODELS = [name for name in CASES if not name.startswith("hf_") and name != "gan"]
TP_MODELS = [name for name in MODELS if CASES[name].tp_plan]


@pytest.mark.parametrize("mesh", ["gtp2", "gtp4", "dp2-gtp2"])
@pytest.mark.parametrize("model", MODELS)
def test_training_equals_the_plain_model(model, mesh):
    check_parity(Setup(model, mesh), RTOL)


@pytest.mark.parametrize("mesh", ["gtp2", "dp2-gtp2"])
@pytest.mark.parametrize("model", ["attention_lm", "conditional"])
def test_training_without_the_node_of_linears_equals_the_plain_model(model, mesh):
    check_parity(Setup(model, mesh, one_node=False), RTOL)


@pytest.mark.parametrize("mesh", ["tp2-gtp2", "gtp2-tp2"])
@pytest.mark.parametrize("model", TP_MODELS)
def test_training_on_top_of_tensor_parallelism_equals_the_plain_model(model, mesh):
    check_parity(Setup(model, mesh), RTOL)


@pytest.mark.parametrize("mesh", ["gtp4", "dp2-gtp2", "tp2-gtp2"])
def test_summed_gradients_equal_the_plain_model(mesh):
    check_parity(Setup("attention_lm", mesh, reduction="sum"), RTOL)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sync_last_only", [False, True], ids=["sync-every", "sync-last"])
@pytest.mark.parametrize("mesh", ["gtp2", "dp2-gtp2", "tp2-gtp2"])
def test_accumulated_gradients_equal_the_plain_model(mesh, sync_last_only, reduction):
    check_parity(Setup("tied_lm", mesh, reduction, microbatches=3, sync_last_only=sync_last_only, steps=2), RTOL)


@pytest.mark.parametrize("sync_last_only", [False, True], ids=["sync-every", "sync-last"])
def test_a_branch_that_only_an_earlier_microbatch_took_is_synchronised(sync_last_only):
    check_parity(Setup("conditional", "dp2-gtp2", microbatches=2, sync_last_only=sync_last_only), RTOL)


@pytest.mark.parametrize("mesh", ["gtp2", "dp2-gtp2"])
def test_a_gradient_penalty_equals_the_plain_model(mesh):
    check_parity(Setup("gan", mesh), RTOL)


@pytest.mark.parametrize("plan", PLANS[1:])
@pytest.mark.parametrize("mesh", ["gtp4", "dp2-gtp2", "tp2-gtp2", "gtp2-tp2"])
@pytest.mark.parametrize("model", ["mlp", "attention_lm"])
def test_any_dim_and_any_parameter_can_be_sharded(model, mesh, plan):
    check_parity(Setup(model, mesh, plan=plan), RTOL)


@pytest.mark.parametrize("sync_last_only", [False, True], ids=["sync-every", "sync-last"])
def test_forwards_that_all_precede_their_backwards_equal_the_plain_model(sync_last_only):
    """As in pipeline schedules: several graphs are alive at once."""
    check_parity(Setup("attention_lm", "dp2-gtp2", microbatches=3, sync_last_only=sync_last_only, together=True), RTOL)


@pytest.mark.parametrize("interlude", INTERLUDES[1:])
def test_other_forwards_between_steps_leave_no_trace(interlude):
    check_parity(Setup("attention_lm", "gtp2", interlude=interlude), RTOL)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["gtp4", "dp2-gtp2"])
@pytest.mark.parametrize("model", ["hf_llama", "hf_qwen3"])
def test_a_hugging_face_model_equals_the_plain_model(model, mesh):
    check_parity(Setup(model, mesh), RTOL)


@pytest.mark.parametrize(
    "policy",
    [
        {"prefetch": False},
        {"lookahead_bytes": 0},
        {"lookahead_bytes": 1 << 30},
        {"async_reduction": False},
        {"wgrad_first": True},
        {"coalesce_bytes": 1000},
        {"coalesce_bytes": 1 << 20},
        {"coalesce_bytes": 1 << 20, "async_reduction": False},
        {"reshard_after_forward": False},
        {"min_shard_numel": 200},
        {"check": True},
    ],
    ids=lambda policy: "-".join(f"{key}-{value}" for key, value in policy.items()),
)
def test_every_option_equals_the_plain_model(policy):
    check_parity(Setup("attention_lm", "dp2-gtp2", microbatches=2, policy=tuple(policy.items())), RTOL)


@pytest.mark.parametrize("one_node", [False, True])
@pytest.mark.parametrize("mesh", ["gtp2", "gtp4", "dp2-gtp2"])
@pytest.mark.parametrize("model", ["mlp", "attention_lm", "shared_block"])
def test_equal_data_on_all_ranks_gives_the_bits_of_the_plain_model(model, mesh, one_node):
    """A power of two of equal gradients has an exact mean, in whatever order it is summed."""
    setup = Setup(model, mesh, same_data=True, one_node=one_node)
    check_parity(setup, 0.0)


def test_a_mesh_of_one_rank_gives_the_bits_of_the_plain_model_without_collectives():
    (outcome,) = check_parity(Setup("attention_lm", "gtp1"), 0.0)
    assert counts(outcome) == [{}, {}, {}]


# ---- counts

# Of one microbatch: uses of a sharded weight in forward, and uses whose weight autograd saves for backward.
# An embedding is not needed in backward, nor is a first layer whose input needs no gradient.
USES = {
    "mlp": (3, 2),
    "attention_lm": (16, 15),
    "tied_lm": (4, 3),
    "shared_block": (5, 4),
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("mesh", ["gtp2", "dp2-gtp2", "tp2-gtp2"])
@pytest.mark.parametrize("model", USES)
def test_counts_of_collectives_are_exact(model, mesh, microbatches):
    """Per use: a gather in forward, one in backward, a reduce-scatter.

    The weight that forward used last is not gathered again for the backward that follows, from the second
    forward on: the first one cannot foresee which weight will be its last.
    """
    if mesh.startswith("tp") and model not in TP_MODELS:
        pytest.skip("no tensor-parallel plan")
    forward, backward = USES[model]
    # Room for the last weight: a larger one is not kept.
    setup = Setup(model, mesh, microbatches=microbatches, policy=(("lookahead_bytes", 1 << 20),))
    outcomes = run_ranks(train, setup.world, setup)
    # Replicated parameters share a bucket over all data axes. Another one is for sharded weights over dp, or
    # for what a tensor-parallel plan replicates (a row-parallel bias): its gradient may be partial over tp.
    buckets = 2 if mesh == "dp2-gtp2" or (mesh == "tp2-gtp2" and model != "attention_lm") else 1
    for outcome in outcomes:
        for step, found in enumerate(counts(outcome)):
            first = 1 if step == 0 else 0
            assert found == {
                "all_gather": microbatches * (forward + backward - 1) + first,
                "reduce_scatter": microbatches * forward,
                "all_reduce": microbatches * buckets,
            }, f"step {step}"


@pytest.mark.parametrize("world", [2, 7, 512])
def test_counts_do_not_depend_on_the_size_of_the_world(world):
    setup = Setup("attention_lm")
    forward, backward = USES["attention_lm"]
    with fake_world(world) as double:
        model = make_sharded(setup, cached_mesh((world,), ("gtp_remat",)))
        for step in range(3):
            with double.section() as calls:
                setup.case.loss(model, setup.batch(step, 0, 0)).backward()
            assert double.problems() == []
            assert count(calls) == {
                "all_gather": forward + backward - (step > 0),
                "reduce_scatter": forward,
                "all_reduce": 1,
            }
        assert {call.group_size for call in double.log} == {world}


def test_unsynchronised_microbatches_reduce_nothing_over_replicate_axes():
    setup = Setup("attention_lm", "dp2-gtp2", microbatches=3, sync_last_only=True)
    for outcome in run_ranks(train, 4, setup):
        assert [found["all_reduce"] for found in counts(outcome)] == [2, 2, 2]
        assert [found["reduce_scatter"] for found in counts(outcome)] == [48, 48, 48]


@pytest.mark.parametrize("mesh", ["gtp2", "gtp4"])
def test_bytes_on_the_wire_equal_the_padded_weights(mesh):
    shards = MESHES[mesh][0][0]
    first, second, third = (
        4 * math.ceil(rows / shards) * shards * columns for rows, columns in ((10, 6), (9, 10), (3, 9))
    )
    for outcome in run_ranks(train, shards, Setup("mlp", mesh)):
        for calls in outcome.calls[1:]:
            gathered = [call.nbytes for call in calls if call.op == "all_gather"]
            reduced = [call.nbytes for call in calls if call.op == "reduce_scatter"]
            replicated = [call.nbytes for call in calls if call.op == "all_reduce"]
            assert gathered == [first, second, third, second]
            assert reduced == [third, second, first]
            assert replicated == [4 * (10 + 9 + 3)]
            assert {call.dtype for call in calls} == {torch.float32}


@pytest.mark.parametrize(
    ("policy", "weights"), [({"prefetch": False}, 1), ({"lookahead_bytes": 0}, 2), ({"lookahead_bytes": 2 << 14}, 3)]
)
def test_gathered_memory_is_the_weight_in_use_and_the_lookahead(policy, weights):
    """Of a chain of equal weights: never more than the plan, in forward and in backward, nothing between steps."""
    with fake_world(4) as double:
        mesh = cached_mesh((4,), ("gtp_remat",))
        model = gtp_shard(MLP(*[64] * 9, bias=False), mesh, policy=GTPPolicy(**policy))
        for _ in range(3):
            model(torch.randn(2, 64, requires_grad=True)).sum().backward()
            assert double.live_bytes() == 0
        assert double.peak_bytes == weights * 64 * 64 * 4


# ---- properties


@st.composite
def setups(draw):
    policy = {
        "prefetch": draw(st.booleans()),
        "lookahead_bytes": draw(st.sampled_from([None, 0, 300, 1 << 20])),
        "coalesce_bytes": draw(st.sampled_from([None, 200, 600, 1 << 20])),
        "async_reduction": draw(st.booleans()),
        "wgrad_first": draw(st.booleans()),
        "reshard_after_forward": draw(st.booleans()),
        "min_shard_numel": draw(st.sampled_from([1, 1, 20])),
    }
    return Setup(
        draw(trees()),
        draw(st.sampled_from(["gtp2", "gtp4", "dp2-gtp2"])),
        draw(st.sampled_from(["mean", "sum"])),
        microbatches=draw(st.integers(1, 3)),
        sync_last_only=draw(st.booleans()),
        double=True,
        interlude=draw(st.sampled_from(INTERLUDES)),
        together=draw(st.booleans()),
        policy=tuple(policy.items()),
        plan=draw(st.sampled_from(PLANS)),
        one_node=draw(st.booleans()),
    )


@pytest.mark.time_limit(600)
# No shrinking: a failed call costs a new pool, and the trees are small already.
@settings(suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(setups())
def test_any_module_on_any_mesh_equals_the_plain_model(setup):
    check_parity(setup, 1e-11)
