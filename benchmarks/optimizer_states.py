"""What do split optimizer states save, and what does the step cost then?

A transformer is replicated over 1, 2 and 4 processes of this machine, which talk through gloo. Compared are

* whole: AdamW as it is, every replica with all states;
* split: the same after `torch_gtp.optim.shard_optimizer_states`.

Parameters of both must be equal bit by bit after three steps before any figure is printed. Bytes are those of the storage of
the states on the process that holds most. The systems take turns (ABBA), and a step is as long as its slowest process.

    python benchmarks/optimizer_states.py
    python benchmarks/optimizer_states.py --quick
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import common
from common import Step
from step_cpu import Transformer, rounds_in

TIMEOUT_S = 300.0
SYSTEMS = ("whole", "split")


def build(name: str, options: argparse.Namespace, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A replicated transformer with the same gradients in every system and process, and its optimizer."""
    from torch_gtp.optim import shard_optimizer_states

    torch.manual_seed(0)
    model: nn.Module = Transformer(options.layers, options.width)
    if world > 1:
        model = common.gtp(model, init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "gtp_remat")))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
        local(param.grad).normal_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    return model, shard_optimizer_states(optimizer) if name == "split" else optimizer


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the states on the process that holds most; steps, four bytes each, left out."""
    states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    most = torch.tensor(sum(local(value).untyped_storage().nbytes() for value in states))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return int(most)


def measure(options: argparse.Namespace, world: int) -> dict[str, Any]:
    systems = {name: build(name, options, world) for name in SYSTEMS}
    for _ in range(3):
        for _, optimizer in systems.values():
            optimizer.step()
    for one, other in zip(*(model.parameters() for model, _ in systems.values()), strict=True):
        if not torch.equal(local(one), local(other)):
            raise RuntimeError("parameters of the two systems differ")

    def step_of(optimizer: torch.optim.Optimizer) -> Step:
        def step() -> None:
            optimizer.step()
            dist.barrier()  # the step is over when the slowest process is

        return step

    steps = {name: step_of(optimizer) for name, (_, optimizer) in systems.items()}
    timings = common.interleave(steps, rounds=rounds_in(options.seconds), warmup=1, reset=dist.barrier)
    return {
        name: {"state_bytes": state_bytes(optimizer), **vars(timings[name])} for name, (_, optimizer) in systems.items()
    }


def worker(rank: int, world: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    result = measure(options, world)
    if rank == 0:
        with open(os.path.join(folder, "result.json"), "w") as file:
            json.dump(result, file)
    dist.barrier()
    dist.destroy_process_group()


def run_world(options: argparse.Namespace, world: int) -> dict[str, Any]:
    return common.run_processes(worker, world, options, TIMEOUT_S)


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--worlds", type=common.integers, default=[1, 2, 4], help="replicas (1,2,4)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0, help="of timed steps in each world (8)")
    parser.add_argument("--quick", action="store_true", help="one layer, two processes at most, four rounds")
    options = parser.parse_args()
    if options.quick:
        options.worlds, options.layers, options.seconds = [1, 2], 1, 0.0
    return options


def main() -> None:
    options = parse()
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the processes that are about to start
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    worlds = {world: run_world(options, world) for world in options.worlds}
    rows: list[common.Row] = [
        [
            world, name, result["state_bytes"] / 2**20, result["state_bytes"] / systems["whole"]["state_bytes"],
            *(result[key] * 1e3 for key in ("median_wall", "mad_wall", "min_wall", "median_cpu")),
        ]
        for world, systems in worlds.items() for name, result in systems.items()
    ]  # fmt: skip
    header = ["replicas", "states", "MiB of states", "/ whole", "median ms", "MAD ms", "min ms", "CPU ms"]
    common.print_table("AdamW, one step", header, rows)
    common.report(options, {"worlds": worlds})


if __name__ == "__main__":
    main()
