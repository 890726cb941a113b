"""Shared by the benchmarks: the systems compared, fair timing, processes and reports."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllreduceOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Step = Callable[[], object]
Row = Sequence[object]
K = TypeVar("K", bound=Hashable)


# The systems compared


def plain(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model as it is: no sharding, no communication."""
    return model


def fsdp2_linear(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 with one unit per module that has a matrix: it gathers what `gtp_shard` gathers."""
    for module in model.modules():
        if any(param.ndim == 2 for param in module.parameters(recurse=False)):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp2_block(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 with one unit per child of the model: the usual way to wrap a transformer."""
    for block in model.children():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def gtp(model: nn.Module, mesh: DeviceMesh, **policy: Any) -> nn.Module:
    """`gtp_shard` with its default policy, or with the options given."""
    from torch_gtp import GTPPolicy, gtp_shard

    return gtp_shard(model, mesh, policy=GTPPolicy(**policy))


def gtp_mesh(ranks: int) -> DeviceMesh:
    """The one axis that every benchmark shards over: the first so many ranks of the world."""
    return DeviceMesh("cpu", torch.arange(ranks), mesh_dim_names=("gtp_remat",))


def assert_sharded(model: nn.Module, world: int) -> None:
    """Refuse to measure a system that left its matrices whole."""
    for name, param in model.named_parameters():
        rows = len(param.to_local() if isinstance(param, DTensor) else param)
        if param.ndim == 2 and rows > -(-len(param) // world):
            raise RuntimeError(f"{name} is not sharded: rank 0 of {world} holds {rows} of {len(param)} rows")


# Several processes


def run_processes(worker: Callable[..., None], world: int, options: argparse.Namespace, limit: float) -> dict[str, Any]:
    """`worker(rank, world, options, folder)` in `world` processes: what one of them left in `folder/result.json`.

    `limit`: seconds until all of them are ended, and a `TimeoutError` is raised.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(worker, (world, options, folder), nprocs=world, join=False)
        try:
            deadline = time.monotonic() + limit
            # Joining returns as soon as one process has ended, and raises if it failed.
            while not context.join(timeout=1.0):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{world} processes did not finish within {limit:.0f} s")
        finally:
            for process in context.processes:
                process.kill()
        with open(os.path.join(folder, "result.json")) as file:
            result: dict[str, Any] = json.load(file)
    return result


# One process that stands for many


def start_fake_world(world: int, *, copies: bool = True) -> None:
    """This process as rank 0 of `world` ranks that never answer and never keep it waiting.

    Args:
        world: how many ranks to pretend.
        copies: let the fake group fill its outputs. `False` takes that work out of what is measured, see
            `_stop_fake_copies`; results are then meaningless.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # buffers that nobody filled may hold denormals, which are slow
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    if not copies:
        _stop_fake_copies()


def _stop_fake_copies() -> None:
    """Make a collective of the fake group cost the same in any world, for the life of this process.

    A fake gather copies its input into each of W slots, and a fake reduce-scatter cuts its input into W
    chunks: 1.7 and 1.0 ms a call at W = 1024, which would be counted as host cost of whoever called. Instead,
    both dispatch a fake all-reduce of one element, which does nothing in any world.
    """
    if "torch_gtp" in sys.modules:
        raise RuntimeError("torch_gtp has already looked up the group's methods: import it after this call")
    token, options = torch.zeros(1), AllreduceOptions()

    def dispatch_only(group: dist.ProcessGroup, *args: object, **kwargs: object) -> dist.Work:
        return group.allreduce([token], options)

    for name in ("all_gather_single", "_allgather_base", "reduce_scatter_single", "_reduce_scatter_base"):
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, dispatch_only)


@contextmanager
def replaced(owner: Any, **replacements: Any) -> Iterator[None]:
    """Other values for some attributes of a module, while the block runs."""
    saved = {name: getattr(owner, name) for name in replacements}
    for name, value in replacements.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


# Timing


@dataclass(frozen=True)
class Timing:
    """Seconds per call, by the wall clock and of this process's CPU; MAD is the median absolute deviation."""

    min_wall: float
    median_wall: float
    mad_wall: float
    min_cpu: float
    median_cpu: float


def summarize(walls: Sequence[float], cpus: Sequence[float]) -> Timing:
    median = statistics.median(walls)
    mad = statistics.median(abs(wall - median) for wall in walls)
    return Timing(min(walls), median, mad, min(cpus), statistics.median(cpus))


def interleave(
    steps: Mapping[K, Step], *, rounds: Iterable[int], warmup: int, reset: Step = lambda: None
) -> dict[K, Timing]:
    """Time the steps in turn, there and back (ABBA), so that a drift of the machine meets all of them alike.

    `reset` runs before each step and outside of its time.
    """
    walls: dict[K, list[float]] = {name: [] for name in steps}
    cpus: dict[K, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(warmup):
            reset()
            step()
    for round_ in rounds:
        for name in list(steps) if round_ % 2 == 0 else reversed(list(steps)):
            reset()
            wall, cpu = time.perf_counter(), time.process_time()
            steps[name]()
            walls[name].append(time.perf_counter() - wall)
            cpus[name].append(time.process_time() - cpu)
    return {name: summarize(walls[name], cpus[name]) for name in steps}


# Reports


def parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    as_written = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=description, formatter_class=as_written)
    made.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    return made


def integers(text: str) -> list[int]:
    """The type of a comma-separated option."""
    return [int(part) for part in text.split(",")]


def print_table(title: str, header: Row, rows: Sequence[Row]) -> None:
    """A Markdown table, aligned: names to the left, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in [header, *rows]]
    first, *others = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        [name.ljust(first), *(cell.rjust(width) for cell, width in zip(row, others, strict=True))]
        for name, *row in cells
    ]
    lines.insert(1, ["-" * first, *("-" * (width - 1) + ":" for width in others)])
    print(f"\n{title}\n", *(f"| {' | '.join(line)} |" for line in lines), sep="\n", flush=True)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
    return "-" if value is None else str(value)


def versions() -> dict[str, str]:
    """What a figure depends on besides the code in this folder."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    try:
        import torch_gtp

        found["torch_gtp"] = getattr(torch_gtp, "__version__", "unknown")
    except ImportError:
        found["torch_gtp"] = "not installed"
    return found


def machine() -> dict[str, object]:
    return {
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }


def report(options: argparse.Namespace, figures: object) -> None:
    """End a benchmark: with `--json`, one line that holds everything needed to repeat it."""
    if options.json:
        made_by = {"command": shlex.join(["python", *sys.argv]), "versions": versions(), "machine": machine()}
        print(json.dumps({**made_by, "figures": figures}))
