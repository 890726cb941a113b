"""When things run. One turn of a weight, in each direction, reads from top to bottom like the schedule::

forward, turn of weight i          backward, first look at weight i
  gather i (if nobody foresaw it)    gather i (if nobody foresaw it)
  gather i+1, i+2, ... (budget)      gather i-1, i-2, ... (budget)
  LandGradient of i+1                wait for gather i
  wait for gather i                  GEMMs of i
  UseWeight of i, GEMM of i          reduce i (UseWeight), land i+1 (LandGradient)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from . import _runtime
from ._autograd import PackedWeight, SavedTensorHooks, land_gradient_node, use_weight_node
from ._chain import Direction
from ._dtensor_layout import make_dtensor
from ._first_call import initialize
from ._replicate import open_bucket, replicated_use, replicated_value, tensor_parallel_spec
from ._state import BackwardPass, Frame, GatherState, ModuleState, ParamState, RootState, Session, Use

_SELECTIVE_MODES = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)

# ---- frames: one per open module call


def open_frame(state: ModuleState) -> Frame:
    """A wrapped module is entered. The outermost call begins a session."""
    root = state.root
    if not root.frames:
        _begin_session(root)
    frame = Frame(state)
    root.frames.append(frame)
    if state.saves_weights and torch.is_grad_enabled():
        assert root.hooks is not None
        frame.hooked = root.hooks.push()
    return frame


def close_frame(frame: Frame, *, failed: bool) -> None:
    """A wrapped module is left: the weights that this call gathered are let go."""
    root = frame.module.root
    if frame.hooked:
        assert root.hooks is not None
        root.hooks.pop()
    closed = root.frames.pop()
    assert closed is frame, "module calls of one root must nest"
    written = [use.param for use in frame.uses if use.full is not None and use.full._version != use.version]
    for use in frame.uses:
        _let_go(root, use, failed=failed)
    if not root.frames:
        _end_session(root, failed=failed)
    if written and not failed:
        raise ValueError(
            f"{written[0].fqn}: written in place inside forward, which changes the gathered copy and not the shard; write to "
            "the parameter outside of forward, or inside gathered()"
        )


def _begin_session(root: RootState) -> None:
    if not root.initialized:
        initialize(root)
    # A failed backward left its caches; a finished forward may have left weights for a backward that never came.
    if torch._C._current_graph_task_id() == -1:
        direction = Direction.FORWARD
        abandon_backwards(root)
        _runtime.drop_all_held(root, explicit=False)
    else:
        direction = Direction.RECOMPUTE
    root.session = Session(root.chains, direction)


def _end_session(root: RootState, *, failed: bool) -> None:
    session = root.session
    assert session is not None
    root.session = None
    session.close()
    while root.visited:
        root.visited.pop().end_visit()
    # Nothing gathered survives the pass: the optimizer may rewrite the shards next.
    _runtime.drain(root, session.walk.direction)
    # Checkpointing ends a recomputation by an exception, as soon as it has what it needs.
    if not failed or session.walk.direction is Direction.RECOMPUTE:
        session.walk.finish()
        _runtime.check_end_of_pass(root)


# ---- forward


def read_parameter(state: ModuleState, param: ParamState, stored: Any) -> Any:
    """The value of a parameter attribute: materialized inside a call of the model, as stored outside."""
    root = state.root
    plain = False
    if stored is not param.param:
        if not isinstance(stored, DTensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(stored) or not _is_local_shard(stored, param):
                return _foreign_tensor(root, param, stored)
            plain = True
        elif param.layout.matches(stored):
            param.adopt(stored)
        else:
            return _foreign_dtensor(root, param, stored)
    if root.frames:
        if torch._C._len_torch_dispatch_stack() and _selective_checkpointing():
            # It counts operators, and a recomputation gathers, casts and pads at other places than the forward did.
            with _disable_current_modes():
                return _use(root, param, root.frames[-1], state, plain=plain)
        return _use(root, param, root.frames[-1], state, plain=plain)
    if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
        # A checkpointed function is recomputed, outside the call of the module that ran it.
        frame = open_frame(state)
        try:
            return read_parameter(state, param, stored)
        finally:
            close_frame(frame, failed=True)
    return stored


def _selective_checkpointing() -> bool:
    return any(isinstance(mode, _SELECTIVE_MODES) for mode in _get_current_dispatch_mode_stack())


def _foreign_tensor(root: RootState, param: ParamState, stored: Any) -> Any:
    """Somebody put a plain tensor in the parameter's place (functional_call, gathered()): it is taken as it is."""
    if param.gathered is not None and root.frames and param.compute_dtype is not None:
        return stored.to(param.compute_dtype)  # inside gathered(), a call computes what it computes outside
    return stored


def _foreign_dtensor(root: RootState, param: ParamState, stored: DTensor) -> Any:
    """A DTensor of another layout stands in the parameter's place."""
    if param.gathered is not None:  # the full value of a tensor-parallel weight
        return _foreign_tensor(root, param, stored)
    if root.frames and param.unit is None:
        raise ValueError(
            f"{param.fqn}: the parameter was replaced by a DTensor of another layout: got {stored.placements} of shape "
            f"{tuple(stored.shape)} on {stored.device_mesh}, expected {param.layout.spec.placements} of shape "
            f"{tuple(param.layout.shape)} on {param.layout.mesh}; assign one with the same layout, or shard again"
        )
    return stored  # outside a call; or an outer FSDP unit has it, and is closed


def _is_local_shard(stored: Any, param: ParamState) -> bool:
    local = param.param._local_tensor  # type: ignore[attr-defined]
    return (
        isinstance(stored, Tensor)
        and stored.shape == local.shape
        and stored.untyped_storage()._cdata == local.untyped_storage()._cdata
    )


def _use(root: RootState, param: ParamState, frame: Frame, reader: ModuleState, *, plain: bool) -> Tensor:
    # Under functorch transforms a weight is a constant: its gradient would need rules for every transform.
    transformed = torch._C._are_functorch_transforms_active()
    attach = torch.is_grad_enabled() and param.param.requires_grad and not transformed
    if not param.is_sharded:
        value = _replicated(root, param, attach=attach)
    else:
        use = param.use
        if use is not None and use.stored is not param.param:
            raise RuntimeError(
                f"{param.fqn}: the parameter was swapped for another (functional_call?) while a call that had gathered the first "
                "is still open; swap it outside that call"
            )
        if use is None:
            if frame.module is not reader:
                _learn_reader(frame, reader)
            if transformed:
                with temporarily_clear_interpreter_stack():  # collectives take plain tensors only
                    use = take_turn(root, param, frame, attach=False)
            else:
                use = take_turn(root, param, frame, attach=attach)
        if attach and use.attached is None:
            use.attached = _attach(root, use)
        if attach:
            assert use.attached is not None
            value = use.attached
        else:
            assert use.full is not None
            value = use.full.detach() if use.attached is not None else use.full
            if not plain and param.layout.tp_spec is not None:
                value = make_dtensor(value, tensor_parallel_spec(param, value.dtype))
    if plain and isinstance(value, DTensor):
        return value.to_local() if attach else value._local_tensor
    return value


def take_turn(root: RootState, param: ParamState, frame: Frame, *, attach: bool) -> Use:
    """One weight's turn in a forward. With ``attach`` its use has a token for the younger node to hang on."""
    session = root.session
    assert session is not None and param.gathers is not None
    walk, direction = session.walk, session.walk.direction
    walk.advance(param.index)
    stored, gather = param.param, param.gathers[direction]
    if param.pending_use is not None and param.pending_use.stored is not stored:
        param.drop_pending()
    use, param.pending_use = param.pending_use or Use(root, param), None

    full = _runtime.held_full(root, param, stored) if param.held is not None else None
    if full is None:
        if gather.state is GatherState.GATHERING and gather.stored is not stored:
            _runtime.give_up(root, param, direction)  # foreseen for a parameter that was swapped since
        if gather.state is GatherState.SHARDED:
            _runtime.issue_gather(root, param, direction, stored)
    walk.arrived(param.index)
    if root.prefetch:
        walk.issue_ahead(root.lookahead, root.full_bytes.__getitem__, root.prefetchers[direction], root.coalesce)
    if attach:
        if use.token is None:
            _make_landing_node(root, session, use)  # nobody foresaw it; still older than the next weight's
        _prepare_landings(root, session, param)
    if full is None:
        full = _runtime.wait_gather(root, param, direction)

    use.full = full
    use.version, use.storage = full._version, full.untyped_storage()._cdata
    param.use = use
    frame.uses.append(use)
    root.by_storage[use.storage] = use
    return use


def _prepare_landings(root: RootState, session: Session, param: ParamState) -> None:
    """Make the older nodes of coming uses. See [Note: one-step reduce deferral].

    The next weight's in any case. Another's only if the weights between here and it are together smaller than it is: in
    backward its reduction would not fit behind theirs, so it lands one weight later. That of a weight whose reduction is
    launched together with its neighbours' waits for theirs, and for another such call to hide behind.
    """
    between, reach = 0, 2 * root.coalesce
    for index in session.walk.upcoming():
        following = root.params[index]
        if following.unit is not param.unit:
            return  # a deferral may not leave the outer FSDP unit: its reduction would run before this gradient lands
        nbytes = following.full_bytes
        wanted = between < (reach if nbytes <= root.coalesce else nbytes) and following.pending_use is None
        if wanted and following.current() is not None and following.param.requires_grad:
            following.pending_use = Use(root, following)
            _make_landing_node(root, session, following.pending_use)
            session.pending.append(following)
        between += nbytes
        if between >= root.largest_bytes and between >= reach:
            return


def _make_landing_node(root: RootState, session: Session, use: Use) -> None:
    param = use.param
    if param.bucket < 0:
        use.token = land_gradient_node(param.param, None, use)
    else:
        bucket_use = use.bucket_use = open_bucket(root, session, param)
        use.token = land_gradient_node(bucket_use.landings[param.index], bucket_use.launch, use)


def _attach(root: RootState, use: Use) -> Tensor:
    """Tie a gathered weight to its parameter: the younger node of the use."""
    assert root.session is not None and use.full is not None
    param = use.param
    if use.token is None:
        _make_landing_node(root, root.session, use)
    assert use.token is not None
    if param.layout.tp_spec is not None:
        output: Tensor = make_dtensor(use.full, tensor_parallel_spec(param, use.full.dtype))
    else:
        # The tensor itself becomes the output of the node; who reads it outside autograd takes it off the graph.
        output = use.full
    attached = use_weight_node(use.token, use, [output])
    use.token = None
    use.node = attached.grad_fn
    return attached


def _replicated(root: RootState, param: ParamState, *, attach: bool) -> Tensor:
    if not attach:
        return replicated_value(param)
    assert root.session is not None
    return replicated_use(root, root.session, param)


def _let_go(root: RootState, use: Use, *, failed: bool) -> None:
    """The frame of a use closes. Usually its buffer goes; two kinds stay for the backward that follows."""
    param = use.param
    assert param.gathers is not None and root.session is not None
    param.use = None
    root.by_storage.pop(use.storage, None)
    use.full = use.attached = use.node = None  # the node refers to the use: let go of one end
    walk = root.session.walk
    if param.gathers[walk.direction].state is not GatherState.READY:
        return  # it was held already
    buffer = _runtime.release(param, walk.direction)
    assert buffer is not None
    if failed or not use.packed or walk.direction is not Direction.FORWARD:
        return
    if not param.policy.reshard_after_forward:
        _runtime.hold(root, param, buffer, use.stored, explicit=False)
    elif walk.foresees_end and root.prefetch and param.full_bytes <= root.lookahead:
        # The last weight of the forward is the first of the backward that follows at once. A larger one than may be gathered
        # ahead (a head over a large vocabulary) would stand beside the activations of the loss, where memory is tightest.
        _runtime.hold(root, param, buffer, use.stored, explicit=False)
        root.tail = param


def _learn_reader(frame: Frame, reader: ModuleState) -> None:
    """A module read another's weight. From the next call on, both it and the owner's parent pack what they save."""
    frame.module.saves_weights = True
    parent = reader.parent() if reader.parent is not None else None
    if parent is not None:
        reader.root.wrap_reader(parent)


# ---- backward


def rematerialize(packed: PackedWeight) -> Tensor:
    """A saved view of a weight is needed again: bring the weight back, and the next ones of this backward."""
    root, param = packed.root, packed.param
    _check_unchanged(param, packed.stored, packed.value)
    running = _backward_pass(root)
    if running is None:
        return _gather_once(root, param, packed.stored)
    _end_passing(running, param)
    cached = running.cached.get(param.index)
    if cached is not None and cached[0] is packed.stored:
        full = cached[1]
    else:
        full = _arrive(root, running, param, packed.stored, _foresee(root, running, param, packed.stored))
    if packed.node is None or not torch._C._will_engine_execute_node(packed.node):
        running.passing = param
    return full


class BackwardTurn(NamedTuple):
    """A weight's turn in the backward of a node of ours: gathers are issued, nothing is waited for yet."""

    running: BackwardPass
    full: Tensor | None  # the weight, where it was kept
    was_foreseen: bool  # else its gather has only just begun


def begin_backward_turn(root: RootState, param: ParamState, stored: Tensor, value: object) -> BackwardTurn:
    """``stored`` is what the weight's forward used, ``value`` what ``ParamState.value_of`` said of it then."""
    assert param.gathers is not None
    _check_unchanged(param, stored, value)
    running = _backward_pass(root)
    assert running is not None, "a node's backward runs in a graph task"
    _end_passing(running, param)
    cached = running.cached.get(param.index)
    if cached is not None and cached[0] is stored:
        return BackwardTurn(running, cached[1], was_foreseen=True)
    foreseen = param.gathers[Direction.BACKWARD].state is not GatherState.SHARDED
    full = _foresee(root, running, param, stored)
    return BackwardTurn(running, full, was_foreseen=foreseen or full is not None)


def end_backward_turn(root: RootState, param: ParamState, stored: Tensor, turn: BackwardTurn) -> Tensor:
    """Wait for the weight. ``_runtime.release_backward`` lets it go."""
    return _arrive(root, turn.running, param, stored, turn.full)


def _end_passing(running: BackwardPass, param: ParamState) -> None:
    passing = running.passing
    if passing is not None and passing is not param:
        # Nothing of it will land (frozen, or its gradient is not asked for), so nothing else would end its stay.
        _drop_cached(running, passing)
        running.passing = None


def _foresee(root: RootState, running: BackwardPass, param: ParamState, stored: Tensor) -> Tensor | None:
    """Issue the gathers of one weight's turn in a backward. Returns the weight where it was kept."""
    assert param.gathers is not None
    walk, gather = running.walk, param.gathers[Direction.BACKWARD]
    walk.advance(param.index)
    full = _runtime.held_full(root, param, stored) if param.held is not None else None
    if full is not None and root.tail is param:
        _runtime.drop_held(root, param)
    if full is None:
        if gather.state is not GatherState.SHARDED and gather.stored is not stored:
            _forget_gather(root, running, param)
        if gather.state is GatherState.SHARDED:
            _runtime.issue_gather(root, param, Direction.BACKWARD, stored)
    walk.arrived(param.index)
    if root.prefetch:
        prefetcher = root.prefetchers[Direction.BACKWARD]
        walk.issue_ahead(root.lookahead, root.full_bytes.__getitem__, prefetcher, root.coalesce)
    return full


def _arrive(root: RootState, running: BackwardPass, param: ParamState, stored: Tensor, full: Tensor | None) -> Tensor:
    """Wait for the gather of one weight's turn in a backward."""
    if full is None:
        assert param.gathers is not None
        gather = param.gathers[Direction.BACKWARD]
        if gather.state is GatherState.GATHERING:
            full = _runtime.wait_gather(root, param, Direction.BACKWARD)
        else:  # an enclosing backward holds it
            assert gather.buffer is not None
            full = param.layout.full_from_chunks(gather.buffer)
    running.cached[param.index] = stored, full
    return full


def _forget_gather(root: RootState, running: BackwardPass, param: ParamState) -> None:
    """The gathered weight is another than this backward needs: the parameter was swapped between two forwards."""
    assert param.gathers is not None
    if param.gathers[Direction.BACKWARD].state is GatherState.GATHERING:
        _runtime.give_up(root, param, Direction.BACKWARD)
    else:
        _runtime.release(param, Direction.BACKWARD)
        running.cached.pop(param.index, None)


def _backward_pass(root: RootState) -> BackwardPass | None:
    task = torch._C._current_graph_task_id()
    if task == -1:
        return None
    running = root.passes.get(task)
    if running is None:
        running = root.passes[task] = BackwardPass(root.chains)

        def end() -> None:
            finished = root.passes.pop(task, None)
            if finished is not None:
                _end_backward(root, finished)
                finished.walk.finish()
                _runtime.check_end_of_pass(root)

        torch.autograd.Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
    return running


def abandon_backwards(root: RootState) -> None:
    """Clean up after backwards that an exception ended: the engine runs no callback then."""
    _runtime.abandon_reductions(root)
    while root.passes:
        _, running = root.passes.popitem()
        _end_backward(root, running)


def _end_backward(root: RootState, running: BackwardPass) -> None:
    for index in list(running.cached):
        _drop_cached(running, root.params[index])
    if root.passes:
        return  # a reentrant checkpoint's backward, inside another that goes on
    # Nothing gathered survives the pass: the optimizer may rewrite the shards next.
    _runtime.drain(root, Direction.BACKWARD)
    if root.is_last_backward:
        _runtime.drop_all_held(root, explicit=False)


def _drop_cached(running: BackwardPass, param: ParamState) -> None:
    if running.cached.pop(param.index, None) is not None:
        _runtime.release_if_ready(param, Direction.BACKWARD)


def _gather_once(root: RootState, param: ParamState, stored: Tensor) -> Tensor:
    """Somebody looks at a saved tensor outside any backward."""
    _runtime.issue_gather(root, param, Direction.RECOMPUTE, stored)
    full = _runtime.wait_gather(root, param, Direction.RECOMPUTE)
    _runtime.release(param, Direction.RECOMPUTE)
    return full


def _check_unchanged(param: ParamState, stored: Tensor, value: object) -> None:
    if value != param.value_of(stored):
        raise RuntimeError(
            f"{param.fqn}: the weight was modified (by an optimizer step or in place) between the forward and this "
            "backward, which needs the value that the forward used"
        )


# ---- prefetch


def prefetch(root: RootState, direction: Direction, indices: list[int]) -> list[bool]:
    """Gather weights ahead of their use; ``False`` where none is needed. See ``Pass.issue_ahead``."""
    answers: list[bool] = []
    wanted: list[tuple[ParamState, Tensor]] = []
    params = root.params
    for index in indices:
        param = params[index]
        assert param.gathers is not None
        needed = param.held is None and param.gathers[direction].state is GatherState.SHARDED
        if needed and not (wanted and any(other is param for other, _ in wanted)):
            stored = param.current()
            if stored is None:
                break  # an outer FSDP unit still holds it sharded: not before that unit is entered
            wanted.append((param, stored))
            answers.append(True)
        else:
            answers.append(False)
    if wanted:
        _runtime.issue_gathers(root, wanted, direction)
    return answers


# ---- wiring


def install(root: RootState) -> None:
    """Give a root the callables that its hot paths need, bound once and without a cycle back to it."""
    reference = weakref.ref(root)

    def prefetcher(direction: Direction) -> Callable[[list[int]], list[bool]]:
        return lambda indices: prefetch(cast(RootState, reference()), direction, indices)

    root.prefetchers = tuple(prefetcher(direction) for direction in Direction)
    root.hooks = SavedTensorHooks(root.by_storage, rematerialize)
