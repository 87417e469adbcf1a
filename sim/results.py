"""From the log of a run to rows of results: what each column means, whichever engine filled the log.

Definitions are the contract's (*What is counted*). Warm-up steps are left out; counters, stalls and busy
times are sums over all other steps, TPOT is over decode steps and TTFT over prefills. Percentiles interpolate
linearly between the two nearest ranks (NumPy's default). Overlap takes the stalls for demand, late and behind
a prefetch as exposed transfer time. Tokens per second: all tokens counted over the time of their steps.
"""

import json
import math
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from sim.log import STALLS, RunLog
from traces.errors import InputError
from traces.steps import DECODE, PREFILL

Row = dict[str, Any]

TEXT, COUNT, SHARE, MS = pa.string(), pa.int64(), pa.float64(), pa.float64()

_CELL = [
    ("policy", TEXT),
    ("options", TEXT),
    ("trace", TEXT),
    ("cache_experts", COUNT),
    ("cache_fraction", SHARE),
]
_LOOKUPS = [("tokens", COUNT), ("lookups", COUNT), ("hits", COUNT), ("late", COUNT), ("misses", COUNT)]
_TPOT = ["tpot_mean_ms", "tpot_p50_ms", "tpot_p95_ms", "tpot_p99_ms", "tpot_max_ms"]

RESULTS = pa.schema(
    [
        *_CELL[:3],
        *[(name, TEXT) for name in ("phase", "model", "hardware")],
        *_CELL[3:],
        ("requests", COUNT),
        *_LOOKUPS,
        ("hit_rate", SHARE),
        *[(name, COUNT) for name in ("bytes_demand", "bytes_prefetch", "bytes_wasted")],
        *[(name, SHARE) for name in ("prefetch_precision", "prefetch_coverage")],
        *[(name, MS) for name in ("ttft_mean_ms", *_TPOT)],
        *[(f"stall_{cause}_ms", MS) for cause in ("demand", "late", "behind_prefetch", "slot", "predictor")],
        *[(name, MS) for name in ("gpu_idle_ms", "link_busy_ms", "compute_busy_ms")],
        ("overlap", SHARE),
        ("tokens_per_s", pa.float64()),
        ("oracle", pa.bool_()),
        ("cold", pa.bool_()),
        ("warmup_requests", COUNT),
        ("predictor_us", pa.float64()),  # charged an event
        ("expert_bytes", COUNT),
        ("seed", COUNT),
        ("commit", TEXT),
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
    ]
)
"""Columns of requests.parquet, a row per cell and request."""


@dataclass(frozen=True)
class Cell:
    """What was run, in the words of its row."""

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
    seed: int


def summarise(log: RunLog, cell: Cell, requests: pd.DataFrame) -> tuple[Row, list[Row]]:
    """The row of a run, and a row for each request counted.

    `requests`: those of the trace, so that `log.request` are places in it. `prefetch_coverage` is null until
    `coverage` is known. Without hardware all times are null, without a size of experts all bytes.
    """
    timed = cell.hardware is not None
    counted = log.request >= cell.warmup_requests
    decode, prefill = (counted & (log.phase == phase) for phase in (DECODE, PREFILL))
    hits, late, misses = (int(column[counted].sum()) for column in (log.hits, log.late, log.misses))
    lookups = hits + late + misses
    fetched = int(log.prefetch_transfers[counted].sum())
    transfers = (int(log.demand_transfers[counted].sum()), fetched, int(log.prefetch_wasted[counted].sum()))
    sizes = [n * log.expert_bytes if log.expert_bytes else None for n in transfers]
    row: Row = {
        **_identity(cell),
        "phase": cell.phase,
        "model": cell.model,
        "hardware": cell.hardware,
        "requests": len(np.unique(log.request[counted])),
        "tokens": int(log.tokens[counted].sum()),
        "lookups": lookups,
        "hits": hits,
        "late": late,
        "misses": misses,
        "hit_rate": _ratio(hits, lookups),
        **dict(zip(("bytes_demand", "bytes_prefetch", "bytes_wasted"), sizes, strict=True)),
        "prefetch_precision": _ratio(int(log.prefetch_used[counted].sum()), fetched),
        "prefetch_coverage": None,
        "oracle": cell.oracle,
        "cold": cell.cold,
        "warmup_requests": cell.warmup_requests,
        "predictor_us": cell.predictor_us,
        "expert_bytes": log.expert_bytes or None,
        "seed": cell.seed,
        "commit": commit(),
    }
    if timed:
        row |= _times(log, counted) | _latencies(log.step_ns[decode] / 1e6, log.step_ns[prefill] / 1e6)
    return {name: row.get(name) for name in RESULTS.names}, _by_request(log, cell, requests, counted, timed)


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


def _times(log: RunLog, counted: Any) -> Row:
    """Sums of stalls and busy times, in ms, and what follows from them."""
    stalls = dict(zip(STALLS, log.stall_ns[counted].sum(axis=0).tolist(), strict=True))
    busy = int(log.link_busy_ns[counted].sum())
    exposed = stalls["demand"] + stalls["late"] + stalls["behind_prefetch"]
    elapsed = int(log.step_ns[counted].sum())
    return {
        **{f"stall_{cause}_ms": ns / 1e6 for cause, ns in stalls.items()},
        "gpu_idle_ms": sum(stalls.values()) / 1e6,
        "link_busy_ms": busy / 1e6,
        "compute_busy_ms": int(log.compute_busy_ns[counted].sum()) / 1e6,
        "overlap": 1 - exposed / busy if busy else None,
        "tokens_per_s": _ratio(int(log.tokens[counted].sum()) * 1e9, elapsed),
    }


def _latencies(decode_ms: Any, prefill_ms: Any) -> Row:
    """TPOT of decode steps, TTFT of prefills; null where there are none."""
    row: Row = {"ttft_mean_ms": float(prefill_ms.mean()) if len(prefill_ms) else None}
    if len(decode_ms):
        figures = [decode_ms.mean(), *np.percentile(decode_ms, [50, 95, 99]), decode_ms.max()]
        row.update(zip(_TPOT, map(float, figures), strict=True))
    return row


def _by_request(log: RunLog, cell: Cell, requests: pd.DataFrame, counted: Any, timed: bool) -> list[Row]:
    """Rows of requests.parquet, in the order of play."""
    steps = pd.DataFrame(
        {
            **{name: getattr(log, name)[counted] for name in ("request", "tokens", "hits", "late", "misses")},
            "ttft_ms": np.where(log.phase == PREFILL, log.step_ns / 1e6, np.nan)[counted],
            "tpot_mean_ms": np.where(log.phase == DECODE, log.step_ns / 1e6, np.nan)[counted],
        }
    )
    sums = steps.groupby("request", sort=False)
    table = sums[["tokens", "hits", "late", "misses"]].sum().join(sums[["ttft_ms", "tpot_mean_ms"]].mean())
    identity = _identity(cell)
    rows: list[Row] = []
    for place, tokens, hits, late, misses, ttft, tpot in table.itertuples(name=None):
        request = requests.iloc[place]
        rows.append(
            {
                **identity,
                "request": str(request["id"]),
                "dataset": str(request["dataset"]),
                "task": str(request["task"]),
                "tokens": tokens,
                "lookups": hits + late + misses,
                "hits": hits,
                "late": late,
                "misses": misses,
                "ttft_ms": ttft if timed and not np.isnan(ttft) else None,
                "tpot_mean_ms": tpot if timed and not np.isnan(tpot) else None,
            }
        )
    return rows


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


@cache
def commit() -> str:
    """The commit of this project's checkout (`-dirty` if files differ), else the installed version."""
    root = Path(__file__).resolve().parents[1]
    if (root / ".git").exists():
        asked = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        try:
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            pass
    return version("moe-expert-cache")


def writable(folder: Path, names: Iterable[str] = ("results.parquet", "requests.parquet")) -> None:
    """Make `folder` and see that files of these names can be written there; InputError if not."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror or error}") from error
    for name in names:
        if (folder / name).is_dir():
            raise InputError(f"cannot write {folder / name}: a folder of that name is in the way")
        with replacing(folder / name, keep=False) as file:
            file.touch()


@contextmanager
def replacing(path: Path, keep: bool = True) -> Iterator[Path]:
    """A file beside `path` that takes its place once it is whole; nothing is left of it otherwise.

    InputError where the disk is full, or the folder cannot be written to.
    """
    if not path.name:
        raise InputError("a file to write needs a name")
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        if keep:
            part.replace(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_rows(rows: Sequence[Row], schema: pa.Schema, path: Path) -> None:
    """Rows as a Parquet file of `schema`, whole or not at all."""
    with replacing(path) as file:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), file)
