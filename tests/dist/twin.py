"""A sharded model beside its plain twin: running both, comparing them, watching events and memory.

@on_ranks(2)
def test_a_sentence_about_the_library(rank, world):         # runs on every rank
    check_twin(rank, world, CASES["mlp"].build, run)
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.harness import cached_mesh, run_ranks
from tests.models import CASES
from tests.reference import assert_matches, split_local

Build = Callable[[], nn.Module]
Run = Callable[[nn.Module, int], None]

# Sums over more than two ranks, and sums of several microbatches, are rounded in another order than the oracle's:
# a few units of fp32's 6e-8. Everywhere else the numbers are equal bit by bit, and the tolerance is zero.
REORDERED = 1e-6


def on_ranks(world: int, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function of `(rank, world, *parameters)` a test that runs on every rank of a pool."""

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def test(*args: Any, **parameters: Any) -> Any:
            if args:  # called by a rank
                return fn(*args)
            run_ranks(test, world, *parameters.values(), **options)
            return None

        del test.__wrapped__  # pytest would look for fixtures named rank and world
        test.__signature__ = inspect.Signature(list(inspect.signature(fn).parameters.values())[2:])  # type: ignore[attr-defined]
        return test

    return decorate


# ---- the sharded model


def gather_mesh() -> DeviceMesh:
    return cached_mesh((dist.get_world_size(),), ("gtp_remat",))


def hybrid_mesh() -> DeviceMesh:
    return cached_mesh((2, dist.get_world_size() // 2), ("dp", "gtp_remat"))


MESHES: Mapping[str, Callable[[], DeviceMesh]] = {"gtp": gather_mesh, "dp": hybrid_mesh}


def shard(model: nn.Module, mesh: DeviceMesh | None = None, *, plan: Any = None, **options: Any) -> Any:
    """`gtp_shard` with everything of two dims sharded, over all ranks unless a mesh is given."""
    from torch_gtp import GTPPolicy, gtp_shard

    policy = GTPPolicy(**{"min_shard_numel": 1, **options})
    return gtp_shard(model, mesh if mesh is not None else gather_mesh(), policy=policy, plan=plan)


def training_run(name: str) -> Run:
    """Forward and backward of a model of the table, on data that differs by coordinate."""
    case = CASES[name]

    def run(model: nn.Module, coordinate: int) -> None:
        case.loss(model, case.batch(2 * coordinate)).backward()

    return run


def use_the_general_path(model: nn.Module) -> None:
    """Let plain Linears compute as every other module does, instead of in one autograd node (`_linear.py`)."""
    from torch_gtp import _first_call

    root = model._gtp.root  # type: ignore[union-attr]
    _first_call.initialize(root)  # type: ignore[arg-type]
    for param in root.params:  # type: ignore[union-attr]
        param.is_plain_matrix = False


# ---- comparing


def plain_grads(build: Build, run: Run, coordinates: int, reduction: str = "mean") -> dict[str, Tensor]:
    """The gradients that `run(model, coordinate)` leaves on the plain model, averaged (or added) over coordinates."""
    parts = []
    for coordinate in range(coordinates):
        model = build()
        run(model, coordinate)
        parts.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    return reduce_parts(parts, reduction)


def reduce_parts(parts: list[dict[str, Tensor]], reduction: str = "mean") -> dict[str, Tensor]:
    scale = 1 / len(parts) if reduction == "mean" else 1.0
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _tree_sum([part[name] for part in parts if name in part]) * scale for name in names}


def _tree_sum(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    half = (len(parts) + 1) // 2
    return _tree_sum(parts[:half]) + _tree_sum(parts[half:])


def local_part(stored: DTensor, full: Tensor) -> Tensor:
    """What this rank holds of a full tensor that is laid out as `stored`."""
    coordinate = stored.device_mesh.get_coordinate()
    assert coordinate is not None
    return split_local(full, tuple(stored.device_mesh.shape), stored.placements, coordinate)


def assert_local(
    actual: Mapping[str, Any], expected: Mapping[str, Tensor], rtol: float = 0.0, what: str = "values"
) -> None:
    """DTensors (or plain replicas) against full tensors, each rank its own part. Zero tolerance: equal numbers."""
    mine, theirs = dict(actual), dict(expected)
    for name, tensor in actual.items():
        if isinstance(tensor, DTensor):
            mine[name] = tensor._local_tensor
            if name in expected:
                theirs[name] = local_part(tensor, expected[name])
    assert_matches(mine, theirs, rtol, what)


def assert_grads(model: nn.Module, expected: Mapping[str, Tensor], rtol: float = 0.0, what: str = "gradients") -> None:
    assert_local({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, expected, rtol, what)


def check_twin(
    rank: int,
    world: int,
    build: Build,
    run: Run,
    *,
    mesh: DeviceMesh | None = None,
    rtol: float = 0.0,
    repeats: int = 3,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> Any:
    """`run` leaves the plain model's gradients on the sharded one, every time: with and without recorded orders."""

    def build_prepared() -> nn.Module:
        model = build()
        prepare(model)
        return model

    expected = plain_grads(build_prepared, run, world, options.get("reduction", "mean"))
    model = shard(build_prepared(), mesh, **options)
    for repeat in range(repeats):
        run(model, rank)
        assert_grads(model, expected, rtol, f"gradients of run {repeat}")
        model.zero_grad()
    return model


# ---- watching


def graph_nodes(root: Tensor) -> list[Any]:
    """Every autograd node that a backward from `root` would run."""
    found: dict[Any, None] = {}
    stack: list[Any] = [root.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in found:
            found[node] = None
            stack.extend(following for following, _ in node.next_functions)
    return list(found)


_VERBS = {
    "issue_gather": "gather",
    "wait_gather": "wait",
    "issue_reduce": "launch",
    "land_gradient": "land",
    "wait_reduction": "land bucket of",
}


@contextlib.contextmanager
def events() -> Iterator[list[str]]:
    """The verbs of the runtime as they happen: "gather 0.weight", "wait 0.weight", "launch ...", "land ...".

    The collective of a bucket is "reduce N", N elements; its wait is "land bucket of" its first parameter.
    """
    from torch_gtp import _collectives, _runtime

    log: list[str] = []

    def watched(original: Callable[..., Any], describe: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            log.append(describe(*args))
            return original(*args, **kwargs)

        return call

    def name_of(*args: Any) -> str:
        for arg in (item for given in args for item in (given if isinstance(given, list) else [given])):
            owner = arg if hasattr(arg, "fqn") else getattr(arg, "param", None)
            if hasattr(owner, "fqn"):
                return owner.fqn
        raise AssertionError(f"no parameter in {args}")

    with contextlib.ExitStack() as stack:
        for function, verb in _VERBS.items():
            original = getattr(_runtime, function)
            describe = functools.partial(lambda verb, *args: f"{verb} {name_of(*args)}", verb)
            stack.callback(setattr, _runtime, function, original)
            setattr(_runtime, function, watched(original, describe))
        stack.callback(setattr, _collectives, "all_reduce", _collectives.all_reduce)
        _collectives.all_reduce = watched(_collectives.all_reduce, lambda tensor, *_: f"reduce {tensor.numel()}")
        yield log


class GatherMeter:
    """Which buffers of gathered weights are alive, and the most that ever were."""

    def __init__(self) -> None:
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self.peak_count = self.peak_bytes = self.allocations = 0

    def add(self, buffer: Tensor) -> None:
        storage = buffer.untyped_storage()
        self._alive.append((StorageWeakRef(storage), storage.nbytes()))
        self.allocations += 1
        self.peak_count = max(self.peak_count, self.live_count)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    @property
    def live_count(self) -> int:
        self._alive = [entry for entry in self._alive if not entry[0].expired()]
        return len(self._alive)

    @property
    def live_bytes(self) -> int:
        return sum(nbytes for reference, nbytes in self._alive if not reference.expired())

    def reset_peak(self) -> None:
        self.peak_count, self.peak_bytes = self.live_count, self.live_bytes


@contextlib.contextmanager
def gather_meter() -> Iterator[GatherMeter]:
    """Watch every buffer that the library gathers into."""
    from torch_gtp import _buffers

    meter, original = GatherMeter(), _buffers.allocate

    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        buffer = original(*args, **kwargs)
        meter.add(buffer)
        return buffer

    _buffers.allocate = allocate
    try:
        yield meter
    finally:
        _buffers.allocate = original


def settled_tensors() -> int:
    """Tensors that are alive; the fewest of several looks, since threads of gloo let go of theirs a moment later."""
    counts = []
    for _ in range(5):
        counts.append(sum(isinstance(thing, Tensor) for thing in gc.get_objects()))
        time.sleep(0.02)
    return min(counts)


def library_objects() -> dict[str, int]:
    """Live objects of the library that belong to a model, a pass or a graph, by type."""
    found = Counter(type(thing).__name__ for thing in gc.get_objects() if _is_of_library(type(thing)))
    return dict(found)


def _is_of_library(kind: type) -> bool:
    module = getattr(kind, "__module__", "")
    return module in ("torch_gtp._state", "torch_gtp._replicate", "torch_gtp._autograd", "torch_gtp._chain")


# ---- models


def seeded(build: Build, seed: int = 0) -> Build:
    """`build` with its own random state, so that it makes the same model every time and on every rank."""

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()

    return make


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Boom(Exception):
    pass


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise Boom


class Fragile(nn.Module):
    """Three blocks with a place to fail between any two layers; `fail` names it, as "forward 1" or "backward 0"."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(4))
        self.fail = ""

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.fail == f"forward {index}":
                raise Boom
            if self.fail == f"backward {index}":
                x = RaisesInBackward.apply(x)
        return x


def run_fragile(model, coordinate):
    model(randn(4, 7, seed=coordinate)).square().sum().backward()
