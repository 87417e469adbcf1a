"""The command `moe-sim board`: policies over the shipped traces of several models, with one score."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from policies.core.grammar import policy_title, split_list
from sim.analysis import board as boards
from sim.commands import options, printed
from sim.engines import compiling
from sim.sweeps import report
from traces.commands import console
from traces.output import check_file

LEGEND = f"percent of the gap from LRU to Belady in hits; TPOT: in TPOT on {boards.MACHINE}"


def board(
    policies: Annotated[
        list[str] | None,
        typer.Argument(help=f"Policies, as in eamc or FILE.py:CLASS. Default: {' '.join(boards.POLICIES)}."),
    ] = None,
    traces: Annotated[
        str | None, typer.Option(help="Traces of the set, by name, with commas. Default: all that are shipped.")
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Result file: run the same again, and compare every figure.")
    ] = None,
    workers: options.Workers = None,
    out: Annotated[Path | None, typer.Option(help="File for the result (TOML).")] = None,
    overwrite: options.Overwrite = False,
    *,
    output: options.OutputOptions,
) -> None:
    """Run policies over the shipped traces of several models, and rank them by one score.

    The score is the mean share of the gap from LRU to Belady that a policy closes in hits, over traces and caches of 5,
    10, 25 and 50% of the experts. Where the model's sizes are known, TPOT is simulated as well. With --check the exit
    status is 1 if any figure differs from the file's.

    [b]moe-sim board lrfu my_file.py:MyPolicy --out mine.toml[/b]

    [b]moe-sim board --check mine.toml[/b]
    """
    stored = boards.read(check) if check else None
    if out:
        check_file(out, overwrite, read=check)
    cards = boards.cards_of(stored.traces if stored else split_list(traces))
    named = tuple(stored.policies) if stored else split_list(",".join(policies or boards.POLICIES))
    tables = boards.tables(cards, named, stored.overhead_us if stored else {})
    output.note(*report.overhead_notes({} if stored else boards.measured(tables)))
    versions = (each for table in tables for each in table.loaded.versions(p for p, _ in table.grid.cells()))
    output.note(*compiling.notes(list(versions)))
    with printed.progress(boards.requests(tables), output.quiet) as advance:
        found = boards.run(cards, tables, options.processes(workers), advance)
    if out:
        boards.write(found, out, overwrite)
    differs = boards.difference(stored, found) if stored else None
    ending = [f"all figures are equal to those of {check}"] if stored and not differs else []
    ending += [f"wrote {out}"] if out else []
    output.show(lambda: asdict(found), lambda: (boards.sentence(found), _table(found), LEGEND, *ending))
    if differs:
        console.fail("moe-sim", f"{check}: {differs}", 1)


def _table(found: boards.Result) -> Table:
    """Return a row for each policy: its score, worst case, and mean share of each trace."""
    headings = [trace.replace("-", "-\n", 1) for trace in found.traces]
    shown = printed.table("policy", "score", "worst", "TPOT", "worst", *headings, fold=True)
    leader = next(text for text, entry in found.ranking if not entry.oracle)
    for text, entry in found.ranking:
        shares = entry.worst, entry.tpot_score, entry.tpot_worst, *map(entry.of_trace, found.traces)
        cells = f"{100 * entry.score:.1f}", *("-" if share != share else f"{100 * share:.0f}" for share in shares)
        shown.add_row(policy_title(text, entry.oracle), *cells, style="bold green" if text == leader else None)
    return shown
