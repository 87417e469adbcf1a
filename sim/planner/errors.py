"""How far predictions of the back-test were off, by kind of placement: what a plan's interval follows from.

`errors.toml` holds measured / predicted of every speed and latency, without a fitted parameter, as `python -m
benchmarks.planner --write` writes it. Each machine counts as one, however many rows it has.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from sim.backtest.file import Setting

FILE = Path(__file__).parent / "errors.toml"

STATIC, MOVING = "static", "moving"
"""Kinds: every expert stays where it is, or a cache moves them, from host memory or from a disk."""

CONFIDENCE = 0.8
"""Share of machines whose measured speed lay in the interval of its prediction."""


@dataclass(frozen=True)
class Interval:
    """measured / predicted: between these in so many of the back-test's rows and machines of that kind."""

    kind: str
    low: float
    high: float
    median: float
    rows: int
    machines: int


def kind_of(setting: Setting) -> str:
    return MOVING if setting.policy or setting.host_cache or setting.misses_from == "disk" else STATIC


@cache
def interval(kind: str) -> Interval:
    rows = tomllib.loads(FILE.read_text("utf-8"))[kind]
    machines = sorted({row["machine"] for row in rows})
    ratios = np.array([row["ratio"] for row in rows])
    weights = np.array([1 / sum(other["machine"] == row["machine"] for other in rows) for row in rows])
    order = np.argsort(ratios)
    places = np.cumsum(weights[order]) - weights[order] / 2
    low, median, high = (
        float(np.interp(share * weights.sum(), places, ratios[order]))
        for share in ((1 - CONFIDENCE) / 2, 0.5, (1 + CONFIDENCE) / 2)
    )
    return Interval(kind, low, high, median, len(rows), len(machines))
