"""The command `moe-sim sensitivity`: which parameter of a cell, moved by a step, changes its latency most."""

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.commands import cell_flags
from traces import console, demo_trace
from traces.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from sim.analysis.sensitivity import Effect, Sensitivity

METRICS = {"tpot_mean_ms": "TPOT ms", "ttft_mean_ms": "TTFT ms", "misses": "misses"}
"""Columns of results by which cells are judged, as tables head them."""


def sensitivity(
    trace: cell_flags.Trace = None,
    policy: cell_flags.Policy = None,
    cache_size: cell_flags.CacheSize = None,
    hardware: cell_flags.Hardware = None,
    step: Annotated[str, typer.Option(help="How far each parameter is moved, down and up.")] = "20%",
    model_profile: cell_flags.ModelProfile = None,
    out: Annotated[Path | None, typer.Option(help="Folder for table and plot; else results/NAME/sensitivity.")] = None,
    requests: cell_flags.Requests = None,
    warmup_requests: cell_flags.WarmupRequests = 0,
    as_decode: cell_flags.AsDecode = False,
    cold: cell_flags.Cold = False,
    chunk_bytes: cell_flags.ChunkBytes = None,
    predictor_us: cell_flags.PredictorUs = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Cells at a time; else one for each core.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON, not as a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")] = False,
) -> None:
    """Say what would help most: a faster link, more cache, smaller experts, a cheaper predictor, another option.

    Plays the point, then each parameter of it a step lower and a step higher, all else as it is, and ranks them by what
    that does to the mean TPOT. Writes sensitivity.parquet (a row per cell played) and sensitivity.png.

    [b]moe-sim sensitivity my-trace --policy eamc --cache-size 25% --hardware rtx4090[/b]

    [b]moe-sim sensitivity my-trace --policy lru+markov:n=4 --chunk-bytes 1MiB --step 50%[/b]
    """
    from policies.core.spec import parse
    from sim.analysis.sensitivity import NAMES, plan, point_of, save
    from sim.analysis.sensitivity import sensitivity as measure
    from sim.engines import compiling
    from sim.results.files import writable
    from sim.sweep import report
    from sim.sweep.grid import Grid
    from traces.location import name_of

    share = _share(step)
    setup = cell_flags.setup_of(
        trace,
        hardware,
        chunk_bytes,
        model_profile=model_profile,
        requests=requests,
        warmup_requests=warmup_requests,
        as_decode=as_decode,
        cold=cold,
        predictor_us=predictor_us,
    )
    loaded, spec = setup.load(), parse(policy or cell_flags.POLICY)
    slots = loaded.slots(cache_size or cell_flags.CACHE_SIZE)
    point = point_of(loaded, spec, slots)
    variants, left_out = plan(point, share)
    folder = out or Path("results") / name_of(setup.trace) / "sensitivity"
    writable(folder, NAMES)
    if not quiet:
        say_what_was_taken(trace, policy, cache_size, hardware)
    for warning in report.warnings(loaded, Grid((spec,), {cache_size or cell_flags.CACHE_SIZE: slots})):
        console.warn(warning)
    compiled = (loaded.compiled(each) for each in (spec, *(variant.point.policy for variant in variants)))
    compiling.start_if_needed(compiled, quiet)
    with report.progress((1 + len(variants)) * len(loaded.trace.requests), quiet) as advance:
        found = measure(point, variants, workers or os.cpu_count() or 1, advance)
    files = save(found, folder)
    if as_json:
        typer.echo(json.dumps(_as_json(found, left_out), indent=1))
    elif not quiet:
        row = found.row
        played = f"requests {row['requests']:,}, tokens {row['tokens']:,} of {row['trace']}"
        size = f"{slots} slots ({100 * row['cache_fraction']:.3g}% of the experts)"
        here = f"{METRICS[found.metric]} {milliseconds(row[found.metric])}"
        title = f"{row['model']} on {row['hardware']}: {spec.text}, {size}; {played}; {here}"
        console.out.print(title, markup=False, soft_wrap=True)
        console.out.print(_table(found))
        for line in _notes(found, left_out):
            console.out.print(line, markup=False, soft_wrap=True)
        written = f"wrote {', '.join(file.name for file in files)} to {folder}"
        console.out.print(written, markup=False, soft_wrap=True)
    compiling.finish(quiet)


def say_what_was_taken(trace: str | None, policy: str | None, cache_size: str | None, hardware: str | None) -> None:
    """Which defaults stand for what was not typed."""
    defaults = {
        f"the shipped trace {demo_trace()}": trace,
        f"policy {cell_flags.POLICY}": policy,
        f"cache size {cell_flags.CACHE_SIZE}": cache_size,
        f"hardware {cell_flags.HARDWARE}": hardware,
    }
    if taken := [text for text, given in defaults.items() if not given]:
        console.note(f"taking {', '.join(taken)}")


def milliseconds(value: float) -> str:
    """With two decimals, three below 10."""
    return f"{value:,.{2 if value >= 10 else 3}f}"


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not match or not 0 < float(match[1]) < 100:
        raise InputError(f"--step {text}: a step is above 0% and below 100%, as in 20%")
    return float(match[1]) / 100


def _table(found: "Sensitivity") -> "Table":
    """A row per parameter that has an effect, the largest first."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column("parameter", no_wrap=True)
    metric = METRICS[found.metric]
    for heading in ("here", "lower", metric, "higher", metric, "elast."):
        table.add_column(heading, justify="right", no_wrap=True)
    for effect in found.felt:
        unit = f" ({effect.parameter.unit})" if effect.parameter.unit else ""
        cells = [_number(effect.here[0], effect)]
        for side, change in zip((effect.down, effect.up), effect.changes, strict=True):
            cells += [_number(side[0], effect), f"{milliseconds(side[1])} {change:>+6.1%}"] if side else ["-", "-"]
        table.add_row(f"{effect.parameter.name}{unit}", *cells, f"{effect.elasticity:+.2f}")
    return table


def _number(value: float, effect: "Effect") -> str:
    return f"{value:,.0f}" if effect.parameter.whole else f"{value:,.3g}"


def _notes(found: "Sensitivity", left_out: list[str]) -> list[str]:
    """What helps most, what does nothing, what was not played."""
    moves = [
        (change, effect, side[0])
        for effect in found.felt
        for side, change in zip((effect.down, effect.up), effect.changes, strict=True)
        if side and change and change < 0
    ]
    lines = []
    if moves:
        change, effect, value = min(moves, key=lambda move: move[0])
        unit = f" {effect.parameter.unit}" if effect.parameter.unit else ""
        where = f"{effect.parameter.name} at {_number(value, effect)}{unit}"
        lines.append(f"what helps most: {where}, {METRICS[found.metric].removesuffix(' ms')} {change:+.1%}")
    if found.idle:
        lines.append(f"no effect: {', '.join(effect.parameter.name for effect in found.idle)}")
    return lines + ([f"left out: {'; '.join(left_out)}"] if left_out else [])


def _as_json(found: "Sensitivity", left_out: list[str]) -> dict[str, object]:
    def side(played: tuple[float, float] | None, change: float | None) -> dict[str, object] | None:
        return None if played is None else {"value": played[0], found.metric: played[1], "change": change}

    return {
        "metric": found.metric,
        "point": found.row,
        "parameters": [
            {
                "parameter": effect.parameter.name,
                "unit": effect.parameter.unit,
                "value": effect.here[0],
                "down": side(effect.down, effect.changes[0]),
                "up": side(effect.up, effect.changes[1]),
                "elasticity": effect.elasticity,
            }
            for effect in found.effects
        ],
        "left_out": left_out,
    }
