"""``shard_optimizer_states``: each replica keeps the states of a part of every shard, and updates that part.

A step::

    pre-hooks, closure              with the parameters that the user knows
    put parts in their place        parameters and gradients as views, states as they are
    the optimizer's own step        element by element, on 1/dp of each shard
    put parameters back
    gather                          updated parts over the replicate axes, two buckets in flight
    post-hooks
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _buffers, _collectives
from .._dtensor_layout import replicate_axes
from .._policy import GTP_AXIS, TP_AXIS
from ._muon import Muon
from ._split import Split, SplitMesh

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)

_BUCKET_BYTES = 32 << 20
_NOT_ELEMENTWISE = (Muon, torch.optim.Muon, torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.SparseAdam)


def shard_optimizer_states(optimizer: _Optimizer, mesh_axes: str | Sequence[str] | None = None) -> _Optimizer:
    """Split the states and the update of an elementwise optimizer over the replicate axes (ZeRO-1), in place.

    A replica keeps states for its part of every shard, updates that part, and gathers the parts of the others at the end
    of ``step``. Parameters and gradients stay as they are. States are DTensors with a further ``Shard(0)``:
    ``torch.distributed.checkpoint`` saves and loads them on any topology.

    Only for optimizers that treat each element by itself (AdamW, SGD, Lion, ...): one that looks at a whole tensor would
    see a part of it. All ranks call ``step``, with gradients on the same parameters.

    Args:
        optimizer: of DTensor parameters; plain ones are updated whole by every rank. Its states, if any, are split.
        mesh_axes: names of replicate axes; ``None`` for all that the mesh of a parameter has.

    Returns:
        The same optimizer, of a subclass of its class.

    Raises:
        TypeError: not an optimizer, or one that is known not to work element by element.
        ValueError: an axis is unknown, or not a replicate axis; ``step`` was replaced on the instance; the states are split
            already; a parameter is laid out otherwise than ``gtp_shard`` does.

    Example::

        optimizer = shard_optimizer_states(torch.optim.AdamW(model.parameters(), lr=3e-4))
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"shard_optimizer_states: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    kind = type(optimizer)
    if isinstance(optimizer, _NOT_ELEMENTWISE):
        raise TypeError(
            f"shard_optimizer_states: {kind.__name__} does not work element by element, so it cannot update a part of a "
            "tensor; use it as it is, or split the states of an optimizer such as AdamW"
        )
    if "_gtp_states" in optimizer.__dict__:
        raise ValueError(f"shard_optimizer_states: the states of this {kind.__name__} are split already; call it once")
    if "step" in optimizer.__dict__:
        raise ValueError(
            f"shard_optimizer_states: the step of this {kind.__name__} was replaced on the instance, as learning-rate "
            "schedulers do; call shard_optimizer_states first, then build the scheduler"
        )
    axes = (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes) if mesh_axes is not None else None
    _check_axes(optimizer, axes)
    states = _SplitStates(axes)
    for param, name in _named_params(optimizer):
        states.split_of(param, name)
    optimizer.__dict__["_gtp_states"] = states
    optimizer.__class__ = _subclass(kind)
    states.adopt(optimizer)
    optimizer.register_load_state_dict_post_hook(states.adopt)
    return optimizer


def _check_axes(optimizer: torch.optim.Optimizer, axes: tuple[str, ...] | None) -> None:
    if axes is None:
        return
    if not axes or len(set(axes)) != len(axes):
        raise ValueError(
            f"shard_optimizer_states(mesh_axes={axes}): name one or more different axes, or pass None for all"
        )
    split = [axis for axis in axes if axis in (TP_AXIS, GTP_AXIS)]
    if split:
        raise ValueError(
            f"shard_optimizer_states(mesh_axes={axes}): {split[0]!r} splits the parameters already, and so their states; "
            "name replicate axes, such as 'dp'"
        )
    meshes = [param.device_mesh for param, _ in _named_params(optimizer) if isinstance(param, DTensor)]
    known = sorted({axis for mesh in meshes for axis in replicate_axes(mesh)})
    for axis in axes:
        if axis not in known:
            raise ValueError(
                f"shard_optimizer_states(mesh_axes={axes}): no parameter has a mesh with a replicate axis {axis!r}; there are "
                f"{known}"
            )


def _named_params(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, str]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if "param_names" in group:
                yield param, f"shard_optimizer_states({group['param_names'][index]})"
            else:
                yield param, f"shard_optimizer_states(parameter {index} of group {number}, shape {tuple(param.shape)})"


def _subclass(kind: type[torch.optim.Optimizer]) -> type[Any]:
    own_step: Callable[..., Any] = kind.step
    if getattr(own_step, "hooked", False):
        own_step = own_step.__wrapped__  # type: ignore[attr-defined]  # user's hooks run around the whole step instead

    @torch.no_grad()
    def step(self: Any, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        states: _SplitStates = self._gtp_states
        with states.parts_in_place(self) as updated:
            own = own_step(self, **kwargs)
        states.gather(updated)
        return loss if closure is not None else own

    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True
    return type(kind.__name__, (kind,), {"step": hooked, "__module__": kind.__module__, "__doc__": kind.__doc__})


class _SplitStates:
    """What one optimizer's parameters are split into."""

    def __init__(self, axes: tuple[str, ...] | None):
        self._axes = axes
        self._meshes: dict[tuple[DeviceMesh, tuple[str, ...]], SplitMesh] = {}
        self._splits: dict[Tensor, tuple[Any, Split | None]] = {}

    def split_of(self, param: Tensor, name: str) -> Split | None:
        """``None`` for a parameter that has no replicas, or no mesh."""
        if not isinstance(param, DTensor):
            return None
        known = self._splits.get(param)
        if known is None or known[0] is not param._spec:
            known = self._splits[param] = (param._spec, self._make_split(param, name))
        return known[1]

    def _make_split(self, param: DTensor, name: str) -> Split | None:
        mesh = param.device_mesh
        names = mesh.mesh_dim_names or ()
        axes = tuple(
            axis
            for axis in replicate_axes(mesh)
            if (self._axes is None or axis in self._axes)
            and mesh.size(names.index(axis)) > 1
            and param.placements[names.index(axis)].is_replicate()
        )
        if not axes:
            return None
        if (mesh, axes) not in self._meshes:
            self._meshes[mesh, axes] = SplitMesh(mesh, axes)
        return Split.of(param, self._meshes[mesh, axes], name)

    # ---- states

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Cut states that are laid out as their parameters: those from before, and those of a checkpoint without splits."""
        for param, name in _named_params(optimizer):
            split = self.split_of(param, name)
            if split is None:
                continue
            assert isinstance(param, DTensor)
            state = optimizer.state.get(param, {})
            for key, value in state.items():
                state[key] = _cut(value, param, split, f"{name}: state {key!r}")

    @contextlib.contextmanager
    def parts_in_place(self, optimizer: torch.optim.Optimizer) -> Iterator[list[tuple[Tensor, Split]]]:
        """Let the optimizer see parts instead of parameters. Yields those that have a gradient."""
        names = dict(_named_params(optimizer))
        parts: dict[Tensor, Tensor] = {}
        updated: list[tuple[Tensor, Split]] = []
        for param, name in names.items():
            split = self.split_of(param, name)
            if split is None:
                continue
            parts[param] = _part(cast(DTensor, param), split, name)
            if param.grad is not None and split.bounds:
                updated.append((cast(DTensor, param)._local_tensor, split))
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        _rename(optimizer.state, parts)
        for group, params in groups:
            group["params"] = [parts.get(param, param) for param in params]
        try:
            yield updated
        finally:
            for group, params in groups:
                group["params"] = params
            _rename(optimizer.state, {part: param for param, part in parts.items()})

    # ---- parameters

    def gather(self, updated: Sequence[tuple[Tensor, Split]]) -> None:
        """Bring the parts that other replicas have updated. Waits: the caller may read parameters next."""
        in_flight: _Gather | None = None
        for bucket in _buckets(updated):
            started = _Gather(bucket)
            if in_flight is not None:
                in_flight.finish()
            in_flight = started
        if in_flight is not None:
            in_flight.finish()


def _cut(value: Any, param: DTensor, split: Split, what: str) -> Any:
    if not isinstance(value, DTensor) or value.shape != param.shape:
        return value
    if value._spec.mesh == split.spec.mesh and value.placements == split.spec.placements:
        return value
    if value._spec.mesh == param.device_mesh and value.placements == param.placements:
        return split.wrap(split.own(value._local_tensor).clone())
    raise ValueError(
        f"{what} is laid out as {value.placements} on axes {value.device_mesh.mesh_dim_names}; expected the parameter's "
        f"{param.placements}, or {split.spec.placements} on axes {split.spec.mesh.mesh_dim_names}; load it with "
        "torch.distributed.checkpoint, which reshards"
    )


def _part(param: DTensor, split: Split, name: str) -> Tensor:
    """This replica's part of a parameter and of its gradient, as views."""
    part = nn.Parameter(split.wrap(split.own(param._local_tensor)), requires_grad=param.requires_grad)
    grad = param.grad
    if grad is not None:
        if not isinstance(grad, DTensor) or grad.placements != param.placements:
            raise ValueError(
                f"{name}: its gradient is laid out as {getattr(grad, 'placements', 'a plain tensor')}, the parameter as "
                f"{param.placements}; redistribute the gradient before step()"
            )
        if grad.dtype != param.dtype:
            part.grad_dtype = grad.dtype
        part.grad = split.wrap(split.own(grad._local_tensor))
    return part


def _rename(state: Any, names: dict[Tensor, Tensor]) -> None:
    for old, new in names.items():
        if old in state:
            state[new] = state.pop(old)


def _buckets(updated: Sequence[tuple[Tensor, Split]]) -> Iterator[list[tuple[Tensor, Split]]]:
    """Shards that are gathered in one call, in the order of the parameters: the same on every replica."""
    by_kind: dict[Any, list[tuple[Tensor, Split]]] = {}
    for local, split in updated:
        by_kind.setdefault((id(split.where), local.dtype, local.device), []).append((local, split))
    for items in by_kind.values():
        bucket: list[tuple[Tensor, Split]] = []
        nbytes = 0
        for local, split in items:
            size = split.chunk * len(split.bounds) * local.itemsize
            if bucket and nbytes + size > _BUCKET_BYTES:
                yield bucket
                bucket, nbytes = [], 0
            bucket.append((local, split))
            nbytes += size
        yield bucket


class _Gather:
    """One all-gather of updated parts in flight."""

    def __init__(self, bucket: list[tuple[Tensor, Split]]):
        self._bucket = bucket
        local, split = bucket[0]
        group = split.where.group
        ranks, rank = group.size(), group.rank()
        # A shard that is cut evenly is gathered where it lies.
        self._in_place = len(bucket) == 1 and split.is_even and local.is_contiguous()
        numel = sum(split.chunk for _, split in bucket)
        if self._in_place:
            self._buffer = local.view(-1)
        else:
            self._buffer = _buffers.allocate(torch.Size((ranks * numel,)), local.dtype, local.device)
        own = self._buffer.narrow(0, rank * numel, numel)
        if not self._in_place:
            for part, slot in self._slots(rank, own):
                slot.copy_(part)
        self._handle = _collectives.all_gather(self._buffer, own, group) if numel else None

    def _slots(self, rank: int, sent: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        chunks = sent.split([split.chunk for _, split in self._bucket])
        for (local, split), chunk in zip(self._bucket, chunks, strict=True):
            part = split.part(local, rank)
            yield part, chunk[: part.numel()].view(part.shape)

    def finish(self) -> None:
        if self._handle is None:
            return
        self._handle.wait()
        if self._in_place:
            return
        group = self._bucket[0][1].where.group
        for rank, sent in enumerate(self._buffer.view(group.size(), -1)):
            if rank != group.rank():
                for part, slot in self._slots(rank, sent):
                    part.copy_(slot)
