"""What one run leaves behind, step by step: the raw material of every result, whichever engine made it.

The simulator and the replay harness fill the same log, so predicted and measured are compared column by column.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]

STALLS = ("predictor", "demand", "late", "behind_prefetch", "slot")
"""Causes of a stall, in the order in which the contract attributes a nanosecond to them."""


@dataclass(frozen=True)
class RunLog:
    """One row per step played (S steps: the prefill of a request, or one decoded token), in order.

    Every counter belongs to the step during which it happened; a sum over any range of steps is
    therefore a difference of states, and warm-up is left out by leaving out its rows.
    """

    request: Int  # [S] index of the request in the trace
    phase: NDArray[np.uint8]  # [S] traces.PREFILL or traces.DECODE
    tokens: Int  # [S] tokens of the step
    step_ns: Int  # [S] duration
    stall_ns: Int  # [S, 5] by cause, see STALLS
    hits: Int  # [S] lookups of a READY expert
    late: Int  # [S] lookups of an expert whose prefetch was under way
    misses: Int  # [S] lookups of an absent expert, or of one only queued
    demand_transfers: Int  # [S] transfers started for a miss
    prefetch_transfers: Int  # [S] transfers started for a prefetch, those that became late included
    prefetch_used: Int  # [S] prefetched experts looked up for the first time since
    prefetch_wasted: Int  # [S] prefetched experts that left the cache without a lookup
    link_busy_ns: Int  # [S] the host link moved bytes
    compute_busy_ns: Int  # [S] the compute stream computed
    expert_bytes: int
    evictions: Int  # expert ids in the order of their eviction, over the whole run
