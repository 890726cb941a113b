"""Chains: recorded orders predict the next pass, wrong predictions are repaired, the budget always holds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from torch_gtp._chain import Chains, Direction, Pass

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD


def next_of(walk):
    """The item expected next, if any."""
    return next(walk.upcoming(), None)


class Walker:
    """A pass as the library runs it: a weight is gathered at its use unless somebody foresaw it."""

    def __init__(self, chains, budget=1, sizes=None, direction=FORWARD, coalesce=0):
        self.walk = Pass(chains, direction)
        self.budget, self.sizes = budget, sizes or {}
        self.in_flight: dict[str, bool] = {}  # item -> gathered ahead of its use
        self.on_demand: list[str] = []
        self.foreseen: list[str] = []
        self.coalesce = coalesce
        self.calls: list[str] = []

    def size(self, item):
        return self.sizes.get(item, 1)

    def issue(self, items):
        self.calls.append("".join(map(str, items)))
        return [self._issue(item) for item in items]

    def _issue(self, item):
        if item in self.in_flight:
            return False
        self.in_flight[item] = True
        return True

    def use(self, item):
        self.walk.advance(item)
        if item in self.in_flight:
            self.foreseen.append(item)
        else:
            self.on_demand.append(item)
            self.in_flight[item] = False
        self.walk.arrived(item)
        self.walk.issue_ahead(self.budget, self.size, self.issue, self.coalesce)
        self.check()
        del self.in_flight[item]

    def check(self):
        ahead = [self.size(item) for item, is_ahead in self.in_flight.items() if is_ahead]
        used_now = self.walk.used[-1]
        if self.in_flight.get(used_now):
            ahead.remove(self.size(used_now))
        assert self.walk.outstanding == sum(ahead)
        assert self.walk.outstanding <= max([self.budget, self.coalesce, *ahead])

    def run(self, order):
        for item in order:
            self.use(item)
        self.walk.finish()
        return self


distinct_orders = st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True)
any_orders = st.lists(st.integers(0, 4), min_size=1, max_size=12)
sizes_of_items = st.dictionaries(st.integers(0, 7), st.integers(1, 9))
budgets = st.integers(0, 12)


@given(distinct_orders, budgets, sizes_of_items)
def test_the_second_pass_of_an_order_gathers_only_its_first_item_on_demand(order, budget, sizes):
    chains: Chains[int] = Chains()
    first = Walker(chains, budget, sizes).run(order)
    second = Walker(chains, budget, sizes).run(order)
    assert first.on_demand == order
    assert second.on_demand == order[:1]
    assert second.foreseen == order[1:]
    assert second.in_flight == {}


@given(st.lists(any_orders, min_size=1, max_size=4), budgets, sizes_of_items)
def test_any_sequence_of_passes_serves_every_use_within_the_budget(orders, budget, sizes):
    chains: Chains[int] = Chains()
    for order in orders:  # `Walker.check` states the budget after every use
        walker = Walker(chains, budget, sizes).run(order)
        assert sorted(walker.on_demand + walker.foreseen) == sorted(order)
        assert list(walker.walk) == order


@given(any_orders, any_orders)
def test_a_pass_predicts_what_the_last_pass_with_the_same_first_item_did(older, newer):
    chains: Chains[int] = Chains()
    for order in (older, newer):
        Walker(chains).run(order)
    walk = Pass(chains, FORWARD)
    walk.advance(newer[0])
    assert [newer[0], *walk.upcoming()] == newer
    for item in list(walk.upcoming()):
        assert next_of(walk) == item
        walk.advance(item)
    assert walk.foresees_end
    if older[0] != newer[0]:
        assert chains.order(FORWARD, older[0]) == older


@given(distinct_orders, st.data())
def test_a_detour_over_unknown_items_leaves_the_prediction_in_place(order, data):
    """Items that the last pass did not use are served on demand; everything around them stays foreseen."""
    assume(len(order) > 1)
    chains: Chains[int] = Chains()
    Walker(chains).run(order)
    position = data.draw(st.integers(1, len(order) - 1))
    detour = data.draw(st.lists(st.integers(100, 103), min_size=1, max_size=3))
    walker = Walker(chains).run(order[:position] + detour + order[position:])
    assert walker.on_demand == order[:1] + detour
    assert walker.foreseen == order[1:]


@given(distinct_orders, st.data())
def test_skipped_items_cost_one_wasted_gather_each_and_the_walk_goes_on_behind_them(order, data):
    assume(len(order) > 2)
    chains: Chains[int] = Chains()
    Walker(chains, budget=100).run(order)
    start = data.draw(st.integers(1, len(order) - 2))
    end = data.draw(st.integers(start + 1, len(order) - 1))
    walker = Walker(chains, budget=100).run(order[:start] + order[end:])
    assert walker.on_demand == order[:1]
    assert walker.foreseen == order[1:start] + order[end:]
    # What was gathered and never used is what the end of the pass drains
    assert sorted(walker.in_flight) == sorted(order[start:end])
    assert walker.walk.outstanding == end - start


@given(any_orders, any_orders)
def test_the_item_expected_next_is_what_followed_the_last_match(recorded, actual):
    chains: Chains[int] = Chains()
    Walker(chains).run([*recorded])
    walk = Pass(chains, FORWARD)
    position = 0
    for index, item in enumerate(actual):
        walk.advance(item)
        if index == 0 and item != recorded[0]:
            assert next_of(walk) is None
            return
        if item in recorded[position:]:
            position = recorded.index(item, position) + 1
        assert list(walk.upcoming()) == recorded[position:]
        assert walk.foresees_end == (position == len(recorded))


@given(distinct_orders, sizes_of_items)
def test_without_a_budget_exactly_one_item_is_gathered_ahead(order, sizes):
    chains: Chains[int] = Chains()
    Walker(chains, 0, sizes).run(order)
    walker = Walker(chains, 0, sizes)
    for position, item in enumerate(order):
        walker.use(item)
        assert list(walker.in_flight) == order[position + 1 : position + 2]


def test_the_budget_is_filled_and_not_exceeded():
    chains: Chains[str] = Chains()
    sizes = {"a": 1, "b": 2, "c": 2, "d": 5, "e": 1}
    Walker(chains, 4, sizes).run("abcde")
    walker = Walker(chains, 4, sizes)
    seen = []
    for item in "abcde":
        walker.use(item)
        seen.append("".join(walker.in_flight))
    # d alone is larger than the budget, so it waits until nothing else is gathered ahead, and e waits for it
    assert seen == ["bc", "c", "d", "e", ""]


def test_an_item_that_needs_no_gather_costs_nothing_and_is_passed_over():
    chains: Chains[str] = Chains()
    Walker(chains).run("abcd")
    walk, offered = Pass(chains, FORWARD), []

    def issue(items):
        offered.extend(items)
        return [item != "b" for item in items]

    walk.advance("a")
    walk.issue_ahead(1, lambda item: 1, issue)
    assert offered == ["b", "c"]
    assert walk.outstanding == 1
    walk.advance("b")
    walk.arrived("b")
    assert walk.outstanding == 1


def test_an_item_that_may_not_be_gathered_yet_ends_the_lookahead_until_the_next_use():
    chains: Chains[str] = Chains()
    Walker(chains).run("abc")
    walk, open_to = Pass(chains, FORWARD), ["b"]

    def issue(items):
        return [True for item in items if item in open_to]

    walk.advance("a")
    walk.issue_ahead(10, lambda item: 1, issue)
    assert walk.outstanding == 1
    open_to.append("c")
    walk.advance("b")
    walk.arrived("b")
    walk.issue_ahead(10, lambda item: 1, issue)
    assert walk.outstanding == 1
    assert next_of(walk) == "c"


def test_small_neighbours_are_offered_together():
    chains: Chains[str] = Chains()
    sizes = {"d": 7}
    Walker(chains, sizes=sizes).run("abcdefgh")
    walker = Walker(chains, budget=6, sizes=sizes, coalesce=3)
    walker.run("abcdefgh")
    # bc fits three bytes, d alone is larger; the budget of six holds what was offered and not yet used.
    assert walker.calls == ["bc", "d", "efg", "h"]
    assert walker.on_demand == ["a"]


def test_a_call_that_may_not_be_made_whole_ends_the_lookahead():
    chains: Chains[str] = Chains()
    Walker(chains).run("abcde")
    walk, offered = Pass(chains, FORWARD), []

    def issue(items):
        offered.append("".join(items))
        return [True for item in items if item in open_to]

    open_to = "b"
    walk.advance("a")
    walk.issue_ahead(10, lambda item: 1, issue, 3)
    assert (offered, walk.outstanding) == (["bcd"], 1)
    open_to = "bcde"
    walk.advance("b")
    walk.arrived("b")
    walk.issue_ahead(10, lambda item: 1, issue, 3)
    assert (offered, walk.outstanding) == (["bcd", "cde"], 3)


def test_an_item_is_never_offered_twice_for_one_use():
    chains: Chains[str] = Chains()
    Walker(chains).run("abc")
    walk, offered = Pass(chains, FORWARD), []
    walk.advance("a")
    for _ in range(3):
        walk.issue_ahead(10, lambda item: 1, lambda items: [offered.append(item) or True for item in items])
    assert offered == ["b", "c"]


def test_directions_and_first_items_have_orders_of_their_own():
    chains: Chains[str] = Chains()
    Walker(chains).run("abc")
    Walker(chains, direction=BACKWARD).run("acb")
    Walker(chains).run("bca")
    assert chains.order(FORWARD, "a") == list("abc")
    assert chains.order(BACKWARD, "a") == list("acb")
    assert sorted(chains.orders(FORWARD)) == [list("abc"), list("bca")]
    assert chains.order(BACKWARD, "b") == []


def test_a_pass_without_uses_records_nothing():
    chains: Chains[str] = Chains()
    Walker(chains).run("ab")
    Walker(chains).run("")
    assert chains.orders(FORWARD) == [list("ab")]
    chains.clear()
    assert chains.orders(FORWARD) == []


def test_a_broken_off_pass_leaves_the_recorded_order():
    chains: Chains[str] = Chains()
    Walker(chains).run("abc")
    walker = Walker(chains)
    walker.use("a")
    assert chains.order(FORWARD, "a") == list("abc")


@pytest.mark.parametrize("order", ["aab", "abab", "aaaa", "abba"])
def test_a_repeated_item_is_foreseen_unless_it_is_in_use_when_its_turn_to_be_gathered_comes(order):
    chains: Chains[str] = Chains()
    Walker(chains).run(order)
    walker = Walker(chains).run(order)
    immediate = [later for earlier, later in itertools.pairwise(order) if earlier == later]
    assert walker.on_demand == [order[0], *immediate]
    assert walker.in_flight == {}


class ChainMachine(RuleBasedStateMachine):
    """Passes over a few items in any order, with any budget, broken off anywhere."""

    @initialize(budget=budgets, sizes=sizes_of_items)
    def begin(self, budget, sizes):
        self.chains: Chains[int] = Chains()
        self.budget, self.sizes = budget, sizes
        self.recorded: dict[int, list[int]] = {}
        self.start()

    def start(self):
        self.walker = Walker(self.chains, self.budget, self.sizes)

    @rule(item=st.integers(0, 5))
    def use(self, item):
        before = set(self.walker.in_flight)
        self.walker.use(item)
        first = self.walker.walk.used[0]
        # Only what the order predicted is ever gathered ahead
        assert set(self.walker.in_flight) - before <= set(self.recorded.get(first, []))

    @precondition(lambda self: next_of(self.walker.walk) is not None)
    @rule()
    def follow(self):
        self.walker.use(next_of(self.walker.walk))

    @rule()
    def finish(self):
        self.walker.walk.finish()
        if self.walker.walk.used:
            self.recorded[self.walker.walk.used[0]] = list(self.walker.walk.used)
        self.start()

    @rule()
    def break_off(self):
        self.start()

    @rule(budget=budgets)
    def change_budget(self, budget):
        self.start()
        self.budget = self.walker.budget = budget

    @invariant()
    def orders_are_those_of_finished_passes(self):
        for first, order in self.recorded.items():
            assert self.chains.order(FORWARD, first) == order


TestChainMachine = ChainMachine.TestCase
