"""From the log of a run to rows of results: what each column means, whichever engine filled the log.

Definitions are those of docs/contract.md (*What is counted*). Percentiles interpolate linearly between the two nearest
ranks (NumPy's default). Where several requests share a step, what it did is no single request's: hits and misses stand
in the row of the run alone.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from policies.core.bent import COUNTS, WHOLE
from policies.core.grammar import policy_title
from policies.core.policy import Float
from sim.loop.log import STALLS, Int, RunLog
from sim.quantities import show_mib
from sim.results.provenance import commit
from traces import facts
from traces.errors import InputError
from traces.steps import DECODE, PREFILL

Row = dict[str, Any]

TEXT, COUNT, SHARE, MS = pa.string(), pa.int64(), pa.float64(), pa.float64()


def _required(names: Sequence[str], kind: pa.DataType) -> list[pa.Field]:
    return [pa.field(name, kind, nullable=False) for name in names]


_LOOKED_UP = ("hits", "late", "misses")
_CELL = [
    *_required(("policy", "options", "trace"), TEXT),
    *_required(("cache_experts",), COUNT),  # of mean size, where they differ
    ("cache_bytes", COUNT),
    *_required(("cache_fraction",), SHARE),
]
ADMISSION = ("admitted", "bypassed", "copies", "bytes_copied")
_QUEUE = ("mean", "p99", "max")
LATENCIES = ("mean", "p50", "p95", "p99", "max")
"""Figures of the steps of a phase: TTFT of prefills, TPOT of decode steps."""

RESULTS = pa.schema(
    [
        *_CELL[:3],
        *_required(("phase", "model"), TEXT),
        ("hardware", TEXT),
        *_CELL[3:],
        *_required(("all_experts", "layers"), COUNT),  # of the model, what cache_fraction is a share of
        *_required(("requests", "tokens", "lookups", *_LOOKED_UP), COUNT),
        *_required(("on_host",), COUNT),  # of the misses, those computed on the host: host reads
        *[(name, COUNT) for name in ADMISSION],  # under an admission alone: of the misses, and background copies
        ("hit_rate", SHARE),
        ("decode_hit_rate", SHARE),  # of decode steps alone
        ("belady_hit_rate", SHARE),  # of Belady at this size; this and the next two in sweeps alone
        *[(f"gap_{name}", SHARE) for name in ("hits", "latency")],  # share closed of the gap from LRU to Belady: in
        # lookups that need no transfer, not even a prefetch, and in time
        *[(name, COUNT) for name in ("bytes_demand", "bytes_prefetch", "bytes_wasted")],
        *_required(("reads_demand", "reads_prefetch"), COUNT),  # of the disk, in experts
        *_required(("prefetch_used",), COUNT),  # prefetched experts, when they are first looked up
        *[(name, SHARE) for name in ("prefetch_precision", "prefetch_coverage")],
        *[(name, MS) for name in ("ttft_mean_ms", *(f"tpot_{figure}_ms" for figure in LATENCIES))],
        *[(f"queue_{figure}_ms", MS) for figure in _QUEUE],  # from a request's arrival to its admission
        *[(f"stall_{cause}_ms", MS) for cause in STALLS],
        *[(name, MS) for name in ("gpu_idle_ms", "link_busy_ms", "compute_busy_ms", "host_busy_ms", "disk_busy_ms")],
        ("overlap", SHARE),
        ("tokens_per_s", pa.float64()),  # decoded, a second of all steps, prefills included; null: none is decoded
        ("fits", pa.bool_()),  # whether GPU memory holds the cache beside all else; null: untimed
        ("resident_ms", MS),  # of a sweep: TPOT (TTFT) with all experts in GPU memory; null where they do not fit
        ("host_memory", TEXT),  # as stated; null: it holds all experts
        ("draft", COUNT),  # tokens drafted a decode step; null: none
        ("acceptance", TEXT),  # as stated
        ("prefill_chunk", COUNT),  # tokens of a prompt in a step; null: all
        ("routing", TEXT),  # the rule that bent it, as stated (rule 22): then the run is not lossless
        *_required(("lost_weight", "changed_choices"), SHARE),  # of the router's, by that rule
        ("max_batch", COUNT),  # requests at a time; null: one after another
        ("arrivals", TEXT),
        ("arrival_rate", pa.float64()),  # requests a second
        *_required(("oracle", "cold"), pa.bool_()),
        *_required(("warmup_requests",), COUNT),
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
        *_required(("request", "dataset", "task"), TEXT),
        *_required(("tokens", "decoded"), COUNT),  # all, and those that were decoded
        *[(name, COUNT) for name in ("lookups", *_LOOKED_UP)],  # null where requests shared a step, as the next two
        *[(f"decode_{name}", COUNT) for name in ("lookups", "hits")],  # of decode steps alone
        ("queue_ms", MS),
        ("ttft_ms", MS),
        ("tpot_mean_ms", MS),
        ("cell", TEXT),
        ("steps", pa.list_(pa.list_(pa.int64()))),  # of each of its steps STEP; null of FEWEST requests and more
    ]
)
"""Columns of requests.parquet, a row per cell and request."""

STEP = ("lookups", "hits", "decoded", "decode_ns")

FEWEST = 6
"""The least requests that can show a difference: with n of them chance gives all the same sign in 2 of 2^n cases."""

_COUNTED = (
    *("tokens", *_LOOKED_UP, "on_host", "reads_demand", "reads_prefetch", *COUNTS),
    *("demand_bytes", "prefetch_bytes", "wasted_bytes", "prefetch_transfers", "prefetch_used"),
    *("admitted", "bypassed", "copies", "copied_bytes"),
    *("link_busy_ns", "compute_busy_ns", "host_busy_ns", "disk_busy_ns"),
)
"""Columns of a log that are summed over a run."""

_OF_REQUEST = ("tokens", "waited", "prefills", "prefill_ns", "decodes", "decoded", "decode_ns")
"""What is summed over each request's rows."""

_REQUEST_COLUMNS = ("step", "request", "tokens", "latency_ns", "waited_ns", "rejected", "prefills")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What was run: columns of its row, by their names there."""

    policy: str  # as stated
    options: dict[str, Any]  # resolved, whole
    oracle: bool
    trace: str
    phase: str
    model: str
    hardware: str | None = None  # None: untimed
    predictor_us: float | None = None  # charged an event; None: untimed
    fits: bool | None = None  # into GPU memory, beside dense weights, KV cache and draft model; None: untimed
    cache_experts: int
    cache_bytes: int | None
    all_experts: int
    layers: int
    host_memory: str | None = None
    draft: int | None = None
    acceptance: str | None = None
    prefill_chunk: int | None = None
    routing: str | None = None
    max_batch: int | None = None
    arrivals: str | None = None
    arrival_rate: float | None = None
    cold: bool = False
    warmup_requests: int = 0  # run first, not counted
    seed: int | None  # of the policy's draws


class Summary:
    """The row of a run, and a row for each request counted, from logs as they come.

    `requests`: those of the trace, so that `log.request` are places in it. `prefetch_coverage` is null: it needs the
    misses of the same cell without prefetch. Without hardware all times are null, without a size of experts all bytes.
    What grows with a trace are its requests, and eight bytes a step, for the percentiles.
    """

    def __init__(self, cell: Cell, requests: pd.DataFrame) -> None:
        self._cell = cell
        self._labels = requests
        self._expert_bytes = 0
        self._sums = dict.fromkeys((*_COUNTED, *(f"stall_{cause}" for cause in STALLS)), 0)
        self._decoded = dict.fromkeys(_LOOKED_UP, 0)
        self._elapsed_ns = self._output = 0
        self._token_ns: list[Float] = []  # of decoded tokens
        self._of_request = {
            name: np.zeros(len(requests), np.int64)
            for name in (*_OF_REQUEST, *_LOOKED_UP, *(f"decode_{name}" for name in _LOOKED_UP))
        }
        self._begun = np.zeros(len(requests), np.bool_)  # by request
        self._shared = False  # whether a step had several requests
        self._unused = 0  # prefetched experts that steps which do not count left in the cache
        few = len(requests) - cell.warmup_requests < FEWEST
        self._by_step: list[Int] | None = [] if few else None  # [n, 5] request, and STEP

    def add(self, log: RunLog) -> int:
        """Take steps run, of one request or of many; return how many requests began in them.

        Warm-up requests count nothing, nor does a step that any of them shares, but in the rows of other requests.
        """
        rows = log.by_request
        warm = rows.request < self._cell.warmup_requests
        counted = np.ones(len(log.step_ns), np.bool_)
        counted[rows.step[warm]] = False
        self._expert_bytes = log.expert_bytes
        for name in _COUNTED:
            self._sums[name] += int(getattr(log, name)[counted].sum())
        self._sums["tokens"] -= int(rows.rejected[counted[rows.step]].sum())
        for name in _LOOKED_UP:
            self._decoded[name] += int(getattr(log, name)[counted & (log.phase == DECODE)].sum())
        # one after another, requests wait also for what a real host does between two of their steps
        elapsed = log.step_ns if self._cell.max_batch else rows.latency_ns
        self._elapsed_ns += int(elapsed[counted].sum())
        for cause, ns in zip(STALLS, log.stall_ns[counted].sum(axis=0).tolist(), strict=True):
            self._sums[f"stall_{cause}"] += ns
        self._unused += int((log.prefetch_transfers - log.prefetch_used - log.prefetch_wasted)[~counted].sum())
        step, request, tokens, latency, waited, rejected, prefills = (
            getattr(rows, name)[~warm] for name in _REQUEST_COLUMNS
        )
        seen = np.unique(rows.request)
        begun = int(np.count_nonzero(~self._begun[seen]))
        self._begun[seen] = True
        prefill, kept = (log.phase[step] == PREFILL) | (prefills > 0), tokens - rejected
        # A request's first token comes as long after its arrival as it waited, and its prefill took.
        waits = np.where(prefill, waited, 0)
        # What a step decodes comes at once: each of its tokens took an equal part of it.
        here = ~prefill & counted[step] & (kept > 0)
        self._token_ns.append(np.repeat(latency[here] / kept[here], kept[here]))
        decoded = kept * ~prefill
        self._output += int(decoded[counted[step]].sum())
        values = (kept, waited, prefill, (latency + waits) * prefill, ~prefill, decoded, latency * ~prefill)
        for name, value in zip(_OF_REQUEST, values, strict=True):
            np.add.at(self._of_request[name], request, value)
        self._shared |= len(rows.step) != len(log.step_ns)
        if not self._shared:
            if self._by_step is not None:
                lookups, hits = (log.hits + log.late + log.misses)[step], log.hits[step]
                self._by_step.append(np.stack([request, lookups, hits, decoded, latency * ~prefill], axis=1))
            for name in _LOOKED_UP:
                looked_up = getattr(log, name)[step]
                np.add.at(self._of_request[name], request, looked_up)
                np.add.at(self._of_request[f"decode_{name}"], request, looked_up * (log.phase[step] == DECODE))
        return int(begun)

    def row(self) -> Row:
        """Return the run's row. Raise InputError where every step with a token has a warm-up request."""
        cell, sums, size = self._cell, self._sums, self._expert_bytes
        if not sums["tokens"]:
            raise InputError(
                f"no step counts: each is shared with one of the {cell.warmup_requests} warm-up requests, or has no "
                "tokens; use a smaller `warmup_requests` or `max_batch`, or more requests"
            )
        lookups = sums["hits"] + sums["late"] + sums["misses"]
        fetched = sums["prefetch_transfers"] + self._unused
        row: Row = {
            **_of_cell(cell),
            "requests": int(np.count_nonzero(self._steps)),
            **{name: sums[name] for name in ("tokens", *_LOOKED_UP, "on_host", "reads_demand", "reads_prefetch")},
            "lookups": lookups,
            "hit_rate": _ratio(sums["hits"], lookups),
            "decode_hit_rate": _ratio(self._decoded["hits"], sum(self._decoded.values())),
            **{f"bytes_{kind}": sums[f"{kind}_bytes"] if size else None for kind in ("demand", "prefetch", "wasted")},
            **({name: sums[name] for name in ADMISSION[:-1]} if "admission" in cell.options else {}),
            "bytes_copied": sums["copied_bytes"] if size and "admission" in cell.options else None,
            "prefetch_used": sums["prefetch_used"],
            "lost_weight": (_ratio(sums["lost"], sums["routed"]) or 0.0) / WHOLE,
            "changed_choices": _ratio(sums["changed"], sums["choices"]) or 0.0,
            "prefetch_precision": _ratio(sums["prefetch_used"], fetched),
            "expert_bytes": size or None,
            "commit": commit(),
        }
        if cell.hardware is not None:
            row |= self._times() | self.latencies()
        return {name: row.get(name) for name in RESULTS.names}

    def requests(self) -> pa.Table:
        """Return the rows of requests.parquet, in the order of the run."""
        here = np.flatnonzero(self._steps)
        sums = {name: counts[here] for name, counts in self._of_request.items()}
        timed, shared = self._cell.hardware is not None, self._shared
        lookups = {phase: sum(sums[f"{phase}{name}"] for name in _LOOKED_UP) for phase in ("", "decode_")}
        looked_up = {
            **{name: sums[name] for name in (*_LOOKED_UP, "decode_hits")},
            **{f"{phase}lookups": counts for phase, counts in lookups.items()},
        }
        columns: dict[str, Any] = {
            **{name: [value] * len(here) for name, value in _of_cell(self._cell).items()},
            "request": self._labels["id"].iloc[here].astype(str),
            "dataset": self._labels["dataset"].iloc[here].astype(str),
            "task": self._labels["task"].iloc[here].astype(str),
            "tokens": sums["tokens"],
            "decoded": sums["decoded"],
            **({} if shared else looked_up),
            "queue_ms": sums["waited"] / 1e6 if timed else None,
            "ttft_ms": self._mean_ms(sums["prefill_ns"], np.minimum(sums["prefills"], 1)),
            "tpot_mean_ms": self._mean_ms(sums["decode_ns"], sums["decoded"]),
            "steps": None
            if shared or self._by_step is None
            else [self._steps_of(each).tolist() for each in here.tolist()],
        }
        none = [None] * len(here)
        values = {name: none if columns.get(name) is None else columns[name] for name in REQUESTS.names}
        return pa.table({name: pa.array(values[name], REQUESTS.field(name).type) for name in values}, REQUESTS)

    def _steps_of(self, request: int) -> Int:
        steps = np.concatenate(self._by_step or [np.zeros((0, 5), np.int64)])
        return steps[steps[:, 0] == request, 1:]

    @property
    def _steps(self) -> Int:
        """[requests] steps counted of each."""
        return self._of_request["prefills"] + self._of_request["decodes"]

    def _mean_ms(self, ns: Int, steps: Int) -> list[float | None]:
        timed = self._cell.hardware is not None
        return [a / n / 1e6 if timed and n else None for a, n in zip(ns.tolist(), steps.tolist(), strict=True)]

    def _times(self) -> Row:
        """Return sums of stalls and busy times, in ms, and what follows from them."""
        stalls = {cause: self._sums[f"stall_{cause}"] for cause in STALLS}
        busy = self._sums["link_busy_ns"]
        exposed = stalls["demand"] + stalls["late"] + stalls["behind_prefetch"]
        return {
            **{f"stall_{cause}_ms": ns / 1e6 for cause, ns in stalls.items()},
            "gpu_idle_ms": sum(stalls.values()) / 1e6,
            **{f"{each}_busy_ms": self._sums[f"{each}_busy_ns"] / 1e6 for each in ("link", "compute", "host", "disk")},
            **self._queues(),
            "overlap": 1 - exposed / busy if busy else None,
            "tokens_per_s": _ratio(self._output * 1e9, self._elapsed_ns) or None,
        }

    def _queues(self) -> Row:
        waited = self._of_request["waited"][self._steps > 0] / 1e6
        if self._cell.max_batch is None or not len(waited):
            return {}
        figures = waited.mean(), np.percentile(waited, 99), waited.max()
        return {f"queue_{name}_ms": float(ms) for name, ms in zip(_QUEUE, figures, strict=True)}

    def latencies(self) -> Row:
        """Return TTFT of prefills and TPOT of decode steps, by LATENCIES; null where there are none."""
        row: Row = {}
        first_ns = self._of_request["prefill_ns"][self._of_request["prefills"] > 0].astype(np.float64)
        for kind, ns in (("ttft", first_ns), ("tpot", np.concatenate([np.empty(0), *self._token_ns]))):
            figures: list[float | None] = [None] * len(LATENCIES)
            if len(ns):
                of_ns = ns.mean(), *np.percentile(ns, [50, 95, 99], overwrite_input=True), ns.max()
                figures = [float(each) / 1e6 for each in of_ns]
            row |= {f"{kind}_{name}_ms": ms for name, ms in zip(LATENCIES, figures, strict=True)}
        return row


def summarise(log: RunLog, cell: Cell, requests: pd.DataFrame) -> tuple[Row, pa.Table]:
    summary = Summary(cell, requests)
    summary.add(log)
    return summary.row(), summary.requests()


def _of_cell(cell: Cell) -> Row:
    options = json.dumps(facts.finite(cell.options), sort_keys=True, allow_nan=False)
    return {**vars(cell), "options": options, "cache_fraction": cell.cache_experts / cell.all_experts}


def size_text(row: Row | pd.Series) -> str:
    return f"{row['cache_experts']:,} ({100 * row['cache_fraction']:.3g}%)"


def engine_words(row: Row) -> list[str]:
    """Return the size of a cache as engines have it: slots of each layer and, where experts have a size, MiB."""
    memory = [show_mib(row["cache_bytes"])] if row["cache_bytes"] else []
    return [f"{row['cache_experts'] / row['layers']:.3g}", *memory]


def idle_share(row: Row) -> float | None:
    """Return the share of a run's time that the GPU waits; None of an untimed run, and of one without steps."""
    idle, busy = row["gpu_idle_ms"], row["compute_busy_ms"]
    return None if idle is None else _ratio(idle, idle + busy)


def cell_text(row: Row) -> str:
    routing = f" with lossy routing {row['routing']}" if row.get("routing") else ""
    return f"{policy_title(row['policy'], row['oracle'])}{routing}, {size_text(row)}"


def users_text(row: Row) -> str:
    """Return how many requests a cell runs at a time, and when they arrive; nothing where they run one by one."""
    if not row["max_batch"]:
        return ""
    rate = f" at {row['arrival_rate']:g} a second" if row["arrival_rate"] else ""
    return f"{row['max_batch']} requests at a time, arrivals {row['arrivals']}{rate}"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
