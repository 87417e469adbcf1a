"""Driver and pump where completions come in any order, as on real devices: invariants that need no clock."""

import random

import numpy as np
import pytest

from policies.contract import Shape
from policies.registry import parse
from replay.driver import Plan, play
from sim.cells import Requests
from sim.untimed import count
from tests.replay.cases import draw
from tests.replay.devices import AnyOrder, Watch
from traces.synthetic import synthetic

SEEDS = 250


def watched(seed: int) -> tuple[Plan, Watch]:
    plan = draw(random.Random(seed).randint).plan
    return plan, Watch(plan.shape, plan.slots, plan.expert_bytes, chunks_in_flight=1 + seed % 2)


def test_no_slot_is_overwritten_while_it_computes_or_loads_and_nothing_computes_before_it_arrived() -> None:
    for seed in range(SEEDS):
        plan, watch = watched(seed)
        log = play(plan, AnyOrder(watch, seed))
        lookups = sum(len(request.experts) for request in plan.requests)
        assert watch.computed == lookups == (log.hits + log.late + log.misses).sum(), f"seed {seed}"
        assert log.demand_transfers.sum() == log.misses.sum()


def test_with_two_chunks_in_flight_the_link_never_waits_for_the_host_between_two_misses() -> None:
    trace = synthetic(requests=2, tokens=20, layers=3, experts=8, top_k=3, seed=5)
    shape, requests = Shape(3, 8), list(Requests(trace))
    for slots, at_once in ((6, 2), (1, 1)):
        watch = Watch(shape, slots, 64, chunks_in_flight=2)
        play(Plan(requests, shape, slots, parse("lru"), 64), device := AnyOrder(watch, 3))
        left_behind = [n for n in device.behind_a_copy if n]
        assert max(device.behind_a_copy) == at_once - 1, "with one slot nothing can follow"
        assert len(left_behind) > 60 or at_once == 1


def test_prefetched_is_used_wasted_or_still_there() -> None:
    for seed in range(SEEDS):
        plan, watch = watched(seed)
        log = play(plan, AnyOrder(watch, seed))
        left = log.prefetch_transfers.sum() - log.prefetch_used.sum() - log.prefetch_wasted.sum()
        assert 0 <= left <= plan.slots, f"seed {seed}"


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_without_prefetch_the_order_of_completions_decides_nothing_but_time(policy: str) -> None:
    """One expert a layer: then nothing is left to chance, and misses are those of the untimed analysis."""
    trace = synthetic(requests=4, tokens=20, layers=4, experts=8, top_k=1, seed=3)
    requests, shape = Requests(trace), Shape(4, 8)
    expected = count(requests, 4, 8, 10, parse(policy))
    for seed in range(5):
        plan = Plan(requests, shape, 10, parse(policy), expert_bytes=64, chunk_bytes=16)
        log = play(plan, AnyOrder(Watch(shape, 10, 64, chunks_in_flight=2), seed))
        np.testing.assert_array_equal(log.misses, expected.misses)
        np.testing.assert_array_equal(log.evictions, expected.evictions)


def test_each_step_is_reported_as_it_ends() -> None:
    plan, watch = watched(5)
    reported: list[list[int]] = []
    log = play(plan, AnyOrder(watch, 5), reported.append)
    assert [row[3] for row in reported] == log.step_ns.tolist()
