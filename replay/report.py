"""What a replay writes and says: its files, a table, and the last line with predicted beside measured."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
from rich import box
from rich.table import Table

from replay.run import Outcome
from sim.loop.log import COLUMNS, Share, StepRow
from sim.quantities import show_bytes
from sim.results.files import write_rows, write_table
from sim.results.metrics import COUNT, MS, RESULTS, SHARE, TEXT, Row, cell_text
from traces.errors import InputError
from traces.output import remove, replacing
from traces.steps import RequestSteps

SCHEMA = pa.schema(
    [
        *RESULTS,
        *[(name, TEXT) for name in ("device", "device_name", "driver", "torch")],
        ("torch_threads", COUNT),
        ("lanes", COUNT),  # threads that read the disk
        ("past_cache", pa.bool_()),  # whether they read past the operating system's page cache
        ("host_pinned", pa.bool_()),
        ("host_experts", COUNT),  # distinct buffers; fewer than the model's experts: --host-dedup
        ("chunk_bytes", COUNT),
        ("copy_gb_per_s", pa.float64()),  # bytes over the time in which the link was busy
        ("copy_gb_per_s_alone", pa.float64()),  # one expert, nothing else running, before the run
        ("resumed_steps", COUNT),  # measured before a run was cut off, and kept
        ("host_ms", MS),  # nothing was submitted and nothing awaited: bookkeeping on the host
        ("host_us_per_layer", pa.float64()),  # bookkeeping, calls of device and policy apart, whatever runs beside it
        ("dense", TEXT),  # real or none
        ("fallbacks", TEXT),  # what is launched kernel by kernel for lack of graphs or a fused kernel, and why
        ("dense_loaded", SHARE),  # of the dense parameters, those that --weights gave
        ("predicted_for", TEXT),
        *[(f"predicted_{name}", MS) for name in ("tpot_mean_ms", "tpot_p99_ms", "ttft_mean_ms")],
        ("predicted_hit_rate", SHARE),
        *[(f"predicted_tpot_{end}_ms", MS) for end in ("low", "high")],  # as sure as the machine's pace is
    ]
)
"""Columns of a replay's results.parquet: those of a sweep, then the device's."""

RESULTS_FILE, REQUESTS_FILE, STEPS, RUN_FILE = "results.parquet", "requests.parquet", "per_token.csv", "run.json"
NAMES = (RESULTS_FILE, REQUESTS_FILE, STEPS, RUN_FILE)
MAKER = "moe-replay run"

AMPLE_HOST_BYTES = 8 << 30
"""Distinct host buffers of less than this may be served by the host's caches."""


LARGEST = 1 << 62
"""Number that a step may have: a sum of some stays within 64 bits."""

HEADER = ("request", *COLUMNS, "latency_ns")
"""Columns of per_token.csv: the request of each step, its numbers, and what the request waited for it (rule 18)."""


@contextmanager
def step_writer(folder: Path, key: str, done: Sequence[StepRow] = ()) -> Iterator[Callable[[StepRow], None]]:
    """Append each step to per_token.csv as it ends, so that a run cut off keeps what it has measured.

    Beside it run.json says by `key` which run it is of, for `done_before`. The file begins with the rows `done`.
    """
    with ExitStack() as opened:
        files: list[io.FileIO] = []  # written at once: nothing is left in a buffer that could not be

        def write(row: StepRow) -> None:
            if not files:
                others = (RESULTS_FILE, REQUESTS_FILE) if done else (RESULTS_FILE, REQUESTS_FILE, STEPS)
                remove(*(folder / old for old in others))  # they would not be of this run
                with replacing(folder / RUN_FILE) as part:
                    part.write_text(json.dumps({"key": key}) + "\n", encoding="utf-8")
                with replacing(folder / STEPS) as part, part.open("w", newline="", encoding="utf-8") as begun:
                    csv.writer(begun).writerows([HEADER, *map(_line, done)])
                files.append(opened.enter_context((folder / STEPS).open("ab", buffering=0)))
            line = ",".join(map(str, _line(row))).encode() + b"\r\n"
            try:
                written = files[0].write(line)
            except OSError as error:
                raise _full(folder, error.strerror) from error
            if written != len(line):
                raise _full(folder, "no space left on device")

        yield write


def _line(row: StepRow) -> list[int]:
    return [row.shares[0].request, *row.numbers, row.shares[0].latency_ns]


def _full(folder: Path, why: str | None) -> InputError:
    kept = "what it holds is kept: make room and run again, on any device but virtual with --resume"
    return InputError(f"cannot write {folder / STEPS}: {why}; {kept}")


def done_before(folder: Path, key: str, requests: Iterable[RequestSteps]) -> list[StepRow]:
    """Rows of the first of the requests that a run cut off has run whole.

    A last line that was cut off does not count. InputError where the folder holds another run, or rows that are none.
    """
    told, path = folder / RUN_FILE, folder / STEPS
    if not path.exists():
        return []
    try:
        was = json.loads(told.read_text(encoding="utf-8"))["key"] if told.exists() else None
        whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
        header, *lines = csv.reader(whole.splitlines())
        rows = [[int(value) for value in line] for line in lines]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, csv.Error) as error:
        why = f"holds no run that could continue ({error})"
        raise InputError(f"{folder} {why}: start again with --overwrite") from error
    if was != key or tuple(header) != HEADER:
        raise InputError(
            f"{folder} holds another run (of another trace, policy, cache, machine or code): name another --out, or "
            "start again with --overwrite"
        )
    done: list[StepRow] = []
    for request in requests:
        of = rows[len(done) : len(done) + len(request.tokens)]
        if len(of) < len(request.tokens):
            break
        each = zip(request.phase.tolist(), request.tokens.tolist(), strict=True)
        is_whole = all(len(row) == len(HEADER) and min(row) >= 0 and max(row) <= LARGEST for row in of)
        if not is_whole or [row[:3] for row in of] != [[request.request, *step] for step in each]:
            raise InputError(f"{path} does not hold the steps of this trace: start again with --overwrite")
        done += [StepRow(numbers, [Share(one, numbers[1], latency)]) for one, *numbers, latency in of]
    return done


def save(outcome: Outcome, folder: Path) -> None:
    """Write requests.parquet and then results.parquet, which says that the run has ended: each whole or not at all."""
    row = {name: outcome.row.get(name) for name in SCHEMA.names}
    write_table(outcome.requests, folder / REQUESTS_FILE)
    write_rows([row], SCHEMA, folder / RESULTS_FILE)


STALLED = {
    "predictor": "by the policy",
    "demand": "for a demand",
    "late": "for a late prefetch",
    "behind_prefetch": "behind a prefetch",
    "slot": "for a slot",
}
"""Causes of a stall, in words."""

ROWS = {
    "TTFT mean (ms)": ("ttft_mean_ms", "{:,.3f}"),
    "TPOT mean (ms)": ("tpot_mean_ms", "{:,.3f}"),
    "TPOT p50 (ms)": ("tpot_p50_ms", "{:,.3f}"),
    "TPOT p99 (ms)": ("tpot_p99_ms", "{:,.3f}"),
    "hit rate": ("hit_rate", "{:.1%}"),
    "late": ("late", "{:,}"),
    "misses": ("misses", "{:,}"),
    "demanded (MB)": ("bytes_demand", ""),
    "prefetched (MB)": ("bytes_prefetch", ""),
    "prefetch precision": ("prefetch_precision", "{:.1%}"),
    "link busy (ms)": ("link_busy_ms", "{:,.1f}"),
    "compute busy (ms)": ("compute_busy_ms", "{:,.1f}"),
    "stalled (ms)": ("gpu_idle_ms", "{:,.1f}"),
    **{f"  {told}": (f"stall_{cause}_ms", "{:,.1f}") for cause, told in STALLED.items()},
    "host alone (ms)": ("host_ms", "{:,.1f}"),
    "host a layer (us)": ("host_us_per_layer", "{:,.1f}"),
    "link (GB/s)": ("copy_gb_per_s", "{:,.2f}"),
}


def table(outcome: Outcome) -> Table:
    """A line for each figure, measured beside every prediction."""
    shown = Table("", box=box.SIMPLE_HEAD)
    for heading in (_found(outcome.row), *(f"predicted for {one.machine}" for one in outcome.predictions)):
        shown.add_column(heading, justify="right")
    rows = [outcome.row, *(prediction.row for prediction in outcome.predictions)]
    for heading, (column, form) in ROWS.items():
        values = [row.get(column) for row in rows]
        if any(value is not None for value in values):
            shown.add_row(heading, *(_show(value, form) for value in values))
    return shown


def title(outcome: Outcome) -> str:
    """What was run on what."""
    row = outcome.row
    machine = row["device_name"] or f"a logical clock for {row['hardware']}"
    played = f"{row['requests']} requests of {row['trace']}, {row['tokens']:,} tokens"
    return f"{row['model']} on {row['device']} ({machine}), {cell_text(row)} of the experts: {played}"


def last_line(outcome: Outcome) -> str:
    """Predicted beside measured: TPOT (TTFT where nothing is decoded) and hit rate."""
    row = outcome.row
    column = "tpot_mean_ms" if row["tpot_mean_ms"] is not None else "ttft_mean_ms"
    name = column[:4].upper()
    measured = _found(row)
    expected = outcome.predictions[0]
    off = expected.row[column] / row[column] - 1 if row[column] else 0.0
    low, high = expected.interval_ms or (0.0, 0.0)
    apart = f"; {low:.4g} to {high:.4g} as the machine's pace varied" if expected.interval_ms else ""
    return (
        f"predicted for {expected.machine}: {name} mean {expected.row[column]:.4g} ms ({off:+.1%}{apart}), "
        f"hit rate {_show(expected.row['hit_rate'], '{:.1%}')}; {measured}: {name} mean {row[column]:.4g} ms, "
        f"hit rate {_show(row['hit_rate'], '{:.1%}')}"
    )


def notes(outcome: Outcome) -> list[str]:
    """What a reader of the figures must know."""
    row = outcome.row
    found = []
    if row["device"] == "cpu":
        found.append("on the cpu device the link is memcpy and the GPU is this CPU")
    if row.get("past_cache") is False:
        found.append(
            "the file is read through the operating system's page cache, since its file system knows no direct reads: "
            "the link's figures may be those of memory"
        )
    if row.get("fallbacks"):
        found.append(f"launched kernel by kernel, and slower: {row['fallbacks']}")
    if (loaded := row.get("dense_loaded")) is not None and loaded < 1:
        found.append(f"--weights gave {loaded:.0%} of the dense parameters; the others are random")
    experts = row["all_experts"]
    distinct = row.get("host_experts") or experts
    if distinct < experts:
        size = distinct * row["expert_bytes"]
        flattered = ": the host's caches may flatter the link" if size < AMPLE_HOST_BYTES else ""
        found.append(f"--host-dedup: {experts} experts share {distinct} host buffers, {show_bytes(size)}{flattered}")
    return found


def _found(row: Row) -> str:
    """On a logical clock nothing is measured."""
    return "replayed" if row["device"] == "virtual" else "measured"


def _show(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return form.format(value) if form else f"{value / 1e6:,.1f}"


def as_json(outcome: Outcome) -> Row:
    """The row, with the figures of every prediction."""
    return {**outcome.row, "predictions": {one.machine: one.row for one in outcome.predictions}}
