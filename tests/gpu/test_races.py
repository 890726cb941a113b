"""Every edge between streams is there: late collectives, slow GEMMs and reused memory change no bit. See `delays.py`.

The mutations show that these programs would notice: each takes one edge away, and some bit must change.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.gpu.delays import LATE, Delays, SideLinear, SlowLinear, on_device
from tests.gpu.ranks import cases, device, everyones, mesh, needs_cuda, same_bits, synchronize, together
from torch_gtp import GTPPolicy, _buffers, _replicate, _runtime, gtp_shard

STEPS = 3
# Longer than the host takes to come to the reader
VERY_LATE_GATHERS = Delays(gather=True, cycles=20 * LATE)
VERY_LATE_REDUCTIONS = Delays(reduce=True, cycles=20 * LATE)
ROWS = 64


def chain(kind: Callable[..., nn.Module], *sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        layers += [kind(fan_in, fan_out), nn.Tanh()]
    return nn.Sequential(*layers)


class OneAside(nn.Module):
    """Every second layer computes on another stream, reading its weight there or here."""

    def __init__(self, weight_from_side: bool, aside: bool):
        super().__init__()
        sizes = [256] * 6
        self.layers = nn.ModuleList(
            SideLinear(a, b, weight_from_side=weight_from_side, aside=aside) if i % 2 else SlowLinear(a, b)
            for i, (a, b) in enumerate(itertools.pairwise(sizes))
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and the width of the input
    "same-shapes": (lambda: chain(SlowLinear, 256, 256, 256, 256, 256), 256),
    "linear": (lambda: chain(nn.Linear, 256, 512, 256, 256), 256),
    "padded": (lambda: chain(SlowLinear, 253, 391, 250), 253),
}
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "far-ahead": {"lookahead_bytes": 1 << 30},
    "cast": {"mp": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "kept": {"reshard_after_forward": False},
    "one-call-each": {"coalesce_bytes": 0},
}
DELAYS = {
    "nothing": Delays(),
    "gathers": Delays(gather=True),
    "reductions": Delays(reduce=True),
    "gemms": Delays(compute=True),
    "optimizer": Delays(optimizer=True),
    "everything": Delays(gather=True, reduce=True, compute=True, optimizer=True),
}


def train(
    build: Callable[[], nn.Module], width: int, policy: dict[str, Any], delays: Delays | None = None, on: str = "gtp"
) -> list[Tensor]:
    """Losses, gradients and parameters. Nothing waits for the GPU before the end."""
    where = mesh(on)
    model = gtp_shard(on_device(build), where, policy=GTPPolicy(min_shard_numel=4096, **policy))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=True)
    generator = torch.Generator().manual_seed(sum(c << i for i, c in enumerate(where.get_coordinate() or ())))
    batches = [torch.randn(ROWS, width, generator=generator).to(device()) for _ in range(STEPS)]
    seen: list[Tensor] = []
    with delays.installed() if delays is not None else contextlib.nullcontext():
        for x in batches:
            loss = model(x).float().square().mean()
            loss.backward()
            seen.append(loss.detach().clone())
            seen.extend(param.grad.to_local().clone() for param in model.parameters())
            if delays is not None:
                delays.before_optimizer()
            optimizer.step()
            optimizer.zero_grad()
        seen.extend(param.to_local().clone() for param in model.parameters())
        synchronize()
    return [tensor.cpu() for tensor in seen]


def unlike(calm: list[Tensor], disturbed: list[Tensor]) -> str:
    worse = [i for i, (a, b) in enumerate(zip(calm, disturbed, strict=True)) if not torch.equal(a, b)]
    nans = sum(bool(tensor.isnan().any()) for tensor in disturbed)
    return f"{len(worse)} of {len(calm)} tensors differ, first {worse[:5]}; {nans} hold NaN"


@cases(program=[f"{model}/{policy}/gtp" for model in MODELS for policy in POLICIES] + ["linear/default/dp-gtp"])
@together
def test_nothing_late_changes_a_bit(program):
    model, policy, on = program.split("/")
    calm = train(*MODELS[model], POLICIES[policy], on=on)
    assert not any(tensor.isnan().any() for tensor in calm)
    again = train(*MODELS[model], POLICIES[policy], on=on)
    assert same_bits(calm, again), f"undisturbed runs are not reproducible: {unlike(calm, again)}"
    for name, delays in DELAYS.items():
        found = train(*MODELS[model], POLICIES[policy], delays, on)
        assert same_bits(calm, found), f"late {name}: {unlike(calm, found)}"


@cases(delays=list(DELAYS))
@together
def test_a_step_on_a_side_stream_has_the_same_bits(delays):
    needs_cuda("streams")
    calm = train(*MODELS["same-shapes"], {})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = train(*MODELS["same-shapes"], {}, DELAYS[delays])
    assert same_bits(calm, found), unlike(calm, found)


@cases(reads=["weight-from-side", "weight-from-here"])
@together
def test_layers_that_compute_on_another_stream_have_the_same_bits(reads):
    """A gathered weight is then allocated on one stream and read on another: its memory may not go too early."""
    needs_cuda("streams")

    def build(aside: bool) -> nn.Module:
        return OneAside(reads == "weight-from-side", aside)

    calm = train(lambda: build(aside=False), 256, {})
    for name, delays in DELAYS.items():
        found = train(lambda: build(aside=True), 256, {}, delays)
        assert same_bits(calm, found), f"late {name}: {unlike(calm, found)}"


# ---- mutations


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


def without_wait(*kinds: str) -> Any:
    def wait(original: Any, handle: Any, param: Any, what: str) -> None:
        if not any(kind in what for kind in kinds):
            original(handle, param, what)

    return patched(_runtime, "_wait", wait)


def reduce_input_reused() -> Any:
    def issue_reduce(original: Any, use: Any, *args: Any, **kwargs: Any) -> None:
        original(use, *args, **kwargs)
        next(reversed(use.root.reducing)).source.data.fill_(float("nan"))

    return patched(_runtime, "issue_reduce", issue_reduce)


def bucket_reused() -> Any:
    def launch(original: Any, use: Any, local: Any) -> Any:
        flights = original(use, local)
        for flight in flights:
            flight.buffer.data.fill_(1.0)
        return flights

    return patched(_replicate, "_launch", launch)


def one_buffer_per_shape() -> Any:
    buffers: dict[Any, Tensor] = {}

    def allocate(original: Any, shape: Any, dtype: Any, where: Any) -> Tensor:
        if (shape, dtype) not in buffers:
            buffers[shape, dtype] = original(shape, dtype, where)
        return buffers[shape, dtype].data

    return patched(_buffers, "allocate", allocate)


MUTATIONS: dict[str, tuple[Callable[[], Any], Delays]] = {
    "a forward does not wait for its gather": (
        lambda: without_wait("forward gather"),
        VERY_LATE_GATHERS,
    ),
    "a backward does not wait for its gather": (
        lambda: without_wait("backward gather"),
        VERY_LATE_GATHERS,
    ),
    # One communicator runs one after the other: a wait for the last of them is a wait for all, so none may be left.
    "gradients do not wait for their reductions": (
        lambda: without_wait("gradient reduction", "replicate axes"),
        VERY_LATE_REDUCTIONS,
    ),
    "a reduction's input is reused at once": (reduce_input_reused, Delays(reduce=True)),
    "a bucket is reused at once": (bucket_reused, Delays(reduce=True)),
    "a buffer is recycled while it is read": (one_buffer_per_shape, Delays(compute=True)),
    "a gather does not wait for the optimizer": (
        contextlib.nullcontext,
        Delays(optimizer=True, overtaking_gathers=True),
    ),
    "a reduction does not wait for its GEMM": (
        contextlib.nullcontext,
        Delays(compute=True, overtaking_reductions=True),
    ),
}


@cases(mutation=list(MUTATIONS))
@together
def test_removing_an_edge_changes_bits(mutation):
    needs_cuda("streams")
    mutate, delays = MUTATIONS[mutation]
    # nn.Linear may take a path of its own through the library; it has no slow GEMMs.
    for model in ["same-shapes"] if delays.compute else ["same-shapes", "linear"]:
        calm = train(*MODELS[model], POLICIES["one-call-each"])
        # The edge alone makes the difference: with it, the same delays change nothing.
        whole = replace(delays, overtaking_gathers=False, overtaking_reductions=False)
        found = train(*MODELS[model], POLICIES["one-call-each"], whole)
        assert same_bits(calm, found), f"{model}, not mutated: {unlike(calm, found)}"
        with mutate():
            try:
                noticed = not same_bits(calm, train(*MODELS[model], POLICIES["one-call-each"], delays))
            except (RuntimeError, ValueError, KeyError, AssertionError):
                noticed = True  # the library's own checks came first
            synchronize()
        # A rank may be lucky: its own shard is always there.
        assert any(everyones(noticed)), f"{model}: nothing was noticed"
