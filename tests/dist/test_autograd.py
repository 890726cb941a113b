"""How a gradient lands: two autograd nodes per use, a real `AccumulateGrad`, every hook once.

Buckets and unsynchronised microbatches are in `test_autograd_replicate.py`, higher derivatives and selected inputs in
`test_autograd_grad.py`, failures and lifetimes in `test_autograd_lifetime.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.twin import (
    MESHES,
    REORDERED,
    assert_grads,
    check_twin,
    events,
    graph_nodes,
    hybrid_mesh,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    shard,
    training_run,
    use_the_general_path,
)
from tests.harness import count, current_double
from tests.models import CASES, MLP

run_mlp = training_run("mlp")


def only(log, *verbs):
    return [event for event in log if event.split()[0] in verbs]


# ---- the order of events


@on_ranks(2)
def test_a_reduction_lands_after_the_next_one_is_launched(rank, world):
    model = shard(MLP(8, 8, 8, 8, 8, bias=False))
    for step in range(3):
        with events() as log:
            model(randn(4, 8, seed=rank)).sum().backward()
        if step == 0:  # nothing foresaw which weight comes next, so each landing is as young as its launch
            expected = [f"{verb} {index}.weight" for index in (6, 4, 2, 0) for verb in ("launch", "land")]
        else:
            expected = [
                "launch 6.weight",
                *("launch 4.weight", "land 6.weight"),
                *("launch 2.weight", "land 4.weight"),
                *("launch 0.weight", "land 2.weight"),
                "land 0.weight",
            ]
        assert only(log, "launch", "land") == expected, f"step {step}"


@on_ranks(2)
def test_the_next_weight_is_gathered_before_this_one_is_waited_for(rank, world):
    model = shard(MLP(8, 8, 8, 8, bias=False), lookahead_bytes=8 * 8 * 4)
    for _ in range(2):
        model(randn(4, 8)).sum().backward()
    with events() as log:
        loss = model(randn(4, 8)).sum()
    assert log == [
        *("gather 0.weight", "gather 2.weight", "wait 0.weight"),
        *("gather 4.weight", "wait 2.weight"),
        "wait 4.weight",
    ]
    with events() as log:
        loss.backward()
    # The last weight of the forward is still there, and the first one is not needed: its input has no gradient.
    assert log == [
        *("gather 2.weight", "launch 4.weight"),
        *("wait 2.weight", "launch 2.weight", "land 4.weight"),
        *("launch 0.weight", "land 2.weight", "land 0.weight"),
    ]


@pytest.mark.parametrize("one_node", [False, True])
@on_ranks(2)
def test_the_engine_finds_one_older_node_per_use_in_the_graph(rank, world, one_node):
    """The older node is made a weight earlier, and the parameter's own `AccumulateGrad` follows it."""
    model = shard(MLP(8, 8, 8, bias=False))
    if not one_node:
        use_the_general_path(model)
    model(randn(4, 8)).sum().backward()
    loss = model(randn(4, 8)).sum()
    uses = [node for node in graph_nodes(loss) if node.name().startswith(("UseWeight", "GTPLinear"))]
    landings = [use.next_functions[0][0] for use in uses]
    assert len(uses) == 2
    assert [node.name() for node in landings] == ["LandGradientBackward"] * 2
    assert {node.next_functions[0][0].variable for node in landings} == {model[0].weight, model[2].weight}
    first_use, last_use = sorted(uses, key=lambda node: node._sequence_nr())
    assert last_use.next_functions[0][0]._sequence_nr() < first_use._sequence_nr()


# ---- the token


@pytest.mark.parametrize("mesh", MESHES)
def test_what_flows_between_the_nodes_is_empty(mesh, run2, run4):
    (run4 if mesh == "dp" else run2)(empty_tokens, mesh)


def empty_tokens(rank, world, mesh):
    model = shard(MLP(), MESHES[mesh]())
    loss = model(randn(4, 6)).sum()
    shapes = {
        node.name(): {tuple(metadata.shape) for metadata in node._input_metadata}
        for node in graph_nodes(loss)
        if node.name().startswith("Land")
    }
    buckets = {"LandParameterBackward": {(0,)}}  # biases; with a replicate axis, weights as well
    assert shapes == {"LandGradientBackward": {(0,)}, **buckets}
    loss.backward()


class LargeTensors(TorchDispatchMode):
    """The operators that make something of a dtype, from a size on."""

    def __init__(self, dtype, numel):
        super().__init__()
        self.dtype, self.numel, self.seen = dtype, numel, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_new = isinstance(out, torch.Tensor) and func is not torch.ops.aten.detach.default and not func.is_view
        if is_new and out.dtype == self.dtype and out.numel() >= self.numel:
            self.seen.append(str(func))
        return out


@on_ranks(2)
def test_nothing_of_the_size_of_a_master_is_made_but_its_gradient(rank, world):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = shard(MLP(32, 32, 32, bias=False), mp=mp)
    for _ in range(2):
        loss = model(randn(2, 32)).sum()
        with LargeTensors(torch.float32, 16 * 32) as large:
            loss.backward()
        assert large.seen == ["aten._to_copy.default"] * 2
        model.zero_grad()


# ---- AccumulateGrad


@pytest.mark.parametrize("mesh", MESHES)
def test_accumulate_grad_sees_the_finished_average(mesh, run2, run4):
    (run4 if mesh == "dp" else run2)(finished_average, mesh, 1e-6 if mesh == "dp" else 0.0)


def finished_average(rank, world, mesh, rtol):
    model = shard(CASES["mlp"].build(), MESHES[mesh]())
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda p, name=name: seen.update({name: p.grad.clone()}))
    for _ in range(2):
        seen = {}
        run_mlp(model, rank)
        assert_seen(model, seen, expected, rtol)
        model.zero_grad()


def assert_seen(model, seen, expected, rtol):
    for name, param in model.named_parameters():
        param.grad = seen[name]
    assert_grads(model, expected, rtol, "gradients in hooks")


@on_ranks(2)
def test_gradients_add_up_in_place_as_in_plain_pytorch(rank, world):
    model = shard(CASES["mlp"].build())
    expected = {name: grad + grad for name, grad in plain_grads(CASES["mlp"].build, run_mlp, world).items()}
    run_mlp(model, rank)
    kept = {name: p.grad for name, p in model.named_parameters()}
    run_mlp(model, rank)
    assert all(p.grad is kept[name] for name, p in model.named_parameters())
    assert_grads(model, expected)
    model.zero_grad(set_to_none=False)
    assert all(not p.grad._local_tensor.any() for p in model.parameters())
    run_mlp(model, rank)
    assert_grads(model, plain_grads(CASES["mlp"].build, run_mlp, world))


# ---- hooks


def record_hooks(model, log):
    """Every kind of hook that a parameter or a module can have; each appends what it was called for."""
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: log.append(("tensor", name)))
        param.register_post_accumulate_grad_hook(lambda p, name=name: log.append(("accumulated", name)))
        node = torch.autograd.graph.get_gradient_edge(param).node
        log.append(node)  # an AccumulateGrad lives as long as somebody holds it
        node.register_prehook(lambda grads, name=name: log.append(("node before", name)))
        node.register_hook(lambda grads, outputs, name=name: log.append(("node after", name)))
    for name, module in model.named_modules():
        module.register_full_backward_pre_hook(lambda module, out, name=name: log.append(("module before", name)))
        module.register_full_backward_hook(lambda module, grads, out, name=name: log.append(("module after", name)))


@pytest.mark.parametrize("when", ["before sharding", "before forward", "before backward"])
@pytest.mark.parametrize("mesh", MESHES)
def test_every_hook_fires_once_and_those_of_unused_parameters_never(mesh, when, run2, run4):
    (run4 if mesh == "dp" else run2)(hooks_fire_once, mesh, when)


def hooks_fire_once(rank, world, mesh, when):
    logs = []
    for sharded in (False, True):
        logs.append([])
        model = CASES["conditional"].build()
        if when == "before sharding":
            # Nodes cannot move to another tensor, hooks of tensors and modules do.
            for name, param in model.named_parameters():
                param.register_hook(lambda grad, name=name, log=logs[-1]: log.append(("tensor", name)))
                param.register_post_accumulate_grad_hook(
                    lambda p, name=name, log=logs[-1]: log.append(("accumulated", name))
                )
        if sharded:
            model = shard(model, MESHES[mesh]())
        if when == "before forward":
            record_hooks(model, logs[-1])
        for go_left in (True, False, False):
            loss = model(randn(4, 10, seed=rank), go_left).sum()
            if when == "before backward":
                for name, param in model.named_parameters():
                    param.register_hook(lambda grad, name=name, log=logs[-1]: log.append((grad.shape, name)))
            loss.backward()
    plain, ours = ([entry for entry in log if isinstance(entry, tuple)] for log in logs)
    assert len(plain) > 50
    assert sorted(ours) == sorted(plain)


@on_ranks(2)
def test_a_tensor_hook_changes_the_gradient_that_is_accumulated(rank, world):
    expected = plain_grads(CASES["mlp"].build, run_mlp, world)
    model = shard(CASES["mlp"].build())
    seen = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: seen.update({name: grad}) or grad * 2)
    run_mlp(model, rank)
    assert_grads(model, {name: 2 * grad for name, grad in expected.items()})
    for name, param in model.named_parameters():
        param.grad = seen[name]
    assert_grads(model, expected, what="gradients that the hooks were given")


@on_ranks(2)
def test_a_multi_grad_hook_sees_every_gradient_once(rank, world):
    model = shard(CASES["mlp"].build())
    calls = []
    handle = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), calls.append)
    for _ in range(2):
        run_mlp(model, rank)
    assert [[grad is not None for grad in grads] for grads in calls] == [[True] * 6] * 2
    handle.remove()
    run_mlp(model, rank)
    assert len(calls) == 2


@on_ranks(2)
def test_hooks_registered_between_forward_and_backward_fire(rank, world):
    model, fired = shard(CASES["mlp"].build()), []
    for _ in range(2):
        loss = CASES["mlp"].loss(model, CASES["mlp"].batch(0))
        handles = [
            param.register_post_accumulate_grad_hook(lambda p, name=name: fired.append((name, p.grad is not None)))
            for name, param in model.named_parameters()
        ]
        fired.clear()
        loss.backward()
        assert sorted(fired) == sorted((name, True) for name, _ in model.named_parameters())
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_hook_on_one_rank_changes_no_collective(mesh, run2, run4):
    """Trackers watch gradients on rank 0 alone: what is reduced together may not depend on it."""
    results = (run4 if mesh == "dp" else run2)(hook_on_one_rank, mesh)
    half = len(results) // 2  # the ranks of one dp group; along gtp_remat the uneven rows differ
    assert results[:half] == results[half:]


def hook_on_one_rank(rank, world, mesh):
    model, seen = shard(CASES["conditional"].build(), MESHES[mesh]()), []
    if rank == 0:
        for param in model.parameters():
            param.register_hook(lambda grad: seen.append(grad.shape))
            param.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
    with current_double().section() as calls:
        model(randn(4, 10, seed=rank), True).sum().backward()
    assert len(seen) == (16 if rank == 0 else 0)  # two hooks on the parameters of the stem, the left branch, the head
    return [(call.op, call.shape) for call in calls]


@pytest.mark.parametrize("how", ["grad", "inputs"])
@on_ranks(4)
def test_a_backward_of_selected_parameters_reduces_them_together(rank, world, how):
    """The engine does not need the launch node there."""
    model = shard(CASES["mlp"].build(), hybrid_mesh())
    loss = CASES["mlp"].loss(model, CASES["mlp"].batch(2 * rank))
    params = dict(model.named_parameters())
    with current_double().section() as calls:
        if how == "grad":
            grads = torch.autograd.grad(loss, list(params.values()))
            for param, grad in zip(params.values(), grads, strict=True):
                param.grad = grad
        else:
            loss.backward(inputs=list(params.values()))
    assert_grads(model, plain_grads(CASES["mlp"].build, run_mlp, world), REORDERED)
    assert count(calls)["all_reduce"] == 2  # weights over dp, biases over dp and gtp_remat


@on_ranks(2)
def test_an_optimizer_in_the_backward_steps_as_after_it(rank, world):
    """`post_accumulate_grad` hooks may step at once: by then a weight is no longer needed by this backward."""
    after, inside = (shard(CASES["mlp"].build()) for _ in range(2))
    optimizer = torch.optim.SGD(after.parameters(), lr=0.1)
    steppers = {param: torch.optim.SGD([param], lr=0.1) for param in inside.parameters()}

    def step(param):
        steppers[param].step()
        steppers[param].zero_grad()

    for param in inside.parameters():
        param.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        run_mlp(after, rank)
        optimizer.step()
        optimizer.zero_grad()
        run_mlp(inside, rank)
        assert all(param.grad is None for param in inside.parameters())
        for left, right in zip(after.parameters(), inside.parameters(), strict=True):
            assert torch.equal(left._local_tensor, right._local_tensor)


# ---- unused, frozen, shared


@on_ranks(2)
def test_an_unused_weight_has_no_gradient_and_no_collective(rank, world):
    class HalfUsed(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.used(x)

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).sum().backward()

    model = check_twin(rank, world, seeded(HalfUsed), run)
    with current_double().section() as calls:
        run(model, rank)
    assert count(calls) == {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 1}
    assert model.unused.weight.grad is None
    assert model.unused.bias.grad is None


@on_ranks(2)
def test_a_weight_that_is_read_and_not_used_has_no_gradient(rank, world):
    class Reads(nn.Linear):
        def forward(self, x):
            assert self.weight.shape == (6, 6)
            return x * 2 + self.bias

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).sum().backward()

    model = check_twin(rank, world, seeded(lambda: nn.Sequential(nn.Linear(6, 6), Reads(6, 6))), run)
    assert model[1].weight.grad is None


@on_ranks(2)
def test_a_weight_whose_gradient_is_zero_by_a_branch_of_autograd_lands_as_in_the_plain_model(rank, world):
    """`detach` after a use cuts its gradient; another use of the same weight still has one."""

    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.second(self.first(x).detach() + self.first(x.sin()))

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().sum().backward()

    check_twin(rank, world, seeded(Cut), run)


@on_ranks(2)
def test_a_weight_used_twice_in_a_forward_is_reduced_per_use_and_summed(rank, world):
    model = check_twin(rank, world, CASES["shared_block"].build, training_run("shared_block"), rtol=REORDERED)
    with current_double().section() as calls:
        training_run("shared_block")(model, rank)
    assert count(calls)["reduce_scatter"] == 5


# ---- the caller's tensors


kept = []


class KeepsGradients(torch.autograd.Function):
    """A linear layer whose backward keeps what it is given and what it returns, as they are."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        returned = grad @ weight, grad.mT @ x, grad.sum(0)
        kept.extend((tensor, tensor.clone()) for tensor in (grad, *returned))
        return returned


class Kept(nn.Linear):
    def forward(self, x):
        return KeepsGradients.apply(x, self.weight, self.bias)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_callers_gradients_are_never_modified(mesh, sync, reduction, run2, run4):
    (run4 if mesh == "dp" else run2)(callers_gradients, mesh, sync, reduction)


def callers_gradients(rank, world, mesh, sync, reduction):
    kept.clear()
    model = shard(nn.Sequential(Kept(6, 10), nn.GELU(), Kept(10, 3)), MESHES[mesh](), reduction=reduction)
    model.set_requires_gradient_sync(sync)
    for _ in range(3):
        model(randn(4, 6, seed=rank)).square().sum().backward()
    model.set_requires_gradient_sync(True)
    model(randn(4, 6, seed=rank)).square().sum().backward()
    assert len(kept) == 4 * 2 * 4
    assert all(torch.equal(tensor, before) for tensor, before in kept)
    kept.clear()


class ReturnsOneTensor(torch.autograd.Function):
    """`weight + bias_matrix` by hand: one tensor object is the gradient of both, and of a third that the caller keeps."""

    @staticmethod
    def forward(ctx, left, right):
        return left + right

    @staticmethod
    def backward(ctx, grad):
        kept.append((grad, grad.clone()))
        return grad, grad


@on_ranks(2)
def test_one_tensor_may_be_the_gradient_of_two_weights(rank, world):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))

        def forward(self, x):
            return x @ ReturnsOneTensor.apply(self.left, self.right)

    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).square().sum().backward()

    kept.clear()
    check_twin(rank, world, seeded(Sum), run)
    assert all(torch.equal(tensor, before) for tensor, before in kept)
    kept.clear()


@on_ranks(2)
def test_an_expanded_gradient_lands_like_any_other(rank, world):
    """`p.sum()` has a gradient of stride 0, which nobody may add into."""

    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix, self.vector = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(5))

        def forward(self, x):
            return (x * (self.matrix.sum() + self.vector.sum())).sum()

    def run(model, coordinate):
        model(randn(3, seed=coordinate)).backward()

    model = check_twin(rank, world, seeded(Sums), run)
    expected = plain_grads(seeded(Sums), run, world)
    model.set_requires_gradient_sync(False)
    run(model, rank)
    model.set_requires_gradient_sync(True)
    run(model, rank)
    assert_grads(model, {name: grad + grad for name, grad in expected.items()}, REORDERED)
