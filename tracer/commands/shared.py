"""What several commands share: their arguments, and how they tell of a trace."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traces import console

if TYPE_CHECKING:
    from traces.trace import Trace

RECORDED = Path("traces/recorded")

TraceArgument = Annotated[Path, typer.Argument(help="A trace: a folder with requests.parquet and routing/.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the trace.", show_default="traces/recorded/NAME")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a trace that is already there.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes, only errors.")]


def size(trace: "Trace") -> str:
    """A trace in one line."""
    return (
        f"{len(trace.requests)} requests, {len(trace.experts)} tokens ({trace.phases}) of {trace.meta.model}, "
        f"{trace.layers} MoE layers x {trace.num_experts} experts, top-{trace.top_k}"
    )


def tell(folder: Path, trace: "Trace", quiet: bool) -> None:
    """Say where the result lies and what to do with it."""
    if not quiet:
        console.out.print(f"{folder}: {size(trace)}", soft_wrap=True, markup=False)
        suggest(f"moe-trace info {folder}")


def suggest(command: str) -> None:
    """Say what to do next."""
    console.out.print(f"next: {command}", soft_wrap=True, markup=False)
