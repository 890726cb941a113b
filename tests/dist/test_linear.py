"""A plain `nn.Linear` computes in one autograd node, and everything unusual takes the general path.

That both train as the plain model does is `test_parity.py`; here is what only the node decides.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.dist.twin import (
    MESHES,
    REORDERED,
    assert_grads,
    check_twin,
    events,
    graph_nodes,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    shard,
)
from tests.harness import current_double
from tests.models import MLP


def nodes_of(loss):
    return [node.name() for node in graph_nodes(loss)]


def takes_the_node(output):
    names = nodes_of(output.sum())
    # Nothing else may compute a sharded weight's gradient.
    assert ("GTPLinearBackward" in names) != ("UseWeightBackward" in names), names
    return "GTPLinearBackward" in names


def linear(rows=7, columns=6, *, bias=True):
    return seeded(lambda: nn.Linear(columns, rows, bias=bias))


# ---- numbers


@pytest.mark.parametrize("wgrad_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (2, 2, 2, 6), (0, 6), (1, 6)], ids=str)
@on_ranks(2)
def test_inputs_of_every_rank_equal_the_plain_linear(rank, world, shape, bias, wgrad_first):
    """7 rows over 2 ranks: the GEMM leaves a row of padding to the reduce-scatter."""
    seen = []

    def run(model, coordinate):
        x = randn(*shape, seed=coordinate).requires_grad_()
        output = model(x)
        output.square().sum().backward()
        if coordinate == rank:
            seen.append((output.detach(), x.grad))

    model = check_twin(rank, world, linear(bias=bias), run, wgrad_first=wgrad_first)
    assert takes_the_node(model(randn(*shape)))
    for output, grad in seen[1:]:
        assert torch.equal(output, seen[0][0])
        assert torch.equal(grad, seen[0][1])


@on_ranks(2)
def test_inputs_and_gradients_of_any_stride_equal_the_plain_linear(rank, world):
    def run(model, coordinate):
        x = randn(6, 5, 4, seed=coordinate).requires_grad_()
        model(x.transpose(0, 2)).transpose(0, 1).square().mean().backward()
        model(x[:, 0].t()).sum().backward()  # its gradient is one number, expanded

    # Two uses, and sums over inputs whose rows are not next to each other.
    check_twin(rank, world, linear(), run, rtol=REORDERED)


@on_ranks(2)
def test_a_gradient_is_reduced_in_the_dtype_that_was_asked_for(rank, world):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(linear()(), mp=mp)
    with current_double().section() as calls:
        output = model(randn(4, 6))
        assert takes_the_node(output)
        output.float().square().mean().backward()
    assert {call.op: call.dtype for call in calls if call.op != "all_reduce"} == {
        "all_gather": torch.bfloat16,
        "reduce_scatter": torch.float32,
    }


@pytest.mark.parametrize("mesh", MESHES)
def test_only_what_is_asked_for_is_computed(mesh, run2, run4):
    (run4 if mesh == "dp" else run2)(selected_gradients, mesh)


def selected_gradients(rank, world, mesh):
    model = shard(MLP(6, 10, 6), MESHES[mesh]())
    x = randn(4, 6, seed=rank).requires_grad_()
    for _ in range(2):
        loss = model(x).square().mean()
        with events() as log:
            torch.autograd.grad(loss, x, retain_graph=True)
        assert not [event for event in log if event.startswith(("launch", "land"))]
        with events() as log:
            torch.autograd.grad(loss, model[2].weight, retain_graph=True)
        assert [event for event in log if event.split()[0] in ("gather", "wait", "launch")] == ["launch 2.weight"]
        with events() as log:
            loss.backward(inputs=[model[2].bias])
        assert not [event for event in log if event.split()[0] in ("gather", "wait", "launch")]
    assert model[2].weight.grad is None


@on_ranks(2)
def test_a_frozen_bias_or_input_leaves_the_rest(rank, world):
    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().mean().backward()

    check_twin(rank, world, linear(), run, prepare=lambda model: model.bias.requires_grad_(False))
    model = shard(linear()())
    model.weight.requires_grad_(False)
    x = randn(4, 6, seed=rank).requires_grad_()
    model(x).square().mean().backward()
    assert model.weight.grad is None
    assert x.grad is not None


# ---- the order of things


@on_ranks(2)
def test_the_weight_gradient_may_come_first(rank, world):
    model = shard(MLP(8, 8, 8, 8, bias=False), wgrad_first=True, lookahead_bytes=8 * 8 * 4)
    x = randn(4, 8, seed=rank).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    loss = model(x).sum()
    with events() as log:
        loss.backward()
    # Each weight is waited for after its own gradient is launched; the last one of the forward is still there.
    assert log == [
        *("gather 2.weight", "launch 4.weight"),
        *("gather 0.weight", "launch 2.weight", "wait 2.weight", "land 4.weight"),
        *("launch 0.weight", "wait 0.weight", "land 2.weight", "land 0.weight"),
    ]


@on_ranks(2)
def test_a_gather_that_nobody_foresaw_hides_behind_the_weight_gradient(rank, world):
    """A last weight that is larger than what may be gathered ahead is not kept: it is the first of the backward."""
    model = shard(MLP(8, 8, 8, 16, bias=False), lookahead_bytes=8 * 8 * 4)
    x = randn(4, 8, seed=rank).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    loss = model(x).sum()
    with events() as log:
        loss.backward()
    assert log == [
        *("gather 4.weight", "gather 2.weight", "launch 4.weight", "wait 4.weight"),
        *("gather 0.weight", "wait 2.weight", "launch 2.weight"),
        # The large weight's reduction has the backward of two small ones to hide behind.
        *("wait 0.weight", "launch 0.weight", "land 4.weight", "land 2.weight", "land 0.weight"),
    ]


class GemmOutputs(TorchDispatchMode):
    """Where matrix products are written."""

    def __init__(self):
        super().__init__()
        self.addresses = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::mm":
            self.addresses.add(result.data_ptr())
        return result


@pytest.mark.parametrize("rows", [64, 63])
@on_ranks(2)
def test_the_gemm_writes_the_input_of_the_reduce_scatter(rank, world, rows):
    from torch_gtp import _runtime

    model = shard(linear(rows, 64, bias=False)())
    loss = model(randn(2, 64, seed=rank).requires_grad_()).sum()
    original, reduced = _runtime.issue_reduce, []

    def issue_reduce(use, chunks):
        reduced.append((chunks.data_ptr(), tuple(chunks.shape)))
        original(use, chunks)

    _runtime.issue_reduce = issue_reduce
    try:
        with GemmOutputs() as gemms:
            loss.backward()
    finally:
        _runtime.issue_reduce = original
    ((address, shape),) = reduced
    assert address in gemms.addresses
    assert shape == (64, 64)


# ---- who takes the general path


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Named(nn.Linear):
    """Computes what its base class does."""


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_what_is_unusual_takes_the_general_path(rank, world):
    x = randn(4, 6)
    model = shard(linear()())
    assert takes_the_node(model(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert not takes_the_node(model(x))
    with Nothing():
        assert not takes_the_node(model(x))
    assert not takes_the_node(shard(Doubled(6, 7))(x))
    assert takes_the_node(shard(Named(6, 7))(x))
    patched = nn.Linear.forward
    try:
        nn.Linear.forward = lambda self, input: F.linear(input, self.weight, self.bias)
        assert not takes_the_node(model(x))
    finally:
        nn.Linear.forward = patched
    with torch.no_grad():
        assert model(x).grad_fn is None


@on_ranks(2)
def test_operators_are_counted_by_selective_checkpointing_as_in_the_plain_model(rank, world):
    def policy(ctx, op, *args, **kwargs):
        is_gemm = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_gemm else CheckpointPolicy.PREFER_RECOMPUTE

    def run(model, coordinate):
        x = randn(4, 6, seed=coordinate).requires_grad_()
        contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
        checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().mean().backward()

    check_twin(rank, world, seeded(lambda: MLP(6, 10, 6)), run)


@on_ranks(2)
def test_a_hook_may_read_the_weight_that_the_node_used(rank, world):
    def run(model, coordinate):
        seen = []

        def penalise(module, inputs, output):
            seen.append(module.weight.square().sum())

        handle = model[2].register_forward_hook(penalise)
        (model(randn(4, 6, seed=coordinate)).square().mean() + seen[0]).backward()
        handle.remove()

    model = check_twin(rank, world, seeded(lambda: MLP(6, 10, 6)), run, rtol=1e-7)  # two parts, reduced on their own
    names = nodes_of(model(randn(4, 6)).sum())
    assert names.count("GTPLinearBackward") == 2


@on_ranks(2)
def test_a_direct_call_of_forward_is_no_turn_of_its_own(rank, world):
    class Direct(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 7)

        def forward(self, x):
            return self.inner.forward(x)

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().mean().backward()

    check_twin(rank, world, seeded(Direct), run)


# ---- what goes wrong


@on_ranks(2)
def test_a_weight_changed_before_its_backward_is_an_error(rank, world):
    model = shard(MLP(6, 10, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()

    def write():
        with torch.no_grad():
            model[2].weight.mul_(2)

    for change in (step, write):
        loss = model(randn(4, 6, seed=rank)).sum()
        change()
        with pytest.raises(RuntimeError, match=r"2\.weight: the weight was modified"):
            loss.backward()
        optimizer.zero_grad()
    run = lambda model, coordinate: model(randn(4, 6, seed=coordinate)).sum().backward()  # noqa: E731
    values = {name: p.full_tensor() for name, p in model.named_parameters()}

    def trained():
        plain = MLP(6, 10, 6)
        plain.load_state_dict(values)
        return plain

    run(model, rank)
    assert_grads(model, plain_grads(trained, run, world))


@on_ranks(2)
def test_a_wrong_input_is_refused_as_by_the_plain_linear(rank, world):
    model, plain = shard(linear()()), linear()()
    for x in (randn(4, 5), randn(4, 6).to(torch.float64), torch.ones(4, 6, dtype=torch.int64)):
        with pytest.raises(RuntimeError) as theirs:
            plain(x)
        with pytest.raises(RuntimeError) as ours:
            model(x)
        assert str(ours.value) == str(theirs.value)
    assert takes_the_node(model(randn(4, 6)))
