"""Counts without a clock: against simulators that this project did not write, and against a machine without time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.catalog import available
from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines import untimed
from sim.engines.simpy_engine import simulate
from sim.engines.untimed import count, play
from sim.loop.log import RunLog, joined
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.strategies import traces
from tests.support.untimed_oracle import SHARED, accesses, oracle_misses
from traces import DECODE, Trace
from traces.importers import import_dump
from traces.steps import RequestSteps
from traces.synthetic import synthetic

CLASSIC = ["lfu-perfect", "lfu-aged:half_life=20", "lrfu:decay=0.1", "clock", "clock:bits=2", "sieve", "s3fifo", "arc"]
CLASSIC += ["random", "least-stale", "lru", "lfu", "fifo"]
THEIRS = {"fifo": "FIFO", "clock": "Clock", "sieve": "Sieve", "s3fifo": "S3FIFO", "arc": "ARC"}
THEIRS |= {"lru": "LRU", "lfu": "LFU", "belady": "Belady"}
EXPERTS = 60


def sequence(kind: str, n: int = 1_000) -> np.ndarray:
    rng = np.random.default_rng(7)
    zipf, cyclic = rng.zipf(1.3, n) % EXPERTS, np.arange(n) % 37
    return {
        "random": rng.integers(0, EXPERTS, n),
        "zipf": zipf,
        "cyclic": cyclic,
        "mixed": np.where(rng.random(n) < 0.5, zipf, cyclic),
        "shifting": (rng.zipf(1.5, n) + np.arange(n) // 200 * 7) % EXPERTS,
    }[kind]


def misses(policy: str, ids: np.ndarray, slots: int, total: int = EXPERTS) -> int:
    return int(count(accesses(ids, total), 1, total, slots, parse(policy)).misses.sum())


@pytest.mark.parametrize("kind", ["random", "zipf", "cyclic", "mixed", "shifting"])
@pytest.mark.parametrize("policy", THEIRS)
def test_misses_equal_libcachesims_to_the_unit(policy, kind):
    """S3-FIFO from 20 slots on: with fewer libCacheSim's small queue has no room, and it caches nothing or aborts."""
    ids = sequence(kind)
    for slots in (20, 29, 37, 45, 59) if policy == "s3fifo" else (1, 2, 7, 20, 36, 45, 59):
        assert misses(policy, ids, slots) == oracle_misses(THEIRS[policy], ids, slots), slots


def test_s3fifo_caches_in_less_than_20_slots_where_libcachesim_does_not():
    ids = sequence("zipf")
    assert oracle_misses("S3FIFO", ids, 19) == len(ids)
    assert misses("s3fifo", ids, 19) < misses("fifo", ids, 19)


@pytest.mark.parametrize("dump", ["gpt-oss-20b-decode", "deepseek-v2-lite-prefill"])
@pytest.mark.parametrize("part", [4, pytest.param(10, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_misses_of_real_traces_equal_libcachesims(dump, part):
    if not (SHARED / f"{dump}.npz").exists():
        pytest.skip("needs the real traces in ../shared/traces")
    trace, _ = import_dump(SHARED / f"{dump}.npz", SHARED / f"{dump}.json")
    short = trace.select(np.array([2, 3]))
    played = short if short.phases == "decode" else short.as_decode()
    requests = [played.steps(i) for i in range(2)]
    ids, total = np.concatenate([request.experts for request in requests]), trace.layers * trace.num_experts
    slots = total // part
    for policy, theirs in THEIRS.items():
        log = count(requests, trace.layers, trace.num_experts, slots, parse(policy), one_at_a_time=True)
        assert log.misses.sum() == oracle_misses(theirs, ids, slots), policy


@given(st.lists(st.integers(0, 7), min_size=1, max_size=80), st.integers(1, 8), st.sampled_from(CLASSIC))
def test_belady_is_never_beaten_untimed(ids, slots, policy):
    assert misses("belady", np.array(ids), slots, 8) <= misses(policy, np.array(ids), slots, 8)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=80), st.integers(1, 7))
def test_lrfus_ends_are_perfect_lfu_and_lru(ids, slots):
    for decay, policy in ((0, "lfu-perfect"), (1, "lru")):
        ours, ends = (
            count(accesses(np.array(ids), 8), 1, 8, slots, parse(p)).evictions for p in (f"lrfu:decay={decay}", policy)
        )
        assert ours.tolist() == ends.tolist()


@given(st.lists(st.integers(0, 7), min_size=1, max_size=80), st.integers(1, 7))
def test_perfect_lfu_counts_over_the_whole_run(ids, slots):
    counts, last, resident, evictions = [0] * 8, [0] * 8, set[int](), []
    for serial, expert in enumerate(ids, start=1):
        counts[expert], last[expert] = counts[expert] + 1, serial
        if expert not in resident and len(resident) == slots:
            evictions.append(min(resident, key=lambda e: (counts[e], last[e])))
            resident.remove(evictions[-1])
        resident.add(expert)
    for policy in ("lfu-perfect", "lfu-aged:half_life=1000"):
        assert count(accesses(np.array(ids), 8), 1, 8, slots, parse(policy)).evictions.tolist() == evictions


def test_an_aged_lfu_follows_a_shift_on_which_a_perfect_one_freezes():
    early, late = np.arange(4_000) % 5, 5 + np.arange(1_000) % 5
    ids = np.concatenate([early, late])
    assert misses("lfu-perfect", ids, 5) > 1_000
    assert misses("lfu-aged:half_life=100", ids, 5) < 200
    assert misses("lrfu:decay=0.02", ids, 5) < 200


TRACE = synthetic(3, 25, 3, 8, 2, seed=4, prompt_tokens=6)
REQUESTS: list[RequestSteps] = [TRACE.steps(i) for i in range(3)]


@pytest.mark.parametrize(("prefetch", "cold"), [("none", True), ("popular:n=3", False), ("oracle1", True)])
@pytest.mark.parametrize("policy", [policy for policy in CLASSIC if not parse(policy).compiled])
def test_each_plays_the_timed_engine_twice_alike(policy, prefetch, cold):
    """Chunks, pins, prefetches that are late, protected or in the way, and cold ends, in a cache of every tightness."""
    timing = FixedTiming(dense=1_000, expert=300, expert_per_token=20, combine=50, head=700)
    link = Link(latency_ns=100, ns_per_byte_num=1, ns_per_byte_den=4, expert_bytes=8_000, chunk_bytes=1_000)
    for slots in (1, 2, 5, 12, 23):
        first, second = (
            simulate(gpu_run(REQUESTS, Shape(3, 8), slots, parse(f"{policy}+{prefetch}"), timing, link, cold))
            for _ in range(2)
        )
        lookups = sum(len(request.experts) for request in REQUESTS)
        assert first.hits.sum() + first.late.sum() + first.misses.sum() == lookups
        assert first.evictions.tolist() == second.evictions.tolist()
        assert first.step_ns.tolist() == second.step_ns.tolist()
        assert first.hits.tolist() == second.hits.tolist()


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


CAUSAL = [info.name for info in available() if info.kind in ("retention", "pair") and not info.oracle]
CAUSAL.remove("static")  # it needs a profile, and learns nothing


def victims(trace: Trace, policy: str) -> list[int]:
    requests = [trace.steps(i) for i in range(len(trace.requests))]
    return [int(each) for each in count(requests, trace.layers, trace.num_experts, 12, parse(policy)).evictions]


def with_another_second_half(policy: str) -> tuple[list[int], list[int], list[int]]:
    """Victims in the first half of a trace alone, and in all of it, with two second halves."""
    trace = synthetic(4, 60, 3, 16, 2, seed=2, prompt_tokens=4)
    other, half = trace.experts.copy(), len(trace.experts) // 2
    other[half:] = 15 - other[half:]
    first = trace.head(2)
    assert len(first.experts) == half
    return victims(first, policy), victims(trace, policy), victims(replace(trace, experts=other), policy)


@pytest.mark.parametrize("policy", CAUSAL)
def test_what_comes_later_changes_no_victim_before(policy):
    first, whole, another = with_another_second_half(policy)
    assert whole[: len(first)] == another[: len(first)] == first
    assert whole != another


def test_what_comes_later_changes_the_victims_of_an_oracle():
    first, whole, another = with_another_second_half("belady")
    assert whole[: len(first)] != another[: len(first)]
