"""Gradient reduction over the replicate axes, and of parameters that are whole on every ``gtp_remat`` rank.

The pattern of [Note: one-step reduce deferral], one level up. Parameters form buckets in registration order. In each
forward a bucket has a *launch* node, which the gradients of all its parameters feed and which starts one collective,
and an older *landing* node, made one bucket earlier, which waits for it and hands finished gradients to
``AccumulateGrad``::

    AccumulateGrad <- LandBucket k <- LaunchBucket k <- LandGradient of each weight of bucket k
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """One collective of a bucket: the buffer it reduces and which parameters lie in it."""

    __slots__ = ("buffer", "handle", "params", "shapes", "source")

    def __init__(
        self, handle: _collectives.Handle | None, buffer: Tensor, params: list[ParamState], shapes: list[torch.Size]
    ):
        self.handle, self.buffer, self.params, self.shapes = handle, buffer, params, shapes
        self.source: Tensor | None = buffer  # reduced in place


class BucketUse:
    """One bucket in one forward: the tensors its parameters' gradients flow into, and what is in flight."""

    __slots__ = ("bucket", "flights", "indices", "members", "partial", "root", "sources", "tokens")

    def __init__(self, root: RootState, bucket: Bucket, members: list[ParamState]):
        self.root = root
        self.bucket = bucket
        self.members = members
        self.indices = frozenset(param.index for param in members)
        # Whether a gradient is a partial sum over tp: declared, or found on its first DTensor gradient.
        self.partial: dict[int, bool] = {param.index: True for param in members if param.partial_over_tp}
        self.flights: list[dict[int, Tensor] | list[Flight]] = []
        self.tokens: tuple[Tensor, ...] = ()
        self.sources: dict[int, Tensor] = {}

    def make_landing_node(self) -> None:
        """The older node; made a bucket earlier than the other."""
        self.tokens = cast("tuple[Tensor, ...]", LandBucket.apply(self, *(param.param for param in self.members)))

    def make_launch_node(self) -> None:
        outputs = cast("tuple[Tensor, ...]", LaunchBucket.apply(self, *self.tokens))
        self.sources = {param.index: out for param, out in zip(self.members, outputs, strict=True)}
        self.tokens = ()

    def close(self) -> None:
        """The forward is over: the nodes keep what they need, and refer back to this object."""
        self.sources = {}
        self.tokens = ()

    def settle_partial(self, param: ParamState, local: Tensor, partial: bool) -> Tensor:
        """A gradient of one use, made of the kind (partial over tp or not) that the parameter's first one had."""
        if param.partial_over_tp:
            return local
        return _of_kind(self, param, local, partial, wanted=self.partial.setdefault(param.index, partial))


def source_of(root: RootState, session: Session, param: ParamState) -> tuple[Tensor, BucketUse | None]:
    """The tensor that a use of ``param`` hangs on in this forward: the parameter itself, or its bucket's output."""
    if param.bucket < 0:
        return param.param, None
    bucket_use = open_bucket(root, session, param)
    return bucket_use.sources[param.index], bucket_use


def open_bucket(root: RootState, session: Session, param: ParamState) -> BucketUse:
    """The bucket use that takes the gradient of ``param`` in this forward; its nodes are made at the first call."""
    bucket = root.buckets[param.bucket]
    if _has_hooks(param):
        # A bucket's landing node reaches every parameter of the bucket, used or not, and autograd calls the hooks of
        # an unused one with None. A parameter with hooks of its user's goes alone, so they fire as in plain PyTorch.
        # It follows that hooks must be the same on every rank, like everything else that collectives depend on.
        key: tuple[int, int] = (bucket.index, param.index)
        members = [param]
    else:
        key, members = (bucket.index, -1), _members(bucket)
    bucket_use = session.bucket_uses.get(key)
    if bucket_use is None or param.index not in bucket_use.indices:
        bucket_use = session.bucket_uses[key] = BucketUse(root, bucket, members)
        bucket_use.make_landing_node()
    if not bucket_use.sources:
        following = bucket.next
        if following is not None and (following.index, -1) not in session.bucket_uses:
            coming = _members(following)
            if coming:
                # Made before this bucket's launch node, so it waits after this bucket has launched.
                ahead = session.bucket_uses[following.index, -1] = BucketUse(root, following, coming)
                ahead.make_landing_node()
        bucket_use.make_launch_node()
    return bucket_use


def _has_hooks(param: ParamState) -> bool:
    tensor = param.param
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def _members(bucket: Bucket) -> list[ParamState]:
    return [
        param for param in bucket.params
        if param.current() is not None and param.param.requires_grad and not _has_hooks(param)
    ]  # fmt: skip


class LandBucket(Function):
    """Older node of a bucket: waits for its collectives."""

    @staticmethod
    def forward(ctx: Any, use: BucketUse, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.use = use
        return tuple(torch.empty(0, device=param.device) for param in params)

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        use: BucketUse = ctx.use
        landed = use.flights.pop()
        if isinstance(landed, list):
            reduced = _land(use.root, landed)
        else:  # not to be reduced now, or already
            reduced = landed
        grads: list[Tensor | None] = []
        for param in use.members:
            shard = reduced.get(param.index)
            grads.append(None if shard is None else as_gradient(param, shard))
        return None, *grads


class LaunchBucket(Function):
    """Younger node of a bucket: takes every gradient of its parameters in this backward, launches their reduction."""

    @staticmethod
    def forward(ctx: Any, use: BucketUse, *tokens: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.use = use
        return tuple(_compute_value(param, attached=True) for param in use.members)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        use: BucketUse = ctx.use
        local: dict[int, Tensor] = {}
        for param, grad in zip(use.members, grads, strict=True):
            if grad is not None:
                value, partial = local_gradient(grad, param.layout.tp_spec)
                local[param.index] = value if param.is_sharded else use.settle_partial(param, value, partial)
        if not use.root.sync_gradients:
            use.flights.append(_keep_unsynced(use, ctx, local))
        elif torch.is_grad_enabled() and any(value.requires_grad for value in local.values()):
            use.flights.append(_reduce_differentiably(use, local))
        else:
            _queue_flush(use, ctx)
            _take_unsynced(use, [p for i, p in enumerate(use.members) if p.unsynced and _accumulates(ctx, i)], local)
            use.flights.append(_launch(use, local))
        token = use.root.token_grad(use.members[0].shard().device)
        return None, *(token if param.index in local else None for param in use.members)


def _compute_value(param: ParamState, *, attached: bool) -> Tensor:
    """What a module sees of a parameter that needs no gather; a stand-in without memory for one that does."""
    local = param.shard()
    if param.is_sharded:
        return local.new_empty((), dtype=param.reduce_dtype).expand(local.shape)
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


def _accumulates(launch_node: Any, position: int) -> bool:
    """Whether this backward adds to ``.grad`` of a member, rather than return its gradient (``autograd.grad``)."""
    landing_node = launch_node.next_functions[0][0]
    try:
        will_run: bool = torch._C._will_engine_execute_node(landing_node.next_functions[position][0])
    except RuntimeError:  # how the engine says that the leaf's gradient is captured
        return False
    return will_run


def _keep_unsynced(use: BucketUse, launch_node: Any, local: dict[int, Tensor]) -> dict[int, Tensor]:
    """Accumulate locally: the gradient lands unreduced, and the next synchronising backward reduces the sum."""
    kept = {}
    for position, param in enumerate(use.members):
        value = local.get(param.index)
        if value is None:
            continue
        if not param.is_sharded and not value.requires_grad:
            # It may be anybody's tensor, expanded or kept by whoever made it, and .grad is added to in place.
            value = value.clone(memory_format=torch.contiguous_format)
        kept[param.index] = value
        if not _accumulates(launch_node, position):
            continue
        partial = use.partial.get(param.index, False)
        if param.unsynced:
            kept[param.index] = _of_kind(use, param, value, partial, wanted=param.unsynced_partial)
            continue
        grad = param.param.grad
        if grad is not None and param.policy.reduction == "sum":
            # A part that is already summed over the ranks would be summed again with the rest.
            grad._local_tensor.div_(_ranks_of(use, param))  # type: ignore[attr-defined]
        elif grad is not None and partial:
            grad._local_tensor.div_(use.bucket.tp_size)  # type: ignore[attr-defined]
        param.unsynced, param.unsynced_partial = True, partial
    return kept


def _take_unsynced(use: BucketUse, params: list[ParamState], local: dict[int, Tensor]) -> None:
    """Move what earlier backwards left unreduced in ``param.grad`` into this reduction."""
    for param in params:
        param.unsynced = False
        grad = param.param.grad
        if grad is None:
            continue
        pending: Tensor = grad._local_tensor  # type: ignore[attr-defined]
        param.param.grad = None
        fresh = local.get(param.index)
        if fresh is None:
            use.partial[param.index] = param.unsynced_partial
            local[param.index] = pending
        else:
            fresh = _of_kind(use, param, fresh, use.partial.get(param.index, False), wanted=param.unsynced_partial)
            use.partial[param.index] = param.unsynced_partial
            local[param.index] = pending + fresh


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
        flight = Flight(handle, buffer, params, [tensor.shape for tensor in tensors])
        flights.append(flight)
        use.root.reducing[flight] = params[0]
    return flights


def _land(root: RootState, flights: Iterable[Flight]) -> dict[int, Tensor]:
    reduced: dict[int, Tensor] = {}
    for flight in flights:
        root.reducing.pop(flight, None)
        if flight.handle is not None:
            # Closes the hazard of reading (and accumulating) a gradient that is still being reduced.
            _runtime.wait_reduction(flight.handle, flight.params)
        offset = 0
        for param, shape in zip(flight.params, flight.shapes, strict=True):
            reduced[param.index] = flight.buffer.narrow(0, offset, shape.numel()).view(shape)
            offset += shape.numel()
    return reduced


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


def _queue_flush(use: BucketUse, launch_node: Any) -> None:
    root, task = use.root, torch._C._current_graph_task_id()
    if not root.is_last_backward or root.flush_task == task or not any(param.unsynced for param in root.params):
        return
    if any(_accumulates(launch_node, position) for position in range(len(use.members))):
        root.flush_task = task
        torch.autograd.Variable._execution_engine.queue_callback(lambda: flush_unsynced(root))  # type: ignore[attr-defined]


def flush_unsynced(root: RootState) -> None:
    """End of a synchronising backward: reduce gradients of earlier, unsynchronised ones that it did not reach."""
    for bucket in root.buckets:
        local: dict[int, Tensor] = {}
        use = BucketUse(root, bucket, [param for param in bucket.params if param.unsynced])
        _take_unsynced(use, use.members, local)
        for index, shard in _land(root, _launch(use, local)).items():
            param = root.params[index]
            param.param.grad = as_gradient(param, shard)


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
