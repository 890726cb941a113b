"""Where does a training step spend its time on a GPU?

Profiles one forward and backward of each system, writes the trace of rank 0 (open it in ui.perfetto.dev) and prints what
to look for: whether collectives overlap GEMMs, copies that the plain model does not make, gaps, what the host does.

    tools/ranks_on_one_gpu.sh 4 python benchmarks/gpu_trace.py --case large --folder runs/traces
    python benchmarks/gpu_trace.py --read runs/traces/gtp.trace.json          # print the summary again, without a GPU

The profiler costs host time: overlap and counts are what to read here, durations of kernels too, totals are not.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import common
import gpu_common
from gpu_common import CASES, Ranks, Shape

STEP = "measured step"
WARMUP = 4
TOP = 15
LONG_GAP_US = 10.0

_KINDS = {  # the first that matches names the kind of a kernel
    "gather": re.compile(r"nccl\w*.*all_?gather", re.I),
    "reduce-scatter": re.compile(r"nccl\w*.*reduce_?scatter", re.I),
    "all-reduce": re.compile(r"nccl\w*.*all_?reduce", re.I),
    "other collective": re.compile(r"nccl", re.I),
    "attention": re.compile(r"fmha|flash|attention|sdpa", re.I),
    "GEMM": re.compile(r"gemm|nvjet|cutlass|xmma|cublas", re.I),
    "copy": re.compile(r"memcpy|copy|CatArray", re.I),
    "fill": re.compile(r"memset|FillFunctor", re.I),
}
COLLECTIVES = ("gather", "reduce-scatter", "all-reduce", "other collective")
_SYNCHRONIZES = re.compile(r"Synchronize|cudaMalloc$|cudaFree$|cuMem(Create|Unmap|Release)")


@dataclass(frozen=True)
class Kernel:
    """Something that ran on the GPU; times in microseconds."""

    name: str
    kind: str
    start: float
    end: float
    stream: object

    @property
    def duration(self) -> float:
        return self.end - self.start


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), "other")


# Recording


def record(name: str, shape: Shape, ranks: Ranks, folder: Path) -> Path:
    """Profile one step on every rank; only rank 0 keeps its trace."""
    system = gpu_common.make(name, shape, ranks, gpu_common.world_mesh(ranks))
    batch = gpu_common.batch_of(shape, ranks)
    for _ in range(WARMUP):
        system.forward_backward(*batch)
        system.zero_grad()
    path = folder / f"{name.replace('+', '_')}.trace.json"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ranks.is_cuda else [])]
    ranks.meet()
    with profile(activities=activities) as profiler:
        system.forward_backward(*batch)  # the profiler's own first-time costs
        system.zero_grad()
        ranks.synchronize()
        with record_function(STEP):
            system.forward_backward(*batch)
        ranks.synchronize()
    system.zero_grad()
    if ranks.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
    ranks.meet()
    return path


# Reading


def read(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def span_of_step(events: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """When the host was in the step that counts. The GPU was idle before it."""
    found = [event for event in events if event["name"] == STEP and event.get("cat") == "user_annotation"]
    return (found[0]["ts"], found[0]["ts"] + found[0]["dur"]) if found else (float("-inf"), float("inf"))


def kernels_of(events: Iterable[dict[str, Any]], begin: float) -> list[Kernel]:
    """What the GPU ran after `begin`, in order."""
    found = [
        Kernel(event["name"], kind_of(event["name"]), event["ts"], event["ts"] + event["dur"], event["args"]["stream"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event["ts"] >= begin
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Overlapping and touching spans joined."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def overlap(span: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """How much of a span the others, disjoint ones, cover."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


# Printing


def summarize(path: Path) -> None:
    events = read(path)
    begin, end = span_of_step(events)
    kernels = kernels_of(events, begin)
    print(
        f"\n==== {path.name}: host {(end - begin) / 1e3:.1f} ms in the step, {len(kernels)} kernels and copies on the GPU"
    )
    if kernels:
        print(f"GPU busy from first to last: {(max(k.end for k in kernels) - kernels[0].start) / 1e3:.1f} ms")
        print_collectives(kernels)
        print_moves(kernels)
        print_gaps(kernels)
        print_kernels(kernels)
    else:
        print("the trace holds nothing from a GPU")
    print_host([event for event in events if begin <= event["ts"] <= end])


def print_collectives(kernels: Sequence[Kernel]) -> None:
    gemms = union((k.start, k.end) for k in kernels if k.kind == "GEMM")
    rows = []
    for kind in COLLECTIVES:
        mine = [kernel for kernel in kernels if kernel.kind == kind]
        if mine:
            covered = [overlap((kernel.start, kernel.end), gemms) for kernel in mine]
            total = sum(kernel.duration for kernel in mine)
            beside = sum(amount > 0 for amount in covered)
            rows.append([kind, len(mine), beside, total / 1e3, sum(covered) / total, min(k.duration for k in mine)])
    header = ["collective", "count", "beside a GEMM", "total ms", "share beside GEMMs", "shortest us"]
    common.print_table("Collectives", header, rows)


def print_moves(kernels: Sequence[Kernel]) -> None:
    """Copies and fills: what the plain model does not have is a cost of sharding."""
    by_name: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in kernels:
        if kernel.kind in ("copy", "fill"):
            by_name[kernel.kind, kernel.name].append(kernel.duration)
    rows = [
        [kind, len(times), sum(times) / 1e3, name[:110]]
        for (kind, name), times in sorted(by_name.items(), key=lambda item: -sum(item[1]))
    ]
    common.print_table("Copies and fills", ["kind", "count", "total ms", "kernel"], rows)


def print_gaps(kernels: Sequence[Kernel]) -> None:
    """When nothing ran on the stream with the most GEMM time, and what ran elsewhere meanwhile."""
    busy: Counter[object] = Counter()
    for kernel in kernels:
        busy[kernel.stream] += kernel.duration if kernel.kind == "GEMM" else 0.0  # type: ignore[assignment]
    compute = busy.most_common(1)[0][0]
    mine = [kernel for kernel in kernels if kernel.stream == compute]
    others = union((kernel.start, kernel.end) for kernel in kernels if kernel.kind in COLLECTIVES)
    gaps = []
    reached = mine[0].end
    for kernel in mine[1:]:
        if kernel.start > reached:
            gaps.append((reached, kernel.start, kernel))
        reached = max(reached, kernel.end)
    whole = length((start, end) for start, end, _ in gaps)
    waiting = sum(overlap((start, end), others) for start, end, _ in gaps)
    long = sorted((gap for gap in gaps if gap[1] - gap[0] > LONG_GAP_US), key=lambda gap: gap[0] - gap[1])
    print(
        f"\nIdle compute stream: {whole / 1e3:.2f} ms in {len(gaps)} gaps, {len(long)} of them over {LONG_GAP_US:g} us; "
        f"a collective ran in {waiting / 1e3:.2f} ms of it (waiting for it), none in {(whole - waiting) / 1e3:.2f} ms (host)"
    )
    rows = [
        [f"{(start - kernels[0].start) / 1e3:.2f}", end - start, overlap((start, end), others), kernel.name[:90]]
        for start, end, kernel in long[:TOP]
    ]
    common.print_table("Longest gaps", ["at ms", "us", "beside a collective us", "kernel after it"], rows)


def print_kernels(kernels: Sequence[Kernel]) -> None:
    by_kind: Counter[str] = Counter()
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_kind[kernel.kind] += kernel.duration  # type: ignore[assignment]
        by_name[kernel.name].append(kernel.duration)
    common.print_table("GPU time", ["kind", "ms"], [[kind, time / 1e3] for kind, time in by_kind.most_common()])
    rows = [
        [len(times), sum(times) / 1e3, name[:110]]
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    ]
    common.print_table("Kernels", ["count", "total ms", "kernel"], rows)


def print_host(events: Sequence[dict[str, Any]]) -> None:
    calls: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            calls[event["name"]].append(event["dur"])
    rows = [
        [name, len(times), sum(times) / 1e3, "waits for the GPU" if _SYNCHRONIZES.search(name) else ""]
        for name, times in sorted(calls.items(), key=lambda item: -sum(item[1]))
    ]
    if rows:
        common.print_table("Calls of CUDA", ["call", "count", "ms", ""], rows)
    own = self_times(events)
    rows = [
        [count, time / 1e3, name]
        for name, (count, time) in sorted(own.items(), key=lambda item: -item[1][1])[:TOP]
    ]  # fmt: skip
    common.print_table("Host, self time", ["count", "ms", "operation"], rows)


def self_times(events: Sequence[dict[str, Any]]) -> dict[str, tuple[int, float]]:
    """Count and time of each host operation, without the time of what it called."""
    found: dict[str, tuple[int, float]] = {}
    by_thread: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"):
            by_thread[event["pid"], event["tid"]].append(event)
    for mine in by_thread.values():
        stack: list[tuple[float, str]] = []  # (end, name) of what encloses the next event
        for event in sorted(mine, key=lambda event: (event["ts"], -event["dur"])):
            name, duration = event["name"], event["dur"]
            while stack and stack[-1][0] <= event["ts"]:
                stack.pop()
            if stack:
                count, time = found[stack[-1][1]]
                found[stack[-1][1]] = count, time - duration
            count, time = found.get(name, (0, 0.0))
            found[name] = count + 1, time + duration
            stack.append((event["ts"] + duration, name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="large")
    parser.add_argument("--modes", nargs="+", type=gpu_common.mode, default=["plain", "gtp"])
    parser.add_argument("--tokens", type=int, help="another sequence length than the case has")
    parser.add_argument("--layers", type=int, help="another number of layers than the case has")
    parser.add_argument("--folder", type=Path, default=Path("runs/traces"))
    parser.add_argument("--read", type=Path, nargs="+", help="print the summary of traces that exist, and nothing else")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the script with tiny sizes"
    )
    parser.add_argument("--limit", type=float, default=180.0, help="seconds without progress until every rank ends")
    options = parser.parse_args()
    if options.read:
        for path in options.read:
            summarize(path)
        return
    ranks = Ranks.start(options.device, limit=options.limit)
    case = CASES[options.case]
    shape = replace(case, tokens=options.tokens or case.tokens, layers=options.layers or case.layers)
    for name in options.modes:
        ranks.say(f"{name}: trace")
        path = record(name, shape, ranks, options.folder)
        if ranks.is_cuda:
            torch.cuda.empty_cache()
        if ranks.rank == 0:
            summarize(path)
    ranks.finish()


if __name__ == "__main__":
    main()
