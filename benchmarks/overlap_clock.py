"""How much communication does a schedule hide?

Compute and wire are sleeps of known length. The wire carries one collective at a time, in the order of
launch, and a collective takes as long as its bytes. Three clocks tell the time:

* counted: sleeps are added up instead of slept, on top of the CPU time that the process uses between them; so
  host time counts, and what else runs on the machine does not;
* exact: sleeps are added up, and nothing else; the schedule alone;
* sleeping: the wall clock. Needs an idle machine.

Two yardsticks:

* ideal: all the compute, the one gather that precedes it and the one reduce-scatter that follows it;
* floor: what no schedule can beat for these sizes in this order, with gathers and reduce-scatters on wires of
  their own, any number of gathers ahead, none carried from forward to backward except the last weight.

    python benchmarks/overlap_clock.py
    python benchmarks/overlap_clock.py --clock exact
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

import common

WORLD = 8
WIDTH = 64
GATHER, REDUCE = "gather", "reduce_scatter"


# Time


class Clock(Protocol):
    def now(self) -> float: ...

    def sleep_until(self, moment: float) -> None: ...


class SleepingClock:
    """Real seconds. The last of a sleep is spun away: sleeps end late."""

    spin = 5e-4

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, moment: float) -> None:
        time.sleep(max(0.0, moment - self.now() - self.spin))
        while self.now() < moment:
            pass


class CountingClock:
    """Seconds that somebody would have slept, and those of another clock."""

    def __init__(self, between: Callable[[], float]):
        self._slept = 0.0
        self._between = between

    def now(self) -> float:
        return self._between() + self._slept

    def sleep_until(self, moment: float) -> None:
        self._slept += max(0.0, moment - self.now())


CLOCKS: dict[str, Callable[[], Clock]] = {
    "counted": lambda: CountingClock(time.process_time),
    "exact": lambda: CountingClock(lambda: 0.0),
    "sleeping": SleepingClock,
}


@dataclass
class Wire:
    """A first-in, first-out link: a collective starts when the one before it has finished."""

    clock: Clock
    seconds_per_byte: float
    free_at: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)

    def send(self, kind: str, nbytes: int) -> Transfer:
        self.free_at = max(self.free_at, self.clock.now()) + nbytes * self.seconds_per_byte
        self.calls[kind] += 1
        return Transfer(self.clock, self.free_at)


class Transfer(dist.Work):
    """A collective on the wire; waiting for it puts the host to sleep until it has arrived.

    FSDP2 waits only for a `Work`: for another class with a `wait` its gathers would take no time.
    """

    def __init__(self, clock: Clock, arrives_at: float):
        super().__init__()
        self.clock = clock
        self.arrives_at = arrives_at

    def wait(self, *args: object, **kwargs: object) -> bool:
        self.clock.sleep_until(self.arrives_at)
        return True


# The model


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of a layer, and the size of its weight in units of `WIDTH` rows."""

    forward: float
    backward: float
    wire: float
    size: int = 1


EQUAL = LayerTimes(0.020, 0.040, 0.010)
SMALL = LayerTimes(0.005, 0.010, 0.0025)
LARGE = LayerTimes(0.035, 0.070, 0.0175, size=7)
WEIGHT_BYTES = WIDTH * WIDTH * 4

Blocks = Sequence[Sequence[LayerTimes]]
SCENARIOS: dict[str, Blocks] = {
    "equal": [[EQUAL, EQUAL]] * 3,
    "1:7, small first": [[SMALL, LARGE]] * 3,
    "7:1, large first": [[LARGE, SMALL]] * 3,
}


class SleepingMatmul(torch.autograd.Function):
    """Stands for a GEMM: it reads and saves its weight as `F.linear` does, and takes as long as told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, clock: Clock, times: LayerTimes) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.clock, ctx.times = clock, times
        clock.sleep_until(clock.now() + times.forward)
        return x + F.linear(x, weight).mean(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        ctx.clock.sleep_until(ctx.clock.now() + ctx.times.backward)
        of_rows = (grad.sum(-1, keepdim=True) / weight.shape[0]).expand(-1, weight.shape[0])
        return grad + of_rows @ weight, of_rows.t() @ x, None, None


class SleepingLinear(nn.Module):
    def __init__(self, clock: Clock, times: LayerTimes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(times.size * WIDTH, WIDTH))
        self.clock, self.times = clock, times

    def forward(self, x: Tensor) -> Tensor:
        return SleepingMatmul.apply(x, self.weight, self.clock, self.times)


def make_model(clock: Clock, blocks: Blocks) -> nn.Module:
    made = [[SleepingLinear(clock, times) for times in block] for block in blocks]
    return nn.Sequential(*(nn.Sequential(*layers) for layers in made))


# What is compared


def fsdp2_tuned(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 per Linear with asynchronous gathers and forward prefetch; backward prefetch is its default."""
    common.fsdp2_linear(model, mesh)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit._set_unshard_async_op(True)
    for unit, following in pairwise(units[1:]):  # the first is the root, which has no weight of its own
        unit.set_modules_to_forward_prefetch([following])
    return model


SYSTEMS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "fsdp2": common.fsdp2_linear,
    "fsdp2 tuned": fsdp2_tuned,
    "gtp": common.gtp,
    "gtp one ahead": lambda model, mesh: common.gtp(model, mesh, lookahead_bytes=1),
    "gtp no prefetch": lambda model, mesh: common.gtp(model, mesh, prefetch=False),
}


@contextmanager
def fsdp2_on(wire: Wire) -> Iterator[None]:
    """Put the collectives of FSDP2 on the wire."""

    def sent(kind: str, collective: Callable[..., Any]) -> Callable[..., Transfer | None]:
        def call(*args: Any, async_op: bool = False, **kwargs: Any) -> Transfer | None:
            collective(*args, async_op=False, **kwargs)
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            transfer = wire.send(kind, max(tensor.nbytes for tensor in tensors))
            if async_op:
                return transfer
            transfer.wait()
            return None

        return call

    single = hasattr(dist, "all_gather_single")
    gather = "all_gather_single" if single else "all_gather_into_tensor"
    reduce = "reduce_scatter_single" if single else "reduce_scatter_tensor"
    calls = {gather: sent(GATHER, getattr(dist, gather)), reduce: sent(REDUCE, getattr(dist, reduce))}
    with common.replaced(dist, **calls):
        yield


@contextmanager
def gtp_on(wire: Wire) -> Iterator[None]:
    """Put the collectives of torch_gtp on the wire."""
    from torch_gtp import _collectives

    def sent(kind: str, collective: Callable[..., Any]) -> Callable[..., Transfer]:
        def call(*args: Any, **kwargs: Any) -> Transfer:
            collective(*args, **kwargs).wait()
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            return wire.send(kind, max(tensor.nbytes for tensor in tensors))

        return call

    calls = {
        "all_gather": sent(GATHER, _collectives.all_gather),
        "reduce_scatter": sent(REDUCE, _collectives.reduce_scatter),
        "all_reduce": sent("all_reduce", _collectives.all_reduce),
    }
    with common.replaced(_collectives, **calls):
        yield


# Yardsticks


def ideal(layers: Sequence[LayerTimes]) -> tuple[float, float]:
    """Seconds of (forward, forward and backward) with everything hidden but the two ends."""
    forward = layers[0].wire + sum(layer.forward for layer in layers)
    return forward, forward + sum(layer.backward for layer in layers) + layers[0].wire


def floor(layers: Sequence[LayerTimes]) -> tuple[float, float]:
    """Seconds of (forward, forward and backward) that no schedule can beat."""
    forward = _end_of_compute(0.0, [(layer.wire, layer.forward) for layer in layers])[-1]
    back = list(reversed(layers))
    gathers = [0.0, *(layer.wire for layer in back[1:])]  # the last weight of forward is still there
    ends = _end_of_compute(forward, list(zip(gathers, (layer.backward for layer in back), strict=True)))
    wire = forward
    for end, layer in zip(ends, back, strict=True):
        wire = max(wire, end) + layer.wire
    return forward, wire


def _end_of_compute(start: float, layers: Sequence[tuple[float, float]]) -> list[float]:
    """When each (gather, compute) has been computed, the gathers following one another from `start`."""
    arrived = end = start
    ends = []
    for gather, compute in layers:
        arrived += gather
        end = max(end, arrived) + compute
        ends.append(end)
    return ends


# Measuring


@dataclass(frozen=True)
class Measured:
    forward: float
    step: float
    gathers: int
    reduce_scatters: int


def measure(name: str, blocks: Blocks, mesh: DeviceMesh, options: argparse.Namespace) -> Measured:
    clock = CLOCKS[options.clock]()
    wire = Wire(clock, blocks[0][0].wire / (blocks[0][0].size * WEIGHT_BYTES))
    model = SYSTEMS[name](make_model(clock, blocks), mesh)
    common.assert_sharded(model, WORLD)
    with gtp_on(wire) if name.startswith("gtp") else fsdp2_on(wire):
        steps = [one_step(model, wire) for _ in range(options.warmup + options.rounds)]
    return min(steps[options.warmup :], key=lambda measured: measured.step)


def one_step(model: nn.Module, wire: Wire) -> Measured:
    for param in model.parameters():
        param.grad = None
    x = torch.randn(2, WIDTH)
    wire.calls.clear()
    start = wire.clock.now()
    loss = model(x).sum()
    forward = wire.clock.now() - start
    loss.backward()
    return Measured(forward, wire.clock.now() - start, wire.calls[GATHER], wire.calls[REDUCE])


def run_scenario(title: str, mesh: DeviceMesh, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    blocks = SCENARIOS[title]
    layers = [layer for block in blocks for layer in block]
    yardsticks = {"ideal": ideal(layers), "floor": floor(layers)}
    figures = {}
    for name in options.systems:
        got = measure(name, blocks, mesh, options)
        ratios = {f"over_{yardstick}": got.step / step for yardstick, (_, step) in yardsticks.items()}
        figures[name] = {**milliseconds(got.forward, got.step), **ratios, "gathers": got.gathers,
                         "reduce_scatters": got.reduce_scatters}  # fmt: skip
    figures.update({name: milliseconds(*seconds) for name, seconds in yardsticks.items()})
    header = list(figures[options.systems[0]])
    rows = [[name, *(figure.get(key) for key in header)] for name, figure in figures.items()]
    common.print_table(title, ["system", *(key.replace("_", " ") for key in header)], rows)
    return figures


def milliseconds(forward: float, step: float) -> dict[str, float]:
    return {"forward_ms": round(forward * 1e3, 2), "step_ms": round(step * 1e3, 2)}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--clock", choices=CLOCKS, default="counted", help="see above (counted)")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps, of which the fastest counts (5)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them (2)")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    options = parser.parse_args()
    common.start_fake_world(WORLD)
    mesh = common.gtp_mesh(WORLD)
    common.report(options, {title: run_scenario(title, mesh, options) for title in SCENARIOS})


if __name__ == "__main__":
    main()
