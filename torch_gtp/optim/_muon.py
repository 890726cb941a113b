"""Muon for sharded parameters: every matrix is orthogonalised whole, by one rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from .. import _collectives
from .._dtensor_layout import make_dtensor, make_spec
from . import _groups, _pipeline
from ._newton_schulz import orthogonalize
from ._plan import Matrix, Part, Plan, Region, holding, make_plan, matrices_of


class _Target(NamedTuple):
    """A parameter with a gradient, as this rank holds it: shards, or whole tensors."""

    stored: Tensor
    param: Tensor
    grad: Tensor
    momentum: Tensor
    group: dict[str, Any]
    name: str

    def direction(self, region: Region) -> Tensor:
        """What is to be orthogonalised, for a region of the shard."""
        momentum = self.momentum[region]
        return self.grad[region].lerp(momentum, self.group["momentum"]) if self.group["nesterov"] else momentum

    def orthogonalize(self, matrix: Tensor) -> Tensor:
        return orthogonalize(matrix, self.group["ns_coefficients"], self.group["ns_steps"], self.group["eps"])

    def apply(self, region: Region, update: Tensor, shape: Sequence[int]) -> None:
        self.param[region].add_(update, alpha=-_adjusted_lr(self.group, shape))


def _adjusted_lr(group: Mapping[str, Any], shape: Sequence[int]) -> float:
    """The learning rate for a matrix of this shape, as ``torch.optim.Muon`` scales it."""
    rows, columns = shape
    if group["adjust_lr_fn"] == "match_rms_adamw":
        return float(group["lr"]) * 0.2 * math.sqrt(max(rows, columns))
    return float(group["lr"]) * math.sqrt(max(1, rows / columns))


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` for parameters that are sharded, with AdamW for those that are no hidden matrices.

    Newton-Schulz needs a whole matrix. Each one has an owner among the ranks of its parameter's mesh, replicate axes
    included: momentum is updated on the shards, sent to the owner, orthogonalised there, and the update sent back to every
    shard. Owners are chosen by cost, so that all ranks finish together. The numbers are those of ``torch.optim.Muon`` on
    the unsharded model. Plain parameters are updated where they are.

    State is a DTensor with the parameter's layout (``momentum_buffer``; ``exp_avg``, ``exp_avg_sq``, ``step``).

    All ranks of a mesh call ``step`` together, with gradients on the same parameters; those without one are skipped.

    Args:
        params: parameters, ``(name, parameter)`` pairs or groups; ``Muon.groups_of(model)`` makes them. A group may set
            ``algorithm="adamw"`` and then ``betas`` and ``eps`` (defaults as in ``torch.optim.AdamW``), and every option
            below up to ``ns_dtype``.
        lr, weight_decay: for groups of both algorithms.
        momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as for ``torch.optim.Muon``.
        ns_dtype: dtype of the matrices on the wire and in Newton-Schulz: ``torch.bfloat16`` or ``torch.float32``.
        segments: ``{name or parameter: (rows, rows, ...)}`` for packed projections (gate|up, q|k|v): each segment of
            rows is orthogonalised as a matrix of its own.
        round_bytes: how much of the matrices one rank orthogonalises between two exchanges, at least one matrix. Scratch
            is at most eight times this, or eight times the largest matrix.

    Raises:
        TypeError, ValueError: an option or a parameter that cannot be used; the message names it.

    Example::

        optimizer = Muon(Muon.groups_of(model), lr=3e-4, adjust_lr_fn="match_rms_adamw")
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_dtype: torch.dtype = torch.bfloat16,
        segments: Mapping[str | Tensor, Sequence[int]] | None = None,
        round_bytes: int = 64 << 20,
    ):
        if isinstance(round_bytes, bool) or not isinstance(round_bytes, int):
            raise TypeError(f"Muon(round_bytes=...): expected an int, got {round_bytes!r}")
        if round_bytes < 1:
            raise ValueError(f"Muon(round_bytes=...): expected at least 1, got {round_bytes}")
        self._muon_defaults = {
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "ns_dtype": ns_dtype,
        }
        self._round_bytes = round_bytes
        self._plans: dict[_Wire, _CachedPlan] = {}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._segments = _groups.read_segments(segments or {}, self.param_groups)

    @staticmethod
    def groups_of(model: nn.Module, adamw: Iterable[str] = ()) -> list[dict[str, Any]]:
        """Parameter groups of a model: hidden matrices for Muon, everything else for AdamW.

        Matrices, and stacks of matrices such as fused experts, are for Muon; for AdamW are parameters of other dims,
        embeddings (modules, and parameters named so), convolutions and output heads: ``model.get_output_embeddings()``
        where there is one, and modules outside of layer lists that are named ``lm_head``, ``head``, ``output``,
        ``classifier``, ``score`` or ``unembed``. Frozen parameters are left out.

        Args:
            model: sharded or not.
            adamw: glob patterns of the names of further parameters for AdamW.

        Raises:
            ValueError: a pattern matches no parameter.

        Example::

            groups = Muon.groups_of(model, adamw=["*.router.weight"])
        """
        return _groups.groups_of(model, adamw)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as the constructor does."""
        super().add_param_group(param_group)
        group, number = self.param_groups[-1], len(self.param_groups) - 1
        try:
            _groups.fill(group, self._muon_defaults)
            _groups.check_options(group, f"Muon(group {number})")
            _groups.check_params(group, number)
        except Exception:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_muon_defaults", "_round_bytes", "_segments")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = {}
        for group in self.param_groups:  # a checkpoint of torch.optim.Muon lacks what is new here
            _groups.fill(group, self._muon_defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the parameters that have a gradient. All ranks call it.

        Raises:
            ValueError: a gradient is sparse, or laid out otherwise than its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_wire: dict[_Wire, list[_Target]] = {}
        for number, group in enumerate(self.param_groups):
            names = {i: _groups.describe(group, number, i) for i, p in enumerate(group["params"]) if p.grad is not None}
            for index, name in names.items():
                _check_grad(group["params"][index], name)
            if group["algorithm"] == "adamw":
                self._step_adamw(group)
                continue
            targets = [self._target(group, group["params"][index], name) for index, name in names.items()]
            self._update_locally(group, targets)
            for target in targets:
                by_wire.setdefault(_Wire.of(target), []).append(target)
        for wire, targets in by_wire.items():
            if wire.mesh is None:
                self._step_whole(targets)
            else:
                self._step_sharded(wire, wire.mesh, targets)
        return loss

    def _target(self, group: dict[str, Any], stored: Tensor, name: str) -> _Target:
        assert stored.grad is not None
        state = self.state[stored]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = _zeros_like(stored.grad)
        return _Target(stored, _local(stored), _local(stored.grad), _local(state["momentum_buffer"]), group, name)

    @staticmethod
    def _update_locally(group: dict[str, Any], targets: list[_Target]) -> None:
        """Momentum and weight decay: element by element, so on shards as well as on whole matrices."""
        if targets:
            torch._foreach_lerp_([t.momentum for t in targets], [t.grad for t in targets], 1 - group["momentum"])
            torch._foreach_mul_([t.param for t in targets], 1 - float(group["lr"]) * group["weight_decay"])

    def _step_whole(self, targets: list[_Target]) -> None:
        for target in targets:
            for matrix in self._matrices(0, target):
                update = target.orthogonalize(target.direction(matrix.region).to(target.group["ns_dtype"]))
                target.apply(matrix.region, update, matrix.shape)

    def _step_sharded(self, wire: _Wire, mesh: DeviceMesh, targets: list[_Target]) -> None:
        plan, group = self._plan(wire, mesh, targets)
        if not plan.rounds:
            return

        def target_of(index: int) -> _Target:
            return targets[plan.matrices[index].param]

        def apply(part: Part, update: Tensor) -> None:
            target_of(part.matrix).apply(part.of_shard, update, plan.matrices[part.matrix].shape)

        _pipeline.run(
            plan,
            _pipeline.Wire(group, wire.dtype, wire.device),
            read=lambda part: target_of(part.matrix).direction(part.of_shard),
            compute=lambda index, matrix: target_of(index).orthogonalize(matrix),
            apply=apply,
        )

    def _plan(self, wire: _Wire, mesh: DeviceMesh, targets: list[_Target]) -> tuple[Plan, dist.ProcessGroup]:
        """The plan for these parameters, made again when other parameters have gradients than in the step before."""
        key = tuple((id(target.stored), target.group["ns_steps"]) for target in targets)
        cached = self._plans.get(wire)
        if cached is None or cached.key != key:
            matrices = [matrix for i, target in enumerate(targets) for matrix in self._matrices(i, target)]
            cached = self._plans[wire] = _CachedPlan(
                key, *_plan_on(mesh, targets, matrices, self._round_bytes // wire.dtype.itemsize)
            )
        return cached.plan, cached.group

    def _matrices(self, index: int, target: _Target) -> list[Matrix]:
        return matrices_of(index, target.stored.shape, self._segments.get(target.stored), target.group["ns_steps"])

    def _step_adamw(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None]
        for param in params:
            if not self.state[param]:
                self.state[param].update(
                    step=torch.tensor(0.0), exp_avg=_zeros_like(param), exp_avg_sq=_zeros_like(param)
                )
        if params:
            adamw(
                [_local(param) for param in params],
                [_local(param.grad) for param in params],
                [_local(self.state[param]["exp_avg"]) for param in params],
                [_local(self.state[param]["exp_avg_sq"]) for param in params],
                [],
                [self.state[param]["step"] for param in params],
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=float(group["lr"]),
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


class _Wire(NamedTuple):
    """What parameters have in common that are exchanged together; no mesh for those that are whole on this rank."""

    mesh: DeviceMesh | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, target: _Target) -> _Wire:
        mesh = target.stored.device_mesh if isinstance(target.stored, DTensor) else None
        if mesh is not None and mesh.size() == 1:
            mesh = None
        return cls(mesh, target.group["ns_dtype"], target.param.device)


class _CachedPlan(NamedTuple):
    key: tuple[tuple[int, int], ...]
    plan: Plan
    group: dist.ProcessGroup


def _plan_on(
    mesh: DeviceMesh, targets: Sequence[_Target], matrices: Sequence[Matrix], round_numel: int
) -> tuple[Plan, dist.ProcessGroup]:
    """This rank's plan for parameters of one mesh, and the group of all its ranks."""
    names = mesh.mesh_dim_names
    if mesh.ndim > 1 and names is None:
        raise ValueError(
            f"{targets[0].name}: its mesh {mesh} has several axes without names; give init_device_mesh mesh_dim_names"
        )
    group = mesh.get_group(0) if mesh.ndim == 1 else _collectives.axes_group(mesh, names or ())
    assert group is not None
    coordinates = dict(zip(mesh.mesh.flatten().tolist(), itertools.product(*map(range, mesh.shape)), strict=True))
    ranks = dist.get_process_group_ranks(group)
    known: dict[Any, Any] = {}
    holdings = []
    for target in targets:
        assert isinstance(target.stored, DTensor)
        key = (target.stored.shape, target.stored.placements)
        if key not in known:
            try:
                known[key] = holding(key[0], mesh.shape, key[1], [coordinates[rank] for rank in ranks])
            except ValueError as error:
                raise ValueError(
                    f"{target.name}: {error}; shard it with gtp_shard, or put it in an AdamW group"
                ) from None
        holdings.append(known[key])
        box = known[key].boxes[group.rank()]
        assert tuple(end - start for start, end in box) == tuple(target.param.shape), target.name
    return make_plan(matrices, holdings, len(ranks), group.rank(), round_numel), group


def _check_grad(param: Tensor, name: str) -> None:
    grad = param.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise ValueError(f"{name}: its gradient is sparse ({grad.layout}), which Muon cannot read; use sparse=False")
    theirs = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
    mine = (param.device_mesh, param.placements) if isinstance(param, DTensor) else None
    if theirs != mine:
        raise ValueError(
            f"{name}: its gradient is laid out as {theirs and theirs[1]}, the parameter as {mine and mine[1]}; redistribute "
            "the gradient before step()"
        )


def _local(tensor: Any) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _zeros_like(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return torch.zeros_like(tensor, memory_format=torch.preserve_format)
    spec = make_spec(tensor.device_mesh, tensor.placements, tensor.shape, tensor.dtype)
    return make_dtensor(torch.zeros_like(tensor._local_tensor), spec)
