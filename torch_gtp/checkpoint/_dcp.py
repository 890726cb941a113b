"""``save`` and ``load``: ``torch.distributed.checkpoint``, and what it leaves to its caller.

No format of our own: ``dcp.load`` and ``dcp.save`` with the keys ``model``, ``optimizer`` and ``extra`` read and write
the same folders.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, Metadata
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from ._files import agreed, checked_folder, standing, whole_folder, world


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint that any topology, and a plain process, can ``load``. All ranks call it.

    Every rank writes its own shards, one rank each replica, without communication of weights. The folder gets its name
    when everything is written: a crash at any time leaves the checkpoints that were there, and none that is half. Takes
    no step of the optimizer (``get_state_dict`` takes one where there is no state yet, which then counts).

    Args:
        folder: a new folder, on a file system that all ranks see.
        model: after ``gtp_shard``, or any other module that ``torch.distributed.checkpoint`` can save.
        optimizer: of parameters of ``model``.
        extra: anything else that can be pickled (step, position in the data, ...); that of rank 0 is written.
        overwrite: replace a folder of that name, once the new one is written.

    Raises:
        ValueError: the folder exists, is not empty, and ``overwrite`` is not set; the optimizer has a parameter that the
            model has not.
        RuntimeError: writing failed, on any rank.

    Example::

        torch_gtp.checkpoint.save(f"runs/step-{step:06d}", model, optimizer, extra={"step": step})
    """
    path = _check_arguments("checkpoint.save", folder, model, optimizer)
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"checkpoint.save(extra=...): expected a mapping, got {type(extra).__name__}")
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = _optimizer_state(_names(model, optimizer, "checkpoint.save"), optimizer)
    if extra is not None and world()[0] == 0:
        state["extra"] = (dict(extra),)  # in a tuple it is one entry, whatever is in it
    with whole_folder(path, "checkpoint.save", overwrite=overwrite) as partial:
        try:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(partial))
        except CheckpointException as error:
            raise RuntimeError(f"checkpoint.save({str(path)!r}): {_first_failure(error)}") from error


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Fill ``model`` and ``optimizer`` from a checkpoint of any topology. All ranks call it.

    Each rank reads the parts that it stores. All is read into fresh tensors first, so an error, on any rank, leaves
    model and optimizer as they were; this takes the memory of this rank's shards and optimizer states once more, until
    the end of the call. The optimizer gets the states that were saved, those of frozen parameters included; parameters
    without one start without one. Entries are read with pickle: load what you trust.

    Args:
        folder: written by ``save``, or by ``dcp.save`` with the keys ``model`` and ``optimizer``.
        model: has the names and shapes of the saved one; sharded in any way, or not at all.
        optimizer: ``None`` leaves the saved optimizer unread.
        strict: ``False`` loads the entries that both have, as ``nn.Module.load_state_dict`` does.

    Returns:
        What ``save`` got as ``extra``; an empty dict without it.

    Raises:
        ValueError: the checkpoint is unfinished, damaged, or of another model; the message names the entries.

    Example::

        step = torch_gtp.checkpoint.load("runs/step-000100", model, optimizer)["step"]
    """
    path = _check_arguments("checkpoint.load", folder, model, optimizer)
    where, path = f"checkpoint.load({str(path)!r})", standing(path)
    saved, target = agreed(lambda: _targets(_Saved(path, where), model, optimizer, strict))
    try:
        dcp.load(target, storage_reader=FileSystemReader(path))
    except CheckpointException as error:
        raise ValueError(f"{where}: {_first_failure(error)}; model and optimizer are as they were") from error
    if optimizer is not None:
        # What it may refuse, groups of other parameters, was read by every rank alike.
        optimizer.load_state_dict(_to_optimizer_state(saved, model, optimizer, target["optimizer"]))
    set_model_state_dict(model, target["model"], options=StateDictOptions(strict=strict))
    return dict(target["extra"][0]) if "extra" in target else {}


def _check_arguments(where: str, folder: Any, model: Any, optimizer: Any) -> Path:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}(model=...): expected an nn.Module, got {type(model).__name__}")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{where}(optimizer=...): expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    return checked_folder(folder, where)


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"


# ---- the optimizer, by names of parameters


def _names(model: nn.Module, optimizer: torch.optim.Optimizer, where: str) -> list[list[str]]:
    """Names of the optimizer's parameters, by group."""
    names = {id(param): name.replace("_orig_mod.", "") for name, param in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            if id(param) not in names:
                raise ValueError(
                    f"{where}: group {index} of the optimizer has a tensor of shape {tuple(param.shape)} that is no parameter "
                    "of the model; build the optimizer from model.parameters(), after gtp_shard"
                )
    return [[names[id(param)] for param in group["params"]] for group in optimizer.param_groups]


def _optimizer_state(names: list[list[str]], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """In the layout of ``get_optimizer_state_dict``."""
    state = optimizer.state_dict()
    numbers = chain.from_iterable(group["params"] for group in state["param_groups"])
    name_of = dict(zip(numbers, chain.from_iterable(names), strict=True))
    groups = [
        {**group, "params": members} for group, members in zip(state["param_groups"], names, strict=True)
    ]  # fmt: skip
    return {"state": {name_of[number]: entry for number, entry in state["state"].items()}, "param_groups": groups}


def _to_optimizer_state(
    saved: _Saved, model: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]
) -> dict[str, Any]:
    """The inverse of ``_optimizer_state``. Groups are found by their members, in whatever order they were saved."""
    names = _names(model, optimizer, saved.where)
    own = optimizer.state_dict()["param_groups"]
    by_members = {frozenset(group["params"]): group for group in loaded["param_groups"]}
    groups: list[dict[str, Any]] = []
    number_of: dict[str, int] = {}
    for index, (group, members) in enumerate(zip(own, names, strict=True)):
        number_of.update(zip(members, group["params"], strict=True))
        theirs = by_members.get(frozenset(members))
        if theirs is None:
            differing = [sorted(frozenset(members) ^ other)[:4] for other in by_members]
            raise ValueError(
                f"{saved.where}: no saved group has the parameters of group {index} of the optimizer ({_some(members)}); they "
                f"differ in {min(differing, key=len, default=[])}, ...; build the groups that were saved"
            )
        groups.append({**group, **theirs, "params": group["params"]})
    state = {number_of[name]: entry for name, entry in loaded["state"].items() if name in number_of}
    return {"state": state, "param_groups": groups}


# ---- what to read


class _Saved:
    """What a checkpoint says that it has: entries by path, such as ``("optimizer", "state", NAME, "exp_avg")``."""

    def __init__(self, path: Path, where: str):
        self.where = where
        try:
            metadata: Metadata = FileSystemReader(path).read_metadata()
        except Exception as error:
            raise ValueError(
                f"{where}: no checkpoint can be read there ({type(error).__name__}: {error}); a finished one has a file "
                ".metadata"
            ) from error
        self.entries = {
            path: metadata.state_dict_metadata[name] for name, path in (metadata.planner_data or {}).items()
        }

    def below(self, *prefix: Any) -> dict[tuple[Any, ...], Any]:
        size = len(prefix)
        return {path[size:]: entry for path, entry in self.entries.items() if path[:size] == prefix}


def _targets(
    saved: _Saved, model: nn.Module, optimizer: torch.optim.Optimizer | None, strict: bool
) -> tuple[_Saved, dict[str, Any]]:
    """Fresh tensors to read into, in the layouts of ``model`` and ``optimizer``."""
    target: dict[str, Any] = {"model": _model_targets(saved, model, strict)}
    if optimizer is not None:
        target["optimizer"] = _optimizer_targets(saved, model, optimizer, strict)
    if saved.below("extra"):
        target["extra"] = None
    return saved, target


def _model_targets(saved: _Saved, model: nn.Module, strict: bool) -> dict[str, Any]:
    own = get_model_state_dict(model)
    theirs = {path[0]: entry for path, entry in saved.below("model").items()}
    if not theirs:
        raise ValueError(
            f"{saved.where}: it has no entry 'model', but {_some(sorted({str(path[0]) for path in saved.entries}))}; read a "
            "checkpoint with other keys with torch.distributed.checkpoint.load"
        )
    missing, unexpected = [name for name in own if name not in theirs], [name for name in theirs if name not in own]
    if strict and (missing or unexpected):
        raise ValueError(
            f"{saved.where}: the model has entries that the checkpoint lacks: {_some(missing)}; the checkpoint has entries that "
            f"the model lacks: {_some(unexpected)}; pass strict=False to load the others"
        )
    targets: dict[str, Any] = {}
    for name, value in own.items():
        entry = theirs.get(name)
        if entry is None:
            continue
        if isinstance(value, Tensor):
            if value.is_meta:
                raise ValueError(f"{saved.where}: {name} is on the meta device; call materialize_meta before")
            if isinstance(entry, TensorStorageMetadata) and entry.size != value.shape:
                raise ValueError(
                    f"{saved.where}: {name} has shape {tuple(entry.size)} in the checkpoint and {tuple(value.shape)} in the "
                    "model; build the model that was saved"
                )
        targets[name] = torch.empty_like(value) if isinstance(value, Tensor) else value
    return targets


def _optimizer_targets(
    saved: _Saved, model: nn.Module, optimizer: torch.optim.Optimizer, strict: bool
) -> dict[str, Any]:
    states, options = saved.below("optimizer", "state"), saved.below("optimizer", "param_groups")
    if not options:
        raise ValueError(
            f"{saved.where}: it has no optimizer saved as get_optimizer_state_dict lays it out (without "
            "flatten_optimizer_state_dict); pass optimizer=None to load the model alone"
        )
    names = chain.from_iterable(_names(model, optimizer, saved.where))
    params = dict(zip(names, chain.from_iterable(g["params"] for g in optimizer.param_groups), strict=True))
    state: dict[str, dict[str, Any]] = {}
    for path, entry in states.items():
        name, key = path[0], path[1] if len(path) == 2 else None
        if name not in params:
            if strict:
                raise ValueError(
                    f"{saved.where}: the checkpoint has optimizer state of {name}, which the optimizer lacks; give it the "
                    "parameters that were saved, or pass strict=False"
                )
            continue
        if key is None:
            raise ValueError(
                f"{saved.where}: the optimizer state of {name} is nested ({path[1:]}); use dcp.load for it"
            )
        state.setdefault(name, {})[key] = _state_target(saved, name, key, params[name], optimizer, entry)
    groups: list[dict[str, Any]] = []
    for (index, *outer, key), entry in options.items():  # an option that is a dict is saved item by item
        groups += [{} for _ in range(index + 1 - len(groups))]
        place = groups[index]
        for name in outer:
            place = place.setdefault(name, {})
        is_tensor = isinstance(entry, TensorStorageMetadata)
        place[key] = torch.empty(entry.size, dtype=entry.properties.dtype) if is_tensor else None
    return {"state": state, "param_groups": groups}


def _state_target(
    saved: _Saved, name: str, key: str, param: Tensor, optimizer: torch.optim.Optimizer, entry: Any
) -> Any:
    """A tensor for one state of one parameter: laid out as it is now, or else as the parameter."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    present = optimizer.state[param].get(key) if param in optimizer.state else None
    if isinstance(present, Tensor) and present.shape == entry.size:
        return torch.empty_like(present)
    if not entry.size and (key == "step" or param.ndim):
        return torch.empty((), dtype=entry.properties.dtype)
    if entry.size == param.shape:
        return torch.empty_like(param, dtype=entry.properties.dtype, requires_grad=False)
    raise ValueError(
        f"{saved.where}: {key} of {name} has shape {tuple(entry.size)}, the parameter {tuple(param.shape)}, so its layout is "
        "not known; take an optimizer step before load"
    )


def _some(names: list[str]) -> str:
    return f"{names[:6]}" if len(names) <= 6 else f"{names[:6]} and {len(names) - 6} more"
