"""The safetensors format: opening a file for slices, writing one tensor after another."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

_DTYPE_NAMES = MappingProxyType(
    {
        torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
        torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL", torch.uint16: "U16",
        torch.uint32: "U32", torch.uint64: "U64",
    }
)  # fmt: skip


def open_file(path: Path, where: str) -> Any:
    """A context manager: the file with ``keys()`` and ``get_slice(name)``, checked to be whole."""
    if importlib.util.find_spec("safetensors") is None:
        raise ImportError(f"{where}: needs the package safetensors; pip install safetensors")
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{where}: {path.name} cannot be read ({error}); copy it again") from error


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor as bytes, 1-D, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The format's name of a dtype."""
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"{name}: safetensors has no dtype for {dtype}; convert the parameter, or pass dtype=...")
    return _DTYPE_NAMES[dtype]


class FileWriter:
    """A new file of tensors that are appended in the order of ``entries``, so that one is in memory at a time.

    The first error is kept and nothing is written after it: who feeds several writers on several ranks goes on to the
    end, and asks then.
    """

    def __init__(self, path: Path, entries: Mapping[str, tuple[torch.Size, torch.dtype]]):
        self.error: OSError | None = None
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        position = 0
        for name, (shape, dtype) in entries.items():
            end = position + shape.numel() * dtype.itemsize
            header[name] = {"dtype": dtype_name(name, dtype), "shape": list(shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
        try:
            self._file = path.open("wb")
            self._file.write(struct.pack("<Q", len(text)) + text)
        except OSError as error:
            self.error = error

    def append(self, tensor: Tensor) -> None:
        """The next tensor: contiguous, in main memory, of the shape and dtype announced."""
        if self.error is not None or not tensor.numel():
            return
        memory = (ctypes.c_char * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
        try:
            self._file.write(memory)
        except OSError as error:
            self.error = error

    def close(self) -> None:
        """Make the file durable; raises the first error."""
        if self.error is not None:
            raise self.error
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
