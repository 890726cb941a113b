"""Situations that other libraries got wrong, II: orders of use, several passes, hooks and calling conventions.

Each test stands for a public bug report about another library; none of them may happen here. More of the same kind are
in `test_autograd_passes.py` (exceptions), `test_autograd_lifetime.py` (models that are freed) and `test_recompute.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.dist.twin import (
    REORDERED,
    assert_grads,
    assert_local,
    check_twin,
    events,
    gather_meter,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    shard,
    training_run,
)
from tests.harness import RankError, count, current_double, run_ranks, state_leaks
from tests.models import CASES, MLP
from tests.reference import gather_full


def square_run(*shape):
    def run(model, coordinate):
        model(randn(*shape, seed=coordinate)).square().mean().backward()

    return run


# ---- the order of a forward


@on_ranks(2)
def test_a_branch_that_is_not_taken_leaves_nothing_in_flight(rank, world):
    """A weight that was gathered ahead and never used once stayed in flight, and failed an assertion later."""
    build, case = CASES["conditional"].build, CASES["conditional"]
    model = shard(build(), lookahead_bytes=1 << 20)
    with gather_meter() as meter:
        for go_left in (True, False, False, True, True, False):
            expected = plain_grads(
                build, lambda m, c, go=go_left: case.loss(m, (randn(4, 10, seed=c), go)).backward(), world
            )
            case.loss(model, (randn(4, 10, seed=rank), go_left)).backward()
            assert meter.live_count == 0
            assert not state_leaks(current_double())
            assert_grads(model, expected)
            model.zero_grad()


class Reversed(nn.Module):
    """Registered in the opposite order of their use."""

    def __init__(self):
        super().__init__()
        self.c, self.b, self.a = nn.Linear(9, 3), nn.Linear(6, 9), nn.Linear(6, 6)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@on_ranks(2)
def test_the_order_of_use_counts_and_not_that_of_construction(rank, world):
    """Weights were once waited for in the order of construction: last step's were used, and the loss stayed flat."""
    model = check_twin(rank, world, seeded(Reversed), square_run(4, 6))
    with events() as log:
        model(randn(4, 6))
    assert [event for event in log if event.startswith("wait")] == ["wait a.weight", "wait b.weight", "wait c.weight"]

    optimizer, plain = torch.optim.SGD(model.parameters(), lr=0.5), seeded(Reversed)()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(4):
        for module, stepper in ((model, optimizer), (plain, plain_optimizer)):
            square_run(4, 6)(module, 0)
            stepper.step()
            stepper.zero_grad()
    assert_local(dict(model.named_parameters()), {n: p.detach() for n, p in plain.named_parameters()}, REORDERED)


@on_ranks(2)
def test_neighbours_of_one_shape_have_buffers_of_their_own(rank, world):
    """Two equal layers, or an embedding and a head alone in a chain, once shared one gather buffer."""

    class OnlyEnds(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(16, 16), nn.Linear(16, 16, bias=False)

        def forward(self, ids):
            return self.head(self.embed(ids))

    def run_ids(model, coordinate):
        model(torch.arange(8) + coordinate).square().mean().backward()

    for lookahead in (0, 1 << 20):
        check_twin(rank, world, seeded(lambda: MLP(8, 8, 8, 8, 8)), square_run(4, 8), lookahead_bytes=lookahead)
        check_twin(rank, world, seeded(OnlyEnds), run_ids, lookahead_bytes=lookahead)


class EverySecond(nn.Module):
    """Equal layers, every second one checkpointed: in the recomputation they are neighbours."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layers, self.use_reentrant = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), use_reentrant

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant) if index % 2 else layer(x)
            x = torch.tanh(x)
        return x


@on_ranks(2)
def test_neighbours_in_the_recomputation_have_buffers_of_their_own(rank, world):
    """Wrong activations, then NaN."""
    for use_reentrant in (False, True):
        for lookahead in (0, 1 << 20):
            build = seeded(lambda use_reentrant=use_reentrant: EverySecond(use_reentrant))
            check_twin(rank, world, build, square_run(4, 8), lookahead_bytes=lookahead)


class ByRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, swapped):
        layers = (self.second, self.first) if swapped else (self.first, self.second)
        for layer in layers:
            x = layer(x)
        return x


def visit_in_another_order(rank, world):
    shard(ByRank(), check=True)(randn(4, 8), swapped=rank == 1)


def test_ranks_that_use_weights_in_another_order_are_told_so_by_the_check():
    """They once exchanged each other's weights in silence, or waited for ever."""
    with pytest.raises(
        RankError, match=r"(?s)do different things.*rank 0: forward gather of first\.weight.*rank 1: .*second"
    ):
        run_ranks(visit_in_another_order, 2)


def use_less_on_one_rank(rank, world):
    model = shard(ByRank(), check=True)
    (model.first if rank == 0 else lambda x: model(x, swapped=False))(randn(4, 8))


def test_a_rank_that_uses_fewer_weights_is_told_so_by_the_check():
    with pytest.raises(
        RankError, match=r"(?s)do different things.*rank 0: end of pass.*rank 1: forward gather of second\.weight"
    ):
        run_ranks(use_less_on_one_rank, 2)


@on_ranks(2)
def test_the_order_of_reductions_is_that_of_the_weights_on_every_rank(rank, world):
    """Gradients in a `set` were once reduced in an order that the hash seed of each rank decided."""
    names = [f"layer{index}" for index in range(50)]
    model = shard(nn.Sequential(*(nn.Linear(4, 4) for _ in names)))
    for step in range(2):
        with events() as log:
            square_run(2, 4)(model, rank)
        launches = [event for event in log if event.startswith("launch")]
        assert launches == [f"launch {index}.weight" for index in reversed(range(50))], step


@on_ranks(2)
def test_a_module_may_be_used_again_later_in_the_same_forward(rank, world):
    """A norm that a second head shares: each use gathers, and the gradients add up."""

    class SharedNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mix, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 5)

        def forward(self, x):
            y = self.norm(x)
            return self.head(y) + self.head(self.norm(torch.tanh(self.mix(y))))

    model = check_twin(rank, world, seeded(SharedNorm), square_run(4, 6), rtol=REORDERED)
    with current_double().section() as calls:
        square_run(4, 6)(model, rank)
    assert count(calls)["reduce_scatter"] == 5


# ---- several forwards and backwards


@on_ranks(2)
def test_the_second_order_gradient_of_two_networks_equals_the_plain_model(rank, world):
    """A gradient penalty once read freed storage."""
    check_twin(rank, world, CASES["gan"].build, training_run("gan"), rtol=REORDERED)


@on_ranks(2)
def test_a_nested_root_in_a_checkpoint_that_runs_twice_is_gathered_whenever_it_is_sharded(rank, world):
    """A recomputation once saw the sharded weight."""

    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = MLP(6, 10, 6)

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    def run(model, coordinate):
        first, second = (randn(4, 6, seed=coordinate + i).requires_grad_() for i in (0, 7))
        (model(first) * model(second)).sum().backward()

    build = seeded(Nested)
    expected = plain_grads(build, run, world)
    for inner_first in (True, False):
        model = build()
        if inner_first:
            shard(model.block)
        shard(model)
        for _ in range(2):
            run(model, rank)
            assert_grads(model, expected, REORDERED)
            model.zero_grad()


# ---- hooks, outputs, calling conventions


@on_ranks(2)
def test_an_output_may_be_viewed_and_changed_in_place(rank, world):
    """A hook on the output was once dropped with the view: the gather in backward must not hang on one."""

    def run(model, coordinate):
        y = model(randn(1, 6, seed=coordinate).requires_grad_()).squeeze(0)
        y += 1
        z = y[:2]
        z.mul_(3)
        y.square().sum().backward()

    check_twin(rank, world, CASES["mlp"].build, run)


@on_ranks(2)
def test_a_reduction_starts_when_its_gradient_exists_also_where_no_input_has_one(rank, world):
    """A first layer fed with token ids was once cleaned up only at the end of the backward."""
    model = shard(CASES["tied_lm"].build())
    run = training_run("tied_lm")
    run(model, rank)
    with events() as log:
        run(model, rank)
    # The head's use of the tied weight, the layers between, the embedding's; a reduction that is larger than the layer
    # after it may land one later still.
    launches = [event for event in log if event.startswith("launch")]
    assert launches == [f"launch {name}.weight" for name in ("embed", "mlp.2", "mlp.0", "embed")]
    assert log.index("launch mlp.2.weight") < log.index("land embed.weight") < log.index("land mlp.2.weight")
    assert log[-3:-1] == ["launch embed.weight", "land mlp.0.weight"]
    assert log[-1] == "land embed.weight"


@on_ranks(2)
def test_a_users_hook_on_a_sharded_parameter_fires_with_its_shard(rank, world):
    """It once never fired."""
    model, seen = shard(CASES["mlp"].build()), []
    weight = model[0].weight
    weight.register_hook(lambda grad: seen.append(("before", grad.shape, grad.to_local().shape)) or grad * 3)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(("after", p.grad.shape, p is weight)))
    training_run("mlp")(model, rank)
    assert seen == [("before", (10, 6), (5, 6)), ("after", (10, 6), True)]
    expected = plain_grads(CASES["mlp"].build, training_run("mlp"), world)
    assert_local({"w": weight.grad}, {"w": 3 * expected["0.weight"]})


@on_ranks(2)
def test_a_model_may_return_its_weights_to_a_loss_outside(rank, world):
    """A view of a gathered weight keeps what it needs, until the graph goes."""

    class ReturnsWeights(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = MLP(6, 10, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.body(x), self.head.weight, self.head.bias

    def run(model, coordinate):
        hidden, weight, bias = model(randn(4, 6, seed=coordinate))
        F.linear(hidden, weight[:4], bias[:4]).square().sum().backward()

    with gather_meter() as meter:
        check_twin(rank, world, seeded(ReturnsWeights), run)
        assert meter.live_count == 0


class Stashes(torch.autograd.Function):
    """Keeps the weight by hand, where no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight, grad.t() @ ctx.x


@on_ranks(2)
def test_a_function_that_stashes_its_weight_keeps_it_and_nothing_else_does(rank, world):
    class Stashing(nn.Linear):
        def forward(self, x):
            return Stashes.apply(x, self.weight) + self.bias

    def build():
        return nn.Sequential(Stashing(6, 10), nn.GELU(), nn.Linear(10, 10), nn.GELU(), Stashing(10, 3))

    with gather_meter() as meter:
        model = check_twin(rank, world, seeded(build), square_run(4, 6))
        loss = model(randn(4, 6)).sum()
        assert meter.live_count == 2
        loss.backward()
        del loss
        assert meter.live_count == 0


@on_ranks(2)
def test_where_saved_tensor_hooks_are_forbidden_weights_are_saved_as_they_are(rank, world):
    def run(model, coordinate):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            loss = model(randn(4, 6, seed=coordinate)).square().mean()
        loss.backward()

    with gather_meter() as meter:
        check_twin(rank, world, CASES["mlp"].build, run)
        assert meter.live_count == 0


class WithMethods(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = MLP(6, 10, 8), nn.Linear(8, 5)

    def encode(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


@on_ranks(2)
def test_methods_beside_forward_may_call_submodules(rank, world):
    def run(model, coordinate):
        model.encode(randn(4, 6, seed=coordinate)).square().mean().backward()
        model.head(torch.tanh(model.encode(randn(4, 6, seed=coordinate)))).square().mean().backward()

    check_twin(rank, world, seeded(WithMethods), run, rtol=REORDERED)


@on_ranks(2)
def test_a_weight_read_outside_of_any_call_is_a_dtensor_and_never_an_empty_tensor(rank, world):
    """A fused loss that reads `lm_head.weight` once multiplied with storage that had been freed."""
    plain, model = seeded(WithMethods)(), shard(seeded(WithMethods)())
    h = randn(4, 8)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            F.linear(h, model.head.weight)
        with model.gathered():
            assert torch.equal(F.linear(h, model.head.weight, model.head.bias), plain.head(h))
        square_run(4, 6)(model, rank)
    assert torch.equal(gather_full(model.head.weight), plain.head.weight)


class FusedLoss(nn.Module):
    """The head's weight is used by its parent, inside the parent's forward: there it may be read."""

    def __init__(self):
        super().__init__()
        self.body, self.head = MLP(6, 10, 8), nn.Linear(8, 5, bias=False)

    def forward(self, x):
        return torch.logsumexp(torch.tanh(self.body(x)) @ self.head.weight.mT, dim=-1).sum()


@on_ranks(2)
def test_a_fused_loss_inside_of_forward_may_read_the_weight_of_the_head(rank, world):
    def run(model, coordinate):
        model(randn(4, 6, seed=coordinate)).backward()

    model = check_twin(rank, world, seeded(FusedLoss), run)
    with gather_meter() as meter:
        run(model, rank)
        assert meter.live_count == 0
