"""Options that `generate` and `serve` share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from policies.core.spec import PolicySpec
from replay.device_choice import DeviceChoice
from replay.devices.store import RESERVE_BYTES
from replay.live.loading import Progress
from replay.live.model import LiveModel
from replay.live.opening import MOST, open_live
from sim.commands import options
from sim.defaults import CACHE_SIZE, POLICY
from sim.experiment import OPTIONS, SIZES
from sim.quantities import show_bytes
from terminal import console


@dataclass(frozen=True)
class LiveOptions:
    """How a model is opened."""

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

    def live(self, model: str | None, on: options.Stated, policy: str | PolicySpec, progress: Progress) -> LiveModel:
        options = {**vars(self), "policy": policy, "progress": progress, "on_note": console.warn}
        draft = options.pop("draft")
        live = open_live(model, DeviceChoice.of(on), **options)
        live.draft = draft
        return live
