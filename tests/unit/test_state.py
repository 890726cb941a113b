"""State machines of gathers and reductions: the tables, and the verbs that move through them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import nn

from tests.harness import cached_mesh, fake_world, library_double
from torch_gtp import GTPPolicy, _runtime, gtp_shard
from torch_gtp._chain import Direction
from torch_gtp._state import Gather, GatherState, Landing, ReduceState, Use

SHARDED, GATHERING, READY = GatherState
ALLOWED = {
    (SHARDED, GATHERING): "a gather is issued",
    (GATHERING, READY): "it was waited for",
    (GATHERING, SHARDED): "it was waited for and given up",
    (READY, SHARDED): "the weight is released",
}
GATHER_MOVES = [(before, after) for before in GatherState for after in GatherState]


def in_state(state):
    gather = Gather("layers.0.weight")
    gather.state = state
    return gather


@pytest.mark.parametrize(("before", "after"), sorted(ALLOWED))
def test_allowed_gather_moves_happen(before, after):
    gather = in_state(before)
    gather.move(after)
    assert gather.state is after


@pytest.mark.parametrize(("before", "after"), [move for move in GATHER_MOVES if move not in ALLOWED])
def test_every_other_gather_move_raises_and_names_the_weight(before, after):
    gather = in_state(before)
    message = rf"layers\.0\.weight: gather state {before.name} -> {after.name} is not allowed"
    with pytest.raises(RuntimeError, match=message):
        gather.move(after)
    assert gather.state is before


def test_a_gather_starts_sharded_and_empty():
    gather = Gather("w")
    assert (gather.state, gather.buffer, gather.source, gather.handle) == (SHARDED, None, None, None)


def test_a_reduction_lands_once(world):
    _, root = two_weights()
    landing = Landing(root.params[0], torch.zeros(1), torch.zeros(2))
    assert landing.state is ReduceState.QUEUED
    with pytest.raises(RuntimeError, match=r"0\.weight: reduce state QUEUED -> LANDED is not allowed"):
        landing.move(ReduceState.LANDED)
    landing.move(ReduceState.LAUNCHED)
    landing.move(ReduceState.LANDED)
    with pytest.raises(RuntimeError, match=r"0\.weight: reduce state LANDED -> LANDED is not allowed"):
        landing.move(ReduceState.LANDED)


def two_weights(**policy):
    mesh = cached_mesh((2,), ("gtp_remat",))
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False))
    model = gtp_shard(model, mesh, policy=GTPPolicy(min_shard_numel=1, **policy))
    return model, model._gtp.root


def issue(root, param, direction):
    _runtime.issue_gather(root, param, direction, param.param)


def hold(root, param, buffer, explicit):
    _runtime.hold(root, param, buffer, param.param, explicit=explicit)


def kept(root, param):
    return _runtime.held_full(root, param, param.param)


# ---- the verbs, in any order


class VerbMachine(RuleBasedStateMachine):
    """The verbs on two weights, in any order, legal or not, beside a model of the states."""

    def __init__(self):
        super().__init__()
        self.double = library_double().__enter__()
        self.model, self.root = two_weights()
        self.states = {(param.index, d): SHARDED for param in self.root.params for d in Direction}
        self.fulls: dict[tuple[int, Direction], torch.Tensor] = {}
        self.uses: list[tuple[Use, int]] = []

    def teardown(self):
        try:
            for direction in Direction:
                _runtime.drain(self.root, direction)
            for use, _ in self.uses:
                _runtime.land_gradient(use)
            assert self.double.problems() == []
        finally:
            self.double.__exit__(None, None, None)

    places = st.tuples(st.integers(0, 1), st.sampled_from(Direction))

    def verb(self, place):
        param = self.root.params[place[0]]
        return param, param.gathers[place[1]]

    @rule(place=places)
    def gather(self, place):
        param, gather = self.verb(place)
        if self.states[place] is SHARDED:
            issue(self.root, param, place[1])
            self.states[place] = GATHERING
            assert gather.buffer.isnan().all()
            return
        before, calls = gather.buffer, len(self.double.log)
        with pytest.raises(RuntimeError, match=rf"{param.fqn}: gather state .* -> GATHERING is not allowed"):
            issue(self.root, param, place[1])
        assert gather.buffer is before
        assert len(self.double.log) == calls

    @rule(place=places)
    def wait(self, place):
        param, gather = self.verb(place)
        if self.states[place] is GATHERING:
            full = _runtime.wait_gather(self.root, param, place[1])
            assert full.shape == param.layout.tp_shape
            assert full.data_ptr() == gather.buffer.data_ptr()
            self.fulls[place], self.states[place] = full, READY
            return
        with pytest.raises((RuntimeError, AssertionError)):
            _runtime.wait_gather(self.root, param, place[1])

    @rule(place=places)
    def release(self, place):
        param, gather = self.verb(place)
        if self.states[place] is READY:
            buffer = gather.buffer
            assert _runtime.release(param, place[1]) is buffer
            self.states[place] = SHARDED
            return
        # Not even while it is gathered: nobody would wait for it, and its memory is still being written
        with pytest.raises((RuntimeError, AssertionError)):
            _runtime.release(param, place[1])

    @rule(place=places)
    def release_if_ready(self, place):
        param, _ = self.verb(place)
        _runtime.release_if_ready(param, place[1])
        if self.states[place] is READY:
            self.states[place] = SHARDED

    @rule(direction=st.sampled_from(Direction))
    def drain(self, direction):
        _runtime.drain(self.root, direction)
        for place, state in self.states.items():
            if place[1] is direction and state is GATHERING:
                self.states[place] = SHARDED

    @rule(index=st.integers(0, 1))
    def reduce(self, index):
        param = self.root.params[index]
        use = Use(self.root, param)
        grad = torch.ones(param.layout.tp_shape)
        _runtime.issue_reduce(use, param.layout.chunks_from_full(grad, grad.dtype))
        assert torch.equal(grad, torch.ones_like(grad))
        self.uses.append((use, index))

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def land(self, data):
        use, index = self.uses.pop(data.draw(st.integers(0, len(self.uses) - 1)))
        shard = _runtime.land_gradient(use)
        assert shard.shape == self.root.params[index].layout.shard_shape
        assert not shard.isnan().any()
        assert _runtime.land_gradient(use) is None

    @rule(place=places, explicit=st.booleans())
    def keep(self, place, explicit):
        param, _ = self.verb(place)
        if self.states[place] is READY:
            hold(self.root, param, _runtime.release(param, place[1]), explicit)
            self.states[place] = SHARDED
            assert kept(self.root, param) is not None

    @rule(index=st.integers(0, 1))
    def write_shard(self, index):
        param = self.root.params[index]
        if any(gather.state is GATHERING for gather in param.gathers):
            return  # a collective reads it
        with torch.no_grad():
            param.param.add_(1)
        assert kept(self.root, param) is None

    @rule(explicit=st.booleans())
    def drop_all_held(self, explicit):
        _runtime.drop_all_held(self.root, explicit=explicit)
        assert all(param.held is None or (param.held.explicit and not explicit) for param in self.root.params)

    @invariant()
    def states_and_resources_agree(self):
        for place, state in self.states.items():
            _, gather = self.verb(place)
            assert gather.state is state
            assert (gather.buffer is not None) == (state is not SHARDED)
            assert (gather.handle is not None) == (gather.source is not None) == (state is GATHERING)
            assert (place[0] in self.root.in_flight[place[1]]) == (state is GATHERING)

    @invariant()
    def every_gather_and_reduction_in_flight_is_known(self):
        gathering = sum(state is GATHERING for state in self.states.values())
        assert len(self.double.outstanding()) == gathering + len(self.uses)
        assert self.double.errors == []

    @invariant()
    def live_buffers_never_alias(self):
        buffers = [g.buffer for param in self.root.params for g in param.gathers if g.buffer is not None]
        buffers += [param.held.buffer for param in self.root.params if param.held is not None]
        buffers += [use.launched()[0].out for use, _ in self.uses]
        addresses = [buffer.untyped_storage().data_ptr() for buffer in buffers]
        assert len(set(addresses)) == len(addresses)

    @invariant()
    def kept_weights_are_listed(self):
        kept = {param.index for param in self.root.params if param.held is not None}
        assert set(self.root.keepers) == kept


class TestVerbs(VerbMachine.TestCase):
    settings = settings(stateful_step_count=30, phases=set(Phase) - {Phase.explain})

    @classmethod
    def setUpClass(cls):
        cls.world = fake_world(2, double=False)
        cls.world.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.world.__exit__(None, None, None)


# ---- what the verbs promise


@pytest.fixture
def world():
    with fake_world(2) as double:
        yield double


def test_a_released_buffer_is_freed_at_once(world):
    _, root = two_weights()
    param = root.params[0]
    issue(root, param, Direction.FORWARD)
    buffer = weakref.ref(param.gathers[Direction.FORWARD].buffer.untyped_storage())
    _runtime.wait_gather(root, param, Direction.FORWARD)
    assert buffer() is not None
    _runtime.release(param, Direction.FORWARD)
    assert buffer() is None


def test_draining_waits_for_every_gather_in_flight_and_frees_it(world):
    _, root = two_weights()
    for param in root.params:
        issue(root, param, Direction.BACKWARD)
    assert len(world.outstanding()) == 2
    _runtime.drain(root, Direction.FORWARD)
    assert len(world.outstanding()) == 2
    _runtime.drain(root, Direction.BACKWARD)
    assert world.problems() == []
    assert [param.gathers[Direction.BACKWARD].buffer for param in root.params] == [None, None]


@pytest.mark.parametrize("failing", ["_buffers.allocate", "_collectives.all_gather"])
def test_a_gather_that_could_not_be_issued_leaves_nothing_behind(world, monkeypatch, failing):
    """Out of memory, say: the caller may catch it, make room, and go on."""
    model, root = two_weights()
    x = torch.ones(1, 4)
    model(x).sum().backward()
    module, name = failing.split(".")
    calls = iter([False, True, True])
    original = getattr(getattr(_runtime, module), name)

    def fail_later(*args):
        if next(calls, False):
            raise torch.OutOfMemoryError("no room")
        return original(*args)

    monkeypatch.setattr(getattr(_runtime, module), name, fail_later)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            model(x)
    assert {gather.state for param in root.params for gather in param.gathers} == {SHARDED}
    model(x).sum().backward()
    assert world.problems() == []


def test_the_input_of_a_reduction_lives_until_it_has_landed(world):
    _, root = two_weights()
    use = Use(root, root.params[1])
    _runtime.issue_reduce(use, torch.ones(6, 6))  # 5 rows and one of padding
    source = weakref.ref(use.launched()[0].source)
    assert source() is not None
    _runtime.land_gradient(use)
    assert source() is None


def test_synchronous_reductions_are_waited_for_where_they_start(world):
    _, root = two_weights(async_reduction=False)
    use = Use(root, root.params[1])
    _runtime.issue_reduce(use, torch.ones(6, 6))  # 5 rows and one of padding
    assert world.outstanding() == []
    assert _runtime.land_gradient(use).shape == (3, 6)


def test_a_kept_weight_is_stale_once_its_shard_is_another_tensor(world):
    model, root = two_weights()
    model.unshard()
    param = root.params[0]
    assert kept(root, param) is not None
    param.param = nn.Parameter(param.layout.dtensor(param.shard().clone()))
    assert kept(root, param) is None
    assert param.held is None


def test_a_root_and_everything_gathered_go_with_the_model(world):
    """No cycle: nothing waits for the garbage collector."""
    gc.disable()
    try:
        model, root = two_weights()
        model.unshard()
        buffer = weakref.ref(root.params[0].held.buffer.untyped_storage())
        states = [weakref.ref(root.params[0]), weakref.ref(model)]
        del model, root
        assert [ref() for ref in [*states, buffer]] == [None] * 3
    finally:
        gc.enable()
