"""The command `moe-sim conformance`: cases in the engine-neutral format, run by either engine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sim.commands import options
from sim.engines.cases import COMPILED, run_file
from terminal import console
from traces.output import check_file, replacing


def conformance(
    cases: Annotated[Path, typer.Argument(help="One case a line, in the engine-neutral JSON format.")],
    out: Annotated[Path | None, typer.Option(help="File for the results; else standard output.")] = None,
    engine: Annotated[str, typer.Option(help="Which clock runs them: compiled, or simpy, the reference.")] = COMPILED,
    overwrite: options.Overwrite = False,
) -> None:
    """Run engine-neutral cases and write one result line for each.

    [b]moe-sim conformance cases.jsonl --engine simpy --out results.jsonl[/b]
    """
    if out is None:
        run_file(cases, sys.stdout, engine, console.warn)
        return
    check_file(out, overwrite, read=cases)
    with replacing(out, overwrite=overwrite) as part, part.open("w", encoding="utf-8") as lines:
        run_file(cases, lines, engine, console.warn)
