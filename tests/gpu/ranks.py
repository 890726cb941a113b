"""What the GPU tests run in: the ranks, parameters of tests, a runner without pytest.

Every rank runs the whole session. The ranks come from the environment (`RANK`, `WORLD_SIZE`, ...), as `torchrun` or
`tools/ranks_on_one_gpu.sh` set it; each uses `cuda:LOCAL_RANK`:

    make test-gpu RANKS=4
    tools/ranks_on_one_gpu.sh 4 python -m tests.gpu.run              # needs nothing but torch
    tools/ranks_on_one_gpu.sh 4 python -m pytest tests/gpu

A test that fails on one rank must fail on all of them, or the others would wait for it in the next test: `together`
sees to that. `TORCH_GTP_TEST_DEVICE=cpu` runs over gloo what has a meaning there.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import itertools
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TIME_LIMIT = 150  # seconds for one test on one rank; then every stack is printed and the process ends


class Skip(Exception):
    """This test has no meaning here; the text says why."""


def cases(**values: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`@cases(mesh=["gtp4", "dp2-gtp2"])`: a test for each value of one argument. Without pytest, like its own."""
    ((name, each),) = values.items()

    def attach(test: Callable[..., None]) -> Callable[..., None]:
        test.cases = (name, list(each))  # type: ignore[attr-defined]
        return test

    return attach


def missing() -> str | None:
    """Why the GPU tests cannot run here, if they cannot."""
    if device_type() == "cuda" and not torch.cuda.is_available():
        return "no GPU"
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return "needs ranks: start it with tools/ranks_on_one_gpu.sh or torchrun"
    return None


def device_type() -> str:
    return os.environ.get("TORCH_GTP_TEST_DEVICE", "cuda")


@functools.cache
def device() -> torch.device:
    """This rank's device. The first call joins the process group."""
    kind = device_type()
    timeout = datetime.timedelta(seconds=TIME_LIMIT)
    # fp32 results are compared with a tolerance that TF32 would exceed
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if kind == "cuda":
        found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(found)
        dist.init_process_group("nccl", timeout=timeout, device_id=found)
    else:
        torch.set_num_threads(1)
        found = torch.device("cpu")
        dist.init_process_group("gloo", timeout=timeout)
    dist.all_reduce(torch.zeros(1, device=found))
    return found


def is_cuda() -> bool:
    return device().type == "cuda"


def needs_cuda(why: str) -> None:
    if not is_cuda():
        raise Skip(f"{why} exist on a GPU only")


MESHES: dict[str, tuple[Callable[[int], tuple[int, ...]], tuple[str, ...]]] = {
    "gtp": (lambda world: (world,), ("gtp_remat",)),
    "dp-gtp": (lambda world: (2, world // 2), ("dp", "gtp_remat")),
    "tp-gtp": (lambda world: (2, world // 2), ("tp", "gtp_remat")),
}


@functools.cache
def mesh(name: str) -> DeviceMesh:
    """A mesh over all ranks, made once: communicators are slow to make and take memory."""
    start = device()
    sizes, names = MESHES[name]
    world = dist.get_world_size()
    if len(names) > 1 and (world < 4 or world % 2):
        raise Skip(f"{name} needs an even number of at least 4 ranks, this world has {world}")
    return init_device_mesh(start.type, sizes(world), mesh_dim_names=names)


def synchronize() -> None:
    if is_cuda():
        torch.cuda.synchronize()


def everyones(value: Any) -> list[Any]:
    """The value of every rank, in rank order."""
    device()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def together(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on every rank; if it fails on one, it fails on all, with what that one said."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        device()
        faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
        failure = skipped = None
        try:
            test(*args, **kwargs)
            synchronize()
        except Skip as reason:
            skipped = reason
        except Exception:
            failure = traceback.format_exc()
        # Through the store, not the network of the test: a rank that failed half-way left collectives unmatched.
        others = _exchange(failure)
        faulthandler.cancel_dump_traceback_later()
        failed = {rank: text for rank, text in others.items() if text}
        if failed:
            raise AssertionError("\n".join(f"rank {rank}:\n{text}" for rank, text in failed.items()))
        if skipped is not None:
            raise skipped

    return run


_SERIALS = itertools.count()  # of tests: every rank runs the same ones


def _exchange(failure: str | None) -> dict[int, str]:
    store = dist.distributed_c10d._get_default_store()
    rank, world, serial = dist.get_rank(), dist.get_world_size(), next(_SERIALS)
    store.set(f"torch_gtp_test/{serial}/{rank}", failure or "-")
    found = {other: store.get(f"torch_gtp_test/{serial}/{other}").decode() for other in range(world)}
    return {other: "" if text == "-" else text for other, text in found.items()}


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(
        a.shape == b.shape and torch.equal(bits(a), bits(b)) for a, b in zip(left, right, strict=True)
    )
