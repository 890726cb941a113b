"""``GTPModule``: the verbs of a sharded module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import _access, _collectives, _hooks, _runtime
from ._chain import Direction
from ._dtensor_layout import make_dtensor, make_spec
from ._state import GatherState, ModuleState, ParamState, RootState


class UnshardHandle:
    """Gathers started by ``GTPModule.unshard(async_op=True)``."""

    def __init__(self, root: RootState, params: list[ParamState]):
        self._root = root
        self._params = params

    def wait(self) -> None:
        """Make the weights readable and keep them until ``reshard()`` or the next optimizer step or load."""
        for param in self._params:
            assert param.gathers is not None
            # A forward in between may have taken the gather for itself.
            if param.gathers[Direction.FORWARD].state is GatherState.GATHERING:
                _runtime.wait_gather(self._root, param, Direction.FORWARD)
                stored = param.gathers[Direction.FORWARD].stored
                buffer = _runtime.release(param, Direction.FORWARD)
                assert buffer is not None and stored is not None
                _runtime.hold(self._root, param, buffer, stored, explicit=True)
        self._params = []


class GTPModule:
    """Mixed into the class of a module that ``gtp_shard`` was called on. The verbs are those of ``FSDPModule``."""

    def unshard(self, *, async_op: bool = False) -> UnshardHandle | None:
        """Gather every weight of this module now, and keep it over forwards and backwards.

        Ends with ``reshard()``, an optimizer step on the weight, or a load. All ranks of a ``gtp_remat`` group call it.

        Args:
            async_op: return a handle at once; its ``wait()`` completes the gathers.
        """
        root, params = _root_and_params(self)
        if root.frames:
            raise ValueError(f"{type(self).__name__}.unshard(): called inside a forward; call it before")
        wanted = [
            param
            for param in params
            if param.gathers is not None
            and _runtime.held_full(root, param, param.param) is None
            and param.gathers[Direction.FORWARD].state is GatherState.SHARDED
        ]
        for param in wanted:
            _runtime.issue_gather(root, param, Direction.FORWARD, param.param)
        handle = UnshardHandle(root, wanted)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Let go of every gathered weight of this module that was kept."""
        root, params = _root_and_params(self)
        for param in params:
            if param.held is not None:
                _runtime.drop_held(root, param)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """Whether backwards reduce over the replicate axes (and replicated parameters over any axis).

        ``False`` for all but the last microbatch of an accumulation. Sharded weights are reduced over ``gtp_remat``
        in every backward; their sum and the replicated parameters' wait for the next synchronising backward, which
        reduces all of it, parameters that it does not reach itself included. Applies to the whole root.
        """
        _root_and_params(self)[0].sync_gradients = _checked_bool("set_requires_gradient_sync", requires_gradient_sync)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """``False`` while more backwards of the same step follow (pipeline microbatches).

        Until the last one, weights kept by ``reshard_after_forward=False`` stay gathered, and gradients of earlier
        unsynchronised backwards that were not reached are not reduced yet. Applies to the whole root.
        """
        _root_and_params(self)[0].is_last_backward = _checked_bool("set_is_last_backward", is_last_backward)

    def reset_iter_state(self) -> None:
        """Forget everything about a step that was broken off: gathers in flight, kept weights, open calls, recorded orders.

        After an exception on every rank the next forward cleans up by itself; call this to free memory before it. After one
        on some ranks only (or after a disagreement about which weight comes next), all ranks must call it.
        """
        root, _ = _root_and_params(self)
        root.frames.clear()
        root.by_storage.clear()
        if root.session is not None:
            root.session.close()
            root.session = None
        for param in root.params:
            param.use = None
            param.drop_pending()
        _hooks.abandon_backwards(root)
        for direction in Direction:
            _runtime.drain(root, direction)
            for param in root.sharded():
                _runtime.release_if_ready(param, direction)
        _runtime.drop_all_held(root, explicit=True)
        root.chains.clear()  # ranks may have recorded different orders in what was broken off
        root.sync_gradients = root.is_last_backward = True

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside: every parameter of this module is its full tensor (its tensor-parallel slice, as a DTensor on ``tp``).

        Parameters, state dict and attributes all show plain full tensors, calls need no collective (``generate`` with
        another length on each rank is safe), and what is written into them (the same on every rank) is written back to
        the shards at the end. No gradient flows to a parameter inside, and no optimizer may step.

        Example::

            with model.gathered():
                torch.nn.init.normal_(model.head.weight, std=0.02)
        """
        root, params = _root_and_params(self)
        if root.frames:
            raise ValueError(f"{type(self).__name__}.gathered(): entered inside a forward; enter it outside")
        mine = [param for param in params if param.gathered is None]  # an enclosing block keeps what it gathered
        swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        try:
            for param in mine:
                param.gathered = full = nn.Parameter(_full_value(root, param), requires_grad=False)
                for owner in param.owners:
                    module = owner.module()
                    if module is not None and (stored := module._parameters.get(owner.name)) is not None:
                        swapped.append((module, owner.name, stored))
                        module._parameters[owner.name] = full
            yield
        finally:
            for module, name, stored in swapped:
                param = cast(ModuleState, _access.state_of(module)).entries[name]
                standing = module._parameters.get(name)
                if standing is not None and standing is param.gathered:
                    _write_back(param, standing)
                    module._parameters[name] = stored
            for param in mine:
                param.gathered = None
            _runtime.drop_all_held(root, explicit=True)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        raise TypeError(
            "DistributedDataParallel cannot wrap a module under gtp_shard: its parameters are DTensors. Data parallelism is "
            "part of the mesh here: call gtp_shard(model, mesh) with a mesh that has a replicate axis, for example "
            "build_mesh(device_type, num_weight_shards=...) (axis 'dp'), and use the model without a wrapper"
        )


# ---- helpers of the verbs


def _root_and_params(module: Any) -> tuple[RootState, list[ParamState]]:
    state = cast(ModuleState, _access.state_of(module))
    params: dict[int, ParamState] = {}
    for child in module.modules():
        child_state = _access.state_of(child)
        if child_state is not None:
            params.update((param.index, param) for param in child_state.entries.values())
    return state.root, list(params.values())


def _checked_bool(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{where}: expected a bool, got {value!r}")
    return value


@torch.no_grad()
def _full_value(root: RootState, param: ParamState) -> Tensor:
    layout = param.layout
    if layout.shard_dim is None:
        full = param.shard().clone()
    else:
        # In the stored dtype, not in the compute dtype: what is written back must be what was there.
        shard = param.shard()
        padded = shard.new_zeros(layout.chunk_shape)
        padded.narrow(layout.shard_dim, 0, shard.shape[layout.shard_dim]).copy_(shard)
        buffer = shard.new_empty(layout.gathered_shape)
        assert param.group is not None
        _collectives.all_gather(buffer, padded, param.group).wait()
        full = layout.full_from_chunks(buffer)
    if layout.tp_spec is None:
        return full
    spec = make_spec(layout.tp_spec.mesh, layout.tp_spec.placements, layout.shape, full.dtype)
    return make_dtensor(full, spec)


@torch.no_grad()
def _write_back(param: ParamState, full: Tensor) -> None:
    local = full._local_tensor if isinstance(full, DTensor) else full.detach()
    param.shard().copy_(param.layout.slice_shard(local))
