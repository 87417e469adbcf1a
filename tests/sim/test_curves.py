"""Curves over all cache sizes against single runs, simulators that we did not write, brute force and closed forms."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.policy import Int
from policies.core.spec import parse
from policies.core.stack_distances import lru_misses
from sim.analysis.curves import accesses, belady_misses
from sim.engines.untimed import count
from tests.support.strategies import traces
from tests.support.untimed_oracle import EXPECTED, SHARED, oracle_misses
from traces.importers import import_dump

CURVES: dict[str, Callable[..., Int]] = {"lru": lru_misses, "belady": belady_misses}

sequences = st.lists(st.integers(0, 6), min_size=1, max_size=80)


def ids(values) -> np.ndarray:
    return np.array(values, np.int32)


def lru_by_hand(sequence, slots: int) -> int:
    held: list[int] = []
    misses = 0
    for expert in sequence:
        misses += expert not in held
        held = [expert, *(other for other in held if other != expert)][:slots]
    return misses


def fewest_misses(sequence, slots: int) -> int:
    """Over every choice of victims, where each miss must be admitted."""
    held = {(): 0}
    for expert in sequence:
        following: dict[tuple, int] = {}
        for cache, misses in held.items():
            if expert in cache:
                choices, cost = [cache], misses
            else:
                kept = [cache] if len(cache) < slots else [cache[:i] + cache[i + 1 :] for i in range(slots)]
                choices, cost = [tuple(sorted((*rest, expert))) for rest in kept], misses + 1
            for choice in choices:
                following[choice] = min(cost, following.get(choice, cost))
        held = following
    return min(held.values())


@given(sequences)
def test_the_lru_curve_is_lru_by_hand_at_every_size(sequence):
    curve = lru_misses(ids(sequence), 7)
    assert curve.tolist() == [len(sequence), *(lru_by_hand(sequence, slots) for slots in range(1, 8))]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=16))
def test_no_choice_of_victims_beats_the_belady_curve_and_one_reaches_it(sequence):
    curve = belady_misses(ids(sequence), 6)
    assert curve.tolist() == [len(sequence), *(fewest_misses(sequence, slots) for slots in range(1, 7))]


@given(traces(), st.integers(0, 10**6))
def test_curves_equal_untimed_counts_of_any_trace(trace, pick):
    requests = [trace.steps(i) for i in range(len(trace.requests))]
    total = trace.layers * trace.num_experts
    experts, ends = accesses(requests)
    largest = int(np.diff(ends, prepend=0).max(initial=1))
    slots = largest + pick % (total - largest + 1)
    for policy, curve in CURVES.items():
        log = count(requests, trace.layers, trace.num_experts, slots, parse(policy))
        assert curve(experts, total, ends=ends)[slots] == log.misses.sum(), policy
        alone = count(requests, trace.layers, trace.num_experts, slots, parse(policy), one_at_a_time=True)
        assert curve(experts, total)[slots] == alone.misses.sum(), policy


@pytest.mark.parametrize(("policy", "theirs"), [("lru", "LRU"), ("belady", "Belady")])
@pytest.mark.parametrize("kind", ["zipf", "mixed", "cyclic"])
def test_curves_equal_libcachesim_at_single_sizes(policy, theirs, kind):
    rng = np.random.default_rng(8)
    zipf, cyclic = rng.zipf(1.3, 8_000) % 60, np.arange(8_000) % 37
    sequence = ids({"zipf": zipf, "cyclic": cyclic, "mixed": np.where(rng.random(8_000) < 0.5, zipf, cyclic)}[kind])
    curve = CURVES[policy](sequence, 60)
    for slots in (1, 7, 20, 36, 37, 45):
        assert curve[slots] == oracle_misses(theirs, sequence, slots), slots


def test_the_window_of_time_may_close_up_any_number_of_times():
    rng = np.random.default_rng(2)
    sequence = rng.integers(0, 3, 5_000)
    assert lru_misses(ids(sequence), 3).tolist() == [5_000, *(lru_by_hand(sequence, slots) for slots in (1, 2, 3))]


@pytest.mark.skipif(not EXPECTED, reason="needs the real traces in ../shared/traces")
@pytest.mark.parametrize("name", sorted({case["trace"] for case in EXPECTED}))
def test_curves_of_real_traces_go_through_what_two_independent_simulators_counted(name):
    trace, _ = import_dump(SHARED / name, SHARED / name.replace(".npz", ".json"))
    cases = [case for case in EXPECTED if case["trace"] == name]
    played = trace.head(cases[0]["requests"])
    played = played if played.phases == "decode" else played.as_decode()
    requests = (played.steps(i) for i in range(len(played.requests)))
    experts, _ = accesses(requests)
    assert {case["accesses"] for case in cases} == {len(experts)}
    assert {case["requests"] for case in cases} == {len(played.requests)}
    for policy, curve in CURVES.items():
        misses = curve(experts, trace.layers * trace.num_experts)
        assert [misses[case["capacity"]] for case in cases] == [case[policy] for case in cases], policy
