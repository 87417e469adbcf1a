"""Rules of docs/contract.md by hand: for each the smallest run that shows it, on both engines.

A transfer takes 10 ns; an expert computes for 3, combine and head take 1 each.
"""

from typing import Any

import pytest

from sim.engines.cases import run_case
from tests.sim.test_conformance import CASE

Routing = list[list[list[int]]]  # of one request: experts of each layer of each step

pytestmark = pytest.mark.parametrize("engine", ["simpy", "compiled"])


def outcome(engine: str, *requests: Routing, slots: int, dense: int = 5, **keys: Any) -> dict[str, Any]:
    case = CASE | {"L": len(requests[0][0]), "E": 3, "slots": slots, "dense_ns": dense, "popular_n": 1}
    case |= {"link_latency_ns": 0, "link_ns_per_byte_den": 1, "expert_ns_per_token": 0}
    case["requests"] = [[[[[e, 1] for e in event] for event in step] for step in request] for request in requests]
    return run_case(case | keys, engine)


def test_rule_1_a_prefetch_under_way_is_late_and_one_only_queued_a_miss(engine: str) -> None:
    """Router at 5, demand of expert 0 until 15, prefetch of 3 until 25; router of layer 1 at 24, 4 is still queued."""
    result = outcome(engine, [[[0], [0, 1]]], slots=6, prefetch="oracle1")
    assert [result[key] for key in ("hits", "late", "misses")] == [0, 1, 2]
    assert [result[key] for key in ("bytes_prefetch", "bytes_demand")] == [10, 20]


def test_rule_15_a_transfer_ends_before_a_router_of_the_same_nanosecond(engine: str) -> None:
    """The same with prefetch and router both at 26: 3 is a hit, and the transfer that its end let start is late."""
    result = outcome(engine, [[[0], [0, 1]]], slots=6, dense=6, prefetch="oracle1")
    assert [result[key] for key in ("hits", "late", "misses")] == [1, 1, 1]


def test_rule_2_a_hit_keeps_its_slot_until_it_is_computed(engine: str) -> None:
    """The demand of expert 2 waits for the end of hit 0, then evicts it: 5 + 3 + 10 + 3, combine and head."""
    result = outcome(engine, [[[0, 1]], [[0, 1, 2]]], slots=2)
    assert result["token_ns"][1] == 5 + 3 + 10 + 3 + 1 + 1
    assert result["evictions"] == [0]


def test_rules_3_and_4_popularity_includes_the_event_that_has_just_been_routed(engine: str) -> None:
    """What layer 1 used in the first step is proposed in the second, in time; a new proposal replaces the queue."""
    result = outcome(engine, [[[0], [1]], [[0], [1]], [[0], [2]]], slots=6, prefetch="popular")
    assert [result[key] for key in ("hits", "late", "misses")] == [3, 0, 3]
    alone = outcome(engine, [[[0], [1]], [[2], [1]]], slots=2, prefetch="popular", dense=50)
    assert [alone[key] for key in ("hits", "misses", "bytes_prefetch")] == [1, 3, 0], "1 is there and left out"


def test_rule_6_no_prefetch_evicts_a_protected_expert(engine: str) -> None:
    """One slot: the prefetch of 3 evicts 0, that of 4 waits until 3 has been looked up and computed."""
    result = outcome(engine, [[[0], [0, 1]]], slots=1, dense=50, prefetch="oracle1")
    assert result["evictions"] == [0, 3]
    assert [result[key] for key in ("hits", "misses", "bytes_prefetch", "bytes_wasted")] == [1, 2, 10, 0]


@pytest.mark.parametrize(("slots", "chosen", "evictions"), [(1, [0], [0, 3, 0, 3]), (2, [1, 2], [0, 3, 1, 2])])
def test_rule_6_demand_evicts_a_protected_expert_only_if_nothing_else_is_evictable(
    engine: str, slots: int, chosen: list[int], evictions: list[int]
) -> None:
    """Layer 1 chooses 4 where 3 was prefetched, which LFU counts 0; the proposal stands while the predictor runs."""
    routing = [[[0], [0]], [chosen, [1]]]
    result = outcome(engine, routing, slots=slots, dense=50, predictor_ns=20, prefetch="popular", evict="lfu")
    assert result["evictions"] == evictions
    assert result["bytes_prefetch"] == 10


@pytest.mark.parametrize(("evict", "victim"), [("lru", 1), ("lfu", 1), ("fifo", 0)])
def test_rule_8_scores(engine: str, evict: str, victim: int) -> None:
    assert outcome(engine, [[[0]], [[1]], [[0]], [[2]]], slots=2, evict=evict)["evictions"] == [victim]


def test_rule_8_experts_of_one_event_share_its_number_and_the_lower_id_goes_first(engine: str) -> None:
    assert outcome(engine, [[[0, 1]], [[2]]], slots=2)["evictions"] == [0]


def test_rules_7_and_9_one_slot_serves_an_event_of_three_and_evicting_takes_no_time(engine: str) -> None:
    result = outcome(engine, [[[0, 1, 2]]], slots=1)
    assert result["token_ns"] == [5 + 3 * (10 + 3) + 1 + 1]
    assert result["evictions"] == [0, 1]


@pytest.mark.parametrize(("cold", "misses"), [(False, 1), (True, 2)])
def test_rule_10_a_cold_end_empties_the_cache_and_evicts_nothing(engine: str, cold: bool, misses: int) -> None:
    result = outcome(engine, [[[0]]], [[[0]]], slots=1, cold=cold)
    assert result["misses"] == misses
    assert result["evictions"] == []
