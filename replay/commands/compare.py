"""The command `moe-replay compare`: simulator and device on the same cells, their errors, and a verdict."""

import json
import math
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from policies.core.grammar import policy_title, split_list
from replay.choice import Choice, first_part
from replay.commands.device_options import Compared, Replayed, chosen
from replay.commands.shown import packed
from replay.comparison.cell import MODES
from replay.comparison.errors import in_words
from replay.comparison.record import ERROR, Record
from replay.comparison.sweep import MAKER, RECORD, TOKENS, Comparison
from sim import defaults
from sim.commands import options
from sim.loaded import TimedRun
from sim.loop.requests import Requests
from sim.results.metrics import Row, cell_text, size_text
from sim.sweeps.config import specs
from sim.sweeps.grid import grid_of
from terminal import console
from terminal.console import progress
from terminal.resuming import keeping, refuse_others, require_resume
from traces.errors import InputError, unknown
from traces.output import claimed


def compare(
    trace: options.Trace = None,
    policies: options.Policies = defaults.POLICIES,
    cache_sizes: options.CacheSizes = defaults.CACHE_SIZES,
    modes: Annotated[
        str, typer.Option(help="closed-loop: the policy decides on the device; lockstep: the simulator's decisions.")
    ] = ",".join(MODES),
    hardware: Annotated[
        str | None,
        typer.Option(
            help="TOML file of moe-replay calibrate (virtual: a profile). Default: the machine is measured first."
        ),
    ] = None,
    *,
    replayed: Replayed,
    on: Compared,
    max_error: Annotated[
        float | None, typer.Option(help="Fail if a TPOT mean is further off, in percent. Default: never.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Run each cell N times: the spread is the noise.")] = 1,
    output: options.ResumableOptions,
) -> None:
    """Run the same cells in the simulator and on a device, and report the difference.

    Writes compare.json (measured, predicted and errors of each cell, as it ends) and a CSV of each cell's tokens. An
    error is predicted / measured - 1. With --max-error, the command exits with status 1 if the error of a mean TPOT is
    larger. After an interruption, --resume continues.

    [b]moe-replay compare --hardware h200-calibrated.toml --max-error 3[/b]

    [b]moe-replay compare my-trace --policies lru,eamc,belady --cache-sizes 25% --modes lockstep --repeat 3[/b]
    """
    target = chosen(on, replayed)
    is_calibrated = hardware is not None and target.device != "virtual"
    loaded = TimedRun.of(options.experiment(replayed, trace, hardware=hardware))
    output.note(*loaded.notes)
    if is_calibrated and loaded.measured is None:  # rates of a datasheet describe no machine
        raise InputError(
            f"--hardware {loaded.experiment.hardware} holds nothing measured with {loaded.profile.name}: write it with "
            "moe-replay calibrate on this machine, or leave --hardware out"
        )
    if "requests" not in replayed:
        loaded = first_part(loaded, target.device)
    grid = grid_of(loaded, specs(split_list(policies), None), split_list(cache_sizes))
    first, slots = grid.requested()[0]
    choice = Choice(loaded, first, slots, target)
    folder = output.folder(loaded.experiment.trace, "-compare")
    chosen_modes = tuple(dict.fromkeys(split_list(modes) or [""]))
    for mode in chosen_modes:
        if mode not in MODES:
            raise unknown("mode", mode, MODES)
    comparison = Comparison(choice, grid, chosen_modes, is_calibrated, folder, repeat)
    with claimed(folder, MAKER, [RECORD, TOKENS]):
        record = Record.open(folder / RECORD, resume=not output.overwrite, otherwise="drop it with --overwrite")
        require_resume(len(record), folder, output.resume)
        cells = comparison.cells()
        refuse_others(sum(cell["key"] not in cells for cell in record), folder, "comparison")
        due = comparison.due(record)
        if len(record):
            output.note(f"resuming {folder}: {len(record)} cells done, {len(due)} to go")
        total = sum(len(request.tokens) for request in Requests(loaded.trace)) * len(due) * repeat
        with keeping("moe-replay", record, record.path), progress(total, output.quiet, "steps replayed") as advance:
            comparison.run(record, lambda row: advance(1), output.note)
        _report(comparison, record, max_error, output)


def _report(comparison: Comparison, record: Record, max_error: float | None, output: options.OutputOptions) -> None:
    cells = [record[key] for key in comparison.cells()]
    finished, failed = ([cell for cell in cells if (ERROR in cell) is wrong] for wrong in (False, True))
    wrote, last = options.written((RECORD, TOKENS), comparison.folder), [last_line(finished)] if finished else []
    output.show(lambda: json.loads(record.text()), lambda: (*_shown(record, finished, failed), wrote, *last))
    if failed:
        text = f"{len(failed)} of {len(cells)} cells failed, the first: {named(failed[0])}: {failed[0][ERROR]}"
        console.fail("moe-replay", text, 1)
    off = [cell for cell in finished if max_error is not None and not off_by(cell) * 100 <= max_error]
    if off:
        text = f"{len(off)} of {len(cells)} cells exceed --max-error {max_error:g}; {last_line(off)}"
        console.fail("moe-replay", text, 1)


def _shown(record: Record, finished: list[Row], failed: list[Row]) -> Iterator[str | Table]:
    facts = record.facts
    machine = facts["machine"] or f"a logical clock for {facts['hardware']['name']}"
    yield f"{facts['device']} ({machine}), predicted for {facts['hardware']['name']}"
    if facts.get("computed_in") and finished:
        first = finished[0]
        yield packed(facts["computed_in"], first.get("layer_expert_bytes", [first["expert_bytes"]]))
    for mode in dict.fromkeys(cell["mode"] for cell in finished):
        yield table([cell for cell in finished if cell["mode"] == mode], facts["ceiling_gb_per_s"])
    yield from (f"failed: {named(cell)}: {cell[ERROR]}" for cell in failed)
    yield from map(ranking_line, facts.get("rankings") or [])
    if accuracy := facts.get("accuracy"):
        yield in_words(accuracy)


def table(cells: list[Row], ceiling_gb_per_s: float | None) -> Table:
    """Return a line for each cell of one mode; errors are predicted / measured - 1."""
    headings = ["cache", "predicted\n(ms)", "measured\n(ms)", "error", "p99\nerror", "MAPE", "steps\ndiffer", "GB/s"]
    shown = console.table("policy", *headings, *(["of the\nlink"] if ceiling_gb_per_s else []), gap=1, fold=True)
    shown.title, shown.title_justify = cells[0]["mode"], "left"
    for cell in cells:
        off, rate = cell["errors"], cell["measured"]["copy_gb_per_s"]
        of_ceiling = (f"{rate / ceiling_gb_per_s:.0%}" if rate else "-",) if ceiling_gb_per_s else ()
        noise = "" if cell["noise"] is None else f"\n({cell['noise']:.1%} apart)"
        shown.add_row(
            policy_title(cell["policy"], cell["oracle"]),
            size_text(cell),
            f"{cell['predicted']['tpot_mean_ms']:,.4g}",
            f"{cell['measured']['tpot_mean_ms']:,.4g}{noise}",
            _percent(off["tpot_mean"]),
            _percent(off["tpot_p99"]),
            f"{off['token_mape']:.1%}" if off["token_mape"] is not None else "-",
            f"{cell['divergence']['steps']:.1%}",
            f"{rate:,.2f}" if rate else "-",
            *of_ceiling,
        )
    return shown


def ranking_line(ranking: Row) -> str:
    correlation = "all equal" if ranking["spearman"] is None else f"rank correlation {ranking['spearman']:.2f}"
    pairs = f"{ranking['pairs_as_measured']} of {ranking['pairs_that_differ']} pairs"
    noise = "" if ranking["noise"] is None else f" by more than {ranking['noise']:.1%}"
    where = f"{size_text(ranking)}, {ranking['mode']}"
    if not ranking["pairs_that_differ"]:
        return f"{where}: no two of {ranking['policies']} policies differ{noise}"
    return f"{where}: {correlation} over {ranking['policies']} policies; {pairs} that differ{noise} are in order"


def last_line(cells: list[Row]) -> str:
    worst = max(cells, key=off_by)
    predicted, measured = (worst[side]["tpot_mean_ms"] for side in ("predicted", "measured"))
    return (
        f"worst: {named(worst)}: TPOT mean predicted {predicted:.4g} ms, measured {measured:.4g} ms "
        f"({_percent(worst['errors']['tpot_mean'])})"
    )


def off_by(cell: Row) -> float:
    """Return the error of a cell's TPOT mean, unsigned; JSON has no infinity."""
    error = cell["errors"]["tpot_mean"]
    return math.inf if error is None else abs(error)


def named(cell: Row) -> str:
    return f"{cell_text(cell)}, {cell['mode']}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"
