"""How good plans are: published speeds beside them, and the errors of the back-test that their intervals follow from.

`python -m benchmarks.planner` prints the table of docs/planner.md, a check, not a fit: nothing of the planner was set
by these figures, though they are rows of the back-test as well. With `--write` it writes
sim/prediction/data/errors.toml.
"""

import sys
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sim.backtest import file, score
from sim.backtest.score import Result
from sim.planner.placements import today
from sim.planner.plan import CONTEXT, Speed, chosen, expected
from sim.planner.resources import resources
from sim.prediction.case import Case
from sim.prediction.described import Row
from sim.prediction.errors import CALIBRATED, NARROWER, NONE, UNKNOWN, Spread, class_of, spread_of
from sim.prediction.tables import DATA

PUBLISHED = Path(__file__).with_suffix(".toml")


def quick(model: str, context: int = CONTEXT, precision: str | None = None, **machine: Any) -> Speed:
    """Return the speed that a plan expects, and nothing else of it."""
    return expected(today(chosen(model, resources(**machine), context, precision)[0]))[0]


def published() -> str:
    """Return published speeds beside plans as a table, and the median error below it."""
    lines = ["| figure | model, GPU, bandwidth of host memory | measured, tokens/s | expected | interval | error |"]
    lines.append("| --- | --- | ---: | ---: | --- | ---: |")
    errors, inside = [], 0
    for name, row in tomllib.loads(PUBLISHED.read_text("utf-8")).items():
        options, measured = row["options"], row["tokens_per_s"]
        speed = quick(**options)
        model = " ".join(filter(None, [options["model"], options.get("precision")]))
        machine = f"{model} on {options.get('gpu', 'no GPU')}, {options['cpu_bandwidth']}"
        errors.append(speed.tokens_per_s / measured - 1)
        inside += speed.low <= measured <= speed.high
        cells = [name, machine, f"{measured:.2f}", f"{speed.tokens_per_s:.2f}", f"{speed.low:.2f} to {speed.high:.2f}"]
        lines.append(f"| {' | '.join(cells)} | {errors[-1]:+.0%} |")
    median = float(np.median(np.abs(errors)))
    return "\n".join([*lines, "", f"Median error {median:.0%}; {inside} of {len(errors)} lie in their interval."])


def errors_text(results: Iterable[Result]) -> str:
    """Return errors.toml for these results of the back-test; what was fitted on a machine is also of its own class.

    The class of unknown engines has the rows of all engines with overheads of their own, predicted as if nothing of
    them were known.
    """
    lines = [
        "# measured / predicted speed of the back-test's rows by what is known of machine and engine, without a fitted",
        '# parameter but for the class "calibrated", and how much slower and faster it may be (logarithms) by what is',
        "# assumed of the row. Written by `python -m benchmarks.planner --write`.",
    ]
    held: dict[str, list[str]] = {kind: [] for kind in NARROWER}
    for result in results:
        row = result.row
        if not row.timed or not row.machine or result.faster is None or result.blind is None:
            continue
        case = aimed(row)
        kind = class_of(case)
        if kind != UNKNOWN:
            held[kind].append(_line(row, replace(result, predicted=result.blind).faster or 1.0, spread_of(case)))
        if not case.engine.overheads.is_nothing:
            case = aimed(replace(row, engine=UNKNOWN))
            predicted = score.figure(row, case.simulated(case.hardware))
            faster = replace(result, predicted=predicted).faster or 1.0
            held[UNKNOWN].append(_line(row, faster, spread_of(case)))
        if result.kind == CALIBRATED and not row.fit:
            held[CALIBRATED].append(_line(row, result.faster, NONE))
    for kind, rows in held.items():
        lines += ["", f'"{kind}" = [', *rows, "]"]
    return "\n".join([*lines, ""])


def aimed(row: Row) -> Case:
    case = Case(row)
    return case.aimed(case.hardware)


def _line(row: Row, faster: float, spread: Spread) -> str:
    assert row.machine
    numbers = f"ratio = {1 / faster:.4f}, slower = {spread.slower:.3f}, faster = {spread.faster:.3f}"
    return f'  {{ figure = "{row.figure}", machine = "{row.machine.name}", {numbers} }},'


def main() -> None:
    if "--write" in sys.argv:
        rows = [row for path in file.shipped() for row in file.read(path)]
        (DATA / "errors.toml").write_text(errors_text(score.backtest(rows).results), "utf-8")
    print(published())


if __name__ == "__main__":
    main()
