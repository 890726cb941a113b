"""Parameter groups of ``Muon``: which parameters are hidden matrices, what a group may say, and what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

ADAMW_DEFAULTS = MappingProxyType({"betas": (0.9, 0.999), "eps": 1e-8})
MUON_OPTIONS = frozenset({"momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "ns_dtype"})
_NS_DTYPES = (torch.bfloat16, torch.float32)
_LR_ADJUSTMENTS = (None, "original", "match_rms_adamw")
# What an output layer is called where the model does not say: in transformers, torchtitan, timm.
_HEAD_NAMES = frozenset({"lm_head", "head", "output", "classifier", "score", "unembed"})
_CONVOLUTIONS = nn.modules.conv._ConvNd


def groups_of(model: nn.Module, adamw: Iterable[str] = ()) -> list[dict[str, Any]]:
    """See ``Muon.groups_of``."""
    patterns = [adamw] if isinstance(adamw, str) else list(adamw)
    elsewhere = {id(param) for module in _not_hidden(model) for param in module.parameters(recurse=False)}
    groups: dict[str, list[tuple[str, Tensor]]] = {"muon": [], "adamw": []}
    unmatched = set(patterns)
    for fqn, param in model.named_parameters():
        matching = [pattern for pattern in patterns if fnmatchcase(fqn, pattern)]
        unmatched.difference_update(matching)
        if not param.requires_grad:
            continue
        hidden = not matching and id(param) not in elsewhere and _is_matrix(fqn, param)
        groups["muon" if hidden else "adamw"].append((fqn, param))
    if unmatched:
        raise ValueError(
            f"Muon.groups_of(adamw=...): {sorted(unmatched)} match no parameter; names are like "
            f"{[fqn for fqn, _ in model.named_parameters()][:3]}"
        )
    return [{"params": params, "algorithm": name} for name, params in groups.items() if params]


def _is_matrix(fqn: str, param: Tensor) -> bool:
    """A matrix, or a stack of several; not a positional embedding or a token kept as a parameter."""
    is_stack = param.ndim == 3 and param.shape[0] > 1
    return (param.ndim == 2 or is_stack) and min(param.shape[-2:]) > 1 and "embed" not in fqn.rpartition(".")[2]


def _not_hidden(model: nn.Module) -> Iterable[nn.Module]:
    """Embeddings, output layers and convolutions."""
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    for name, module in model.named_modules():
        *path, last = name.split(".")
        is_head = module is head or (last in _HEAD_NAMES and not any(part.isdigit() for part in path))
        if is_head or isinstance(module, nn.Embedding | nn.EmbeddingBag | _CONVOLUTIONS):
            yield module


def fill(group: MutableMapping[str, Any], muon_defaults: Mapping[str, Any]) -> None:
    """Give a group the options of its algorithm that it does not set."""
    group.setdefault("algorithm", "muon")
    for option, value in (muon_defaults if group["algorithm"] == "muon" else ADAMW_DEFAULTS).items():
        group.setdefault(option, value)


def check_options(group: Mapping[str, Any], where: str) -> None:
    """Raise on an option that has a wrong value or belongs to the other algorithm."""
    algorithm = group["algorithm"]
    if algorithm not in ("muon", "adamw"):
        raise ValueError(f"{where}: algorithm must be 'muon' or 'adamw', got {algorithm!r}")
    own, other = (MUON_OPTIONS, ADAMW_DEFAULTS) if algorithm == "muon" else (ADAMW_DEFAULTS, MUON_OPTIONS)
    foreign = sorted((set(other) - set(own)) & set(group))
    if foreign:
        raise ValueError(
            f"{where}: {foreign} mean nothing to algorithm={algorithm!r}, whose options are "
            f"{sorted({'lr', 'weight_decay', *own})}; drop them or choose the other algorithm"
        )
    for option in ("lr", "weight_decay", "momentum", "eps"):
        value = group.get(option, 0.0)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"{where}: {option} must have one element, got a tensor of shape {tuple(value.shape)}")
        if not value >= 0.0:
            raise ValueError(f"{where}: {option} must be at least 0, got {value}")
    if algorithm == "adamw":
        betas = group["betas"]
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"{where}: betas must be two numbers of [0, 1), got {betas}")
        return
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"{where}: ns_steps must be an int, got {steps!r}")
    if not 0 < steps < 100:
        raise ValueError(f"{where}: ns_steps must be from 1 to 99, got {steps}")
    if len(coefficients) != 3:
        raise ValueError(f"{where}: ns_coefficients must be three numbers, got {coefficients}")
    if group["adjust_lr_fn"] not in _LR_ADJUSTMENTS:
        raise ValueError(f"{where}: adjust_lr_fn must be one of {_LR_ADJUSTMENTS}, got {group['adjust_lr_fn']!r}")
    if group["ns_dtype"] not in _NS_DTYPES:
        raise ValueError(f"{where}: ns_dtype must be torch.bfloat16 or torch.float32, got {group['ns_dtype']!r}")


def check_params(group: Mapping[str, Any], number: int) -> None:
    """Raise on a parameter that the group's algorithm cannot update."""
    for index, param in enumerate(group["params"]):
        name = describe(group, number, index)
        if not param.is_floating_point():
            raise ValueError(f"{name}: Muon updates real floating-point parameters, got {param.dtype}")
        if group["algorithm"] == "muon" and param.ndim not in (2, 3):
            raise ValueError(
                f"{name}: only matrices and stacks of matrices (2 or 3 dims) can be orthogonalised; put it in a group with "
                "algorithm='adamw', or let Muon.groups_of(model) make the groups"
            )


def describe(group: Mapping[str, Any], number: int, index: int) -> str:
    """How messages call a parameter: its name if the optimizer was given names, else its place and shape."""
    if "param_names" in group:
        return f"Muon({group['param_names'][index]})"
    return f"Muon(parameter {index} of group {number}, shape {tuple(group['params'][index].shape)})"


def read_segments(
    segments: Mapping[str | Tensor, Sequence[int]], groups: Sequence[Mapping[str, Any]]
) -> dict[Tensor, tuple[int, ...]]:
    """The row segments by parameter, checked against the groups."""
    if not isinstance(segments, Mapping):
        raise TypeError(
            f"Muon(segments=...): expected a mapping of parameters or names to rows, got {type(segments).__name__}"
        )
    named: dict[str, Tensor] = {}
    algorithms: dict[int, str] = {}
    for group in groups:
        if "param_names" in group:
            named.update(zip(group["param_names"], group["params"], strict=True))
        algorithms.update((id(param), group["algorithm"]) for param in group["params"])
    found = {}
    for key, rows in segments.items():
        if isinstance(key, str) and key not in named:
            names = f"names are like {list(named)[:3]}" if named else "the parameters have no names"
            raise ValueError(
                f"Muon(segments=...): {key!r} is not a parameter of the optimizer ({names}); pass model.named_parameters() or "
                "Muon.groups_of(model), or use the parameter itself as the key"
            )
        param = named[key] if isinstance(key, str) else key
        label = repr(key) if isinstance(key, str) else f"a parameter of shape {tuple(key.shape)}"
        if algorithms.get(id(param)) != "muon":
            raise ValueError(f"Muon(segments=...): {label} is in no group with algorithm='muon'; drop it from segments")
        sizes = tuple(rows)
        if any(isinstance(size, bool) or not isinstance(size, int) for size in sizes):
            raise TypeError(f"Muon(segments=...): {label} has {sizes}; the rows of a segment are an int")
        if any(size < 1 for size in sizes) or sum(sizes) != param.shape[-2]:
            raise ValueError(
                f"Muon(segments=...): {label} has segments {sizes} of {sum(sizes)} rows in all; they must be positive and "
                f"add up to its {param.shape[-2]} rows"
            )
        found[param] = sizes
    return found
