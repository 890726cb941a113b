"""A checkpoint of any topology loads into any other: every rank's slices are those that the full tensors say."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.dist.twin import local_part
from tests.harness import cached_mesh, run_ranks
from torch_gtp import GTPPolicy, WeightPlan, gtp_shard
from torch_gtp.checkpoint import load, save

MESHES = {
    "plain": (1, None, ()),
    "gtp1": (1, (1,), ("gtp_remat",)),
    "plain on 2": (2, None, ()),
    "gtp2": (2, (2,), ("gtp_remat",)),
    "dp2-gtp1": (2, (2, 1), ("dp", "gtp_remat")),
    "tp2-gtp1": (2, (2, 1), ("tp", "gtp_remat")),
    "gtp4": (4, (4,), ("gtp_remat",)),
    "dp2-gtp2": (4, (2, 2), ("dp", "gtp_remat")),
    "gtp2-dp2": (4, (2, 2), ("gtp_remat", "dp")),
    "tp2-gtp2": (4, (2, 2), ("tp", "gtp_remat")),
    "gtp2-tp2": (4, (2, 2), ("gtp_remat", "tp")),
    "tp4-gtp1": (4, (4, 1), ("tp", "gtp_remat")),
    "dp2-gtp1-tp2": (4, (2, 1, 2), ("dp", "gtp_remat", "tp")),
}
# Pairs of topologies in one example of hypothesis, and models in one checkpoint: what ranks say to one another takes
# longer than what they write.
PAIRS, MODELS = 5, 4


@dataclass(frozen=True)
class Sizes:
    """Of a model; small enough that ranks go empty."""

    fan_in: int
    hidden: int
    fan_out: int
    experts: int


@dataclass(frozen=True)
class Spec:
    """A model, and how it is sharded at either end."""

    sizes: Sizes
    source_plan: str
    target_plan: str


@dataclass(frozen=True)
class Pair:
    """From where to where, for several models in one checkpoint."""

    specs: tuple[Spec, ...]
    source: str
    target: str
    trained_before: bool  # the optimizer that is loaded into has a state already
    stateless: int  # index of a parameter that the optimizer has never updated

    @property
    def worlds(self) -> tuple[int, int]:
        return MESHES[self.source][0], MESHES[self.target][0]


class Small(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.up = nn.Linear(sizes.fan_in, sizes.hidden)
        self.down = nn.Linear(sizes.hidden, sizes.fan_out, bias=False)
        self.experts = nn.Parameter(torch.zeros(sizes.experts, 3, 2))


class Several(nn.ModuleList):
    """Models beside a parameter without dims and a buffer, which no topology splits."""

    def __init__(self, models: list[nn.Module]):
        super().__init__(models)
        self.scale = nn.Parameter(torch.zeros(()))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))


def build(sizes: Sizes, mesh_name: str, plan: str) -> nn.Module:
    _, shape, names = MESHES[mesh_name]
    model = Small(sizes)
    if shape is None:
        return model
    mesh = cached_mesh(shape, names)
    if "tp" in names:
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plans = {
        "dim 0 of matrices": lambda fqn, p: WeightPlan(shard_dim=0) if p.ndim > 1 else None,
        "last dim": lambda fqn, p: WeightPlan(shard_dim=p.ndim - 1) if p.ndim > 1 else None,
        "dim 0 of everything": lambda fqn, p: WeightPlan(shard_dim=0) if p.ndim else None,
        "one weight": lambda fqn, p: WeightPlan(shard_dim=0) if fqn == "experts" else WeightPlan(replicate=True),
    }
    return gtp_shard(model, mesh, policy=GTPPolicy(min_shard_numel=1), plan=plans[plan])


PLANS = ("dim 0 of matrices", "last dim", "dim 0 of everything", "one weight")


def optimizer_of(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim <= 1], "lr": lr / 2},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def values(tensor: Tensor, what: int) -> Tensor:
    """A full tensor of numbers that are nowhere else."""
    return (torch.arange(tensor.numel()).view(tensor.shape) + 1000 * what).to(tensor.dtype)


def entries(model: nn.Module, optimizer: torch.optim.Optimizer, stateless: int) -> Iterator[tuple[str, Any, Tensor]]:
    """Everything that is saved, with its full value."""
    for index, (name, param) in enumerate(model.named_parameters()):
        yield name, param, values(param, 3 * index)
        if index != stateless:
            state = optimizer.state[param]
            yield f"exp_avg of {name}", state["exp_avg"], values(param, 3 * index + 1)
            yield f"exp_avg_sq of {name}", state["exp_avg_sq"], values(param, 3 * index + 2)
            yield f"step of {name}", state["step"], torch.tensor(float(index + 7))
    for name, buffer in model.named_buffers():
        yield name, buffer, values(buffer, 999)


def with_state(model: nn.Module, optimizer: torch.optim.Optimizer, stateless: int) -> None:
    for index, param in enumerate(model.parameters()):
        if index != stateless:
            zeros = {key: torch.zeros_like(param, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[param] = {"step": torch.tensor(0.0), **zeros}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor, full: Tensor) -> Tensor:
    return local_part(tensor, full) if isinstance(tensor, DTensor) else full


def build_all(pair: Pair, mesh_name: str, end: str) -> nn.Module:
    return Several([build(spec.sizes, mesh_name, getattr(spec, end)) for spec in pair.specs])


@torch.no_grad()
def save_all(rank: int, world: int, folder: str, pairs: list[tuple[int, Pair]]) -> None:
    for number, pair in pairs:
        model = build_all(pair, pair.source, "source_plan")
        optimizer = optimizer_of(model, 0.25)
        with_state(model, optimizer, pair.stateless)
        for _, tensor, full in entries(model, optimizer, pair.stateless):
            local(tensor).copy_(part(tensor, full))
        save(f"{folder}/{number}", model, optimizer, extra={"number": number})


@torch.no_grad()
def load_all(rank: int, world: int, folder: str, pairs: list[tuple[int, Pair]]) -> None:
    for number, pair in pairs:
        model = build_all(pair, pair.target, "target_plan")
        optimizer = optimizer_of(model, 0.5)
        if pair.trained_before:
            with_state(model, optimizer, -1)
        for name, buffer in model.named_buffers():
            assert not buffer.any(), name
        assert load(f"{folder}/{number}", model, optimizer) == {"number": number}
        for name, tensor, full in entries(model, optimizer, pair.stateless):
            expected = part(tensor, full)
            assert local(tensor).shape == expected.shape, (pair, name)
            assert torch.equal(local(tensor), expected), (pair, name, local(tensor), expected)
        stateless = list(model.parameters())[pair.stateless]
        assert not optimizer.state.get(stateless), pair
        assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]


def on_all(worlds: list[int], function: Callable[..., None], folder: str, pairs: list[tuple[int, Pair]]) -> None:
    for world in sorted(set(worlds)):
        run_ranks(function, world, folder, [pair for pair, own in zip(pairs, worlds, strict=True) if own == world])


_sizes = st.builds(Sizes, *[st.integers(1, 11)] * 3, st.integers(1, 5))
_specs = st.builds(Spec, _sizes, st.sampled_from(PLANS), st.sampled_from(PLANS))
_pairs = st.builds(
    Pair,
    specs=st.tuples(*[_specs] * MODELS),
    source=st.just(""),
    target=st.sampled_from(sorted(MESHES)),
    trained_before=st.booleans(),
    stateless=st.integers(0, 4 * MODELS),
)


@pytest.fixture
def folder() -> Iterator[str]:
    memory = Path("/dev/shm")
    path = tempfile.mkdtemp(prefix="gtp-checkpoints-", dir=memory if memory.is_dir() else None)
    yield path
    shutil.rmtree(path)


def test_a_checkpoint_of_any_topology_loads_into_any_other(folder):
    done: list[Pair] = []
    names = sorted(MESHES)  # saved from in turn, loaded to as drawn

    @settings(phases=[Phase.explicit, Phase.generate])  # shrinking lists of pairs would take minutes
    @given(st.lists(_pairs, min_size=PAIRS, max_size=PAIRS))
    def run(pairs: list[Pair]) -> None:
        numbered = [(n, replace(pair, source=names[n % len(names)])) for n, pair in enumerate(pairs, start=len(done))]
        on_all([pair.worlds[0] for _, pair in numbered], save_all, folder, numbered)
        on_all([pair.worlds[1] for _, pair in numbered], load_all, folder, numbered)
        done.extend(pair for _, pair in numbered)

    run()
    assert len(done) * MODELS >= 200
    assert {pair.source for pair in done} == {pair.target for pair in done} == set(names)
