"""The command `moe-sim sensitivity`: which parameter of a cell, moved by a step, changes its latency most."""

import re
from typing import Annotated

import typer
from rich.table import Table

from sim.analysis.sensitivity import MAKER, NAMES, Effect, Sensitivity, plan, point_of, save
from sim.analysis.sensitivity import sensitivity as measure
from sim.commands import options
from sim.commands.printed import METRICS, cell_title, milliseconds, progress, table, written
from sim.engines import compiling
from sim.loaded import TimedRun
from sim.results.metrics import users_text
from traces.errors import InputError
from traces.output import claimed


def sensitivity(
    cell: options.CellOptions,
    stated: Annotated[options.Stated, options.all_but("untimed")],
    *,
    step: Annotated[str, typer.Option(help="How far each parameter is moved, down and up.")] = "20%",
    workers: options.Workers = None,
    output: options.ResultOptions,
) -> None:
    """Rank what would help most: a faster link, more cache, smaller experts, less policy overhead, another option.

    Runs the point itself, then with each parameter one step lower and one step higher, and ranks the parameters by the
    change of the mean TPOT. Writes sensitivity.parquet (a row per run) and sensitivity.png.

    [b]moe-sim sensitivity my-trace --policy eamc --cache-size 25% --hardware rtx4090[/b]

    [b]moe-sim sensitivity my-trace --policy lru+markov:n=4 --chunk-bytes 1MiB --step 50%[/b]
    """
    share = _share(step)
    loaded = TimedRun.of(options.experiment(stated, cell.trace))
    spec, slots = cell.chosen(loaded)
    loaded = cell.charged(loaded, spec, output)
    point = point_of(loaded, spec, slots)
    variants, left_out = plan(point, share)
    folder = output.folder(loaded.experiment.trace, "/sensitivity")
    cell.announce(loaded, spec, slots, stated, output)
    versions = loaded.versions((spec, *(variant.point.policy for variant in variants)))
    output.note(*compiling.notes(versions))
    with claimed(folder, MAKER, NAMES):
        with progress((1 + len(variants)) * len(loaded.trace.requests), output.quiet) as advance:
            found = measure(point, variants, options.processes(workers), advance)
        files = save(found, folder)
    users, figure = users_text(found.row), f"{METRICS[found.metric]} {milliseconds(found.row[found.metric])}"
    title = "; ".join(filter(None, (cell_title(found.row, found.row["hardware"]), users, figure)))
    output.show(
        lambda: _as_json(found, left_out),
        lambda: (title, _table(found), *_notes(found, left_out), written(files, folder)),
    )


def _share(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if not match or not 0 < float(match[1]) < 100:
        raise InputError(f"--step {text}: a step is above 0% and below 100%, as in 20%")
    return float(match[1]) / 100


def _table(found: Sensitivity) -> Table:
    metric = METRICS[found.metric]
    shown = table("parameter", "here", "lower", metric, "higher", metric, "elast.")
    for effect in found.effective:
        unit = f" ({effect.parameter.unit})" if effect.parameter.unit else ""
        cells = [_number(effect.here[0], effect)]
        for side, change in zip((effect.down, effect.up), effect.changes, strict=True):
            cells += [_number(side[0], effect), f"{milliseconds(side[1])} {change:>+6.1%}"] if side else ["-", "-"]
        shown.add_row(f"{effect.parameter.name}{unit}", *cells, f"{effect.elasticity:+.2f}")
    return shown


def _number(value: float, effect: Effect) -> str:
    return f"{value:,.0f}" if effect.parameter.whole else f"{value:,.3g}"


def _notes(found: Sensitivity, left_out: list[str]) -> list[str]:
    moves = [
        (change, effect, side[0])
        for effect in found.effective
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


def _as_json(found: Sensitivity, left_out: list[str]) -> dict[str, object]:
    def side(figures: tuple[float, float] | None, change: float | None) -> dict[str, object] | None:
        return None if figures is None else {"value": figures[0], found.metric: figures[1], "change": change}

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
