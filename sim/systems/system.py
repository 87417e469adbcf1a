"""A system as a declaration: which policy stands for it, how it moves experts, what its framework takes.

`systems.toml` holds a table for each. Beside its policy, which `moe-sim run --policy` takes as well, a system has only
options that are pure transforms of a run (`sim.systems.transforms`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from sim import profiles
from traces.errors import InputError, located, unknown
from traces.files import read_toml

FILE = Path(__file__).parent / "systems.toml"

PRELOADS = ("", "popular", "layers", "all")
"""What is in GPU memory before the run: nothing, what a profile found popular, the layers that fit, everything."""


@dataclass(frozen=True)
class System:
    """A system that serves a model whose experts do not fit GPU memory.

    policy: as given; {profile} is a trace to take popularity from, {predictor} a file of `moe-sim train-stride`,
    {host_layers} the number of layers that do not fit.
    """

    name: str
    title: str
    policy: str
    assumptions: str  # sentences
    sources: tuple[str, ...]
    without_lookahead: str = field(default="", metadata=profiles.MAY_BE_ZERO)  # policy for a trace without that column
    whole_layers: bool = False  # a layer is copied with all its experts before each use, those that fit stay
    buffers: int = field(default=0, metadata=profiles.MAY_BE_ZERO)  # of whole layers, for those that do not fit
    copy_back: bool = False  # a swap moves the victim back
    blocking: bool = False  # nothing is computed while experts of the event move
    zero_copy: bool = False  # kernels read the experts of {host_layers} over the link, nothing is kept
    cpu_layers: bool = False  # the CPU computes all of {host_layers}, not their experts alone
    disk: bool = False  # the link is the disk
    mmap: bool = False  # host memory is a cache over the disk
    preload: str = ""  # one of PRELOADS
    precision: str = ""  # of the experts; empty: the model profile's
    dense_precision: str = ""  # of all else
    us_per_layer: float = field(default=0.0, metadata=profiles.MAY_BE_ZERO)  # of its framework, in each MoE layer
    us_per_token: float = field(default=0.0, metadata=profiles.MAY_BE_ZERO)  # in each forward pass

    def __post_init__(self) -> None:
        if self.preload not in PRELOADS:
            raise unknown("preload", self.preload, PRELOADS)
        if self.whole_layers and not self.buffers:
            raise InputError("whole_layers needs at least one buffer")


@cache
def systems() -> dict[str, System]:
    """Return the shipped systems by name, in the order of the file."""
    return read(FILE)


def read(path: Path) -> dict[str, System]:
    """Return the systems of a file by name. Raise InputError for one that cannot be used."""
    found = {}
    for name, table in read_toml(path).items():
        with located(f"{path}: {name}"):
            if not isinstance(table, dict):
                raise InputError("a system is a table")
            found[name] = profiles.make(System, table, {}, name=name)
    return found


def chosen(names: Iterable[str]) -> list[System]:
    """Return the systems of these names, all if there are none. Raise InputError for an unknown name."""
    known = systems()
    wanted = list(dict.fromkeys(names)) or list(known)
    for name in wanted:
        if name not in known:
            raise unknown("system", name, known)
    return [known[name] for name in wanted]
