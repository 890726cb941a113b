"""Orthogonalisation of one whole matrix, and what it costs."""

from __future__ import annotations

import torch
from torch import Tensor


def orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly: all singular values are pulled towards one.

    The quintic Newton-Schulz iteration of Keller Jordan's Muon (https://kellerjordan.github.io/posts/muon/), operation by
    operation as in ``torch.optim.Muon``, but in the dtype of ``matrix`` where PyTorch's is bfloat16 always.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=eps)  # the spectral norm is at most the Frobenius norm
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def flops(rows: int, columns: int, steps: int) -> int:
    """Floating-point operations of ``orthogonalize``: three products per step, on the smaller side's Gram matrix."""
    small, large = min(rows, columns), max(rows, columns)
    return 2 * steps * small * small * (2 * large + small)
