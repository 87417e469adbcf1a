"""Traces with lookahead, from picks that a test names."""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces import Trace
from traces.schema import Picks


def with_lookahead(trace: Trace, ids: NDArray[Any], distances: tuple[int, ...] = (1,)) -> Trace:
    """Return a trace with picks [T, L, n] for each layer, alike from all distances; scores fall from 0.5 on."""
    picks = np.repeat(ids[:, :, None], len(distances), 2)
    picks[np.broadcast_to((np.arange(trace.layers)[:, None] < distances)[..., None], picks.shape)] = trace.sentinel
    scores = np.broadcast_to(0.5 ** np.arange(1, ids.shape[2] + 1), picks.shape).astype(np.float16)
    meta = replace(trace.meta, lookahead=Picks(distances, ids.shape[2]))
    return replace(trace, meta=meta, lookahead=picks, lookahead_scores=np.where(picks == trace.sentinel, 0, scores))
