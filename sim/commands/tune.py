"""The command `moe-sim tune`: which options of a policy serve a trace best, and their worth on other requests."""

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.commands import cell_flags
from sim.commands.sensitivity import METRICS, milliseconds, say_what_was_taken
from traces import console
from traces.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from sim.sweep.config import Config
    from sim.sweep.setup import Setup
    from sim.tuning.journal import Journal
    from sim.tuning.tune import Found, Search

LEADERS = 5
"""Policies that the table shows beside the one as typed."""


def tune(
    trace: cell_flags.Trace = None,
    policy: Annotated[
        str | None,
        typer.Option(help=f"A name or FILE.py:CLASS; stated options stay; else {cell_flags.POLICY}."),
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(help="capacity=10..1000:matches=1..5:cosine=flat|rows; else what the policy declares."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Sets of options to try.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    cache_size: cell_flags.CacheSize = None,
    hardware: cell_flags.Hardware = None,
    model_profile: cell_flags.ModelProfile = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; else results/NAME/tune.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the search that --out holds.")] = False,
    requests: Annotated[int | None, typer.Option(help="Only the first N requests, halved.")] = None,
    as_decode: cell_flags.AsDecode = False,
    cold: cell_flags.Cold = False,
    untimed: Annotated[bool, typer.Option("--untimed", help="Search for the fewest misses, exact; no times.")] = False,
    chunk_bytes: cell_flags.ChunkBytes = None,
    predictor_us: cell_flags.PredictorUs = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Trials at a time, drawn together; else one for each core.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, not as a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Search a policy's options on the first half of the requests, and say what they gain on the other half.

    Writes trials.parquet (a row per trial) and best.toml, which moe-sim sweep --config plays. The same --seed and
    --workers give the same search; trials are kept in trials.log as they end, and --resume goes on from there.

    [b]moe-sim tune my-trace --policy eamc --search 'capacity=10..1000:matches=1..5:cosine=flat|rows'[/b]

    [b]moe-sim tune my-trace --policy lru+markov --cache-size 10% --trials 100[/b]
    """
    from policies.core.policy import Shape
    from policies.core.spec import parse
    from sim.engines import compiling
    from sim.results.files import writable
    from sim.sweep import report
    from sim.sweep.grid import Grid
    from sim.tuning.journal import Journal
    from sim.tuning.search_space import space_of
    from sim.tuning.tune import BEST, TRIALS, Halves, Search, save
    from sim.tuning.tune import tune as run
    from traces.location import name_of

    setup = cell_flags.setup_of(
        trace,
        hardware,
        chunk_bytes,
        model_profile=model_profile,
        requests=requests,
        as_decode=as_decode,
        cold=cold,
        untimed=untimed,
        predictor_us=predictor_us,
    )
    folder = out or Path("results") / name_of(setup.trace) / "tune"
    journal = Journal(folder)
    spec, size = parse(policy or cell_flags.POLICY), cache_size or cell_flags.CACHE_SIZE
    halves = Halves.of(setup)
    loaded = halves.first
    slots = loaded.slots(size)
    loaded.require(spec, slots)
    space = space_of(spec, Shape(loaded.trace.layers, loaded.trace.num_experts), search)
    asked = Search(halves, spec, slots, space, trials, seed, workers or journal.workers or os.cpu_count() or 1)
    _refuse_another(journal, asked, resume)
    writable(folder, [TRIALS, BEST])
    if not quiet:
        say_what_was_taken(trace, policy, cache_size, "none" if untimed else hardware)
        console.note(f"searching {asked.words}; of {len(halves.second.trace.requests)} requests the first half tunes")
        if journal.trials:
            console.note(f"{len(journal.trials)} trials of before in {journal.path}")
    for warning in report.warnings(loaded, Grid((spec,), {size: slots})):
        console.warn(warning)
    if untimed and spec.prefetches and not quiet:
        console.note(f"untimed nothing is fetched early: of {spec.text} the retention alone counts")
    compiling.start_if_needed([loaded.compiled(spec)], quiet)
    try:
        with report.progress(asked.requests(len(journal.trials)), quiet) as advance:
            found = run(asked, journal, advance)
    except KeyboardInterrupt:
        ended = f"{len(journal.trials)} trials in {journal.path}"
        console.fail("moe-sim", f"interrupted with {ended}: go on with --resume", 130)
    save(found, asked, folder)
    _config(setup, found.best.policy, size).write(folder / BEST)
    if found.overfit:
        console.warn(
            "on the second half the best is no better than the policy as typed: it fits the first half, not the task; "
            "give it more requests or a smaller --search"
        )
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=1))
    elif not quiet:
        console.out.print(_title(asked, found), markup=False, soft_wrap=True)
        console.out.print(_table(found))
        for line in _notes(found):
            console.out.print(line, markup=False, soft_wrap=True)
        console.out.print(f"wrote {TRIALS}, {BEST} to {folder}", markup=False, soft_wrap=True)
    compiling.finish(quiet)


def _refuse_another(journal: "Journal", search: "Search", resume: bool) -> None:
    """InputError where the folder holds a search that this one would mix with, or that nobody asked to go on with."""
    held, asked = journal.searched, search.searched()
    if not journal.trials:
        return
    if not resume:
        raise InputError(
            f"{journal.path} holds {len(journal.trials)} trials: go on with --resume, or name another folder with --out"
        )
    if other := [words for words in asked if held.get(words) != asked[words]]:
        raise InputError(f"{journal.path} holds a search with another {other[0]}: name another folder with --out")


def _config(setup: "Setup", policy: str, size: str) -> "Config":
    """A sweep of the same requests."""
    from sim.sweep.config import Config

    return Config(
        traces=(setup.trace,),
        policies=(policy,),
        cache_sizes=(size,),
        hardware=(setup.hardware,),
        model_profile=setup.model_profile,
        requests=setup.requests,
        as_decode=setup.as_decode,
        cold=setup.cold,
        untimed=setup.untimed,
        chunk_bytes=setup.chunk_bytes,
        predictor_us=setup.predictor_us,
    ).resolved()


def _title(search: "Search", found: "Found") -> str:
    first, second = search.halves.first, search.halves.second
    machine = f" on {first.hardware.title}" if first.hardware else ", untimed"
    model = first.profile.name if first.profile else first.trace.meta.model
    tuned, judged = len(first.trace.requests), len(second.trace.requests) - len(first.trace.requests)
    refused = sum(trial.value is None for trial in found.trials)
    trials = f"{len(found.trials)} trials" + (f", {refused} refused" if refused else "")
    halves = f"tuned on {tuned} requests of {first.trace.name}, judged on the {judged} after them"
    return f"{model}{machine}: {search.slots} slots, {trials}; {halves}"


def _table(found: "Found") -> "Table":
    """The policy as typed, and the best on the first half; of these the first alone was played on the second."""
    from rich import box
    from rich.table import Column, Table

    from policies.core.grammar import value_text

    metric = METRICS[found.metric]
    table = Table(Column("options", overflow="fold"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for half in ("first", "second"):
        table.add_column(f"{metric}, {half} half", justify="right", no_wrap=True)
    table.add_row(
        f"{found.typed.policy} as typed", _figure(found.typed.first, found), _figure(found.typed.second, found)
    )
    for trial in found.leaders(LEADERS):
        first = _figure(trial.value, found, found.typed.first)
        best = trial.policy == found.best.policy
        second = _figure(found.best.second, found, found.typed.second) if best else ""
        options = " ".join(f"{name}={value_text(value)}" for name, value in trial.options.items())
        table.add_row(options, first, second, style="bold green" if best else None)
    return table


def _figure(value: float | None, found: "Found", typed: float | None = None) -> str:
    """A value of the metric, and what it is off that of the policy as typed."""
    if value is None:
        return "-"
    shown = f"{value:,.0f}" if found.metric == "misses" else milliseconds(value)
    return f"{shown} {value / typed - 1:+6.1%}" if typed else f"{shown}       "


def _notes(found: "Found") -> list[str]:
    if not found.improved:
        return ["no trial is better on the first half than the policy as typed"]
    on_first, on_second = found.gains
    return [
        f"gain over the policy as typed: {on_first:.1%} on the first half, on which it was found, "
        f"{on_second:.1%} on the second",
        f"--policies '{found.best.policy}'",
    ]


def _as_json(found: "Found") -> dict[str, Any]:
    return {
        "metric": found.metric,
        "typed": asdict(found.typed),
        "best": asdict(found.best),
        "gain_first": found.gains[0],
        "gain_second": found.gains[1],
        "overfit": found.overfit,
        "trials": [asdict(trial) for trial in found.trials],
    }
