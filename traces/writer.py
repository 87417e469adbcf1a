"""Write a trace folder while it grows, so that what was finished stays readable whatever happens next.

No file has its final name before it is whole: routing and requests are written beside their places and
renamed, requests last. They are the commit record: readers leave out routing of requests that are not listed,
so a kill between the two renames loses nothing that was readable. The last routing file is rewritten until it
fills one row group.
"""

import os
import re
import tempfile
import time
from pathlib import Path
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.errors import InputError
from traces.schema import REQUESTS, ROUTING, TraceMeta, requests_schema, routing_schema
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

ROW_GROUP = 65_536
FLUSH_SECONDS = 5.0
"""Requests that finish sooner after the last flush wait for the next one, or for close()."""


def check_target(folder: Path, overwrite: bool) -> None:
    """InputError if a trace cannot be written at `folder`; changes nothing."""
    if folder.exists():
        if not folder.is_dir():
            raise InputError(f"{folder} is a file; choose another folder with --out")
        if any(folder.iterdir()):
            if _left_by_writer(folder) is None:
                raise InputError(f"{folder} is not empty and not a trace: it is left alone; choose another with --out")
            if not overwrite:
                raise InputError(
                    f"{folder} already holds a trace; replace it with --overwrite, or choose another --out"
                )
    base = folder
    while not base.exists():
        base = base.parent
    try:
        with tempfile.TemporaryFile(dir=base):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write {folder}: {base}: {error.strerror}; choose another folder with --out"
        ) from error


class TraceWriter:
    """Write requests to a trace folder as they finish; the folder appears with the first flush.

    A trace that is already there is removed at that moment, and only if `overwrite` is set. Use as a context
    manager: leaving it, also by an exception, writes what is still held.
    """

    def __init__(self, folder: Path, meta: TraceMeta, overwrite: bool = False):
        check_target(folder, overwrite)
        self.folder = folder
        self.meta = meta
        self.written = 0  # requests readable in the folder
        self.added = 0
        self._part = 0
        self._rows: list[pa.Table] = []  # of the routing file that still grows
        self._requests: list[pa.Table] = []
        self._flushed = time.monotonic()
        self._weights: bool | None = None

    def add(self, trace: Trace) -> None:
        """Append the requests of `trace`, a piece of the whole, its rows in the order of their steps."""
        weights = trace.weights is not None
        if trace.meta != self.meta or self._weights not in (None, weights):
            raise ValueError("all pieces of a trace share its meta, and all or none have weights")
        self._weights = weights
        self._rows.append(_routing_table(trace, first=self.added))
        self._requests.append(_requests_table(trace))
        self.added += len(trace.requests)
        if sum(map(len, self._rows)) >= ROW_GROUP or time.monotonic() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Make all requests added so far readable in the folder."""
        if self.added == self.written:
            return
        try:
            if not self.written:
                self._make_folder()
            rows = pa.concat_tables(self._rows)
            requests = pa.concat_tables(self._requests)
            _write(
                {
                    self.folder / ROUTING / f"part-{self._part:05d}.parquet": rows,
                    self.folder / REQUESTS: requests,
                }
            )
        except OSError as error:
            raise InputError(
                f"cannot write {self.folder}: {error.strerror or error}; {self.written} requests are readable there"
            ) from error
        self.written = self.added
        self._rows, self._requests = [rows], [requests]
        if len(rows) >= ROW_GROUP:
            self._part, self._rows = self._part + 1, []
        self._flushed = time.monotonic()

    close = flush

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_folder(self) -> None:
        """The empty folder; an old trace in it goes, requests first, so that it is never half a trace."""
        (self.folder / ROUTING).mkdir(parents=True, exist_ok=True)
        for file in _left_by_writer(self.folder) or ():
            file.unlink()


def write_trace(trace: Trace, folder: Path, overwrite: bool = False) -> None:
    """Write a whole trace at once."""
    with TraceWriter(folder, trace.meta, overwrite) as writer:
        writer.add(trace)


def _left_by_writer(folder: Path) -> list[Path] | None:
    """The files of a trace, also of one whose writer was killed, requests first; None if the folder holds others.

    What has its final name must also tell that it is of a trace: one such file is enough.
    """
    routing = folder / ROUTING
    files = sorted(set(folder.iterdir()) - {routing}, key=lambda file: file.name != REQUESTS)
    parts = sorted(routing.iterdir()) if routing.is_dir() else []
    if not {file.name for file in files} <= {REQUESTS, _temporary(folder / REQUESTS).name}:
        return None
    if not all(_PART.fullmatch(part.name) for part in parts):
        return None
    final = [file for file in files + parts if not file.name.startswith(".")]
    return files + parts if not final or any(map(_is_of_trace, final)) else None


_PART = re.compile(r"part-\d+\.parquet|\.part-\d+\.parquet\.tmp")
"""Names of routing files, whole or being written."""


def _is_of_trace(file: Path) -> bool:
    try:
        TraceMeta.decode(pq.read_schema(str(file)).metadata, str(file))
    except (InputError, OSError, pa.ArrowException):
        return False
    return True


def _temporary(path: Path) -> Path:
    """Where a file is written until it is whole."""
    return path.with_name(f".{path.name}.tmp")


def _write(tables: dict[Path, pa.Table]) -> None:
    """Write all tables under temporary names, then give them their own, in order."""
    try:
        for path, table in tables.items():
            pq.write_table(
                table,
                _temporary(path),
                row_group_size=ROW_GROUP,
                compression="zstd",
                compression_level=3,
                use_dictionary=[name for name in table.column_names if name != "weights"],
            )
        for path in tables:
            os.replace(_temporary(path), path)
    finally:
        for path in tables:
            _temporary(path).unlink(missing_ok=True)


def _routing_table(trace: Trace, first: int) -> pa.Table:
    """Rows in the order of execution; `first` is the index of the trace's first request in the whole."""
    order = np.argsort(trace.step, kind="stable")
    request = np.repeat(np.arange(len(trace.requests), dtype=np.uint32) + first, np.diff(trace.offsets))
    width = trace.layers * trace.top_k
    token_id = np.full(len(order), -1, np.int32) if trace.token_id is None else trace.token_id[order]
    columns = [
        pa.array(request[order]),
        pa.array(trace.position[order]),
        pa.array(trace.step[order]),
        pa.array(trace.phase[order]),
        pa.array(token_id, mask=token_id < 0),
        pa.FixedSizeListArray.from_arrays(pa.array(trace.experts[order].ravel()), width),
    ]
    if trace.weights is not None:
        columns.append(pa.FixedSizeListArray.from_arrays(pa.array(trace.weights[order].ravel()), width))
    return pa.Table.from_arrays(columns, schema=routing_schema(trace.meta, trace.weights is not None))


def _requests_table(trace: Trace) -> pa.Table:
    schema = requests_schema(trace.meta)
    columns = [pa.array(trace.requests[name], from_pandas=True).cast(schema.field(name).type) for name in _LISTED]
    for phase in (PREFILL, DECODE):
        eams = trace.eams(phase).astype(np.uint32)
        columns.append(pa.FixedSizeListArray.from_arrays(pa.array(eams.ravel()), eams[0].size))
    return pa.Table.from_arrays(columns, schema=schema)


_LISTED = ("id", "dataset", "task", "prompt_tokens", "output_tokens", "arrival_ns", "mode")
