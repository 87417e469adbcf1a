"""The log of a run as a table with a row for each step, in milliseconds and experts."""

import numpy as np
import pandas as pd

from sim.loop.log import STALLS, RunLog
from traces.steps import PREFILL

COUNTS = ("tokens", "hits", "late", "misses", "on_host", "demand_transfers", "prefetch_transfers", "prefetch_wasted")
BUSY = ("link", "compute", "host", "disk")


def frame(log: RunLog, ids: "pd.Series[str]", warmup_requests: int = 0) -> pd.DataFrame:
    """Return a row for each step: its request, phase, counts, duration, stalls by cause and busy times of streams.

    ids: of the trace's requests. A step of several requests names none. `warmup` marks steps that results do not count.
    """
    shares = log.by_request
    counts = np.bincount(shares.step, minlength=len(log.step_ns))
    first = shares.request[np.searchsorted(shares.step, np.arange(len(log.step_ns)))]
    warm = np.zeros(len(log.step_ns), np.bool_)
    warm[shares.step[shares.request < warmup_requests]] = True
    table = {
        "request": pd.Series(ids.astype(str).to_numpy()[first]).where(counts == 1),
        "requests": counts,
        "phase": np.where(log.phase == PREFILL, "prefill", "decode"),
        "warmup": warm,
        **{name: getattr(log, name) for name in COUNTS},
        "step_ms": log.step_ns / 1e6,
        **{f"stall_{cause}_ms": log.stall_ns[:, i] / 1e6 for i, cause in enumerate(STALLS)},
        **{f"{stream}_busy_ms": getattr(log, f"{stream}_busy_ns") / 1e6 for stream in BUSY},
    }
    return pd.DataFrame(table).rename_axis("step")
