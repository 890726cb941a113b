"""Attribute access: a property per parameter on a dynamic subclass of the module's class.

Reading ``module.weight`` gives the materialized weight inside a call of the model and the stored DTensor outside.
Everything else (setting, deleting, registering, state dicts, ``parametrize``) goes through ``nn.Module`` as ever.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn, cast

from torch import nn

from . import _freshness, _hooks, _linear
from ._policy import cast_floats
from ._state import ModuleState, RootState

_COPY_ADVICE = (
    "a module under gtp_shard cannot be copied or pickled: its shards belong to process groups and its gathers to one "
    "root. Build a second model, call gtp_shard on it and load_state_dict(first.state_dict()) (no communication if the "
    "mesh is the same), or copy before gtp_shard; save with torch.distributed.checkpoint"
)


class ParameterView:
    """The property of one parameter."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        values = module.__dict__
        try:
            stored = values["_parameters"][self.name]
        except KeyError:
            if self.name in values:  # deleted as a parameter and set as something else
                return values[self.name]
            raise AttributeError(self.name) from None  # nn.Module.__getattr__ words the final error
        state: ModuleState | None = values.get("_gtp")
        if stored is None or state is None:
            return stored
        param = state.entries.get(self.name)
        if param is None:
            return stored
        try:
            return _hooks.read_parameter(state, param, stored)
        except AttributeError as error:
            # Python would go on to nn.Module.__getattr__, which answers with the stored DTensor.
            raise RuntimeError(f"{param.fqn}: materializing the parameter failed: {error}") from error

    def __set__(self, module: nn.Module, value: Any) -> None:
        # nn.Module.__setattr__ has taken everything that is or replaces a parameter.
        module.__dict__[self.name] = value

    def __delete__(self, module: nn.Module) -> None:
        try:
            del module.__dict__[self.name]
        except KeyError:
            raise AttributeError(self.name) from None


class _FlatWeights:
    """``nn.RNNBase`` keeps a list of its weights beside the attributes; this makes the list a view of them."""

    def __get__(self, module: nn.RNNBase | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        return [getattr(module, name, None) for name in module.__dict__["_flat_weights_names"]]

    def __set__(self, module: nn.RNNBase, value: Any) -> None:
        """The attributes are the truth."""


def state_of(module: nn.Module) -> ModuleState | None:
    return module.__dict__.get("_gtp")


def wrap(module: nn.Module, root: RootState, names: tuple[str, ...], mixin: type | None = None) -> ModuleState:
    """Make ``module`` an instance of the wrapped class of its own class, and give it a state."""
    state = state_of(module)
    if state is None:
        state = module.__dict__["_gtp"] = ModuleState(root)
    state.root = root
    mine = vars(type(module))  # not inherited: an outer fully_shard may have made a subclass of ours
    base: type[nn.Module] = mine.get("_gtp_base", type(module))
    mixin = mixin if mixin is not None else mine.get("_gtp_mixin")
    module.__class__ = wrapped_class(cast(Any, base), tuple(sorted({*names, *mine.get("_gtp_names", ())})), mixin)
    if isinstance(module, nn.RNNBase):
        module.__dict__.pop("_flat_weights", None)
    return state


@functools.cache
def wrapped_class(base: type[nn.Module], names: tuple[str, ...], mixin: type | None) -> type[nn.Module]:
    """The subclass of ``base`` with a property per name. Equal arguments give the same class."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        if state is None:  # made from the class of a wrapped module (a slice of an nn.Sequential)
            return base.__call__(self, *args, **kwargs)
        policy = state.casts
        if policy is not None and policy.mp.cast_forward_inputs and policy.mp.param_dtype is not None:
            args, kwargs = cast_floats((args, kwargs), policy.mp.param_dtype)  # type: ignore[misc]
        frame = _hooks.open_frame(state)
        failed = True
        try:
            output = base.__call__(self, *args, **kwargs)
            failed = False
        finally:
            _hooks.close_frame(frame, failed=failed)
        return cast_floats(output, policy.mp.output_dtype) if policy is not None else output

    def load_from_state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        state = state_of(self)
        if state is not None:
            _freshness.forget_held(state.root)
        base._load_from_state_dict(self, *args, **kwargs)  # type: ignore[arg-type]

    def refuse_copy(self: nn.Module, *_: Any) -> NoReturn:
        raise TypeError(f"{base.__name__}: {_COPY_ADVICE}")

    members: dict[str, Any] = {name: ParameterView(name) for name in names}
    if _linear.applies_to(base):
        members["forward"] = _linear.forward
    if issubclass(base, nn.RNNBase):
        members["_flat_weights"] = _FlatWeights()
    members.update(
        __call__=call,
        __deepcopy__=refuse_copy,
        __reduce_ex__=refuse_copy,
        _load_from_state_dict=load_from_state_dict,
        __module__=base.__module__,
        __qualname__=base.__qualname__,
        __doc__=base.__doc__,
        _gtp_base=base,
        _gtp_names=names,
        _gtp_mixin=mixin,
    )
    # The name stays, so that repr and everything that looks a class up by name see the module they know.
    return type(base.__name__, (mixin, base) if mixin is not None else (base,), members)
