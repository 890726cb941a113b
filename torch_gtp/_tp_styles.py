"""What tensor-parallel plans leave on modules, read and translated.

Transformers' ``replicated_with_grad_allreduce`` style (norms between a column- and a row-parallel layer) replaces a
module's ``forward`` by one that hangs ``dist.all_reduce(param.grad)`` on the parameter. On a DTensor that call fails;
and the sum over ``tp`` belongs into the bucket that reduces the parameter anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_GRAD_ALL_REDUCE = "ReplicatedWithGradAllReduce.install_forward.<locals>.tp_forward"


def take_over_grad_all_reduce(module: nn.Module) -> set[int]:
    """Undo that style below ``module``; returns the ids of the parameters whose gradients are partial sums over ``tp``."""
    partial: set[int] = set()
    for child in module.modules():
        forward = child.__dict__.get("forward")
        if getattr(forward, "__qualname__", "") != _GRAD_ALL_REDUCE:
            continue
        original = _free_variable(forward, "original_forward")
        if getattr(original, "__func__", None) is type(child).forward:
            del child.__dict__["forward"]
        else:
            child.__dict__["forward"] = original
        partial.update(id(tensor) for tensor in child._parameters.values() if tensor is not None)
    return partial


def _free_variable(function: Any, name: str) -> Callable[..., Any]:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    value: Callable[..., Any] = cells[name].cell_contents
    return value
