"""An adversarial stand-in for the library's collectives.

The library calls its collectives as attributes of one module (`torch_gtp._collectives`). `CommDouble`
replaces those attributes by functions that behave as badly as an asynchronous communicator is allowed to:

* the output holds NaN (bytes of 0x7f for other types) from the issue until `wait()`, so a missing wait is
  visible;
* the collective runs on private copies, so a result can appear no earlier than `wait()`;
* inputs and outputs must not change while in flight, bit by bit, so a buffer that is reused too early is
  visible;
* transfers complete in an order that has nothing to do with the order of the waits;
* a handle that is never waited for is an error.

Every call is logged, so that tests can state exact counts and bytes.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
BATCH_OPS = ("all_gather_batch", "reduce_scatter_batch")  # each tensor is a transfer of its own here
POISON_BYTE = 0x7F

_installed: ContextVar[CommDouble | None] = ContextVar("installed_comm_double", default=None)


class CommDoubleError(AssertionError):
    """The code under test broke a rule that an asynchronous collective imposes."""


class Collective(NamedTuple):
    """One logged call; `shape`, `dtype`, `nbytes` are of its larger side: gathered, or not yet reduced.

    Of an all-to-all they are of what this rank receives: ranks need not agree about them.
    """

    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    group_size: int
    reduction: str | None
    in_place: bool
    group: tuple[int, ...]

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        reduction = f" {self.reduction}" if self.reduction else ""
        shape = "" if self.op == "all_to_all" else list(self.shape)
        return f"{self.op}{reduction} {dtype}{shape} in group {self.group}"


class _Flight:
    """One collective between its issue and its `wait()`."""

    def __init__(self, call: Collective, site: str, output: torch.Tensor, source: torch.Tensor):
        self.call, self.site = call, site
        self.output, self.source = output, source
        self.result: torch.Tensor | None = None
        self.snapshot: torch.Tensor | None = None
        self.work: Any = None
        self.completed = False

    def complete(self, *args: Any, **kwargs: Any) -> None:
        """Finish the transfer. The result stays hidden."""
        if not self.completed:
            self.completed = True
            self.work.wait(*args, **kwargs)

    def violations(self) -> list[str]:
        found = []
        if not _is_poisoned(self.output):
            found.append("its output was written while in flight")
        if self.source is not self.output and not _same_bytes(self.source, self.snapshot):
            found.append("its input was modified while in flight")
        return found

    def reveal(self) -> None:
        # `inference_mode` because a gather issued in inference mode may be waited for outside of it
        with torch.no_grad(), torch.inference_mode(self.output.is_inference()):
            self.output.copy_(self.result)
        self.output = self.source = self.result = self.snapshot = None

    def __str__(self) -> str:
        return f"{self.call} (issued at {self.site})"


class _Handle:
    """What the code under test holds. Attributes other than `wait` are those of the real handle."""

    def __init__(self, double: CommDouble, serial: int, work: Any):
        self._double, self._serial, self._work = double, serial, work

    def wait(self, *args: Any, **kwargs: Any) -> None:
        self._double._land(self._serial, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __del__(self) -> None:
        self._double._dropped(self._serial)


class CommDouble:
    """Replaces the collectives of `module` while installed: `with CommDouble(module) as double: ...`.

    Args:
        module: Anything with the attributes `all_gather(output, input, group)`, `reduce_scatter(output,
            input, group, op)`, `all_reduce(tensor, group, op)` and `all_to_all(output, input, output_counts,
            input_counts, group)`, each returning a handle with `wait()`.
        seed: Seeds the completion order. Use one value on all ranks.
        shuffle: Complete outstanding transfers in random order. Turn it off where ranks run different
            programs.
        trace: Called with a line of text for every collective, before it is issued.
    """

    def __init__(
        self,
        module: ModuleType | SimpleNamespace,
        *,
        seed: int = 0,
        shuffle: bool = True,
        trace: Callable[[str], None] | None = None,
    ):
        self.module = module
        self.log: list[Collective] = []
        self.batches: list[int] = []  # sizes of the calls that moved several tensors; the log has each tensor
        self.errors: list[str] = []
        self._rng = random.Random(seed)
        self._shuffle, self._trace = shuffle, trace
        self._originals: dict[str, Callable] = {}
        self._in_flight: dict[int, _Flight] = {}
        self._serial = 0
        self._groups: dict[Any, tuple[int, ...]] = {}
        self._gathered: list[tuple[StorageWeakRef, int]] = []
        self.peak_bytes = 0
        self._token = None

    # ---- installing

    def __enter__(self) -> CommDouble:
        ops = [*OPS, *(op for op in BATCH_OPS if hasattr(self.module, op))]
        self._originals = {op: getattr(self.module, op) for op in ops}
        for op in ops:
            setattr(self.module, op, getattr(self, f"_{op}"))
        self._token = _installed.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _installed.reset(self._token)
        for op, original in self._originals.items():
            setattr(self.module, op, original)

    # ---- reading

    @contextlib.contextmanager
    def section(self) -> Iterator[list[Collective]]:
        """The calls logged inside the block: the yielded list is filled when the block ends."""
        start, calls = len(self.log), []
        try:
            yield calls
        finally:
            calls.extend(self.log[start:])

    def counts(self) -> Counter[str]:
        return count(self.log)

    def live_bytes(self) -> int:
        """Bytes of all-gather outputs that somebody still holds; `peak_bytes` is the most at any issue."""
        self._gathered = [(storage, nbytes) for storage, nbytes in self._gathered if not storage.expired()]
        return sum(nbytes for _, nbytes in self._gathered)

    def outstanding(self) -> list[str]:
        """The collectives that nobody has waited for yet."""
        return [str(flight) for flight in self._in_flight.values()]

    def problems(self) -> list[str]:
        """Everything found wrong so far, including what is still in flight: empty between two steps."""
        return [*self.errors, *(f"never waited for: {flight}" for flight in self.outstanding())]

    # ---- the collectives

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor, group: Any) -> _Handle:
        return self._issue("all_gather", output, input, group, None)

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, group: Any, op: str) -> _Handle:
        return self._issue("reduce_scatter", output, input, group, op)

    def _all_gather_batch(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any) -> list[_Handle]:
        self.batches.append(len(outputs))
        return [self._all_gather(*pair, group) for pair in zip(outputs, inputs, strict=True)]

    def _reduce_scatter_batch(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any, op: str
    ) -> list[_Handle]:
        self.batches.append(len(outputs))
        return [self._reduce_scatter(*pair, group, op) for pair in zip(outputs, inputs, strict=True)]

    def _all_reduce(self, tensor: torch.Tensor, group: Any, op: str) -> _Handle:
        return self._issue("all_reduce", tensor, tensor, group, op)

    def _all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        group: Any,
    ) -> _Handle:
        return self._issue("all_to_all", output, input, group, None, (output_counts, input_counts))

    @torch.no_grad()
    def _issue(
        self,
        op: str,
        output: torch.Tensor,
        source: torch.Tensor,
        group: Any,
        reduction: str | None,
        counts: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> _Handle:
        call = self._describe(op, output, source, group, reduction, counts)
        self.log.append(call)
        flight = _Flight(call, _call_site(), output, source)
        if self._trace is not None:
            self._trace(f"#{len(self.log)} {flight}")

        private = source.detach().clone(memory_format=torch.contiguous_format)
        original = self._originals[op]
        if op == "all_reduce":
            flight.result = private
            flight.work = original(private, group, reduction)
        else:
            flight.result = torch.zeros_like(output, memory_format=torch.contiguous_format)
            arguments = (flight.result, private, *(counts or ()), group)
            flight.work = original(*arguments) if reduction is None else original(*arguments, reduction)
        _poison(output)
        # Where the two overlap, the input is poison from here on, and has to stay so
        flight.snapshot = source.detach().clone() if call.in_place else private

        if op == "all_gather":
            self._gathered.append((StorageWeakRef(output.untyped_storage()), call.nbytes))
            self.peak_bytes = max(self.peak_bytes, self.live_bytes())

        self._serial += 1
        self._in_flight[self._serial] = flight
        if self._shuffle and self._rng.random() < 0.5:
            self._rng.choice(list(self._in_flight.values())).complete()
        return _Handle(self, self._serial, flight.work)

    def _land(self, serial: int, *args: Any, **kwargs: Any) -> None:
        flight = self._in_flight.pop(serial, None)
        if flight is None:  # a second wait has nothing to do
            return
        flight.complete(*args, **kwargs)
        found = [f"{flight}: {violation}" for violation in flight.violations()]
        flight.reveal()
        if found:
            self.errors += found
            raise CommDoubleError("; ".join(found))

    def _dropped(self, serial: int) -> None:
        flight = self._in_flight.pop(serial, None)
        if flight is not None:
            self.errors.append(f"its handle was dropped without wait(): {flight}")

    def _describe(
        self,
        op: str,
        output: torch.Tensor,
        source: torch.Tensor,
        group: Any,
        reduction: str | None,
        counts: tuple[Sequence[int], Sequence[int]] | None,
    ) -> Collective:
        if group not in self._groups:
            self._groups[group] = tuple(dist.get_process_group_ranks(group))
        ranks = self._groups[group]
        larger = output if op in ("all_gather", "all_to_all") else source
        small, large = (source, output) if op == "all_gather" else (output, source)
        if counts is None:
            fits = large.numel() == small.numel() * (1 if op == "all_reduce" else len(ranks))
        else:
            fits = all(
                len(parts) == len(ranks) and tuple(side.shape) == (sum(parts),)
                for side, parts in zip((output, source), counts, strict=True)
            )
        if not fits or output.dtype != source.dtype:
            raise CommDoubleError(
                f"{op} over {len(ranks)} ranks: output {output.dtype}{list(output.shape)} does not fit "
                f"input {source.dtype}{list(source.shape)}"
            )
        in_place = op == "all_reduce" or _overlap(output, source)
        nbytes = larger.numel() * larger.element_size()
        return Collective(op, tuple(larger.shape), larger.dtype, nbytes, len(ranks), reduction, in_place, ranks)


def current_double() -> CommDouble:
    """The double that is installed in this process; tests read their counts from it."""
    double = _installed.get()
    assert double is not None, "no communication double is installed here (double=False, or torch_gtp is missing)"
    return double


def count(calls: list[Collective]) -> Counter[str]:
    return Counter(call.op for call in calls)


# ---- bytes


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(_bytes(left), _bytes(right))


def _uses_nan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _poison(tensor: torch.Tensor) -> None:
    if _uses_nan(tensor.dtype):
        tensor.detach().fill_(float("nan"))
    else:
        assert tensor.is_contiguous(), "the buffer of a collective must be contiguous"
        _bytes(tensor).fill_(POISON_BYTE)


def _is_poisoned(tensor: torch.Tensor) -> bool:
    if _uses_nan(tensor.dtype):
        return bool(tensor.detach().isnan().all())
    return bool((_bytes(tensor) == POISON_BYTE).all())


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.untyped_storage().data_ptr() != right.untyped_storage().data_ptr():
        return False
    spans = [(t.storage_offset() * t.element_size(), t.numel() * t.element_size()) for t in (left, right)]
    (start, length), (other_start, other_length) = spans
    return start < other_start + other_length and other_start < start + length


def _call_site(depth: int = 3) -> str:
    """The innermost callers outside of this file: `runtime.py:88 issue_gather < hooks.py:31 ...`."""
    frame, names = sys._getframe(1), []
    while frame is not None and len(names) < depth:
        folder, _, file = frame.f_code.co_filename.rpartition("/")
        if file == "rank_worker.py":
            break
        if frame.f_code.co_filename != __file__ and "/torch/" not in folder + "/":
            names.append(f"{file}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names)
