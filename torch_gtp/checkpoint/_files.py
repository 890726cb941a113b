"""What ranks do together about files: agree on errors, and let a folder appear as a whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


def world() -> tuple[int, int]:
    """This rank and the number of ranks; ``(0, 1)`` in a process without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def everyone(mine: T) -> list[T]:
    """What each rank gave, in rank order."""
    if world()[1] == 1:
        return [mine]
    parts: list[Any] = [None] * world()[1]
    dist.all_gather_object(parts, mine)
    return parts


def agreed(function: Callable[[], T]) -> T:
    """``function()``; an error of any rank is raised on every rank, so that none goes on alone."""
    result, error = None, None
    try:
        result = function()
    except Exception as raised:
        error = raised
    failures = everyone(f"{error}" if error is not None else None)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise ValueError(f"on rank {rank}: {failure}")
    return cast(T, result)


def on_first_rank(function: Callable[[], None]) -> None:
    """``function()`` on rank 0 alone; the others wait for it, and raise if it raises."""
    agreed(function if world()[0] == 0 else lambda: None)


@contextlib.contextmanager
def whole_folder(folder: Path, where: str, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes ``folder`` when all ranks have left the block without an error.

    Until then nothing changes under the final name: a process that dies leaves ``.NAME.partial`` beside it, which the
    next attempt removes. What ``overwrite`` replaces is ``.NAME.replaced`` for the moment between two renames.
    """
    partial, replaced = folder.with_name(f".{folder.name}.partial"), _replaced(folder)

    def prepare() -> None:
        if replaced.exists():  # an attempt that died: before its second rename, or after it
            shutil.rmtree(replaced) if folder.exists() else os.replace(replaced, folder)
        if folder.exists() and not overwrite and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"{where}({str(folder)!r}): it exists and is not empty; choose a new folder")
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)

    def publish() -> None:
        if folder.exists():
            os.replace(folder, replaced)
        os.replace(partial, folder)
        parent = os.open(folder.parent, os.O_RDONLY)
        try:
            os.fsync(parent)  # the name outlives a power failure, as the files do
        finally:
            os.close(parent)
        if replaced.exists():
            shutil.rmtree(replaced)

    on_first_rank(prepare)
    yield partial
    on_first_rank(publish)


def _replaced(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.replaced")


def standing(folder: Path) -> Path:
    """Where the contents of ``folder`` are, also after a death between the two renames that replace it."""
    return _replaced(folder) if not folder.exists() and _replaced(folder).exists() else folder


def checked_folder(folder: Any, where: str) -> Path:
    """``folder`` as an absolute path."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"{where}(folder=...): expected a path, got {type(folder).__name__}")
    return Path(folder).absolute()
