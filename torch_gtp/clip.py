"""One gradient norm for all parameters, whatever they are sharded over."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _collectives


@torch.no_grad()
def grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of the gradients of ``parameters`` as if they were one vector, the same number on every rank.

    Each logical element counts once: shards are summed, replicas are counted by one rank of them. Parameters may be
    DTensors on several meshes and plain tensors (equal on every rank); those without a gradient are skipped. Sums run in
    fp64. All ranks of the meshes call this, with gradients on the same parameters: there is one small all-reduce for all
    meshes that span the same ranks.

    Args:
        parameters: one tensor, or several.
        norm_type: p of the p-norm; ``inf`` for the maximum.

    Returns:
        A 0-D tensor, of fp64 if a gradient is, else of fp32.

    Raises:
        ValueError: ``norm_type`` is not positive, or a gradient is a partial sum or sparse.

    Example::

        norm = grad_norm(model.parameters())
    """
    return _total_norm(_gradients(parameters, "grad_norm"), float(norm_type), None, "grad_norm")


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients of ``parameters`` to a global norm; ``torch.nn.utils.clip_grad_norm_`` for sharded ones.

    Args:
        parameters: as for ``grad_norm``.
        max_norm: the norm to scale down to.
        norm_type: p of the p-norm; ``inf`` for the maximum.
        error_if_nonfinite: raise when the norm is ``nan`` or ``inf``, and leave the gradients as they are.
        foreach: use the multi-tensor kernels; ``None`` means yes.

    Returns:
        The norm before clipping: a plain 0-D tensor, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.
        ValueError: as ``grad_norm``.

    Example::

        norm = clip_grad_norm_(model.parameters(), 1.0)
    """
    grads = _gradients(parameters, "clip_grad_norm_")
    norm_type = float(norm_type)
    total = _total_norm(grads, norm_type, foreach, "clip_grad_norm_")
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} is not finite ({total.item()}), so it cannot be clipped; set "
            "error_if_nonfinite=False to scale anyway"
        )
    # As in torch.nn.utils: clamped instead of compared, so that the host need not wait for the device.
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for (device, _), locals_ in _by_kind(map(_local, grads)).items():
        if foreach is False:
            for local in locals_:
                local.mul_(scale.to(device))
        else:
            torch._foreach_mul_(locals_, scale.to(device))
    return total


def _gradients(parameters: Tensor | Iterable[Tensor], caller: str) -> list[Tensor]:
    grads = []
    for index, tensor in enumerate([parameters] if isinstance(parameters, Tensor) else parameters):
        grad = tensor.grad
        if grad is None:
            continue
        where = f"{caller}: the gradient of parameter {index}, shape {tuple(tensor.shape)},"
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            raise ValueError(f"{where} is a partial sum ({grad.placements}); reduce it first")
        if grad.layout is not torch.strided:
            raise ValueError(f"{where} is sparse ({grad.layout}); use sparse=False")
        grads.append(grad)
    return grads


def _total_norm(grads: list[Tensor], norm_type: float, foreach: bool | None, caller: str) -> Tensor:
    if not norm_type > 0:
        raise ValueError(f"{caller}(norm_type=...): expected a positive number or inf, got {norm_type}")
    if not grads:
        return torch.tensor(0.0)
    device = _local(grads[0]).device
    # Those of no mesh are on every rank; the others are added up over all ranks of their mesh, in one collective for all
    # meshes with the same ranks.
    counted: dict[tuple[int, ...], list[Tensor]] = {}
    mesh_of: dict[tuple[int, ...], DeviceMesh | None] = {}
    ranks_of: dict[int, tuple[int, ...]] = {}
    for grad in grads:
        mesh = grad.device_mesh if isinstance(grad, DTensor) else None
        if id(mesh) not in ranks_of:
            ranks_of[id(mesh)] = tuple(sorted(mesh.mesh.flatten().tolist())) if mesh is not None else ()
        ranks = ranks_of[id(mesh)]
        mesh_of.setdefault(ranks, mesh)
        locals_ = counted.setdefault(ranks, [])
        if _is_counted_here(grad):
            locals_.append(_local(grad))
    sums = []
    for ranks, locals_ in counted.items():
        local = _local_sum(locals_, norm_type, foreach, device)
        mesh = mesh_of[ranks]
        sums.append(local if mesh is None else _over_mesh(local, mesh, norm_type, caller))
    stacked = torch.stack(sums)
    total = stacked.amax() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)
    return total.to(torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32)


def _is_counted_here(grad: Tensor) -> bool:
    """Whether this rank counts its part: of the replicas of a part, the one at coordinate 0 does."""
    if not isinstance(grad, DTensor):
        return True
    coordinate = grad.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        index == 0 or not placement.is_replicate() for index, placement in zip(coordinate, grad.placements, strict=True)
    )


def _local_sum(locals_: list[Tensor], norm_type: float, foreach: bool | None, device: torch.device) -> Tensor:
    """The sum of powers (the maximum) of this rank's elements, in fp64: exact for what fp32 holds."""
    norms = []
    for kind in _by_kind(local for local in locals_ if local.numel()).values():
        if foreach is False:
            norms += [torch.linalg.vector_norm(local, norm_type, dtype=torch.float64) for local in kind]
        else:
            norms += torch._foreach_norm(kind, norm_type, dtype=torch.float64)
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=device)
    stacked = torch.stack([norm.to(device) for norm in norms])
    return stacked.amax() if math.isinf(norm_type) else (stacked**norm_type).sum()


def _over_mesh(local: Tensor, mesh: DeviceMesh, norm_type: float, caller: str) -> Tensor:
    """Reduced over every rank of the mesh, also over those that hold replicas: all get the same bits."""
    if mesh.size() == 1:
        return local
    if mesh.ndim > 1 and mesh.mesh_dim_names is None:
        raise ValueError(
            f"{caller}: the mesh {mesh} of a gradient has several axes without names; give init_device_mesh mesh_dim_names"
        )
    group = mesh.get_group(0) if mesh.ndim == 1 else _collectives.axes_group(mesh, mesh.mesh_dim_names or ())
    assert group is not None
    if not math.isinf(norm_type):
        _collectives.all_reduce(local, group, "sum").wait()
        return local
    # A maximum over ranks may drop nan, so its presence travels as a number.
    pair = torch.stack([local.nan_to_num(nan=0.0, posinf=math.inf), local.isnan().to(local.dtype)])
    _collectives.all_reduce(pair, group, "max").wait()
    return torch.where(pair[1] > 0, math.nan, pair[0])


def _by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad
