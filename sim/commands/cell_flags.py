"""Flags that the commands about one cell (`run`, `sensitivity`, `tune`) have in common, and the setup they name."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from traces import demo_trace

if TYPE_CHECKING:
    from sim.sweep.setup import Setup

POLICY = "eamc-blend"
CACHE_SIZE = "25%"
HARDWARE = "a5000"

Trace = Annotated[str | None, typer.Argument(help="Folder or URL of a trace; the shipped one if left out.")]
Policy = Annotated[
    str | None, typer.Option(help=f"A name or FILE.py:CLASS; lru+eamc pairs retention and prefetch; else {POLICY}.")
]
CacheSize = Annotated[str | None, typer.Option(help=f"A share (25%), experts (64) or bytes (8GiB); else {CACHE_SIZE}.")]
Hardware = Annotated[str | None, typer.Option(help=f"A profile or TOML file; else {HARDWARE}.")]
ModelProfile = Annotated[str | None, typer.Option(help="A profile or TOML file; else by the trace's model.")]
Requests = Annotated[int | None, typer.Option(help="Only the first N requests.")]
WarmupRequests = Annotated[int, typer.Option(help="The first N are played, but not counted.")]
AsDecode = Annotated[bool, typer.Option("--as-decode", help="Play a prefill token by token.")]
Cold = Annotated[bool, typer.Option("--cold", help="Empty the cache between requests.")]
ChunkBytes = Annotated[str | None, typer.Option(help="A prefetch may be interrupted after each (4MiB); else never.")]
PredictorUs = Annotated[
    float | None, typer.Option(help="Of the policy's own work, an event; else as measured (make bench).")
]


def setup_of(trace: str | None, hardware: str | None, chunk_bytes: str | None, **others: Any) -> "Setup":
    """What is asked for, defaults taken; `others` are fields of Setup as typed. InputError."""
    from sim.quantities import parse_bytes
    from sim.sweep.setup import Setup

    return Setup(
        trace=trace or str(demo_trace()),
        hardware=hardware or HARDWARE,
        chunk_bytes=None if chunk_bytes is None else parse_bytes(chunk_bytes, "--chunk-bytes"),
        **others,
    )
