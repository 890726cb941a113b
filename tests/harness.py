"""Runs test functions on real process groups, with bounded time and an adversarial communicator.

    def body(rank, world, rows):                  # top level, so that the ranks can import it
        mesh = cached_mesh((2, 2), ("dp", "gtp_remat"))
        ...
        assert current_double().counts() == {"all_gather": 3, "reduce_scatter": 2}
        return loss.item()

    def test_body():
        assert run_ranks(body, 4, 10) == [...]    # one result per rank

`run_ranks` uses a pool of processes that lives as long as the session. `fake_world` needs no processes and no
data: it is for schedules and counts at any world size.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.comm_double import Collective, CommDouble, count, current_double

__all__ = [
    "CommDouble", "RankError", "RanksTimeout", "cached_mesh", "count", "current_double", "fake_world",
    "library_double", "run_ranks", "state_leaks",
]  # fmt: skip

_START_LIMIT = 150.0  # seconds for a pool to start; a fork takes 0.1, but the first one waits for imports
_GRACE = 1.0  # seconds that the other ranks get to report their own failure after the first one
_ROOT = Path(__file__).resolve().parent.parent


class RankError(Exception):
    """A rank raised: its number and traceback. `error` is the exception itself where it could be pickled."""

    def __init__(self, rank: int, world: int, summary: str, details: str, error: BaseException | None = None):
        super().__init__(f"rank {rank} of {world}: {summary}\n{details}")
        self.rank, self.error = rank, error


class RanksTimeout(AssertionError):
    """Some ranks did not finish in time. The text says which ones, and what each was doing."""


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60,
    double: bool = True,
    shuffle: bool = True,
    check_leaks: bool = True,
) -> list[Any]:
    """Call `fn(rank, world, *args)` on `world` processes that share a gloo process group.

    Args:
        fn: A function at the top level of an importable module.
        world: How many ranks. Pools are made lazily, one per world size, and reused until a call fails.
        args: Picklable arguments, the same for all ranks.
        timeout: Seconds until the pool is stopped and `RanksTimeout` says what each rank was doing.
        double: Replace the collectives of `torch_gtp` by the adversarial double.
        shuffle: Let the double complete transfers in random order; for programs that are the same on all
            ranks.
        check_leaks: Fail when a rank leaves something behind: a handle nobody waited for, saved-tensor hooks,
            ...

    Returns:
        What each rank returned, in rank order.

    Raises:
        RankError: A rank raised. Of several, the lowest one that is not just the victim of another's loss.
        RanksTimeout: A rank did not finish.
    """
    if "<" in fn.__qualname__:
        raise TypeError(
            f"run_ranks: {fn.__qualname__} is not at the top level of its module, so ranks cannot import it"
        )
    job = _Job(fn.__module__, fn.__qualname__, pickle.dumps(args), timeout, double, shuffle, check_leaks)
    return _POOLS.get(world).call(job)


@functools.cache
def cached_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """`init_device_mesh("cpu", shape, mesh_dim_names=names)`, once per process: groups are slow to make."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@contextlib.contextmanager
def fake_world(
    world_size: int, *, rank: int = 0, double: bool = True, check_leaks: bool = True
) -> Iterator[CommDouble]:
    """This process as one rank of a world without peers: collectives move no data, their log is complete.

    Yields the double (or, with `double=False`, nothing).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    cached_mesh.cache_clear()
    try:
        with library_double() if double else contextlib.nullcontext() as installed:
            yield installed
            leaks = state_leaks(installed) if check_leaks else []
        assert not leaks, "left behind: " + "; ".join(leaks)
    finally:
        cached_mesh.cache_clear()
        dist.destroy_process_group()


def library_double(**options: Any) -> CommDouble | contextlib.nullcontext[None]:
    """The double over the library's collectives; nothing while there is no library."""
    try:
        module = importlib.import_module("torch_gtp._collectives")
    except ModuleNotFoundError as error:
        if error.name not in ("torch_gtp", "torch_gtp._collectives"):
            raise
        return contextlib.nullcontext()
    return CommDouble(module, **options)


def state_leaks(double: CommDouble | None = None) -> list[str]:
    """What a finished test must not leave behind in its process."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    found = {
        "saved-tensor hooks are installed": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "gradients are disabled": not torch.is_grad_enabled(),
        "inference mode is on": torch.is_inference_mode_enabled(),
        "anomaly mode is on": torch.is_anomaly_enabled(),
        "autocast is on": torch.is_autocast_enabled("cpu"),
        f"dispatch modes are active: {modes}": bool(modes),
        f"the default dtype is {torch.get_default_dtype()}": torch.get_default_dtype() != torch.float32,
    }
    return [what for what, is_so in found.items() if is_so] + (double.problems() if double is not None else [])


# ---- the parent's side


@dataclass(frozen=True)
class _Job:
    module: str
    qualname: str
    args: bytes
    timeout: float
    double: bool
    shuffle: bool
    check_leaks: bool


@dataclass(frozen=True)
class _Done:
    result: bytes
    log: list[Collective]


@dataclass(frozen=True)
class _Failed:
    summary: str
    details: str
    is_victim: bool
    error: bytes | None


class _Pool:
    """`world` processes with a process group, each waiting for a `_Job` on its pipe."""

    def __init__(self, world: int):
        self.world = world
        self.scratch = Path(tempfile.mkdtemp(prefix="gtp-ranks-"))
        context = multiprocessing.get_context("forkserver")
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world, str(self.scratch))
            process = context.Process(target=_rank_main, args=arguments, name=f"rank{rank}of{world}", daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.is_alive = True
        self._collect(_START_LIMIT, "starting")

    def call(self, job: _Job) -> list[Any]:
        message = pickle.dumps(job)
        for pipe in self.pipes:
            pipe.send_bytes(message)
        replies = self._collect(job.timeout, job.qualname)
        disagreement = _disagreement([reply.log for reply in replies])
        if disagreement:
            self.stop()
            raise AssertionError(f"{job.qualname}: {disagreement}")
        return [pickle.loads(reply.result) for reply in replies]

    def _collect(self, timeout: float, what: str) -> list[_Done]:
        """One reply per rank. A failure, or the end of the time, stops the pool and is raised."""
        replies: dict[int, _Done | _Failed] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < self.world:
            waiting = {self.pipes[rank]: rank for rank in range(self.world) if rank not in replies}
            ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                replies[waiting[pipe]] = self._receive(waiting[pipe])
            if any(isinstance(reply, _Failed) for reply in replies.values()):
                deadline = min(deadline, time.monotonic() + _GRACE)
            if not ready:
                break
        failures = {rank: reply for rank, reply in sorted(replies.items()) if isinstance(reply, _Failed)}
        if failures:
            self.stop()
            rank = min(failures, key=lambda rank: (failures[rank].is_victim, rank))
            failure = failures[rank]
            error = pickle.loads(failure.error) if failure.error is not None else None
            raise RankError(rank, self.world, failure.summary, failure.details, error)
        if len(replies) < self.world:
            report = self._report(replies)
            self.stop()
            raise RanksTimeout(f"{what}: not finished after {timeout:g} s\n{report}")
        return [replies[rank] for rank in range(self.world)]

    def _receive(self, rank: int) -> _Done | _Failed:
        try:
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(1)
            code = self.processes[rank].exitcode
            stack = _without_harness_frames(self._read(f"stack.{rank}"))
            return _Failed(f"the process ended with exit code {code}", stack, False, None)

    def _report(self, replies: dict[int, Any]) -> str:
        """What every rank is doing now: its last collective and its stack."""
        for rank in range(self.world):
            if rank not in replies and self.processes[rank].is_alive():
                os.kill(self.processes[rank].pid, signal.SIGUSR1)  # faulthandler writes the stack, even inside of C
        time.sleep(0.5)
        lines = []
        for rank in range(self.world):
            last = self._read(f"last.{rank}").strip() or "none"
            if rank in replies:
                lines.append(f"rank {rank}: finished; last collective: {last}")
            else:
                stack = _without_harness_frames(self._read(f"stack.{rank}"))
                lines.append(f"rank {rank}: did not finish; last collective: {last}\n{stack}")
        return "\n".join(lines)

    def _read(self, name: str) -> str:
        path = self.scratch / name
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self) -> None:
        self.is_alive = False
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(5)
            pipe.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


class _Pools:
    """The session's pools, one per world size."""

    def __init__(self):
        self._pools: dict[int, _Pool] = {}

    def get(self, world: int) -> _Pool:
        pool = self._pools.get(world)
        if pool is None or not pool.is_alive:
            _start_fork_server()
            self._pools.pop(world, None)
            pool = self._pools[world] = _Pool(world)
        return pool

    def stop(self) -> None:
        for pool in self._pools.values():
            pool.stop()
        self._pools.clear()


def _start_fork_server() -> None:
    """Ranks are forked from a clean process: pytest's own has threads as soon as one test ran a backward."""
    path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": "",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.preload"])
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _without_harness_frames(stacks: str) -> str:
    """faulthandler's text, most recent call first, without the frames below the test function."""
    return re.sub(r"  File [^\n]*rank_worker\.py.*?(\n\n|\Z)", r"\n", stacks, flags=re.S)


def _disagreement(logs: Sequence[list[Collective]]) -> str | None:
    """Ranks of a group must issue the same collectives in one order, also where it did not hang by luck."""
    sequences: dict[tuple[int, ...], dict[int, list[Collective]]] = {}
    for rank, log in enumerate(logs):
        for call in log:
            sequences.setdefault(call.group, {member: [] for member in call.group})[rank].append(call)
    for group, by_rank in sequences.items():
        first, *others = group
        for other in others:
            mine, theirs = by_rank[first], by_rank[other]
            for index in range(max(len(mine), len(theirs))):
                left, right = (str(calls[index]) if index < len(calls) else "nothing" for calls in (mine, theirs))
                if left != right:
                    return (
                        f"ranks disagree about collective {index} of group {group}: "
                        f"rank {first} issued {left}, rank {other} issued {right}"
                    )
    return None


_POOLS = _Pools()
atexit.register(_POOLS.stop)


def _rank_main(pipe: connection.Connection, rank: int, world: int, scratch: str) -> None:
    from tests.rank_worker import serve

    serve(pipe, rank, world, Path(scratch))
