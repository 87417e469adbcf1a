"""The command `moe-sim tune`: which options of a policy serve a trace best, and their worth on other requests."""

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.table import Table

from policies.core.grammar import policy_title, value_text
from policies.core.spec import PolicySpec
from sim.commands import options
from sim.commands.printed import METRICS, milliseconds, progress, table
from sim.engines import compiling
from sim.experiment import Experiment
from sim.loaded import Loaded, TimedRun
from sim.results.compare import FEWEST
from sim.sweeps import report
from sim.sweeps.config import Sweep
from sim.tuning.journal import NAME, Journal
from sim.tuning.search_space import space_of
from sim.tuning.tune import BEST, MAKER, OVERHEAD, TRIALS, Halves, Result, Search, save
from sim.tuning.tune import tune as run
from traces.commands import console
from traces.errors import refuse
from traces.output import claimed

LEADERS = 5
"""Policies that the table shows beside the one as given."""


def tune(
    cell: options.CellOptions,
    stated: Annotated[
        options.Stated,
        options.some(
            *("hardware", "model_profile", "requests", "as_decode", "cold", "chunk_bytes", "untimed", "predictor_us")
        ),
    ],
    *,
    search: Annotated[
        str | None,
        typer.Option(help="Space, as in capacity=10..1000:cosine=flat|rows. Default: what the policy declares."),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, max=100_000, help="Sets of options to try.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
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
    options.require_clock(stated)
    experiment = options.experiment(stated, cell.trace)
    folder = output.folder(experiment.trace, "/tune")
    halves = Halves.of(experiment)
    spec, slots = cell.chosen(halves.first)
    space = space_of(spec, halves.first.shape, search)
    with claimed(folder, MAKER, [NAME, TRIALS, BEST]):
        journal = Journal(folder)
        experiment = _charging(experiment, halves.first, spec, journal, output)
        halves = Halves.of(experiment)
        loaded = halves.first
        processes = options.processes(journal.workers if workers is None else workers)
        wanted = Search(halves, spec, slots, space, trials, seed, processes)
        _refuse_another(journal, wanted, resume)
        cell.announce(loaded, spec, slots, stated, output)
        output.note(f"searching {wanted.words}; of {len(halves.second.trace.requests)} requests the first half tunes")
        if journal.trials:
            output.note(f"{len(journal.trials)} trials of before in {journal.path}")
        output.note(*report.untimed_note(loaded, [spec]))
        output.note(*compiling.notes(loaded.versions([spec])))
        try:
            with progress(wanted.requests(len(journal.trials)), output.quiet) as advance:
                found = run(wanted, journal, advance)
        except KeyboardInterrupt:
            ended = f"{len(journal.trials)} trials in {journal.path}"
            console.fail("moe-sim", f"interrupted with {ended}: continue with --resume", 130)
        save(found, wanted, folder)
        axes = (experiment.trace,), (found.best.policy,), (cell.size,), (experiment.hardware,)
        Sweep(experiment, *axes).write(folder / BEST)
    if found.overfit:
        console.warn(
            "on the second half the best is no better than the policy as given: it fits the first half, not the task; "
            "give it more requests or a smaller --search"
        )
    elif found.improved and halves.few(found.metric):
        console.warn(f"the gain may be chance: fewer than {FEWEST} requests of the second half show no difference")
    wrote = f"wrote {TRIALS}, {BEST} to {folder}"
    output.show(
        lambda: _as_json(found), lambda: (_title(wanted, found), _table(found, spec.oracle), *_notes(found), wrote)
    )


def _charging(
    experiment: Experiment, loaded: Loaded, policy: PolicySpec, journal: Journal, output: options.OutputOptions
) -> Experiment:
    """Return the experiment with what a policy of a user's own costs, as the journal has it or as measured now.

    Whatever its options: trials differ in nothing else.
    """
    before = {policy.text: float(journal.searched[OVERHEAD])} if journal.trials and journal.searched[OVERHEAD] else {}
    us = loaded.measured_us([policy], before)
    output.note(*report.overhead_notes(us))
    return replace(experiment, predictor_us=us[policy.text]) if us else experiment


def _refuse_another(journal: Journal, search: Search, resume: bool) -> None:
    """Raise InputError if the folder holds another search, or this one and --resume is not given."""
    held, wanted = journal.searched, search.searched()
    if not (trials := len(journal.trials)):
        return
    refuse(
        (not resume, f"{journal.path} holds {trials} trials: use --resume to continue, or another folder with --out"),
        *(
            (
                held.get(words) != value,
                f"{journal.path} holds a search with another {words}: name another folder with --out",
            )
            for words, value in wanted.items()
        ),
    )


def _title(search: Search, found: Result) -> str:
    first, second = search.halves.first, search.halves.second
    machine = f" on {first.hardware.title}" if isinstance(first, TimedRun) else ", untimed"
    tuned, judged = len(first.trace.requests), len(second.trace.requests) - len(first.trace.requests)
    refused = sum(trial.value is None for trial in found.trials)
    trials = f"{len(found.trials)} trials" + (f", {refused} refused" if refused else "")
    halves = f"tuned on {tuned} requests of {first.trace.name}, judged on the {judged} after them"
    return f"{first.model}{machine}: {first.experts_in(search.slots)} slots, {trials}; {halves}"


def _table(found: Result, oracle: bool) -> Table:
    metric = METRICS[found.metric]
    shown = table("options", *[f"{metric}, {half} half" for half in ("first", "second")], gap=1, fold=True)
    policy = policy_title(found.typed.policy, oracle)
    shown.add_row(f"{policy} as given", _figure(found.typed.first, found), _figure(found.typed.second, found))
    for trial in found.leaders(LEADERS):
        first = _figure(trial.value, found, found.typed.first)
        best = trial.policy == found.best.policy
        second = _figure(found.best.second, found, found.typed.second) if best else ""
        options = " ".join(f"{name}={value_text(value)}" for name, value in trial.options.items())
        shown.add_row(options, first, second, style="bold green" if best else None)
    return shown


def _figure(value: float | None, found: Result, typed: float | None = None) -> str:
    """A value of the metric, and what it is off that of the policy as given."""
    if value is None:
        return "-"
    shown = f"{value:,.0f}" if found.metric == "misses" else milliseconds(value)
    return f"{shown} {value / typed - 1:+6.1%}" if typed else f"{shown}       "


def _notes(found: Result) -> list[str]:
    if not found.improved:
        return ["no trial is better on the first half than the policy as given"]
    on_first, on_second = found.gains
    return [
        f"gain over the policy as given: {on_first:.1%} on the first half, on which it was found, "
        f"{on_second:.1%} on the second",
        f"--policies '{found.best.policy}'",
    ]


def _as_json(found: Result) -> dict[str, Any]:
    return {
        "metric": found.metric,
        "typed": asdict(found.typed),
        "best": asdict(found.best),
        "gain_first": found.gains[0],
        "gain_second": found.gains[1],
        "overfit": found.overfit,
        "trials": [asdict(trial) for trial in found.trials],
    }
