"""What does a Muon step cost when the matrices are sharded, and how is the work shared out?

The weights of a transformer are sharded over 1, 2 and 4 processes of this machine, which talk through gloo. Compared are

* owners: `torch_gtp.optim.Muon`, each matrix whole on one rank;
* everywhere: each matrix gathered by every rank (`full_tensor`), which all do the same work;
* DTensor: `torch.optim.Muon` on the sharded parameters, whose matrix products communicate;
* whole: `torch.optim.Muon` on one process's unsharded parameters.

Each system's parameters after one step are compared with those of the last before any time is printed. The systems take
turns (ABBA), and a step is as long as its slowest process. The flops are counted where they run.

A second table is computed, not timed: the plan for Llama 3 8B on larger meshes.

    python benchmarks/muon.py
    python benchmarks/muon.py --quick
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import common
from common import Step, Timing
from step_cpu import Transformer, rounds_in

TIMEOUT_S = 600.0
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
LLAMA_LAYERS = 32
MESHES = [(1, 8, 1), (1, 8, 8), (4, 8, 8), (16, 8, 8)]  # dp, tp, gtp_remat


# The systems


class Everywhere(torch.optim.Optimizer):
    """`torch.optim.Muon` on one axis of `Shard(0)`, with every matrix gathered and orthogonalised by every rank."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 1e-3, "weight_decay": 0.1, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(param.grad)
                buffer = state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])
                direction = param.grad.lerp(buffer, group["momentum"]).bfloat16()
                update = _zeropower_via_newtonschulz(direction.full_tensor(), COEFFICIENTS, 5, 1e-7)
                mesh = param.device_mesh
                rows = -(-len(param) // mesh.size())
                mine = update[mesh.get_rank() * rows :][: len(param._local_tensor)]
                scale = math.sqrt(max(1, param.shape[0] / param.shape[1]))
                param._local_tensor.mul_(1 - group["lr"] * group["weight_decay"]).add_(mine, alpha=-group["lr"] * scale)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def owners(params: list[Tensor]) -> torch.optim.Optimizer:
    from torch_gtp.optim import Muon

    return Muon(params)


SYSTEMS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "owners": owners,
    "everywhere": Everywhere,
    "DTensor": torch.optim.Muon,
    "whole": torch.optim.Muon,
}


def build(name: str, options: argparse.Namespace, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The weights of a transformer with the same gradients in every system, and the optimizer of its matrices."""
    torch.manual_seed(0)
    model: nn.Module = Transformer(options.layers, options.width)
    grads = [torch.randn(param.shape) for param in model.parameters()]
    if name != "whole":
        model = common.gtp(model, common.gtp_mesh(world))
        common.assert_sharded(model, world)
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = torch.zeros_like(param)
        rows = -(-len(param) // world)
        if isinstance(param, DTensor):
            is_sharded = param.placements[0] == Shard(0)
            param.grad._local_tensor.copy_(grad.split(rows)[dist.get_rank()] if is_sharded else grad)
        else:
            param.grad.copy_(grad)
    return model, SYSTEMS[name]([param for param in model.parameters() if param.ndim == 2])


# Measuring


class LocalFlops(TorchDispatchMode):
    """Counts the floating-point operations of matrix products on this rank, those inside of DTensor included."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as operations on local tensors
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@dataclass(frozen=True)
class Result:
    """By system: seconds per step, flops of the busiest rank, the largest error after one step."""

    timings: dict[str, Timing]
    flops: dict[str, int]
    errors: dict[str, float]
    failures: dict[str, str]


def check(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[Tensor], int]:
    """Parameters after one step, and its flops on the busiest rank."""
    with LocalFlops() as counter:
        optimizer.step()
    most = torch.tensor(counter.total)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return [whole(param).detach().clone() for param in model.parameters()], int(most)


def measure(options: argparse.Namespace, world: int) -> Result:
    models, params, flops, failures = {}, {}, {}, {}
    for name in SYSTEMS if world > 1 else ("owners", "whole"):  # one process shards nothing
        models[name] = build(name, options, world)
        try:
            params[name], flops[name] = check(*models[name])
        except Exception as error:
            if name == "owners":
                raise
            failures[name] = f"{type(error).__name__}: {error}"
    errors = {
        name: max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(mine, params["whole"], strict=True))
        for name, mine in params.items()
    }
    for name in {"owners", "everywhere"} & set(errors):
        if errors[name]:
            raise RuntimeError(f"{name}: parameters are off those of torch.optim.Muon by {errors[name]:.1e}")

    def step_of(optimizer: torch.optim.Optimizer) -> Step:
        def step() -> None:
            optimizer.step()
            dist.barrier()  # the step is over when the slowest process is

        return step

    steps = {name: step_of(models[name][1]) for name in params}
    timings = common.interleave(steps, rounds=rounds_in(options.seconds), warmup=1, reset=dist.barrier)
    return Result(timings, flops, errors, failures)


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


def run_world(options: argparse.Namespace, world: int) -> dict[str, Any]:
    return common.run_processes(worker, world, options, TIMEOUT_S)


# Computing


def planned(mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    """The plan for the hidden matrices of Llama 3 8B, column and row parallel, on a mesh (dp, tp, gtp_remat)."""
    from torch_gtp.optim._plan import holding, make_plan, matrices_of

    ranks = math.prod(mesh_shape)
    coordinates = [tuple(c) for c in torch.cartesian_prod(*map(torch.arange, mesh_shape)).tolist()]
    shapes = LLAMA_8B * LLAMA_LAYERS
    matrices = [matrix for index, shape in enumerate(shapes) for matrix in matrices_of(index, shape, None, 5)]
    cache = {}
    for shape in set(shapes):
        split = Shard(1) if shape == (4096, 14336) else Shard(0)
        cache[shape] = holding(shape, mesh_shape, (Replicate(), split, Shard(0)), coordinates)
    start = time.perf_counter()
    plan = make_plan(matrices, [cache[shape] for shape in shapes], ranks, 0, (64 << 20) // 2)
    seconds = time.perf_counter() - start
    loads = [0] * ranks
    for matrix, owner in zip(matrices, plan.owners, strict=True):
        loads[owner] += matrix.flops
    exchanges = [exchange for turn in plan.rounds for exchange in (turn.collect, *turn.deliver)]
    buffers = [sum(side.counts) for exchange in exchanges for side in exchange]
    return {
        "mesh": list(mesh_shape),
        "total_flops": sum(loads),
        "most_flops": max(loads),
        "over_mean": max(loads) / (sum(loads) / ranks),
        "rounds": len(plan.rounds),
        "all_to_alls": len(exchanges),
        "received_bytes": 2 * sum(
            sum((turn.collect.matrices if i == 0 else turn.deliver[i - 1].shards).counts)
            for turn in plan.rounds for i in range(len(turn.deliver) + 1)
        ),
        "largest_buffer_bytes": 2 * max(buffers),
        "plan_seconds": round(seconds, 2),
    }  # fmt: skip


# Reporting


def show(world: int, result: dict[str, Any]) -> None:
    rows: list[common.Row] = []
    for name, timing in result["timings"].items():
        ratio = timing["median_wall"] / result["timings"]["owners"]["median_wall"]
        gflop = result["flops"][name] / 1e9
        milliseconds = [timing[key] * 1e3 for key in ("median_wall", "mad_wall", "min_wall")]
        rows.append([name, *milliseconds, ratio, gflop, f"{result['errors'][name]:.0e}"])
    header = ["system", "median ms", "MAD ms", "min ms", "/ owners", "GFLOP of the busiest rank", "error"]
    common.print_table(f"{world} process{'es' if world > 1 else ''}: one step", header, rows)
    for name, failure in result["failures"].items():
        print(f"{name} does not run: {failure}")


def show_plans(plans: list[dict[str, Any]]) -> None:
    rows: list[common.Row] = [
        [
            " x ".join(map(str, plan["mesh"])), plan["total_flops"] / 1e12, plan["most_flops"] / 1e12, plan["over_mean"],
            plan["rounds"], plan["all_to_alls"], plan["received_bytes"] / 2**20, plan["largest_buffer_bytes"] / 2**20,
        ]
        for plan in plans
    ]  # fmt: skip
    header = [
        "dp x tp x gtp_remat", "TFLOP everywhere", "TFLOP of the busiest owner", "over mean", "rounds", "all-to-alls",
        "MiB to rank 0", "largest buffer MiB",
    ]  # fmt: skip
    common.print_table("Llama 3 8B, computed from the plan", header, rows)


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--worlds", type=common.integers, default=[1, 2, 4], help="processes (1,2,4)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=15.0, help="of timed steps in each world (15)")
    parser.add_argument("--quick", action="store_true", help="one layer, two processes at most, four rounds")
    options = parser.parse_args()
    if options.quick:
        options.worlds, options.layers, options.seconds = [1, 2], 1, 0.0
    return options


def main() -> None:
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are about to start
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    worlds = {}
    for world in options.worlds:
        worlds[world] = run_world(options, world)
        show(world, worlds[world])
    plans = [planned(mesh) for mesh in MESHES]
    show_plans(plans)
    common.report(options, {"worlds": worlds, "plans": plans})


if __name__ == "__main__":
    main()
