"""What a run leaves behind, step by step and request by request: the raw material of every result.

All engines and the replay fill the same log, so predicted and measured are compared column by column. An engine hands
over parts of whole steps as it goes, so that the memory of a run does not grow with its trace.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.loop.run import Run

Int = NDArray[np.int64]

STALLS = ("predictor", "demand", "late", "behind_prefetch", "slot")
"""Causes of a stall, in the order in which the contract attributes a nanosecond to them.

The last one never occurs with one link: what has arrived is computed, and can then be evicted.
"""
PREDICTOR, DEMAND, LATE, BEHIND_PREFETCH = range(4)

COUNTERS = ("hits", "late", "misses", "demand_transfers", "prefetch_transfers", "prefetch_used", "prefetch_wasted")
"""What the residency counts, in the order of its `counters()`."""

COLUMNS = (
    *("phase", "tokens", "step_ns"),
    *(f"stall_{cause}_ns" for cause in STALLS),
    *COUNTERS,
    *("link_busy_ns", "compute_busy_ns"),
)
"""Of the row of one step, as engines make it: the fields of `RunLog`, in order."""


class Share(NamedTuple):
    """What one step was for one of its requests."""

    request: int  # index in the trace
    tokens: int
    latency_ns: int


class StepRow(NamedTuple):
    """One step: its numbers by `COLUMNS`, and its requests' shares of it."""

    numbers: list[int]
    shares: list[Share]


@dataclass(frozen=True)
class RequestLog:
    """One row per step and request that took part in it (R rows), in the order of the steps."""

    step: Int  # [R] row of the step in the log
    request: Int  # [R] index of the request in the trace
    tokens: Int  # [R] tokens of the request in that step
    latency_ns: Int  # [R] end of the step less end of the request's step before it (rule 18)


@dataclass(frozen=True)
class RunLog:
    """One row per step (S steps: the prefill of a request, or one decoded token of each request in it), in order.

    Every counter belongs to the step during which it happened; a sum over any range of steps is
    therefore a difference of states, and warm-up is left out by leaving out its rows.
    """

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
    by_request: RequestLog

    @classmethod
    def of_table(cls, table: Int, by_request: RequestLog, expert_bytes: int, evictions: Int) -> "RunLog":
        """Return the log of steps whose rows are `table`: int64[S, len(COLUMNS)]."""
        column: dict[str, Any] = dict(zip(COLUMNS, table.T, strict=True))
        stalls = np.stack([column.pop(f"stall_{cause}_ns") for cause in STALLS], axis=1)
        column["phase"] = column["phase"].astype(np.uint8)
        return cls(**column, stall_ns=stalls, expert_bytes=expert_bytes, evictions=evictions, by_request=by_request)

    @classmethod
    def of_rows(cls, rows: Sequence[StepRow], expert_bytes: int, evictions: Sequence[int]) -> "RunLog":
        """Return the log of these steps."""
        table = np.array([row.numbers for row in rows], np.int64).reshape(-1, len(COLUMNS))
        shares = [(step, *share) for step, row in enumerate(rows) for share in row.shares]
        by_request = RequestLog(*np.array(shares, np.int64).reshape(-1, 4).T)
        return cls.of_table(table, by_request, expert_bytes, np.array(evictions, np.int64))

    @property
    def request(self) -> Int:
        """int64[S]: the request of each step. ValueError where a step has several, or none."""
        if not np.array_equal(self.by_request.step, np.arange(len(self.step_ns))):
            raise ValueError("a step of this run has several requests: read `by_request`")
        return self.by_request.request


Ended = Callable[[RunLog], None]
"""Takes the log of steps that have ended, in order; evictions after the last step of a part belong to the next."""

_STEP_COLUMNS = tuple(field.name for field in fields(RunLog) if field.name not in ("expert_bytes", "by_request"))


def joined(parts: Sequence[RunLog]) -> RunLog:
    """Return consecutive parts of a run's log, at least one, as one."""
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _STEP_COLUMNS}
    starts = np.cumsum([0, *(len(part.step_ns) for part in parts)])
    shares: dict[str, Int] = {
        field.name: np.concatenate([getattr(part.by_request, field.name) for part in parts])
        for field in fields(RequestLog)
    }
    rows = [len(part.by_request.step) for part in parts]
    shares["step"] = shares["step"] + np.repeat(starts[:-1], rows)
    return RunLog(**columns, expert_bytes=parts[0].expert_bytes, by_request=RequestLog(**shares))


def whole(play: Callable[[Run, Ended], None], run: Run) -> RunLog:
    """Return the log of a whole run on the engine `play`."""
    parts: list[RunLog] = []
    play(run, parts.append)
    return joined(parts or [RunLog.of_rows([], run.gpu.link.expert_bytes, [])])
