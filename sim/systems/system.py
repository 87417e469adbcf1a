"""A system as a declaration: which policy stands for it, how it moves experts, what its framework takes.

`systems.toml` holds a table for each. Beside its policy, which `moe-sim run --policy` takes as well, a system has only
options that are pure transforms of a run (`sim.systems.transforms`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from traces.errors import unknown
from traces.files import read_toml
from traces.typed import typed

FILE = Path(__file__).parent / "systems.toml"

Overhead = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class System:
    """A system that serves a model whose experts do not fit GPU memory.

    policy: as --policy takes it; {profile} is a trace to take popularity from, {host_layers} the number of layers that
    do not fit.
    """

    name: str
    title: str
    policy: str
    assumptions: str  # sentences
    sources: tuple[str, ...]
    without_lookahead: str = ""  # policy for a trace without that column
    whole_layers: bool = False  # a layer is copied with all its experts before each use, those that fit stay
    buffers: int = 0  # of whole layers, for those that do not fit
    copy_back: bool = False  # a swap moves the victim back
    blocking: bool = False  # nothing is computed while experts of the event move
    zero_copy: bool = False  # kernels read the experts of {host_layers} over the link, nothing is kept
    cpu_layers: bool = False  # the CPU computes all of {host_layers}, not their experts alone
    disk: bool = False  # the link is the disk
    mmap: bool = False  # host memory is a cache over the disk
    # What is in GPU memory before the run: nothing, what a profile names as popular, the layers that fit, everything.
    preload: Literal["", "popular", "layers", "all"] = ""
    precision: str = ""  # of the experts; empty: the model profile's
    dense_precision: str = ""  # of all else
    us_per_layer: Overhead = 0.0  # of its framework, in each MoE layer
    us_per_token: Overhead = 0.0  # in each forward pass


@cache
def systems() -> dict[str, System]:
    return {name: typed(System, {**table, "name": name}, f"{FILE}: {name}") for name, table in read_toml(FILE).items()}


def chosen(names: Iterable[str]) -> list[System]:
    """Return the systems of these names, all if there are none. Raise InputError for an unknown name."""
    known = systems()
    names = list(dict.fromkeys(names)) or list(known)
    for name in names:
        if name not in known:
            raise unknown("system", name, known)
    return [known[name] for name in names]
