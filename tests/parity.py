"""One training run, described by a `Setup`, on ranks and in the oracle, and the comparison of the two."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from tests.comm_double import Collective, CommDouble
from tests.dist.twin import use_the_general_path
from tests.harness import cached_mesh, current_double, run_ranks, state_leaks
from tests.models import CASES, Case
from tests.module_trees import Tree, tree_case
from tests.reference import ReferenceRun, assert_matches, gather_full_dict, reference_step, relative_error

MESHES: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "gtp1": ((1,), ("gtp_remat",)),
        "gtp2": ((2,), ("gtp_remat",)),
        "gtp4": ((4,), ("gtp_remat",)),
        "dp2-gtp2": ((2, 2), ("dp", "gtp_remat")),
        "tp2-gtp2": ((2, 2), ("tp", "gtp_remat")),
        "gtp2-tp2": ((2, 2), ("gtp_remat", "tp")),
    }
)

PLANS = ("by size", "along dim 1", "every dim 0")
INTERLUDES = ("nothing", "evaluation", "a forward without backward", "an exception in forward")


@dataclass(frozen=True)
class Setup:
    """What to train, where and how.

    Args:
        model: A name in `models.CASES`, or a tree (see `module_trees`).
        mesh: A name in `MESHES`.
        reduction: Of gradients over the data coordinates: `"mean"` or `"sum"`.
        microbatches: Backwards per optimizer step.
        sync_last_only: Reduce over the replicate axes in the last of them only.
        same_data: Every coordinate trains on the same data.
        double: In fp64, where rounding is far below any tolerance, whatever the model does to it.
        together: All forwards of a step come before its backwards.
        interlude: What happens before each step; one of `INTERLUDES`.
        policy: Further fields of `GTPPolicy`, as pairs.
        plan: Which parameters are sharded, and how; one of `PLANS`.
        one_node: Plain Linears compute in one autograd node; `False`: on the path of all other modules.
    """

    model: str | Tree
    mesh: str = "gtp2"
    reduction: str = "mean"
    microbatches: int = 1
    sync_last_only: bool = False
    same_data: bool = False
    double: bool = False
    together: bool = False
    interlude: str = "nothing"
    steps: int = 3
    policy: tuple[tuple[str, Any], ...] = ()
    plan: str = "by size"
    one_node: bool = True

    @property
    def case(self) -> Case:
        return CASES[self.model] if isinstance(self.model, str) else tree_case(self.model)

    @property
    def world(self) -> int:
        return math.prod(MESHES[self.mesh][0])

    @property
    def coordinates(self) -> int:
        """How many ranks or groups of ranks see data of their own."""
        sizes, names = MESHES[self.mesh]
        return math.prod(size for size, name in zip(sizes, names, strict=True) if name != "tp")

    def batch(self, step: int, micro: int, coordinate: int) -> Any:
        # Even or odd is the same on all coordinates: models that branch on data take it from there
        own = 0 if self.same_data else 2 * coordinate
        batch = self.case.batch(1000 * step + 100 * micro + own + (step + micro) % 2)
        if not self.double:
            return batch
        return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in batch)

    def build(self) -> nn.Module:
        model = self.case.build()
        return model.double() if self.double else model


@dataclass(frozen=True)
class Outcome:
    """One rank's run: full `grads` and `params` on rank 0 only; `calls` are the collectives of each step."""

    coordinate: int
    losses: list[list[float]]
    grads: list[dict[str, Tensor]]
    params: dict[str, Tensor]
    calls: list[list[Collective]]


def adamw(params: Any) -> torch.optim.Optimizer:
    # A step is at most lr / eps times a gradient. With the usual eps of 1e-8, gradients that are zero but for
    # rounding (the bias of attention keys) become full steps, and no tolerance on parameters means anything.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def make_sharded(setup: Setup, mesh: DeviceMesh) -> nn.Module:
    from torch_gtp import GTPPolicy, WeightPlan, gtp_shard

    model, case = setup.build(), setup.case
    if "tp" in mesh.mesh_dim_names and case.tp_plan:
        parallelize_module(model, mesh["tp"], case.plan())
    options = {"min_shard_numel": 1, "reduction": setup.reduction, **dict(setup.policy)}
    plans = {
        "by size": None,
        "along dim 1": lambda fqn, param: WeightPlan(shard_dim=1) if param.ndim > 1 else None,
        "every dim 0": lambda fqn, param: WeightPlan(shard_dim=0) if param.ndim > 0 else None,
    }
    model = gtp_shard(model, mesh, policy=GTPPolicy(**options), plan=plans[setup.plan])
    if not setup.one_node:
        use_the_general_path(model)
    return model


def data_coordinate(mesh: DeviceMesh) -> int:
    index = 0
    for name, size, mine in zip(mesh.mesh_dim_names, mesh.shape, mesh.get_coordinate(), strict=True):
        index = index if name == "tp" else index * size + mine
    return index


def train(rank: int, world: int, setup: Setup) -> Outcome:
    """The sharded run, on one rank."""
    mesh = cached_mesh(*MESHES[setup.mesh])
    coordinate = data_coordinate(mesh)
    model = make_sharded(setup, mesh)
    optimizer = adamw(model.parameters())
    double = current_double()
    losses, grads, calls = [], [], []
    for step in range(setup.steps):
        _interlude(setup, model, setup.batch(step, 0, coordinate))
        with double.section() as issued:
            losses.append(_step(setup, model, step, coordinate, double))
        calls.append(issued)
        assert double.live_bytes() == 0, f"step {step}: {double.live_bytes()} bytes of gathered weights are alive"
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        grads.append(gather_full_dict(found))
        optimizer.step()
        optimizer.zero_grad()
    params = gather_full_dict(dict(model.named_parameters()))
    if rank != 0:
        grads, params = [], {}
    return Outcome(coordinate, losses, grads, params, calls)


def _step(setup: Setup, model: nn.Module, step: int, coordinate: int, double: CommDouble) -> list[float]:
    losses: list[Tensor] = []

    def run(micro: int, *, forward: bool, backward: bool) -> None:
        if setup.sync_last_only:
            model.set_requires_gradient_sync(micro == setup.microbatches - 1)
        if forward:
            losses.append(setup.case.loss(model, setup.batch(step, micro, coordinate)))
            assert not (leaks := state_leaks(double)), f"forward {micro} of step {step}: {leaks}"
        if backward:
            losses[micro].backward()
            assert not (leaks := state_leaks(double)), f"backward {micro} of step {step}: {leaks}"

    phases = [(True, False), (False, True)] if setup.together else [(True, True)]
    for forward, backward in phases:
        for micro in range(setup.microbatches):
            run(micro, forward=forward, backward=backward)
    return [loss.item() for loss in losses]


def _interlude(setup: Setup, model: nn.Module, batch: Any) -> None:
    """Something between two steps that must not change what training does."""
    if setup.interlude == "evaluation":
        with torch.no_grad():
            setup.case.loss(model, batch)
    elif setup.interlude == "a forward without backward":
        setup.case.loss(model, batch)
    elif setup.interlude == "an exception in forward":
        *_, last = (module for module in model.modules() if not list(module.children()))
        with contextlib.suppress(InterruptedError), last.register_forward_pre_hook(_interrupt):
            setup.case.loss(model, batch)


def _interrupt(*_: object) -> None:
    raise InterruptedError


@functools.lru_cache(maxsize=16)
def expected_run(setup: Setup) -> ReferenceRun:
    batches = [
        [[setup.batch(step, micro, c) for c in range(setup.coordinates)] for micro in range(setup.microbatches)]
        for step in range(setup.steps)
    ]
    return reference_step(setup.build, batches, adamw, setup.case.loss, reduction=setup.reduction)


def check_parity(setup: Setup, rtol: float) -> list[Outcome]:
    """Train on ranks and compare losses, every step's gradients and the final parameters with the oracle."""
    outcomes = run_ranks(train, setup.world, setup)
    expected = expected_run(setup)
    for outcome in outcomes:
        theirs = [[micro[outcome.coordinate] for micro in step] for step in expected.losses]
        error = relative_error(*(torch.tensor(x, dtype=torch.float64) for x in (outcome.losses, theirs)))
        assert error <= rtol, f"losses of coordinate {outcome.coordinate}: relative error {error:.2e}"
    for step, (ours, theirs) in enumerate(zip(outcomes[0].grads, expected.grads, strict=True)):
        assert_matches(ours, theirs, rtol, f"gradients of step {step}")
    assert_matches(outcomes[0].params, expected.params, rtol, f"parameters after {setup.steps} steps")
    return outcomes


def counts(outcome: Outcome) -> list[Counter[str]]:
    """How often each collective was issued, per step."""
    return [Counter(call.op for call in calls) for calls in outcome.calls]
