"""Tables as other programs take them: CSV for a spreadsheet, Markdown for a page, LaTeX (booktabs) for a paper."""

import csv
import io
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

Cells = Sequence[Sequence[str]]


def formatted(table: Table, form: str) -> str:
    """Return a table, its headings first, in one of `FORMATS`."""
    columns = [[_plain(column.header), *map(_plain, column.cells)] for column in table.columns]
    return FORMATS[form](list(zip(*columns, strict=True)), [column.justify for column in table.columns])


def _plain(cell: object) -> str:
    return " ".join((cell.plain if isinstance(cell, Text) else str(cell)).split())


def _csv(rows: Cells, sides: Sequence[str]) -> str:
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    return written.getvalue().rstrip("\n")


def _markdown(rows: Cells, sides: Sequence[str]) -> str:
    rule = ["---:" if side == "right" else "---" for side in sides]
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (escaped[0], rule, *escaped[1:]))


def _latex(rows: Cells, sides: Sequence[str]) -> str:
    head, *body = [" & ".join(map(_escaped, row)) + r" \\" for row in rows]
    places = "".join("r" if side == "right" else "l" for side in sides)
    lines = rf"\begin{{tabular}}{{{places}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"
    return "\n".join(lines)


def _escaped(cell: str) -> str:
    marks = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    marks |= {"<": r"\textless{}", ">": r"\textgreater{}", **{mark: rf"\{mark}" for mark in "&%$#_{}"}}
    return "".join(marks.get(letter, letter) for letter in cell)


FORMATS: dict[str, Callable[[Cells, Sequence[str]], str]] = {"csv": _csv, "md": _markdown, "latex": _latex}
