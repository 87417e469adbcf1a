"""What several commands print alike: a bar, a cell's title, a table's columns, figures, which files were written."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path

from rich import box
from rich.table import Table

from sim.results.metrics import Row, cell_text, engine_words
from terminal import console


def cell_title(row: Row, machine: str | None) -> str:
    where = f" on {machine}" if machine else ""
    counts = f"requests {row['requests']:,}, tokens {row['tokens']:,} of {row['trace']}"
    slots, *memory = engine_words(row)
    size = "".join([f"{slots} a layer", *(f", {mib} MiB" for mib in memory)])
    return f"{row['model']}{where}: {cell_text(row)} of the experts ({size}); {counts}"


def table(*headings: str, left: int = 1, gap: int = 0, fold: bool = False) -> Table:
    """Return a plain table; its first columns are flush left (and fold), the others flush right."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0))
    for i, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    if fold:
        shown.columns[0].no_wrap, shown.columns[0].overflow, shown.columns[0].min_width = False, "fold", 10
    return shown


def progress(
    total: int, quiet: bool, what: str = "requests run", done: int = 0
) -> AbstractContextManager[console.Advance]:
    return console.progress(total, quiet, what, done)


def written(files: Iterable[Path | str], folder: Path) -> str:
    return f"wrote {', '.join(Path(file).name for file in files)} to {folder}"
