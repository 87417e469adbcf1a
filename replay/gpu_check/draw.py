"""A file of `make gpu-check` or `make disk-check` drawn and put into words.

`python3 -m replay.gpu_check.draw FILE.json --figure OUT.png`

To be run where matplotlib is, on the file that came back. Prints tables in Markdown, for a README.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replay.comparison.cell import CLOSED_LOOP
from replay.comparison.record import ERROR
from replay.comparison.summary import accuracy, in_words
from replay.gpu_check.bounds import at_quarter
from sim.results.files import write_figure
from sim.results.metrics import Row
from sim.results.plot import BOUND_COLOUR, COLOURS
from traces.commands import console, program
from traces.errors import InputError
from traces.facts import parse_json
from traces.files import plain
from traces.output import check_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SIZE_INCHES = (10.0, 4.4)
ALONE = "calibrations alone"


def read(path: Path) -> Row:
    """What the check wrote. InputError for anything else."""
    with _told_by(path):
        found: Row = parse_json(plain(path).read_text(encoding="utf-8"), "it")
        list(found["cells"])
    return found


@contextmanager
def _told_by(path: Path) -> Iterator[None]:
    """Raise InputError where a file does not hold what is read of it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except (InputError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is not what make gpu-check writes: {error!r}") from error


def told(path: Path, drawn: bool) -> tuple[list[str], "Figure | None"]:
    """Return the tables of a check, and where it is `drawn`, its figure. InputError where it lacks a part of them."""
    found = read(path)
    with _told_by(path):
        return list(tables(found)), figure(found) if drawn else None


def predicted(found: Row) -> list[Row]:
    """Cells that were run and predicted."""
    return [cell for cell in found["cells"] if ERROR not in cell and cell.get("predicted")]


def others(found: Row) -> list[Row]:
    """Cells of what others do."""
    return [cell for cell in found["cells"] if ERROR not in cell and "predicted" not in cell]


def tables(found: Row) -> Iterator[str]:
    """Lines of Markdown: the machine, prediction against measurement, how exact that is, what others take."""
    driver = f", driver {found['driver']}" if found.get("driver") else ""
    yield f"{_machine(found)}{driver}, torch {found['torch']}, commit {found['commit']}, {found['date']}"
    yield ""
    columns = ["model", "policy", "cache", "mode", "tokens", "measured (ms)", "predicted (ms)", "error"]
    columns += [ALONE] if any(_alone(cell) for cell in predicted(found)) else []
    columns += ["p99 error", "per token"]
    yield _line(columns)
    yield _line(["---"] * len(columns))
    for cell in predicted(found):
        errors, share = cell["errors"], f"{cell['cache_fraction']:.0%}"
        measured, expected = (f"{cell[side]['tpot_mean_ms']:,.4g}" for side in ("measured", "predicted"))
        if interval := cell.get("predicted_interval_ms"):
            expected += f" ({interval[0]:,.4g} to {interval[1]:,.4g})"
        cells = [cell["model"], cell["policy"], share, cell["mode"], str(cell["tokens"]), measured, expected]
        cells.append(f"{errors['tpot_mean']:+.1%}")
        if ALONE in columns:
            cells.append(" ".join(f"{each:+.1%}" for each in _alone(cell)))
        yield _line([*cells, f"{errors['tpot_p99']:+.1%}", f"{errors['token_mape']:.1%}"])
    if exact := accuracy(predicted(found)):
        yield ""
        yield in_words(exact)
    if found.get("ratios"):
        yield ""
        yield _line(["model", "what others do", "takes so many times as long a token as", "times"])
        yield _line(["---"] * 4)
        for ratio in found["ratios"]:
            yield _line([ratio["model"], ratio["over"], ratio["policy"], f"{ratio['ratio']:.2f}"])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _alone(cell: Row) -> list[float]:
    """Errors of what either calibration predicts without the pace of the run, where there were two."""
    return [each / cell["measured"]["tpot_mean_ms"] - 1 for each in cell.get("predicted_by_calibrations_ms") or ()]


def _machine(found: Row) -> str:
    return str(found.get("gpu") or f"{found['machine']}, {found['device']}")


def figure(found: Row) -> "Figure":
    """Left, every cell's TPOT as predicted and as measured; right, at a quarter, beside what others take."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=SIZE_INCHES, layout="constrained")
    left, right = drawing.subplots(1, 2, width_ratios=(1, 1.5))
    _scatter(left, predicted(found))
    _bars(right, [*filter(at_quarter, predicted(found)), *others(found)])
    drawing.suptitle(f"{_machine(found)}, torch {found['torch']}, {str(found['date'])[:10]}", fontsize=10)
    return drawing


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
    names = [_name(cell) for cell in cells]
    heights = [cell["measured"]["tpot_mean_ms"] for cell in cells]
    colours = [COLOURS[0] if cell["mode"] == CLOSED_LOOP else COLOURS[1] for cell in cells]
    axes.barh(range(len(cells)), heights, color=colours)
    axes.set_yticks(range(len(cells)), names, fontsize=6)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="TPOT measured (ms)")
    axes.set_title("a quarter of the experts in the cache", fontsize=9)
    _plain_ticks(axes.xaxis)


def _plain_ticks(*along: "Axis") -> None:
    """Numbers at 1, 2 and 5 of each power of ten, not formulas."""
    from matplotlib.ticker import LogLocator, NullLocator

    for axis in along:
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_locator(NullLocator())


def _name(cell: Row) -> str:
    mode = "" if cell["mode"] == CLOSED_LOOP else f" {cell['mode']}"
    return f"{cell['model']}{mode}{' ' + cell['policy'] if cell.get('policy') else ''}"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def draw(
    file: Annotated[Path, typer.Argument(help="What make gpu-check or make disk-check wrote.")],
    figure_: Annotated[Path | None, typer.Option("--figure", help="The picture to write (.png).")] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a picture that is already there.")] = False,
) -> None:
    """Print tables of a check in Markdown, and draw it."""
    if figure_:
        check_file(figure_, overwrite)
    lines, drawing = told(file, drawn=figure_ is not None)
    for line in lines:
        console.say(line)
    if figure_ and drawing:
        write_figure(drawing, figure_)


if __name__ == "__main__":
    program.main(app, "gpu-check-draw")
