"""What several commands print alike: a table's columns, and which files were written."""

from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.table import Table


def table(*headings: str, left: int = 1, gap: int = 0, fold: bool = False) -> Table:
    """Return a plain table; its first columns are flush left (and fold), the others flush right."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0))
    for i, heading in enumerate(headings):
        shown.add_column(heading, justify="left" if i < left else "right", no_wrap=True)
    if fold:
        shown.columns[0].no_wrap, shown.columns[0].overflow, shown.columns[0].min_width = False, "fold", 10
    return shown


def written(files: Iterable[Path | str], folder: Path) -> str:
    return f"wrote {', '.join(Path(file).name for file in files)} to {folder}"
