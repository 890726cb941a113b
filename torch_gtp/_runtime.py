"""The verbs: the only code that moves a gather or a reduction from one state to the next."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from . import _buffers, _collectives
from ._chain import Direction
from ._state import (
    GatherState,
    Held,
    Landing,
    ParamState,
    ReduceQueue,
    ReduceState,
    RootState,
    Use,
    local_shard,
    version_of,
)

_REDUCE_CODE, _END_CODE = 3, 4
_CODE_NAMES = ("forward gather", "backward gather", "recompute gather", "gradient reduction", "end of pass")


def issue_gather(root: RootState, param: ParamState, direction: Direction, stored: Tensor) -> None:
    """Start gathering the shards of ``stored`` for ``direction``: SHARDED -> GATHERING."""
    assert param.gathers is not None and param.group is not None
    buffer, source = _prepare_gather(root, param, direction, stored)
    gather = param.gathers[direction]
    with param.gather_label:
        gather.handle = _collectives.all_gather(buffer, source, param.group)
    gather.move(GatherState.GATHERING)
    gather.buffer, gather.source, gather.stored = buffer, source, stored
    root.in_flight[direction][param.index] = param


def issue_gathers(root: RootState, wanted: list[tuple[ParamState, Tensor]], direction: Direction) -> None:
    """``issue_gather`` for several weights and what is stored of each, in as few calls as there are groups and dtypes."""
    if len(wanted) == 1:
        issue_gather(root, wanted[0][0], direction, wanted[0][1])
        return
    batches: dict[tuple[object, torch.dtype], list[tuple[ParamState, Tensor, Tensor, Tensor]]] = {}
    for param, stored in wanted:
        buffer, source = _prepare_gather(root, param, direction, stored)
        batches.setdefault((param.group, buffer.dtype), []).append((param, stored, buffer, source))
    for batch in batches.values():
        first = batch[0][0]
        assert first.group is not None
        with first.gather_label:
            handles = _collectives.all_gather_batch(
                [item[2] for item in batch], [item[3] for item in batch], first.group
            )
        for (param, stored, buffer, source), handle in zip(batch, handles, strict=True):
            assert param.gathers is not None
            gather = param.gathers[direction]
            gather.move(GatherState.GATHERING)
            gather.buffer, gather.source, gather.stored, gather.handle = buffer, source, stored, handle
            root.in_flight[direction][param.index] = param


def _prepare_gather(root: RootState, param: ParamState, direction: Direction, stored: Tensor) -> tuple[Tensor, Tensor]:
    """The buffer that a gather will write, and what this rank sends."""
    assert param.gathers is not None
    gather = param.gathers[direction]
    shard = local_shard(stored)
    if root.check:
        compare_ranks(param, direction)
    if gather.state is not GatherState.SHARDED:
        gather.move(GatherState.GATHERING)  # raises; the move itself waits until nothing can fail any more
    dtype = param.compute_dtype or param.param.dtype
    buffer = _buffers.allocate(param.layout.gathered_shape, dtype, shard.device)
    if shard is param.sendable and shard.dtype == dtype:
        return buffer, shard
    return buffer, _source_of_gather(param, shard, buffer)


def _source_of_gather(param: ParamState, shard: Tensor, buffer: Tensor) -> Tensor:
    """What this rank sends: the shard itself where nothing has to be cast or padded."""
    layout = param.layout
    if shard.is_meta:
        raise ValueError(
            f"{param.fqn}: forward on a parameter that is still on the meta device; initialise it first, for "
            "example with torch_gtp.materialize_meta(model, seed)"
        )
    if shard.dtype == buffer.dtype and shard.shape == layout.chunk_shape and shard.is_contiguous():
        param.sendable = shard
        return shard
    # The cast and the pad write this rank's own slot of the result, which the gather then need not copy.
    source = layout.own_chunk(buffer)
    layout.shard_from_chunk(source).copy_(shard)
    return source


def wait_gather(root: RootState, param: ParamState, direction: Direction) -> Tensor:
    """Make the gathered weight readable on the current stream: GATHERING -> READY. Returns the full TP slice."""
    assert param.gathers is not None
    gather = param.gathers[direction]
    assert gather.buffer is not None
    # Closes the read-before-write hazard between the gather and the GEMM.
    _wait(gather.handle, param, _CODE_NAMES[direction])
    gather.move(GatherState.READY)
    gather.handle = gather.source = None
    del root.in_flight[direction][param.index]
    return param.layout.full_from_chunks(gather.buffer)


def release(param: ParamState, direction: Direction) -> Tensor | None:
    """Let go of a gathered weight: READY -> SHARDED. Returns the buffer for whoever wants to keep it."""
    assert param.gathers is not None
    gather = param.gathers[direction]
    if gather.state is not GatherState.READY:
        raise RuntimeError(f"{param.fqn}: gather state {gather.state.name} -> SHARDED is not allowed by a release")
    gather.move(GatherState.SHARDED)
    buffer, gather.buffer, gather.stored = gather.buffer, None, None
    return buffer


def release_backward(root: RootState, param: ParamState) -> None:
    """The gradient of a use is there, so its backward has read the weight for the last time."""
    running = root.passes.get(torch._C._current_graph_task_id())
    if running is not None and running.cached.pop(param.index, None) is not None:
        release_if_ready(param, Direction.BACKWARD)
    if param.held is not None and not param.held.explicit and root.is_last_backward:
        drop_held(root, param)


def release_if_ready(param: ParamState, direction: Direction) -> None:
    assert param.gathers is not None
    if param.gathers[direction].state is GatherState.READY:
        release(param, direction)


def drain(root: RootState, direction: Direction) -> None:
    """Give up every gather of a direction that was issued and never used.

    Nothing gathered may survive the end of a pass: an optimizer changes shards without a trace in their version.
    """
    for param in list(root.in_flight[direction].values()):
        give_up(root, param, direction)


def give_up(root: RootState, param: ParamState, direction: Direction) -> None:
    """Drop a gather in flight: GATHERING -> SHARDED."""
    assert param.gathers is not None
    gather = param.gathers[direction]
    # The collective still writes the buffer: it may not be freed before.
    _wait(gather.handle, param, _CODE_NAMES[direction])
    gather.move(GatherState.SHARDED)
    gather.buffer = gather.source = gather.handle = gather.stored = None
    del root.in_flight[direction][param.index]


def hold(root: RootState, param: ParamState, buffer: Tensor, stored: Tensor, *, explicit: bool) -> None:
    """Keep a gathered buffer of ``stored`` beyond its pass."""
    # Detached: a buffer that was handed out is the output of an autograd node, and would keep its graph alive.
    param.held = Held(buffer.detach(), stored, version_of(stored), explicit)
    root.keepers[param.index] = param


def held_full(root: RootState, param: ParamState, stored: Tensor) -> Tensor | None:
    """The kept full weight of ``stored``, unless its shard was replaced or written since."""
    held = param.held
    if held is None:
        return None
    if stored is held.stored and version_of(stored) == held.version:
        return param.layout.full_from_chunks(held.buffer)
    drop_held(root, param)
    return None


def drop_held(root: RootState, param: ParamState) -> None:
    param.held = None
    root.keepers.pop(param.index, None)
    if root.tail is param:
        root.tail = None


def drop_all_held(root: RootState, *, explicit: bool) -> None:
    """Forget kept weights: at the next forward, before an optimizer step (``explicit`` ones too), at a load."""
    for param in list(root.keepers.values()):
        if explicit or (param.held is not None and not param.held.explicit):
            drop_held(root, param)


def issue_reduce(use: Use, chunks: Tensor) -> None:
    """Start reduce-scattering a full weight gradient, laid out by ``chunks_from_full``. It is only read.

    A small one may wait for its neighbours: until they are enough for one call, or one of them is to land.
    """
    root, param = use.root, use.param
    assert param.group is not None
    if root.check:
        compare_ranks(param, _REDUCE_CODE)
    landing = Landing(param, chunks.new_empty(param.layout.chunk_shape), chunks)
    use.launched().append(landing)
    root.reducing[landing] = param
    if param.full_bytes <= root.coalesce and param.policy.async_reduction:
        key = (param.group, param.policy.reduce_op, chunks.dtype)
        queue = root.queues.get(key)
        if queue is None:
            queue = root.queues[key] = ReduceQueue()
        landing.queue = queue
        queue.landings.append(landing)
        queue.nbytes += param.full_bytes
        if queue.nbytes >= root.coalesce:
            launch_queue(queue)
        return
    with param.reduce_label:
        landing.handle = _collectives.reduce_scatter(landing.out, chunks, param.group, param.policy.reduce_op)
    landing.move(ReduceState.LAUNCHED)
    if not param.policy.async_reduction:
        _wait(landing.handle, param, _CODE_NAMES[_REDUCE_CODE])


def launch_queue(queue: ReduceQueue) -> None:
    """Start the reductions of a queue in one call: QUEUED -> LAUNCHED."""
    landings, queue.landings, queue.nbytes = queue.landings, [], 0
    first = landings[0].param
    assert first.group is not None
    outputs, sources = [landing.out for landing in landings], [landing.source for landing in landings]
    with first.reduce_label:
        handles = _collectives.reduce_scatter_batch(
            outputs, cast("list[Tensor]", sources), first.group, first.policy.reduce_op
        )
    for landing, handle in zip(landings, handles, strict=True):
        landing.handle, landing.queue = handle, None
        landing.move(ReduceState.LAUNCHED)


def land_gradient(use: Use) -> Tensor | None:
    """The shard's reduced gradient: LAUNCHED -> LANDED. ``None`` if the use received no gradient."""
    total: Tensor | None = None
    for landing in use.landings.pop(torch._C._current_graph_task_id(), ()):
        if isinstance(landing, Tensor):
            shard = landing
        else:
            if landing.queue is not None:
                launch_queue(landing.queue)
            # Closes two hazards: reading the output before it is written, and freeing the input while it is read.
            _wait(landing.handle, use.param, _CODE_NAMES[_REDUCE_CODE])
            landing.move(ReduceState.LANDED)
            use.root.reducing.pop(landing, None)
            landing.source = landing.handle = None
            shard = use.param.layout.shard_from_chunk(landing.out)
        # One, but for a second derivative: there a weight's gradient comes from its use and from its use's backward.
        total = shard if total is None else total + shard
    return total


def wait_reduction(handle: _collectives.Handle, params: list[ParamState]) -> None:
    """Wait for a bucket's collective."""
    _wait(handle, params[0], "reduction over the replicate axes of the bucket")


def abandon_reductions(root: RootState) -> None:
    """After a failed backward: reductions whose gradient nobody will take. Their tensors are read until they end."""
    while root.reducing:
        reduction, param = root.reducing.popitem()
        if reduction.handle is not None:
            _wait(reduction.handle, param, _CODE_NAMES[_REDUCE_CODE])
        reduction.handle = reduction.source = None
    root.queues.clear()


def compare_ranks(param: ParamState | None, code: int, *, group_of: ParamState | None = None) -> None:
    """``policy.check``: raise on every rank when the ranks of a gather group are about to do different things."""
    owner = param if param is not None else group_of
    assert owner is not None and owner.group is not None
    if param is None:
        mine = [code, -1, 0, 0]
    else:
        dtype = param.wire_dtype if code < _REDUCE_CODE else param.reduce_dtype
        mine = [code, param.index, param.layout.gathered_numel, _dtype_code(dtype)]
    theirs = _collectives.exchange_ints(mine, owner.group, owner.shard().device)
    if all(other == mine for other in theirs):
        return
    root_params = _names_by_index(owner)
    lines = [
        f"gtp_remat rank {rank}: {_CODE_NAMES[kind]}" + (f" of {root_params.get(index, index)}" if index >= 0 else "")
        for rank, (kind, index, _, _) in enumerate(theirs)
    ]
    raise RuntimeError(
        "ranks of one gtp_remat group do different things; every rank must use the same weights in the same order:\n  "
        + "\n  ".join(lines)
    )


def check_end_of_pass(root: RootState) -> None:
    """``policy.check``: a rank that leaves the pass early meets the others' next gather here."""
    if root.check:
        seen: list[object] = []
        for param in root.sharded():
            if all(param.group is not group for group in seen):
                seen.append(param.group)
                compare_ranks(None, _END_CODE, group_of=param)


def _wait(handle: _collectives.Handle | None, param: ParamState, what: str) -> None:
    assert handle is not None
    try:
        handle.wait()
    except RuntimeError as error:
        raise RuntimeError(
            f"torch_gtp: the {what} of {param.fqn} did not complete; a rank may have used another weight, or none "
            f"(GTPPolicy(check=True) finds out which): {error}"
        ) from error


def _dtype_code(dtype: torch.dtype) -> int:
    return sum(ord(letter) << (8 * (i % 7)) for i, letter in enumerate(str(dtype)))


def _names_by_index(owner: ParamState) -> dict[int, str]:
    for reference in owner.owners:
        module = reference.module()
        if module is not None and "_gtp" in module.__dict__:
            return {param.index: param.fqn for param in module.__dict__["_gtp"].root.params}
    return {}
