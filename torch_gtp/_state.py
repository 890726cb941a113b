"""What is remembered: one ``RootState`` per sharded model, one ``ParamState`` per parameter.

Ownership is acyclic, so that ``del model`` frees everything at once: modules own their ``ModuleState``, that owns the
root's state, the root owns its parameters' states, and those refer back to modules weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from . import _collectives
from ._chain import Chains, Direction, Pass
from ._dtensor_layout import WeightLayout
from ._policy import GTPPolicy

if TYPE_CHECKING:
    from ._autograd import SavedTensorHooks
    from ._replicate import Bucket, BucketUse


class GatherState(IntEnum):
    """Where one weight's gather stands in one direction."""

    SHARDED = 0  # nothing but the shard
    GATHERING = 1  # a collective writes the buffer; nobody may read it
    READY = 2  # the buffer holds the full weight


_GATHER_MOVES = frozenset(
    {
        (GatherState.SHARDED, GatherState.GATHERING),
        (GatherState.GATHERING, GatherState.READY),
        (GatherState.GATHERING, GatherState.SHARDED),  # given up after its wait: prefetched, never used
        (GatherState.READY, GatherState.SHARDED),
    }
)


class ReduceState(IntEnum):
    """Where the reduction of one use's gradient stands."""

    QUEUED = 0  # waits for its neighbours: one call will reduce them all
    LAUNCHED = 1  # a collective reads its input and writes the shard's gradient
    LANDED = 2  # the shard's gradient was handed to autograd


_REDUCE_MOVES = frozenset(
    {(ReduceState.QUEUED, ReduceState.LAUNCHED), (ReduceState.LAUNCHED, ReduceState.LANDED)}
)  # fmt: skip


class Gather:
    """The gather of one weight in one direction: its state, its buffer while it has one."""

    __slots__ = ("buffer", "handle", "name", "source", "state", "stored")

    def __init__(self, name: str):
        self.name = name
        self.state = GatherState.SHARDED
        self.stored: Tensor | None = None  # the DTensor whose shard was sent: users swap parameters in and out
        self.buffer: Tensor | None = None
        self.source: Tensor | None = None
        self.handle: _collectives.Handle | None = None

    def move(self, to: GatherState) -> None:
        if (self.state, to) not in _GATHER_MOVES:
            raise RuntimeError(f"{self.name}: gather state {self.state.name} -> {to.name} is not allowed")
        self.state = to


class Landing:
    """One gradient reduction in flight. ``source`` stays alive until the wait: the collective reads it."""

    __slots__ = ("handle", "out", "param", "queue", "source", "state")

    def __init__(self, param: ParamState, out: Tensor, source: Tensor):
        self.param = param
        self.out = out
        self.source: Tensor | None = source
        self.handle: _collectives.Handle | None = None
        self.queue: ReduceQueue | None = None
        self.state = ReduceState.QUEUED

    def move(self, to: ReduceState) -> None:
        if (self.state, to) not in _REDUCE_MOVES:
            raise RuntimeError(f"{self.param.fqn}: reduce state {self.state.name} -> {to.name} is not allowed")
        self.state = to


class ReduceQueue:
    """Reductions that one call will launch: of one group, operator and dtype."""

    __slots__ = ("landings", "nbytes")

    def __init__(self) -> None:
        self.landings: list[Landing] = []
        self.nbytes = 0


class Held(NamedTuple):
    """A gathered buffer kept beyond its pass, and what it must match to still be fresh."""

    buffer: Tensor
    stored: Tensor
    version: tuple[int, int]
    explicit: bool  # asked for by ``unshard()``; stays over forwards


class Owner(NamedTuple):
    """A module that has the parameter among its own, and under which name.

    ``parameters`` is the module's own dict: what it holds now, without asking whether the module still lives.
    """

    module: weakref.ref[nn.Module]
    name: str
    parameters: dict[str, nn.Parameter | None]

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Owner:
        return cls(weakref.ref(module), name, module._parameters)


class ParamState:
    """One parameter of a root, shared by every module that it is tied to."""

    __slots__ = (
        "__weakref__", "bucket", "compute_dtype", "fqn", "full_bytes", "gather_label", "gathered", "gathers", "group",
        "held", "index", "is_plain_matrix", "layout", "leaf", "origin", "owners", "param", "partial_over_tp",
        "pending_use", "policy", "reduce_label", "sendable", "steps", "unit", "use", "visited",
    )  # fmt: skip

    def __init__(self, fqn: str, param: nn.Parameter, layout: WeightLayout, policy: GTPPolicy):
        self.fqn = fqn
        self.param = param
        self.layout = layout
        self.policy = policy
        self.origin: object = None  # shared by all that were one tensor before sharding
        self.owners: list[Owner] = []
        self.index = -1
        self.compute_dtype = policy.mp.param_dtype if param.dtype.is_floating_point else None
        self.partial_over_tp = False  # declared by a tensor-parallel style; DTensor gradients say it themselves
        self.unit: object = None
        self.bucket = -1  # index into the root's buckets; -1: no ranks to reduce over
        self.group: dist.ProcessGroup | None = None
        self.gathers: tuple[Gather, Gather, Gather] | None = None
        self.held: Held | None = None
        self.gathered: Tensor | None = None  # the full value that stands in its place inside gathered()
        self.leaf: nn.Parameter | None = None  # the parameter, while a value with a history stands in its place
        self.visited: list[ParamState] = []  # the root's list of such
        self.sendable: Tensor | None = None  # the local shard that was last found fit to be sent as it is
        self.use: Use | None = None  # open in some frame of the forward that is running
        self.pending_use: Use | None = None  # prepared one weight ahead
        self.steps = 0  # optimizer steps seen
        # Whether a plain nn.Linear may use it without asking further: see _linear.
        self.is_plain_matrix = False
        self.full_bytes = 0
        if layout.shard_dim is not None:
            self.group = layout.mesh.get_group("gtp_remat")
            self.full_bytes = layout.gathered_numel * self.wire_dtype.itemsize
        self.rename(fqn)

    def rename(self, fqn: str) -> None:
        self.fqn = fqn
        self.gather_label = _collectives.fast_label(f"GTP::{fqn}::gather")
        self.reduce_label = _collectives.fast_label(f"GTP::{fqn}::reduce")
        if self.is_sharded:
            self.gathers = (Gather(fqn), Gather(fqn), Gather(fqn))

    @property
    def is_sharded(self) -> bool:
        return self.layout.shard_dim is not None

    @property
    def wire_dtype(self) -> torch.dtype:
        """The dtype of a gather."""
        return self.compute_dtype or self.param.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of a gradient reduction."""
        return self.policy.mp.reduce_dtype or self.wire_dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        param = self.param
        return (getattr(param, "grad_dtype", None) if param.is_leaf else None) or param.dtype

    def current(self) -> nn.Parameter | None:
        """The parameter that the model holds now, if it has this layout.

        Read from the module each time: an outer ``fully_shard`` swaps parameters in and out, users replace them.
        """
        for _, name, parameters in self.owners:
            stored = parameters.get(name)
            if stored is self.param:
                return stored
            if isinstance(stored, DTensor):
                return self.adopt(stored) if self.layout.matches(stored) else None
        return self.param

    def adopt(self, stored: Any) -> nn.Parameter:
        if not stored.is_leaf and self.param.is_leaf:
            # A value with a history (functional_call with fast weights): here for this call only, else its graph lives on.
            self.leaf = self.param
            self.visited.append(self)
        self.param = stored
        return self.param

    def end_visit(self) -> None:
        assert self.leaf is not None
        self.param, self.leaf = self.leaf, None

    def shard(self) -> Tensor:
        """The local shard, outside autograd."""
        return local_shard(self.param)

    def value_of(self, stored: Tensor) -> tuple[int, tuple[int, int] | None]:
        """Changes when the shard of ``stored`` is rewritten: a forward's value, for its backward to compare."""
        # An outer wrapper that swaps parameters rewrites their storage on its own account.
        return self.steps, version_of(stored) if self.unit is None else None

    def drop_pending(self) -> None:
        """Forget a use that was prepared ahead and never came. Its token's node refers back to it."""
        if self.pending_use is not None:
            self.pending_use.token = self.pending_use.bucket_use = None
            self.pending_use = None


def local_shard(stored: Any) -> Tensor:
    """The local tensor of a stored DTensor, outside autograd."""
    local: Tensor = stored._local_tensor
    return local.detach() if local.requires_grad else local


def version_of(stored: Any) -> tuple[int, int]:
    """Changes with every in-place write that leaves a trace: through the DTensor, or on its local tensor."""
    return stored._version, stored._local_tensor._version


class Use:
    """One materialization of a weight, from its gather to the landing of its gradient.

    The forward's frame holds ``full`` and ``attached`` and lets go of them when it closes; the two autograd nodes
    keep the rest. ``landings`` links the nodes that launch reductions to the one that lands them: per use and graph
    task, so that a failed backward cannot leave a stale entry for the next.
    """

    __slots__ = (
        "attached",
        "bucket_use",
        "full",
        "landings",
        "node",
        "packed",
        "param",
        "root",
        "storage",
        "stored",
        "token",
        "version",
    )

    def __init__(self, root: RootState, param: ParamState):
        self.root = root
        self.param = param
        self.stored: Tensor = param.param  # what backward must gather again
        self.token: Tensor | None = None
        self.full: Tensor | None = None
        self.version = 0  # of the full weight when it was gathered
        self.storage = 0  # identity of the full weight's storage while a frame holds it
        self.attached: Tensor | None = None
        self.bucket_use: BucketUse | None = None
        self.node: Any = None
        self.packed = False
        self.landings: dict[int, list[Landing | Tensor]] = {}  # by graph task; a tensor is reduced already

    def launched(self) -> list[Landing | Tensor]:
        """What this backward launched for this use and did not land yet."""
        return self.landings.setdefault(torch._C._current_graph_task_id(), [])


class Frame:
    """One open module call: the weights it gathered and whether it pushed saved-tensor hooks."""

    __slots__ = ("hooked", "module", "uses")

    def __init__(self, module: ModuleState):
        self.module = module
        self.uses: list[Use] = []
        self.hooked = False


class Session:
    """One outermost call into the model: its walk along a chain and its gradient buckets."""

    __slots__ = ("bucket_uses", "pending", "walk")

    def __init__(self, chains: Chains[int], direction: Direction):
        self.walk: Pass[int] = Pass(chains, direction)
        self.bucket_uses: dict[int, BucketUse] = {}
        self.pending: list[ParamState] = []  # with a use prepared ahead

    def close(self) -> None:
        """Let go of tensors whose autograd nodes refer back to their owners: cycles that no collector sees."""
        for param in self.pending:
            param.drop_pending()
        self.pending.clear()
        for bucket_use in self.bucket_uses.values():
            bucket_use.close()
        self.bucket_uses.clear()


class BackwardPass:
    """One graph task: the weights that its saved tensors brought back."""

    __slots__ = ("cached", "passing", "walk")

    def __init__(self, chains: Chains[int]):
        self.walk: Pass[int] = Pass(chains, Direction.BACKWARD)
        self.cached: dict[int, tuple[Tensor, Tensor]] = {}  # by parameter: what was gathered, the full weight
        self.passing: ParamState | None = None  # nothing will land for it: goes when another weight comes


class ModuleState:
    """What a wrapped module knows: its root and its own parameters' states."""

    __slots__ = ("casts", "entries", "mesh", "parent", "root", "saves_weights")

    def __init__(self, root: RootState):
        self.root = root
        self.entries: dict[str, ParamState] = {}
        self.casts: GTPPolicy | None = None  # set, with the mesh, on modules that gtp_shard was called on
        self.mesh: DeviceMesh | None = None
        self.parent: weakref.ref[nn.Module] | None = None
        self.saves_weights = False  # calls may save gathered weights for backward: owners, and readers of children's

    def add(self, name: str, param: ParamState) -> None:
        self.entries[name] = param
        self.saves_weights |= param.is_sharded


class RootState:
    """Everything that one sharded model shares. Two models never share anything."""

    def __init__(self, module: nn.Module, policy: GTPPolicy):
        self.module = weakref.ref(module)
        self.policy = policy
        self.check, self.prefetch = policy.check, policy.prefetch  # read in every turn
        self.params: list[ParamState] = []
        self.originals: dict[int, tuple[weakref.ref[Any], str]] = {}  # tensors replaced by sharding
        self.initialized = False
        self.lookahead = policy.lookahead_bytes or 0
        self.coalesce = policy.coalesce_bytes or 0
        self.largest_bytes = 0
        self.full_bytes: list[int] = []
        self.prefetchers: tuple[Callable[[list[int]], list[bool]], ...] = ()
        self.hooks: SavedTensorHooks | None = None
        self.wrap_reader: Callable[[nn.Module], None] = _not_installed
        self.token_grads: dict[torch.device, Tensor] = {}
        self.anchors: dict[torch.device, Tensor] = {}
        # the forward that is running
        self.frames: list[Frame] = []
        self.session: Session | None = None
        self.by_storage: dict[int, Use] = {}
        # backwards that are running, by graph task
        self.passes: dict[int, BackwardPass] = {}
        # gathers in flight, by direction; gradient reductions in flight
        self.in_flight: tuple[dict[int, ParamState], ...] = ({}, {}, {})
        self.reducing: dict[Any, ParamState] = {}
        self.queues: dict[tuple[object, str, torch.dtype], ReduceQueue] = {}
        self.chains: Chains[int] = Chains()
        self.tail: ParamState | None = None
        self.keepers: dict[int, ParamState] = {}  # parameters with a held buffer
        self.visited: list[ParamState] = []  # parameters that a value with a history stands in for
        # switches
        self.sync_gradients = True
        self.is_last_backward = True
        # made at the first forward
        self.buckets: list[Bucket] = []
        # parameters whose .grad holds a part that the replicate axes have not reduced, and whether it is partial over tp
        self.unsynced: dict[int, bool] = {}
        self.flush_task = -1  # the graph task at whose end unsynchronised gradients are reduced

    def add(self, params: Iterable[ParamState]) -> None:
        for param in params:
            param.index, param.visited = len(self.params), self.visited
            self.params.append(param)
            self.full_bytes.append(param.full_bytes)

    def sharded(self) -> list[ParamState]:
        return [param for param in self.params if param.is_sharded]

    def token_grad(self, device: torch.device) -> Tensor:
        token = self.token_grads.get(device)
        if token is None:
            token = self.token_grads[device] = torch.empty(0, device=device)
        return token

    def anchor(self, device: torch.device) -> Tensor:
        """A leaf for nodes that the engine is to run and that hand on no gradient."""
        anchor = self.anchors.get(device)
        if anchor is None:
            anchor = self.anchors[device] = torch.empty(0, device=device, requires_grad=True)
        return anchor


def _not_installed(*_: Any) -> Any:
    raise AssertionError("a root is used before _hooks.install")
