"""Write a trace folder while it grows, so that what was finished stays readable whatever happens next.

Routing and requests are written beside their places and renamed when they are whole, requests last. They are the
commit record: readers leave out routing of requests that are not listed. Both grow as rows of files, of which only the
last is held in memory and rewritten; closing joins those of the requests into requests.parquet.
"""

import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from traces import parquet
from traces.check import FLOATS, check_finite
from traces.errors import InputError, refuse
from traces.index import Index
from traces.location import Location
from traces.output import ELSEWHERE, LOCK, only_writer, refuse_address, unlink_link
from traces.reader import open_folder
from traces.schema import GROWING, OPTIONAL, REQUESTS, ROUTING, TraceMeta, requests_schema, routing_schema, row_bytes
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

UNFINISHED = ".moe-expert-cache.part"
"""Folder in that of a trace, in which another one is written until it is whole and takes its place."""

FILE_ROWS = 65_536  # of a routing file, at most
ROUTING_BYTES = 2**26  # of the rows in a routing file, about: wide rows make fewer
REQUEST_BYTES = 2**24  # of the EAMs in a file of requests while the trace grows
FLUSH_SECONDS = 5.0  # requests that finish sooner after the last flush wait for the next one, or for close()
FLUSH_SHARE = 0.1  # of the time, at most, is spent on flushing: after a slow flush the next one waits longer


def check_target(folder: Path, overwrite: bool, resume: bool = False, read: Iterable[Location] = ()) -> None:
    """Raise InputError if no trace can be written at `folder`, or if it is one of those that are `read` for it."""
    refuse_address(folder)
    files, exists = _files(folder), folder.exists()
    is_read = exists and any(not each.remote and folder.samefile(each.root) for each in read)
    held = f"{folder} already holds a trace: replace it with --overwrite, or choose another folder"
    continues = "`record --resume` continues with a recording that was interrupted"
    refuse(
        (exists and not folder.is_dir(), f"{folder} is a file; {ELSEWHERE}"),
        (is_read, f"{folder} is read and cannot be written at the same time; choose another folder with --out"),
        (files is None, f"{folder} is not empty and not a trace: it is left alone; {ELSEWHERE}"),
        (files and not overwrite and not resume, f"{held}; {continues}"),
    )


def _files(folder: Path) -> list[Path] | None:
    """Return the files of a trace, also of one whose writer was killed, requests first; None if there are others."""
    if not folder.is_dir():
        return []
    inner = [folder / GROWING, folder / ROUTING]
    own = {folder / LOCK, folder / UNFINISHED, *inner}
    files = sorted(set(folder.iterdir()) - own, key=lambda file: file.name != REQUESTS)
    parts = [part for place in inner if place.is_dir() for part in sorted(place.iterdir())]
    known = {file.name for file in files} <= {REQUESTS, parquet.temporary(folder / REQUESTS).name}
    return files + parts if known and all(parquet.PART.fullmatch(part.name) for part in parts) else None


class TraceWriter:
    """Write requests to a trace folder as they finish; the trace appears with the first flush.

    An old trace is removed at that moment, and only with `overwrite`; with `resume` its requests are kept, and
    `written` counts them. As a context manager it writes what is still held, also after an exception. No other process
    writes there meanwhile. With `whole` the trace appears, and an old one goes, when it is closed without an exception.
    """

    def __init__(
        self, folder: Path, meta: TraceMeta, overwrite: bool = False, resume: bool = False, whole: bool = False
    ):
        check_target(folder, overwrite, resume)
        self.folder = folder
        self.meta = meta
        self._place = folder / UNFINISHED if whole else folder
        self.written = 0  # requests readable in the folder
        self.added = 0
        self.next_step = 0  # after the steps of the requests that were resumed
        self._rows = parquet.Parts(self._place / ROUTING, FILE_ROWS)
        self._requests = parquet.Parts(self._place / GROWING, max(1, REQUEST_BYTES // (8 * meta.layers * meta.experts)))
        self._next_flush = time.monotonic() + FLUSH_SECONDS
        with ExitStack() as kept:
            kept.enter_context(only_writer(folder))
            check_target(folder, overwrite, resume)  # another writer may have ended meanwhile
            if resume:
                self._resume()
            self._kept = kept.pop_all()

    def add(self, trace: Trace) -> None:
        """Append the requests of `trace`, a piece of the whole, its rows in the order of their steps."""
        optional = {name for name in OPTIONAL if getattr(trace, name) is not None}
        for name in FLOATS & optional:
            check_finite(name, getattr(trace, name), f"{self.folder}, not written")
        self._rows.limit = _rows_of_a_file(self.meta, optional)
        self._rows.add(_routing_table(trace, first=self.added))
        self._requests.add(_requests_table(trace))
        self.added += len(trace.requests)
        full = self._rows.rows >= self._rows.limit or self._requests.rows >= self._requests.limit
        if full or time.monotonic() >= self._next_flush:
            self.flush()

    def flush(self) -> None:
        """Write all requests added so far; they are readable then, unless the trace is to appear whole."""
        if self.added == self.written:
            return
        began = time.monotonic()
        with self._writing():
            if not self.written:
                unlink_link(self.folder / UNFINISHED)
                shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)  # of a process that was killed
                if self._place == self.folder:
                    self._remove_old()
                for folder in (ROUTING, GROWING):
                    (self._place / folder).mkdir(parents=True, exist_ok=True)
            for files in (self._rows, self._requests):
                if files.grown:
                    parquet.write(files.path, files.table())
        self.written = self.added
        self._rows.flushed()
        self._requests.flushed()
        ended = time.monotonic()
        self._next_flush = ended + max(FLUSH_SECONDS, (ended - began) / FLUSH_SHARE)

    def close(self, write: bool = True) -> None:
        """Flush, join the requests' files into requests.parquet, and let others write there."""
        with self._kept:
            try:
                if write:
                    self._finish()
            finally:
                shutil.rmtree(self.folder / UNFINISHED, ignore_errors=True)

    def _finish(self) -> None:
        self.flush()
        growing = self._place / GROWING
        if not growing.is_dir():
            return
        with self._writing():
            if files := sorted(growing.glob("part-*.parquet")):
                parquet.join(files, self._place / REQUESTS)
            shutil.rmtree(growing)
            if self._place == self.folder:
                return
            self._remove_old()  # whose place the whole trace takes, requests last
            shutil.rmtree(self.folder / GROWING, ignore_errors=True)  # of a recording that was cut off
            (self.folder / ROUTING).mkdir(exist_ok=True)
            for part in sorted((self._place / ROUTING).iterdir()):
                os.replace(part, self.folder / ROUTING / part.name)
            os.replace(self._place / REQUESTS, self.folder / REQUESTS)

    def _remove_old(self) -> None:
        """Remove an old trace, requests first, so that it is never half a trace; links are not followed."""
        for folder in (ROUTING, GROWING):
            unlink_link(self.folder / folder)
        for file in _files(self.folder) or ():
            file.unlink()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(write=error is None or self._place == self.folder)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            left = (
                f"{self.written} requests are readable there" if self._place == self.folder else "no new trace is there"
            )
            raise InputError(f"cannot write {self.folder}: {error.strerror or error}; {left}") from error

    def _resume(self) -> None:
        """Continue the trace that is there: its requests stay, routing of others goes."""
        if not (self.folder / REQUESTS).exists() and not any((self.folder / GROWING).glob("part-*.parquet")):
            return  # killed before any request was written
        held = open_folder(self.folder)
        if held.meta != self.meta:
            a, b = ({**asdict(meta), **meta.settings, "settings": None} for meta in (held.meta, self.meta))
            odd = [f"{key} was {a.get(key)!r}, now {b.get(key)!r}" for key in {**a, **b} if a.get(key) != b.get(key)]
            raise InputError(f"{self.folder} cannot be resumed, it was recorded otherwise: {'; '.join(odd)}")
        try:
            Index.of(held, held.listing())
        except InputError as error:
            raise InputError(f"{self.folder} cannot be resumed: {error}; start again with --overwrite") from error
        self.written = self.added = len(held.listed)
        with self._writing():
            for folder in (ROUTING, GROWING):
                (self.folder / folder).mkdir(exist_ok=True)
            for file in _files(self.folder) or ():
                if file.name.startswith("."):
                    file.unlink()
            if (whole := self.folder / REQUESTS).exists():
                for file in (self.folder / GROWING).iterdir():
                    file.unlink()
                os.replace(whole, self._requests.path)
            self._rows.limit = _rows_of_a_file(self.meta, held.optional)
            self._requests.reopen(held.listed.schema)
            last = self._rows.reopen(routing_schema(self.meta, held.optional), keep=self.written)
        self.next_step = int(last.column("step").to_numpy().astype(np.int64).max(initial=-1)) + 1


def _rows_of_a_file(meta: TraceMeta, optional: Iterable[str]) -> int:
    return min(FILE_ROWS, max(1, ROUTING_BYTES // row_bytes(routing_schema(meta, optional))))


def write_trace(trace: Trace, folder: Path, overwrite: bool = False) -> None:
    write_traces(iter([trace]), folder, overwrite)


def write_traces(traces: Iterator[Trace], folder: Path, overwrite: bool = False) -> None:
    """Write pieces of a trace, one or more, which appears when all are written."""
    first = next(traces)
    with TraceWriter(folder, first.meta, overwrite, whole=True) as writer:
        for trace in chain([first], traces):
            writer.add(trace)


def _routing_table(trace: Trace, first: int) -> pa.Table:
    """Return rows in the order of execution; `first` is the index of the trace's first request in the whole."""
    order = np.argsort(trace.step, kind="stable")
    request = np.repeat(np.arange(len(trace.requests), dtype=np.uint32) + first, np.diff(trace.offsets))
    token_id = np.full(len(order), -1, np.int32) if trace.token_id is None else trace.token_id[order]
    columns = [
        pa.array(request[order]),
        pa.array(trace.position[order]),
        pa.array(trace.step[order]),
        pa.array(trace.phase[order]),
        pa.array(token_id, mask=token_id < 0),
        _lists(trace.experts[order], trace.layers * trace.top_k),
    ]
    held = {name: array for name in OPTIONAL if (array := getattr(trace, name)) is not None}
    columns += [
        _lists(array[order], math.prod(array.shape[1:])) if array.ndim > 1 else pa.array(array[order])
        for array in held.values()
    ]
    return pa.Table.from_arrays(columns, schema=routing_schema(trace.meta, held))


def _requests_table(trace: Trace) -> pa.Table:
    schema = requests_schema(trace.meta)
    columns = [pa.array(trace.requests[name], from_pandas=True).cast(schema.field(name).type) for name in _LISTED]
    width = trace.layers * trace.num_experts
    columns += [_lists(trace.eams(phase).astype(np.uint32), width) for phase in (PREFILL, DECODE)]
    return pa.Table.from_arrays(columns, schema=schema)


def _lists(array: NDArray[np.generic], width: int) -> pa.Array:
    """Return [rows, ...] as lists of `width` values each."""
    return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), width)


_LISTED = ("id", "dataset", "task", "prompt_tokens", "output_tokens", "arrival_ns", "mode")
