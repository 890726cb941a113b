"""Real text that needs no download, and the rule for who reads which part of it.

The text is the reference prose behind Python's own ``help()``: it ships with every interpreter. Tokens are
bytes.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor

VOCAB_SIZE = 256
# One window in this many is held out, all through the text: its end reads differently from its beginning.
HELD_OUT_STRIDE = 20


def load_text() -> bytes:
    """All help topics of this interpreter, in alphabetical order."""
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def describe_text(text: bytes) -> str:
    """Length and hash: the topics change with the Python version, and the losses with them."""
    digest = hashlib.sha256(text).hexdigest()[:12]
    return f"{len(text):,} bytes of pydoc_data.topics (Python {platform.python_version()}), sha256 {digest}"


class Windows:
    """Windows of ``seq_length`` bytes and the byte that follows each position, numbered without end.

    Sample ``i`` is a pure function of ``i`` and what the constructor got: epoch ``i // len(self)``, shuffled
    by that epoch's seed. Nothing else has to be remembered to continue a run, and nothing in it knows about
    ranks.
    """

    def __init__(self, text: bytes, starts: Sequence[int], seq_length: int, seed: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._starts = starts
        self._seq_length = seq_length
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def __len__(self) -> int:
        """Windows in one epoch."""
        return len(self._starts)

    def batch(self, samples: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each ``(len(samples), seq_length)``."""
        rows = torch.stack([self._window(sample) for sample in samples]).to(device=device, dtype=torch.long)
        return rows[:, :-1], rows[:, 1:]

    def _window(self, sample: int) -> Tensor:
        epoch, position = divmod(sample, len(self))
        if epoch != self._epoch:
            shuffle = torch.Generator().manual_seed(self._seed + epoch)
            self._order = torch.randperm(len(self), generator=shuffle).tolist()
            self._epoch = epoch
        start = self._starts[self._order[position]]
        return self._bytes[start : start + self._seq_length + 1]


def train_and_eval_windows(text: bytes, seq_length: int, seed: int) -> tuple[Windows, Windows]:
    """The windows to learn from, and the held-out ones."""
    # The last window leaves one byte: the target of its last position.
    starts = range(0, len(text) - seq_length, seq_length)
    if len(starts) < 2:
        raise ValueError(f"a text of {len(text)} bytes is too short for --seq-length {seq_length}")
    held_out = starts[::HELD_OUT_STRIDE]
    learned = [start for start in starts if start not in held_out]
    return Windows(text, learned, seq_length, seed), Windows(text, held_out, seq_length, seed)


@dataclass(frozen=True)
class Reader:
    """One reader's share of every global batch.

    There is one reader per ``(dp, gtp_remat)`` coordinate of the mesh: ranks along either axis hold
    different data, exactly as in data parallelism. The ``tp`` ranks of one coordinate are the same reader,
    because they compute the same activations together. So::

        global batch = micro_batch_size x dp x gtp_remat x accumulation

    A global batch that starts at sample ``first`` is always samples ``first .. first + global_batch - 1``,
    whatever the topology: only who reads which of them differs. That is why a run can be compared with, and
    continued on, any other topology.
    """

    index: int
    count: int
    micro_batch_size: int
    accumulation: int

    @property
    def global_batch(self) -> int:
        """Samples that all readers take together in one optimizer step."""
        return self.micro_batch_size * self.count * self.accumulation

    def samples(self, first: int, microbatch: int) -> range:
        """This reader's samples in one microbatch of the global batch that starts at ``first``."""
        start = first + (microbatch * self.count + self.index) * self.micro_batch_size
        return range(start, start + self.micro_batch_size)
