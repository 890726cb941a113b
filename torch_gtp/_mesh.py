"""Meshes with the axes that ``gtp_shard`` expects."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from . import _collectives
from ._policy import GTP_AXIS, TP_AXIS


def build_mesh(device_type: str, *, tp: int = 1, num_weight_shards: int, world_size: int | None = None) -> DeviceMesh:
    """A mesh with axes ``("dp", "tp", "gtp_remat")`` over all ranks.

    Ranks of one ``gtp_remat`` group are neighbours, then those of ``tp``. On CUDA each axis gets an NCCL communicator
    on a high-priority stream, so that gathers are not queued behind GEMMs.

    Args:
        device_type: ``"cuda"``, ``"cpu"``, ...
        tp: ranks that a weight is split over for tensor parallelism.
        num_weight_shards: parts that a weight is stored in; ``gtp_remat = num_weight_shards / tp``.
        world_size: ranks of the mesh; ``None`` for all. The rest is ``dp = world_size / num_weight_shards``.

    Raises:
        TypeError, ValueError: a size is not a positive int or does not divide the next larger one.

    Example::

        mesh = build_mesh("cuda", tp=2, num_weight_shards=8)  # on 16 ranks: dp=2, tp=2, gtp_remat=4
    """
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else _world_size_to_be()
    for name, value in (("tp", tp), ("num_weight_shards", num_weight_shards), ("world_size", world_size)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"build_mesh({name}=...): expected an int, got {value!r}")
        if value < 1:
            raise ValueError(f"build_mesh({name}=...): expected at least 1, got {value}")
    if num_weight_shards < tp or num_weight_shards % tp:
        raise ValueError(
            f"build_mesh: num_weight_shards={num_weight_shards} must be a multiple of tp={tp}: each weight is split tp ways "
            "for compute and each of those parts over gtp_remat = num_weight_shards / tp ranks"
        )
    if world_size % num_weight_shards:
        raise ValueError(
            f"build_mesh: world_size={world_size} must be a multiple of num_weight_shards={num_weight_shards}; the quotient "
            "is the size of the dp axis"
        )
    options = _collectives.nccl_mesh_options(3) if device_type == "cuda" else {}
    return init_device_mesh(
        device_type,
        (world_size // num_weight_shards, tp, num_weight_shards // tp),
        mesh_dim_names=("dp", TP_AXIS, GTP_AXIS),
        **options,
    )


def _world_size_to_be() -> int:
    """The world size that ``init_device_mesh`` will start the default group with."""
    import os

    return int(os.environ.get("WORLD_SIZE", "1"))
