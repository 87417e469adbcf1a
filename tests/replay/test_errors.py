"""The figures of a comparison, by hand and against slow implementations of their definitions."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.comparison import errors
from sim.loop.log import COLUMNS, RunLog, Share, StepRow

NS = st.integers(1, 10**6)
VECTORS = st.integers(1, 30).flatmap(lambda n: st.tuples(*[st.lists(NS, min_size=n, max_size=n)] * 2))
FEW = st.integers(0, 4).map(float)  # many ties
PAIRS = st.integers(2, 8).flatmap(lambda n: st.tuples(*[st.lists(FEW, min_size=n, max_size=n)] * 2))


def slow_percentile(values: Sequence[int], percent: int) -> Fraction:
    """Between the two nearest ranks, as an exact fraction."""
    ordered = sorted(values)
    place = Fraction(percent, 100) * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def slow_rank(values: Sequence[float], value: float) -> float:
    return sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2


@given(VECTORS)
def test_errors_equal_their_definitions_in_exact_fractions(vectors: tuple[list[int], list[int]]) -> None:
    measured, predicted = vectors
    found = errors.time_errors(np.array(measured), np.array(predicted))
    expected = {
        "tpot_mean": Fraction(sum(predicted), sum(measured)) - 1,
        **{
            name: slow_percentile(predicted, percent) / slow_percentile(measured, percent) - 1
            for name, percent in (("tpot_p50", 50), ("tpot_p95", 95), ("tpot_p99", 99))
        },
        "token_mape": Fraction(sum(abs(Fraction(p, m) - 1) for m, p in zip(measured, predicted, strict=True)))
        / len(measured),
    }
    assert found == pytest.approx({name: float(value) for name, value in expected.items()}, abs=1e-9)


def test_errors_of_equal_vectors_are_zero_also_where_a_token_takes_no_time() -> None:
    same = np.array([0, 0, 3])
    assert set(errors.time_errors(same, same).values()) == {0.0}
    assert errors.relative(5, 0) == math.inf


@given(PAIRS)
def test_spearman_is_pearsons_correlation_of_ranks_that_were_counted(pair: tuple[list[float], list[float]]) -> None:
    a, b = pair
    slow = [[slow_rank(values, value) for value in values] for values in pair]
    found = errors.spearman(a, b)
    if len(set(a)) == 1 or len(set(b)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(statistics.correlation(*slow))


def test_pairs_within_the_noise_do_not_count_and_ties_in_the_prediction_are_wrong() -> None:
    measured = [100.0, 101.0, 120.0]
    assert errors.ordered_pairs(measured, [1.0, 2.0, 3.0], 0.0) == (3, 3)
    assert errors.ordered_pairs(measured, [2.0, 1.0, 3.0], 0.0) == (2, 3)
    assert errors.ordered_pairs(measured, [2.0, 1.0, 3.0], 0.02) == (2, 2)
    assert errors.ordered_pairs(measured, [1.0, 1.0, 1.0], 0.02) == (0, 2)
    assert errors.ordered_pairs([100.0, 100.0], [1.0, 2.0], 0.0) == (0, 0)


def log_of(**columns: list[int]) -> RunLog:
    steps = len(next(iter(columns.values())))
    numbers = [[columns[name][step] if name in columns else 0 for name in COLUMNS] for step in range(steps)]
    return RunLog.of_rows([StepRow(row, [Share(0, 1, 0)]) for row in numbers], 1, [])


def test_a_step_differs_where_any_decision_does_and_times_do_not_count() -> None:
    a = log_of(hits=[1, 2, 3, 4], late=[0, 0, 0, 1], step_ns=[1, 2, 3, 4])
    b = log_of(hits=[1, 2, 2, 4], late=[0, 0, 1, 0], step_ns=[9, 9, 9, 9])
    everything = np.ones(4, bool)
    assert errors.steps_differ(a, b, everything) == 0.5
    assert errors.steps_differ(a, b, np.array([True, True, True, False])) == pytest.approx(1 / 3)
    assert errors.steps_differ(a, b, ~everything) == 0
    for name in errors.DECIDED:
        assert errors.steps_differ(a, dataclasses.replace(a, **{name: getattr(a, name) + 1}), everything) == 1


@given(*[st.dictionaries(st.integers(0, 3), st.lists(st.integers(0, 5), max_size=8), max_size=4)] * 2)
def test_evictions_differ_as_crossing_out_by_hand_says(a: dict[int, list[int]], b: dict[int, list[int]]) -> None:
    left = total = 0
    for request in {*a, *b}:
        mine, theirs = list(a.get(request, [])), list(b.get(request, []))
        total += len(mine) + len(theirs)
        for expert in list(mine):
            if expert in theirs:
                mine.remove(expert)
                theirs.remove(expert)
        left += len(mine) + len(theirs)
    runs = [{request: np.array(of, np.int64) for request, of in run.items()} for run in (a, b)]
    assert errors.evictions_differ(*runs) == pytest.approx(left / total if total else 0)
