"""A file of `make gpu-check` or `make disk-check` drawn and put into words.

`python3 -m benchmarks.checks draw FILE.json --figure OUT.png`

To be run where matplotlib is, on the file that came back. Prints tables in Markdown, for a README.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.checks.bounds import at_quarter
from replay.comparison.cell import CLOSED_LOOP
from replay.comparison.errors import accuracy, in_words
from replay.comparison.record import ERROR
from sim.results.files import write_figure
from sim.results.metrics import Row
from sim.results.plot import BOUND_COLOUR, COLOURS
from traces.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

ALONE = "calibrations alone"


def read(path: Path) -> Row:
    """Return what the check wrote. Raise InputError for a file that is none."""
    try:
        result: Row = json.loads(path.read_text(encoding="utf-8"))
        result["cells"] = [cell for cell in result["cells"] if ERROR not in cell]
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} is not what make gpu-check writes: {error!r}") from error
    return result


def predicted(result: Row) -> list[Row]:
    """Return the cells that were run and predicted."""
    return [cell for cell in result["cells"] if cell.get("predicted")]


def tables(result: Row) -> Iterator[str]:
    """Yield lines of Markdown: the machine, prediction against measurement, how exact that is, what others take."""
    driver = f", driver {result['driver']}" if result.get("driver") else ""
    yield f"{_machine(result)}{driver}, torch {result['torch']}, commit {result['commit']}, {result['date']}"
    yield ""
    cells = predicted(result)
    columns = ["model", "policy", "cache", "mode", "tokens", "measured (ms)", "predicted (ms)", "error"]
    columns += [ALONE] if any(map(_alone, cells)) else []
    columns += ["p99 error", "per token"]
    yield from _header(columns)
    for cell in cells:
        errors, share = cell["errors"], f"{cell['cache_fraction']:.0%}"
        measured, expected = (f"{cell[side]['tpot_mean_ms']:,.4g}" for side in ("measured", "predicted"))
        if interval := cell.get("predicted_interval_ms"):
            expected += f" ({interval[0]:,.4g} to {interval[1]:,.4g})"
        row = [cell["model"], cell["policy"], share, cell["mode"], str(cell["tokens"]), measured, expected]
        row.append(f"{errors['tpot_mean']:+.1%}")
        if ALONE in columns:
            row.append(" ".join(f"{each:+.1%}" for each in _alone(cell)))
        yield _line([*row, f"{errors['tpot_p99']:+.1%}", f"{errors['token_mape']:.1%}"])
    if exact := accuracy(cells):
        yield from ("", in_words(exact))
    if result.get("ratios"):
        yield ""
        yield from _header(["model", "what others do", "takes so many times as long a token as", "times"])
        for ratio in result["ratios"]:
            yield _line([ratio["model"], ratio["over"], ratio["policy"], f"{ratio['ratio']:.2f}"])


def _header(columns: Sequence[str]) -> Iterator[str]:
    yield from (_line(columns), _line(["---"] * len(columns)))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _alone(cell: Row) -> list[float]:
    """Return the errors of what either calibration predicts without the pace of the run, where there were two."""
    return [each / cell["measured"]["tpot_mean_ms"] - 1 for each in cell.get("predicted_by_calibrations_ms") or ()]


def _machine(result: Row) -> str:
    return str(result.get("gpu") or f"{result['machine']}, {result['device']}")


def write(result: Row, path: Path) -> None:
    """Draw, left, every cell's TPOT as predicted and as measured; right, at a quarter, beside what others take."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(10.0, 4.4), layout="constrained")
    left, right = drawing.subplots(1, 2, width_ratios=(1, 1.5))
    others = [cell for cell in result["cells"] if "predicted" not in cell]
    _scatter(left, predicted(result))
    _bars(right, [*filter(at_quarter, predicted(result)), *others])
    drawing.suptitle(f"{_machine(result)}, torch {result['torch']}, {str(result['date'])[:10]}", fontsize=10)
    write_figure(drawing, path)


def _scatter(axes: "Axes", cells: Sequence[Row]) -> None:
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    for model, colour in zip(models, cycle(COLOURS), strict=False):
        of = [cell for cell in cells if cell["model"] == model]
        measured, expected = ([cell[side]["tpot_mean_ms"] for cell in of] for side in ("measured", "predicted"))
        axes.plot(measured, expected, "o", color=colour, markersize=4, label=model)
    ends = [cell["measured"]["tpot_mean_ms"] for cell in cells] or [1.0]
    axes.plot([min(ends), max(ends)], [min(ends), max(ends)], color=BOUND_COLOUR, linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="TPOT measured (ms)", ylabel="TPOT predicted (ms)")
    _plain_ticks(axes.xaxis, axes.yaxis)
    if models:
        axes.legend(fontsize=7)


def _bars(axes: "Axes", cells: Sequence[Row]) -> None:
    names = []
    for cell in cells:
        mode = "" if cell["mode"] == CLOSED_LOOP else f" {cell['mode']}"
        names.append(f"{cell['model']}{mode}{' ' + cell['policy'] if cell.get('policy') else ''}")
    heights = [cell["measured"]["tpot_mean_ms"] for cell in cells]
    axes.barh(range(len(cells)), heights, color=[COLOURS[cell["mode"] != CLOSED_LOOP] for cell in cells])
    axes.set_yticks(range(len(cells)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="TPOT measured (ms)")
    axes.set_title("a quarter of the experts in the cache", fontsize=9)
    _plain_ticks(axes.xaxis)


def _plain_ticks(*along: "Axis") -> None:
    """Write numbers at 1, 2 and 5 of each power of ten, not formulas."""
    from matplotlib.ticker import LogLocator, NullLocator

    for axis in along:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_locator(NullLocator())
