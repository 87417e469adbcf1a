"""What several commands print alike: a bar, a cell's title, a table's columns, figures, which files were written."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from traces.commands import console

if TYPE_CHECKING:
    from rich.table import Table

    from sim.results.metrics import Row

METRICS = {"tpot_mean_ms": "TPOT ms", "ttft_mean_ms": "TTFT ms", "misses": "misses"}
"""Columns of results by which cells are judged, as tables head them."""


def cell_title(row: "Row", machine: str | None) -> str:
    """Return what was run on what."""
    from sim.results.metrics import cell_text

    where = f" on {machine}" if machine else ""
    played = f"requests {row['requests']:,}, tokens {row['tokens']:,} of {row['trace']}"
    return f"{row['model']}{where}: {cell_text(row)} of the experts; {played}"


def table(*headings: str, left: int = 1, gap: int = 0, fold: bool = False) -> "Table":
    """Return a plain table; its first columns are flush left (and fold), the others flush right."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0))
    for i, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    if fold:
        shown.columns[0].no_wrap, shown.columns[0].overflow, shown.columns[0].min_width = False, "fold", 10
    return shown


def milliseconds(value: float) -> str:
    """Return it with two decimals, three below 10."""
    return f"{value:,.{2 if value >= 10 else 3}f}"


@contextmanager
def progress(total: int, quiet: bool, what: str = "requests run", done: int = 0) -> "Iterator[Callable[..., None]]":
    """Draw a bar on standard error, with what is compiled meanwhile.

    Yield what advances it by a number, and changes `what` if another text follows.
    """
    from rich import progress
    from rich.text import Text

    from sim.engines import compiling

    class Compiling(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text(compiling.words(), style="dim")

    text, rest = progress.TextColumn("{task.description}", markup=False), progress.TimeRemainingColumn()
    columns = (progress.BarColumn(), progress.MofNCompleteColumn(), text, rest, Compiling())
    with progress.Progress(*columns, console=console.err, disable=console.is_unwatched(quiet), transient=True) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda by, what=None: bar.update(task, advance=by, description=what)


def written(files: Iterable[Path | str], folder: Path) -> str:
    """Return the line that names the files written to the folder."""
    return f"wrote {', '.join(Path(file).name for file in files)} to {folder}"
