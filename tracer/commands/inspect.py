"""`moe-trace info` and `check`: look at a trace, check it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from terminal import console
from tracer.commands.convert import source_of
from tracer.commands.shared import TraceArgument, size, warn_if_unfinished
from traces.defects import of_trace
from traces.importers import Options, read_dump
from traces.reader import EXTRA, open_folder
from traces.schema import AGGREGATE, GROWING, REQUESTS, ROUTING
from traces.stats import summary
from traces.stream import pieces


def info(
    trace: TraceArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show a trace's model, size, sparsity, reuse between adjacent tokens, and EAM similarity.

    Example: moe-trace info traces/recorded/demo
    """
    folder = open_folder(trace)
    warn_if_unfinished(folder)
    facts = summary(pieces(trace, [name for name in folder.optional if name.startswith("lookahead")]))
    if as_json:
        console.say_json(facts)
    else:
        _print_info(facts)
        if folder.meta.mode != AGGREGATE:
            console.say(f"next: moe-sim {'analyze' if 'hits' in folder.optional else 'sweep'} {trace}")


def check(
    trace: Annotated[str, typer.Argument(help="A trace, its URL, or a dump that `moe-trace import` reads.")],
    meta: Annotated[
        Path | None, typer.Option(help="JSON with facts of a dump, as for import.", show_default="X.json if there")
    ] = None,
    *,
    options: Options,
) -> None:
    """Check a trace or a dump, its files and ids, and for what recorders get wrong; status 1 for a finding.

    What cannot be read or is invalid ends with status 2 and the first fault. --fix belongs to `moe-trace import`.

    Example: moe-trace check traces/recorded/demo
    """
    file = Path(trace)
    if file.exists() and not (file.is_dir() and any((file / name).exists() for name in (REQUESTS, GROWING, ROUTING))):
        source = source_of(file, meta, replace(options, fix=True), quiet=False)
        lengths = [(len(made.requests), len(made.experts)) for made in read_dump(source)]
        findings, (requests, tokens) = source.findings, map(sum, zip(*lengths, strict=True))
        for text in dict.fromkeys(source.found):
            console.note(f"found: {text}")
        what, following = f"{requests} requests, {tokens} tokens", "import"
    else:
        findings, tokens = of_trace(pieces(trace, EXTRA))
        folder = open_folder(trace)
        warn_if_unfinished(folder)
        what, following = size(folder, tokens), "info"
    for finding in findings:
        console.say(str(finding))
    if findings:
        raise typer.Exit(1)
    console.say(f"{trace} is sound: {what}")
    console.say(f"next: moe-trace {following} {trace}")


def _print_info(facts: dict[str, Any]) -> None:
    size = facts["expert_bytes"]
    labels = ", ".join(f"{what}: {len(facts[what])}" for what in ("datasets", "tasks") if facts[what])
    lines = {
        "trace": f"{facts['name']} ({facts['mode']})",
        "model": facts["model"] + (f" at {facts['revision']}" if facts["revision"] else ""),
        "shape": f"{facts['layers']} MoE layers x {facts['experts']} experts, top-{facts['top_k']}",
        "expert": "size unknown" if size is None else f"{size:,} bytes, {facts['dtype'] or 'type unknown'}",
        "requests": f"{facts['requests']:,} ({labels or 'not labelled'})",
        "tokens": facts["phase"] if facts["tokens"] is None else f"{facts['tokens']:,} ({facts['phase']})",
    }
    for name, text in lines.items():
        console.say(f"{name:<10}{text}")
    phases = [phase for phase in ("prefill", "decode") if phase in facts]
    table = Table("", *phases, box=None, pad_edge=False)
    for row in ROWS:
        table.add_row(row[0], *cells(row, [facts[phase] for phase in phases]))
    console.say(table)
    if facts["foresight"]:
        console.say(_foresight(facts, phases))


def _foresight(facts: dict[str, Any], phases: Sequence[str]) -> Table:
    """Return recall and precision of the picks ahead of time by distance, beside chance and the token before."""
    cells: dict[float | None, list[str]] = {}
    for each in facts["foresight"]:
        precision = "-" if each["precision"] is None else f"{each['precision']:.1%}"
        cells.setdefault(each["score"], []).append(f"{each['recall']:.1%} / {precision}")
    distances = dict.fromkeys(f"{each['distance']} ahead" for each in facts["foresight"])
    table = Table("recall / precision of routers ahead of time", *distances, box=None, pad_edge=False)
    for least, shown in cells.items():
        label = f"picks of a score of at least {least:g}" if least else "all picks"
        table.add_row("as many picks as experts are chosen" if least is None else label, *shown)
    for label, key in (("those of the token before", "share"), ("by chance", "chance")):
        share = facts[phases[-1]]["reuse"][key]
        table.add_row(f"  {label}", *["-" if share is None else f"{share:.1%} / {share:.1%}"] * len(distances))
    return table


Row = tuple[str, tuple[str | int, ...], str]
"""A line of a table: label, path in a phase of `traces.stats.summary`, format."""


def cells(row: Row, phases: Sequence[Any]) -> list[str]:
    """Return the values of one row for some phases; "-" where there is none."""
    found = []
    for value in phases:
        for key in row[1]:
            value = None if value is None else value[key]
        found.append("-" if value is None else format(value, row[2]))
    return found


ROWS: tuple[Row, ...] = (
    ("requests", ("requests",), ",d"),
    ("tokens", ("tokens",), ",d"),
    ("experts that a request activates", ("activated",), ".1%"),
    ("experts that a request activates repeatedly", ("repeated",), ".1%"),
    ("a token's experts that the token before it chose", ("reuse", "share"), ".1%"),
    ("  by chance", ("reuse", "chance"), ".1%"),
    ("lookups of the most popular quarter of a layer's experts", ("popular",), ".1%"),
    *(
        (label.format(2**power), ("working_sets", power, value), ".1%")
        for power in (1, 3, 6)  # places in `traces.stats.WINDOWS`
        for label, value in (
            ("experts that the last {} tokens of a request chose", "experts"),
            ("  lookups of them", "hits"),
        )
    ),
    ("EAM similarity (cosine), all pairs of requests", ("similarity", "all_pairs"), ".3f"),
    ("  with the nearest request", ("similarity", "nearest"), ".3f"),
    ("  with the next request", ("similarity", "next"), ".3f"),
    ("  within a task", ("similarity", "within_task"), ".3f"),
    ("  across tasks", ("similarity", "across_tasks"), ".3f"),
    ("nearest EAM is of the same task", ("similarity", "nearest_same_task"), ".1%"),
    ("  by chance", ("similarity", "chance"), ".1%"),
)
"""Lines of `moe-trace info`."""
