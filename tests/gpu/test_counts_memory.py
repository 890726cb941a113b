"""How many collectives a step issues, what memory gathered weights take, and that the host waits for nothing."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from tests.gpu.ranks import cases, device, mesh, needs_cuda, synchronize, together
from tests.gpu.recorder import Recorder
from tests.models import CASES, AttentionLM
from torch_gtp import GTPPolicy, gtp_shard

WIDTH, LAYERS, ROWS = 1024, 6, 16
WEIGHT_BYTES = WIDTH * WIDTH * 4
SLACK = 2 << 20  # activations of 16 rows, gradients of biases, and the allocator's rounding


def deep(**policy) -> nn.Module:
    """Equal weights; an activation is small beside one."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False, device=device()) for _ in range(LAYERS)))
    return gtp_shard(layers, mesh("gtp"), policy=GTPPolicy(coalesce_bytes=0, **policy))


def rows() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH, device=device())


@cases(on=["gtp", "dp-gtp"])
@together
def test_a_step_gathers_each_weight_twice_and_reduces_its_gradient_once(on):
    """But for the embedding, which backward does not read, and the last weight, whose backward follows at once."""
    case = CASES["attention_lm"]
    model = gtp_shard(case.build().to(device()), mesh(on), policy=GTPPolicy(min_shard_numel=1))
    ids = case.batch(0)[0].to(device())
    weights = sum(isinstance(module, nn.Linear | nn.Embedding) for module in model.modules())
    for step in range(3):
        with Recorder() as calls:
            case.loss(model, (ids,)).backward()
        model.zero_grad()
        assert calls.counts() == {
            "all_gather": weights + (weights - 1) - (step > 0),
            "reduce_scatter": weights,
            "all_reduce": 2 if on == "dp-gtp" else 1,
        }, f"step {step}"
        assert calls.live_bytes() == 0, f"step {step}: {calls.live_bytes()} bytes of gathered weights are alive"


@cases(policy=["alone", "one-ahead", "two-ahead"])
@together
def test_gathered_weights_alive_at_once_are_those_of_the_plan(policy):
    options, weights = {
        "alone": ({"prefetch": False}, 1),
        "one-ahead": ({"lookahead_bytes": 0}, 2),
        "two-ahead": ({"lookahead_bytes": 2 * WEIGHT_BYTES}, 3),
    }[policy]
    needs_cuda("exact lifetimes (gloo's threads hold on to tensors)")
    model = deep(**options)
    with torch.no_grad():
        model(rows())  # learns the order
        synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with Recorder() as calls:
            model(rows())
        assert calls.peak_bytes == weights * WEIGHT_BYTES
        peak = torch.cuda.max_memory_allocated() - before
        assert weights * WEIGHT_BYTES <= peak <= weights * WEIGHT_BYTES + SLACK, f"peak of {peak} bytes"


@together
def test_a_step_leaves_no_memory_behind():
    needs_cuda("allocator statistics")
    model = deep()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for _ in range(4):
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        found.append(torch.cuda.memory_allocated())
    assert found[1:] == found[1:2] * 3, f"bytes after each step: {found}"
    # Everything at rest is a shard; one more weight would show.
    shards = sum(param.to_local().numel() * 4 for param in model.parameters())
    del model, optimizer
    freed = found[-1] - torch.cuda.memory_allocated()
    assert shards <= freed <= shards + SLACK, f"the model held {freed} bytes, its shards have {shards}"


@together
def test_a_training_step_has_no_more_full_weights_and_gradients_than_the_plan():
    """Backward: a weight in use, one ahead, and the gradients of two uses: one in its reduction, one being made."""
    needs_cuda("allocator statistics")
    model = deep(lookahead_bytes=0)
    for _ in range(2):
        model(rows()).square().mean().backward()
        model.zero_grad()
    synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(rows()).square().mean().backward()
    synchronize()
    shards = sum(param.to_local().numel() * 4 for param in model.parameters())
    peak = torch.cuda.max_memory_allocated() - before - shards  # the gradients stay
    model.zero_grad()
    assert peak <= 4 * WEIGHT_BYTES + SLACK, f"{peak / WEIGHT_BYTES:.2f} weights' worth above shards and gradients"


@cases(on=["gtp", "dp-gtp"])
@together
def test_the_host_never_waits_for_the_gpu_in_a_step(on):
    needs_cuda("synchronisations")
    torch.manual_seed(0)
    model = gtp_shard(AttentionLM(dim=32).to(device()), mesh(on), policy=GTPPolicy(min_shard_numel=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    ids = torch.randint(0, 33, (2, 8)).to(device())

    def step() -> None:
        logits = model(ids)
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
