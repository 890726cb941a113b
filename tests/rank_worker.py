"""What a rank of the pool runs: see `harness.py`."""

from __future__ import annotations

import ast
import contextlib
import ctypes
import datetime
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import re
import signal
import sys
import traceback
from importlib.machinery import PathFinder, SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import _Done, _Failed, _Job, library_double, state_leaks

_LOST_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|socket|remote end|gloo.*(peer|timeout)",
    re.I,
)
_PR_SET_PDEATHSIG = 1


def serve(pipe: Connection, rank: int, world: int, scratch: Path) -> None:
    """Answer jobs until the parent closes the pipe."""
    _die_with_parent()
    stacks = (scratch / f"stack.{rank}").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    sys.meta_path.insert(0, _RewritingFinder())
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(scratch / "store"), world),
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(minutes=10),  # longer than any job: the parent decides when time is up
        )
        reply: _Done | _Failed = _Done(pickle.dumps(None), [])
    except Exception as error:
        reply = _failure(error)
    gc.freeze()  # what was inherited never becomes garbage: collections after a job stay cheap
    with _Trace(scratch / f"last.{rank}") as trace, contextlib.suppress(EOFError, OSError):
        while True:
            pipe.send_bytes(pickle.dumps(reply))
            job: _Job = pickle.loads(pipe.recv_bytes())
            # A rank that outlives the parent's patience ends by itself
            faulthandler.dump_traceback_later(job.timeout + 30, exit=True, file=stacks)
            reply = _run(job, rank, world, trace)
            faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # skip destructors: peers may be gone already


def _run(job: _Job, rank: int, world: int, trace: _Trace) -> _Done | _Failed:
    random.seed(0)
    torch.manual_seed(0)
    trace.clear()
    try:
        fn: Any = importlib.import_module(job.module)
        for name in job.qualname.split("."):
            fn = getattr(fn, name)
        with (
            library_double(shuffle=job.shuffle, trace=trace.write) if job.double else contextlib.nullcontext() as double
        ):
            result = pickle.dumps(fn(rank, world, *pickle.loads(job.args)))
            gc.collect()
            leaks = state_leaks(double) if job.check_leaks else []
        assert not leaks, "left behind: " + "; ".join(leaks)
        return _Done(result, double.log if double is not None else [])
    except BaseException as error:
        return _failure(error)


def _failure(error: BaseException) -> _Failed:
    summary = f"{type(error).__name__}: {error}"
    own = error.__traceback__
    frames = own.tb_next if own is not None and own.tb_next is not None else own  # the first one is `_run`
    details = "".join(traceback.format_exception(type(error), error, frames))
    is_victim = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)) is not None
    try:
        pickled = pickle.dumps(error.with_traceback(None))
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return _Failed(summary, details, is_victim, pickled)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the parent died before the line above
        os._exit(1)


class _Trace:
    """A file with the last collective that this rank issued: readable from outside while the rank hangs."""

    def __init__(self, path: Path):
        self._file = path.open("wb", buffering=0)

    def write(self, line: str) -> None:
        os.pwrite(self._file.fileno(), line.ljust(300)[:300].encode(), 0)

    def clear(self) -> None:
        self._file.truncate(0)

    def __enter__(self) -> _Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class _RewritingFinder:
    """Gives asserts in test modules the messages that pytest gives them in its own process."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "tests":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _RewritingLoader(name, spec.origin)
        return spec


class _RewritingLoader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:  # no cache: its files would be mistaken for unrewritten ones
        from _pytest.assertion.rewrite import rewrite_asserts

        source = self.get_data(self.path)
        tree = ast.parse(source, filename=self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)
