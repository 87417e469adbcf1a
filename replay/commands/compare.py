"""The command `moe-replay compare`: simulator and device on the same cells, their errors, and a verdict."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table

from traces import console, demo_trace
from traces.errors import InputError

if TYPE_CHECKING:
    from replay.comparison.record import Record
    from replay.comparison.sweep import Comparison
    from sim.results.metrics import Row
    from sim.sweep.setup import Loaded

POLICIES = "lru,eamc,eamc-blend"
CACHE_SIZES = "10%,25%,50%"
MODES = "closed-loop,lockstep"


def compare(
    trace: Annotated[str | None, typer.Argument(help="Folder or URL of a trace; the shipped one if left out.")] = None,
    policies: Annotated[str, typer.Option(help="As moe-sim names them; belady in lockstep is the floor.")] = POLICIES,
    cache_sizes: Annotated[str, typer.Option(help="Shares (25%), experts (64) or bytes (8GiB).")] = CACHE_SIZES,
    modes: Annotated[
        str, typer.Option(help="closed-loop: the policy decides on the device; lockstep: the simulator's decisions.")
    ] = MODES,
    device: Annotated[str, typer.Option(help="auto (cuda, else cpu), virtual, cpu or cuda.")] = "auto",
    hardware: Annotated[
        str | None,
        typer.Option(
            help="TOML file of moe-replay calibrate; else the machine is measured before. virtual: a profile."
        ),
    ] = None,
    model_profile: Annotated[
        str | None, typer.Option(help="Profile or TOML file with the shapes; else by the trace's model.")
    ] = None,
    max_error: Annotated[
        float | None, typer.Option(help="Percent: fail where a TPOT mean is further off; else nothing fails.")
    ] = None,
    repeat: Annotated[int, typer.Option(help="Play each cell N times: the spread is the noise.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; else results/NAME-compare.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: play no cell again that --out holds.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop the cells that --out holds.")] = False,
    requests: Annotated[int | None, typer.Option(help="Only the first N; else about 1,000 steps of them.")] = None,
    warmup_requests: Annotated[int, typer.Option(help="The first N are played, but not counted.")] = 0,
    as_decode: Annotated[bool, typer.Option("--as-decode", help="Play a prefill token by token.")] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Empty the cache between requests.")] = False,
    chunk_bytes: Annotated[
        str | None, typer.Option(help="A prefetch may be interrupted after each (4MiB); else never.")
    ] = None,
    host_dedup: Annotated[
        int | None, typer.Option(help="Share N host buffers between all experts, where memory is short.")
    ] = None,
    pin: Annotated[str, typer.Option(help="require, or best-effort: go on with slower copies where it is refused.")] = (
        "require"
    ),
    dense: Annotated[str, typer.Option(help="real, or none: the experts alone.")] = "real",
    weights: Annotated[
        Path | None, typer.Option(help="Folder of a safetensors checkpoint; else random weights of its shapes.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON, not as a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Play the same cells in the simulator and on a device, and tell how far they lie apart.

    Writes compare.json (every cell with what was measured, what was predicted, and the errors, as they end), a CSV of
    each cell's tokens, and residuals.png. Errors are predicted / measured - 1. With --max-error the command ends with
    status 1 where a TPOT mean is further off. Whatever ends it early, --resume goes on.

    [b]moe-replay compare --hardware h200-calibrated.toml --max-error 3[/b]

    [b]moe-replay compare my-trace --policies lru,eamc,belady --cache-sizes 25% --modes lockstep --repeat 3[/b]
    """
    from policies.core.grammar import split_list
    from replay.comparison.record import Record
    from replay.comparison.sweep import RECORD, Comparison
    from replay.run import DEFAULT_STEPS, Choice, choose_device, first_steps
    from sim.quantities import parse_bytes
    from sim.sweep.grid import grid_of
    from sim.sweep.setup import Setup
    from sim.sweep.store import only_one
    from traces.location import name_of

    _check(max_error, repeat)
    if resume and overwrite:
        raise InputError("--resume keeps finished cells and --overwrite drops them: leave one out")
    chosen = choose_device(device)
    is_calibrated = hardware is not None and chosen != "virtual"
    setup = Setup(
        trace=trace or str(demo_trace()),
        hardware=hardware or Setup.hardware,
        model_profile=model_profile,
        requests=requests,
        warmup_requests=warmup_requests,
        as_decode=as_decode,
        cold=cold,
        seed=seed,
        chunk_bytes=None if chunk_bytes is None else parse_bytes(chunk_bytes, "--chunk-bytes"),
    )
    loaded = setup.load()
    if is_calibrated:
        _require_calibrated(loaded)
    if requests is None and chosen != "virtual":
        loaded = first_steps(loaded, DEFAULT_STEPS)
    grid = grid_of(loaded, list(dict.fromkeys(split_list(policies))), split_list(cache_sizes))
    first, slots = grid.asked()[0]
    choice = Choice(loaded, first, slots, chosen, host_dedup, dense=dense, weights=weights, pin=pin)
    folder = out or Path("results") / f"{name_of(setup.trace)}-compare"
    comparison = Comparison(choice, grid, _modes(split_list(modes)), is_calibrated, folder, repeat)
    with only_one(folder):
        record = Record.open(folder / RECORD, resume=not overwrite, otherwise="drop it with --overwrite")
        if len(record) and not resume:
            raise InputError(
                f"{folder} holds {len(record)} finished cells: go on with --resume, drop them with --overwrite, "
                "or name another folder with --out"
            )
        _require_ours(comparison, record)
        _play(comparison, record, quiet)
        _report(comparison, record, max_error, as_json, quiet)


def _check(max_error: float | None, repeat: int) -> None:
    if max_error is not None and not 0 <= max_error < math.inf:
        raise InputError(f"--max-error {max_error}: must be a percentage, at least 0")
    if repeat < 1:
        raise InputError(f"--repeat {repeat}: a cell is played at least once")


def _modes(names: tuple[str, ...]) -> tuple[str, ...]:
    from replay.comparison.cell import check_mode

    if not names:
        raise InputError(f"--modes names none: write {MODES}")
    for name in names:
        check_mode(name)
    return tuple(dict.fromkeys(names))


def _require_calibrated(loaded: "Loaded") -> None:
    """A datasheet's rates describe no machine: InputError."""
    assert loaded.profile
    if loaded.measured is None:
        raise InputError(
            f"--hardware {loaded.setup.hardware} holds nothing measured with {loaded.profile.name}: write it with "
            "moe-replay calibrate on this machine, or leave --hardware out"
        )


def _require_ours(comparison: "Comparison", record: "Record") -> None:
    """Cells of other options would stand beside these in one file: InputError."""
    cells = comparison.cells()
    if others := [cell for cell in record if cell["key"] not in cells]:
        raise InputError(
            f"{comparison.folder} holds {len(others)} cells that this comparison does not have (other options, files "
            "or code): drop all with --overwrite, or name another folder with --out"
        )


def _play(comparison: "Comparison", record: "Record", quiet: bool) -> None:
    from replay import report
    from sim.sweep.setup import Requests

    due = comparison.due(record)
    if len(record) and not quiet:
        console.note(f"{len(record)} cells of before in {comparison.folder}: {len(due)} are left to play")
    steps = sum(len(request.tokens) for request in Requests(comparison.choice.loaded.trace))
    try:
        with report.progress(steps * len(due) * comparison.repeat, quiet) as advance:
            comparison.run(record, lambda row: advance(), (lambda text: None) if quiet else console.note)
    except KeyboardInterrupt:
        console.fail("moe-replay", f"interrupted{_kept(record)}", 130)
    except InputError as error:
        raise InputError(f"{error}{_kept(record)}") from error


def _kept(record: "Record") -> str:
    return f" ({len(record)} finished cells are kept in {record.path}: go on with --resume)" if len(record) else ""


def _report(comparison: "Comparison", record: "Record", max_error: float | None, as_json: bool, quiet: bool) -> None:
    from replay.comparison.record import ERROR
    from replay.comparison.sweep import TOKENS

    asked = [record[key] for key in comparison.cells()]
    finished, failed = ([cell for cell in asked if (ERROR in cell) is wrong] for wrong in (False, True))
    drawn = _draw(finished, comparison.folder, quiet)
    if as_json:
        typer.echo(record.text())
    elif not quiet:
        _tell(record, finished, failed)
        written = ", ".join([record.path.name, *([f"{TOKENS}/"] if finished else []), *drawn])
        console.out.print(f"wrote {written} to {comparison.folder}", soft_wrap=True, markup=False)
        if finished:
            console.out.print(last_line(finished), soft_wrap=True, markup=False)
    if failed:
        text = f"{len(failed)} of {len(asked)} cells failed, the first: {named(failed[0])}: {failed[0][ERROR]}"
        console.fail("moe-replay", text, 1)
    off = [cell for cell in finished if max_error is not None and off_by(cell) * 100 > max_error]
    if off:
        text = f"{len(off)} of {len(asked)} cells exceed --max-error {max_error:g}; {last_line(off)}"
        console.fail("moe-replay", text, 1)


def _draw(cells: "list[Row]", folder: Path, quiet: bool) -> list[str]:
    from replay.comparison import plot as plot_compare

    if not cells:
        return []
    try:
        path, missing = plot_compare.draw(cells, folder)
        for cell in missing:
            console.warn(f"{named(cell)}: {cell.get('per_token')} is gone or damaged: it is not in {plot_compare.NAME}")
        return [path.name] if path else []
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
    if not quiet:
        console.note(f"no {plot_compare.NAME}: matplotlib is not installed")
    return []


def _tell(record: "Record", finished: "list[Row]", failed: "list[Row]") -> None:
    from replay.comparison.record import ERROR

    facts = record.facts
    machine = facts["machine"] or f"a logical clock for {facts['hardware']['name']}"
    console.out.print(f"{facts['device']} ({machine}), predicted for {facts['hardware']['name']}", markup=False)
    if finished:
        for mode in dict.fromkeys(cell["mode"] for cell in finished):
            console.out.print(table([cell for cell in finished if cell["mode"] == mode], facts["ceiling_gb_per_s"]))
    for cell in failed:
        console.out.print(f"failed: {named(cell)}: {cell[ERROR]}", soft_wrap=True, markup=False)
    for ranking in facts.get("rankings") or []:
        console.out.print(ranking_line(ranking), soft_wrap=True, markup=False)


def table(cells: "list[Row]", ceiling_gb_per_s: float | None) -> Table:
    """A line for each cell of one mode; errors are predicted / measured - 1."""
    shown = Table(title=cells[0]["mode"], title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    shown.add_column("policy", overflow="fold", min_width=10)
    headings = ["cache", "predicted\n(ms)", "measured\n(ms)", "error", "p99\nerror", "MAPE", "steps\ndiffer", "GB/s"]
    headings += ["of the\nlink"] if ceiling_gb_per_s else []
    for heading in headings:
        shown.add_column(heading, justify="right", no_wrap=True)
    for cell in cells:
        off, rate = cell["errors"], cell["measured"]["copy_gb_per_s"]
        of_ceiling = (f"{rate / ceiling_gb_per_s:.0%}" if rate else "-",) if ceiling_gb_per_s else ()
        noise = "" if cell["noise"] is None else f"\n({cell['noise']:.1%} apart)"
        shown.add_row(
            cell["policy"],
            f"{cell['cache_fraction']:.1%}",
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


def ranking_line(ranking: "Row") -> str:
    """How the policies of one size and mode are ordered."""
    correlation = "all equal" if ranking["spearman"] is None else f"rank correlation {ranking['spearman']:.2f}"
    pairs = f"{ranking['pairs_as_measured']} of {ranking['pairs_that_differ']} pairs"
    noise = "" if ranking["noise"] is None else f" by more than {ranking['noise']:.1%}"
    where = f"{ranking['cache_fraction']:.1%}, {ranking['mode']}"
    if not ranking["pairs_that_differ"]:
        return f"{where}: no two of {ranking['policies']} policies differ{noise}"
    return f"{where}: {correlation} over {ranking['policies']} policies; {pairs} that differ{noise} are in order"


def last_line(cells: "list[Row]") -> str:
    """The worst TPOT mean."""
    worst = max(cells, key=off_by)
    predicted, measured = (worst[side]["tpot_mean_ms"] for side in ("predicted", "measured"))
    return (
        f"worst: {named(worst)}: TPOT mean predicted {predicted:.4g} ms, measured {measured:.4g} ms "
        f"({_percent(worst['errors']['tpot_mean'])})"
    )


def off_by(cell: "Row") -> float:
    """The error of its TPOT mean, unsigned; JSON has no infinity."""
    error = cell["errors"]["tpot_mean"]
    return math.inf if error is None else abs(error)


def named(cell: "Row") -> str:
    """Policy, cache and mode."""
    return f"{cell['policy']}, {cell['cache_experts']} experts ({cell['cache_fraction']:.3g} of all), {cell['mode']}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:+.1%}"
