"""What ends the freshness of kept weights: a load, an optimizer step."""

from __future__ import annotations

import torch

from . import _hooks, _runtime
from ._state import RootState


def forget_held(root: RootState) -> None:
    """A load rewrites shards: no gathered copy may outlive it."""
    _runtime.drop_all_held(root, explicit=True)


def before_optimizer_step(root: RootState, optimizer: torch.optim.Optimizer) -> None:
    """An optimizer is about to rewrite shards; it leaves no trace in their version counters."""
    stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
    if not root.frames and torch._C._current_graph_task_id() == -1:  # a hook may step within the backward
        _hooks.abandon_backwards(root)
    for identity, (reference, fqn) in root.originals.items():
        if identity in stepped and reference() is not None:
            raise ValueError(
                f"{type(optimizer).__name__} holds {fqn} as it was before gtp_shard replaced it, and would train a tensor that "
                "the model no longer uses; build the optimizer after gtp_shard, from model.parameters()"
            )
    touched = []
    for param in root.params:
        param.current()  # adopts what the model holds now
        if id(param.param) in stepped:
            touched.append(param)
    for param in touched:
        param.steps += 1
        if param.held is not None:
            _runtime.drop_held(root, param)
    if any(param.gathered is not None for param in touched):
        raise ValueError(
            f"{type(optimizer).__name__}.step() inside gathered(): leaving it writes the gathered weights back over the "
            "step; move the step out of the block"
        )
