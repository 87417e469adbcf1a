"""Declare the options that `moe-replay run` and `moe-replay compare` share: the requests, and the device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from replay.device_choice import DeviceChoice
from sim.commands import options
from traces.errors import InputError

Dense = Annotated[str, typer.Option(help="Dense part of the model: real, or none (experts only).")]


Replayed = Annotated[
    options.Stated,
    options.some(
        *("model_profile", "as_decode", "cold", "chunk_bytes", "warmup_requests", "requests", "seed"),
        requests="Run the first N requests only. Default: about 1,000 steps; disk: 100 tokens; virtual: all.",
        seed="Seed of the weights. Default: 0.",
    ),
]
"""Which requests are run, and how."""


@dataclass(frozen=True)
class DeviceOptions:
    """How a device runs them: fields of Choice."""

    device: Annotated[str, typer.Option(help="auto (cuda, or cpu without it), virtual, cpu, disk or cuda.")] = "auto"
    store: Annotated[
        Path | None, typer.Option(help="File of experts for --device disk (moe-replay store writes it).")
    ] = None
    lanes: Annotated[
        int | None, typer.Option(help="Threads that read the disk. Default: measured, the fewest that are fast.")
    ] = None
    threads: Annotated[
        int | None, typer.Option(help="Threads that compute on the CPU. Default: one less than there are cores.")
    ] = None
    host_dedup: Annotated[
        int | None, typer.Option(help="Share N host buffers between all experts. Default: one buffer per expert.")
    ] = None
    pin: Annotated[str, typer.Option(help="Pinned memory: require, or best-effort (slower copies if refused).")] = (
        "require"
    )
    dense: Dense = "real"
    weights: Annotated[
        Path | None, typer.Option(help="Folder of a safetensors checkpoint. Default: random weights of its shapes.")
    ] = None

    def chosen(self, played: options.Stated, **others: bool) -> DeviceChoice:
        """Return the device. Raise InputError for one that is not there, or has no weights that a seed could draw."""
        target = DeviceChoice.of({**vars(self), **others})
        if target.device == "virtual" and "seed" in played:
            raise InputError("`seed`: the virtual device has no weights; leave it out")
        return target
