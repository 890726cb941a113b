"""Recorded orders of use, as predictions.

A pass (a forward, a backward, a recomputation) is a sequence of weight uses. The sequence seen last time a pass
began with the same weight predicts this one. A prediction that turns out wrong costs a wasted gather, never a
wrong value: whoever uses a weight always gets that weight.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Generic, TypeVar


class Direction(IntEnum):
    """The passes that a weight is gathered in. Each has its own gather in flight, so they never mix buffers."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2


T = TypeVar("T")


class Chains(Generic[T]):
    """The recorded orders of one root, by direction and first item."""

    def __init__(self) -> None:
        self._orders: dict[tuple[Direction, T], list[T]] = {}

    def order(self, direction: Direction, first: T) -> list[T]:
        return self._orders.get((direction, first), [])

    def orders(self, direction: Direction) -> list[list[T]]:
        return [order for (key, _), order in self._orders.items() if key is direction]

    def record(self, direction: Direction, order: list[T]) -> None:
        if order:
            self._orders[direction, order[0]] = order

    def clear(self) -> None:
        self._orders.clear()


class Pass(Generic[T]):
    """One walk along a chain: where it is, what comes next, and how far ahead gathers were issued.

    ``cursor`` is the position after the last use; positions below ``frontier`` were offered for prefetch already.
    """

    def __init__(self, chains: Chains[T], direction: Direction):
        self.direction = direction
        self.used: list[T] = []
        self.outstanding = 0
        self._ahead: dict[T, int] = {}  # issued and not yet used: bytes
        self._chains = chains
        self._predicted: list[T] = []
        self._cursor = 0
        self._frontier = 0

    def advance(self, item: T) -> None:
        """Note the use of ``item`` and repair the position when the prediction was wrong."""
        if not self.used:
            self._predicted = self._chains.order(self.direction, item)
        self.used.append(item)
        predicted, cursor = self._predicted, self._cursor
        if cursor < len(predicted) and predicted[cursor] == item:
            self._cursor = cursor + 1
        else:
            try:
                self._cursor = predicted.index(item, cursor) + 1
            except ValueError:
                return  # not in the prediction: stay, the old order may continue after this detour
        self._frontier = max(self._frontier, self._cursor)

    def upcoming(self) -> Iterator[T]:
        """The items expected next, nearest first."""
        return itertools.islice(self._predicted, self._cursor, None)

    @property
    def foresees_end(self) -> bool:
        """Whether the last use was the last of the prediction."""
        return bool(self._predicted) and self._cursor == len(self._predicted)

    def issue_ahead(
        self, budget: int, size_of: Callable[[T], int], issue: Callable[[list[T]], list[bool]], coalesce: int = 0
    ) -> None:
        """Offer the coming items for prefetch, in order, while ``budget`` bytes allow; always at least one.

        Neighbours that have at most ``coalesce`` bytes together are offered together. ``issue`` starts their gathers and
        says for each whether it did (``False``: the item needs none). An answer that is too short means that the chain
        must not be followed further for now.
        """
        predicted, end = self._predicted, len(self._predicted)
        while self._frontier < end:
            first = self._frontier
            nbytes, last = size_of(predicted[first]), first + 1
            if coalesce:
                while last < end and (more := nbytes + size_of(predicted[last])) <= coalesce:
                    nbytes, last = more, last + 1
            if self.outstanding and self.outstanding + nbytes > budget:
                return
            offered = predicted[first:last]
            answers = issue(offered)
            self._frontier += len(answers)
            for item, issued in zip(offered, answers, strict=False):
                if issued:
                    self._ahead[item] = nbytes = size_of(item)
                    self.outstanding += nbytes
            if len(answers) < last - first:
                return

    def arrived(self, item: T) -> None:
        """A prefetched item is used: its bytes leave the budget of the pass that issued it."""
        self.outstanding -= self._ahead.pop(item, 0)

    def finish(self) -> None:
        """The pass is over: what it used becomes the prediction for the next one like it."""
        self._chains.record(self.direction, self.used)

    def __iter__(self) -> Iterator[T]:
        return iter(self.used)
