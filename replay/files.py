"""The files of a replay: its results, and per_token.csv, to which each step is added as it ends."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from errno import ENOSPC
from pathlib import Path

import pyarrow as pa

from replay.comparison.cell import CALLS
from replay.run import Outcome
from sim.loop.log import COLUMNS, Share, StepRow
from sim.results.files import write_rows, write_table
from sim.results.metrics import COUNT, MS, RESULTS, SHARE, TEXT
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
        *[(f"{call}_us_per_layer", pa.float64()) for call in CALLS],  # in calls of the device, by call
        ("others_processors", pa.float64()),  # that other programs took during the run
        ("other_program", TEXT),  # which took most
        ("computed_in", TEXT),  # packed experts: the type of the matrices that are multiplied in their place
        ("dense", TEXT),  # real or none
        ("fallbacks", TEXT),  # what is launched kernel by kernel for lack of graphs or a fused kernel, and why
        ("predicted_for", TEXT),
        *[(f"predicted_{name}", MS) for name in ("tpot_mean_ms", "tpot_p99_ms", "ttft_mean_ms")],
        ("predicted_hit_rate", SHARE),
        *[(f"predicted_tpot_{end}_ms", MS) for end in ("low", "high")],  # as sure as the machine's pace is
        ("predicted_lru_tpot_ms", MS),  # of LRU on the same machine
    ]
)
"""Columns of a replay's results.parquet: those of a sweep, then the device's."""

RESULTS_FILE, REQUESTS_FILE, STEPS, RUN_FILE = "results.parquet", "requests.parquet", "per_token.csv", "run.json"
NAMES = (RESULTS_FILE, REQUESTS_FILE, STEPS, RUN_FILE)
MAKER = "moe-replay run"

HEADER = ("request", *COLUMNS, "latency_ns")
"""Columns of per_token.csv: the request of each step, its numbers, and what the request waited for it (rule 18)."""


@contextmanager
def step_writer(
    folder: Path, key: str, done: Sequence[StepRow] = (), commands: Sequence[str] = ()
) -> Iterator[Callable[[StepRow], None]]:
    """Append each step to per_token.csv as it ends, behind the rows `done`: a run cut off keeps what it measured.

    Beside it run.json holds the `key` of the run, for `done_before`, and the commands that make it again, for reports.
    """
    with ExitStack() as opened:
        files: list[io.FileIO] = []  # written at once: nothing is left in a buffer that could not be

        def write(row: StepRow) -> None:
            if not files:
                others = (RESULTS_FILE, REQUESTS_FILE) if done else (RESULTS_FILE, REQUESTS_FILE, STEPS)
                remove(*(folder / old for old in others))  # they would not be of this run
                with replacing(folder / RUN_FILE) as part:
                    part.write_text(json.dumps({"key": key, "commands": commands}) + "\n", encoding="utf-8")
                with replacing(folder / STEPS) as part, part.open("w", newline="", encoding="utf-8") as begun:
                    csv.writer(begun).writerows([HEADER, *map(_line, done)])
                files.append(opened.enter_context((folder / STEPS).open("ab", buffering=0)))
            line = ",".join(map(str, _line(row))).encode() + b"\r\n"
            try:
                if files[0].write(line) < len(line):
                    raise OSError(ENOSPC, "no space left on device")
            except OSError as error:
                kept = "what it holds is kept: make room and run again, on any device but virtual with --resume"
                raise InputError(f"cannot write {folder / STEPS}: {error.strerror}; {kept}") from error

        yield write


def _line(row: StepRow) -> list[int]:
    return [row.shares[0].request, *row.numbers, row.shares[0].latency_ns]


def done_before(folder: Path, key: str, requests: Iterable[RequestSteps]) -> list[StepRow]:
    """Return the rows of the first requests that a run cut off has run whole. Raise InputError for another run."""
    run, path = folder / RUN_FILE, folder / STEPS
    if not path.exists():
        return []
    if not run.exists() or json.loads(run.read_text(encoding="utf-8"))["key"] != key:
        raise InputError(
            f"{folder} holds another run (of another trace, policy, cache, machine or code): name another --out, or "
            "start again with --overwrite"
        )
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    rows = [[int(value) for value in line] for line in csv.reader(whole.splitlines()[1:])]
    done: list[StepRow] = []
    for request in requests:
        of = rows[len(done) : len(done) + len(request.tokens)]
        if len(of) < len(request.tokens):
            break
        done += [StepRow(numbers, [Share(one, numbers[1], latency)]) for one, *numbers, latency in of]
    return done


def save(outcome: Outcome, folder: Path) -> None:
    """Write requests.parquet and then results.parquet, which says that the run has ended: each whole or not at all."""
    row = {name: outcome.row.get(name) for name in SCHEMA.names}
    write_table(outcome.requests, folder / REQUESTS_FILE)
    write_rows([row], SCHEMA, folder / RESULTS_FILE)
