"""What several commands share: their arguments, and how they tell of a trace."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traces.commands import console

if TYPE_CHECKING:
    from traces.reader import Folder

RECORDED = Path("traces/recorded")

TraceArgument = Annotated[str, typer.Argument(help="A trace: a folder with requests.parquet and routing/, or its URL.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the trace.", show_default="traces/recorded/NAME")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a trace that is already there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes, only errors.")]


def size(folder: "Folder", read: int | None = None) -> str:
    """A trace in one line. read: its tokens where they were read, without those of requests that are not listed."""
    meta, (requests, stored) = folder.meta, folder.size
    tokens = stored if read is None else read
    held = f"{requests} requests, {tokens} tokens" if meta.mode != "aggregate" else f"EAMs of {requests} requests"
    return f"{held} of {meta.model}, {meta.layers} MoE layers x {meta.experts} experts, top-{meta.top_k}"


def warn_if_unfinished(folder: "Folder") -> None:
    """Say that a recording was interrupted, where its settings tell of more requests than it holds."""
    held, wanted = folder.size[0], folder.meta.settings.get("requests")
    if isinstance(wanted, int) and held < wanted:
        how = "`moe-trace record --resume` continues with one of its own"
        console.warn(f"{folder.path} holds {held} of {wanted} requests: its recording was interrupted ({how})")


def tell(path: Path, quiet: bool) -> None:
    """Say where the result lies and what to do with it."""
    from traces.reader import open_folder

    if not quiet:
        console.out.print(f"{path}: {size(open_folder(path))}", soft_wrap=True)
        suggest(f"moe-trace info {path}")


def suggest(command: str) -> None:
    """Say what to do next."""
    console.out.print(f"next: {command}", soft_wrap=True)
