"""How long does a training step take on a GPU, beside the plain model, DDP and FSDP2?

Every system trains the same Llama-like bf16 model from the same seed, in one process group, and they take turns
(ABBA). Run it on every rank; several ranks may share one GPU:

    TORCH_NCCL_HIGH_PRIORITY=1 CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100 NCCL_MAX_NCHANNELS=4 \\
        tools/ranks_on_one_gpu.sh 4 python benchmarks/gpu_step.py --case large --output runs/large.json
    ... python benchmarks/gpu_step.py --case small --graph --modes plain plain+wire ddp fsdp2_block fsdp2_linear gtp

Columns, all of the slowest rank, the median over rounds:

    fwd+bwd   forward and backward from an idle GPU to an idle GPU, by the wall clock; range: smallest and largest round
    exposed   fwd+bwd less that of `plain` in the same round
    issue     until the host has issued forward and backward
    step      forward, backward and optimizer, back to back without waiting in between
    peak      most bytes that PyTorch's allocator handed out in a step, of a process with this system alone: parameters,
              gradients, optimizer state, activations, gathered weights. Not the CUDA context, nor NCCL's own buffers
    reserved  the most that the allocator took from the GPU for it
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import common
import gpu_common
from gpu_common import CASES, Ranks, Shape, System, mode

DEFAULT_MODES = ["plain", "plain+wire", "ddp", "fsdp2_block", "fsdp2_block_prefetch", "gtp"]
WARMUP = 3  # steps: gtp learns its order in the first, allocators settle in the second


@dataclass
class Figures:
    """One system's figures: milliseconds per round, of the slowest rank, and bytes, of the largest."""

    fwd_bwd_ms: list[float] = field(default_factory=list)
    issue_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    peak_bytes: float | None = None
    peak_fwd_bwd_bytes: float | None = None
    reserved_bytes: float | None = None
    resident_bytes: float | None = None
    losses: list[float] = field(default_factory=list)
    error: str | None = None


class Trainer:
    """A system with its data and its optimizer."""

    def __init__(self, system: System, batch: tuple[Tensor, Tensor], optimizer: str):
        self.system, self.batch = system, batch
        parameters = system.parameters()
        if optimizer == "adamw":
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=1e-3, foreach=True)

    def forward_backward(self) -> Tensor:
        return self.system.forward_backward(*self.batch)

    def step(self) -> Tensor:
        loss = self.forward_backward()
        self.optimizer.step()
        self.system.zero_grad()
        return loss


# Measuring


def measure_memory(trainer: Trainer, ranks: Ranks, found: Figures) -> None:
    """Warm up, and watch the allocator in one more step. This system is the only one alive."""
    losses = [trainer.step() for _ in range(WARMUP)]
    ranks.meet()
    if ranks.is_cuda:
        found.resident_bytes = _largest(ranks, torch.cuda.memory_allocated())
        torch.cuda.reset_peak_memory_stats()
    losses.append(trainer.forward_backward())
    ranks.meet()
    if ranks.is_cuda:
        found.peak_fwd_bwd_bytes = _largest(ranks, torch.cuda.max_memory_allocated())
    trainer.optimizer.step()
    trainer.system.zero_grad()
    ranks.meet()
    if ranks.is_cuda:
        found.peak_bytes = _largest(ranks, torch.cuda.max_memory_allocated())
        found.reserved_bytes = _largest(ranks, torch.cuda.max_memory_reserved())
    by_rank = ranks.everyones([loss.item() for loss in losses])
    found.losses = [statistics.fmean(step) for step in zip(*by_rank, strict=True)]


def measure_time(trainer: Trainer, ranks: Ranks, iterations: int, found: Figures) -> None:
    """One round."""
    fwd_bwd, issue = [], []
    for _ in range(iterations):
        ranks.meet()
        start = time.perf_counter()
        trainer.forward_backward()
        issued = time.perf_counter()
        ranks.synchronize()
        fwd_bwd.append(time.perf_counter() - start)
        issue.append(issued - start)
        trainer.system.zero_grad()
    ranks.meet()
    start = time.perf_counter()
    for _ in range(iterations):
        trainer.step()
    ranks.synchronize()
    step = (time.perf_counter() - start) / iterations
    mine = [statistics.median(fwd_bwd) * 1e3, statistics.median(issue) * 1e3, step * 1e3]
    slowest = [max(values) for values in zip(*ranks.everyones(mine), strict=True)]
    for values, value in zip((found.fwd_bwd_ms, found.issue_ms, found.step_ms), slowest, strict=True):
        values.append(value)


def _largest(ranks: Ranks, nbytes: int) -> float:
    return max(values[0] for values in ranks.everyones([float(nbytes)]))


def attempt(ranks: Ranks, what: str, found: Figures, action: Callable[[], Any]) -> Any:
    """A failure that all ranks share is reported and does not end the run. One of a single rank ends in the time limit."""
    if found.error is not None:
        return None
    try:
        return action()
    except Exception as error:
        found.error = f"{what}: {type(error).__name__}: {error}"
        ranks.say(f"FAILED {found.error}\n{traceback.format_exc()}")
        return None


def free(ranks: Ranks) -> None:
    gc.collect()
    if ranks.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# The two passes


def run_case(options: argparse.Namespace, shape: Shape, ranks: Ranks, mesh: DeviceMesh) -> dict[str, Figures]:
    batch = gpu_common.batch_of(shape, ranks)
    figures = {name: Figures() for name in options.modes}

    def made(name: str) -> Trainer:
        return Trainer(gpu_common.make(name, shape, ranks, mesh), batch, options.optimizer)

    for name, found in figures.items() if options.memory else ():
        ranks.say(f"{name}: memory")
        before = torch.cuda.memory_allocated() if ranks.is_cuda else 0
        attempt(ranks, f"{name}, memory", found, lambda: measure_memory(made(name), ranks, found))  # noqa: B023
        free(ranks)
        left = (torch.cuda.memory_allocated() if ranks.is_cuda else 0) - before
        ranks.say(f"{name}: losses {[round(loss, 4) for loss in found.losses]}, {left / 2**20:.1f} MiB left behind")

    trainers: dict[str, Trainer] = {}
    for name, found in figures.items():
        ranks.say(f"{name}: build and warm up")
        trainer = attempt(ranks, f"{name}, build", found, lambda: warmed_up(made(name)))  # noqa: B023
        if trainer is not None:
            trainers[name] = trainer
    for round_ in range(options.rounds):
        for name in list(trainers) if round_ % 2 == 0 else reversed(list(trainers)):
            ranks.say(f"round {round_ + 1} of {options.rounds}: {name}")
            attempt(
                ranks,
                f"{name}, round {round_}",
                figures[name],
                lambda: measure_time(trainers[name], ranks, options.iterations, figures[name]),  # noqa: B023
            )
    trainers.clear()
    free(ranks)
    return figures


def warmed_up(trainer: Trainer) -> Trainer:
    for _ in range(WARMUP):
        trainer.step()
    return trainer


# CUDA graphs


@dataclass
class Captured:
    graph: torch.cuda.CUDAGraph
    system: System
    loss: Tensor
    expected: list[Tensor]


def capture(system: System, batch: tuple[Tensor, Tensor], ranks: Ranks, mode: str) -> Captured:
    """Forward and backward as one graph; gradients stay where the graph writes them."""
    with gpu_common.on_side_stream(ranks):
        for _ in range(WARMUP):
            system.zero_grad()
            system.forward_backward(*batch)
    expected = [_local(param.grad).clone() for param in system.parameters()]
    system.zero_grad()
    ranks.meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        loss = system.forward_backward(*batch)
    ranks.meet()
    return Captured(graph, system, loss, expected)


def replay(captured: Captured, ranks: Ranks, iterations: int, found: Figures) -> None:
    whole, issue = [], []
    for _ in range(iterations):
        ranks.meet()
        start = time.perf_counter()
        captured.graph.replay()
        issued = time.perf_counter()
        ranks.synchronize()
        whole.append((time.perf_counter() - start) * 1e3)
        issue.append((issued - start) * 1e3)
    slowest = ranks.everyones([statistics.median(whole), statistics.median(issue)])
    for values, value in zip((found.fwd_bwd_ms, found.issue_ms), map(max, zip(*slowest, strict=True)), strict=True):
        values.append(value)


def gradient_error(captured: Captured) -> float:
    """Largest difference between a replay's gradients and those of eager mode, relative to their largest element."""
    worst = 0.0
    for param, expected in zip(captured.system.parameters(), captured.expected, strict=True):
        difference = (_local(param.grad).float() - expected.float()).abs().max()
        worst = max(worst, (difference / expected.float().abs().max().clamp_min(1e-30)).item())
    return worst


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run_graphs(
    options: argparse.Namespace, shape: Shape, ranks: Ranks, mesh: DeviceMesh
) -> dict[str, tuple[Figures, float | None]]:
    batch = gpu_common.batch_of(shape, ranks)
    figures = {name: Figures() for name in options.graph_modes}
    errors: dict[str, float | None] = dict.fromkeys(figures)
    captured: dict[str, Captured] = {}
    for name, found in figures.items():
        ranks.say(f"graph of {name}: capture")
        result = attempt(
            ranks,
            f"graph of {name}, capture",
            found,
            lambda: capture(gpu_common.make(name, shape, ranks, mesh), batch, ranks, options.capture_mode),  # noqa: B023
        )
        if result is not None:
            captured[name] = result
    for round_ in range(options.rounds):
        for name in list(captured) if round_ % 2 == 0 else reversed(list(captured)):
            ranks.say(f"round {round_ + 1} of {options.rounds}: graph of {name}")
            attempt(
                ranks,
                f"graph of {name}, replay",
                figures[name],
                lambda: replay(captured[name], ranks, options.iterations, figures[name]),  # noqa: B023
            )
    for name, each in captured.items():
        worst = attempt(ranks, f"graph of {name}, gradients", figures[name], lambda: gradient_error(each))  # noqa: B023
        if worst is not None:
            errors[name] = max(values[0] for values in ranks.everyones([worst]))
    captured.clear()
    free(ranks)
    return {name: (figures[name], errors[name]) for name in figures}


# Reports


def rows_of(figures: dict[str, Figures]) -> list[list[object]]:
    base = figures["plain"].fwd_bwd_ms if "plain" in figures else []
    return [_row(name, found, base) for name, found in figures.items()]


def _row(name: str, found: Figures, base: list[float]) -> list[object]:
    if not found.fwd_bwd_ms:
        return [name, "failed" if found.error else None] + [None] * 9
    exposed = [mine - theirs for mine, theirs in zip(found.fwd_bwd_ms, base, strict=False)]
    median = statistics.median(found.fwd_bwd_ms)
    return [
        name + (" (failed later)" if found.error else ""),
        median,
        f"{min(found.fwd_bwd_ms):.1f}..{max(found.fwd_bwd_ms):.1f}",
        median / statistics.median(base) if base else None,
        statistics.median(exposed) if exposed else None,
        statistics.median(found.issue_ms),
        statistics.median(found.step_ms) if found.step_ms else None,
        f"{min(found.step_ms):.1f}..{max(found.step_ms):.1f}" if found.step_ms else None,
        *(None if size is None else size / 2**30 for size in (found.peak_fwd_bwd_bytes, found.peak_bytes)),
        None if found.reserved_bytes is None else found.reserved_bytes / 2**30,
    ]


HEADER = [
    "system", "fwd+bwd ms", "range", "/ plain", "exposed ms", "issue ms", "step ms", "range",
    "peak fwd+bwd GiB", "peak step GiB", "reserved GiB",
]  # fmt: skip


def parse() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--case", choices=CASES, default="large")
    parser.add_argument("--modes", nargs="+", type=mode, default=DEFAULT_MODES, help="in the order to run them")
    parser.add_argument("--tokens", nargs="+", type=int, help="sequence lengths (default: the case's own)")
    parser.add_argument("--layers", type=int, help="another number of layers than the case has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=3, help="per round")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd", help="foreach SGD, or fused AdamW")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="leave the pass out that measures it")
    parser.add_argument("--graph", action="store_true", help="forward and backward as one CUDA graph, too")
    parser.add_argument("--only-graph", action="store_true", help="nothing but that")
    parser.add_argument("--graph-modes", nargs="+", type=mode, default=["plain", "gtp"])
    parser.add_argument("--capture-mode", choices=("global", "thread_local", "relaxed"), default="global")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script with tiny sizes"
    )
    parser.add_argument("--limit", type=float, default=180.0, help="seconds without progress until every rank ends")
    parser.add_argument("--output", type=Path, help="write everything as JSON to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    ranks = Ranks.start(options.device, limit=options.limit)
    mesh = gpu_common.world_mesh(ranks)
    ranks.say(f"{ranks.world} ranks on {ranks.device}")
    record: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "conditions": gpu_common.conditions(ranks),
        "machine": common.machine(),
        "optimizer": options.optimizer,
        "runs": [],
    }
    case = CASES[options.case]
    case = replace(case, layers=options.layers or case.layers)
    for tokens in options.tokens or [case.tokens]:
        shape = replace(case, tokens=tokens)
        run: dict[str, Any] = {"case": options.case, "shape": asdict(shape)}
        title = f"{options.case}, {tokens} tokens per rank, {ranks.world} ranks, {options.optimizer}"
        record["runs"].append(run)
        if not options.only_graph:
            figures = run_case(options, shape, ranks, mesh)
            run["figures"] = {name: asdict(found) for name, found in figures.items()}
            if ranks.rank == 0:
                common.print_table(title, HEADER, rows_of(figures))
        if (options.graph or options.only_graph) and ranks.is_cuda:
            graphs = run_graphs(options, shape, ranks, mesh)
            run["graphs"] = {
                name: {**asdict(found), "gradient_error": error} for name, (found, error) in graphs.items()
            }
            if ranks.rank == 0:
                rows = rows_of({name: found for name, (found, _) in graphs.items()})
                rows = [[*row[:6], error] for row, (_, error) in zip(rows, graphs.values(), strict=True)]
                common.print_table(f"{title}, as one CUDA graph", [*HEADER[:6], "gradient error"], rows)
        if ranks.rank == 0 and options.output is not None:  # after each length: a later failure loses nothing
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(record, indent=1))
    if ranks.rank == 0 and options.json:
        print(json.dumps(record), flush=True)
    ranks.finish()


if __name__ == "__main__":
    main()
