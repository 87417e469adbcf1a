"""The command `moe-sim board`: policies over the shipped traces of several models, with one score."""

from collections.abc import Iterator
from dataclasses import asdict
from os import cpu_count
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from policies.core.grammar import policy_title, split_list
from sim.board import result as results
from sim.board.cases import HITS, MACHINES, POLICIES, cards_of, every
from sim.board.result import Result
from sim.board.running import Board
from sim.commands import options
from sim.engines import compiling
from sim.sweeps import notes
from terminal import console
from traces.output import check_file

LEGEND = (
    "score: percent of the gap from LRU to Belady closed in hits, the mean of all",
    "traces; worst: the least, below 0: fewer hits than LRU; below by trace",
)
OF_TIME = (
    *(f"{machine.wall}: the same in time, on {machine.title}" for machine in MACHINES),
    "slower: percent of time more than LRU takes, at most",
    "us: charged an event",
)
OF_MEMORY = "MiB: held beyond what LRU holds"


def board(
    policies: Annotated[
        list[str] | None, typer.Argument(help=f"Policies, as in eamc or FILE.py:CLASS. Default: {' '.join(POLICIES)}.")
    ] = None,
    all_policies: Annotated[bool, typer.Option("--all", help="Also run every policy that ships.")] = False,
    traces: Annotated[
        str | None, typer.Option(help="Traces of the set, by name, with commas. Default: all that are shipped.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Result file: run the same again, and compare every figure.")
    ] = None,
    trust_folder: options.TrustFolder = False,
    workers: options.Workers = None,
    out: Annotated[Path | None, typer.Option(help="File for the result (TOML).")] = None,
    overwrite: options.Overwrite = False,
    *,
    output: options.OutputOptions,
) -> None:
    """Run policies over the shipped traces of several models, and rank them by one score.

    The score is the mean share of the gap from LRU to Belady that a policy closes in hits, over traces and caches of 5,
    10, 25 and 50% of the experts, from a cold and from a warm cache. Where the model's sizes are known, TPOT is
    simulated as well, on three machines: the link, computing or the disk is the wall. With --check the exit status is 1
    if any figure differs from the file's.

    [b]moe-sim board lrfu my_file.py:MyPolicy --out mine.toml[/b]

    [b]moe-sim board --check mine.toml[/b]
    """
    stored = results.read(check, trust_folder) if check else None
    if out:
        check_file(out, overwrite, read=check)
    named = split_list(",".join(policies or ([] if all_policies else POLICIES)))
    runs = Board.of(
        cards_of(stored.traces if stored else split_list(traces)),
        tuple(stored.policies) if stored else (*named, *(each for each in every() if all_policies)),
        stored,
    )
    sizes = (f"{each.loaded.trace.name}: {note}" for each in runs.tables for note in each.loaded.notes)
    output.note(*dict.fromkeys(sizes))
    output.note(*notes.overhead_notes({} if stored else runs.own))
    versions = (each for table in runs.tables for each in table.loaded.versions(p for p, _ in table.grid.cells()))
    output.note(*compiling.notes(list(versions)))
    with console.progress(runs.requests, output.quiet) as advance:
        found = runs.run(workers or cpu_count() or 1, advance)
    if out:
        results.write(found, out, overwrite)
    differs = results.difference(stored, found) if stored else None
    ending = [f"all figures are equal to those of {check}"] if stored and not differs else []
    ending += [f"wrote {out}"] if out else []
    output.show(lambda: asdict(found), lambda: (*results.sentences(found), *_tables(found), *ending))
    if differs:
        console.fail("moe-sim", f"{check}: {differs}", 1)


def _tables(found: Result) -> Iterator[Table | str]:
    walls = found.measures[1:]
    scores = console.table("policy", "score", "worst", *walls, "slower", "us", "MiB", fold=True)
    headings = (start.replace("-", "-\n", 1).replace(" ", "\n") for start in found.requests)
    starts = console.table("policy", *headings, fold=True)
    for text, entry in found.ranking:
        style = "bold green" if text == found.leader else None
        title = policy_title(text, entry.oracle)
        shares = (results.percent(share, 0) for share in (entry.worst, *(entry.score[wall] for wall in walls)))
        slower = "-" if entry.slower != entry.slower else f"{entry.slower:.1f}"
        costs = map(results.number, (entry.overhead_us, entry.memory_mib))
        scores.add_row(title, results.percent(entry.score[HITS]), *shares, slower, *costs, style=style)
        means = map(results.mean, found.shares(text).values())
        starts.add_row(title, *(results.percent(mean, 0) for mean in means), style=style)
    yield scores
    yield from (*LEGEND, *(OF_TIME if walls else ()), OF_MEMORY)
    yield starts
