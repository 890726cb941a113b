"""Late collectives, slow kernels and hostile memory, on real streams: a missing edge between two streams gives wrong bits.

A right schedule gives the same bits however late anything is. So every program here runs undisturbed first, then with

* `gather`, `reduce`: collectives start `LATE` cycles after what they depend on. They are issued from a stream of their own
  that waits for the caller's and then sleeps, so the caller's stream runs on meanwhile;
* `compute`: the caller's stream sleeps before each GEMM, so that collectives overtake it;
* `optimizer`: it sleeps before the parameters change;
* always: outputs hold NaN when a collective is issued, and memory of the same sizes is taken, filled with NaN and given
  back right after, which is what a buffer that was freed too early would get.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from tests.gpu.ranks import device, is_cuda, synchronize
from torch_gtp import _collectives

LATE = 10_000_000  # cycles: some milliseconds, far longer than anything in these programs takes


@dataclass(frozen=True)
class Delays:
    gather: bool = False
    reduce: bool = False
    compute: bool = False
    optimizer: bool = False
    overtaking_gathers: bool = False  # a mutation: gathers do not wait for the stream that they are issued on
    overtaking_reductions: bool = False  # likewise
    cycles: int = LATE

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        names = ("all_gather", "reduce_scatter", "all_reduce", "all_gather_batch", "reduce_scatter_batch")
        originals = {name: getattr(_collectives, name) for name in names}
        sides = {name: torch.cuda.Stream() for name in originals} if is_cuda() else {}

        def late(name: str, is_late: bool, overtakes: bool) -> Callable[..., Any]:
            def issue(output: Tensor, *args: Any) -> Any:
                tensors = [output, *(each for each in args if isinstance(each, Tensor))]
                if name != "all_reduce":
                    _poison(output, tensors[1])
                if not sides or not (is_late or overtakes):
                    handle = originals[name](output, *args)
                else:
                    side = sides[name]
                    if not overtakes:
                        side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        if is_late:
                            torch.cuda._sleep(self.cycles)
                        handle = originals[name](output, *args)
                for tensor in tensors:
                    _pressure(tensor)
                return handle

            return issue

        _collectives.all_gather = late("all_gather", self.gather, self.overtaking_gathers)
        _collectives.reduce_scatter = late("reduce_scatter", self.reduce, self.overtaking_reductions)
        _collectives.all_reduce = late("all_reduce", self.reduce, False)

        # One call for several tensors is as late as the first of them: they share its stream.
        def batch(name: str) -> Callable[..., Any]:
            def issue(outputs: list[Tensor], inputs: list[Tensor], *args: Any) -> list[Any]:
                one = getattr(_collectives, name)
                return [one(output, source, *args) for output, source in zip(outputs, inputs, strict=True)]

            return issue

        _collectives.all_gather_batch = batch("all_gather")
        _collectives.reduce_scatter_batch = batch("reduce_scatter")
        Slow.enabled = self.compute
        try:
            yield
            synchronize()
        finally:
            Slow.enabled = False
            for name, original in originals.items():
                setattr(_collectives, name, original)

    def before_optimizer(self) -> None:
        if self.optimizer:
            sleep()


def sleep() -> None:
    if is_cuda():
        torch.cuda._sleep(LATE)


def _poison(output: Tensor, source: Tensor) -> None:
    """NaN wherever the collective will write, but for this rank's own slot if it is sent from there. Leaves no version."""
    with torch.no_grad():
        keeps = source.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        kept = source.clone() if keeps else None
        output.data.fill_(float("nan"))
        if kept is not None:
            source.data.copy_(kept)


def _pressure(like: Tensor) -> None:
    with torch.no_grad():
        taken = [torch.full_like(like, float("nan"), memory_format=torch.contiguous_format) for _ in range(3)]
        del taken


# ---- modules


class Slow(Function):
    """A linear layer whose GEMMs start late, in both directions, after its weight was asked for."""

    enabled = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if Slow.enabled:
            sleep()
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        if Slow.enabled:
            sleep()
        return grad @ weight, grad.T @ x, grad.sum(0)


class SlowLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Slow.apply(x, self.weight, self.bias)


class SideLinear(nn.Linear):
    """A linear layer that computes on a stream of its own, if `aside`."""

    def __init__(self, *sizes: int, weight_from_side: bool, aside: bool):
        super().__init__(*sizes)
        self.weight_from_side = weight_from_side
        self.side = torch.cuda.Stream() if aside else None

    def forward(self, x: Tensor) -> Tensor:
        if self.side is None:
            return super().forward(x)
        weight = None if self.weight_from_side else self.weight
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            x.record_stream(self.side)
            out = F.linear(x, self.weight if weight is None else weight, self.bias)
        torch.cuda.current_stream().wait_stream(self.side)
        out.record_stream(torch.cuda.current_stream())
        return out


def on_device(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().to(device())
