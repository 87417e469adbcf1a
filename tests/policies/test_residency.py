"""The residency driven alone, by a link and a compute stream that do as Hypothesis says."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import residency_compiled as core
from policies.core.policy import Int, Options, Policy, ScorePolicy, Shape
from policies.core.residency import PolicyResidency
from policies.core.residency_compiled import BLOCKED, NO_EXPERT
from policies.core.spec import parse
from policies.retention.lru import LRU


class Lifo(Policy):
    """Evicts what came last: names its victims in Python, so it takes the machine's other path."""

    name = "lifo"
    observes = False

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.started: dict[int, int] = {}

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        self.started[expert] = start

    def on_evict(self, expert: int) -> None:
        del self.started[expert]

    def victim(self, evictable: Int) -> int:
        assert np.all(np.diff(evictable) > 0)
        return int(max(evictable.tolist(), key=self.started.__getitem__))


@dataclass
class Drive:
    """Runs events through a machine, taking every choice that time would take from `choices`."""

    machine: PolicyResidency
    choices: Any  # draws as Hypothesis's DataObject does
    active: int = NO_EXPERT
    log: list[tuple[object, ...]] = field(default_factory=list)
    served: list[int] = field(default_factory=list)

    def event(self, experts: list[int], proposal: list[tuple[int, float]]) -> None:
        machine = self.machine
        ids = np.array(experts, np.int64)
        hits, _ = machine.route(ids)
        self.log.append(("hits", *hits))
        machine.propose(np.array([e for e, _ in proposal], np.int64), np.array([p for _, p in proposal]))
        todo, ready = set(experts), list(hits)
        while todo:
            self.check(todo)
            moves = self.moves(ready)
            move = self.choices.draw(st.sampled_from(moves)) if len(moves) > 1 else moves[0]
            if move == "compute":
                expert = ready.pop(0)
                machine.computed(expert)
                todo.remove(expert)
                self.served.append(expert)
            elif move == "arrive":
                awaited, arrived = machine.arrived(), self.active
                self.active = NO_EXPERT
                assert awaited == (arrived in todo)
                if awaited:
                    ready.append(arrived)
            elif move == "boundary":
                self.note(*machine.interrupt())

    def moves(self, ready: list[int]) -> list[str]:
        """What can happen next; starts whatever the free link takes."""
        if self.active == NO_EXPERT:
            expert, victim, _ = self.machine.next_transfer()
            if expert != BLOCKED:
                self.note(expert, victim)
        moves = ["compute"] if ready else []
        if self.active != NO_EXPERT:
            moves += ["arrive", "boundary"] if self.machine.is_prefetch(self.active) else ["arrive"]
        assert moves, "nothing can happen: the event would never end"
        return moves

    def note(self, expert: int, victim: int) -> None:
        if expert >= 0:
            self.active = expert
            self.log.append(("start", expert, victim))
            assert self.machine.slot(expert) >= 0

    def check(self, todo: set[int]) -> None:
        m, machine = self.machine.m, self.machine
        slots = int(m[core.ONE, core.SLOTS])
        held = [e for e in m[core.HELD, :slots].tolist() if e != NO_EXPERT]
        assert len(held) == len(set(held)) <= slots
        assert slots - len(held) == m[core.FREE].sum()
        assert not m[core.ONE, core.LISTS] or listed(machine, core.AFTER) == by_score(machine)
        states = m[core.STATE, : machine.policy.shape.total]
        assert sorted(held) == np.flatnonzero(states >= core.LOADING).tolist()
        assert int((states == core.LOADING).sum()) <= 2, "one on the link and one paused, at most"
        assert {e for e in range(len(states)) if machine.awaited(e)} == todo
        prefetched, used, wasted = machine.counters()[4:7]
        unused = [e for e in held if machine.is_prefetch(e)]
        assert prefetched == used + wasted + len(unused)


def listed(machine: PolicyResidency, onward: int) -> list[list[int]]:
    """The machine's list of each partition, in the direction of the row `onward` (core.AFTER or core.BEFORE)."""
    m, found = machine.m, list[list[int]]()
    for end in range(m[core.ONE, core.LISTS], m[core.ONE, core.LISTS] + np.count_nonzero(m[core.END])):
        found.append([])
        expert = m[onward, end]
        while expert != end:
            found[-1].append(int(expert))
            expert = m[onward, expert]
    return found


def by_score(machine: PolicyResidency) -> list[list[int]]:
    """What each partition holds, ascending (score, id)."""
    m = machine.m
    partitions = zip(m[core.FIRST], m[core.END], strict=True)
    held = [[e for e in m[core.HELD, first:end].tolist() if e != NO_EXPERT] for first, end in partitions if end]
    return [sorted(experts, key=lambda e: (machine.keep[0, e], e)) for experts in held]


@st.composite
def runs(draw):
    """A shape, slots of each partition, a policy, and events with proposals; small, so that slots are fought for."""
    shape = Shape(draw(st.integers(1, 3)), draw(st.integers(1, 5)))
    one_for_each = st.tuples(*[st.integers(1, shape.experts)] * shape.layers)
    slots = draw(st.tuples(st.integers(1, shape.total)) | one_for_each)
    policy = draw(st.sampled_from(["lru", "lfu", "fifo", "lifo"]))
    events = []
    for layer in draw(st.lists(st.integers(0, shape.layers - 1), max_size=12)):
        local = draw(st.sets(st.integers(0, shape.experts - 1), max_size=shape.experts))
        proposed = draw(st.sets(st.integers(0, shape.total - 1), max_size=4))
        priorities = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0]), min_size=4, max_size=4))
        events.append(
            ([layer * shape.experts + e for e in sorted(local)], list(zip(sorted(proposed), priorities, strict=False)))
        )
    return shape, slots, policy, events, draw(st.booleans())


def machine_of(shape: Shape, slots: tuple[int, ...], policy: str, one_scale: bool) -> PolicyResidency:
    retention = Lifo(shape, Options()) if policy == "lifo" else parse(policy).build(shape)[0]
    return PolicyResidency(shape, slots, retention, one_scale)


@given(runs(), st.data())
def test_never_more_residents_than_slots_and_every_demand_is_served(run, choices):
    """Rules 1 and 5."""
    shape, slots, policy, events, one_scale = run
    drive = Drive(machine_of(shape, slots, policy, one_scale), choices)
    for experts, proposal in events:
        drive.event(experts, proposal)
    assert sorted(drive.served) == sorted(e for experts, _ in events for e in experts)
    hits, late, misses, demands, *_ = drive.machine.counters()
    assert hits + late + misses == len(drive.served)
    assert demands == misses


@given(runs(), st.data())
def test_a_pinned_or_loading_expert_is_never_evicted(run, choices):
    """Rules 2 and 5."""
    shape, slots, policy, events, one_scale = run
    drive = Drive(machine_of(shape, slots, policy, one_scale), choices)
    machine = drive.machine
    note = drive.note

    def watch(expert: int, victim: int) -> None:
        if victim >= 0:
            assert not machine.awaited(victim)
            assert before.get(victim) == core.READY
        note(expert, victim)

    before: dict[int, int] = {}
    moves = drive.moves

    def remember(ready: list[int]) -> list[str]:
        before.update(enumerate(machine.m[core.STATE, : shape.total].tolist()))
        return moves(ready)

    vars(drive).update(note=watch, moves=remember)
    for experts, proposal in events:
        drive.event(experts, proposal)


@given(runs(), st.data())
def test_one_slot_suffices(run, choices):
    """Rule 9."""
    shape, _, policy, events, one_scale = run
    drive = Drive(machine_of(shape, (1,), policy, one_scale), choices)
    for experts, proposal in events:
        drive.event(experts, proposal)
    assert len(drive.served) == sum(len(experts) for experts, _ in events)


@given(runs(), st.randoms(use_true_random=False))
def test_same_input_same_output(run, random):
    shape, slots, policy, events, one_scale = run
    seed = random.random()

    class Script:
        def __init__(self) -> None:
            import random as module

            self.random = module.Random(seed)

        def draw(self, strategy: Any) -> Any:
            return self.random.choice(strategy.elements)

    logs = []
    for _ in range(2):
        drive = Drive(machine_of(shape, slots, policy, one_scale), Script())
        for experts, proposal in events:
            drive.event(experts, proposal)
        logs.append(drive.log)
    assert logs[0] == logs[1]


@given(runs(), st.data())
@settings(max_examples=50)
def test_a_cold_end_leaves_nothing_behind_and_wastes_what_was_not_used(run, choices):
    """Rule 10."""
    shape, slots, policy, events, one_scale = run
    drive = Drive(machine_of(shape, slots, policy, one_scale), choices)
    for experts, proposal in events:
        drive.event(experts, proposal)
    drive.machine.end_request(cold=True)
    assert len(drive.machine.resident()) == 0
    assert not any(listed(drive.machine, core.AFTER)) or policy in ("lfu", "lifo")
    prefetched, used, wasted = drive.machine.counters()[4:7]
    assert prefetched == used + wasted
    assert drive.machine.next_transfer()[0] == NO_EXPERT


@given(runs())
@settings(max_examples=50)
def test_the_compiled_victim_is_the_one_that_the_definition_names(run):
    """Rule 5."""
    shape, slots, policy, events, _ = run
    if policy == "lifo":
        return
    machine = machine_of(shape, slots, policy, False)
    for experts, _ in events:
        machine.route(np.array(experts, np.int64))
        while (expected := _victim_by_definition(machine)) is not None:
            expert, victim, _ = machine.next_transfer()
            if expert < 0:
                break
            assert victim == expected
            machine.arrived()
            machine.computed(expert)
        for expert in experts:
            machine.computed(expert)


def _victim_by_definition(machine: PolicyResidency) -> int | None:
    m = machine.m
    partition = m[core.PARTITION, m[core.DEMANDS, m[core.ONE, core.NEXT_DEMAND]]]
    if m[core.FREE, partition]:
        return NO_EXPERT
    offered = core.evictable(m, machine.proposals, partition, False)
    return machine.policy.victim(offered) if len(offered) else None


@pytest.mark.parametrize(("policy", "order"), [("lru", [3, 0, 1, 2]), ("fifo", [0, 3, 1, 2])])
def test_residents_are_listed_by_score_and_then_by_id_in_both_directions(policy, order):
    machine = machine_of(Shape(1, 5), (4,), policy, False)
    for experts in ([0], [3], [0, 1, 2]):
        machine.route(np.array(experts, np.int64))
        while machine.next_transfer()[0] >= 0:
            machine.arrived()
        for expert in experts:
            machine.computed(expert)
    assert listed(machine, core.AFTER) == [order] == by_score(machine)
    assert listed(machine, core.BEFORE) == [order[::-1]]


class Contrary(ScorePolicy):
    name = "contrary"
    compiled = LRU.compiled
    observes = True


class Heir(LRU):
    name = "heir"


@pytest.mark.parametrize("cls", [Contrary, Heir])
def test_a_policy_that_does_not_say_that_it_is_listed_may_write_its_scores(cls):
    machine = PolicyResidency(Shape(1, 3), (2,), cls(Shape(1, 3), Options()))
    for expert in (0, 1):
        machine.route(np.array([expert], np.int64))
        machine.next_transfer()
        machine.arrived()
        machine.computed(expert)
    machine.keep[0, :2] = [9, 8]
    machine.route(np.array([2], np.int64))
    assert machine.next_transfer() == (2, 1, False)


def test_a_cache_without_slots_is_refused():
    with pytest.raises(ValueError, match="at least one slot"):
        machine_of(Shape(1, 1), (0,), "lru", False)


def test_a_victim_that_was_not_offered_is_an_error():
    class Liar(Lifo):
        def victim(self, evictable: Int) -> int:
            return 3

    machine = PolicyResidency(Shape(1, 4), (1,), Liar(Shape(1, 4), Options()))
    machine.route(np.array([0, 1], np.int64))
    machine.next_transfer()
    machine.arrived()
    machine.computed(0)
    with pytest.raises(ValueError, match="not offered"):
        machine.next_transfer()
