"""The oracle `tests.reference` itself: the stored cases, what must be equal to what, and examples by hand.

Rules 13, 15, 17 and 18 are judged by the stored cases, on which two independent engines agree; one clause of rule 2
that they do not reach is worked out by hand too.
"""

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import reference
from tests.support.reference_cases import STORED_CASES, STORED_TIERS_CASES, Case, draw_tiers_case, stored_cases

SHARED = Path(__file__).parents[3] / "shared" / "design"
SEEDS = 600
FEWER = 150
"""Of those that are compared with others."""

stored = pytest.mark.parametrize("path", [STORED_CASES, STORED_TIERS_CASES], ids=lambda path: path.name)


@stored
def test_every_stored_case_ends_as_two_independent_engines_agreed(path: Path) -> None:
    cases = stored_cases(path)
    assert len(cases) == 400
    for number, case in enumerate(cases, 1):
        result = reference.run_case(case)
        assert {key: result[key] for key in case["expected"]} == case["expected"], f"stored case {number}"


@stored
def test_the_stored_cases_are_the_shared_ones(path: Path) -> None:
    shared = SHARED / path.stem
    if not shared.exists():
        pytest.skip(f"no shared/design/{path.stem} beside this checkout")
    with shared.open(encoding="utf-8") as lines:
        assert stored_cases(path) == [json.loads(line) for line in lines]


def tiers_case(seed: int) -> Case:
    return draw_tiers_case(random.Random(seed).randint)


@cache
def results() -> list[tuple[Case, Case]]:
    """Random cases, each with its result."""
    return [(case, reference.run_case(case)) for case in map(tiers_case, range(SEEDS))]


def test_the_random_tiers_cases_reach_every_key_every_count_and_every_cause_of_stall_that_can_be() -> None:
    cases, ended = zip(*results(), strict=True)
    assert all(sum(result["stalls"]) == result["stall_ns"] for result in ended)
    for key in set().union(*cases):
        assert sum(case.get(key) not in (None, 0) for case in cases) >= 50, key
    for key in ended[0].keys() - {"stalls"}:
        assert sum(any(result[key] or []) if isinstance(result[key], list) else bool(result[key]) for result in ended)
    reached = [sum(result["stalls"][cause] > 0 for result in ended) for cause in range(7)]
    assert min(reached[:6]) >= 20
    assert reached[6] == 0, "who waits has computed all it had, here and on the host, so none of it is pinned"


def test_everything_that_is_admitted_is_accounted_for() -> None:
    for case, result in results():
        assert len(result["token_ns"]) == sum(len(request) for request in case["requests"])
        assert result["on_host"] <= result["misses"]
        if case.get("max_batch") is None:
            assert sum(result["token_ns"]) == result["end_ns"]
        elif case["arrival_ns"] is not None:
            latencies = iter(result["token_ns"])
            served = [sum(next(latencies) for _ in request) for request in case["requests"]]
            ends = map(sum, zip(case["arrival_ns"], result["wait_ns"], served, strict=True))
            assert max(ends) == result["end_ns"]


def same(one: Case, other: Case) -> bool:
    ours, theirs = reference.run_case(one), reference.run_case(other)
    return {**ours, "wait_ns": None} == {**theirs, "wait_ns": None}


def test_one_user_without_arrival_times_is_the_run_of_one_request_after_another() -> None:
    for seed in range(FEWER):
        case = tiers_case(seed) | {"max_batch": None}
        alone = {"max_batch": 1, "arrival_ns": None, "prefill": [True for _ in case["requests"]]}
        assert same(case | alone, case), f"tiers_case({seed})"


def test_equal_sizes_in_bytes_are_the_slots_of_before() -> None:
    for seed in range(FEWER):
        case = {key: value for key, value in tiers_case(seed).items() if "capacity" not in key} | {"partitions": None}
        slots = case | {"slots": 3, "layer_bytes": None}
        capacity: dict[str, Any] = {"slots": None, "capacity_bytes": 3 * case["expert_bytes"]}
        capacity |= {"layer_bytes": [case["expert_bytes"] for _ in range(case["L"])]}
        if "disk_latency_ns" in case:
            slots["host_slots"] = 4
            capacity |= {"host_slots": None, "host_capacity_bytes": 5 * case["expert_bytes"] - 1}
        assert same(slots, slots | capacity), f"tiers_case({seed})"


def test_no_layer_on_the_host_is_fetch_and_every_layer_is_host() -> None:
    for seed in range(FEWER):
        case = {"host_ns": 2, "hop_ns": 1, **tiers_case(seed), "placement": "layers"}
        assert same(case | {"host_layers": 0}, case | {"placement": "fetch"}), f"tiers_case({seed})"
        assert same(case | {"host_layers": case["L"]}, case | {"placement": "host"}), f"tiers_case({seed})"


NOTHING = ["link_latency_ns", "dense_ns", "expert_ns", "expert_ns_per_token", "combine_ns", "head_ns", "predictor_ns"]
BARE: Case = {
    **dict.fromkeys(NOTHING, 0),
    "expert_bytes": 1,
    "link_ns_per_byte_num": 1,
    "link_ns_per_byte_den": 1,
    "chunk_bytes": None,
    "prefetch": "none",
    "cold": False,
}
BY_LAYER = BARE | {"L": 2, "E": 2, "layer_bytes": [1, 3], "capacity_bytes": 4}


def test_rule_2_pins_an_expert_that_is_prefetched_while_the_host_computes_it_until_that_ends() -> None:
    case = BARE | {"L": 1, "E": 4, "slots": 2, "evict": "fifo", "predictor_ns": 5, "link_ns_per_byte_num": 2}
    case |= {"placement": "host", "host_ns_per_token": 1, "requests": [[[[[2, 1]]], [[[0, 100]]], [[[3, 1]]]]]}
    case |= {"prefetch": "scripted", "proposals": [[[[[1, 2.0], [0, 1.0]]], [[[2, 2.0], [3, 1.0]]], [[]]]]}
    result = reference.run_case(case)
    # 0 is READY at 9 and computed from 5 to 105. 2 takes the slot of 1 at 10, but 3 that of 0 only at 105: 3 is late.
    assert (result["token_ns"], result["on_host"], result["late"]) == ([5, 100, 5], 2, 1)
    assert (result["evictions"], result["bytes_wasted"]) == ([1, 0], 2)


def test_rule_19_evicts_one_after_another_until_the_bytes_are_enough() -> None:
    requests = [[[[[0, 1], [1, 1]], [[0, 1]]], [[], [[1, 1]]]]]
    result = reference.run_case(BY_LAYER | {"evict": "lru", "requests": requests})
    assert (result["token_ns"], result["bytes_demand"], result["evictions"]) == ([1 + 1 + 3, 3], 8, [0, 1, 2])


def test_rule_19_evicts_none_if_all_that_is_evictable_is_not_enough() -> None:
    requests = [[[[], [[0, 1]]], [[[0, 1]], [[0, 1], [1, 1]]]]]
    result = reference.run_case(BY_LAYER | {"evict": "fifo", "expert_ns": 5, "requests": requests})
    assert result["token_ns"] == [3 + 5, (1 + 5) + (5 + 3 + 5)]
    assert result["evictions"] == [2], "expert 2 was pinned, and 0 alone too small; once 2 is computed it goes first"


def test_rule_19_holds_in_host_memory_and_reads_take_the_bytes_of_their_layer() -> None:
    disk = {"host_capacity_bytes": 4, "disk_latency_ns": 10, "disk_ns_per_byte_num": 2, "disk_ns_per_byte_den": 1}
    requests = [[[[[0, 1], [1, 1]], [[0, 1]]], [[], [[1, 1]]]]]
    result = reference.run_case(BY_LAYER | disk | {"evict": "lru", "capacity_bytes": 8, "requests": requests})
    assert result["token_ns"] == [12 + 12 + 1 + 16 + 3, 16 + 3]
    assert (result["reads_demand"], result["host_evictions"], result["evictions"]) == (4, [0, 1, 2], [])
