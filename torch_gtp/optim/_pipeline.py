"""Runs a plan: momentum to the owners, Newton-Schulz there, updates back, with the transfers behind the arithmetic.

Round k::

    issue collect k+1     in flight while round k is orthogonalised
    wait for collect k
    orthogonalise k       deliver k-1 is in flight; its hops follow one another between the matrices
    issue deliver k       in flight while round k+1 is orthogonalised

The order of issues comes from the plan and is the same on every rank, whichever matrices a rank owns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _buffers, _collectives
from ._plan import Part, Plan, Round, Side

Read = Callable[[Part], Tensor]
Write = Callable[[Part, Tensor], object]


class Wire:
    """Where and how a plan's elements travel."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device):
        self.group, self.dtype, self.device = group, dtype, device

    def start(self, sending: Side, receiving: Side, read: Read) -> Transfer:
        sent, received = self._allocate(sending), self._allocate(receiving)
        for part, slot in _slots(sent, sending.parts):
            slot.copy_(read(part))
        handle = _collectives.all_to_all(received, sent, receiving.counts, sending.counts, self.group)
        return Transfer(handle, sent, received, receiving.parts)

    def _allocate(self, side: Side) -> Tensor:
        return _buffers.allocate(torch.Size((sum(side.counts),)), self.dtype, self.device)


class Transfer:
    """One all-to-all in flight. ``sent`` stays alive until the wait: the collective reads it."""

    def __init__(self, handle: _collectives.Handle, sent: Tensor, received: Tensor, parts: Sequence[Part]):
        self._handle, self._sent, self._received, self._parts = handle, sent, received, parts

    def finish(self, write: Write) -> None:
        self._handle.wait()
        for part, slot in _slots(self._received, self._parts):
            write(part, slot)


def _slots(buffer: Tensor, parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
    for part, slot in zip(parts, buffer.split([part.numel for part in parts]), strict=True):
        yield part, slot.view(part.shape)


def run(plan: Plan, wire: Wire, read: Read, compute: Callable[[int, Tensor], Tensor], apply: Write) -> None:
    """Every rank of the wire's group calls this with its part of one plan.

    Args:
        read: the momentum of a part of this rank's shards.
        compute: the update of a whole matrix, by its index in the plan.
        apply: takes the update of a part of this rank's shards.
    """

    def collect(turn: Round) -> Transfer:
        return wire.start(turn.collect.shards, turn.collect.matrices, read)

    def assemble(turn: Round, transfer: Transfer) -> dict[int, Tensor]:
        whole = {
            index: _buffers.allocate(torch.Size(plan.matrices[index].shape), wire.dtype, wire.device)
            for index in turn.mine
        }
        transfer.finish(lambda part, slot: whole[part.matrix][part.of_matrix].copy_(slot))
        return whole

    def deliver(turn: Round, updates: dict[int, Tensor]) -> Iterator[None]:
        """Each step finishes the hop in flight and starts the next."""
        for hop in turn.deliver:
            transfer = wire.start(hop.matrices, hop.shards, lambda part: updates[part.matrix][part.of_matrix])
            yield
            transfer.finish(apply)
            del transfer

    incoming: Transfer | None = collect(plan.rounds[0])
    outgoing: Iterator[None] = iter(())
    hops = 1
    for turn, following in zip(plan.rounds, [*plan.rounds[1:], None], strict=True):
        assert incoming is not None
        arriving, incoming = incoming, collect(following) if following is not None else None
        updates = assemble(turn, arriving)
        del arriving  # its buffers are scratch that the next transfers may use
        for hop in range(hops):
            for index in turn.mine[hop::hops]:
                updates[index] = compute(index, updates[index])
            next(outgoing, None)
        outgoing, hops = deliver(turn, updates), len(turn.deliver)
        next(outgoing)
    for _ in outgoing:
        pass
