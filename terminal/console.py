"""What commands print: results on standard output, all else (progress, warnings, errors) on standard error.

Names and paths are printed as they are: the consoles take no markup and no emoji.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from traces import facts

AS_THEY_ARE: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}

out = Console(**AS_THEY_ARE)
err = Console(**AS_THEY_ARE, stderr=True)

WIDEST = 100_000
"""Columns of a table, at most."""


def say(part: RenderableType) -> None:
    """Print a line as it is, or a table, never narrower than its names; outside a terminal a row is one line."""
    _print(part, out)


def say_json(value: object) -> None:
    print(json.dumps(facts.finite(value), indent=1, allow_nan=False), file=out.file)


def say_on_stderr(part: RenderableType) -> None:
    """Print a text or a table on standard error, where standard output is a result of its own."""
    _print(part, err)


def _print(part: RenderableType, to: Console) -> None:
    if isinstance(part, str):
        to.print(part, soft_wrap=True)
        return
    wide = to.options.update(max_width=WIDEST)
    for column in part.columns if isinstance(part, Table) else ():
        column.overflow = "fold"
        if column.no_wrap:
            cells = (Measurement.get(to, wide, cell).maximum for cell in (column.header, *column.cells))
            column.min_width = max(cells)
    room = Measurement.get(to, wide, part)
    width = max(to.width, room.minimum) if to.is_terminal else room.maximum
    Console(**AS_THEY_ARE, width=width, stderr=to.stderr).print(part)


def listing(name: str, *headings: str, rows: Iterable[Iterable[str]]) -> Table:
    """Return a table without lines; what its first column names is never broken."""
    shown = Table(Column(name, no_wrap=True), *headings, box=None, header_style="bold")
    for row in rows:
        shown.add_row(*row)
    return shown


def table(*headings: str, rows: Iterable[Iterable[str]] = (), left: int = 1, gap: int = 0, fold: bool = False) -> Table:
    """Return a plain table; its first columns are flush left (and fold), the others flush right."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0))
    for i, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    if fold:
        shown.columns[0].no_wrap, shown.columns[0].overflow, shown.columns[0].min_width = False, "fold", 10
    for row in rows:
        shown.add_row(*row)
    return shown


def note(text: str) -> None:
    """Print one line on standard error, such as which default was taken."""
    err.print(text, soft_wrap=True)


def warn(text: str) -> None:
    err.print(Text.assemble(("warning:", "yellow"), f" {text}"), soft_wrap=True)


EVERY_S = 60.0
"""Between two lines of progress."""

Advance = Callable[..., None]
"""Advances a bar by a number, and changes the text behind it if another one follows."""


@contextmanager
def progress(total: int, quiet: bool, what: str = "requests run", done: int = 0) -> Iterator[Advance]:
    """Draw a bar on standard error, with `what` is counted behind it, and remove it at the end.

    Outside a terminal, where a bar would leave an empty line, print a line a minute instead.
    """
    if quiet or not (err.is_interactive or err.is_jupyter):
        yield (lambda by, what=None: None) if quiet else _lines(total, what, done)
        return
    text = TextColumn("{task.description}", markup=False)
    shown = (BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn())
    with Progress(*shown, console=err, transient=True) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda by, what=None: bar.update(task, advance=by, description=what)


def _lines(total: int, what: str, done: int) -> Advance:
    """Return what prints a line, at most every EVERY_S: how much is done, and how long the rest takes.

    The pace is that since its first call: what comes before prepares the work.
    """
    began = last = 0.0
    first = here = 0

    def advance(by: int, following: str | None = None) -> None:
        nonlocal began, last, first, here
        here, now = here + by, time.monotonic()
        if not first:
            began, last, first = now, now, here
        elif now - last >= EVERY_S and here > first:
            last, left = now, (total - done - here) * (now - began) / (here - first)
            note(f"{done + here:,} of {total:,} {what}, about {max(1, round(left / 60))} min left")

    return advance


def fail(name: str, text: str, status: int) -> NoReturn:
    """Print `NAME: error: TEXT` on one line of standard error and exit with `status`."""
    err.print(f"{name}: error: {' '.join(text.split())}", style=None, soft_wrap=True)
    sys.exit(status)
