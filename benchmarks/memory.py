"""How many bytes of gathered weights are alive, and when?

The buffer of every gather is watched through a weak reference to its storage, from its allocation until the
last reader lets go. One process stands for rank 0 of eight; the model is Llama-like, with weights of
1.5 : 1 : 7 : 3.5 in each block.

The plan is what the policy allows: the weight in use, and after it as many of the coming ones as fit the
lookahead, at least one.

    python benchmarks/memory.py
    python benchmarks/memory.py --timeline      # the live bytes at every gather
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

import common

WORLD = 8
PHASES = ("forward", "between", "backward", "after")


class Block(nn.Module):
    """The four weights of a Llama block, one after the other."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.qkv = nn.Linear(width, 3 * width // 2, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 7 * width, bias=False)
        self.down = nn.Linear(7 * width // 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.out(self.qkv(x)[:, : self.width])
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(torch.sigmoid(gate) * up)


def make_model(options: argparse.Namespace) -> nn.Module:
    return nn.Sequential(*(Block(options.width) for _ in range(options.blocks)))


# Watching


@dataclass
class Meter:
    """The gathered buffers of one model, and how many bytes of them were alive at each event."""

    phase: str = "forward"
    events: list[tuple[str, int]] = field(default_factory=list)
    _buffers: list[tuple[StorageWeakRef, int]] = field(default_factory=list)

    def add(self, buffer: Tensor) -> None:
        self.note()  # what was released since the last event
        self._buffers.append((StorageWeakRef(buffer.untyped_storage()), buffer.nbytes))
        self.note()

    def note(self) -> None:
        self._buffers = [(storage, nbytes) for storage, nbytes in self._buffers if not storage.expired()]
        self.events.append((self.phase, sum(nbytes for _, nbytes in self._buffers)))

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.note()

    def peaks(self) -> dict[str, int]:
        return {phase: max((live for at, live in self.events if at == phase), default=0) for phase in PHASES}


@contextmanager
def watched(meter: Meter) -> Iterator[None]:
    from torch_gtp import _buffers

    allocate = _buffers.allocate

    def watched_allocate(*args: Any, **kwargs: Any) -> Tensor:
        buffer = allocate(*args, **kwargs)
        meter.add(buffer)
        return buffer

    with common.replaced(_buffers, allocate=watched_allocate):
        yield


def measure(options: argparse.Namespace, mesh: DeviceMesh, policy: dict[str, Any]) -> Meter:
    """One step of a model that has recorded its order in the steps before."""
    model = common.gtp(make_model(options), mesh, **policy)
    common.assert_sharded(model, WORLD)
    for _ in range(options.warmup):
        model(torch.randn(4, options.width)).sum().backward()
    meter = Meter()
    with watched(meter):
        loss = model(torch.randn(4, options.width)).sum()
        meter.enter("between")
        meter.phase = "backward"
        loss.backward()
        meter.enter("after")
    return meter


# The plan


def weight_bytes(options: argparse.Namespace) -> list[int]:
    """In the order of forward."""
    return [param.nbytes for param in make_model(options).parameters()]


def plan(sizes: Sequence[int], lookahead: int | None) -> dict[str, int]:
    """The most that may be alive in each phase. `lookahead` counts bytes; `None` gathers nothing ahead."""
    kept = 0 if lookahead is None else sizes[-1]  # the first weight of backward is still there from forward
    forward, backward = window(sizes, lookahead), window(sizes[::-1], lookahead)
    return {"forward": forward, "between": kept, "backward": backward, "after": 0}


def window(sizes: Sequence[int], lookahead: int | None) -> int:
    """A weight and those gathered ahead of it: at least one, more while they fit the lookahead."""
    if lookahead is None:
        return max(sizes)
    return max(size + fitting(sizes[i + 1 :], lookahead) for i, size in enumerate(sizes))


def fitting(coming: Sequence[int], lookahead: int) -> int:
    ahead = 0
    for size in coming:
        if ahead and ahead + size > lookahead:
            break
        ahead += size
    return ahead


# Reporting


def show_timeline(title: str, meter: Meter) -> None:
    largest = max(live for _, live in meter.events) or 1
    print(f"\n{title}: live bytes at each event")
    for phase, live in meter.events:
        print(f"  {phase:>8} {live:>9} {'#' * round(60 * live / largest)}")


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--width", type=int, default=64, help="a multiple of 16 (64)")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3, help="steps before the one that is watched (3)")
    parser.add_argument("--timeline", action="store_true", help="print the live bytes at every event")
    options = parser.parse_args()
    common.start_fake_world(WORLD)
    mesh = common.gtp_mesh(WORLD)
    sizes = weight_bytes(options)
    block = sum(sizes) // options.blocks
    policies: dict[str, tuple[dict[str, Any], int | None]] = {
        "gtp no prefetch": ({"prefetch": False}, None),
        "gtp one ahead": ({"lookahead_bytes": 1}, 1),
        "gtp": ({}, block),
    }
    rows: list[common.Row] = []
    figures = {}
    for name, (policy, lookahead) in policies.items():
        meter, planned = measure(options, mesh, policy), plan(sizes, lookahead)
        peaks = meter.peaks()
        if options.timeline:
            show_timeline(name, meter)
        for label, most in ((name, peaks), ("  plan", planned)):
            rows.append([label, *(most[phase] / block for phase in PHASES)])
        figures[name] = {"bytes": peaks, "plan_bytes": planned}
    rows.append(["FSDP2 per block, computed", 2.0, 0.0, 2.0, 0.0])
    title = f"Most gathered bytes alive, in blocks of {block} bytes"
    common.print_table(title, ["system", *PHASES], rows)
    common.report(options, {"block_bytes": block, "systems": figures})


if __name__ == "__main__":
    main()
