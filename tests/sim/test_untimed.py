"""Counts without a clock: against simulators that this project did not write, and against a machine without time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import Shape, parse
from sim.engines import count, untimed
from sim.engines.simpy_engine import simulate
from sim.engines.untimed import play
from sim.loop import RunLog, gpu_run, joined
from sim.profiles.timing import FixedTiming, Link
from tests.support.strategies import traces
from tests.support.untimed_oracle import EXPECTED, SHARED, accesses, oracle_misses
from traces import DECODE, RequestSteps
from traces.importers import import_dump
from traces.synthetic import synthetic


@pytest.mark.parametrize(("ours", "theirs"), [("lru", "LRU"), ("fifo", "FIFO"), ("lfu", "LFU"), ("belady", "Belady")])
@pytest.mark.parametrize("kind", ["zipf", "mixed", "cyclic"])
def test_misses_equal_libcachesims_to_the_unit(ours, theirs, kind):
    rng = np.random.default_rng(5)
    zipf = rng.zipf(1.3, 2_000) % 60
    cyclic = np.arange(2_000) % 37
    ids = {"zipf": zipf, "cyclic": cyclic, "mixed": np.where(rng.random(2_000) < 0.5, zipf, cyclic)}[kind]
    for slots in (1, 7, 20, 45):
        log = count(accesses(ids, 60), 1, 60, slots, parse(ours))
        assert log.misses.sum() == oracle_misses(theirs, ids, slots), (slots, kind)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=60), st.integers(1, 7))
def test_lru_hits_grow_with_the_cache(ids, slots):
    requests = accesses(np.array(ids), 8)
    fewer, more = (count(requests, 1, 8, n, parse("lru")).hits.sum() for n in (slots, slots + 1))
    assert fewer <= more


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=12), st.integers(1, 6))
def test_one_at_a_time_the_experts_of_an_event_are_looked_up_in_ascending_id(events, slots):
    flat = np.array([e for event in events for e in sorted(event)], np.int64)
    request = RequestSteps(
        request=0,
        phase=np.full(len(events), DECODE, np.uint8),
        tokens=np.ones(len(events), np.int64),
        context=np.arange(len(events)) + 1,
        offsets=np.concatenate([[0], np.cumsum([len(event) for event in events])]),
        experts=flat,
        counts=np.ones(len(flat), np.int64),
    )
    for policy in ("lru", "lfu", "fifo", "belady", "eamc"):
        together = count([request], 1, 6, slots, parse(policy), one_at_a_time=True)
        assert together.misses.sum() + together.hits.sum() == len(flat)
        apart = count(accesses(flat, 6), 1, 6, slots, parse(policy))
        assert together.evictions.tolist() == apart.evictions.tolist()


@pytest.mark.slow  # two requests of each are in tests.sim.test_untimed_classic
@pytest.mark.skipif(not EXPECTED, reason="needs the real traces in ../shared/traces")
@pytest.mark.parametrize("name", sorted({case["trace"] for case in EXPECTED}))
@pytest.mark.parametrize("size", [0, 1, 2])
def test_misses_of_real_traces_equal_those_of_two_independent_simulators(name, size):
    trace, _ = import_dump(SHARED / name, SHARED / name.replace(".npz", ".json"))
    for case in [case for case in EXPECTED if case["trace"] == name][size : size + 1]:
        played = trace.head(case["requests"])
        played = played if played.phases == "decode" else played.as_decode()
        requests = [played.steps(i) for i in range(case["requests"])]
        for policy in ("lru", "lfu", "belady"):
            log = count(requests, trace.layers, trace.num_experts, case["capacity"], parse(policy), one_at_a_time=True)
            assert log.misses.sum() == case[policy], (policy, case["capacity"])
            assert log.misses.sum() + log.hits.sum() == case["accesses"]


@pytest.mark.parametrize("sizes", [None, (1, 9, 3)])
def test_a_log_of_evictions_that_fills_up_is_read_in_between(sizes, monkeypatch):
    trace = synthetic(requests=2, tokens=200, layers=3, experts=6, top_k=3, seed=3)
    requests = [trace.steps(i) for i in range(2)]
    each = None if sizes is None else np.repeat(np.array(sizes), 6)

    def evicted():
        parts: list[RunLog] = []
        play(requests, 3, 6, 7 if sizes is None else 30, parse("lru"), parts.append, sizes=each)
        return joined(parts).evictions.tolist()

    whole = evicted()
    monkeypatch.setattr(untimed, "MOST_EVICTIONS", 1)
    assert evicted() == whole
    assert len(whole) > 4 * 18 * 4, "several times the log of 18 experts and 3 layers"


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "belady", "clock", "eamc", "eamc-blend", "lru@layer"])
@given(traces(), st.integers(1, 20), st.booleans())
@settings(max_examples=25)
def test_counts_are_those_of_a_machine_that_takes_no_time(policy, trace, slots, cold):
    shape = Shape(trace.layers, trace.num_experts)
    slots = max(slots, trace.layers) if "@" in policy else slots
    requests = [trace.steps(i) for i in range(len(trace.requests))]
    log = count(requests, trace.layers, trace.num_experts, slots, parse(policy), cold)
    machine = FixedTiming(0, 0, 0, 0, 0), Link(0, 0, 1, 1), cold
    timed = simulate(gpu_run(requests, shape, slots, parse(policy).without_prefetch(), *machine))
    for column in ("hits", "misses", "demand_transfers", "evictions"):
        assert getattr(log, column).tolist() == getattr(timed, column).tolist(), column
