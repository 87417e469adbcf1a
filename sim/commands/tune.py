"""The command `moe-sim tune`: which options of a policy serve a trace best, and their worth on other requests."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.commands import options
from sim.commands.printed import METRICS, milliseconds, progress, table
from traces.commands import console
from traces.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from sim.sweeps.config import Config
    from sim.sweeps.setup import Setup
    from sim.tuning.journal import Journal
    from sim.tuning.tune import Found, Search

LEADERS = 5
"""Policies that the table shows beside the one as given."""


@options.expanded
def tune(
    cell: options.CellOptions,
    timed: options.TimedOptions,
    *,
    search: Annotated[
        str | None,
        typer.Option(help="Space, as in capacity=10..1000:cosine=flat|rows. Default: what the policy declares."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Sets of options to try.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    untimed: options.Untimed = False,
    predictor_us: options.PredictorUs = None,
    workers: options.Workers = None,
    resume: options.Resume = False,
    output: options.ResultOptions,
) -> None:
    """Search a policy's options on one half of the requests, and evaluate them on the other half.

    Options that --policy gives stay as they are. Writes trials.parquet (a row per trial) and best.toml, which moe-sim
    sweep --config runs. The same --seed and --workers give the same search. Finished trials are kept in trials.log, and
    --resume continues from there.

    [b]moe-sim tune my-trace --policy eamc --search 'capacity=10..1000:matches=1..5:cosine=flat|rows'[/b]

    [b]moe-sim tune my-trace --policy lru+markov --cache-size 10% --trials 100[/b]
    """
    from policies.core.policy import Shape
    from sim.engines import compiling
    from sim.results.compare import FEWEST
    from sim.sweeps import report
    from sim.tuning.journal import NAME, Journal
    from sim.tuning.search_space import space_of
    from sim.tuning.tune import BEST, MAKER, TRIALS, Halves, Search, save
    from sim.tuning.tune import tune as run
    from traces.output import claimed

    options.require_clock(untimed, cell.hardware)
    setup = options.setup_of(cell, timed, untimed=untimed, predictor_us=predictor_us)
    folder = output.folder(setup.trace, "/tune")
    halves = Halves.of(setup)
    loaded = halves.first
    spec, slots = cell.chosen(loaded)
    space = space_of(spec, Shape(loaded.trace.layers, loaded.trace.num_experts), search)
    with claimed(folder, MAKER, [NAME, TRIALS, BEST]):
        journal = Journal(folder)
        processes = options.processes(journal.workers if workers is None else workers)
        asked = Search(halves, spec, slots, space, trials, seed, processes)
        _refuse_another(journal, asked, resume)
        cell.announce(loaded, spec, slots, output)
        output.note(f"searching {asked.words}; of {len(halves.second.trace.requests)} requests the first half tunes")
        if journal.trials:
            output.note(f"{len(journal.trials)} trials of before in {journal.path}")
        output.note(*report.untimed_note(loaded, [spec]))
        compiling.start_if_needed(loaded.versions([spec]), output.quiet)
        try:
            with progress(asked.requests(len(journal.trials)), output.quiet) as advance:
                found = run(asked, journal, advance)
        except KeyboardInterrupt:
            ended = f"{len(journal.trials)} trials in {journal.path}"
            console.fail("moe-sim", f"interrupted with {ended}: continue with --resume", 130)
        save(found, asked, folder)
        _config(setup, found.best.policy, cell.size).write(folder / BEST)
    if found.overfit:
        console.warn(
            "on the second half the best is no better than the policy as given: it fits the first half, not the task; "
            "give it more requests or a smaller --search"
        )
    elif found.improved and halves.few(found.metric):
        console.warn(f"the gain may be chance: fewer than {FEWEST} requests of the second half show no difference")
    wrote = f"wrote {TRIALS}, {BEST} to {folder}"
    output.show(lambda: _as_json(found), lambda: (_title(asked, found), _table(found), *_notes(found), wrote))
    compiling.finish(output.quiet)


def _refuse_another(journal: "Journal", search: "Search", resume: bool) -> None:
    """Raise InputError if the folder holds another search, or this one and --resume is not given."""
    held, asked = journal.searched, search.searched()
    if not journal.trials:
        return
    if not resume:
        raise InputError(
            f"{journal.path} holds {len(journal.trials)} trials: use --resume to continue, or another folder with --out"
        )
    if other := [words for words in asked if held.get(words) != asked[words]]:
        raise InputError(f"{journal.path} holds a search with another {other[0]}: name another folder with --out")


def _config(setup: "Setup", policy: str, size: str) -> "Config":
    """A sweep of the same requests."""
    from sim.sweeps.config import Config

    stated = {name: value for name, value in asdict(setup).items() if value is not None}
    shared = {name: value for name, value in stated.items() if name not in ("trace", "hardware", "seed")}
    return Config((setup.trace,), (policy,), (size,), (setup.hardware,), **shared).resolved()


def _title(search: "Search", found: "Found") -> str:
    first, second = search.halves.first, search.halves.second
    machine = f" on {first.hardware.title}" if first.hardware else ", untimed"
    model = first.profile.name if first.profile else first.trace.meta.model
    tuned, judged = len(first.trace.requests), len(second.trace.requests) - len(first.trace.requests)
    refused = sum(trial.value is None for trial in found.trials)
    trials = f"{len(found.trials)} trials" + (f", {refused} refused" if refused else "")
    halves = f"tuned on {tuned} requests of {first.trace.name}, judged on the {judged} after them"
    return f"{model}{machine}: {first.experts_in(search.slots)} slots, {trials}; {halves}"


def _table(found: "Found") -> "Table":
    """The policy as given, and the best on the first half; of these the first alone was run on the second."""
    from policies.core.grammar import policy_title, value_text
    from policies.core.spec import parse

    metric = METRICS[found.metric]
    shown = table("options", *[f"{metric}, {half} half" for half in ("first", "second")], gap=1, fold=True)
    policy = policy_title(found.typed.policy, parse(found.typed.policy).oracle)
    shown.add_row(f"{policy} as given", _figure(found.typed.first, found), _figure(found.typed.second, found))
    for trial in found.leaders(LEADERS):
        first = _figure(trial.value, found, found.typed.first)
        best = trial.policy == found.best.policy
        second = _figure(found.best.second, found, found.typed.second) if best else ""
        options = " ".join(f"{name}={value_text(value)}" for name, value in trial.options.items())
        shown.add_row(options, first, second, style="bold green" if best else None)
    return shown


def _figure(value: float | None, found: "Found", typed: float | None = None) -> str:
    """A value of the metric, and what it is off that of the policy as given."""
    if value is None:
        return "-"
    shown = f"{value:,.0f}" if found.metric == "misses" else milliseconds(value)
    return f"{shown} {value / typed - 1:+6.1%}" if typed else f"{shown}       "


def _notes(found: "Found") -> list[str]:
    if not found.improved:
        return ["no trial is better on the first half than the policy as given"]
    on_first, on_second = found.gains
    return [
        f"gain over the policy as given: {on_first:.1%} on the first half, on which it was found, "
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
