"""Depth, threshold and budget: what they leave of a proposal, against the definition read slowly, and of whole runs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.catalog import available
from policies.core.events import alone
from policies.core.limits import Limiter, Limits, limiter
from policies.core.policy import START, Prefetcher, Shape
from policies.core.residency_compiled import ABSENT, DEMANDED, LOADING, READY
from policies.core.runner import PolicyRunner
from policies.core.spec import Part, PolicySpec, make_policy, parse
from policies.prefetch.layer_stream import AllOptions
from policies.prefetch.markov import MarkovOptions
from sim.engines.simpy_engine import simulate
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link, experts_per_layer
from traces import DECODE
from traces.synthetic import synthetic

NOBODYS = {"none", "eamc", "eamc-blend"}  # nothing to limit; limits of their own


def left(limits, shape, proposal, layer=0, carried=1.0, states=None):
    """What the limits leave of [(id, priority)]."""
    made = Limiter(limits, shape, carried)
    if states is not None:
        made.state = np.array(states)
    ids = np.array([i for i, _ in proposal], np.int64)
    priorities = np.array([p for _, p in proposal], np.float64)
    kept, worth = made(layer, ids, priorities)
    return list(zip(kept.tolist(), worth.tolist(), strict=True))


def slowly(limits, shape, proposal, layer, carried, states):
    """The definition: for each expert by priority, would everything kept still arrive before its layer begins?"""
    L, E = shape.layers, shape.experts

    def ahead(expert):
        distance = 1
        while (layer + distance) % L != expert // E:
            distance += 1
        return distance

    kept = list[int]()
    for expert, priority in sorted(proposal, key=lambda one: (-one[1], one[0])):
        if (limits.depth and ahead(expert) > limits.depth) or priority < limits.threshold:
            continue
        moved = [each for each in [*kept, expert] if states[each] != READY]
        on_time = all(
            sum(ahead(each) <= j for each in moved) <= max(1, limits.budget * j * carried) for j in range(1, L + 1)
        )
        on_time |= math.inf in (carried, limits.budget)
        if on_time or states[expert] == READY:
            kept.append(expert)
    return [one for one in proposal if one[0] in kept]


def test_depth_counts_layers_around_the_cycle():
    shape = Shape(4, 1)
    everything = [(expert, 1.0) for expert in range(4)]
    assert left(Limits(depth=1), shape, everything, layer=0) == [(1, 1.0)]
    assert left(Limits(depth=2), shape, everything, layer=2) == [(0, 1.0), (3, 1.0)]
    assert left(Limits(depth=3), shape, everything, layer=3) == [(0, 1.0), (1, 1.0), (2, 1.0)]
    assert left(Limits(depth=4), shape, everything, layer=3) == everything, "the layer itself, a token later"


def test_a_budget_keeps_by_priority_what_the_window_carries_and_leaves_the_order():
    proposal = [(3, 0.1), (4, 0.9), (5, 0.5)]
    assert left(Limits(budget=1), Shape(2, 3), proposal, carried=2.0) == [(4, 0.9), (5, 0.5)]
    assert left(Limits(budget=0.5), Shape(2, 3), proposal, carried=2.0) == [(4, 0.9)]
    assert left(Limits(budget=1.5), Shape(2, 3), proposal, carried=2.0) == proposal
    assert left(Limits(budget=1), Shape(2, 3), [(5, 1.0), (3, 1.0), (4, 1.0)], carried=2.0) == [(3, 1.0), (4, 1.0)]


@st.composite
def proposals(draw):
    shape = Shape(draw(st.integers(1, 5)), draw(st.integers(1, 4)))
    ids = draw(st.permutations(range(shape.total)))[: draw(st.integers(0, shape.total))]
    proposal = [(expert, draw(st.sampled_from([-2.0, 0.0, 0.25, 0.5, 1.0]))) for expert in ids]
    states = draw(
        st.lists(st.sampled_from([ABSENT, DEMANDED, LOADING, READY]), min_size=shape.total, max_size=shape.total)
    )
    return shape, proposal, draw(st.integers(0, shape.layers - 1)), states


@settings(max_examples=400, deadline=None)
@given(
    proposals(),
    st.integers(0, 5),
    st.sampled_from([-math.inf, 0.0, 0.25, 2.0]),
    st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0, math.inf]),
    st.sampled_from([0.0, 0.25, 1.0, 1.5, math.inf]),
)
def test_limits_are_the_definition_and_leave_a_part_in_its_order(drawn, depth, threshold, budget, carried):
    shape, proposal, layer, states = drawn
    limits = Limits(depth, threshold, budget)
    found = left(limits, shape, proposal, layer, carried, states)
    remaining = iter(proposal)
    assert all(one in remaining for one in found), "a part, in the same order"
    assert found == slowly(limits, shape, proposal, layer, carried, states)


def test_without_limits_nothing_is_applied():
    shape = Shape(2, 2)
    assert limiter(Limits(), shape, None) is None
    assert limiter(MarkovOptions(), shape, None) is None
    assert limiter(object(), shape, None) is None
    assert limiter(AllOptions(depth=1), shape, None) is None, "it keeps to its depth itself"
    assert limiter(Limits(depth=1), shape, None) is not None
    assert limiter(AllOptions(threshold=0.5), shape, None) is not None


PREFETCHERS = {info.name for info in available() if info.kind in ("pair", "prefetch")}


@pytest.mark.parametrize("name", sorted(PREFETCHERS - NOBODYS))
def test_every_prefetcher_takes_every_limit(name):
    spec = parse(f"lru+{name}:depth=2:threshold=0.5:budget=0.75")
    assert spec.options()["prefetch"] | {"depth": 2, "threshold": 0.5, "budget": 0.75} == spec.options()["prefetch"]


def test_an_engine_that_does_not_know_its_window_plays_no_budget():
    with pytest.raises(ValueError, match="the engine has not told"):
        PolicyRunner(parse("lru+markov:budget=1"), Shape(2, 2), [])


class Beginning(Prefetcher):
    """Asked when a step starts as well: all experts, the first ones best."""

    Options, at_start = Limits, True

    def propose(self, event):
        return np.arange(self.shape.total), -np.arange(self.shape.total, dtype=np.float64)


def test_when_a_step_starts_a_budget_goes_by_what_is_ready_then():
    spec = PolicySpec.of("lru", Part.of(Beginning, budget=1.0))
    runner = PolicyRunner(spec, Shape(1, 4), [], experts_per_layer=1.0)
    residency, event = runner.residency(4), alone(DECODE, 0, 0, np.array([0]), np.array([1]))
    residency.route(event.experts)
    runner.observe(event)
    proposed = runner.propose(event)
    assert proposed
    assert proposed[0].tolist() == [0], "it is not there yet"
    residency.next_transfer()
    residency.arrived()
    proposed = runner.propose(event._replace(layer=START))
    assert proposed
    assert proposed[0].tolist() == [0, 1]


TIMING = FixedTiming(dense=400, expert=90, expert_per_token=10, combine=100, head=50)
LINK = Link(latency_ns=10, ns_per_byte_num=1, ns_per_byte_den=1, expert_bytes=290)


def test_the_window_is_a_layers_compute_over_a_transfer():
    assert experts_per_layer(TIMING, LINK, layers=3, top_k=4) == (400 + 4 * 100 + 100) / 300
    free = Link(latency_ns=0, ns_per_byte_num=0, ns_per_byte_den=1, expert_bytes=290)
    assert experts_per_layer(TIMING, free, layers=3, top_k=4) == math.inf


def run(policy, window=None, slots=12):
    trace = synthetic(requests=3, tokens=20, layers=4, experts=8, top_k=2, seed=7)
    requests = [trace.steps(i) for i in range(3)]
    return simulate(gpu_run(requests, Shape(4, 8), slots, parse(policy), TIMING, LINK, experts_per_layer=window))


def logged(log):
    return [log.step_ns.tolist(), log.stall_ns.tolist(), log.prefetch_transfers.tolist(), log.evictions.tolist()]


@pytest.mark.parametrize("name", ["markov", "popular", "oracle:horizon=4", "expert-map:depth=0"])
def test_a_limit_that_never_bites_changes_nothing_of_a_run(name):
    plain = run(f"lru+{name}")
    assert plain.prefetch_transfers.sum() > 50
    for limit in ({"depth": 4}, {"threshold": -1e9}, {"budget": 1000.0}):
        assert logged(run(make_policy(f"lru+{name}", **limit), window=1.0)) == logged(plain), limit


def test_a_budget_makes_fewer_transfers():
    wide, narrow = run("lru+oracle:horizon=8"), run("lru+oracle:horizon=8:budget=0.1", window=1.0)
    assert 0 < narrow.prefetch_transfers.sum() < wide.prefetch_transfers.sum()
