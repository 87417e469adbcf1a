"""Options that `generate` and `serve` share."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Annotated

import typer

from policies.core.spec import PolicySpec
from replay.device_choice import DeviceChoice
from replay.live.loading import Progress
from replay.live.model import LiveModel
from replay.live.opening import open_live
from sim.defaults import CACHE_SIZE, POLICY
from tracer import demo
from traces.commands import console
from traces.errors import InputError


@dataclass(frozen=True)
class LiveOptions:
    """How a model is opened."""

    policy: Annotated[str, typer.Option(help="Policy, as in lru or lru+eamc (eviction policy + prefetcher).")] = POLICY
    cache_size: Annotated[
        str, typer.Option(help="Cache size: a share of all experts (25%), experts (64) or bytes (8GiB).")
    ] = CACHE_SIZE
    device: Annotated[
        str, typer.Option(help="disk (experts there, the CPU computes), or cuda (experts in host memory).")
    ] = "disk"
    dtype: Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")] = "auto"
    lanes: Annotated[
        int | None, typer.Option(min=1, max=256, help="Threads that read the disk. Default: measured.")
    ] = None
    store: Annotated[
        Path | None,
        typer.Option(help="File for experts that loading converts, written once. Default: in the cache folder."),
    ] = None
    profile: Annotated[
        Path | None, typer.Option(help="File for what the policy learns: it starts from it the next time.")
    ] = None

    @contextmanager
    def live(self, model: str | None, policy: str | PolicySpec, progress: Progress) -> Iterator[LiveModel]:
        """Open the model; None: the shipped one."""

        target = DeviceChoice.of({"device": self.device, "lanes": self.lanes, "store": self.store})
        with open_live(
            model or str(demo.MODEL),
            target,
            policy=policy,
            cache_size=self.cache_size,
            dtype=self.dtype,
            profile=self.profile,
            name=None if model else demo.NAME,
            progress=progress,
            on_note=console.warn,
        ) as live:
            yield live

    def require_apart(self, record: Path | None = None) -> None:
        """Raise InputError where one of the files would take another one's place. record: folder of a trace."""
        places = {name: Path(realpath(file)) for name in ("store", "profile") if (file := getattr(self, name))}
        if len(places) > len({*places.values()}):
            raise InputError(f"--store and --profile both name {self.profile}: name a file for each")
        for name, place in places.items():
            if record and Path(realpath(record)) in (place, *place.parents):
                raise InputError(f"--{name} {getattr(self, name)} is in the folder of --record: name a file elsewhere")
