"""How well predictions hold: errors in time, order of policies, where two runs decided differently; and in all cells.

An error is relative to what was measured and signed: predicted / measured - 1, so that -0.03 says that the prediction
is 3% too short. Vectors are those of the counted decode steps, in order, one entry per token and run: `measured` and
`predicted` are of the same requests, so entry i of both is the same token.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from policies.core.policy import Int
from sim.loop.log import RunLog
from sim.results.metrics import Row

PERCENTILES = {"tpot_p50": 50, "tpot_p95": 95, "tpot_p99": 99}
DECIDED = ("hits", "late", "misses", "demand_transfers", "prefetch_transfers")
"""Columns of a log in which a step shows how it was decided."""

EXACT, TIMES = 0.05, 1.5
"""A TPOT mean is predicted well within that share, or so many times what calibrations of the machine disagree by."""

SAME = ("model", "trace", "requests", "mode", "cache_experts")  # of cells whose policies are ranked


def relative(predicted: float, measured: float) -> float:
    """predicted / measured - 1; 0 where both are 0, infinite where only `measured` is."""
    if measured == 0:
        return 0.0 if predicted == 0 else math.inf
    return predicted / measured - 1


def time_errors(measured: Int, predicted: Int) -> dict[str, float]:
    """Signed errors of TPOT mean, p50, p95 and p99 (percentiles interpolated linearly), and the per-token MAPE.

    measured, predicted: int64[tokens], ns. The MAPE is the mean of unsigned errors: they do not cancel out.
    """
    found = {"tpot_mean": relative(float(predicted.mean()), float(measured.mean()))}
    for name, percent in PERCENTILES.items():
        found[name] = relative(float(np.percentile(predicted, percent)), float(np.percentile(measured, percent)))
    tokens = zip(predicted.tolist(), measured.tolist(), strict=True)
    return {**found, "token_mape": math.fsum(abs(relative(*pair)) for pair in tokens) / len(measured)}


def spearman(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Rank correlation: Pearson's of the ranks, ties averaged (Spearman 1904); None where either side is all equal."""
    a, b = (pd.Series(values, dtype=float).rank().to_numpy() for values in (measured, predicted))
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / scale if scale else None


def ordered_pairs(measured: Sequence[float], predicted: Sequence[float], noise: float) -> tuple[int, int]:
    """Return how many pairs differ by more than `noise`, a share of the lesser, and are so predicted: (these, all)."""
    right = differ = 0
    for (m1, p1), (m2, p2) in combinations(zip(measured, predicted, strict=True), 2):
        if abs(m1 - m2) > noise * min(m1, m2):
            differ += 1
            right += (m1 - m2) * (p1 - p2) > 0
    return right, differ


def steps_differ(measured: RunLog, predicted: RunLog, counted: NDArray[np.bool_]) -> float:
    """Share of the counted steps, bool[S], that were not decided in the same way; 0 where none is counted."""
    columns = [getattr(measured, name)[counted] != getattr(predicted, name)[counted] for name in DECIDED]
    return float(np.any(columns, axis=0).mean()) if counted.any() else 0.0


def evictions_differ(measured: Mapping[int, Int], predicted: Mapping[int, Int]) -> float:
    """Return the share of two runs' evictions, a multiset for each request, that the other has not; 0 without any."""
    apart = total = 0
    for request in measured.keys() | predicted.keys():
        a, b = (Counter(run[request].tolist() if request in run else ()) for run in (measured, predicted))
        apart += (a - b).total() + (b - a).total()
        total += a.total() + b.total()
    return apart / total if total else 0.0


def accuracy(cells: Sequence[Row]) -> Row | None:
    """Return how many of the cells predicted are within EXACT, and within what noise allows; None without any.

    `calibrations_disagree`: the root mean square of what the two calibrations around a cell differ by, a share.
    """
    predicted = [cell for cell in cells if (cell.get("errors") or {}).get("tpot_mean") is not None]
    if not predicted:
        return None
    off = [abs(cell["errors"]["tpot_mean"]) for cell in predicted]
    apart = [each for cell in predicted if (each := cell.get("calibrations_disagree")) is not None]
    noise = math.hypot(*apart) / math.sqrt(len(apart)) if apart else None
    return {
        "cells": len(off),
        "within_5_percent": sum(each <= EXACT for each in off),
        "calibrations_disagree": noise,
        "within_noise": sum(each <= max(EXACT, TIMES * (noise or 0.0)) for each in off),
    }


def in_words(found: Row) -> str:
    """Return `accuracy` as a sentence."""
    text = f"{found['within_5_percent']} of {found['cells']} TPOT means are predicted within {EXACT:.0%}"
    if (noise := found["calibrations_disagree"]) is None:
        return text
    return (
        f"{text}, {found['within_noise']} within {EXACT:.0%} or {TIMES} times what calibrations disagree by "
        f"({noise:.1%}, root mean square)"
    )


def rankings(cells: Sequence[Row], least_noise: float = 0.0) -> list[Row]:
    """Return how policies are ordered where all else is the same, as measured and as predicted, of cells recorded.

    Noise: the greatest of repeated cells, else the median that calibrations differ by, and at least `least_noise`.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    for cell in cells:
        if cell.get("measured") and cell.get("predicted"):
            groups.setdefault(tuple(cell[name] for name in SAME), []).append(cell)
    found = []
    for same, group in groups.items():
        if len(group) < 2:
            continue
        measured, predicted = ([cell[side]["tpot_mean_ms"] for cell in group] for side in ("measured", "predicted"))
        noise = _noise_of(group)
        right, differ = ordered_pairs(measured, predicted, max(least_noise, noise or 0.0))
        found.append(
            {
                **dict(zip(SAME, same, strict=True)),
                "cache_fraction": group[0]["cache_fraction"],
                "policies": len(group),
                "spearman": spearman(measured, predicted),
                "noise": noise,
                "pairs_that_differ": differ,
                "pairs_as_measured": right,
            }
        )
    return found


def _noise_of(cells: Sequence[Row]) -> float | None:
    """Return by what share cells like these differ for no reason; None where nothing says so."""
    repeated, disagreed = (
        [float(cell[name]) for cell in cells if cell.get(name) is not None]
        for name in ("noise", "calibrations_disagree")
    )
    return max(repeated) if repeated else median(disagreed) if disagreed else None
