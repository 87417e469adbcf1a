"""What all fuzzers share: a target reads any bytes, or raises InputError; nothing else, in bounded time and memory.

What it has read must mean something (`tests.fuzz.checks`).

Bytes come from libFuzzer, guided by the coverage of our Python code (atheris), or where that is not installed from
Hypothesis, which mutates the corpus. Time is CPU time and memory is address space, so that neither depends on what else
the machine does.
"""

import resource
import signal
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from traces.errors import InputError

CORPUS = Path(__file__).parent / "corpus"

MOST_BYTES = 2 << 30
"""Of memory, beyond what a process has that has imported everything."""

MOST_SECONDS = 20
"""Of CPU time an input."""

LARGEST_INPUT = 64 << 10
"""Bytes."""


@dataclass(frozen=True)
class Target:
    """A reader: `read` takes bytes and a folder to put them into, under names of its own.

    check: takes what was read, and the folder, and raises where that means nothing.
    """

    name: str
    read: Callable[[bytes, Path], Any]
    check: Callable[[Any, Path], object] | None = None

    @property
    def corpus(self) -> Path:
        """The folder of its seeds, and of inputs that found something."""
        return CORPUS / self.name

    def seeds(self) -> dict[str, bytes]:
        """Its corpus by the names of files."""
        return {file.name: file.read_bytes() for file in sorted(self.corpus.iterdir())}

    def attack(self, content: bytes, folder: Path) -> None:
        """Read `content`. Whatever is raised is a finding."""
        try:
            found = self.read(content, folder)
        except InputError as error:
            if str(error).splitlines() != [str(error)]:
                raise AssertionError(f"an error is one line, not {str(error)!r}") from error
            return
        if self.check:
            self.check(found, folder)


class TooSlow(BaseException):
    """An input took more than its time. No `except Exception` of a reader takes it for damage."""


@contextmanager
def bounded() -> Iterator[None]:
    """Give what runs inside MOST_SECONDS of CPU time and MOST_BYTES of memory more than there is now."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise TooSlow(f"more than {MOST_SECONDS} s of CPU time")

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


def members(content: bytes) -> dict[str, bytes]:
    """Names and contents of an archive's members, as `packed` wrote them, whatever the bytes are."""
    found, at = {}, 0
    while at < len(content):
        name = content[at + 1 : (end := at + 1 + content[at])]
        (length,) = struct.unpack("<I", content[end : end + 4].ljust(4, b"\0"))
        found[name.decode("utf-8", "replace").replace("\0", "-")] = content[end + 4 : end + 4 + length]
        at = end + 4 + length
    return found


def packed(held: dict[str, bytes]) -> bytes:
    """Members one after the other: of an archive that is fuzzed within, where no checksum stops a mutation."""
    names = {name.encode(): content for name, content in held.items()}
    return b"".join(
        bytes([len(name)]) + name + struct.pack("<I", len(content)) + content for name, content in names.items()
    )


INTERESTING = (b"", b"\0", b"\xff", b"\x7f", b"-1", b"0", b"1e309", b"NaN", b"[", b"{", b'"', b"\n", b",", b"\x00" * 8)


def mutated(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """Seeds with some of their bytes replaced, removed, repeated or cut off."""
    numbers = st.integers(-(2**63), 2**64 - 1).map(lambda n: (n % 2**64).to_bytes(8, "little"))
    pieces = st.one_of(st.binary(max_size=8), st.sampled_from(INTERESTING), numbers, st.integers().map(b"%d".__mod__))
    edits = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 16), pieces), max_size=6)

    def apply(seed: bytes, changes: list[tuple[float, int, bytes]]) -> bytes:
        for place, length, piece in changes:
            at = int(place * len(seed))
            seed = seed[:at] + piece + seed[at + length :]
        return seed

    cut = st.builds(lambda seed, share: seed[: int(share * len(seed))], st.sampled_from(seeds), st.floats(0, 1))
    return st.one_of(st.builds(apply, st.sampled_from(seeds), edits), cut, st.binary(max_size=64))
