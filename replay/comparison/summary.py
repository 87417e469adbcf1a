"""What several cells say together: how exact their predictions are, and how policies are ordered."""

from collections.abc import Sequence
from math import hypot, sqrt
from statistics import median

from replay.comparison import errors
from sim.results.metrics import Row

EXACT, TIMES = 0.05, 1.5
"""A TPOT mean is predicted well within that share, or so many times what calibrations of the machine disagree by."""


def accuracy(cells: Sequence[Row]) -> Row | None:
    """How many of the cells that were predicted are within EXACT, and within what the machine's noise allows.

    `calibrations_disagree` is the root mean square of what the two calibrations around a cell predict it apart, as a
    share; None where nothing was calibrated here. None without such cells.
    """
    predicted = [cell for cell in cells if (cell.get("errors") or {}).get("tpot_mean") is not None]
    if not predicted:
        return None
    off = [abs(cell["errors"]["tpot_mean"]) for cell in predicted]
    apart = [each for cell in predicted if (each := cell.get("calibrations_disagree")) is not None]
    noise = hypot(*apart) / sqrt(len(apart)) if apart else None
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


SAME = ("model", "trace", "requests", "mode", "cache_experts")
"""Of cells whose policies are ranked."""


def rankings(cells: Sequence[Row], least_noise: float = 0.0) -> list[Row]:
    """How policies are ordered where all else is the same, as measured and as predicted, of cells recorded.

    Noise is the greatest of the cells that were run more than once; where none was, the median of what the calibrations
    around each differ by; and at least what is known of the machine.
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
        right, differ = errors.ordered_pairs(measured, predicted, max(least_noise, noise or 0.0))
        found.append(
            {
                **dict(zip(SAME, same, strict=True)),
                "cache_fraction": group[0]["cache_fraction"],
                "policies": len(group),
                "spearman": errors.spearman(measured, predicted),
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
