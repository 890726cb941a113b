"""One gradient norm for all parameters, whatever they are sharded over."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients of ``parameters`` to a global norm; ``torch.nn.utils.clip_grad_norm_`` for sharded ones.

    Each logical element counts once: shards are summed over the axes that they are split on, replicas counted on none
    but one. Parameters may be DTensors on several meshes and plain tensors (equal on every rank). All ranks call it.

    Args:
        parameters: as for PyTorch's function; those without a gradient are skipped.
        max_norm: the norm to scale down to.
        norm_type: p of the p-norm; ``inf`` for the maximum.
        error_if_nonfinite: raise when the norm is ``nan`` or ``inf``.
        foreach: use the multi-tensor kernels; ``None`` where they are available.

    Returns:
        The norm before clipping: a plain 0-D tensor, the same on every rank.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set.

    Example::

        norm = clip_grad_norm_(model.parameters(), 1.0)
    """
    tensors = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [tensor.grad for tensor in tensors if tensor.grad is not None]
    norm_type = float(norm_type)
    total = _total_norm(grads, norm_type, foreach)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise RuntimeError(
            f"the total norm of order {norm_type} is not finite ({total.item()}), so it cannot be clipped; set "
            "error_if_nonfinite=False to scale anyway"
        )
    # As in torch.nn.utils: clamped instead of compared, so that the host need not wait for the device.
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for local in map(_local, grads):
        local.mul_(scale.to(local.device, local.dtype) if local.dtype.itemsize > 2 else scale.to(local.device))
    return total


def _total_norm(grads: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    if not grads:
        return torch.tensor(0.0)
    device = _local(grads[0]).device
    parts: dict[tuple[DeviceMesh, tuple[int, ...]] | None, list[Tensor]] = {}
    for grad in grads:
        parts.setdefault(_split_axes(grad), []).append(_local(grad))
    powers = []
    for key, locals_ in parts.items():
        norm = torch.nn.utils.get_total_norm(
            [local.float() for local in locals_ if local.numel()], norm_type, foreach=foreach
        )
        power = norm.to(device, torch.float32)
        if not math.isinf(norm_type):
            power = power**norm_type
        if key is not None:
            mesh, axes = key
            for axis in axes:
                operation = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
                dist.all_reduce(power, operation, group=mesh.get_group(axis))
        powers.append(power)
    stacked = torch.stack(powers)
    return stacked.max() if math.isinf(norm_type) else stacked.sum() ** (1.0 / norm_type)


def _split_axes(grad: Tensor) -> tuple[DeviceMesh, tuple[int, ...]] | None:
    """The mesh axes that a gradient is split over; those it is replicated over would count it again."""
    if not isinstance(grad, DTensor):
        return None
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(f"clip_grad_norm_: a gradient is a partial sum ({grad.placements}); reduce it first")
    axes = tuple(
        axis
        for axis, placement in enumerate(grad.placements)
        if not placement.is_replicate() and grad.device_mesh.size(axis) > 1
    )
    return (grad.device_mesh, axes)


def _local(grad: Tensor) -> Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad
