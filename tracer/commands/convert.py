"""`moe-trace import`: other tools' dumps as traces."""

from pathlib import Path
from typing import Annotated

import typer

from tracer.commands.shared import RECORDED, Out, Overwrite, Quiet, tell
from traces import console


def import_(
    file: Annotated[Path, typer.Argument(help="A .npz with experts[tokens, layers, k] and offsets[requests + 1].")],
    meta: Annotated[
        Path | None,
        typer.Option(help="JSON with model, experts, phase, requests, ...", show_default="X.json if there"),
    ] = None,
    phase: Annotated[
        str | None, typer.Option(help="decode or prefill.", show_default="first word of the JSON's phase")
    ] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Experts of a layer, where no JSON says it.")] = None,
    out: Out = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Turn routing that another tool dumped as arrays into a trace.

    Example: moe-trace import dump.npz --meta dump.json --out traces/recorded/dump
    """
    from traces.importer import import_npz
    from traces.trace import Trace
    from traces.writer import check_target, write_trace

    beside = file.with_suffix(".json")
    found = meta is None and beside.is_file()
    folder = out or RECORDED / file.stem
    check_target(folder, overwrite)
    made, assumed = import_npz(file, beside if found else meta, phase, experts)
    if found and not quiet:
        console.note(f"no --meta given: taking {beside}")
    for text in assumed:
        console.warn(text)
    write_trace(made, folder, overwrite)
    tell(folder, Trace.read(folder), quiet)
