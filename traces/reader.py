"""Trace folders as tables and arrays; what is wrong with a file is one line, with the file's name.

Parquet is decoded once, by Arrow's threads; ids stay in the type that they have on disk. The requests are the
commit record: routing of requests that they do not list was being written when the writer was killed, and is
left out. They lie in requests.parquet, or in requests/ while the trace grows.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from traces.errors import InputError, unknown
from traces.location import Location
from traces.schema import GROWING, OPTIONAL, REQUESTS, ROUTING, TraceMeta, requests_schema, routing_schema

EXTRA = (*OPTIONAL, "token_id")
"""What is read only when it is requested."""

RUN = ("token_id", "weights", "lookahead", "lookahead_scores", "drafted", "candidates", "scores")
"""Of these, what runs read, as far as a trace has it; the last two where routing is bent."""

CORE = ("request", "position", "step", "phase", "experts")

AT_ONCE = 16
"""Footers that are fetched over a network at a time."""


def changed(what: object) -> InputError:
    """Return what to raise where files are not those any more that were opened."""
    return InputError(f"{what} was changed while it was read: run it again")


@dataclass(frozen=True)
class Files:
    """The files of a trace folder that together are one table, and what each holds by its footer."""

    location: Location
    names: tuple[str, ...]  # within the folder
    row_groups: tuple[tuple[int, ...], ...]  # rows of each row group of each file
    schema: pa.Schema  # the columns that a trace may have there
    where: str  # the table, for messages

    def __len__(self) -> int:
        return sum(map(sum, self.row_groups))

    def table(self, columns: Sequence[str]) -> pa.Table:
        """Return all rows, read by Arrow's threads. Raises InputError."""
        places = [f"{self.location.root}/{name}" for name in self.names]
        with self.location.reading(self.where, "is damaged or cannot be read"):
            table = pq.read_table(
                places,
                columns=list(columns),
                partitioning=None,
                filesystem=self.location.filesystem,
                read_dictionary=self._texts,
                page_checksum_verification=True,
            )
            if len(table) != len(self):
                raise self.changed
            return self._cast(table)

    def batches(self, columns: Sequence[str], size: int, file: int = 0, group: int = 0) -> Iterator[pa.Table]:
        """Yield the rows from a row group of a file on, up to `size` of one row group at a time. Raises InputError."""
        for n in range(file, len(self.names)):
            with (
                self.location.reading(self.location.within(self.names[n]), "is damaged or cannot be read"),
                self.location.parquet(self.names[n], self._texts) as opened,
            ):
                for g in range(group if n == file else 0, opened.num_row_groups):
                    if not opened.metadata.row_group(g).num_rows:
                        continue  # what is read in blocks has none for it
                    if opened.metadata.row_group(g).num_rows <= size:  # at once: a reader that continues holds memory
                        yield self._cast(opened.read_row_group(g, list(columns)))
                        continue
                    for batch in opened.iter_batches(size, [g], list(columns)):
                        yield self._cast(pa.Table.from_batches([batch]))

    @property
    def changed(self) -> InputError:
        return changed(self.where)

    @property
    def _texts(self) -> list[str]:
        """The columns of texts. They are read as dictionaries: one that repeats takes no memory for it."""
        return [column.name for column in self.schema if pa.types.is_string(column.type)]

    def _cast(self, table: pa.Table) -> pa.Table:
        """Return the table with the types that a trace has. Arrow raises for others, and for nulls."""
        return table.cast(pa.schema([self.schema.field(name) for name in table.column_names]))


@dataclass(frozen=True)
class Folder:
    """A trace folder that was opened: the files are there, of one trace, and have the columns that it needs."""

    location: Location
    meta: TraceMeta
    listed: Files  # the requests
    routing: Files
    optional: tuple[str, ...]  # those of OPTIONAL that the routing files hold
    fingerprint: str  # of the files' names, sizes and last bytes: a trace that took this one's place has another

    @property
    def path(self) -> str:
        return self.location.path

    def row_columns(self, extra: Iterable[str]) -> list[str]:
        """Return the routing columns to read where `extra` is wanted: those of it that are there."""
        return [*CORE, *(name for name in extra if name == "token_id" or name in self.optional)]

    def listing(self) -> pd.DataFrame:
        """Return the requests without their EAMs. Raises InputError."""
        return frame(self.listed.table([name for name in self.listed.schema.names if name not in self.list_columns]))

    @property
    def list_columns(self) -> list[str]:
        return [column.name for column in self.listed.schema if pa.types.is_fixed_size_list(column.type)]

    @property
    def size(self) -> tuple[int, int]:
        return len(self.listed), len(self.routing)


def open_folder(path: Path | str) -> Folder:
    """Look at the files of a trace folder, which a path or a URL names. Raise InputError."""
    location = Location.of(path)
    requests, parts = _files(location)
    with ThreadPoolExecutor(AT_ONCE if location.remote else 1) as pool:
        names = [*requests, *parts]
        footers = dict(zip(names, pool.map(partial(_footer, location), names), strict=True))
    where, first = location.within(requests[0]), footers[requests[0]].schema
    meta = TraceMeta.decode(first.metadata, where)
    listed = requests_schema(meta)
    for name, footer in footers.items():
        place = location.within(name)
        if TraceMeta.decode(footer.schema.metadata, place) != meta:
            raise InputError(f"{place} belongs to another trace than the {REQUESTS} beside it: their metadata differ")
        wanted = listed if name in requests else routing_schema(meta)
        if lacking := [column for column in wanted.names if column not in footer.schema.names]:
            raise InputError(f"{place} lacks the column {lacking[0]!r}: it is no part of a trace, or was changed")
    known = [name for name in OPTIONAL if meta.lookahead or not name.startswith("lookahead")]
    optional = tuple(name for name in known if all(name in footers[part].schema.names for part in parts))

    def files(names: Sequence[str], schema: pa.Schema, where: str) -> Files:
        return Files(location, tuple(names), tuple(footers[name].row_groups for name in names), schema, where)

    # the last bytes hold the footer, which lists how long each column is and its least and greatest value
    digest = sha256(b"".join(name.encode() + b"\0" + footers[name].digest for name in sorted(footers)))
    folder = Folder(
        location=location,
        meta=meta,
        listed=files(requests, listed, where),
        routing=files(parts, routing_schema(meta, optional), location.within(ROUTING)),
        optional=optional,
        fingerprint=digest.hexdigest()[:16],
    )
    if not len(folder.listed):
        raise InputError(f"{where} lists no requests: the trace is empty")
    return folder


def require_known(columns: Iterable[str]) -> tuple[str, ...]:
    """Return `columns`, all of EXTRA; raises InputError."""
    wanted = tuple(columns)
    for name in wanted:
        if name not in EXTRA:
            raise unknown("column", name, EXTRA)
    return wanted


def frame(table: pa.Table) -> pd.DataFrame:
    """Return requests, without their lists, as `traces.trace.Trace.requests` describes them."""
    whole_numbers = {pa.uint32(): pd.Int64Dtype(), pa.int64(): pd.Int64Dtype()}  # floats would round beside a null
    listed: pd.DataFrame = table.to_pandas(types_mapper=whole_numbers.get)
    listed["output_tokens"] = listed["output_tokens"].astype("int64")
    return listed


def numpy(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return [rows], or [rows, width] of a fixed-size list; null token ids as -1."""
    if not pa.types.is_fixed_size_list(column.type):
        return np.asarray((column.fill_null(-1) if column.null_count else column).to_numpy())
    width = column.type.list_size
    chunks = [chunk.flatten() for chunk in column.chunks]
    if not chunks:
        return np.empty((0, width), column.type.value_type.to_pandas_dtype())
    parts = [chunk.to_numpy(zero_copy_only=True) for chunk in chunks]
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.asarray(flat.reshape(-1, width))


def by_request(rows: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return rows by column, those of each request together and in their order."""
    request = rows["request"]
    if (request[1:] >= request[:-1]).all():
        return rows
    order = np.argsort(request, kind="stable")
    return {name: array[order] for name, array in rows.items()}


def _files(location: Location) -> tuple[list[str], list[str]]:
    path, names = location.path, location.names()
    if names is None:
        raise InputError(f"no trace at {path}: there is no such folder (`moe-trace record` makes one)")
    requests = [REQUESTS] if REQUESTS in names else _parts(location, GROWING)
    parts = _parts(location, ROUTING)
    if not requests or not parts:
        missing = f"{ROUTING}/part-*.parquet" if requests else REQUESTS
        raise InputError(f"{path} is not a trace: it has no {missing} (`moe-trace record` or `import` makes one)")
    return requests, parts


def _parts(location: Location, folder: str) -> list[str]:
    names = [name for name in location.names(folder) or () if fnmatchcase(name, "part-*.parquet")]
    for number, name in enumerate(names):
        if name != f"part-{number:05d}.parquet":
            raise InputError(f"{location.within(folder)} lacks part-{number:05d}.parquet: the trace is not whole")
    return [f"{folder}/{name}" for name in names]


@dataclass(frozen=True)
class _Footer:
    """The end of a Parquet file."""

    schema: pa.Schema
    row_groups: tuple[int, ...]  # rows of each
    digest: bytes


def _footer(location: Location, name: str) -> _Footer:
    where = location.within(name)
    tail, size = location.tail(name)
    with location.reading(where, "is truncated, or no Parquet file"):
        file = pq.ParquetFile(pa.BufferReader(tail))
        rows = tuple(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        return _Footer(file.schema_arrow, rows, sha256(size.to_bytes(8) + tail).digest())
