"""Checkpoints of a run, that any topology can read.

`torch_gtp.checkpoint` writes them with `torch.distributed.checkpoint`: what is saved is the logical tensors, and how
many ranks wrote them, and how the weights were split, leaves no trace.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from torch_gtp import checkpoint


@dataclass
class Progress:
    """How far a run is.

    The data position is one number, the count of samples that all readers together have consumed. A
    position per ``(dp, gtp_remat)`` coordinate would say the same on this topology and nothing on another;
    from the global number every reader derives its own samples (see ``Reader``), also when the global batch
    has changed.
    """

    step: int = 0
    samples: int = 0


def save_checkpoint(
    directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> Path:
    """Write `directory/step-NNNNNN`; every rank calls this and writes its own part."""
    path = directory / f"step-{progress.step:06d}"
    # A run that was resumed from an earlier step comes past this one again
    checkpoint.save(path, model, optimizer, extra=asdict(progress), overwrite=True)
    return path


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
    """Fill model, optimizer and progress from `path`, or from the last checkpoint in it."""
    path = latest_checkpoint(path)
    extra = checkpoint.load(path, model, optimizer)
    progress.step, progress.samples = extra["step"], extra["samples"]
    return path


def latest_checkpoint(path: Path) -> Path:
    """`path` itself if it is a checkpoint, else the last one inside."""
    candidates = [path, *sorted(path.glob("step-*"), reverse=True)]
    for candidate in candidates:
        if (candidate / ".metadata").is_file():
            return candidate
    raise ValueError(f"--resume {path}: neither a checkpoint nor a folder of them (step-*/.metadata)")
