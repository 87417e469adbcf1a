"""How well a prediction holds: errors in time, order of policies, and where two runs decided differently.

An error is relative to what was measured and signed: predicted / measured - 1, so that -0.03 says that the prediction
is 3% too short. Vectors are those of the counted decode steps, in order, one entry per token and run: `measured` and
`predicted` are of the same requests, so entry i of both is the same token.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from policies.core.policy import Float, Int
from sim.loop.log import RunLog

PERCENTILES = {"tpot_p50": 50, "tpot_p95": 95, "tpot_p99": 99}

DECIDED = ("hits", "late", "misses", "demand_transfers", "prefetch_transfers")
"""Columns of a log in which a step shows how it was decided."""


def relative(predicted: float, measured: float) -> float:
    """predicted / measured - 1; 0 where both are 0, infinite where only `measured` is."""
    if measured == 0:
        return 0.0 if predicted == 0 else math.inf
    return predicted / measured - 1


def time_errors(measured: Int, predicted: Int) -> dict[str, float]:
    """Signed errors of TPOT mean, p50, p95 and p99 (percentiles interpolated linearly), and the per-token MAPE.

    measured, predicted: int64[tokens], ns. ValueError unless they have the same length, at least 1.
    """
    if len(measured) != len(predicted) or not len(measured):
        raise ValueError(f"{len(measured)} tokens measured and {len(predicted)} predicted cannot be compared")
    found = {"tpot_mean": relative(float(predicted.mean()), float(measured.mean()))}
    for name, percent in PERCENTILES.items():
        found[name] = relative(float(np.percentile(predicted, percent)), float(np.percentile(measured, percent)))
    return {**found, "token_mape": token_mape(measured, predicted)}


def token_mape(measured: Int, predicted: Int) -> float:
    """Mean over tokens of |predicted / measured - 1|: that errors of single tokens do not cancel out."""
    each = zip(predicted.tolist(), measured.tolist(), strict=True)
    return math.fsum(abs(relative(*pair)) for pair in each) / len(measured)


def ranks(values: Sequence[float]) -> Float:
    """Of each value, from 1 for the least; equal ones share the mean of theirs. float64[n]."""
    return np.asarray(pd.Series(values, dtype=float).rank(), np.float64)


def spearman(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Rank correlation: Pearson's of the ranks, ties averaged (Spearman 1904); None where either side is all equal."""
    a, b = ranks(measured), ranks(predicted)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale else None


def ordered_pairs(measured: Sequence[float], predicted: Sequence[float], noise: float) -> tuple[int, int]:
    """Of the pairs that differ as measured by more than `noise`, a share of the lesser, those predicted in that order.

    Returns (ordered as measured, pairs that differ).
    """
    right = differ = 0
    for (m1, p1), (m2, p2) in combinations(zip(measured, predicted, strict=True), 2):
        if abs(m1 - m2) > noise * min(m1, m2):
            differ += 1
            right += (m1 - m2) * (p1 - p2) > 0
    return right, differ


def steps_differ(measured: RunLog, predicted: RunLog, counted: NDArray[np.bool_]) -> float:
    """Share of the counted steps whose hits, late, misses, demand and prefetch transfers are not all the same.

    counted: bool[S]. 0 where none is counted.
    """
    columns = [getattr(measured, name)[counted] != getattr(predicted, name)[counted] for name in DECIDED]
    return float(np.any(columns, axis=0).mean()) if counted.any() else 0.0


def evictions_differ(measured: Mapping[int, Int], predicted: Mapping[int, Int]) -> float:
    """Share of the evictions of two runs that the other has not, request by request.

    Of each request the evicted experts are a multiset, for their order depends on time alone; what has no counterpart
    in the other run's request counts, on both sides, over the evictions of both. 0 where nothing was evicted.
    """
    apart = total = 0
    for request in measured.keys() | predicted.keys():
        a, b = (Counter(run[request].tolist() if request in run else ()) for run in (measured, predicted))
        apart += (a - b).total() + (b - a).total()
        total += a.total() + b.total()
    return apart / total if total else 0.0
