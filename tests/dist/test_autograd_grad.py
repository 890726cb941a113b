"""Derivatives beyond `loss.backward()`: selected inputs, graphs that are kept, second order, function transforms."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from tests.dist.twin import (
    MESHES,
    REORDERED,
    assert_grads,
    assert_local,
    check_twin,
    on_ranks,
    plain_grads,
    randn,
    reduce_parts,
    seeded,
    shard,
    training_run,
)
from tests.harness import cached_mesh, count, current_double
from tests.models import CASES
from tests.reference import relative_error

run_mlp = training_run("mlp")


def mlp_loss(model, coordinate):
    return CASES["mlp"].loss(model, CASES["mlp"].batch(2 * coordinate))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# ---- torch.autograd.grad


@pytest.mark.parametrize("mesh", MESHES)
def test_autograd_grad_returns_finished_gradients_of_parameters(mesh, run2, run4):
    (run4 if mesh == "dp" else run2)(grad_of_parameters, mesh, REORDERED if mesh == "dp" else 0.0)


def grad_of_parameters(rank, world, mesh, rtol):
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    model = shard(CASES["mlp"].build(), MESHES[mesh]())
    names, params = zip(*model.named_parameters(), strict=True)
    for _ in range(2):
        grads = torch.autograd.grad(mlp_loss(model, rank), params)
        assert_local(dict(zip(names, grads, strict=True)), expected, rtol)
    for name, param in zip(names, params, strict=True):  # one at a time: nothing depends on what else is asked for
        (grad,) = torch.autograd.grad(mlp_loss(model, rank), [param])
        assert_local({name: grad}, {name: expected[name]}, rtol)
    assert all(param.grad is None for param in params)


@on_ranks(2)
def test_the_gradient_of_inputs_alone_reduces_nothing(rank, world):
    plain, model = CASES["mlp"].build(), shard(CASES["mlp"].build())
    for step in range(3):
        x = randn(4, 6, seed=rank).requires_grad_()
        y = x.detach().clone().requires_grad_()
        with current_double().section() as calls:
            (ours,) = torch.autograd.grad(model(x).square().mean(), x)
        (theirs,) = torch.autograd.grad(plain(y).square().mean(), y)
        assert torch.equal(ours, theirs)
        assert count(calls) == {"all_gather": 6 if step == 0 else 5}
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2)
def test_backward_with_inputs_accumulates_into_those_only(rank, world):
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    model = shard(CASES["mlp"].build())
    for names in (["2.weight"], ["2.bias"], ["0.weight", "4.bias"]):
        wanted = [model.get_parameter(name) for name in names]
        mlp_loss(model, rank).backward(inputs=wanted)
        assert_grads(model, {name: expected[name] for name in names})
        model.zero_grad()


@on_ranks(2)
def test_asking_for_the_gradient_of_an_unused_parameter_is_answered_as_by_plain_pytorch(rank, world):
    model = shard(CASES["conditional"].build())
    unused = [model.right[0].weight, model.right[0].bias]
    for param in unused:
        loss = model(randn(4, 10), True).sum()
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(loss, param, retain_graph=True)
        assert torch.autograd.grad(loss, param, allow_unused=True) == (None,)


@on_ranks(2)
def test_a_gradient_that_is_only_looked_at_leaves_the_accumulated_ones_alone(rank, world):
    """A gradient norm between two microbatches, with and without synchronisation."""
    expected = {name: grad + grad for name, grad in plain_grads(CASES["mlp"].build, run_mlp, world).items()}
    for reduction, look_while_synchronised in [
        ("mean", True),
        ("sum", True),
        ("mean", False),
        ("sum", False),
    ]:
        model = shard(CASES["mlp"].build(), reduction=reduction)
        model.set_requires_gradient_sync(False)
        run_mlp(model, rank)
        before = {name: p.grad._local_tensor.clone() for name, p in model.named_parameters()}
        model.set_requires_gradient_sync(look_while_synchronised)
        torch.autograd.grad(mlp_loss(model, rank), list(model.parameters()))
        assert all(torch.equal(p.grad._local_tensor, before[name]) for name, p in model.named_parameters())
        model.set_requires_gradient_sync(True)
        run_mlp(model, rank)
        scale = world if reduction == "sum" else 1
        assert_grads(model, {name: scale * grad for name, grad in expected.items()}, REORDERED, f"{reduction}")


@on_ranks(2)
def test_looking_at_a_gradient_after_a_synchronised_backward_leaves_it_alone(rank, world):
    """With the sum reduction and synchronisation off, nothing may be rescaled for a gradient that never arrives."""
    model = shard(CASES["mlp"].build(), reduction="sum")
    run_mlp(model, rank)
    before = {name: p.grad._local_tensor.clone() for name, p in model.named_parameters()}
    model.set_requires_gradient_sync(False)
    torch.autograd.grad(mlp_loss(model, rank), list(model.parameters()))
    assert all(torch.equal(p.grad._local_tensor, before[name]) for name, p in model.named_parameters())


# ---- graphs that are kept, and split backwards


@pytest.mark.parametrize("mesh", MESHES)
def test_a_retained_graph_runs_again(mesh, run2, run4):
    (run4 if mesh == "dp" else run2)(retained_graph, mesh, REORDERED if mesh == "dp" else 0.0)


def retained_graph(rank, world, mesh, rtol):
    def run(model, coordinate):
        loss = mlp_loss(model, coordinate)
        loss.backward(retain_graph=True)
        loss.backward()

    model = check_twin(rank, world, CASES["mlp"].build, run, mesh=MESHES[mesh](), rtol=rtol)
    with current_double().section() as calls:
        run(model, rank)
    assert count(calls)["reduce_scatter"] == 6
    # 3 in forward; the first backward finds the last weight of the forward, the second one finds nothing.
    assert count(calls)["all_gather"] == 3 + 1 + 2


@on_ranks(2)
def test_input_and_weight_gradients_may_be_computed_in_separate_backwards(rank, world):
    """As zero-bubble pipeline schedules do: first what the stage before waits for, then the rest."""

    def run(model, coordinate):
        x = randn(4, 6, seed=coordinate).requires_grad_()
        loss = model(x).square().mean()
        (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert grad.abs().sum() > 0
        loss.backward(inputs=list(model.parameters()))

    check_twin(rank, world, CASES["mlp"].build, run)


@on_ranks(2)
def test_a_backward_of_several_outputs_with_gradients_given_equals_the_plain_model(rank, world):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.left, self.right = nn.Linear(6, 10), nn.Linear(10, 3), nn.Linear(10, 5)

        def forward(self, x):
            h = self.stem(x).tanh()
            return self.left(h), self.right(h)

    def run(model, coordinate):
        outputs = model(randn(4, 6, seed=coordinate))
        torch.autograd.backward(outputs, [randn(4, 3, seed=5), randn(4, 5, seed=6)])

    check_twin(rank, world, seeded(TwoHeads), run)


# ---- create_graph


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_penalty_on_the_gradient_of_inputs_equals_the_plain_model(mesh, reduction, run2, run4):
    (run4 if mesh == "dp" else run2)(input_penalty, mesh, reduction)


def input_penalty(rank, world, mesh, reduction):
    def run(model, coordinate):
        x = randn(4, 6, seed=coordinate).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (model(x).square().mean() + (slope.norm(dim=-1) - 1).square().mean()).backward()

    check_twin(rank, world, CASES["mlp"].build, run, mesh=MESHES[mesh](), rtol=REORDERED, reduction=reduction)


def objective(model, x, scale=1.0):
    return model(x).square().mean() * scale


def penalty(model, losses):
    """The squared norm of the mean gradient: one number, for the whole world."""
    grads = torch.autograd.grad(losses, list(model.parameters()), create_graph=True)
    return sum(full(grad.square().sum()) for grad in grads)


def assert_penalised(model, coordinate, coordinates, reduction):
    """The gradients of loss and penalty are the plain model's. A second forward runs before the second backward."""
    inputs = [CASES["mlp"].batch(2 * index)[0] for index in range(coordinates)]
    plain = CASES["mlp"].build()
    loss = sum(objective(plain, x, 1 / coordinates if reduction == "mean" else 1.0) for x in inputs)
    expected_penalty = penalty(plain, loss)
    (loss + expected_penalty).backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for _ in range(2):
        # Every rank adds the one penalty to its own loss; over ranks, "mean" averages it and "sum" adds it up,
        # but it is one logical number, and counts once.
        found = penalty(model, objective(model, inputs[coordinate]))
        assert relative_error(found, expected_penalty) <= REORDERED
        (objective(model, inputs[coordinate]) + found).backward()
        assert_grads(model, expected, 3e-6)  # second-order terms pass through twice as many sums
        model.zero_grad()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_penalty_on_the_gradient_of_parameters_equals_the_plain_model(mesh, reduction, run2, run4):
    """Rows are uneven: 10, 9 and 3 over 2."""
    (run4 if mesh == "dp" else run2)(parameter_penalty, mesh, reduction)


def parameter_penalty(rank, world, mesh, reduction):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_penalised(shard(CASES["mlp"].build(), MESHES[mesh](), reduction=reduction), rank, world, reduction)


@on_ranks(2)
def test_a_penalty_on_the_gradient_of_parameters_sharded_by_columns_equals_the_plain_model(rank, world):
    from torch_gtp import WeightPlan

    model = shard(CASES["mlp"].build(), plan={"*.weight": WeightPlan(shard_dim=1)})
    assert_penalised(model, rank, world, "mean")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@on_ranks(4)
def test_a_penalty_on_the_gradient_of_tensor_parallel_parameters_equals_the_plain_model(rank, world, reduction):
    mesh = cached_mesh((2, 2), ("tp", "gtp_remat"))
    model = CASES["mlp"].build()
    parallelize_module(model, mesh["tp"], CASES["mlp"].plan())
    assert_penalised(shard(model, mesh, reduction=reduction), mesh.get_local_rank("gtp_remat"), 2, reduction)


@on_ranks(2)
def test_a_backward_that_creates_a_graph_leaves_gradients_that_can_be_differentiated(rank, world):
    plain, model = CASES["mlp"].build(), shard(CASES["mlp"].build())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Using backward\(\) with create_graph=True")
        for module in (plain, model):
            mlp_loss(module, 0).backward(create_graph=True)
            squares = [full(p.grad.square().sum()) for p in module.parameters()]
            module.zero_grad()
            sum(squares).backward()
    assert_grads(model, {name: p.grad for name, p in plain.named_parameters()}, 3e-6)
    for module in (plain, model):
        module.zero_grad()


@on_ranks(2)
def test_create_graph_without_a_second_backward_gives_the_first_gradients(rank, world):
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    model = shard(CASES["mlp"].build())
    names, params = zip(*model.named_parameters(), strict=True)
    for _ in range(2):
        grads = torch.autograd.grad(mlp_loss(model, rank), params, create_graph=True)
        assert all(grad.requires_grad for grad in grads)
        assert_local({name: grad.detach() for name, grad in zip(names, grads, strict=True)}, expected)


@on_ranks(2)
def test_a_third_derivative_equals_the_plain_model(rank, world):
    def run(model, coordinate):
        x = randn(3, 6, seed=coordinate).requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        second.square().sum().backward()

    check_twin(rank, world, CASES["mlp"].build, run, rtol=REORDERED)  # see the bfloat16 test


@on_ranks(2)
def test_a_penalty_with_a_bfloat16_model_equals_the_model_that_computes_in_bfloat16(rank, world):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def run(model, x):
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().mean().backward()

    parts = []
    for coordinate in range(world):
        plain = CASES["mlp"].build().bfloat16()
        run(plain, randn(4, 6, seed=coordinate).bfloat16())
        parts.append({name: p.grad.float() for name, p in plain.named_parameters() if p.grad is not None})
    model = shard(CASES["mlp"].build(), mp=mp)
    run(model, randn(4, 6, seed=rank).bfloat16())
    # A weight's gradient is the sum of what comes from its use and from the backward of its use. The plain model rounds
    # the sum to bfloat16; a sharded Linear reduces both on their own and adds in fp32.
    assert_grads(model, reduce_parts(parts), rtol=2**-8)


# ---- function transforms


def parameter_values(model, scale=1.0):
    return {name: p.detach() * scale for name, p in model.named_parameters()}


@on_ranks(2)
def test_functional_call_computes_with_the_given_parameters(rank, world):
    """Full tensors are used as they are, shards of the same layout are gathered; afterwards all is as before."""
    x = randn(4, 6, seed=rank)
    plain, model = CASES["mlp"].build(), shard(CASES["mlp"].build())
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    for _ in range(2):
        theirs = torch.func.functional_call(plain, parameter_values(plain, 2.0), x)
        assert torch.equal(torch.func.functional_call(model, parameter_values(plain, 2.0), x), theirs)
        assert torch.equal(torch.func.functional_call(model, parameter_values(model, 2.0), x), theirs)
        assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), x), plain(x))
        run_mlp(model, rank)
        assert_grads(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_a_backward_uses_the_weights_of_its_own_forward(rank, world):
    """A teacher with other shards, of the same layout, runs between a forward and its backward."""
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    model = shard(CASES["mlp"].build())
    teacher = parameter_values(model, 2.0)
    for _ in range(3):
        loss = mlp_loss(model, rank)
        with torch.no_grad():
            torch.func.functional_call(model, teacher, randn(4, 6, seed=rank))
        loss.backward()
        assert_grads(model, expected)
        model.zero_grad()


@on_ranks(2)
def test_two_sets_of_shards_in_one_graph_each_get_their_gradient(rank, world):
    def run(model, coordinate):
        x = randn(4, 6, seed=coordinate)
        other = {name: (p.detach() * 0.5).requires_grad_() for name, p in model.named_parameters()}
        own = model(x).square().mean()
        (own * torch.func.functional_call(model, other, x).square().mean()).backward()
        for name, p in model.named_parameters():
            p.grad += other[name].grad * 3

    check_twin(rank, world, CASES["mlp"].build, run, rtol=REORDERED)


@on_ranks(2)
def test_a_step_inside_the_graph_is_differentiated_through(rank, world):
    """One inner step of meta-learning: fast weights are shards that have a history."""
    x = [randn(4, 6, seed=coordinate) for coordinate in range(world)]

    def fast(model, loss):
        params = dict(model.named_parameters())
        grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        return {name: p - 0.1 * grad for (name, p), grad in zip(params.items(), grads, strict=True)}

    plain = CASES["mlp"].build()
    adapted = fast(plain, sum(objective(plain, batch) for batch in x) / world)
    sum(torch.func.functional_call(plain, adapted, batch).square().mean() for batch in x).div(world).backward()
    model = shard(CASES["mlp"].build())
    for _ in range(2):
        adapted = fast(model, objective(model, x[rank]))
        torch.func.functional_call(model, adapted, x[rank]).square().mean().backward()
        assert_grads(model, {name: p.grad for name, p in plain.named_parameters()}, REORDERED)
        model.zero_grad()


@on_ranks(2)
def test_func_grad_with_respect_to_inputs_equals_the_plain_model(rank, world):
    plain, model = CASES["mlp"].build(), shard(CASES["mlp"].build())
    x = randn(4, 6, seed=rank)
    for _ in range(2):
        ours, theirs = (torch.func.grad(lambda x, m=m: m(x).square().sum())(x) for m in (model, plain))
        assert torch.equal(ours, theirs)
        run_mlp(model, rank)
    ours, theirs = (torch.func.vmap(torch.func.jacrev(m))(x) for m in (model, plain))
    assert torch.equal(ours, theirs)
    ours, theirs = (torch.func.jvp(m, (x,), (randn(4, 6, seed=7),)) for m in (model, plain))
    assert all(torch.equal(mine, yours) for mine, yours in zip(ours, theirs, strict=True))


@on_ranks(2)
def test_func_grad_with_respect_to_full_parameters_equals_the_plain_model(rank, world):
    plain, model = CASES["mlp"].build(), shard(CASES["mlp"].build())
    x, params = randn(4, 6, seed=rank), parameter_values(plain)

    def grads(module):
        return torch.func.grad(lambda p: torch.func.functional_call(module, p, x).square().sum())(params)

    ours, theirs = grads(model), grads(plain)
    assert all(torch.equal(ours[name], theirs[name]) for name in params)


@on_ranks(2)
def test_jacobians_and_hessians_of_inputs_equal_the_plain_model(rank, world):
    plain, model = CASES["mlp"].build(), shard(CASES["mlp"].build())
    x = randn(4, 6, seed=rank)
    for _ in range(2):
        for vectorize in (False, True):  # vectorised: one backward under vmap
            ours, theirs = (torch.autograd.functional.jacobian(m, x, vectorize=vectorize) for m in (model, plain))
            assert torch.equal(ours, theirs)
        ours, theirs = (
            torch.autograd.functional.hessian(lambda x, m=m: m(x).square().sum(), x) for m in (model, plain)
        )
        assert torch.equal(ours, theirs)


# ---- anomaly mode


class ReturnsNan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * float("nan")


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mesh", MESHES)
def test_anomaly_mode_finds_a_nan_and_nothing_else(mesh, run2, run4):
    (run4 if mesh == "dp" else run2)(anomaly_mode, mesh, REORDERED if mesh == "dp" else 0.0)


def anomaly_mode(rank, world, mesh, rtol):
    def run(model, coordinate):
        with torch.autograd.detect_anomaly(check_nan=True):
            run_mlp(model, coordinate)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = check_twin(rank, world, CASES["mlp"].build, run, mesh=MESHES[mesh](), rtol=rtol)
        with torch.autograd.detect_anomaly():
            loss = ReturnsNan.apply(model(randn(4, 6))).sum()
            with pytest.raises(RuntimeError, match="ReturnsNanBackward' returned nan values"):
                loss.backward()
        run(model, rank)
    assert_grads(model, plain_grads(CASES["mlp"].build, run_mlp, world), rtol)
