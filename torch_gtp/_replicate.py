"""Gradient reduction over the replicate axes, and of parameters that are whole on every ``gtp_remat`` rank.

The pattern of [Note: one-step reduce deferral], one level up. Parameters form buckets in registration order. In each
forward a bucket has one *launch* node, which every use of its parameters feeds and which starts one collective, and one
older *landing* node per parameter, made a bucket earlier and reached from the uses of that parameter alone, so that the
hooks of a parameter without a gradient stay silent as in plain PyTorch::

    use of weight w -> LandGradient w -+-> LaunchBucket k -> (an anchor)
                                       +-> LandParameter w -> AccumulateGrad w

Nothing but age orders a landing after its launch: the engine runs the youngest ready node first, all nodes on the way
to a use of bucket k are younger than its landing nodes, so these come when all that can arrive has arrived, and the
launch node, younger too, has run. Where the engine does not need it (``autograd.grad``), the first landing launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from . import _collectives, _runtime
from ._autograd import AllReduce, as_gradient, local_gradient
from ._dtensor_layout import axis_size, make_dtensor, replicate_axes
from ._policy import GTP_AXIS, TP_AXIS
from ._state import ParamState, RootState, Session

BUCKET_BYTES = 25 * 2**20  # the size DDP uses: large enough for bandwidth, small enough to start early


class Bucket:
    """Parameters whose gradients are reduced together, over the same ranks.

    ``group`` is ``None`` where no axis but ``tp`` is left to reduce over; ``tp_group`` covers the same ranks and the
    ``tp`` axis, for gradients that are partial sums over it.
    """

    def __init__(self, index: int, group: dist.ProcessGroup | None, tp_group: dist.ProcessGroup | None, tp_size: int):
        self.index = index
        self.params: list[ParamState] = []
        self.group = group
        self.tp_group = tp_group
        self.tp_size = tp_size
        self.next: Bucket | None = None

    @property
    def ranks(self) -> int:
        """How many ranks computed this gradient on other data."""
        return self.group.size() if self.group is not None else 1


class Flight:
    """One collective of a bucket: the buffer it reduces and which parameters lie where in it."""

    __slots__ = ("buffer", "handle", "params", "places", "source")

    def __init__(
        self,
        handle: _collectives.Handle | None,
        buffer: Tensor,
        params: list[ParamState],
        places: dict[int, tuple[int, torch.Size]],
    ):
        self.handle, self.buffer, self.params, self.places = handle, buffer, params, places
        self.source: Tensor | None = buffer  # reduced in place


class BucketPass:
    """One bucket in one backward: gradients of this rank that arrived, reductions that were launched."""

    __slots__ = ("accumulating", "arrived", "launched")

    def __init__(self) -> None:
        self.arrived: dict[int, Tensor] = {}
        self.launched: dict[int, Flight | Tensor] = {}
        self.accumulating: set[int] = set()  # known only while some parameters have unsynchronised gradients


class BucketUse:
    """One bucket in one forward: the nodes that its parameters' gradients flow into."""

    __slots__ = ("bucket", "landings", "launch", "members", "partial", "passes", "root", "values")

    def __init__(self, root: RootState, bucket: Bucket, members: list[ParamState]):
        self.root = root
        self.bucket = bucket
        self.members = members
        # Whether a gradient is a partial sum over tp: declared, or found on its first DTensor gradient.
        self.partial: dict[int, bool] = {param.index: True for param in members if param.partial_over_tp}
        self.passes: dict[int, BucketPass] = {}  # by graph task: a failed backward leaves nothing to the next
        # while the forward runs: tokens of the nodes, and the values of replicated parameters
        self.landings: dict[int, Tensor] = {}
        self.launch: Tensor | None = None
        self.values: dict[int, Tensor] = {}

    def make_landing_nodes(self) -> None:
        """The older nodes; made a bucket earlier than the launch node."""
        self.landings = {param.index: land_parameter_node(param.param, self, param) for param in self.members}

    def make_launch_node(self) -> None:
        self.launch = launch_bucket_node(self.root.anchor(self.members[0].shard().device), self)

    def close(self) -> None:
        """The forward is over: the nodes keep what they need, and refer back to this object."""
        self.landings, self.launch, self.values = {}, None, {}

    def settle_partial(self, param: ParamState, local: Tensor, partial: bool) -> Tensor:
        """A gradient of one use, made of the kind (partial over tp or not) that the parameter's first one had."""
        if param.partial_over_tp:
            return local
        return _of_kind(self, param, local, partial, wanted=self.partial.setdefault(param.index, partial))

    def arrive(self, param: ParamState, value: Tensor, use_node: Any) -> None:
        """Take the gradient of one use. ``use_node``: the node it comes from, whose first edge is the landing node."""
        task = torch._C._current_graph_task_id()
        current = self.passes.get(task)
        if current is None:
            current = self.passes[task] = BucketPass()
        earlier = current.arrived.get(param.index)
        current.arrived[param.index] = value if earlier is None else earlier + value
        if self.root.unsynced and _accumulates(use_node.next_functions[0][0]):
            current.accumulating.add(param.index)


def open_bucket(root: RootState, session: Session, param: ParamState) -> BucketUse:
    """The bucket use that takes the gradient of ``param`` in this forward; its nodes are made at the first call."""
    bucket = root.buckets[param.bucket]
    bucket_use = session.bucket_uses.get(bucket.index)
    if bucket_use is None or param.index not in bucket_use.landings:
        bucket_use = session.bucket_uses[bucket.index] = BucketUse(root, bucket, _members(bucket))
        bucket_use.make_landing_nodes()
    if bucket_use.launch is None:
        following = bucket.next
        if following is not None and following.index not in session.bucket_uses:
            coming = _members(following)
            if coming:
                # Made before this bucket's launch node, so they wait after this bucket has launched.
                ahead = session.bucket_uses[following.index] = BucketUse(root, following, coming)
                ahead.make_landing_nodes()
        bucket_use.make_launch_node()
    return bucket_use


def _members(bucket: Bucket) -> list[ParamState]:
    return [param for param in bucket.params if param.current() is not None and param.param.requires_grad]


def replicated_use(root: RootState, session: Session, param: ParamState) -> Tensor:
    """The value of a parameter that needs no gather, tied to its reduction."""
    if param.bucket < 0:
        return cast(Tensor, LocalValue.apply(param.param, param))
    bucket_use = open_bucket(root, session, param)
    value = bucket_use.values.get(param.index)
    if value is None:
        value = bucket_use.values[param.index] = use_replicated_node(
            bucket_use.landings[param.index], bucket_use.launch, bucket_use, param
        )
    return value


class UseReplicated(Function):
    """The use of a replicated parameter: its local tensor, cast for compute."""

    @staticmethod
    def forward(ctx: Any, landing: Tensor, launch: Tensor, use: BucketUse, param: ParamState) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.use, ctx.param = use, param
        return _compute_value(param, attached=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        use: BucketUse = ctx.use
        param: ParamState = ctx.param
        if grad is None:
            return None, None, None, None
        value, partial = local_gradient(grad, param.layout.tp_spec)
        use.arrive(param, use.settle_partial(param, value, partial), ctx)
        token = use.root.token_grad(param.shard().device)
        return token, token, None, None


class LaunchBucket(Function):
    """Younger node of a bucket: runs when every gradient of its parameters has arrived, launches their reduction."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, use: BucketUse) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.use = use
        return torch.empty(0, device=anchor.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, None]:
        use: BucketUse = ctx.use
        current = use.passes.get(torch._C._current_graph_task_id())
        if current is not None and current.arrived and use.root.sync_gradients:
            _launch_arrived(use, current)
        return None, None


class LandParameter(Function):
    """Older node of a bucket, one per parameter: waits for the bucket's collective."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, use: BucketUse, param: ParamState) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.use, ctx.param = use, param
        return torch.empty(0, device=stored.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, None, None]:
        use: BucketUse = ctx.use
        param: ParamState = ctx.param
        task = torch._C._current_graph_task_id()
        current = use.passes.get(task)
        if current is None:  # no use had a gradient
            return None, None, None
        shard: Tensor | None = None
        if param.index in current.arrived:
            if use.root.sync_gradients:
                _launch_arrived(use, current)
            else:
                shard = _keep_unsynced(use, param, current.arrived.pop(param.index), ctx)
        launched = current.launched.pop(param.index, None)
        if launched is not None:
            shard = _land(use.root, launched, param) if isinstance(launched, Flight) else launched
        if not current.arrived and not current.launched:
            del use.passes[task]
        return None if shard is None else as_gradient(param, shard), None, None


# See _autograd: Function.apply spends most of its time on functorch, whose transforms never come here.
land_parameter_node: Callable[[Tensor, BucketUse, ParamState], Tensor] = super(Function, LandParameter).apply
launch_bucket_node: Callable[[Tensor, BucketUse], Tensor] = super(Function, LaunchBucket).apply
use_replicated_node: Callable[..., Tensor] = super(Function, UseReplicated).apply


def _compute_value(param: ParamState, *, attached: bool) -> Tensor:
    """What a module sees of a parameter that needs no gather."""
    local = param.shard()
    value = local
    if param.compute_dtype is not None and local.dtype != param.compute_dtype:
        value = local.to(param.compute_dtype)
    elif attached:
        value = local.view_as(local)
    if param.layout.tp_spec is None:
        return value
    return make_dtensor(value, tensor_parallel_spec(param, value.dtype))


class LocalValue(Function):
    """A parameter without gather and without ranks to reduce over: its local tensor, cast for compute."""

    @staticmethod
    def forward(ctx: Any, stored: Tensor, param: ParamState) -> Tensor:
        ctx.param = param
        return _compute_value(param, attached=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        param: ParamState = ctx.param
        local, _ = local_gradient(grad, param.layout.tp_spec)
        if not local.requires_grad:
            # It may be anybody's tensor, and .grad, which it becomes, is added to in place.
            local = local.clone(memory_format=torch.contiguous_format)
        return as_gradient(param, local), None


def replicated_value(param: ParamState) -> Tensor:
    """The value of a parameter that needs no gather, outside autograd."""
    return _compute_value(param, attached=False)


def tensor_parallel_spec(param: ParamState, dtype: torch.dtype) -> Any:
    """The 1-D spec under which a tensor-parallel weight computes, for a value of ``dtype``."""
    spec = param.layout.tp_spec
    assert spec is not None and spec.tensor_meta is not None
    if spec.tensor_meta.dtype == dtype:
        return spec
    meta = spec.tensor_meta._replace(dtype=dtype)
    return type(spec)(spec.mesh, spec.placements, meta)


def _accumulates(landing_node: Any) -> bool:
    """Whether this backward adds to ``.grad`` of the parameter, rather than return its gradient (``autograd.grad``)."""
    try:
        will_run: bool = torch._C._will_engine_execute_node(landing_node.next_functions[0][0])
    except RuntimeError:  # how the engine says that the leaf's gradient is captured
        return False
    return will_run


def _launch_arrived(use: BucketUse, current: BucketPass) -> None:
    root = use.root
    arrived, current.arrived = current.arrived, {}
    if torch.is_grad_enabled() and any(value.requires_grad for value in arrived.values()):
        current.launched.update(_reduce_differentiably(use, arrived))
        return
    if current.accumulating:
        _take_unsynced(use, [param for param in use.members if param.index in current.accumulating], arrived)
        _queue_flush(root)
    for flight in _launch(use, arrived):
        current.launched.update(dict.fromkeys(flight.places, flight))


def _keep_unsynced(use: BucketUse, param: ParamState, value: Tensor, landing_node: Any) -> Tensor:
    """Accumulate locally: the gradient lands unreduced, and the next synchronising backward reduces the sum."""
    if not param.is_sharded and not value.requires_grad:
        # It may be anybody's tensor, expanded or kept by whoever made it, and .grad is added to in place.
        value = value.clone(memory_format=torch.contiguous_format)
    if not _accumulates(landing_node):
        return value
    partial = use.partial.get(param.index, False)
    wanted = use.root.unsynced.get(param.index)
    if wanted is not None:
        return _of_kind(use, param, value, partial, wanted=wanted)
    grad = param.param.grad
    if grad is not None and param.policy.reduction == "sum":
        # A part that is already summed over the ranks would be summed again with the rest.
        grad._local_tensor.div_(_ranks_of(use, param))  # type: ignore[attr-defined]
    elif grad is not None and partial:
        grad._local_tensor.div_(use.bucket.tp_size)  # type: ignore[attr-defined]
    use.root.unsynced[param.index] = partial
    return value


def _take_unsynced(use: BucketUse, params: list[ParamState], local: dict[int, Tensor]) -> None:
    """Move what earlier backwards left unreduced in ``param.grad`` into this reduction."""
    for param in params:
        kind = use.root.unsynced.pop(param.index, None)
        grad = param.param.grad
        if kind is None or grad is None:
            continue
        pending: Tensor = grad._local_tensor  # type: ignore[attr-defined]
        param.param.grad = None
        fresh = local.get(param.index)
        if fresh is not None:
            fresh = _of_kind(use, param, fresh, use.partial.get(param.index, False), wanted=kind)
        use.partial[param.index] = kind
        local[param.index] = pending if fresh is None else pending + fresh


def _of_kind(use: BucketUse, param: ParamState, value: Tensor, partial: bool, *, wanted: bool) -> Tensor:
    """A gradient as a partial sum over tp, or complete on every rank of it, as ``wanted``."""
    if partial == wanted:
        return value
    if wanted:
        return value / use.bucket.tp_size  # complete on every rank; the coming sum over tp restores it
    return cast(Tensor, AllReduce.apply(value, param.layout.mesh.get_group(TP_AXIS), "sum", 1))


def _ranks_of(use: BucketUse, param: ParamState) -> int:
    ranks = use.bucket.ranks
    return ranks * use.bucket.tp_size if use.partial.get(param.index) else ranks


def _launch(use: BucketUse, local: dict[int, Tensor]) -> list[Flight]:
    """Start one collective per (partial over tp, dtype) among the gradients: one, in nearly every model."""
    kinds: dict[tuple[bool, torch.dtype], list[ParamState]] = {}
    for param in use.members:
        if param.index in local:
            kinds.setdefault((use.partial.get(param.index, False), param.reduce_dtype), []).append(param)
    flights = []
    for (partial, dtype), params in kinds.items():
        tensors = [local[param.index] for param in params]
        places, offset = {}, 0
        for param, tensor in zip(params, tensors, strict=True):
            places[param.index] = offset, tensor.shape
            offset += tensor.numel()
        group = use.bucket.tp_group if partial else use.bucket.group
        # A copy, whatever the count: autograd may share these tensors with others, and they are reduced in place.
        buffer = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
        handle = None
        if group is not None:
            op = params[0].policy.reduce_op
            if partial and op == "avg":  # an average over the data, a sum over tp
                buffer.div_(use.bucket.ranks)
                op = "sum"
            handle = _collectives.all_reduce(buffer, group, op)
            if not params[0].policy.async_reduction:
                handle.wait()
        flight = Flight(handle, buffer, params, places)
        flights.append(flight)
        use.root.reducing[flight] = params[0]
    return flights


def _land(root: RootState, flight: Flight, param: ParamState) -> Tensor:
    """The reduced gradient of one parameter; the first to ask waits for all of them."""
    if root.reducing.pop(flight, None) is not None and flight.handle is not None:
        # Closes the hazard of reading (and accumulating) a gradient that is still being reduced.
        _runtime.wait_reduction(flight.handle, flight.params)
    offset, shape = flight.places[param.index]
    return flight.buffer.narrow(0, offset, shape.numel()).view(shape)


def _reduce_differentiably(use: BucketUse, local: dict[int, Tensor]) -> dict[int, Tensor]:
    reduced = {}
    for param in use.members:
        if (value := local.get(param.index)) is None:
            continue
        partial = use.partial.get(param.index, False)
        group = use.bucket.tp_group if partial else use.bucket.group
        op = param.policy.reduce_op
        divisor = 1
        if partial and op == "avg":  # an average over the data, a sum over tp
            divisor, op = use.bucket.ranks, "sum"
        reduced[param.index] = value if group is None else cast(Tensor, AllReduce.apply(value, group, op, divisor))
    return reduced


def _queue_flush(root: RootState) -> None:
    task = torch._C._current_graph_task_id()
    if root.is_last_backward and root.flush_task != task and root.unsynced:
        root.flush_task = task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: flush_unsynced(root))  # type: ignore[attr-defined]


def flush_unsynced(root: RootState) -> None:
    """End of a synchronising backward: reduce gradients of earlier, unsynchronised ones that it did not reach."""
    for bucket in root.buckets:
        local: dict[int, Tensor] = {}
        use = BucketUse(root, bucket, [param for param in bucket.params if param.index in root.unsynced])
        _take_unsynced(use, use.members, local)
        for flight in _launch(use, local):
            for index in flight.places:
                param = root.params[index]
                param.param.grad = as_gradient(param, _land(root, flight, param))


# ---- buckets and groups


def make_buckets(root: RootState) -> None:
    """Assign every parameter that has ranks to reduce over to a bucket. All ranks come here at their first forward."""
    open_buckets: dict[tuple[Any, ...], tuple[Bucket, int]] = {}
    for param in root.params:
        mesh = param.layout.mesh
        axes = replicate_axes(mesh) if param.is_sharded else (*replicate_axes(mesh), GTP_AXIS)
        group = _collectives.axes_group(mesh, axes)
        may_be_partial = axis_size(mesh, TP_AXIS) > 1 and (
            param.partial_over_tp
            or (param.layout.tp_spec is not None and param.layout.tp_spec.placements[0].is_replicate())
        )
        if group is None and not may_be_partial:
            continue
        tp_group = _collectives.axes_group(mesh, (*axes, TP_AXIS)) if may_be_partial else None
        key = (mesh, axes, may_be_partial, param.unit, param.policy.reduction, param.policy.async_reduction)
        nbytes = param.shard().numel() * param.reduce_dtype.itemsize
        bucket, filled = open_buckets.get(key, (None, 0))
        if bucket is None or (filled and filled + nbytes > BUCKET_BYTES):
            fresh = Bucket(len(root.buckets), group, tp_group, axis_size(mesh, TP_AXIS))
            if bucket is not None:
                bucket.next = fresh
            root.buckets.append(fresh)
            bucket, filled = fresh, 0
        bucket.params.append(param)
        param.bucket = bucket.index
        open_buckets[key] = (bucket, filled + nbytes)
