"""A timeline file: slices and counters on named tracks, for https://ui.perfetto.dev to open as it is.

JSON of Chrome's trace events ("Trace Event Format", Google). Times are microseconds with three decimals: no nanosecond
is lost. Perfetto looks names up by thread alone, so a number is never used twice. Events come in any order of time; of
slices on one track that begin together, the outer goes first. A simulated and a measured run may share a file.
"""

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple, TextIO

from traces.output import check_file, replacing

Args = Mapping[str, object]
"""What a slice shows when it is selected; None is left out."""


class Track(NamedTuple):
    """A named line of slices, which nest or follow one another."""

    process: int
    id: int


class Timeline:
    """Writes the events of one file, those between `open` and `close`; before and after they are dropped.

    A slice that began before is cut where the timeline opens. Times: ns, not negative.
    """

    def __init__(self, file: TextIO) -> None:
        self._write = file.write
        self._numbers = count(1)
        self._between = "\n"
        self._since = 0
        self.is_open = False

    def process(self, name: str) -> int:
        process = next(self._numbers)
        self._name("process", name, process, process)
        return process

    def track(self, process: int, name: str) -> Track:
        track = Track(process, next(self._numbers))
        self._name("thread", name, process, track.id)
        return track

    def open(self, now: int) -> None:
        self.is_open, self._since = True, now

    def close(self) -> None:
        self.is_open = False

    def slice(self, track: Track, name: str, began: int, ended: int, args: Args) -> None:
        if not self.is_open or (ended <= self._since and began < self._since):
            return
        began = max(began, self._since)
        where = f'"pid":{track.process},"tid":{track.id},"ts":{_us(began)},"dur":{_us(ended - began)}'
        self._event(f'"ph":"X","name":{json.dumps(name)},{where},"args":{_shown(args)}')

    def counter(self, process: int, name: str, at: int, values: Mapping[str, int]) -> None:
        if self.is_open:
            where = f'"pid":{process},"ts":{_us(at)}'
            self._event(f'"ph":"C","name":{json.dumps(name)},{where},"args":{json.dumps(values)}')

    def _name(self, kind: str, name: str, pid: int, tid: int) -> None:
        for what, args in ((f"{kind}_name", {"name": name}), (f"{kind}_sort_index", {"sort_index": tid})):
            self._event(f'"ph":"M","name":"{what}","pid":{pid},"tid":{tid},"args":{json.dumps(args)}')

    def _event(self, body: str) -> None:
        self._write(f"{self._between}{{{body}}}")
        self._between = ",\n"


@contextmanager
def writing(path: Path, about: Callable[[], Args], overwrite: bool = False) -> Iterator[Timeline]:
    """Yield a timeline at `path`, gzipped where the name ends in .gz; whole or not at all. Raise InputError.

    about: called at the end, what the file states of itself (`otherData`).
    """
    check_file(path, overwrite)
    with replacing(path, overwrite=overwrite) as part, _opened(part, zipped=path.suffix == ".gz") as file:
        file.write('{"traceEvents":[')
        yield Timeline(file)
        file.write(f'\n],"otherData":{_shown(about())}}}\n')


def _opened(path: Path, zipped: bool) -> TextIO:
    return gzip.open(path, "wt", 6, "utf-8") if zipped else path.open("w", encoding="utf-8")


def _us(ns: int) -> str:
    return f"{ns // 1_000}.{ns % 1_000:03d}"


def _shown(args: Args) -> str:
    return json.dumps({name: value for name, value in args.items() if value is not None})
