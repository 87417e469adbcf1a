"""Parts of machines by their names: GPUs, CPUs, links and memories."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import toml

from traces.errors import InputError, unknown
from traces.files import read_toml

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet. memory_gib 0: it shares the CPU's; kind: a row of [gpu] in factors.toml."""

    gb_per_s: float
    tflop_per_s: float = 0.0
    memory_gib: float = 0.0
    link: str = ""
    kind: str = "gddr"


class Entries(dict[str, Any]):
    """A table of a TOML file, whose keys are attributes as well; the file says what each means."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"there is no {name} here, but {', '.join(self)}")
        return self[name]


def entries(path: Path) -> Entries:
    """Return the content of a file of ours, the tables in it likewise."""
    read: Entries = json.loads(json.dumps(read_toml(path)), object_hook=Entries)
    return read


GPUS = toml.decode((FOLDER / "gpus.toml").read_bytes(), type=dict[str, Gpu])
CPUS, LINKS, HOSTS = (entries(FOLDER / f"{name}.toml") for name in ("cpus", "links", "hosts"))

DISKS = {"NVMe disk": 5.0, "server's NVMe disks": 12.0, "SSD": 0.5, "hard disk": 0.15, "virtual disk": 1.0}
"""GB/s of large reads that are assumed of a disk of each kind."""

LINK = "PCIe 4.0 x16"
"""The link of a GPU of which nothing is known."""

_LINK = re.compile(r"(?:pcie)?\s*-?([345])(?:\.0)?\s*[x ]*x(\d+)", re.IGNORECASE)
_RAM = re.compile(r"\s*(\d{1,6})\s*x\s*(?:LP)?DDR\dX?-(\d{1,6})\s*", re.IGNORECASE)


def plain(name: str) -> str:
    """Return the name of a GPU without its maker, case, spaces and hyphens: `rtx3090` for `NVIDIA GeForce RTX 3090`."""
    return re.sub(r"nvidia|geforce|amd|radeon|apple|tesla|[^a-z0-9+]", "", name.lower())


def gpu_name(text: str) -> str:
    """Return the catalogue's name of a GPU, with its memory behind it or without; empty where it is not known."""
    for name, gpu in GPUS.items():
        sizes = (f"{plain(name)}{gpu.memory_gib:g}{unit}" for unit in ("gb", "gib"))
        if plain(text) in (plain(name), *sizes):
            return name
    return ""


def gpu_that_reads(gb_per_s: float, title: str = "") -> Gpu:
    """Return the data sheet of the GPU with that bandwidth that a title names, else of the newest."""
    alike = [(plain(name) in plain(title), len(name), gpu) for name, gpu in GPUS.items() if gpu.gb_per_s == gb_per_s]
    named = [(length, gpu) for is_named, length, gpu in alike if is_named]
    if named:
        return max(named, key=lambda each: each[0])[1]
    return alike[-1][2] if alike else Gpu(gb_per_s)


def link_named(text: str) -> str:
    """Return the catalogue's name of a link, such as `pcie4x16`. Raise InputError for an unknown one."""
    parts = _LINK.fullmatch(text.strip())
    name = f"PCIe {parts[1]}.0 x{parts[2]}" if parts else text
    if name not in LINKS:
        names = [each.replace(" ", "").replace(".0", "").lower() for each in LINKS]
        raise unknown("link", text, [*names, "25GB/s"])
    return name


def ram_gb_per_s(text: str) -> float:
    """Return the peak of a memory by channels and kind: channels x MT/s x 8 bytes. Raise InputError."""
    kind = _RAM.fullmatch(text)
    if not kind:
        raise InputError(f"ram {text!r}: write channels and kind, such as 2 x DDR5-6000")
    return int(kind[1]) * int(kind[2]) * 8 / 1_000


def thread_gflop_per_s(cpu: str) -> float:
    """Return what a thread of a CPU of that name multiplies, in GFLOP/s; 0: it is not known."""
    known = (kind for kind in CPUS.values() if re.search(kind.names, cpu, re.IGNORECASE))
    return next((kind.gflop_per_s_per_thread for kind in known), 0.0)
