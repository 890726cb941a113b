"""Frozen options: what a user may choose, checked where it is written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, Union

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

TP_AXIS = "tp"
GTP_AXIS = "gtp_remat"

# A weight below this many elements costs more in latency than its bytes save: 128 KiB in bf16.
LARGEST_SMALL_NUMEL = 1 << 16


@dataclass(frozen=True)
class GTPPolicy:
    """How a module's weights are gathered and their gradients reduced.

    Args:
        mp: dtypes of compute (``param_dtype``), of the gradient on the wire (``reduce_dtype``), of the
            outputs, and whether floating-point inputs of the root are cast. PyTorch's own class, with
            the meaning it has for ``fully_shard``. A weight is gathered in ``param_dtype`` (its own
            dtype if ``None``).
        prefetch: gather weights ahead of their use, in the order seen before.
        lookahead_bytes: how many bytes of full weights may be gathered ahead of the one in use. ``None``:
            one block's worth, found from the model, and no less than two coalesced calls. At least one weight is always
            gathered ahead. The last weight of a forward is kept for the backward that follows if it has no more bytes.
        coalesce_bytes: neighbouring weights of at most so many bytes when full are gathered in one call, up to so many
            bytes together, and so are their gradients reduced: the latency of a call is paid once. ``None``: 8 MiB on a
            GPU (see docs/performance.md), 0 (a call per weight) elsewhere.
        reduction: ``"mean"`` averages a gradient over every rank that computed it on other data (what
            DDP does); ``"sum"`` adds (for losses summed over tokens and divided by a global count).
        async_reduction: ``False`` waits for each gradient reduction where it starts (for debugging).
        wgrad_first: in the backward of a plain ``nn.Linear``, compute and reduce the weight's gradient before the
            input's. The weight is then gathered, and its gradient reduced, behind the layer's own GEMMs; whoever waits
            for the input's gradient waits longer.
        min_shard_numel: parameters with fewer elements stay replicated. ``None``: a sixteenth of the
            largest parameter, at most 65536.
        reshard_after_forward: ``False`` keeps weights gathered from forward to backward.
        check: compare, before each collective on a weight, what every rank is about to do, and raise on
            every rank when they differ. Synchronises the host with every rank: for finding hangs.

    Raises:
        TypeError, ValueError: an option has the wrong type or value; the message names it.

    Example::

        policy = GTPPolicy(mp=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    """

    mp: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    prefetch: bool = True
    lookahead_bytes: int | None = None
    coalesce_bytes: int | None = None
    reduction: Literal["mean", "sum"] = "mean"
    async_reduction: bool = True
    wgrad_first: bool = False
    min_shard_numel: int | None = None
    reshard_after_forward: bool = True
    check: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.mp, MixedPrecisionPolicy):
            raise TypeError(
                f"GTPPolicy(mp=...): expected torch.distributed.fsdp.MixedPrecisionPolicy, got {type(self.mp).__name__}"
            )
        for name in ("prefetch", "async_reduction", "wgrad_first", "reshard_after_forward", "check"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"GTPPolicy({name}=...): expected a bool, got {getattr(self, name)!r}")
        for name in ("lookahead_bytes", "coalesce_bytes", "min_shard_numel"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"GTPPolicy({name}=...): expected an int or None, got {value!r}")
            if value is not None and value < 0:
                raise ValueError(f"GTPPolicy({name}=...): expected a non-negative number, got {value}")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"GTPPolicy(reduction=...): expected 'mean' or 'sum', got {self.reduction!r}")
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self.mp, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"GTPPolicy(mp=...): {name} must be a torch.dtype, got {dtype!r}")
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"GTPPolicy(mp=...): {name} must be a floating-point dtype, got {dtype}")

    @property
    def reduce_op(self) -> Literal["avg", "sum"]:
        """``reduction`` in the words of a collective."""
        return "avg" if self.reduction == "mean" else "sum"


@dataclass(frozen=True)
class WeightPlan:
    """What to do with one parameter, where the default is not wanted.

    Args:
        shard_dim: tensor dim to split over ``gtp_remat``; ``None`` leaves the choice to the library (dim 0).
            Any other dim costs one copy per gather.
        replicate: ``True`` keeps the parameter whole on every ``gtp_remat`` rank; ``False`` shards it
            whatever its size; ``None`` decides by size.
        mesh: another mesh for this parameter (its own ``gtp_remat`` axis and replicate axes).

    Raises:
        TypeError, ValueError: a field has the wrong type, or ``replicate=True`` meets ``shard_dim``.
    """

    shard_dim: int | None = None
    replicate: bool | None = None
    mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.shard_dim is not None and (isinstance(self.shard_dim, bool) or not isinstance(self.shard_dim, int)):
            raise TypeError(f"WeightPlan(shard_dim=...): expected an int or None, got {self.shard_dim!r}")
        if self.replicate is not None and not isinstance(self.replicate, bool):
            raise TypeError(f"WeightPlan(replicate=...): expected a bool or None, got {self.replicate!r}")
        if self.mesh is not None and not isinstance(self.mesh, DeviceMesh):
            raise TypeError(f"WeightPlan(mesh=...): expected a DeviceMesh, got {type(self.mesh).__name__}")
        if self.replicate and self.shard_dim is not None:
            raise ValueError("WeightPlan: replicate=True and shard_dim exclude each other; drop one")

    @property
    def forces_shard(self) -> bool:
        """Whether the parameter is sharded whatever its size."""
        return self.replicate is False or self.shard_dim is not None


Plan = Union[Mapping[str, WeightPlan], Callable[[str, nn.Parameter], "WeightPlan | None"]]  # noqa: UP007

_DEFAULT_PLAN = WeightPlan()


class PlanReader:
    """Answers which ``WeightPlan`` a parameter has, and which keys of a mapping matched nothing."""

    def __init__(self, plan: Plan | None):
        if plan is not None and not callable(plan) and not isinstance(plan, Mapping):
            raise TypeError(
                f"gtp_shard(plan=...): expected a mapping of names to WeightPlan or a callable, got {type(plan).__name__}"
            )
        if isinstance(plan, Mapping):
            for key, value in plan.items():
                if not isinstance(key, str) or not isinstance(value, WeightPlan):
                    raise TypeError(
                        f"gtp_shard(plan=...): expected str -> WeightPlan, got {key!r} -> {type(value).__name__}"
                    )
        self._plan = plan
        self._matched: set[str] = set()

    def of(self, fqn: str, param: nn.Parameter) -> WeightPlan:
        if self._plan is None:
            return _DEFAULT_PLAN
        if isinstance(self._plan, Mapping):
            if fqn in self._plan:
                self._matched.add(fqn)
                return self._plan[fqn]
            matches = [key for key in self._plan if fnmatchcase(fqn, key)]
            self._matched.update(matches)
            if len({self._plan[key] for key in matches}) > 1:
                raise ValueError(
                    f"gtp_shard(plan=...): {fqn} matches {matches} with different plans; make the patterns exclusive"
                )
            return self._plan[matches[0]] if matches else _DEFAULT_PLAN
        answer = self._plan(fqn, param)
        if answer is not None and not isinstance(answer, WeightPlan):
            raise TypeError(
                f"gtp_shard(plan=...): the callable returned {type(answer).__name__} for {fqn}; "
                "return a WeightPlan or None"
            )
        return answer or _DEFAULT_PLAN

    def unmatched(self) -> list[str]:
        return [key for key in self._plan if key not in self._matched] if isinstance(self._plan, Mapping) else []


def small_numel_limit(policy: GTPPolicy, largest: int) -> int:
    """Elements below which a parameter stays replicated, given the largest one of the model."""
    if policy.min_shard_numel is not None:
        return policy.min_shard_numel
    return min(LARGEST_SMALL_NUMEL, math.ceil(largest / 16))


def cast_floats(value: object, dtype: torch.dtype | None) -> object:
    """Floating-point tensors of a nested structure in ``dtype``; everything else unchanged."""
    if dtype is None:
        return value
    return torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() and t.dtype != dtype else t, value
    )
