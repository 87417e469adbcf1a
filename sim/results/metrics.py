"""From the log of a run to rows of results: what each column means, whichever engine filled the log.

Definitions are those of docs/contract.md (*What is counted*). Warm-up steps are left out; counters, stalls and busy
times are sums over all other steps, TPOT is over decode steps and TTFT over prefills. Percentiles interpolate
linearly between the two nearest ranks (NumPy's default). Overlap takes the stalls for demand, late and behind
a prefetch as exposed transfer time. Tokens per second: all tokens counted over the time of their steps.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from sim.loop.log import STALLS, Int, RunLog
from sim.results.provenance import commit
from traces.steps import DECODE, PREFILL

Row = dict[str, Any]

RESULTS_FILE, REQUESTS_FILE = "results.parquet", "requests.parquet"
"""Tables that a sweep writes: a row per cell, and a row per cell and request."""

TEXT, COUNT, SHARE, MS = pa.string(), pa.int64(), pa.float64(), pa.float64()

_CELL = [
    ("policy", TEXT),
    ("options", TEXT),
    ("trace", TEXT),
    ("cache_experts", COUNT),
    ("cache_fraction", SHARE),
]
_LOOKUPS = [("tokens", COUNT), ("lookups", COUNT), ("hits", COUNT), ("late", COUNT), ("misses", COUNT)]
LATENCIES = ("mean", "p50", "p95", "p99", "max")
"""Figures of the steps of a phase: TTFT of prefills, TPOT of decode steps."""

RESULTS = pa.schema(
    [
        *_CELL[:3],
        *[(name, TEXT) for name in ("phase", "model", "hardware")],
        *_CELL[3:],
        ("all_experts", COUNT),  # of the model, what cache_fraction is a share of
        ("requests", COUNT),
        *_LOOKUPS,
        ("hit_rate", SHARE),
        *[(name, COUNT) for name in ("bytes_demand", "bytes_prefetch", "bytes_wasted")],
        *[(name, SHARE) for name in ("prefetch_precision", "prefetch_coverage")],
        *[(name, MS) for name in ("ttft_mean_ms", *(f"tpot_{figure}_ms" for figure in LATENCIES))],
        *[(f"stall_{cause}_ms", MS) for cause in ("demand", "late", "behind_prefetch", "slot", "predictor")],
        *[(name, MS) for name in ("gpu_idle_ms", "link_busy_ms", "compute_busy_ms")],
        ("overlap", SHARE),
        ("tokens_per_s", pa.float64()),
        ("oracle", pa.bool_()),
        ("cold", pa.bool_()),
        ("warmup_requests", COUNT),
        ("predictor_us", pa.float64()),  # charged an event
        ("expert_bytes", COUNT),
        ("seed", COUNT),  # of the policy's draws; null where it draws nothing
        ("commit", TEXT),
        ("cell", TEXT),  # digest of all that the row depends on; the rows of its requests have the same
    ]
)
"""Columns of results.parquet, a row per cell."""

REQUESTS = pa.schema(
    [
        *_CELL,
        ("request", TEXT),
        ("dataset", TEXT),
        ("task", TEXT),
        *_LOOKUPS,
        ("ttft_ms", MS),
        ("tpot_mean_ms", MS),
        ("cell", TEXT),
    ]
)
"""Columns of requests.parquet, a row per cell and request."""


_OF_REQUEST = ("tokens", "hits", "late", "misses")
_COUNTED = (
    *_OF_REQUEST,
    *("demand_transfers", "prefetch_transfers", "prefetch_used", "prefetch_wasted"),
    *("step_ns", "link_busy_ns", "compute_busy_ns"),
)
"""Columns of a log that are summed over a run."""


@dataclass(frozen=True)
class Cell:
    """What was run: columns of its row, by their names there."""

    policy: str  # as typed
    options: dict[str, Any]  # resolved, whole
    oracle: bool
    trace: str
    phase: str
    model: str
    hardware: str | None  # None: untimed
    predictor_us: float | None  # charged an event; None: untimed
    cache_experts: int
    all_experts: int
    cold: bool
    warmup_requests: int  # played first, not counted
    seed: int | None  # of the policy's draws


class Summary:
    """The row of a run, and a row for each request counted, from logs as they come.

    `requests`: those of the trace, so that `log.request` are places in it. `prefetch_coverage` is null until
    `coverage` is known. Without hardware all times are null, without a size of experts all bytes. What grows with a
    trace are its requests, and eight bytes a step, for the percentiles.
    """

    def __init__(self, cell: Cell, requests: pd.DataFrame) -> None:
        self._cell = cell
        self._labels = requests
        self._expert_bytes = 0
        self._sums = dict.fromkeys((*_COUNTED, *(f"stall_{cause}" for cause in STALLS)), 0)
        self._step_ns: dict[int, list[Int]] = {PREFILL: [], DECODE: []}
        self._played = np.zeros((len(_OF_REQUEST) + 4, len(requests)), np.int64)

    def add(self, log: RunLog) -> None:
        """Steps played, of one request or of many; those of warm-up requests count nothing."""
        counted = log.request >= self._cell.warmup_requests
        self._expert_bytes = log.expert_bytes
        for name in _COUNTED:
            self._sums[name] += int(getattr(log, name)[counted].sum())
        for cause, ns in zip(STALLS, log.stall_ns[counted].sum(axis=0).tolist(), strict=True):
            self._sums[f"stall_{cause}"] += ns
        if not counted.any():
            return
        request, first = log.request[counted], int(log.request[counted].min())
        places = request - first
        rows = [getattr(log, name)[counted] for name in _OF_REQUEST]
        for phase, held in self._step_ns.items():
            of_phase = log.phase[counted] == phase
            held.append(log.step_ns[counted][of_phase])
            rows += [of_phase, np.where(of_phase, log.step_ns[counted], 0)]
        for played, row in zip(self._played, rows, strict=True):
            summed = np.zeros(int(places.max()) + 1, np.int64)
            np.add.at(summed, places, row)
            played[first : first + len(summed)] += summed

    def row(self) -> Row:
        """Of the run."""
        cell, sums, size = self._cell, self._sums, self._expert_bytes
        lookups = sums["hits"] + sums["late"] + sums["misses"]
        fetched = sums["prefetch_transfers"]
        transfers = (sums["demand_transfers"], fetched, sums["prefetch_wasted"])
        row: Row = {
            **vars(cell),
            **_identity(cell),
            "requests": int(np.count_nonzero(self._steps)),
            **{name: sums[name] for name in ("tokens", "hits", "late", "misses")},
            "lookups": lookups,
            "hit_rate": _ratio(sums["hits"], lookups),
            **{
                f"bytes_{kind}": n * size if size else None
                for kind, n in zip(("demand", "prefetch", "wasted"), transfers, strict=True)
            },
            "prefetch_precision": _ratio(sums["prefetch_used"], fetched),
            "expert_bytes": size or None,
            "commit": commit(),
        }
        if cell.hardware is not None:
            row |= self._times() | self.latencies()
        return {name: row.get(name) for name in RESULTS.names}

    def requests(self) -> pa.Table:
        """Rows of requests.parquet, in the order of play."""
        here = np.flatnonzero(self._steps)
        tokens, hits, late, misses, prefills, prefill_ns, decodes, decode_ns = self._played[:, here]
        columns: dict[str, Any] = {
            **{name: [value] * len(here) for name, value in _identity(self._cell).items()},
            "request": self._labels["id"].iloc[here].astype(str),
            "dataset": self._labels["dataset"].iloc[here].astype(str),
            "task": self._labels["task"].iloc[here].astype(str),
            "tokens": tokens,
            "lookups": hits + late + misses,
            "hits": hits,
            "late": late,
            "misses": misses,
            "ttft_ms": self._mean_ms(prefill_ns, prefills),
            "tpot_mean_ms": self._mean_ms(decode_ns, decodes),
            "cell": [None] * len(here),
        }
        return pa.table({field.name: pa.array(columns[field.name], field.type) for field in REQUESTS}, REQUESTS)

    @property
    def _steps(self) -> Int:
        """[requests] steps counted of each."""
        steps: Int = self._played[-4] + self._played[-2]
        return steps

    def _mean_ms(self, ns: Int, steps: Int) -> list[float | None]:
        timed = self._cell.hardware is not None
        return [a / n / 1e6 if timed and n else None for a, n in zip(ns.tolist(), steps.tolist(), strict=True)]

    def _times(self) -> Row:
        """Sums of stalls and busy times, in ms, and what follows from them."""
        stalls = {cause: self._sums[f"stall_{cause}"] for cause in STALLS}
        busy = self._sums["link_busy_ns"]
        exposed = stalls["demand"] + stalls["late"] + stalls["behind_prefetch"]
        return {
            **{f"stall_{cause}_ms": ns / 1e6 for cause, ns in stalls.items()},
            "gpu_idle_ms": sum(stalls.values()) / 1e6,
            "link_busy_ms": busy / 1e6,
            "compute_busy_ms": self._sums["compute_busy_ns"] / 1e6,
            "overlap": 1 - exposed / busy if busy else None,
            "tokens_per_s": _ratio(self._sums["tokens"] * 1e9, self._sums["step_ns"]),
        }

    def latencies(self) -> Row:
        """TTFT of prefills, TPOT of decode steps, by LATENCIES; null where there are none."""
        row: Row = {}
        for kind, phase in (("ttft", PREFILL), ("tpot", DECODE)):
            ns = np.concatenate([np.empty(0, np.int64), *self._step_ns[phase]])
            figures: list[float | None] = [None] * len(LATENCIES)
            if len(ns):
                found = ns.mean(), *np.percentile(ns, [50, 95, 99], overwrite_input=True), ns.max()
                figures = [float(each) / 1e6 for each in found]
            row |= {f"{kind}_{name}_ms": ms for name, ms in zip(LATENCIES, figures, strict=True)}
        return row


def summarise(log: RunLog, cell: Cell, requests: pd.DataFrame) -> tuple[Row, pa.Table]:
    """The row of a whole run, and the rows of its requests."""
    summary = Summary(cell, requests)
    summary.add(log)
    return summary.row(), summary.requests()


def coverage(misses: int, without_prefetch: int) -> float | None:
    """Misses avoided over the misses of the same cell without prefetch; null if there were none."""
    return _ratio(without_prefetch - misses, without_prefetch)


def _identity(cell: Cell) -> Row:
    return {
        "policy": cell.policy,
        "options": json.dumps(_finite(cell.options), sort_keys=True, allow_nan=False),
        "trace": cell.trace,
        "cache_experts": cell.cache_experts,
        "cache_fraction": cell.cache_experts / cell.all_experts,
    }


def _finite(value: Any) -> Any:
    """The same for JSON, which knows no infinity: it is written as text."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def tables_below(folder: Path) -> str:
    """What to say of a folder that holds no table itself: which folders in it do."""
    below = sorted(str(file.parent) for file in folder.glob(f"*/{REQUESTS_FILE}"))
    if below:
        return f"it holds several sweeps: name one of {', '.join(below)}"
    return "name a folder that moe-sim sweep has written"
