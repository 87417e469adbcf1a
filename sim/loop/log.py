"""What a run leaves behind, step by step and request by request: the raw material of every result.

All engines and the replay fill the same log, so predicted and measured are compared column by column. An engine hands
over parts of whole steps as it goes, so that the memory of a run does not grow with its trace.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.bent import COUNTS
from sim.loop.run import Run
from traces.errors import InputError

Int = NDArray[np.int64]

STALLS = ("predictor", "demand", "late", "behind_prefetch", "disk", "host", "slot")
"""Causes of a stall, in the order in which the contract attributes a nanosecond to them.

The last one never occurs without a disk: what has arrived is computed, and can then be evicted.
"""
PREDICTOR, DEMAND, LATE, BEHIND_PREFETCH, DISK, HOST, SLOT = range(7)

COUNTERS = (
    *("hits", "late", "misses", "demand_transfers", "prefetch_transfers", "prefetch_used", "prefetch_wasted"),
    *("on_host", "admitted", "bypassed", "copies", "demand_bytes", "prefetch_bytes", "wasted_bytes", "copied_bytes"),
)
"""What the residency counts, in the order of its `counters()`: bytes only where experts differ in size (rule 19)."""

MOVED = {
    "demand_bytes": "demand_transfers",
    "prefetch_bytes": "prefetch_transfers",
    "wasted_bytes": "prefetch_wasted",
    "copied_bytes": "copies",
}
"""What counts the transfers of which these are the bytes."""

COLUMNS = (
    *("phase", "tokens", "step_ns"),
    *(f"stall_{cause}_ns" for cause in STALLS),
    *COUNTERS,
    *("reads_demand", "reads_prefetch"),
    *COUNTS,
    *("link_busy_ns", "compute_busy_ns", "host_busy_ns", "disk_busy_ns"),
)
"""Of the row of one step, as engines make it: the fields of `RunLog`, in order."""

MOST = 2**62
"""Nanoseconds that a run takes, at most: beyond lie overflows of int64. That is more than a century."""


@contextmanager
def counting(run: Run) -> Iterator[None]:
    """Raise InputError where a time of the run is beyond what a clock of 64 bits counts."""
    try:
        yield
    except OverflowError as error:
        raise InputError(
            f"{run.policy.text}: its times are beyond what a clock of 64 bits counts in ns: "
            "check the times, sizes and rates in the profiles"
        ) from error


class Share(NamedTuple):
    """What one step was for one of its requests."""

    request: int  # index in the trace
    tokens: int
    latency_ns: int
    waited_ns: int = 0
    rejected: int = 0  # of the tokens
    prefills: bool = False


class StepRow(NamedTuple):
    """One step: its numbers by `COLUMNS`, and its requests' shares of it."""

    numbers: list[int]
    shares: list[Share]
    ended_ns: int = 0  # the clock at its end


@dataclass(frozen=True)
class RequestLog:
    """One row per step and request that took part in it (R rows), in the order of the steps."""

    step: Int  # [R] row of the step in the log
    request: Int  # [R] index of the request in the trace
    tokens: Int  # [R] tokens of the request in that step
    latency_ns: Int  # [R] end of the step less end of the request's step before it (rule 18)
    waited_ns: Int  # [R] admission less arrival, in the request's first row; 0 in the others
    rejected: Int  # [R] of the tokens those that were drafted and not accepted
    prefills: Int  # [R] 1 where the request prefills, though others may decode in the step; else 0


@dataclass(frozen=True)
class RunLog:
    """One row per step (S steps: the prefill of a request, or one decoded token of each request in it), in order.

    A counter belongs to the step during which it happened, so warm-up is left out by leaving out its rows.
    """

    phase: NDArray[np.uint8]  # [S] traces.PREFILL or traces.DECODE
    tokens: Int  # [S] tokens of the step
    step_ns: Int  # [S] duration
    stall_ns: Int  # [S, 7] by cause, see STALLS
    hits: Int  # [S] lookups of a READY expert
    late: Int  # [S] lookups of an expert whose prefetch was under way
    misses: Int  # [S] lookups of an absent expert, or of one only queued
    demand_transfers: Int  # [S] transfers started for a miss
    prefetch_transfers: Int  # [S] transfers started for a prefetch, those that became late included
    prefetch_used: Int  # [S] prefetched experts looked up for the first time since
    prefetch_wasted: Int  # [S] prefetched experts that left the cache without a lookup
    on_host: Int  # [S] of the misses, those computed on the host
    admitted: Int  # [S] of the misses; this and the next three under an admission alone (rule 21)
    bypassed: Int  # [S] of the misses, those not admitted
    copies: Int  # [S] background copies started
    demand_bytes: Int  # [S] of demand transfers
    prefetch_bytes: Int  # [S] of prefetch transfers
    wasted_bytes: Int  # [S] of wasted prefetches
    copied_bytes: Int  # [S] of background copies
    reads_demand: Int  # [S] disk reads started for a miss
    reads_prefetch: Int  # [S] disk reads started for a prefetch
    routed: Int  # [S] where routing is bent (`policies.core.bent.COUNTS`), as the next three; else 0
    choices: Int  # [S]
    changed: Int  # [S]
    lost: Int  # [S]
    link_busy_ns: Int  # [S] the host link moved bytes
    compute_busy_ns: Int  # [S] the compute stream computed
    host_busy_ns: Int  # [S] the host computed experts
    disk_busy_ns: Int  # [S] the disk read
    expert_bytes: int  # of one, of the largest where they differ
    evictions: Int  # expert ids in the order of their eviction, over the whole run
    host_evictions: Int  # the same of host memory
    by_request: RequestLog
    ended_ns: int  # the clock at the last head's end

    @classmethod
    def of_table(
        cls,
        table: Int,
        by_request: RequestLog,
        expert_bytes: int,
        evictions: Sequence[int] | Int,
        host_evictions: Sequence[int] | Int = (),
        sized: bool = False,
        ended_ns: int = 0,
    ) -> "RunLog":
        """Return the log of steps whose rows are `table`, int64[S, len(COLUMNS)]; sized: bytes were counted."""
        column: dict[str, Any] = dict(zip(COLUMNS, table.T, strict=True))
        stalls = np.stack([column.pop(f"stall_{cause}_ns") for cause in STALLS], axis=1)
        column["phase"] = column["phase"].astype(np.uint8)
        if not sized:
            for moved, count in MOVED.items():
                column[moved] = column[count] * expert_bytes
        return cls(
            **column,
            stall_ns=stalls,
            expert_bytes=expert_bytes,
            evictions=np.array(evictions, np.int64),
            host_evictions=np.array(host_evictions, np.int64),
            by_request=by_request,
            ended_ns=ended_ns,
        )

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[StepRow],
        expert_bytes: int,
        evictions: Sequence[int],
        host_evictions: Sequence[int] = (),
        sized: bool = False,
    ) -> "RunLog":
        """Return the log of these steps. Raise OverflowError where their times could not be added up in int64."""
        if rows and rows[-1].ended_ns > MOST:
            raise OverflowError("the run takes more nanoseconds than there are whole numbers of 62 bits")
        table = np.array([row.numbers for row in rows], np.int64).reshape(-1, len(COLUMNS))
        shares = [(step, *share) for step, row in enumerate(rows) for share in row.shares]
        by_request = RequestLog(*np.array(shares, np.int64).reshape(-1, len(fields(RequestLog))).T)
        ended_ns = rows[-1].ended_ns if rows else 0
        return cls.of_table(table, by_request, expert_bytes, evictions, host_evictions, sized, ended_ns)

    @property
    def request(self) -> Int:
        """int64[S]: the request of each step. ValueError where a step has several, or none."""
        if not np.array_equal(self.by_request.step, np.arange(len(self.step_ns))):
            raise ValueError("a step of this run has several requests: read `by_request`")
        return self.by_request.request


Ended = Callable[[RunLog], None]
"""Takes the log of steps that have ended, in order; evictions after the last step of a part belong to the next."""

_ALONE = ("expert_bytes", "ended_ns", "by_request")
_STEP_COLUMNS = tuple(field.name for field in fields(RunLog) if field.name not in _ALONE)


def joined(parts: Sequence[RunLog]) -> RunLog:
    columns: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _STEP_COLUMNS}
    starts = np.cumsum([0, *(len(part.step_ns) for part in parts)])
    shares: dict[str, Int] = {
        field.name: np.concatenate([getattr(part.by_request, field.name) for part in parts])
        for field in fields(RequestLog)
    }
    rows = [len(part.by_request.step) for part in parts]
    shares["step"] = shares["step"] + np.repeat(starts[:-1], rows)
    return replace(parts[-1], **columns, by_request=RequestLog(**shares))


def whole(play: Callable[[Run, Ended], None], run: Run) -> RunLog:
    """Return the log of a whole run on the engine `play`."""
    parts: list[RunLog] = []
    play(run, parts.append)
    return joined(parts or [RunLog.of_rows([], run.gpu.link.expert_bytes, [])])
