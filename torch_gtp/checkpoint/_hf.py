"""``load_hf`` and ``export_hf``: safetensors folders of Hugging Face, read and written slice by slice."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._module import GTPModule
from ._files import agreed, checked_folder, everyone, on_first_rank, whole_folder, world
from ._safetensors import FileWriter, bytes_of, dtype_name, open_file

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_BLOCK_BYTES = 64 * 2**20  # of a tensor, read at once


class _Entry(NamedTuple):
    """A tensor of a model, with every name that it has."""

    tensor: Tensor
    names: list[str]


class _Chunk(NamedTuple):
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


# ---- reading


@torch.no_grad()
def load_hf(model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True) -> None:
    """Fill a model with the weights of a Hugging Face folder; each rank reads the slices that it stores.

    Reads ``model.safetensors``, or the files that ``model.safetensors.index.json`` names. No rank holds a full weight, nor
    more than 64 MiB of one beside the model. Values are converted to the dtypes of the model. Names in the files are those
    of ``model.state_dict()``; a tied weight may have any of its names, so ``lm_head.weight`` may be absent. No
    communication. Names, shapes and files are checked before the first value is changed.

    Args:
        model: after ``gtp_shard`` and, on the meta device, ``materialize_meta``; or any other module.
        folder: as written by ``save_pretrained`` or ``export_hf``.
        strict: ``False`` loads what both have.

    Raises:
        ImportError: ``safetensors`` is not installed.
        ValueError: a file is absent or damaged, a name is missing or too many, a shape differs.

    Example::

        gtp_shard(model, mesh)
        torch_gtp.checkpoint.load_hf(model, "models/llama-3-8b")
    """
    path = checked_folder(folder, "load_hf")
    where = f"load_hf({str(path)!r})"
    entries = _entries(model, where)
    with contextlib.ExitStack() as stack:
        file_of: dict[str, Any] = {}
        for name in _files_in(path, where):
            file = stack.enter_context(open_file(path / name, where))
            file_of.update(dict.fromkeys(file.keys(), file))
        _check_names(entries, file_of, path, where, strict)
        sources = []
        for tensor, names in entries:
            # Where a tied weight was saved under several names the last one counts, as in load_state_dict.
            found = [name for name in names if name in file_of]
            if found:
                source = file_of[found[-1]].get_slice(found[-1])
                _check_shape(found[-1], tensor, source.get_shape(), where)
                sources.append((tensor, source))
        for module in model.modules():
            if isinstance(module, GTPModule):
                module.reshard()  # weights kept by unshard() are not what is read now
        for tensor, source in sources:
            _read(tensor, source)


def _entries(model: nn.Module, where: str) -> list[_Entry]:
    """Parameters and persistent buffers; tied ones once."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{where}: expected an nn.Module, got {type(model).__name__}")
    found: dict[int, _Entry] = {}
    for key, tensor in model.state_dict(keep_vars=True).items():
        name = key.replace("_orig_mod.", "")
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{where}: {name} is a {type(tensor).__name__}; safetensors has tensors only")
        if tensor.is_meta:
            raise ValueError(f"{where}: {name} is on the meta device; call materialize_meta before")
        found.setdefault(id(tensor), _Entry(tensor, [])).names.append(name)
    return list(found.values())


def _files_in(path: Path, where: str) -> list[str]:
    index = path / _INDEX
    if not index.is_file():
        if not (path / _WEIGHTS).is_file():
            raise ValueError(f"{where}: neither {_WEIGHTS} nor {_INDEX} is there; save with safe_serialization")
        return [_WEIGHTS]
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {_INDEX} is damaged ({type(error).__name__}: {error})") from error
    absent = [name for name in files if not (path / name).is_file()]
    if absent:
        raise ValueError(f"{where}: {_INDEX} names {absent}, which are not there; copy them")
    return files


def _check_names(entries: list[_Entry], file_of: dict[str, Any], path: Path, where: str, strict: bool) -> None:
    known = {name for entry in entries for name in entry.names}
    missing = [entry.names[0] for entry in entries if not any(name in file_of for name in entry.names)]
    unexpected = sorted(file_of.keys() - known)
    if strict and (missing or unexpected):
        raise ValueError(
            f"{where}: the files lack {missing[:6]} ({len(missing)} in all) and have {unexpected[:6]} ({len(unexpected)} in "
            "all), which the model lacks; load into the class that was saved, or pass strict=False to load the others"
        )
    if not known & file_of.keys():
        raise ValueError(f"{where}: no name in it is one of the model's, such as {sorted(known)[:3]}")


def _check_shape(name: str, tensor: Tensor, shape: list[int], where: str) -> None:
    if tuple(shape) != tuple(tensor.shape):
        raise ValueError(
            f"{where}: {name} has shape {tuple(shape)} in the file and {tuple(tensor.shape)} in the model; build the model from "
            "the folder's config"
        )


def _read(tensor: Tensor, source: Any) -> None:
    """This rank's part of a tensor, in blocks of rows."""
    local = _local(tensor)
    for chunk in _chunks(tensor):
        slices = chunk.slices
        if not slices or not chunk.sizes[0]:
            local.copy_(source[slices])
            continue
        rows = max(1, _BLOCK_BYTES * chunk.sizes[0] // max(1, local.numel() * 8))  # no dtype has more than 8 bytes
        first = chunk.offsets[0]
        for row in range(0, chunk.sizes[0], rows):
            end = min(row + rows, chunk.sizes[0])
            local[row:end].copy_(source[(slice(first + row, first + end), *slices[1:])])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _chunks(tensor: Tensor) -> list[_Chunk]:
    """The box of a tensor that this rank stores: none, or one."""
    if not isinstance(tensor, DTensor):
        return [_Chunk((0,) * tensor.ndim, tuple(tensor.shape))]
    if tensor.device_mesh.get_coordinate() is None:
        return []
    chunks = [_Chunk(tuple(c.offsets), tuple(c.sizes)) for c in tensor.__create_chunk_list__()]
    return [chunk for chunk in chunks if all(chunk.sizes)]


# ---- writing


@torch.no_grad()
def export_hf(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int = 5 * 10**9,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a folder that ``from_pretrained`` of transformers loads. All ranks call it.

    One file, or several with an index; files are written by different ranks at the same time. A rank sends its slices
    to the writer of their file and holds at most one full weight, in main memory. A tied weight is written once. If
    the model has a ``config`` (and a ``generation_config``), it is written too. Like a checkpoint, the folder gets its
    name when it is whole, and the model is left as it is.

    Args:
        model: after ``gtp_shard``, or any other module.
        folder: a new folder, on a file system that all ranks see.
        max_shard_size: bytes of tensors in one file; a larger tensor has a file of its own.
        dtype: of the floating-point tensors in the files; ``None``: as they are stored.

    Raises:
        ValueError: the folder exists and is not empty; an entry is no tensor, or of a dtype that safetensors has not.
        OSError: writing failed, on any rank.

    Example::

        torch_gtp.checkpoint.export_hf(model, "export", dtype=torch.bfloat16)
        AutoModelForCausalLM.from_pretrained("export")
    """
    path = checked_folder(folder, "export_hf")
    where = f"export_hf({str(path)!r})"
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int):
        raise TypeError(f"export_hf(max_shard_size=...): expected a number of bytes, got {max_shard_size!r}")
    if max_shard_size < 1:
        raise ValueError(f"export_hf(max_shard_size=...): expected at least 1 byte, got {max_shard_size}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"export_hf(dtype=...): expected a floating-point dtype, got {dtype!r}")
    entries = _entries(model, where)
    files = _split(entries, max_shard_size, dtype)
    places = everyone([_chunks(entry.tensor) for entry in entries])
    with whole_folder(path, "export_hf") as partial:
        mine = {
            number: FileWriter(
                partial / _file_name(number, len(files)),
                {entries[i].names[0]: (entries[i].tensor.shape, _dtype(entries[i].tensor, dtype)) for i in members},
            )
            for number, members in enumerate(files)
            if number % world()[1] == world()[0]
        }
        for number, index in _turns(files):
            chunks = _senders([chunks[index] for chunks in places], number % world()[1])
            full = _collect(entries[index].tensor, chunks, number % world()[1], dtype)
            if full is not None:
                mine[number].append(full)
        agreed(lambda: _close(mine.values()))
        on_first_rank(lambda: _write_description(model, partial, entries, files, dtype))


def _close(writers: Iterable[FileWriter]) -> None:
    for writer in writers:
        writer.close()


def _dtype(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _file_name(number: int, count: int) -> str:
    return _WEIGHTS if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _split(entries: list[_Entry], limit: int, dtype: torch.dtype | None) -> list[list[int]]:
    """Indices of the entries of each file, in order."""
    files: list[list[int]] = [[]]
    size = 0
    for index, (tensor, names) in enumerate(entries):
        dtype_name(names[0], _dtype(tensor, dtype))  # an error comes before any file
        nbytes = tensor.numel() * _dtype(tensor, dtype).itemsize
        if files[-1] and size + nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(index)
        size += nbytes
    return files


def _turns(files: list[list[int]]) -> Iterator[tuple[int, int]]:
    """``(file, entry)`` in an order in which as many ranks write at a time as there are."""
    ranks = world()[1]
    for start in range(0, len(files), ranks):
        wave = range(start, min(start + ranks, len(files)))
        for position in range(max(len(files[number]) for number in wave)):
            yield from ((number, files[number][position]) for number in wave if position < len(files[number]))


def _senders(places: list[list[_Chunk]], writer: int) -> dict[_Chunk, int]:
    """One rank that has it, for each chunk of a tensor: the writer where it can be."""
    owners: dict[_Chunk, list[int]] = {}
    for rank, chunks in enumerate(places):
        for chunk in chunks:
            owners.setdefault(chunk, []).append(rank)
    return {chunk: writer if writer in ranks else ranks[0] for chunk, ranks in owners.items()}


def _collect(tensor: Tensor, chunks: dict[_Chunk, int], writer: int, dtype: torch.dtype | None) -> Tensor | None:
    """The full tensor on the writer; the others send what they are asked for."""
    rank, local = world()[0], _local(tensor)
    dtype = _dtype(tensor, dtype)
    full = torch.empty(tensor.shape, dtype=dtype) if rank == writer else None
    for chunk, sender in chunks.items():
        if full is None:
            if rank == sender:
                dist.send(bytes_of(local.to(dtype).contiguous()), writer)
        elif rank == sender:
            full[chunk.slices].copy_(local)
        else:
            full[chunk.slices].copy_(_received(chunk, dtype, local.device, sender))
    return full


def _received(chunk: _Chunk, dtype: torch.dtype, device: torch.device, sender: int) -> Tensor:
    piece = torch.empty(chunk.sizes, dtype=dtype, device=device)
    dist.recv(bytes_of(piece), sender)
    return piece


def _write_description(
    model: nn.Module, folder: Path, entries: list[_Entry], files: list[list[int]], dtype: torch.dtype | None
) -> None:
    if len(files) > 1:
        total = sum(entry.tensor.numel() * _dtype(entry.tensor, dtype).itemsize for entry in entries)
        weight_map = {
            entries[index].names[0]: _file_name(number, len(files))
            for number, members in enumerate(files)
            for index in members
        }
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "save_pretrained"):
        return
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    config.dtype = str(_dtype(next(e.tensor for e in entries if e.tensor.is_floating_point()), dtype)).partition(".")[2]
    config.save_pretrained(folder)
    generation: Any = getattr(model, "generation_config", None)
    if hasattr(generation, "save_pretrained"):
        generation.save_pretrained(folder)
