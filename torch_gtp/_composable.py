"""``gtp_shard``: the public gesture, and every check of what a user passes."""

from __future__ import annotations

import contextlib
import functools
import weakref
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _access, _collectives, _freshness, _hooks
from ._dtensor_layout import WeightLayout, axis_size, make_layout, replicate_axes
from ._module import GTPModule
from ._policy import GTP_AXIS, TP_AXIS, GTPPolicy, Plan, PlanReader, WeightPlan, small_numel_limit
from ._state import ModuleState, Owner, ParamState, RootState
from ._tp_styles import take_over_grad_all_reduce

M = TypeVar("M", bound=nn.Module)

_collectives.register_anomaly_rule()


def gtp_shard(module: M, mesh: DeviceMesh, *, policy: GTPPolicy | None = None, plan: Plan | None = None) -> M:
    """Shard a module's weights over the ``gtp_remat`` axis of ``mesh``, in place.

    Each large weight (see ``GTPPolicy.min_shard_numel``) is stored as ``1 / (tp x gtp_remat)`` of itself, gathered just
    before each use in forward and backward, and its gradient is reduce-scattered. Small parameters stay whole. Every
    parameter becomes a DTensor on ``mesh``, so optimizers and distributed checkpoints work unchanged. Parameters that
    tensor parallelism has split already (``parallelize_module`` on ``mesh["tp"]``) are split further.

    Args:
        module: any module. Its parameters may be on the meta device (see ``materialize_meta``). Call before building the
            optimizer. Called on submodules first and then on their parent, all become one root.
        mesh: has an axis ``gtp_remat``; ``tp`` is the tensor-parallel axis; gradients are reduced over every other axis.
        policy: see ``GTPPolicy``.
        plan: per-parameter exceptions: a mapping from names (relative to ``module``, or glob patterns) to ``WeightPlan``,
            or a callable ``(name, parameter) -> WeightPlan | None``.

    Returns:
        The same module, now an instance of ``GTPModule``.

    Raises:
        TypeError, ValueError: an argument or a parameter cannot be sharded as asked; the message names the parameter.

    Example::

        mesh = build_mesh("cuda", tp=2, num_weight_shards=8)
        parallelize_module(model, mesh["tp"], tp_plan)
        gtp_shard(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
    """
    policy = GTPPolicy() if policy is None else policy
    _check_arguments(module, mesh, policy)
    state = _access.state_of(module)
    again = state is not None and state.casts is not None
    if again and (state.casts != policy or state.mesh != mesh):  # type: ignore[union-attr]
        raise ValueError(
            f"gtp_shard({type(module).__name__}): called twice on the same module with other arguments; call it once"
        )
    found = _collect(module, mesh, policy, PlanReader(plan))
    if again and not found:  # nothing was added since
        return module
    root = RootState(module, policy)
    _replace(module, root, found, policy)
    state = _access.wrap(module, root, (), GTPModule)
    state.casts, state.mesh = policy, mesh
    _take_over(module, root)
    _finish_root(root)
    return module


# ---- what is there


class _Found:
    """One parameter to shard: its names, the modules that have it, and its layout."""

    def __init__(self, fqn: str, tensor: nn.Parameter):
        self.fqn = fqn
        self.tensor = tensor
        self.owners: list[tuple[nn.Module, str]] = []
        self.layout: WeightLayout | None = None
        self.partial_over_tp = False


def _check_arguments(module: Any, mesh: Any, policy: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"gtp_shard: expected an nn.Module, got {type(module).__name__}")
    if not isinstance(policy, GTPPolicy):
        raise TypeError(f"gtp_shard(policy=...): expected a GTPPolicy, got {type(policy).__name__}")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward in (
        nn.ModuleList.forward,
        nn.ModuleDict.forward,
    ):
        raise ValueError(
            f"gtp_shard({type(module).__name__}): a container without forward; call gtp_shard on its parent or its elements"
        )
    _check_mesh(mesh, "gtp_shard")


def _check_mesh(mesh: Any, where: str) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"{where}: expected a DeviceMesh, got {type(mesh).__name__}")
    names = mesh.mesh_dim_names
    if names is None or GTP_AXIS not in names:
        raise ValueError(
            f"{where}: the mesh has axes {names}, none is named {GTP_AXIS!r}; name the gather axis so, or use "
            "torch_gtp.build_mesh"
        )


def _collect(module: nn.Module, mesh: DeviceMesh, policy: GTPPolicy, reader: PlanReader) -> dict[int, _Found]:
    """Every parameter below ``module`` that is not sharded yet, with its layout. Tied ones once."""
    found: dict[int, _Found] = {}
    partial = take_over_grad_all_reduce(module)
    for prefix, child in module.named_modules():
        state = _access.state_of(child)
        for name, tensor in child._parameters.items():
            if tensor is None or (state is not None and name in state.entries):
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            if isinstance(tensor, nn.parameter.UninitializedParameter):
                raise ValueError(f"{fqn}: an uninitialised lazy parameter; run a forward once before gtp_shard")
            item = found.setdefault(id(tensor), _Found(fqn, tensor))
            item.owners.append((child, name))
            item.partial_over_tp |= id(tensor) in partial
            _check_owner(fqn, child)
    largest = max((item.tensor.numel() for item in found.values()), default=0)
    limit = small_numel_limit(policy, largest)
    left_alone = [_decide(item, mesh, reader, limit) for item in found.values()]
    if unmatched := reader.unmatched():
        raise ValueError(
            f"gtp_shard(plan=...): {unmatched} match no parameter; the parameters are {[item.fqn for item in found.values()]}"
        )
    nested = any(
        state is not None and any(entry.is_sharded for entry in state.entries.values())
        for state in map(_access.state_of, module.modules())
    )
    if axis_size(mesh, GTP_AXIS) > 1 and not nested and all(left_alone):
        reasons = "\n  ".join(reason for reason in left_alone if reason) or "the module has no parameters"
        raise ValueError(f"gtp_shard({type(module).__name__}): no weight would be sharded:\n  {reasons}")
    return found


def _check_owner(fqn: str, owner: nn.Module) -> None:
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
        if owner.sparse:
            raise ValueError(
                f"{fqn}: sparse gradients cannot be reduce-scattered; build the embedding with sparse=False"
            )
        if owner.max_norm is not None:
            raise ValueError(
                f"{fqn}: max_norm rewrites rows of the weight in forward, which would change the gathered copy and not the "
                "shard; renormalise the parameter after the optimizer step instead"
            )


def _decide(item: _Found, default_mesh: DeviceMesh, reader: PlanReader, limit: int) -> str | None:
    """Give ``item`` its layout. Returns why it stays whole, or ``None`` if it is sharded."""
    fqn, tensor = item.fqn, item.tensor
    plan = reader.of(fqn, tensor)
    mesh = plan.mesh if plan.mesh is not None else default_mesh
    if plan.mesh is not None:
        _check_mesh(mesh, f"{fqn}: WeightPlan(mesh=...)")
    tp_spec = _tensor_parallel_spec(fqn, tensor, mesh)
    _check_tensor(fqn, tensor, mesh)
    tp_shape = tensor._local_tensor.shape if isinstance(tensor, DTensor) else tensor.shape
    shard_dim, reason = _choose_dim(fqn, _largest_slice(tensor, mesh), plan, limit)
    if shard_dim is not None and axis_size(mesh, GTP_AXIS) == 1:
        shard_dim = None  # nothing to gather
    item.layout = make_layout(mesh, tensor.shape, tensor.dtype, shard_dim, tp_spec)
    if item.layout.tp_shape != tp_shape:
        raise ValueError(
            f"{fqn}: its tensor-parallel shard has shape {tuple(tp_shape)}, but {item.layout.tp_shape} follows from "
            f"{tensor.shape} and {tp_spec}; split it by torch.chunk's rule"
        )
    return reason


def _largest_slice(tensor: nn.Parameter, mesh: DeviceMesh) -> torch.Size:
    """The shape that decides whether a weight is sharded: the same on all ranks, also where ``tp`` splits it unevenly."""
    shape = list(tensor.shape)
    if isinstance(tensor, DTensor) and isinstance(placement := tensor.placements[0], Shard):
        shape[placement.dim] = -(-shape[placement.dim] // axis_size(mesh, TP_AXIS))
    return torch.Size(shape)


def _choose_dim(fqn: str, shape: torch.Size, plan: WeightPlan, limit: int) -> tuple[int | None, str | None]:
    if plan.replicate:
        return None, f"{fqn}: the plan says replicate"
    if plan.forces_shard:
        dim = plan.shard_dim or 0
        if not -len(shape) <= dim < len(shape):
            raise ValueError(
                f"{fqn}: WeightPlan(shard_dim={dim}) on a tensor of shape {tuple(shape)}; name one of its dims"
            )
        return dim % len(shape), None
    if len(shape) < 2:
        return None, f"{fqn}: {len(shape)}-D (only tensors of two and more dims are sharded unless the plan says so)"
    if shape.numel() < limit:
        return None, f"{fqn}: {shape.numel()} elements, fewer than min_shard_numel={limit}"
    return 0, None


def _tensor_parallel_spec(fqn: str, tensor: nn.Parameter, mesh: DeviceMesh) -> Any:
    """The spec of a parameter that tensor parallelism has made a DTensor; ``None`` for a plain one."""
    if not isinstance(tensor, DTensor):
        return None
    other = tensor.device_mesh
    expected = mesh[TP_AXIS] if TP_AXIS in (mesh.mesh_dim_names or ()) else None
    if expected is None or other.ndim != 1 or not torch.equal(other.mesh, expected.mesh):
        raise ValueError(
            f"{fqn}: the parameter is already a DTensor with {tensor.placements} on {other}; gtp_shard takes plain parameters "
            f"and those parallelized over the axis {TP_AXIS!r} of its own mesh {mesh}"
        )
    placement = tensor.placements[0]
    if not isinstance(placement, Replicate) and type(placement) is not Shard:
        raise ValueError(
            f"{fqn}: tensor-parallel placement {placement} is not supported; use Shard or Replicate (for a packed projection, "
            "split it into one weight per part)"
        )
    return tensor._spec


def _check_tensor(fqn: str, tensor: nn.Parameter, mesh: DeviceMesh) -> None:
    if not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor):
        raise TypeError(
            f"{fqn}: its data is a {type(tensor.data).__name__}, a tensor subclass with inner tensors of its own; convert it to "
            "a plain tensor first"
        )
    if tensor.is_complex():
        raise ValueError(
            f"{fqn}: complex dtype {tensor.dtype}; keep it out of the module or store real and imaginary parts"
        )
    if tensor.is_quantized or tensor.layout is not torch.strided:
        raise ValueError(f"{fqn}: quantized or sparse storage cannot be sharded; dequantize or densify it first")
    if tensor.device.type not in (mesh.device_type, "meta"):
        raise ValueError(
            f"{fqn}: the parameter is on {tensor.device}, the mesh on {mesh.device_type!r}; move the module to the mesh's "
            "device type first"
        )
    if tensor.grad is not None:
        raise ValueError(f"{fqn}: the parameter has a gradient already; call zero_grad() before gtp_shard")


# ---- what changes


def _replace(module: nn.Module, root: RootState, found: dict[int, _Found], policy: GTPPolicy) -> None:
    """Put DTensor parameters in place of ``found`` and wrap the modules that own them."""
    if _nothing_to_do(found.values(), policy):
        return
    _check_stale_references(module, found)
    for item in found.values():
        assert item.layout is not None
        param = ParamState(item.fqn, _stored_parameter(item), item.layout, policy)
        param.partial_over_tp = item.partial_over_tp
        param.origin = item.tensor.__dict__.setdefault("_gtp_origin", object())
        with contextlib.suppress(TypeError):
            root.originals[id(item.tensor)] = (weakref.ref(item.tensor), item.fqn)
        for owner, name in item.owners:
            owner._parameters[name] = param.param
            _access.wrap(owner, root, (name,)).add(name, param)
            param.owners.append(Owner.of(owner, name))


def _nothing_to_do(found: Any, policy: GTPPolicy) -> bool:
    """No axis to gather or reduce over, no tensor parallelism to complete, nothing to cast: the module stays as it is."""
    return policy.mp.param_dtype is None and all(
        item.layout.tp_spec is None
        and not item.partial_over_tp
        and all(axis_size(item.layout.mesh, axis) == 1 for axis in (GTP_AXIS, *replicate_axes(item.layout.mesh)))
        for item in found
    )


@torch.no_grad()
def _stored_parameter(item: _Found) -> nn.Parameter:
    layout, tensor = item.layout, item.tensor
    assert layout is not None
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()
    if layout.shard_dim is not None:
        # A copy of its own: a view would keep the full weight alive.
        local = layout.slice_shard(local).clone(memory_format=torch.contiguous_format)
    stored = nn.Parameter(layout.dtensor(local.detach().contiguous()), requires_grad=tensor.requires_grad)
    stored.__dict__.update((key, value) for key, value in tensor.__dict__.items() if not key.startswith("_"))
    for hook in (tensor._backward_hooks or {}).values():
        stored.register_hook(hook)
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        stored.register_post_accumulate_grad_hook(hook)
    return stored


def _check_stale_references(module: nn.Module, found: dict[int, _Found]) -> None:
    """A second reference to a parameter, outside ``_parameters``, would go on using the unsharded tensor."""
    for prefix, child in module.named_modules():
        for name, value in child.__dict__.items():
            if name.startswith("_") and (name in _MODULE_INTERNALS or isinstance(child, nn.RNNBase)):
                continue
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else (value,)
            for tensor in held:
                if isinstance(tensor, Tensor) and id(tensor) in found:
                    raise ValueError(
                        f"{found[id(tensor)].fqn}: also held by the attribute {name!r} of {prefix or 'the module'} "
                        f"({type(child).__name__}), which would keep using the unsharded tensor; remove that reference, or "
                        "read the parameter from its module in forward"
                    )


_MODULE_INTERNALS = frozenset(
    {"_parameters", "_buffers", "_modules", "_gtp", "_backward_hooks", "_forward_hooks", "_forward_pre_hooks"}
)


def _take_over(module: nn.Module, root: RootState) -> None:
    """Make every parameter below ``module``, those of roots sharded before included, a parameter of ``root``."""
    owned: list[tuple[str, nn.Module, ModuleState, str, ParamState]] = []
    first_of: dict[object, tuple[str, ParamState]] = {}
    for prefix, child in module.named_modules():
        state = _access.state_of(child)
        if state is None:
            continue
        if state.root is not root and (state.root.frames or state.root.passes):
            raise ValueError(f"gtp_shard({type(module).__name__}): called while a forward or backward of {prefix} runs")
        for name, param in state.entries.items():
            fqn = f"{prefix}.{name}" if prefix else name
            first_fqn, first = first_of.setdefault(param.origin, (fqn, param))
            if first is not param and not first.layout.matches(cast(DTensor, param.param)):
                raise ValueError(
                    f"{first_fqn} and {fqn} were one tensor and are now sharded differently; shard their common parent in "
                    "one call, or give both the same plan"
                )
            owned.append((fqn, child, state, name, param))
    # Checked; from here on nothing is refused.
    for fqn, child, state, name, param in owned:
        first_fqn, first = first_of[param.origin]
        if first is not param:  # one tensor, before its two owners were sharded one by one
            child._parameters[name] = first.param
            state.add(name, first)
            first.owners.append(Owner.of(child, name))
        elif fqn == first_fqn:
            param.rename(fqn)
    for child in module.modules():
        state = _access.state_of(child)
        if state is not None and state.root is not root:
            root.originals.update(state.root.originals)
            state.root = root
    root.add(param for _, param in first_of.values())


def _finish_root(root: RootState) -> None:
    _hooks.install(root)
    reference = weakref.ref(root)

    def wrap_reader(parent: nn.Module) -> None:
        state = _access.state_of(parent)
        if state is None:
            state = _access.wrap(parent, cast(RootState, reference()), ())
        state.saves_weights = True

    root.wrap_reader = wrap_reader

    _optimizer_watch().roots.add(root)


class _OptimizerWatch:
    """The hook before every optimizer step of the process, for the roots that live.

    One hook for all, never removed: torch walks its dict of hooks, and a root may die during the walk.
    """

    def __init__(self) -> None:
        self.roots: weakref.WeakSet[RootState] = weakref.WeakSet()

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for root in list(self.roots):
            _freshness.before_optimizer_step(root, optimizer)


@functools.lru_cache(maxsize=1)
def _optimizer_watch() -> _OptimizerWatch:
    watch = _OptimizerWatch()
    register_optimizer_step_pre_hook(watch)
    return watch
