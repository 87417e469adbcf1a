"""What an engine plays, and what that leaves behind, step by step: the raw material of every result.

The simulator and the replay harness fill the same log, so predicted and measured are compared column by column. An
engine hands over the log of each request as it ends, so that the memory of a run does not grow with its trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from policies.core.policy import Requests
from policies.core.spec import PolicySpec, parse
from sim.profiles.timing import Link, Timing

Int = NDArray[np.int64]

STALLS = ("predictor", "demand", "late", "behind_prefetch", "slot")
"""Causes of a stall, in the order in which the contract attributes a nanosecond to them."""


@dataclass(frozen=True, eq=False)
class Run:
    """Requests of a model of L `layers` x E `experts`, played one after another through a cache of `slots` experts.

    An oracle policy reads `requests` before the run, no other does. A policy with a prefetch budget needs
    `experts_per_layer` (`sim.profiles.timing`).
    """

    requests: Requests
    layers: int
    experts: int
    slots: int
    policy: PolicySpec
    timing: Timing
    link: Link
    cold: bool = False
    experts_per_layer: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", parse(self.policy))


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


Ended = Callable[[RunLog], None]
"""Takes the log of a request that has ended; evictions after the last step of one belong to the next."""

COLUMNS = tuple(field.name for field in fields(RunLog) if field.name != "expert_bytes")
"""The fields of a log that are arrays."""


def joined(parts: Sequence[RunLog]) -> RunLog:
    """The logs of consecutive requests, at least one, as one."""
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    return RunLog(**columns, expert_bytes=parts[0].expert_bytes)


def whole(play: Callable[[Run, Ended], None], run: Run) -> RunLog:
    """The log of a whole run on the engine `play`."""
    parts: list[RunLog] = []
    play(run, parts.append)
    return joined(parts)
