"""A sharded model that trains in lockstep with its plain twin, and what is found wrong on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.dist.twin import assert_grads, assert_local, reduce_parts, shard
from tests.harness import current_double

# As in twin: sums over microbatches and more than two ranks round in another order
RTOL = 1e-6

Run = Callable[[nn.Module, int, int], Tensor]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Changes parameters without a trace in their version counters, as the foreach kernels do."""
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, foreach=True)


class Lockstep:
    """Both models take the same steps; every gradient and every parameter is compared.

    Args:
        build: makes the same model every time.
        run: `run(model, coordinate, micro)` returns a loss.
        coordinates: how many ranks see data of their own.
        options: for `shard`.
    """

    def __init__(self, build: Callable[[], nn.Module], run: Run, coordinates: int, **options: Any):
        self.plain, self.model = build(), shard(build(), **options)
        self.run, self.coordinates = run, coordinates
        self.optimizers = [adamw(each.parameters()) for each in (self.model, self.plain)]

    def step(
        self,
        coordinate: int,
        micros: tuple[int, ...] = (0,),
        *,
        sync_last_only: bool = False,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        for micro in micros:
            self.model.set_requires_gradient_sync(micro == micros[-1] or not sync_last_only)
            self.run(self.model, coordinate, micro).backward()
        parts = []
        for other in range(self.coordinates):
            self.plain.zero_grad()
            for micro in micros:
                self.run(self.plain, other, micro).backward()
            parts.append({name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None})
        expected = reduce_parts(parts)
        assert_grads(self.model, expected, RTOL, "gradients")
        for name, parameter in self.plain.named_parameters():
            parameter.grad = expected.get(name)
        before_update()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        plain = {name: p.detach() for name, p in self.plain.named_parameters()}
        assert_local(dict(self.model.named_parameters()), plain, RTOL, "parameters")

    def check_output(self, coordinate: int, micro: int = 0) -> None:
        with torch.no_grad():
            ours, theirs = (self.run(each, coordinate, micro) for each in (self.model, self.plain))
        torch.testing.assert_close(ours, theirs, rtol=RTOL, atol=0)


def findings(scenario: Callable[[], None]) -> list[str]:
    """Everything that the checks of this suite say about a scenario: nothing, where the library is right."""
    found = []
    try:
        scenario()
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return found + current_double().problems()
