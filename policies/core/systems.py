"""Other people's systems (`policies/systems.toml`): what each is called, decides, how it moves experts, what it takes.

The name of a system with a policy is a preset: it stands for that policy, scope included, and decides nothing itself.
`NAME:key=value` sets an option of whatever in it declares one. All other options of a system are pure transforms of a
run (`sim.systems.transforms`), and its overheads slow down a machine (`Hardware.under`).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from traces.files import read_toml
from traces.typed import typed

FILE = Path(__file__).parents[1] / "systems.toml"

Us = Annotated[float, Meta(ge=0)]
Factor = Annotated[float, Meta(gt=0, le=1)]


@dataclass(frozen=True)
class Overheads:
    """What a system's framework takes beside bytes and launches. us_per_layer: of every layer of the model.

    link, disk, host_kernels: what copies, reads of the disk and expert kernels on the CPU reach of the machine's rates.
    """

    source: str  # of the figures
    as_of: str = ""  # the system whose overheads these are, but for what is stated
    us_per_layer: Us = 0.0
    us_per_expert: Us = 0.0  # computed on the GPU
    us_per_miss: Us = 0.0  # of each copy
    us_per_token: Us = 0.0  # once a step
    hop_us: Us | None = None  # activations to the CPU and back; None: the machine's
    link: Factor = 1.0
    disk: Factor = 1.0
    host_kernels: Factor = 1.0
    blocking: bool = False  # no expert of a layer is computed before all have arrived
    dequantises: bool = False  # experts are written in 16 bits and read again before they are computed

    @property
    def is_nothing(self) -> bool:
        return self == Overheads(self.source, self.as_of)


@dataclass(frozen=True)
class System:
    """A system by name. What it decides as `--policy` takes it (policy), and as `moe-sim systems` runs it (runs).

    runs: {profile} is a trace to take popularity from, {host_layers} the number of layers that do not fit.
    """

    name: str
    title: str
    overheads: Overheads
    also: tuple[str, ...] = ()  # other names
    policy: str = ""  # as given: EVICT[:opts][+PREFETCH[:opts]][@SCOPE]; empty: the name is none of a policy
    summary: str = ""  # of the policy: sentences; the first is shown in lists
    differs: str = ""  # what the real system does otherwise, and what stays unverified
    runs: str = ""  # empty: `moe-sim systems` does not run it
    assumptions: str = ""  # of that run: sentences
    sources: tuple[str, ...] = ()
    without_lookahead: str = ""  # runs so on a trace without that column
    whole_layers: bool = False  # a layer is copied with all its experts before each use, those that fit stay
    buffers: int = 0  # of whole layers, for those that do not fit
    copy_back: bool = False  # a swap moves the victim back
    zero_copy: bool = False  # kernels read the experts of {host_layers} over the link, nothing is kept
    cpu_layers: bool = False  # the CPU computes all of {host_layers}, not their experts alone
    disk: bool = False  # the link is the disk
    mmap: bool = False  # host memory is a cache over the disk
    # What is in GPU memory before the run: nothing, what a profile names as popular, the layers that fit, everything.
    preload: Literal["", "popular", "layers", "all"] = ""
    precision: str = ""  # of the experts; empty: the model profile's
    dense_precision: str = ""  # of all else

    @property
    def is_unknown(self) -> bool:
        """Whether it is not stated what it takes, so that it is charged what most take."""
        return "unknown" in (self.name, self.overheads.as_of)


@cache
def systems() -> dict[str, System]:
    tables = read_toml(FILE)
    return {
        name: typed(System, {**table, "name": name, "overheads": _overheads(tables, name)}, f"{FILE}: {name}")
        for name, table in tables.items()
    }


def _overheads(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    stated = tables[name].get("overheads", {"as_of": "unknown"})
    base = _overheads(tables, stated["as_of"]) if "as_of" in stated else {}
    return {**base, **stated}


def presets() -> list[System]:
    """Return the systems whose name stands for a policy."""
    return [system for system in systems().values() if system.policy]


def system_of(text: str) -> System:
    """Return the system of that name, with or without what stands behind "(" or a comma, else `unknown`.

    Spellings that differ in case alone come before those that differ in punctuation.
    """
    for wanted in (text, re.split(r"[(,]", text)[0].strip()):
        for spelled in (str.lower, _plain):
            for system in systems().values():
                if spelled(wanted) in map(spelled, (system.name, *system.also)):
                    return system
    return systems()["unknown"]


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", text.lower())
