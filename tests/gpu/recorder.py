"""Counts the library's collectives and watches the memory of gathered weights, without changing either."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torch_gtp import _collectives

OPS = ("all_gather", "reduce_scatter", "all_reduce")
BATCHES = {"all_gather_batch": "all_gather", "reduce_scatter_batch": "reduce_scatter"}  # each tensor counts


class Recorder:
    """`with Recorder() as calls: ...; calls.counts()`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []  # operation, bytes of its larger side
        self.peak_bytes = 0
        self._gathered: list[tuple[StorageWeakRef, int]] = []
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Recorder:
        for op in (*OPS, *BATCHES):
            self._originals[op] = getattr(_collectives, op)
            setattr(_collectives, op, self._recording(op, self._originals[op]))
        return self

    def __exit__(self, *_: object) -> None:
        for op, original in self._originals.items():
            setattr(_collectives, op, original)

    def _recording(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def note(kind: str, first: Tensor, second: Tensor) -> None:
            larger = second if kind == "reduce_scatter" else first
            nbytes = larger.numel() * larger.element_size()
            self.calls.append((kind, nbytes))
            if kind == "all_gather":
                self._gathered.append((StorageWeakRef(first.untyped_storage()), nbytes))
                self.peak_bytes = max(self.peak_bytes, self.live_bytes())

        def call(first: Any, second: Any, *others: Any) -> Any:
            if op in BATCHES:
                for pair in zip(first, second, strict=True):
                    note(BATCHES[op], *pair)
            else:
                note(op, first, second)
            return original(first, second, *others)

        return call

    def counts(self) -> Counter[str]:
        return Counter(op for op, _ in self.calls)

    def nbytes(self, op: str) -> list[int]:
        return [nbytes for called, nbytes in self.calls if called == op]

    def live_bytes(self) -> int:
        """Bytes of gathered weights that somebody still holds."""
        self._gathered = [(storage, nbytes) for storage, nbytes in self._gathered if not storage.expired()]
        return sum(nbytes for _, nbytes in self._gathered)
