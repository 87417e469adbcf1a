"""The command `moe-sim backtest`: published measurements, predicted, with the errors."""

from pathlib import Path
from typing import Annotated

import typer

from sim.backtest import file, printed, score
from terminal import console
from terminal.console import progress


def backtest(
    files: Annotated[list[Path] | None, typer.Argument(help="Files of rows. Default: the shipped ones.")] = None,
    every_row: Annotated[bool, typer.Option("--rows", help="Also print every row.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print rows and summary as JSON.")] = False,
) -> None:
    """Predict published measurements of other systems, and print predicted, measured and the errors.

    docs/backtest.md describes files of rows. An error is predicted / measured - 1; for hit rates, the difference. A row
    with `fit = true` fits its machine's parameter and is not scored.

    [b]moe-sim backtest[/b]

    [b]moe-sim backtest my-rows.toml --rows[/b]
    """
    rows = [row for path in files or file.shipped() for row in file.read(path, console.warn)]
    with progress(sum(not row.unsimulated for row in rows), as_json, "rows run") as advance:
        test = score.backtest(rows, ended=lambda: advance(1), warn=console.warn)
    if as_json:
        console.say_json({"rows": list(map(printed.row_of, test.results)), "summary": score.summary(test)})
    else:
        console.say(printed.text(test, every_row))
