"""Options that `generate` and `serve` share."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from replay.device_choice import DeviceChoice
from replay.devices.store import RESERVE_BYTES
from replay.live.model import LiveModel
from replay.live.opening import MOST, open_live
from sim.commands import options
from sim.defaults import CACHE_SIZE, POLICY
from sim.experiment import OPTIONS, SIZES
from sim.quantities import show_bytes
from sim.sweeps.config import seeded
from terminal import console
from terminal.console import progress


@dataclass(frozen=True)
class LiveOptions:
    """How a model is opened."""

    model: Annotated[str | None, typer.Option(help="Folder or hub id of a model. Default: the shipped one.")] = None
    policy: Annotated[str, typer.Option(help="Policy, as in lru or lru+eamc (eviction policy + prefetcher).")] = POLICY
    cache_size: Annotated[
        str,
        typer.Option(
            help=f"Cache size: {SIZES}; {MOST}: what fits into memory, with {show_bytes(RESERVE_BYTES)} left free."
        ),
    ] = CACHE_SIZE
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto"
    draft: Annotated[
        int,
        typer.Option(
            min=0,
            max=1_000,
            help="Tokens drafted for each decode step: what followed its last tokens before. Default: 0.",
        ),
    ] = 0
    profile: Annotated[
        Path | None, typer.Option(help="File for what the policy learns: it starts from it the next time.")
    ] = None
    lookahead: Annotated[
        int, typer.Option(min=0, help="Layers ahead whose routers run on a layer's input, as for gate. Default: 0.")
    ] = 0
    routing: Annotated[str | None, typer.Option(help=OPTIONS["routing"].help)] = None

    def live(self, on: options.Stated, quiet: bool, seed: int = 0) -> LiveModel:
        options = {**vars(self), "policy": seeded(self.policy, seed), "on_note": console.warn}
        model, draft, shown = options.pop("model"), options.pop("draft"), partial(progress, quiet=quiet, what="experts")
        live = open_live(model, DeviceChoice.of(on), **options, progress=shown)
        live.draft = draft
        return live
