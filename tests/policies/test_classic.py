"""Classic retention against slow references of our own: lists, searched from end to end, by the words of each rule.

libcachesim judges what it can (tests/sim/test_untimed.py); here is what it cannot know: experts that are
not offered, several misses in one event, prefetches, and caches too small for its S3-FIFO.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.events import alone
from policies.core.policy import Policy, ScorePolicy, Shape
from policies.core.residency import PolicyResidency
from policies.core.spec import parse
from traces import DECODE
from traces.synthetic import synthetic
from traces.writer import write_trace

TOTAL = 10


class ClockByHand:
    """A circle of (expert, chances) and the index of the hand; newcomers stand right behind the hand."""

    def __init__(self, slots: int) -> None:
        self.circle: list[list[int]] = []
        self.hand = 0

    def hit(self, expert: int) -> None:
        for page in self.circle:
            if page[0] == expert:
                page[1] = 1

    def missed(self, experts: list[int]) -> None:
        pass

    def insert(self, expert: int) -> None:
        self.circle.insert(self.hand, [expert, 0])
        self.hand += 1

    def leave(self, expert: int) -> None:
        place = [page[0] for page in self.circle].index(expert)
        del self.circle[place]
        self.hand -= place < self.hand

    def victim(self, offered: list[int], incoming: int) -> int:
        while True:
            self.hand %= len(self.circle)
            page = self.circle[self.hand]
            if page[0] in offered and page[1] == 0:
                return page[0]
            if page[0] in offered:
                page[1] = 0
            self.hand += 1


class SieveByHand(ClockByHand):
    """The same list, the oldest first and never reordered; newcomers join at its end."""

    def insert(self, expert: int) -> None:
        self.circle.append([expert, 0])

    def leave(self, expert: int) -> None:
        super().leave(expert)
        self.hand = self.hand % len(self.circle) if self.circle else 0


class S3FIFOByHand:
    """Three lists, the oldest first."""

    def __init__(self, slots: int) -> None:
        self.slots, self.small_slots, self.ghosts = slots, max(1, slots // 10), slots * 9 // 10
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghost: list[int] = []
        self.lookups: dict[int, int] = {}
        self.evicted = False

    def hit(self, expert: int) -> None:
        self.lookups[expert] += 1

    def missed(self, experts: list[int]) -> None:
        pass

    def insert(self, expert: int) -> None:
        if expert in self.ghost:
            self.ghost.remove(expert)
            self.main.append(expert)
        elif len(self.small) >= self.small_slots and not self.evicted:
            self.main.append(expert)
        else:
            self.small.append(expert)
        self.ghost = self.ghost[max(0, len(self.ghost) - self.ghosts) :]
        self.lookups[expert] = 0

    def leave(self, expert: int) -> None:
        if expert in self.small:
            self.small.remove(expert)
            self.ghost.append(expert)
        else:
            self.main.remove(expert)

    def victim(self, offered: list[int], incoming: int) -> int:
        self.evicted = True
        main_first = len(self.main) > self.slots - self.small_slots
        while True:
            small, main = ([e for e in queue if e in offered] for queue in (self.small, self.main))
            if small and not (main_first and main):
                oldest = small[0]
                if self.lookups[oldest] < 2:
                    return oldest
                self.small.remove(oldest)
                self.lookups[oldest] = 0
            else:
                oldest = main[0]
                if self.lookups[oldest] == 0:
                    return oldest
                self.main.remove(oldest)
                self.lookups[oldest] = min(self.lookups[oldest], 3) - 1
            self.main.append(oldest)


class ARCByHand:
    """Figure 4 of the paper, case by case; lists with the least recently used first."""

    def __init__(self, slots: int) -> None:
        self.c, self.p, self.forget = slots, 0.0, False
        self.t1: list[int] = []
        self.t2: list[int] = []
        self.b1: list[int] = []
        self.b2: list[int] = []

    def hit(self, expert: int) -> None:  # case I
        (self.t1 if expert in self.t1 else self.t2).remove(expert)
        self.t2.append(expert)

    def missed(self, experts: list[int]) -> None:
        for expert in experts:
            if expert in self.b1:  # case II
                self.p = min(self.c, self.p + max(1, len(self.b2) / len(self.b1)))
            elif expert in self.b2:  # case III
                self.p = max(0, self.p - max(1, len(self.b1) / len(self.b2)))

    def victim(self, offered: list[int], incoming: int) -> int:
        returns = incoming in self.b2
        t1, t2 = ([e for e in queue if e in offered] for queue in (self.t1, self.t2))
        known = incoming in self.b1 or incoming in self.b2
        if not known and len(self.t1) == self.c:  # case IV A, B1 being empty
            self.forget = True
            return t1[0]
        if self.t1 and (len(self.t1) > self.p or (returns and len(self.t1) == self.p)):
            return (t1 or t2)[0]
        return (t2 or t1)[0]

    def leave(self, expert: int) -> None:
        for data, ghost in ((self.t1, self.b1), (self.t2, self.b2)):
            if expert in data:
                data.remove(expert)
                if not self.forget:
                    ghost.append(expert)
        self.forget = False

    def insert(self, expert: int) -> None:
        for ghost in (self.b1, self.b2):
            if expert in ghost:
                ghost.remove(expert)
                self.t2.append(expert)
                return
        if len(self.t1) + len(self.b1) == self.c:  # case IV A
            del self.b1[0]
        elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * self.c:  # case IV B
            del self.b2[0]
        self.t1.append(expert)


BY_HAND: dict[str, Any] = {"clock": ClockByHand, "sieve": SieveByHand, "s3fifo": S3FIFOByHand, "arc": ARCByHand}


class Both:
    """A policy and its reference over one cache, told the same things, as the residency tells them."""

    def __init__(self, name: str, slots: int) -> None:
        self.policy: Policy = parse(name).build(Shape(1, TOTAL))[0]
        self.name, self.by_hand, self.evicted = name, BY_HAND[name](slots), False
        self.slots, self.resident, self.serial, self.starts = slots, set[int](), 0, 0

    def look_up(self, experts: list[int], draw) -> None:
        """One event: its hits, then those misses that `draw` has fetched, each with a victim among those it picks."""
        self.serial += 1
        missed = [expert for expert in experts if expert not in self.resident]
        for expert in experts:
            if expert in self.resident:
                self.policy.on_hit(expert, self.serial)
                self.by_hand.hit(expert)
        if self.policy.observes:
            ids = np.array(experts, np.int64)
            self.policy.observe(alone(DECODE, 0, self.serial, ids, np.ones_like(ids), self.serial))
        self.by_hand.missed(missed)
        for expert in missed:
            if draw(st.booleans()):  # else the host computes it
                self.start(expert, draw)

    def start(self, expert: int, draw) -> None:
        if len(self.resident) == self.slots:
            offered = sorted(draw(st.sets(st.sampled_from(sorted(self.resident)), min_size=1)))
            self.policy.on_need(expert)
            victim = self.policy.victim(np.array(offered, np.int64))
            assert victim in offered
            assert victim == self.by_hand.victim(offered, expert)
            self.leave(victim)
            self.evicted = True
        self.starts += 1
        self.resident.add(expert)
        self.policy.on_insert(expert, self.serial, self.starts)
        self.by_hand.insert(expert)

    def leave(self, expert: int) -> None:
        self.resident.remove(expert)
        self.policy.on_evict(expert)
        self.by_hand.leave(expert)

    def cut(self) -> None:
        """The end of a cold request: before the first eviction it leaves nothing behind."""
        for expert in sorted(self.resident):
            self.leave(expert)
        if not self.evicted:
            self.by_hand = BY_HAND[self.name](self.slots)


@pytest.mark.parametrize("name", BY_HAND)
@given(
    st.integers(1, TOTAL - 1),
    st.lists(st.one_of(st.sets(st.integers(0, TOTAL - 1), min_size=1, max_size=3), st.integers(-1, TOTAL - 1))),
    st.data(),
)
def test_victims_are_those_of_the_slow_reference_whatever_is_offered(name, slots, happenings, data):
    """A set is an event, a number a prefetch, -1 the end of a cold request."""
    both = Both(name, slots)
    for happening in happenings:
        if isinstance(happening, set):
            both.look_up(sorted(happening), data.draw)
        elif happening >= 0 and happening not in both.resident:
            both.start(happening, data.draw)
        elif happening == -1:
            both.cut()


@pytest.mark.parametrize("name", ["lfu", "lfu-perfect"])
def test_a_lookup_that_the_host_computes_is_the_last_but_is_not_counted(name):
    policy = parse(name).build(Shape(1, TOTAL))[0]
    machine = PolicyResidency(policy.shape, (2,), policy)
    machine.place_on_host([3])
    machine.route(np.array([3, 4]))
    assert machine.keep[:2, 3].tolist() == [0, 1]
    assert machine.keep[:2, 4].tolist() == [1, 1]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.integers(1, 20))
def test_aged_counts_are_exact_fractions_halved_at_each_multiple_of_the_half_life(ids, half_life):
    policy, counts = _scores(f"lfu-aged:half_life={half_life}"), [Fraction(0)] * 5
    for serial, expert in enumerate(ids, start=1):
        if serial % half_life == 0:
            counts = [count / 2 for count in counts]
        counts[expert] += 1
        policy.look_up(expert, serial)
        assert [Fraction(score) for score in policy.keep[0]] == counts


@given(st.lists(st.integers(0, 4), min_size=1, max_size=80), st.floats(0, 1))
def test_lrfu_keeps_the_logarithm_of_the_sum_that_defines_it(ids, decay):
    policy = _scores(f"lrfu:decay={decay!r}")
    for serial, expert in enumerate(ids, start=1):
        policy.look_up(expert, serial)
    for expert in set(ids):
        ages = [len(ids) - serial for serial, other in enumerate(ids, start=1) if other == expert]
        value = math.fsum(0.5 ** (decay * age) for age in ages)
        assert policy.keep[0, expert] - decay * len(ids) == pytest.approx(math.log2(value), abs=1e-9)


def _scores(name):
    """The keep scores of a policy, and its compiled bookkeeping as a method."""
    policy: Any = parse(name).build(Shape(1, 5))[0]
    policy.look_up = lambda expert, serial: policy.compiled.on_lookup(policy.keep, expert, serial)
    return policy


@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True), min_size=1, max_size=40))
def test_class_lru_evicts_the_greatest_age_over_two_to_the_class_of_its_decayed_count(steps):
    policy = parse("class-lru:half_life=3").build(Shape(1, 5))[0]
    for step, chosen in enumerate(steps):
        ids = np.array(sorted(chosen))
        policy.observe(alone(DECODE, 0, step, ids, np.ones_like(ids), step + 1))
    latest = [
        max((step + 1 for step, chosen in enumerate(steps) if expert in chosen), default=0) for expert in range(5)
    ]
    ratios = []
    for expert in range(5):
        count = sum(0.5 ** ((len(steps) - 1 - step) / 3) for step, chosen in enumerate(steps) if expert in chosen)
        ratios.append((len(steps) - latest[expert]) / 2 ** math.floor(math.log2(1 + count)))
    greatest = [expert for expert in range(5) if ratios[expert] >= max(ratios) - 1e-9]
    assert policy.victim(np.arange(5)) == min(greatest, key=lambda expert: (latest[expert], expert))


def test_least_stale_spares_what_the_current_pass_has_touched_and_later_layers():
    policy = parse("least-stale").build(Shape(2, 3))[0]
    residents = np.array([0, 1, 3, 5])

    def looks_up(step: int, layer: int, *experts: int) -> None:
        ids = np.array(experts)
        policy.observe(alone(DECODE, layer, step, ids, np.ones_like(ids)))

    looks_up(0, 0, 0, 1)
    assert policy.victim(residents) == 3, "stale, though of the last layer"
    looks_up(0, 1, 3, 5)
    assert policy.victim(residents) == 0, "all fresh: the first layer, the lower id"
    looks_up(1, 0, 0)
    assert policy.victim(residents) == 1
    assert policy.victim(np.array([0, 3, 5])) == 3


def test_static_keeps_what_its_profile_uses_most(tmp_path):
    trace = synthetic(2, 20, 2, 4, 2, seed=1, prompt_tokens=5)
    write_trace(trace, tmp_path / "profile")
    policy = parse(f"static:profile={tmp_path / 'profile'}").build(Shape(2, 4))[0]
    assert isinstance(policy, ScorePolicy)
    counts = np.bincount((trace.experts + 4 * np.arange(2)[:, None]).ravel(), minlength=8)
    assert policy.keep[0].tolist() == counts.tolist()
    assert policy.victim(np.arange(8)) == int(np.argmin(counts))
