"""Random programs: whatever a user does in whatever order, the sharded model does what the plain model does.

Both ranks work on the same data, so after every instruction, synchronised or not, gradients are those of the plain model.
A program is a list of plain tuples, so that a failing one can be pasted into a test.
"""

from __future__ import annotations

import contextlib

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from tests.dist.twin import (
    MESHES,
    REORDERED,
    Boom,
    RaisesInBackward,
    assert_grads,
    assert_local,
    gather_meter,
    local_part,
    randn,
    seeded,
    shard,
)
from tests.harness import current_double, run_ranks
from tests.reference import relative_error

LAYERS = 4


class Machine(nn.Module):
    """Layers that a path visits: `(layer, how)`, the last one tied to the first, and a norm in between."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(LAYERS))
        self.layers[-1].weight = self.layers[0].weight
        self.norm = nn.LayerNorm(6)

    def visit(self, index, x):
        return torch.tanh(self.layers[index](self.norm(x)))

    def forward(self, x, path, fail=None):
        for position, (index, how) in enumerate(path):
            if fail == ("forward", position):
                raise Boom
            if fail == ("backward", position):
                x = RaisesInBackward.apply(x)
            if how == "plain":
                x = self.visit(index, x)
            elif how == "no grad":
                with torch.no_grad():
                    y = self.visit(index, x)
                x = x + y
            else:
                x = checkpoint(self.visit, index, x, use_reentrant=how == "reentrant")
        return x


class Session:
    """One model, plain or sharded, and the losses whose backward has not run."""

    def __init__(self, model, is_sharded):
        self.model, self.is_sharded = model, is_sharded
        self.losses = []
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        self.values = []  # what instructions computed, to compare

    def names(self):
        return dict(self.model.named_parameters())

    def forward(self, seed, path):
        x = randn(3, 6, seed=seed).requires_grad_()
        loss = self.model(x, path).square().sum()
        self.values.append(loss)
        self.losses.append(loss)

    def evaluate(self, seed, path):
        with torch.no_grad():
            self.values.append(self.model(randn(3, 6, seed=seed), path))

    def infer(self, seed, path):
        with torch.inference_mode():
            self.values.append(self.model(randn(3, 6, seed=seed), path).clone())

    def backward(self, which):
        if self.losses:
            self.losses.pop(which % len(self.losses)).backward()

    def retained(self, which):
        if self.losses:
            self.losses[which % len(self.losses)].backward(retain_graph=True)

    def all_at_once(self):
        if self.losses:
            sum(self.losses).backward()
            self.losses.clear()

    def drop(self):
        self.losses.clear()

    def grad(self, which, names):
        if self.losses:
            params = [p for name, p in self.names().items() if name in names and p.requires_grad]
            loss = self.losses.pop(which % len(self.losses))
            if params:
                self.values += torch.autograd.grad(loss, params, allow_unused=True)

    def penalty(self, seed, path):
        if any(how == "reentrant" for _, how in path):
            return
        x = randn(3, 6, seed=seed).requires_grad_()
        (slope,) = torch.autograd.grad(self.model(x, path).sum(), x, create_graph=True)
        self.values.append(slope.detach().clone())
        slope.square().sum().backward()

    def step(self):
        self.losses.clear()
        self.optimizer.step()

    def zero(self, to_none):
        self.model.zero_grad(set_to_none=to_none)

    def synchronise(self, switch):
        if self.is_sharded:
            self.model.set_requires_gradient_sync(switch)

    def freeze(self, layer, frozen):
        self.losses.clear()
        self.model.layers[layer].requires_grad_(not frozen)

    def keep(self, switch):
        if self.is_sharded and switch:
            self.model.unshard()
        elif self.is_sharded:
            self.model.reshard()

    def gathered(self, seed, path):
        with self.model.gathered() if self.is_sharded else contextlib.nullcontext():
            self.evaluate(seed, path)

    def teacher(self, seed, path):
        other = {name: p.detach() * 0.5 for name, p in self.names().items()}
        with torch.no_grad():
            self.values.append(torch.func.functional_call(self.model, other, (randn(3, 6, seed=seed), path)))

    def replace(self, layer, seed):
        self.losses.clear()
        old, full = self.model.layers[layer].bias, randn(6, seed=seed)
        if self.is_sharded:
            full = DTensor.from_local(local_part(old, full), old.device_mesh, old.placements, run_check=False)
        self.model.layers[layer].bias = nn.Parameter(full, requires_grad=old.requires_grad)

    def fail(self, seed, path, where, position):
        x = randn(3, 6, seed=seed).requires_grad_()
        with contextlib.suppress(Boom):
            self.model(x, path, fail=(where, position % len(path))).square().sum().backward()
        self.losses.clear()
        self.model.zero_grad()


def execute(rank, world, mesh, program, options):
    plain = Session(seeded(Machine)(), False)
    model = shard(seeded(Machine)(), MESHES[mesh](), **options)
    ours = Session(model, True)
    with gather_meter() as meter:
        for position, (instruction, *arguments) in enumerate(program):
            what = f"instruction {position}, {instruction}{tuple(arguments)}"
            for session in (plain, ours):
                getattr(session, instruction)(*arguments)
            compare(plain, ours, what)
        ours.synchronise(True)
        for session in (plain, ours):
            session.drop()
            session.forward(0, [(0, "plain"), (1, "plain")])
            session.backward(0)
        compare(plain, ours, "the end")
        model.reshard()
        assert not current_double().outstanding()
        assert meter.live_count == 0


def compare(plain, ours, what):
    for found, expected in zip(ours.values, plain.values, strict=True):
        if isinstance(found, DTensor):
            assert_local({"value": found}, {"value": expected}, REORDERED, what)
        else:
            assert (found is None) == (expected is None), what
            assert found is None or relative_error(found, expected) <= REORDERED, what
    plain.values, ours.values = [], []
    grads = {name: p.grad for name, p in plain.names().items() if p.grad is not None}
    assert_grads(ours.model, grads, 1e-5, f"gradients after {what}")  # feedback of a few steps
    params = {name: p.detach() for name, p in plain.names().items()}
    assert_local({name: p.detach() for name, p in ours.names().items()}, params, 1e-5, f"parameters after {what}")


# ---- programs

_seeds = st.integers(0, 3)
_hows = st.sampled_from(["plain", "plain", "plain", "checkpoint", "reentrant", "no grad"])
_paths = st.one_of(
    st.just([(index, "plain") for index in range(LAYERS)]),
    st.lists(st.tuples(st.integers(0, LAYERS - 1), _hows), min_size=1, max_size=5),
)
_names = st.sets(
    st.sampled_from(["layers.0.weight", "layers.1.weight", "layers.1.bias", "layers.2.weight", "norm.weight"]),
    min_size=1,
).map(sorted)


def _instruction(name, *arguments):
    return st.tuples(st.just(name), *arguments)


_FREQUENT = [
    _instruction("forward", _seeds, _paths),
    _instruction("backward", st.integers(0, 3)),
]
_OTHERS = [
    _instruction("evaluate", _seeds, _paths),
    _instruction("infer", _seeds, _paths),
    _instruction("retained", st.integers(0, 3)),
    _instruction("all_at_once"),
    _instruction("drop"),
    _instruction("grad", st.integers(0, 3), _names),
    _instruction("penalty", _seeds, _paths),
    _instruction("step"),
    _instruction("zero", st.booleans()),
    _instruction("synchronise", st.booleans()),
    _instruction("freeze", st.integers(0, LAYERS - 1), st.booleans()),
    _instruction("keep", st.booleans()),
    _instruction("gathered", _seeds, _paths),
    _instruction("teacher", _seeds, _paths),
    _instruction("replace", st.integers(0, LAYERS - 1), _seeds),
    _instruction("fail", _seeds, _paths, st.sampled_from(["forward", "backward"]), st.integers(0, 4)),
]
PROGRAMS = st.lists(st.one_of(*_FREQUENT * 4, *_OTHERS), min_size=4, max_size=24)
OPTIONS = st.fixed_dictionaries(
    {
        "prefetch": st.booleans(),
        "lookahead_bytes": st.sampled_from([None, 0, 1 << 20]),
        "reshard_after_forward": st.booleans(),
        "reduction": st.just("mean"),
    }
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS, OPTIONS)
def test_any_program_on_two_shards_does_what_it_does_on_the_plain_model(program, options):
    run_ranks(execute, 2, "gtp", program, options)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(PROGRAMS, OPTIONS)
def test_any_program_on_shards_and_replicas_does_what_it_does_on_the_plain_model(program, options):
    run_ranks(execute, 4, "dp", program, options)
