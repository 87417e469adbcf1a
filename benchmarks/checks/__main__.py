"""The commands behind `make gpu-check`, `disk-check` and `live-check`: `python3 -m benchmarks.checks gpu`."""

import math
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.checks import bounds, draw
from benchmarks.checks.baselines import MappingGpu
from benchmarks.checks.cells import DISK, GPU, POLICIES, Plan
from benchmarks.checks.runner import Check
from policies.core.grammar import split_list
from replay.comparison.errors import in_words
from replay.comparison.record import ERROR, Record
from replay.device_choice import require_cuda
from replay.model.network import stored_dtype
from sim.results.metrics import Row
from terminal import console, program
from traces.errors import InputError, unknown
from traces.models import profile as model_profile
from traces.output import check_file

RESULTS = Path("replay/results")
PAPER = "3.1 to 16.7 times"
"""MoE-Infinity (arXiv 2401.14361), its headline: latency of a token, 485 to 2590 ms of others against 155."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

Out = Annotated[Path, typer.Option(help="The file to write; or a folder, for NAME-DATE.json in it.")]
Traces = Annotated[Path | None, typer.Option(help="Folder of trace folders. A model without one: synthetic.")]
Folder = Annotated[Path, typer.Option(help="Where experts and checkpoints are written, on the disk to be checked.")]
Resume = Annotated[bool, typer.Option("--resume", help="Do not run again what the file holds.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Drop what the file holds.")]


@app.command("gpu")
def gpu_check(
    out: Out = RESULTS,
    traces: Traces = None,
    only: Annotated[str, typer.Option(help="Models, by profile.")] = ",".join(GPU.tokens),
    minutes: Annotated[float, typer.Option(help="What does not end in this time is left out.")] = 9.0,
    peers: Annotated[bool, typer.Option(help="Decode with accelerate's offload too.")] = True,
    commit: Annotated[str | None, typer.Option(help="What to call this version, where git is not there.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Check what only a GPU can show: kernels, calibration, prediction against measurement, and baselines.

    Exits with status 1 if a bound does not hold or a cell could not run.
    """
    if not 0 < minutes < math.inf:
        raise InputError(f"--minutes {minutes:g}: must be above 0 and finite")
    names = _models(GPU, only, traces)
    if not torch.cuda.is_available():
        raise InputError("make gpu-check needs a GPU, and torch finds none; the CPU is compared by moe-replay compare")
    gpu = MappingGpu()
    record = _record(out, gpu.name.replace("NVIDIA ", "").replace(" ", "-"), resume, overwrite)
    check = Check(GPU, record, _timed(), names, traces, budget_s=minutes * 60, peers=peers, gpu=gpu)
    check.run()
    if commit:
        record.set_facts(commit=commit)
        record.write()
    missing = bounds.unjudged(list(record), [(name, policy) for name in names for policy in POLICIES])
    for what in missing:
        console.warn(f"not judged: {what}")
    _print_record(record)
    if missing or record.facts["fallbacks"] or not all(row["holds"] for row in record.facts["verdict"]):
        raise typer.Exit(1)


@app.command("disk")
def disk_check(
    out: Out = RESULTS,
    folder: Folder = Path(),
    traces: Traces = None,
    only: Annotated[str, typer.Option(help="Models, by profile.")] = ",".join(DISK.tokens),
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a cell. Default: by model.")] = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
) -> None:
    """Compare prediction with measurement on this machine's disk and CPU, and policies with other tools.

    Files of experts take up to 13 GB while it runs. With all models it takes half an hour.
    """
    names = _models(DISK, only, traces)
    record = _record(out, "disk", resume, overwrite)
    Check(DISK, record, _timed(), names, traces, _existing(folder), tokens).run()
    _print_record(record)


@app.command("live")
def live_check(
    out: Out = RESULTS,
    folder: Folder = Path(),
    model: Annotated[str, typer.Option(help="Model profile whose shapes are used.")] = "olmoe-1b-7b",
    tokens: Annotated[int, typer.Option(min=3, help="Tokens that are generated.")] = 25,
    turns: Annotated[int, typer.Option(min=1, help="How often each part is run.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute. Default: torch's.")] = None,
    device: Annotated[str, typer.Option(help="disk, or cuda.")] = "disk",
    lookahead: Annotated[int, typer.Option(min=0, help="Try the routers of so many next layers, and no more.")] = 0,
    added: Annotated[float, typer.Option(min=0, help="Scale of what layers add to the hidden state.")] = 1.0,
    overwrite: Overwrite = False,
) -> None:
    """Compare live generation with prediction, replay, llama.cpp, accelerate and transformers alone.

    Takes as much memory as the model has bytes, two and a half times as much disk, half an hour, and root for the
    limit of memory.
    """
    from benchmarks.checks.live import LiveCheck  # a GPU machine need not have what it generates with

    if device not in ("disk", "cuda"):
        raise unknown("device", device, ("disk", "cuda"))
    if device == "cuda":
        require_cuda("disk")
    path, began = _path(out, "live" if device == "disk" else "live-cuda"), time.monotonic()
    check_file(path, overwrite)
    if threads:
        torch.set_num_threads(threads)
    check = LiveCheck(Record(path), _timed(), _existing(folder), model, tokens, device, turns, lookahead, added)
    for what, ratio in check.run().items():
        console.say(f"{what}: {ratio:.2f}")
    console.say(f"wrote {path} in {time.monotonic() - began:.0f} s")


@app.command("draw")
def draw_check(
    file: Annotated[Path, typer.Argument(help="What make gpu-check or make disk-check wrote.")],
    figure: Annotated[Path | None, typer.Option(help="The picture to write (.png).")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a picture that is already there.")] = False,
) -> None:
    """Print tables of a check in Markdown, and draw it."""
    if figure:
        check_file(figure, overwrite)
    result = draw.read(file)
    for line in draw.tables(result):
        console.say(line)
    if figure:
        draw.write(result, figure)


def _models(plan: Plan, only: str, traces: Path | None) -> tuple[str, ...]:
    """Return the models that are named. Raise InputError for one that cannot be run."""
    if traces:
        _existing(traces)
    names = split_list(only)
    if not names:
        raise InputError(f"--only names no model: take some of {', '.join(plan.tokens)}")
    for name in names:
        if stored_dtype(model_profile.model(name)) is None:
            raise InputError(f"--only {name}: its experts are packed, and kernels are compared on float32 and bfloat16")
    return names


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise InputError(f"no folder at {folder}")
    return folder


def _path(out: Path, name: str) -> Path:
    return out if out.suffix == ".json" else out / f"{name}-{date.today()}.json"


def _record(out: Path, name: str, resume: bool, overwrite: bool) -> Record:
    """Return the record, with the cells that a check which continues has finished."""
    path = _path(out, name)
    check_file(path, overwrite=True)  # the record says itself whether it is one, and whether it continues
    record = Record.open(path, resume=not overwrite, otherwise="drop it with --overwrite")
    if len(record) and not resume:
        raise InputError(
            f"{path} holds {len(record)} cells: use --resume to continue, --overwrite to drop them, or another --out"
        )
    return record


def _timed() -> Callable[[str], None]:
    began = time.monotonic()
    return lambda text: console.note(f"{time.monotonic() - began:6.1f} s  {text}")


def _print_record(record: Record) -> None:
    """Print cells, bounds, ratios to what others do and what could not be run; exit with 1 where a cell failed."""
    for line in lines(record):
        console.say(line)
    for what in record.facts["fallbacks"]:
        console.warn(f"launched kernel by kernel, and slower: {what}")
    for what in record.facts["left_out"]:
        console.warn(f"left out, for lack of time or memory: {what}")
    failed = [cell for cell in record if ERROR in cell]
    for cell in failed:
        console.warn(f"{', '.join(str(cell[of]) for of in ('model', 'policy', 'mode') if cell.get(of))}: {cell[ERROR]}")
    console.say(f"wrote {record.path}")
    if failed:
        raise typer.Exit(1)


def lines(record: Record) -> Iterator[str]:
    """Yield a line for each cell, for all of them together, each bound and each ratio."""
    facts = record.facts
    yield from (_line(cell) for cell in record if ERROR not in cell)
    if facts["accuracy"]:
        yield in_words(facts["accuracy"])
    yield from bounds.lines(facts.get("verdict") or ())
    for row in facts["ratios"]:
        what = f"{row['model']}, {row['policy']} at {row['cache_fraction']:.0%}"
        yield f"{what}: a token takes {row['over']} {row['ratio']:.2f} times as long"
    if facts["ratios"] and facts.get("verdict"):
        yield f"the paper states {PAPER} over what it compares with"


def _line(cell: Row) -> str:
    measured = cell["measured"]["tpot_mean_ms"]
    if "predicted" not in cell:
        return f"{cell['model']}, {cell['mode']}: {measured:,.1f} ms a token"
    low, high = cell.get("predicted_interval_ms") or (0.0, 0.0)
    interval = f" ({low:,.1f} to {high:,.1f})" if high else ""
    where = f"{cell['model']}, {cell['policy']} at {cell['cache_fraction']:.0%}, {cell['mode']}"
    return (
        f"{where}: {measured:,.1f} ms a token, "
        f"predicted {cell['predicted']['tpot_mean_ms']:,.1f}{interval}, {cell['errors']['tpot_mean']:+.1%}"
    )


if __name__ == "__main__":
    program.main(app, "checks")
