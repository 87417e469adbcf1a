"""The SimPy engine against the oracle `tests.reference`, to the nanosecond: stored cases and random ones.

One generator serves both sources of chance: random.Random, which is fast, and Hypothesis, which shrinks.
Its numbers are small, so that transfers and computes tie, contend and take no time at all.
"""

import gzip
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import registry, spec
from policies.core import runner as pair
from policies.core.policy import Event, Float, Int, Prefetcher, RetentionPolicy, Shape
from policies.core.residency import Residency
from policies.core.spec import PolicySpec
from sim.engines import cases
from sim.loop.log import RunLog
from tests import reference

Case = dict[str, Any]

STORED_CASES = Path(__file__).with_name("cases.jsonl.gz")
SHARED_CASES = Path(__file__).parents[3] / "shared" / "design" / "cases.jsonl"
SEEDS = 600

registry.tables()  # loads every policy before the tables are patched, so that no patch undoes it


def draw_case(integer: Callable[[int, int], int]) -> Case:
    """A random case, from a source of integers in a closed range; part of it is the oracle's own format."""

    def choice(*options: Any) -> Any:
        return options[integer(0, len(options) - 1)]

    L, E = integer(1, 5), integer(1, 8)
    longest = choice(1, 3, 10, 40)
    expert_bytes = integer(1, 12)
    most_tokens = choice(1, 3)
    density = integer(1, 4)

    def duration() -> int:
        return choice(0, integer(0, longest), integer(0, longest))

    def event() -> list[list[int]]:
        if integer(0, 9) == 0:
            return []
        return [[expert, integer(1, most_tokens)] for expert in range(E) if integer(1, 4) <= density]

    def proposal() -> list[list[float]]:
        if integer(0, 2) == 0:
            return []
        likely = integer(1, 4)
        return [[id, integer(0, 12) / 2] for id in range(L * E) if integer(1, 8) <= likely]

    requests = [[[event() for _ in range(L)] for _ in range(integer(1, 5))] for _ in range(integer(1, 4))]
    prefetch = choice("none", "oracle1", "oracle1", "popular", "popular", "scripted", "scripted")
    scripted = prefetch == "scripted"
    proposals = [[[proposal() if scripted else [] for _ in step] for step in request] for request in requests]
    partitions = choice(None, [choice(1, integer(1, E + 1)) for _ in range(L)])
    slots = choice(integer(1, 3), integer(1, L * E + 2), integer(1, max(1, L * E // 2)))
    return {
        "L": L,
        "E": E,
        "partitions": partitions,
        "slots": sum(partitions) if partitions else slots,
        "expert_bytes": expert_bytes,
        "link_latency_ns": choice(0, integer(0, 6)),
        "link_ns_per_byte_num": choice(0, 1, 1, integer(0, 5)),
        "link_ns_per_byte_den": integer(1, 4),
        "chunk_bytes": choice(None, integer(1, expert_bytes + 3), integer(1, max(1, expert_bytes // 3))),
        "dense_ns": duration(),
        "expert_ns": duration(),
        "expert_ns_per_token": choice(0, 0, integer(0, 3)),
        "combine_ns": duration(),
        "head_ns": duration(),
        "predictor_ns": choice(0, 0, duration()),
        "evict": choice("lru", "lfu", "fifo", "belady"),
        "prefetch": prefetch,
        "popular_n": integer(1, E + 1),
        "cold": choice(False, False, True),
        "one_scale": choice(False, False, True),
        "requests": requests,
        "proposals": proposals,
    }


def play(case: Case, engine: str = "simpy") -> Case:
    """An engine's result of a case, stall by cause included."""

    def result_with_stalls(log: RunLog) -> Case:
        return {**case_result(log), "stalls": log.stall_ns.sum(axis=0).tolist()}

    partitions = case.get("partitions")

    def residency(shape: Shape, divided: Sequence[int], policy: RetentionPolicy, one_scale: bool) -> Residency:
        assert len(divided) == (len(partitions) if partitions else 1)
        return Residency(shape, partitions or divided, policy, case.get("one_scale", False))

    def parse(text: str) -> PolicySpec:
        return spec.parse(f"{text}@layer" if partitions else text)

    class Scripted(Prefetcher):
        name, observes = "scripted", False

        def propose(self, event: Event) -> tuple[Int, Float]:
            script = case["proposals"][event.request][event.step][event.layer]
            table = np.array(script, np.float64).reshape(-1, 2)
            return table[:, 0].astype(np.int64), table[:, 1]

    case_result = cases.case_result
    with (
        patch.object(cases, "case_result", result_with_stalls),
        patch.object(pair, "Residency", residency),
        patch.object(cases, "parse", parse),
        patch.dict(registry._prefetch, scripted=Scripted),
    ):
        return cases.run_case(case, engine)


def stored_cases() -> list[Case]:
    with gzip.open(STORED_CASES, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def without_stalls(result: Case) -> Case:
    return {key: value for key, value in result.items() if key != "stalls"}


@pytest.mark.parametrize("player", [reference.run_case, play], ids=["reference", "engine"])
def test_every_stored_case_ends_as_two_independent_engines_agreed(player: Callable[[Case], Case]) -> None:
    cases = stored_cases()
    assert len(cases) == 400
    for number, case in enumerate(cases, 1):
        assert without_stalls(player(case)) == case["expected"], f"stored case {number}"


def test_the_stored_cases_are_the_shared_ones() -> None:
    if not SHARED_CASES.exists():
        pytest.skip("no shared/design/cases.jsonl beside this checkout")
    with SHARED_CASES.open(encoding="utf-8") as lines:
        assert stored_cases() == [json.loads(line) for line in lines]


def test_the_engine_equals_the_reference_on_seeded_random_cases() -> None:
    for seed in range(SEEDS):
        case = draw_case(random.Random(seed).randint)
        assert play(case) == reference.run_case(case), f"draw_case(random.Random({seed}).randint)"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_the_engine_equals_the_reference_on_cases_that_hypothesis_shrinks(data: st.DataObject) -> None:
    case = draw_case(lambda low, high: data.draw(st.integers(low, high)))
    assert play(case) == reference.run_case(case), json.dumps(case)


class LruInPython(RetentionPolicy):
    """LRU without scores: the residency machine asks it for every victim in Python."""

    name = "lru"
    observes = False

    def __init__(self, shape: Any, options: object) -> None:
        super().__init__(shape, options)
        self.recency: dict[int, int] = {}

    def on_hit(self, expert: int, serial: int) -> None:
        self.recency[expert] = serial

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        self.recency[expert] = serial

    def victim(self, evictable: Int) -> int:
        return min(evictable.tolist(), key=lambda expert: (self.recency[expert], expert))


def test_a_policy_that_names_its_victims_in_python_plays_as_the_compiled_one() -> None:
    with patch.dict(registry._retention, lru=LruInPython):
        for seed in range(100):
            case = {**draw_case(random.Random(seed).randint), "evict": "lru", "one_scale": False}
            assert play(case) == reference.run_case(case), f"draw_case(random.Random({seed}).randint), as lru"


def test_the_random_cases_reach_every_kind_of_lookup_and_every_stall_that_one_link_can_cause() -> None:
    results = [reference.run_case(draw_case(random.Random(seed).randint)) for seed in range(SEEDS)]
    assert all(sum(result["stalls"]) == result["stall_ns"] for result in results)
    for key in ("hits", "late", "misses", "bytes_prefetch", "bytes_wasted", "evictions"):
        assert sum(bool(result[key]) for result in results) >= 50, key
    reached = [sum(result["stalls"][cause] > 0 for result in results) for cause in range(5)]
    assert min(reached[:4]) >= 20
    assert reached[4] == 0, "who waits has computed all it had, so of its READY experts none is pinned"
