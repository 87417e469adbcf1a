"""Both engines against the oracle `tests.reference`, to the nanosecond: stored cases and random ones.

Rules 1 to 15, 17 to 19 and 21 of docs/contract.md, all at once.
"""

import json
import os
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import registry
from policies.core.policy import Event, Int, Policy
from policies.retention.lru import LRU
from sim.engines.cases import ENGINES
from tests import reference
from tests.support.reference_cases import (
    STORED_CASES,
    STORED_TIERS_CASES,
    Case,
    draw_admission_case,
    draw_case,
    draw_tiers_case,
    play,
    stored_cases,
)

SEEDS = 600
TIERS = int(os.environ.get("MOE_FUZZ_CASES", "400"))
BATCHES = 8

registry.tables()  # loads every policy before the tables are patched, so that no patch undoes it


def assert_equals_the_reference(case: Case, expected: Case, what: str) -> None:
    """On both engines, but for a script of proposals, which the compiled one does not run."""
    for engine in ENGINES if case["prefetch"] != "scripted" else ("simpy",):
        assert play(case, engine) == expected, f"{engine}: {what}"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("path", [STORED_CASES, STORED_TIERS_CASES], ids=lambda path: path.name)
def test_the_engines_end_every_stored_case_as_two_independent_engines_agreed(path: Path, engine: str) -> None:
    for number, case in enumerate(stored_cases(path), 1):
        result = play(case, engine)
        assert {key: result[key] for key in case["expected"]} == case["expected"], f"stored case {number}"


@cache
def results() -> list[tuple[Case, Case]]:
    """Random cases, each with its result."""
    return [(case, reference.run_case(case)) for case in (draw_case(random.Random(i).randint) for i in range(SEEDS))]


def test_the_engines_equal_the_reference_on_seeded_random_cases() -> None:
    for seed, (case, result) in enumerate(results()):
        assert_equals_the_reference(case, result, f"draw_case(random.Random({seed}).randint)")


@pytest.mark.parametrize("draw", [draw_tiers_case, draw_admission_case])
@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_engines_equal_the_reference_on_seeded_random_runs_of_tiers_and_users(
    batch: int, draw: Callable[[Callable[[int, int], int]], Case]
) -> None:
    for seed in range(batch, TIERS, BATCHES):
        case = draw(random.Random(seed).randint)
        assert_equals_the_reference(case, reference.run_case(case), f"{draw.__name__}(random.Random({seed}).randint)")


@pytest.mark.parametrize("draw", [draw_case, draw_tiers_case, draw_admission_case])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_the_engines_equal_the_reference_on_cases_that_hypothesis_shrinks(
    draw: Callable[[Callable[[int, int], int]], Case], data: st.DataObject
) -> None:
    case = draw(lambda low, high: data.draw(st.integers(low, high)))
    assert_equals_the_reference(case, reference.run_case(case), json.dumps(case))


class LruInPython(Policy):
    """LRU without scores: the residency asks it for every victim in Python."""

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
        return int(min(evictable.tolist(), key=lambda expert: (self.recency[expert], expert)))


def test_a_policy_that_names_its_victims_in_python_plays_as_the_compiled_one() -> None:
    with patch.dict(registry._retention, lru=LruInPython):
        for seed in range(100):
            case = {**draw_case(random.Random(seed).randint), "evict": "lru", "one_scale": False}
            assert play(case) == reference.run_case(case), f"draw_case of seed {seed}, as lru"


class LruOfEvenIds(LRU):
    """LRU that admits experts of even ids alone, and says so in Python."""

    name = "lru"

    def admit(self, event: Event) -> Int:
        return np.extract(event.experts % 2 == 0, event.experts)


def test_a_policy_that_admits_by_itself_is_asked_by_both_engines() -> None:
    with patch.dict(registry._retention, lru=LruOfEvenIds):
        for seed in range(100):
            case = {**draw_admission_case(random.Random(seed).randint), "evict": "lru", "admission": "own"}
            assert_equals_the_reference(case, reference.run_case(case), f"draw_admission_case of seed {seed}, own")


def test_the_random_cases_reach_every_kind_of_lookup_and_every_stall_that_one_link_can_cause() -> None:
    ended = [result for _, result in results()]
    assert all(sum(result["stalls"]) == result["stall_ns"] for result in ended)
    for key in ("hits", "late", "misses", "bytes_prefetch", "bytes_wasted", "evictions"):
        assert sum(bool(result[key]) for result in ended) >= 50, key
    reached = [sum(result["stalls"][cause] > 0 for result in ended) for cause in range(7)]
    assert min(reached[:4]) >= 20
    assert not any(reached[4:]), "who waits has computed all it had, so of its READY experts none is pinned"
