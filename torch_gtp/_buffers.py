"""Where gathered weights live: allocation, and the lease that says who may still read one.

There is no free list here. A gathered buffer is an ordinary tensor: it returns to PyTorch's allocator when its
last user lets go, be that the library, a module that stashed its weight, or a view in somebody's output. On a GPU
the allocator hands the memory out again in the order of the compute stream, and a gather waits for that stream
when it is issued, so a GEMM that still reads a released buffer is never overtaken by the next gather into it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def allocate(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised buffer for one gathered weight."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):  # a kept weight may serve training later
            return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device)
