"""The phone run whose routing is known, token by token: what was read and how long that took, against measurements."""

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.backtest.case import Outcome
from sim.backtest.machine import DATA
from sim.backtest.routing import PHONE
from traces.steps import DECODE

LANES = 4
"""Reads in flight at once; the device adds up the time of each."""


def token_by_token(outcome: Outcome) -> dict[str, Any]:
    """Compare the run with what the device measured; totals in bytes and in seconds of the disk."""
    log = outcome.log
    decoded = log.phase == DECODE
    measured = pd.read_parquet(DATA / f"{PHONE}.tokens.parquet")
    hit_rate = float(log.hits.sum() / (log.hits + log.late + log.misses).sum())
    return {
        "tokens": len(measured),
        "hit_rate": {"predicted": hit_rate, "measured": float(measured.cache_hit_pct.iloc[-1] / 100)},
        "bytes_read": _compared(log.demand_bytes[decoded], measured.read_bytes.to_numpy()),
        "io_s": _compared(log.link_busy_ns[decoded] / 1e9, measured.io_ms.to_numpy() / 1e3 / LANES),
        "wall_s": _compared(log.step_ns[decoded] / 1e9, measured.wall_ms.to_numpy() / 1e3),
    }


def _compared(predicted: NDArray[Any], measured: NDArray[Any]) -> dict[str, float]:
    """Return totals, the correlation over tokens, and the median of the tokens' absolute errors."""
    return {
        "predicted": float(predicted.sum()),
        "measured": float(measured.sum()),
        "correlation": float(np.corrcoef(predicted, measured)[0, 1]),
        "median_abs_error": float(np.median(np.abs(predicted / measured - 1))),
    }
