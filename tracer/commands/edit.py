"""`moe-trace cat`, `slice` and `sample`: join traces, and take requests out of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from terminal import console
from tracer.commands.shared import Overwrite, Quiet, TraceArgument, report, warn_if_unfinished
from traces.edit import Source, join
from traces.errors import InputError, unknown

Into = Annotated[Path, typer.Option(help="Folder of the new trace.")]
Prefix = Annotated[bool, typer.Option("--prefix-ids", help="Put the trace's name before each request's id.")]


def cat(
    traces: Annotated[list[str], typer.Argument(help="Folders or URLs of traces of one model, in the order wanted.")],
    out: Into,
    prefix_ids: Prefix = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Join traces of one model into one.

    Columns that not all traces have are left out, and settings in which they differ.

    Example: moe-trace cat traces/recorded/demo-1-of-2 traces/recorded/demo-2-of-2 --out traces/recorded/demo
    """
    _write([Source.open(trace) for trace in traces], out, overwrite, quiet, prefix_ids)


def slice_(
    trace: TraceArgument,
    out: Into,
    requests: Annotated[
        str | None,
        typer.Option(
            help="FROM:TO, numbers from 0 among the requests that --dataset and --task leave, TO not included; "
            "negative: from the end."
        ),
    ] = None,
    dataset: Annotated[list[str] | None, typer.Option(help="Only requests of this dataset; may be repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only requests of this task; may be repeated.")] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Take the requests out of a trace that fit all that is asked.

    Example: moe-trace slice traces/recorded/demo --task law --requests :4 --out traces/recorded/law
    """
    source = Source.open(trace)
    for column, wanted in (("dataset", dataset), ("task", task)):
        labels = source.labels[column]
        for label in wanted or ():
            if label not in set(labels):
                raise unknown(column, label, sorted(set(labels) - {""}) or ["none, the trace has no labels"])
        if wanted:
            source = source.only(labels.isin(wanted).to_numpy())
    if requests is not None:
        chosen = np.zeros(len(source.keep), bool)
        try:
            first, last = (int(number) if number.strip() else None for number in requests.split(":"))
        except ValueError:
            raise InputError(f"--requests {requests!r}: give FROM:TO, such as 10:20, :10 or -5:") from None
        chosen[np.flatnonzero(source.keep)[first:last]] = True
        source = source.only(chosen)
    _write([source], out, overwrite, quiet)


def sample(
    trace: TraceArgument,
    out: Into,
    requests: Annotated[int, typer.Option(min=1, help="How many requests to draw.")],
    per_task: Annotated[bool, typer.Option("--per-task", help="Draw so many of each task and of no other.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Draw requests of a trace at random, without repeating one; they stay in their order.

    Example: moe-trace sample traces/recorded/demo --requests 2 --per-task --out traces/recorded/few
    """
    drawn = Source.open(trace).sampled(requests, seed, "task" if per_task else None)
    _write([drawn], out, overwrite, quiet)


def _write(sources: Sequence[Source], out: Path, overwrite: bool, quiet: bool, prefix: bool = False) -> None:
    for source in sources if not quiet else ():
        warn_if_unfinished(source.folder)
    total = sum(int(source.keep.sum()) for source in sources)
    with console.progress(total, quiet, "requests") as advance:
        join(sources, out, overwrite, prefix, advance)
    report(out, quiet)
