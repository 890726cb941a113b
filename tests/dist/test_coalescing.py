"""`coalesce_bytes`: neighbouring small weights share a gather and a reduction, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.dist.twin import (
    MESHES,
    REORDERED,
    assert_grads,
    check_twin,
    events,
    on_ranks,
    plain_grads,
    randn,
    seeded,
    shard,
)
from tests.harness import count, current_double
from tests.models import MLP, TiedLM

SIZE = 8 * 8 * 4  # bytes of one weight when full


def even():
    return MLP(*[8] * 9, bias=False)


def run(model, coordinate):
    model(randn(4, 8, seed=coordinate).requires_grad_()).square().mean().backward()


@on_ranks(2)
def test_calls_are_as_few_as_the_bytes_allow(rank, world):
    model = shard(seeded(even)(), coalesce_bytes=3 * SIZE)
    double = current_double()
    for _ in range(2):
        run(model, rank)
        model.zero_grad()
    double.batches.clear()
    with double.section() as calls:
        run(model, rank)
    # Forward: the first alone, then three, three, one. Backward: the last is still there, then three, three, one alone.
    # Reductions: whenever three are there, and what is left when the first of them has to land.
    assert count(calls) == {"all_gather": 15, "reduce_scatter": 8}
    assert sorted(double.batches) == [2, 3, 3, 3, 3, 3, 3]


@on_ranks(2)
def test_a_reduction_has_another_call_to_hide_behind(rank, world):
    """Between the launch of a call and its landing, weights of at least one more call have their backward."""
    from torch_gtp import _runtime

    model = shard(seeded(even)(), coalesce_bytes=2 * SIZE)
    for _ in range(2):
        run(model, rank)
    log, original = [], _runtime.launch_queue

    def launch_queue(queue):
        log.append("call " + " ".join(landing.param.fqn for landing in queue.landings))
        original(queue)

    _runtime.launch_queue = launch_queue
    try:
        loss = model(randn(4, 8, seed=rank).requires_grad_()).sum()
        with events() as verbs:
            loss.backward()
    finally:
        _runtime.launch_queue = original
    assert log == [
        "call 14.weight 12.weight",
        "call 10.weight 8.weight",
        "call 6.weight 4.weight",
        "call 2.weight 0.weight",
    ]
    order = [verb for verb in verbs if verb.startswith(("launch", "land"))]
    assert order.index("launch 8.weight") < order.index("land 14.weight") < order.index("launch 4.weight")


@pytest.mark.parametrize("mesh", MESHES)
def test_training_equals_the_plain_model(mesh, run2, run4):
    (run4 if mesh == "dp" else run2)(trains, mesh)


def trains(rank, world, mesh):
    def run(model, coordinate):
        generator = torch.Generator().manual_seed(coordinate)
        tokens = torch.randint(model.embed.num_embeddings, (2, 5), generator=generator)
        model(tokens).square().mean().backward()

    for nbytes in (300, 5000, 1 << 20):
        check_twin(rank, world, seeded(TiedLM), run, mesh=MESHES[mesh](), rtol=REORDERED, coalesce_bytes=nbytes)


@on_ranks(2)
def test_weights_that_cannot_share_a_call_do_not(rank, world):
    """Two dtypes side by side."""

    class TwoKinds(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.third, self.fourth = (nn.Linear(8, 8, bias=False) for _ in range(4))
            self.second.to(torch.float64)

        def forward(self, x):
            x = self.second(self.first(x).double()).float()
            return self.fourth(self.third(x))

    check_twin(rank, world, seeded(TwoKinds), run, coalesce_bytes=1 << 20)


@on_ranks(2)
def test_casts_and_padding_go_along(rank, world):
    mp = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    results = []
    for nbytes in (0, 1 << 20):
        model = shard(seeded(lambda: MLP(8, 7, 9, 8))(), mp=mp, coalesce_bytes=nbytes)
        for _ in range(3):
            model.zero_grad()
            model(randn(4, 8, seed=rank)).float().square().mean().backward()
        results.append([p.grad.to_local() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@on_ranks(2)
def test_a_failed_backward_leaves_no_reduction_that_waits_for_others(rank, world):
    model = shard(seeded(even)(), coalesce_bytes=1 << 20)
    fail = [True]

    class FailsOnce(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            if fail:
                raise InterruptedError
            return grad

    handle = model[6].register_forward_hook(lambda module, inputs, output: FailsOnce.apply(output))
    with pytest.raises(InterruptedError):
        run(model, rank)
    handle.remove()
    fail.clear()
    model.zero_grad()
    run(model, rank)
    assert_grads(model, plain_grads(seeded(even), run, world))
    assert not any(queue.landings for queue in model._gtp.root.queues.values())


@on_ranks(2)
def test_selected_gradients_are_reduced_when_they_land(rank, world):
    model = shard(seeded(even)(), coalesce_bytes=1 << 20)
    for _ in range(2):
        loss = model(randn(4, 8, seed=rank)).square().mean()
        grads = torch.autograd.grad(loss, [model[4].weight, model[10].weight])
    expected = plain_grads(seeded(even), run, world)
    model[4].weight.grad, model[10].weight.grad = grads
    assert_grads(model, {name: expected[name] for name in ("4.weight", "10.weight")})
