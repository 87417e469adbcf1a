"""The command behind `make disk-check`: `python3 -m replay.disk_check`."""

import time
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from policies.core.grammar import split_list
from replay.comparison.record import ERROR, Record
from replay.comparison.summary import in_words
from replay.devices.device_facts import machine_name
from replay.disk_check.check import TOKENS, Check
from replay.model.network import expert_dtype_of
from sim.profiles import model_profile
from sim.results.metrics import Row
from traces.commands import console, program
from traces.errors import InputError
from traces.output import check_file

RESULTS = Path("replay/results")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command()
def check(
    out: Annotated[Path, typer.Option(help="The file to write; or a folder, for disk-DATE.json in it.")] = RESULTS,
    folder: Annotated[
        Path, typer.Option(help="Where files of experts are written, on the disk to be checked.")
    ] = Path(),
    traces: Annotated[
        Path | None, typer.Option(help="Folder of trace folders; a model without one gets synthetic routing.")
    ] = None,
    only: Annotated[str, typer.Option(help="Models, by profile.")] = ",".join(TOKENS),
    tokens: Annotated[int | None, typer.Option(help="Tokens of a cell. Default: by model.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Do not run again what the file holds.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Drop what the file holds.")] = False,
) -> None:
    """Compare prediction with measurement on this machine's disk and CPU, and policies with other tools.

    Files of experts take up to 13 GB while it runs. With all models it takes half an hour.
    """
    for what, path in (("traces", traces), ("files", folder)):
        if path and not path.is_dir():
            raise InputError(f"no folder of {what} at {path}")
    if tokens is not None and tokens < 1:
        raise InputError(f"--tokens {tokens}: a cell decodes at least 1")
    names = split_list(only)
    if not names:
        raise InputError(f"--only names no model: take some of {', '.join(TOKENS)}")
    for name in names:
        expert_dtype_of(model_profile.model(name))
    began = time.monotonic()
    path = out if out.suffix == ".json" else out / f"disk-{date.today()}.json"
    check_file(path, overwrite=True)  # the record says itself whether it is one, and whether it continues
    record = Record.open(path, resume=not overwrite, otherwise="drop it with --overwrite")
    if len(record) and not resume:
        raise InputError(
            f"{path} holds {len(record)} cells: use --resume to continue, --overwrite to drop them, or another --out"
        )
    record.tell(machine=machine_name("disk"))

    def told(text: str) -> None:
        console.note(f"{time.monotonic() - began:6.1f} s  {text}")

    Check(record, told, folder, names, traces, tokens).run()
    for line in lines(record):
        console.out.print(line, markup=False, soft_wrap=True)
    console.out.print(f"wrote {path}", markup=False, soft_wrap=True)
    if any(ERROR in cell for cell in record):
        raise typer.Exit(1)


def lines(record: Record) -> "list[str]":
    """A line for each cell, one for all of them, one for each ratio, then what could not be run."""
    played, rows = [_line(cell) for cell in record if ERROR not in cell], record.facts["ratios"] or []
    return [
        *played,
        *([in_words(found)] if (found := record.facts["accuracy"]) else []),
        *(
            f"{row['model']}, {row['policy']}: a token takes {row['over']} {row['ratio']:.2f} times as long"
            for row in rows
        ),
        *(f"{cell['model']}, {cell['mode']}: {cell[ERROR]}" for cell in record if ERROR in cell),
    ]


def _line(cell: Row) -> str:
    measured = cell["measured"]["tpot_mean_ms"]
    if "predicted" not in cell:
        return f"{cell['model']}, {cell['mode']}: {measured:,.1f} ms a token"
    low, high = cell["predicted_interval_ms"]
    return (
        f"{cell['model']}, {cell['policy']} at {cell['cache_fraction']:.0%}, {cell['mode']}: "
        f"{measured:,.1f} ms a token, predicted {cell['predicted']['tpot_mean_ms']:,.1f} ({low:,.1f} to {high:,.1f}), "
        f"{cell['errors']['tpot_mean']:+.1%}"
    )


if __name__ == "__main__":
    program.main(app, "disk-check")
