"""How long does a training step take with real communication, beside DDP and FSDP2?

A four-layer transformer runs forward and backward on 1, 2 and 4 processes of this machine, which talk through
gloo. Each system's loss and gathered gradients must equal the plain model's before any time is printed. The
systems take turns (ABBA), and a step is as long as its slowest process.

    python benchmarks/step_cpu.py
    python benchmarks/step_cpu.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import common
from common import Step, Timing

TOLERANCE = 2e-5  # of the loss, and of each gradient relative to its largest element
HEADS = 8
MIN_ROUNDS = 4
TIMEOUT_S = 600.0


# The model


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Sequential):
    def __init__(self, layers: int, width: int):
        super().__init__(*(Block(width) for _ in range(layers)))


# The systems


def ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(model, process_group=mesh.get_group())


def fsdp2_linear(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


SYSTEMS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "plain": common.plain,
    "gtp": common.gtp,
    "ddp": ddp,
    "fsdp2_block": common.fsdp2_block,
    "fsdp2_linear": fsdp2_linear,
}


# Parity


def loss_and_gradients(model: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    whole = {}
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        grad = param.grad
        whole[name.removeprefix("module.")] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return loss.detach(), whole


def check_parity(models: dict[str, nn.Module], x: Tensor, world: int) -> dict[str, float]:
    """The largest relative error of each system; raises above `TOLERANCE`."""
    loss, expected = loss_and_gradients(models["plain"], x)
    for grad in expected.values():
        dist.all_reduce(grad)
        grad /= world
    errors = {}
    for name, model in models.items():
        if name == "plain":
            continue
        got_loss, got = loss_and_gradients(model, x)
        if got.keys() != expected.keys():
            raise RuntimeError(f"{name}: parameters {sorted(got)} are not those of the plain model")
        worst = max(relative_error(got[key], expected[key]) for key in expected)
        errors[name] = max(worst, relative_error(got_loss, loss))
        if not errors[name] <= TOLERANCE:
            raise RuntimeError(f"{name}: loss or gradients are off the plain model's by {errors[name]:.1e}")
    return errors


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


# Measuring


@dataclass(frozen=True)
class Result:
    """Timings and errors by system, in one world."""

    timings: dict[str, Timing]
    errors: dict[str, float]


def training_step(model: nn.Module, x: Tensor) -> Step:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        dist.barrier()  # the step is over when the slowest process is

    return step


def rounds_in(seconds: float) -> Iterator[int]:
    """Rounds for about so long, in pairs so that ABBA closes, and the same number on every process."""
    start, round_, late = time.monotonic(), 0, torch.zeros(1)
    while round_ < MIN_ROUNDS or not late:
        yield round_
        yield round_ + 1
        round_ += 2
        late[0] = time.monotonic() - start > seconds
        dist.broadcast(late, 0)


def measure(options: argparse.Namespace, world: int) -> Result:
    mesh = common.gtp_mesh(world)
    models = {}
    for name in options.systems:
        torch.manual_seed(0)
        models[name] = SYSTEMS[name](Transformer(options.layers, options.width), mesh)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(options.batch, options.length, options.width)
    errors = check_parity(models, x, world)
    steps = {name: training_step(model, x) for name, model in models.items()}
    timings = common.interleave(steps, rounds=rounds_in(options.seconds), warmup=2, reset=dist.barrier)
    return Result(timings, errors)


def worker(rank: int, world: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = measure(options, world)
    if rank == 0:
        with open(os.path.join(folder, "result.json"), "w") as file:
            json.dump(asdict(result), file)
    dist.barrier()
    dist.destroy_process_group()


def run_world(options: argparse.Namespace, world: int) -> Result:
    raw = common.run_processes(worker, world, options, TIMEOUT_S)
    return Result({name: Timing(**values) for name, values in raw["timings"].items()}, raw["errors"])


# Reporting


def show(world: int, result: Result) -> None:
    names = [name for name in ("plain", "ddp", "fsdp2_block", "fsdp2_linear") if name in result.timings]
    rows: list[common.Row] = []
    for name, timing in result.timings.items():
        ratios = [timing.median_wall / result.timings[other].median_wall for other in names]
        error = result.errors.get(name)
        cells = [name, timing.median_wall * 1e3, timing.mad_wall * 1e3, timing.min_wall * 1e3, *ratios]
        rows.append([*cells, f"{error:.0e}" if error is not None else None])
    header = ["system", "median ms", "MAD ms", "min ms", *(f"/ {name}" for name in names), "error"]
    common.print_table(f"{world} process{'es' if world > 1 else ''}: forward and backward", header, rows)


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--worlds", type=common.integers, default=[1, 2, 4], help="processes (1,2,4)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="sequences per process (2)")
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence (64)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of timed steps in each world (15)")
    parser.add_argument("--quick", action="store_true", help="two layers, two processes at most, four rounds")
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(SYSTEMS))
    options = parser.parse_args()
    if options.quick:
        options.worlds, options.layers, options.seconds = [1, 2], 2, 0.0
    if "plain" not in options.systems:
        parser.error("--systems must name plain: the others are checked against it")
    return options


def main() -> None:
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are about to start
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    figures = {}
    for world in options.worlds:
        result = run_world(options, world)
        show(world, result)
        figures[world] = asdict(result)
    common.report(options, figures)


if __name__ == "__main__":
    main()
