"""Every ordering edge is guarded by a check: with the edge patched away, the check fails.

A mutation removes one edge in the ranks. Beside it stand a scenario that needs the edge, and what the suite must then
report: a violation that the communication double sees, or wrong numbers. Unmutated, every scenario reports nothing.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.dist import edge_scenarios as needs
from tests.dist.lockstep import findings
from tests.harness import current_double, run_ranks, state_leaks

# ---- patching


@contextlib.contextmanager
def patched(owner: Any, name: str, replacement: Callable[..., Any]):
    """`replacement(original, *args, **kwargs)` in place of `owner.name`."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


def library(module: str) -> Any:
    import importlib

    return importlib.import_module(f"torch_gtp.{module}")


def without(module: str, name: str, result: Any = None):
    """A function of the library that does nothing."""
    return patched(library(module), name, lambda original, *args, **kwargs: result)


def skip_wait(*kinds: str):
    """No wait for collectives whose description has one of these words."""

    def wait(original, handle, param, what):
        if not any(kind in what for kind in kinds):
            original(handle, param, what)

    return patched(library("_runtime"), "_wait", wait)


# ---- mutations


def wait_forward():
    return skip_wait("forward gather")


def wait_backward():
    return skip_wait("backward gather")


def wait_recompute():
    return skip_wait("recompute gather")


def wait_reduction():
    return skip_wait("gradient reduction")


def wait_bucket():
    return skip_wait("replicate axes")


def land_before_launch():
    """A landing that comes first finds no reduction yet."""

    def land(original, use):
        return torch.zeros(use.param.layout.shard_shape)

    return patched(library("_runtime"), "land_gradient", land)


def reduce_input_reused():
    def issue_reduce(original, use, grad):
        original(use, grad)
        use.launched()[-1].source.zero_()

    return patched(library("_runtime"), "issue_reduce", issue_reduce)


def reduce_output_recycled():
    """The shard's gradient lands in memory that the next weight of that shape takes too."""
    scratch: dict[torch.Size, torch.Tensor] = {}

    def land(original, use):
        shard = original(use)
        return scratch.setdefault(shard.shape, torch.empty_like(shard)).copy_(shard)

    return patched(library("_runtime"), "land_gradient", land)


def bucket_reused():
    def launch(original, use, local):
        flights = original(use, local)
        for flight in flights:
            flight.buffer.zero_()
        return flights

    return patched(library("_replicate"), "_launch", launch)


def late_packing():
    """The GEMM, the cast, or the copy into padded chunks writes the collective's input after it was issued."""

    def issue_reduce(original, use, chunks):
        value = chunks.clone()
        chunks.zero_()
        original(use, chunks)
        chunks.copy_(value)

    return patched(library("_runtime"), "issue_reduce", issue_reduce)


def late_cast():
    """The cast shard reaches its slot of the gathered buffer after the gather was issued."""
    runtime, collectives = library("_runtime"), library("_collectives")
    late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def source_of_gather(original, param, shard, buffer):
        source = original(param, shard, buffer)
        if source is not shard:
            late.append((source, source.clone()))
            source.zero_()
        return source

    def all_gather(original, output, source, group):
        handle = original(output, source, group)
        while late:
            target, value = late.pop()
            target.copy_(value)
        return handle

    stack = contextlib.ExitStack()
    stack.enter_context(patched(runtime, "_source_of_gather", source_of_gather))
    stack.enter_context(patched(collectives, "all_gather", all_gather))
    return stack


@contextlib.contextmanager
def patched_method(owner: type, name: str, replacement: Callable[..., Any]):
    original = getattr(owner, name)
    setattr(owner, name, lambda self, *args: replacement(original, self, *args))
    try:
        yield
    finally:
        setattr(owner, name, original)


def no_drain(direction: str):
    def drain(original, root, which):
        if which.name != direction:
            original(root, which)

    return lambda: patched(library("_runtime"), "drain", drain)


def drain_without_wait():
    """A gather that nobody needs is dropped while it still writes its buffer."""

    def give_up(original, root, param, direction):
        gather = param.gathers[direction]
        gather.move(type(gather.state)(0))
        gather.buffer = gather.source = gather.handle = gather.stored = None
        del root.in_flight[direction][param.index]

    return patched(library("_runtime"), "give_up", give_up)


def step_unnoticed():
    return without("_freshness", "before_optimizer_step")


def write_unnoticed():
    return patched(library("_runtime"), "version_of", lambda original, stored: 0)


def load_unnoticed():
    stack = contextlib.ExitStack()
    stack.enter_context(without("_freshness", "forget_held"))
    stack.enter_context(write_unnoticed())
    return stack


def kept_by_the_next_forward():
    return without("_runtime", "drop_all_held")


def no_take():
    return without("_replicate", "_take_unsynced")


def no_flush():
    return without("_replicate", "flush_unsynced")


def one_buffer_per_shape():
    """A buffer is recycled while somebody still reads it."""
    buffers: dict[Any, torch.Tensor] = {}

    def allocate(original, shape, dtype, device):
        key = (shape, dtype)
        if key not in buffers:
            buffers[key] = original(shape, dtype, device)
        return buffers[key].detach()

    return patched(library("_buffers"), "allocate", allocate)


def directions_share_a_gather():
    state = library("_state")

    def rename(original, param, fqn):
        original(param, fqn)
        if param.gathers is not None:
            param.gathers = (param.gathers[0],) * 3

    return patched_method(state.ParamState, "rename", rename)


def deferred_across_units():
    """A landing is made ahead for the next weight whatever outer FSDP unit it belongs to."""

    def prepare(original, root, session, param):
        units = [other.unit for other in root.params]
        for other in root.params:
            other.unit = None
        try:
            original(root, session, param)
        finally:
            for other, unit in zip(root.params, units, strict=True):
                other.unit = unit

    return patched(library("_hooks"), "_prepare_landings", prepare)


# ---- the table

NEVER_WAITED = r"dropped without wait|never waited for"
WRONG_NUMBERS = r"relative error above|not close|missing \["
INPUT_CHANGED = r"its input was modified while in flight"
OUTPUT_CHANGED = r"its output was written while in flight"
BUFFER_SHARED = rf"{OUTPUT_CHANGED}|{WRONG_NUMBERS}|written in place inside forward"


@dataclass(frozen=True)
class Edge:
    """`remove` patches the edge away; `scenario` needs it; one of `evidence` must then be found on every rank."""

    remove: Callable[[], Any]
    scenario: Callable[[int, int], None]
    evidence: str
    world: int = 2


EDGES = {
    "a forward reads a weight after its gather": Edge(wait_forward, needs.training, NEVER_WAITED),
    "a backward reads a weight after its gather": Edge(wait_backward, needs.training, NEVER_WAITED),
    "a recomputation reads a weight after its gather": Edge(wait_recompute, needs.recomputing, NEVER_WAITED),
    "a gradient lands after its reduction": Edge(wait_reduction, needs.training, NEVER_WAITED),
    "no landing is deferred across an outer unit": Edge(
        deferred_across_units, needs.training_in_units_that_stay_open, WRONG_NUMBERS, 4
    ),
    "a gradient lands after its launch": Edge(land_before_launch, needs.training, WRONG_NUMBERS),
    "a synchronous reduction is waited for": Edge(wait_reduction, needs.training_synchronous, NEVER_WAITED),
    "a bucket takes gradients that landed": Edge(wait_reduction, needs.training_hybrid, NEVER_WAITED, 4),
    "a bucket lands after its reduction": Edge(wait_bucket, needs.training, NEVER_WAITED),
    "a bucket in flight is not reused": Edge(bucket_reused, needs.training, OUTPUT_CHANGED),
    "a reduction's input in flight is not reused": Edge(reduce_input_reused, needs.training, INPUT_CHANGED),
    "a landed gradient is not recycled": Edge(reduce_output_recycled, needs.training_same_shapes, WRONG_NUMBERS),
    "a gradient is packed before its reduction": Edge(late_packing, needs.training_padded, INPUT_CHANGED),
    "a shard is cast before its gather": Edge(late_cast, needs.casting, OUTPUT_CHANGED),
    "nothing foreseen survives a forward": Edge(no_drain("FORWARD"), needs.branching, INPUT_CHANGED),
    "nothing foreseen survives a backward": Edge(no_drain("BACKWARD"), needs.partial_backward, INPUT_CHANGED),
    "a gather given up is waited for": Edge(drain_without_wait, needs.branching, NEVER_WAITED),
    "no kept weight survives an optimizer step": Edge(step_unnoticed, needs.kept, WRONG_NUMBERS),
    "no kept weight survives a write": Edge(write_unnoticed, needs.kept_and_written, WRONG_NUMBERS),
    "no kept weight survives a load": Edge(load_unnoticed, needs.kept_and_loaded, WRONG_NUMBERS),
    "no weight kept for a backward survives the next forward": Edge(
        kept_by_the_next_forward, needs.forward_without_backward, WRONG_NUMBERS
    ),
    "a change between forward and backward is noticed": Edge(
        step_unnoticed, needs.changed_between, "wrong weights went through"
    ),
    "an unsynchronised gradient is taken along": Edge(no_take, needs.accumulating, WRONG_NUMBERS),
    "an unsynchronised gradient out of reach is flushed": Edge(
        no_flush, needs.accumulating_with_a_branch, WRONG_NUMBERS
    ),
    "a buffer in use is not recycled": Edge(one_buffer_per_shape, needs.training_same_shapes, BUFFER_SHARED),
    "a weight that was stashed is not overwritten": Edge(one_buffer_per_shape, needs.stashed, BUFFER_SHARED),
    "directions have gathers of their own": Edge(
        directions_share_a_gather, needs.recomputing, "KeyError|gather state|AssertionError"
    ),
}


def report(rank, world, name, mutate):
    edge = EDGES[name]
    with edge.remove() if mutate else contextlib.nullcontext():
        found = findings(lambda: edge.scenario(rank, world))
    assert not (leaks := state_leaks()), leaks
    current_double().errors.clear()
    return found


def reports(name, *, mutate):
    return run_ranks(report, EDGES[name].world, name, mutate, check_leaks=False)


@pytest.mark.parametrize("name", EDGES)
def test_removing_an_edge_is_noticed(name):
    for found in reports(name, mutate=True):
        assert any(re.search(EDGES[name].evidence, finding) for finding in found), found or "nothing was noticed"


@pytest.mark.parametrize("name", EDGES)
def test_nothing_is_noticed_while_the_edge_is_there(name):
    assert reports(name, mutate=False) == [[]] * EDGES[name].world
