"""Generalized Tensor Parallelism for PyTorch: ``gtp_shard(module, mesh)``."""

from ._composable import gtp_shard
from ._init import materialize_meta
from ._mesh import build_mesh
from ._module import GTPModule
from ._policy import GTPPolicy, WeightPlan
from .clip import clip_grad_norm_, grad_norm

__all__ = [
    "GTPModule", "GTPPolicy", "WeightPlan", "build_mesh", "clip_grad_norm_", "grad_norm", "gtp_shard", "materialize_meta",
]  # fmt: skip
__version__ = "0.1.0"
