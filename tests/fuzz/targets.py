"""The readers of binary files that other programs wrote, and what must be so of a file that they accept.

A damaged file may end in any exception. It must not crash the process, hang, take more memory than it is worth, or be
read as something that cannot be used.
"""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from hypothesis import strategies as st

from policies.core.spec import parse
from policies.eamc.file import SavedEamc
from replay.devices.expert_file import ExpertFile
from replay.devices.store import anonymous
from sim.engines.untimed import count
from tests.support.same import assert_same
from tests.support.tiny import PROFILE
from tracer.commands.convert import load
from traces import Trace
from traces.importers import import_dump
from traces.models.expert_sizes import expert_bytes_by_layer
from traces.reader import EXTRA
from traces.schema import REQUESTS, ROUTING
from traces.synthetic import synthetic
from traces.writer import write_trace

CORPUS = Path(__file__).parent / "corpus"

MOST_BYTES = 2 << 30
"""Memory of a reader, beyond what the process has."""

MOST_SECONDS = 20
"""CPU time of a reader."""


@dataclass(frozen=True)
class Target:
    """A reader: `read` takes bytes and a folder for its files, and fails where it has accepted what cannot be used."""

    name: str
    read: Callable[[bytes, Path], object]

    def seeds(self) -> list[bytes]:
        """Return the files of its corpus."""
        return [file.read_bytes() for file in sorted((CORPUS / self.name).iterdir())]

    def attack(self, content: bytes, folder: Path) -> bool:
        """Read the bytes; return whether they were accepted. Raise what is a finding."""
        with bounded():
            try:
                self.read(content, folder)
            except (AssertionError, MemoryError, RecursionError):
                raise
            except Exception:
                return False
        return True


class TooSlowError(BaseException):
    """A reader took more than its CPU time; no `except Exception` takes it for damage."""


@contextmanager
def bounded() -> Iterator[None]:
    """Give what runs inside MOST_SECONDS of CPU time, and MOST_BYTES of memory more than there is now."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"more than {MOST_SECONDS} s of CPU time")

    before, limits = signal.signal(signal.SIGPROF, end), resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def mutated(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """Return seeds with some of their bytes replaced, removed, repeated or cut off."""
    numbers = st.integers(-(2**63), 2**64 - 1).map(lambda n: (n % 2**64).to_bytes(8, "little"))
    pieces = st.one_of(st.binary(max_size=8), numbers, st.integers().map(b"%d".__mod__))
    edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 16), pieces), max_size=6)

    def apply(seed: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
        for place, length, piece in changes:
            at = int(place * len(seed))
            seed = seed[:at] + piece + seed[at + length :]
        return seed

    cut = st.builds(lambda seed, share: seed[: int(share * len(seed))], st.sampled_from(seeds), st.floats(0, 1))
    return st.one_of(st.builds(apply, st.sampled_from(seeds), edits), cut, st.binary(max_size=64))


GOOD = synthetic(3, 3, 2, 6, 2, seed=0, prompt_tokens=2)


def trace(content: bytes, folder: Path) -> None:
    """One of the two files of a trace, beside the other as it should be; the first byte says which."""
    write_trace(GOOD, folder / "t", overwrite=True)
    name = REQUESTS if content[:1] == b"\0" else f"{ROUTING}/part-00000.parquet"
    (folder / "t" / name).write_bytes(content[1:])
    runs(Trace.read(folder / "t", EXTRA))


def runs(read: Trace) -> None:
    """Every lookup of a trace that was read is a hit or a miss."""
    slots = -(-read.layers * read.num_experts // 2)
    steps = [read.steps(i) for i in range(len(read.requests))]
    log = count(steps, read.layers, read.num_experts, slots, parse("lru"))
    assert log.hits.sum() + log.misses.sum() == sum(len(request.experts) for request in steps)


def npz(content: bytes, folder: Path) -> None:
    """A dump of arrays, which comes back from a trace as it was read."""
    imported, _ = import_dump(file(content, folder, "x.npz"))
    write_trace(imported, folder / "written", overwrite=True)
    assert_same(imported, Trace.read(folder / "written", EXTRA))


def expert_store(content: bytes, folder: Path) -> None:
    """A file of experts, of which one is read."""
    store = ExpertFile(file(content, folder, "experts.safetensors"), PROFILE)
    try:
        store.read(0, 0, min(store.stride, 4096), slot := anonymous(store.stride))
        store.holds(0, slot[: store.expert_bytes])
    finally:
        store.close()


def sizes(path: Path) -> None:
    """Experts that have a size have a positive one."""
    assert (np.asarray(expert_bytes_by_layer(path)) > 0).all()


def file(content: bytes, folder: Path, name: str) -> Path:
    """Return a file of that name with these bytes."""
    (folder / name).write_bytes(content)
    return folder / name


def of_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes, Path], object]:
    """Return a reader of one file of that name."""
    return lambda content, folder: read(file(content, folder, name))


TARGETS = {
    target.name: target
    for target in (
        Target("trace", trace),
        Target("npz", npz),
        Target("pt", of_file("x.pt", load)),
        Target("gguf", of_file("x.gguf", sizes)),
        Target("safetensors", of_file("model.safetensors", lambda path: sizes(path.parent))),
        Target("expert-store", expert_store),
        Target("eamc", of_file("x.npz", SavedEamc.read)),
    )
}
