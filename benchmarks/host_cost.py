"""What does a sharded weight cost the host?

One process stands for rank 0 of many. Nothing is sent and the layers are tiny, so a step takes as long as
Python and C++ need to decide, allocate, launch and record. The plain model's time is subtracted, and the rest
divided by the number of weights. All systems, over all numbers of ranks, take turns in the same process.

    python benchmarks/host_cost.py
    python benchmarks/host_cost.py --profile 8        # where the time of gtp_shard goes, on 8 ranks
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import common
from common import Step, Timing

SYSTEMS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "gtp": common.gtp,
    "fsdp2_linear": common.fsdp2_linear,
    "fsdp2_block": common.fsdp2_block,
}
PLAIN = ("plain", 1)
LAYERS_PER_BLOCK = 4
TOKENS = 4
WARMUP = 4  # the first steps record the order of the weights
# What is reported. Ratios use the first: other processes lengthen wall times, those of long steps most.
FIGURES = {"min_cpu": "min CPU", "min_wall": "min wall", "median_cpu": "median CPU"}

Key = tuple[str, int]  # a system and its number of ranks
Costs = dict[Key, dict[str, float]]


class TallLinear(nn.Module):
    """A linear layer of `rows` outputs, of which the next layer reads the first `width`.

    It has enough rows to give each of many ranks one, and is still small.
    """

    def __init__(self, width: int, rows: int):
        super().__init__()
        self.linear = nn.Linear(width, rows, bias=False)
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[:, : self.width].clone()  # FSDP2 warns of views


def make_layer(options: argparse.Namespace) -> nn.Module:
    if options.rows == options.width:
        return nn.Linear(options.width, options.width, bias=False)
    return TallLinear(options.width, options.rows)


def make_model(options: argparse.Namespace) -> nn.Module:
    layers = [make_layer(options) for _ in range(options.layers)]
    firsts = range(0, options.layers, LAYERS_PER_BLOCK)
    return nn.Sequential(*(nn.Sequential(*layers[first : first + LAYERS_PER_BLOCK]) for first in firsts))


def make_models(options: argparse.Namespace) -> dict[Key, nn.Module]:
    models = {PLAIN: make_model(options)}
    for ranks in options.ranks:
        mesh = common.gtp_mesh(ranks)
        for name in options.systems:
            models[name, ranks] = SYSTEMS[name](make_model(options), mesh)
            common.assert_sharded(models[name, ranks], ranks)
    return models


def forward_backward(model: nn.Module, x: Tensor) -> Step:
    return lambda: model(x).sum().backward()


def forward_only(model: nn.Module, x: Tensor) -> Step:
    return torch.no_grad()(lambda: model(x))


def measure(options: argparse.Namespace) -> dict[str, Costs]:
    """Microseconds per weight over the plain model, by kind of step."""
    models = make_models(options)
    x = torch.randn(TOKENS, options.width)
    params = [param for model in models.values() for param in model.parameters()]

    def drop_gradients() -> None:
        for param in params:
            param.grad = None

    costs = {}
    for kind, make_step in (("forward_backward", forward_backward), ("forward", forward_only)):
        steps = {key: make_step(model, x) for key, model in models.items()}
        timings = common.interleave(steps, rounds=range(options.rounds), warmup=WARMUP, reset=drop_gradients)
        costs[kind] = over_plain(timings, options.layers)
    return costs


def over_plain(timings: dict[Key, Timing], layers: int) -> Costs:
    base = asdict(timings[PLAIN])
    return {
        key: {figure: (asdict(timing)[figure] - base[figure]) / layers * 1e6 for figure in FIGURES}
        for key, timing in timings.items()
        if key != PLAIN
    }


def show(costs_by_kind: dict[str, Costs]) -> None:
    for kind, costs in costs_by_kind.items():
        fewest = min(ranks for _, ranks in costs)
        rows: list[common.Row] = []
        for (name, ranks), cost in costs.items():
            over_fsdp2 = ratio(cost, costs.get(("fsdp2_linear", ranks))) if name == "gtp" else None
            over_fewest = ratio(cost, costs[name, fewest])
            rows.append([f"{name}, {ranks} ranks", *cost.values(), over_fsdp2, over_fewest])
        header = ["system", *FIGURES.values(), "gtp / FSDP2 per Linear", f"over {fewest} ranks"]
        common.print_table(f"{kind}: us per weight over plain", header, rows)


def ratio(cost: dict[str, float], reference: dict[str, float] | None) -> float | None:
    return cost["min_cpu"] / reference["min_cpu"] if reference else None


def profile(options: argparse.Namespace, steps: int = 50) -> str:
    """The functions that `gtp_shard` spends its time in."""
    model = common.gtp(make_model(options), common.gtp_mesh(options.profile))
    step = forward_backward(model, torch.randn(TOKENS, options.width))
    for _ in range(WARMUP):
        step()
    profiler = cProfile.Profile(time.process_time)  # what else runs on the machine does not count
    profiler.enable()
    for _ in range(steps):
        step()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(options.profile_lines)
    return f"{steps * options.layers} uses of a weight\n{text.getvalue()}"


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=common.integers, default=[8, 64, 1024], help="(8,64,1024)")
    parser.add_argument("--width", "-d", type=int, default=64, help="input features of each layer (64)")
    parser.add_argument("--rows", type=int, default=0, help="output features (as --width)")
    parser.add_argument("--layers", type=int, default=16, help=f"a multiple of {LAYERS_PER_BLOCK} (16)")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds (40)")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    parser.add_argument("--fake-copies", action="store_true", help="count what the fake group copies")
    parser.add_argument("--profile", type=int, metavar="RANKS", help="profile gtp_shard instead")
    parser.add_argument("--profile-lines", type=int, default=30, help="functions to list (30)")
    options = parser.parse_args()
    options.rows = options.rows or options.width
    if options.layers % LAYERS_PER_BLOCK or options.rows < options.width:
        parser.error(f"--layers must be a multiple of {LAYERS_PER_BLOCK}, and --rows at least --width")
    return options


def main() -> None:
    options = parse()
    common.start_fake_world(options.profile or max(options.ranks), copies=options.fake_copies)
    if options.profile:
        print(profile(options))
        return
    costs = measure(options)
    show(costs)
    rounded = {
        kind: [
            {"system": name, "ranks": ranks, **{figure: round(us, 1) for figure, us in cost.items()}}
            for (name, ranks), cost in by_key.items()
        ]
        for kind, by_key in costs.items()
    }
    common.report(options, {"us_per_weight_over_plain": rounded})


if __name__ == "__main__":
    main()
