"""The command `moe-sim adapt`: how many requests a policy needs to get used to another task."""

from typing import Annotated

import typer
from rich.table import Table

from policies.core.grammar import policy_title, split_list
from sim import defaults
from sim.analysis.adaptation import INTERRUPTED, MAKER, NAMES, Adaptation, Protocol, plan, save, to_run
from sim.analysis.adaptation import adapt as measure
from sim.commands import options
from sim.commands.printed import progress, table, written
from sim.experiment import SIZES
from sim.loaded import load
from sim.results.metrics import Row
from sim.sweeps import report
from sim.sweeps.config import specs
from sim.sweeps.grid import grid_of
from traces.commands import console
from traces.errors import InputError
from traces.output import claimed

MODELS = ("NLLB", "Mixtral", "Arctic")

PAPER = {
    "within": {
        "within MMLU": ("0-14-43", "0-9-49", "28-43-45"),
        "within BIG-bench": ("1-15-49", "0-11-49", "0-29-42"),
    },
    "across": {
        "MMLU to BIG-bench": ("0-6-17", "0-27-42", "2-28-41"),
        "BIG-bench to MMLU": ("3-11-24", "0-35-46", "5-27-45"),
    },
}
"""Requests needed, min-mean-max, as MoE-Infinity (arXiv 2401.14361) prints them, by kind of shift and of MODELS."""


def adapt(
    trace: options.Trace = None,
    policies: options.Policies = defaults.POLICIES,
    scope: options.Scope = None,
    by: Annotated[str, typer.Option(help="Label whose values are the groups: dataset or task.")] = "dataset",
    cache_size: Annotated[str, typer.Option(help=f"Cache size: {SIZES}.")] = defaults.CACHE_SIZE,
    warmup: Annotated[int, typer.Option(help="Requests of one group before the shift.")] = 50,
    after: Annotated[int, typer.Option(help="Requests of another group after the shift.")] = 50,
    window: Annotated[int, typer.Option(help="Requests over which the difference is averaged.")] = 5,
    pairs: Annotated[int, typer.Option(help="Shifts of each kind, at most; the seed draws them.")] = 6,
    seed: Annotated[int, typer.Option(help="Seed of the pairs and of the order within a group.")] = 0,
    *,
    stated: Annotated[options.Stated, options.some("model_profile", "requests", "as_decode")],
    workers: options.Workers = None,
    output: options.ResultOptions,
) -> None:
    """Count the requests that a policy needs after a task shift until its hit rate recovers, untimed.

    Recovered means: within one point of the same requests without the shift. Writes adaptation.parquet (a row per shift
    and policy) and adaptation.png. Ctrl-C keeps what is finished, in a folder of its own.

    [b]moe-sim adapt my-trace --by task --warmup 10 --after 20[/b]
    """
    protocol = Protocol(by, warmup, after, window, pairs, seed)
    loaded = load(options.experiment(stated, trace, untimed=True, seed=seed))
    grid = grid_of(loaded, specs(split_list(policies), scope), split_list(cache_size))
    if len(grid.sizes) > 1:
        raise InputError(f"--cache-size {cache_size}: one size at a time")
    planned = plan(loaded.whole, protocol)
    folder = output.folder(loaded.experiment.trace, "/adaptation")
    for warning in report.warnings(loaded, grid):
        options.warn(warning)
    total = to_run(grid, planned)
    shifts, runs, names = len(planned.shifts), len(planned.runs), ", ".join(spec.text for spec in grid.policies)
    output.note(f"{shifts} shifts by {by}: {runs} runs each under {names}; {total:,} requests to run")
    output.note(*report.untimed_note(loaded, grid.policies))
    with claimed(folder, MAKER, [*NAMES, INTERRUPTED]):
        with progress(total, output.quiet) as advance:
            found = measure(loaded, grid, planned, options.processes(workers), advance)
        if not found.complete:
            kept = f"kept in {save(found, loaded, folder)[0].parent}" if found.rows else "nothing to keep"
            console.fail("moe-sim", f"interrupted with {len(found.rows)} shifts measured: {kept}", 130)
        files = save(found, loaded, folder)
    paper = {"models": MODELS, "requests_needed_min_mean_max": PAPER}
    output.show(
        lambda: {"summaries": found.summaries(), "shifts": found.rows, "paper": paper},
        lambda: (_table(found), *_notes(found), written(files, folder)),
    )


def _table(found: Adaptation) -> Table:
    shown = table("", "policy", "shifts", "requests needed", "at once", "first request", "settled", left=2)
    summaries = found.summaries()
    for one, following in zip(summaries, [*summaries[1:], None], strict=True):
        rates = ((one[f"hit_rate_{when}"], one[f"undisturbed_{when}"]) for when in ("first", "settled"))
        cells = [f"{rate:.1%} ({100 * (rate - undisturbed):+.1f})" for rate, undisturbed in rates]
        last = following is None or following["kind"] != one["kind"]
        figures = (f"{one['shifts']}", _needed(one), f"{one['needed_none']:.0%}", *cells)
        shown.add_row(one["kind"], policy_title(one["policy"], one["oracle"]), *figures, end_section=last)
    return shown


def _needed(one: Row) -> str:
    """Min, mean, max; >N for what was not back after N requests, and then the mean is a lower bound."""
    least, most = (f">{one['last']}" if one[end] is None else f"{one[end]}" for end in ("needed_min", "needed_max"))
    return f"{least} / {'>=' if one['censored'] else ''}{one['needed_mean']:.1f} / {most}"


def _notes(found: Adaptation) -> list[str]:
    window = found.plan.protocol.window
    lines = [
        f"requests needed, min / mean / max: until the hit rate of the next {window} is on average within one point of "
        "what the same requests have in a run without the shift; at once: shifts that needed none",
        f"in brackets, points off that run: the first request after the shift, and the last {window} of them",
    ]
    if censored := sum(row["requests_needed"] is None for row in found.rows):
        lines.append(f"{censored} of {len(found.rows)} were not back when the requests ended")
    for kind in dict.fromkeys(row["kind"] for row in found.rows):
        rows = "; ".join(f"{name} {', '.join(figures)}" for name, figures in PAPER[kind].items())
        lines.append(f"the paper's, {kind} datasets ({', '.join(MODELS)}; its EAMC, its own definition): {rows}")
    return lines
