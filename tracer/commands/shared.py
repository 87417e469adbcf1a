"""What several commands share: their arguments, and the lines about a trace."""

from pathlib import Path
from typing import Annotated

import typer

from terminal import console
from traces.reader import Folder, open_folder

RECORDED = Path("traces/recorded")

TraceArgument = Annotated[str, typer.Argument(help="A trace: a folder with requests.parquet and routing/, or its URL.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the trace.", show_default="traces/recorded/NAME")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a trace that is already there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes, only errors.")]


def size(folder: Folder, read: int | None = None) -> str:
    """Return a trace in one line. read: tokens that were read, where requests that are not listed have others."""
    meta, (requests, stored) = folder.meta, folder.size
    tokens = stored if read is None else read
    content = f"{requests} requests, {tokens} tokens" if meta.mode != "aggregate" else f"EAMs of {requests} requests"
    return f"{content} of {meta.model}, {meta.layers} MoE layers x {meta.experts} experts, top-{meta.top_k}"


def warn_if_unfinished(folder: Folder) -> None:
    """Warn of an interrupted recording, whose settings name more requests than it holds."""
    held, wanted = folder.size[0], folder.meta.settings.get("requests")
    if isinstance(wanted, int) and held < wanted:
        command = "`moe-trace record --resume` continues with one of its own"
        console.warn(f"{folder.path} holds {held} of {wanted} requests: its recording was interrupted ({command})")


def report(path: Path, quiet: bool) -> None:
    if not quiet:
        console.say(f"{path}: {size(open_folder(path))}")
        console.say(f"next: moe-trace info {path}")
