"""Checkpoints that any topology can read, with nothing but ``torch.distributed.checkpoint``.

Parameters and optimizer states are DTensors, so what is saved is the logical tensors: how many ranks wrote
them, and how the weights were split, leaves no trace. Reading is the same, in reverse.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


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

    def state_dict(self) -> dict[str, Any]:
        """For ``torch.distributed.checkpoint``."""
        return asdict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """For ``torch.distributed.checkpoint``."""
        self.step = state_dict["step"]
        self.samples = state_dict["samples"]


def save_checkpoint(
    directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress
) -> Path:
    """Write ``directory/step-NNNNNN``; every rank calls this and writes its own part."""
    path = directory / f"step-{progress.step:06d}"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "progress": progress}
    dcp.save(state, checkpoint_id=path)
    return path


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, progress: Progress) -> Path:
    """Fill model, optimizer and progress from ``path``, or from the last checkpoint in it."""
    path = latest_checkpoint(path)
    # Loading is in place: it wants tensors of the right layout to write into, and reads only what this rank
    # stores.
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "progress": progress}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    return path


def latest_checkpoint(path: Path) -> Path:
    """``path`` itself if it is a checkpoint, else the last finished one inside."""
    # The metadata is written last: a folder without it is a save that did not finish.
    candidates = [path, *sorted(path.glob("step-*"), reverse=True)]
    for candidate in candidates:
        if (candidate / ".metadata").is_file():
            return candidate
    raise ValueError(f"--resume {path}: neither a checkpoint nor a folder with a finished one (step-*/.metadata)")
