"""Trace folders as tables and arrays: what is wrong with a file is told in one line, with the file's name.

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
from traces.schema import (
    GROWING,
    OPTIONAL,
    REQUESTS,
    ROUTING,
    TraceMeta,
    requests_schema,
    require_columns,
    require_whole,
    routing_schema,
)

EXTRA = (*OPTIONAL, "token_id", "embedding")
"""What is read only when asked for."""

HEARD = ("token_id", "lookahead")
"""Of these, what policies hear of a run, as far as a trace has it."""

CORE = ("request", "position", "step", "phase", "experts")

AT_ONCE = 16
"""Footers that are fetched over a network at a time."""


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
        """All rows, read by Arrow's threads. Raises InputError."""
        places = [f"{self.location.root}/{name}" for name in self.names]
        with self.location.telling(self.where, "is damaged or cannot be read"):
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
            return self._whole(table, self.where)

    def batches(self, columns: Sequence[str], size: int, file: int = 0, group: int = 0) -> Iterator[pa.Table]:
        """The rows from a row group of a file on, up to `size` of one row group at a time. Raises InputError."""
        for n in range(file, len(self.names)):
            where = self.location.within(self.names[n])
            with (
                self.location.telling(where, "is damaged or cannot be read"),
                self.location.parquet(self.names[n], self._texts) as opened,
            ):
                for g in range(group if n == file else 0, opened.num_row_groups):
                    if not opened.metadata.row_group(g).num_rows:
                        continue  # what is read in blocks has none for it
                    for table in _tables(opened, g, list(columns), size):
                        yield self._whole(table, where)

    @property
    def changed(self) -> InputError:
        """What to raise where the files are not those any more that were opened."""
        return InputError(f"{self.where} was changed while it was read: run it again")

    @property
    def _texts(self) -> list[str]:
        """The columns of texts. They are read as dictionaries: one that repeats takes no memory for it."""
        return [column.name for column in self.schema if pa.types.is_string(column.type)]

    def _whole(self, table: pa.Table, where: str) -> pa.Table:
        """Return the table with its texts as such, once they are known to be short. Raise InputError."""
        require_whole(table, self.schema, where)
        for name in set(self._texts) & set(table.column_names):
            texts = table.column(name).cast(pa.string())
            table = table.set_column(table.schema.get_field_index(name), self.schema.field(name), texts)
        return table


@dataclass(frozen=True)
class Folder:
    """A trace folder that was opened: the files are there, of one trace, and have the columns that it needs."""

    location: Location
    meta: TraceMeta
    listed: Files  # the requests
    routing: Files
    optional: tuple[str, ...]  # those of OPTIONAL that the routing files hold
    embedding: int | None  # size of the prompts' embeddings; None: the trace has none
    fingerprint: str  # of the content, as `_fingerprint` says

    @property
    def path(self) -> str:
        """As it was given."""
        return self.location.path

    def row_columns(self, extra: Iterable[str]) -> list[str]:
        """The routing columns to read where `extra` is wanted: those of it that are there."""
        return [*CORE, *(name for name in extra if name == "token_id" or name in self.optional)]

    def listing(self) -> pd.DataFrame:
        """The requests without their EAMs and embeddings. Raises InputError."""
        return frame(self.listed.table([column.name for column in self.listed.schema if not _is_list(column)]))

    @property
    def list_columns(self) -> list[str]:
        """The columns that `listing` leaves out."""
        return [column.name for column in self.listed.schema if _is_list(column)]

    @property
    def size(self) -> tuple[int, int]:
        """Requests and rows, as the files' footers tell."""
        return len(self.listed), len(self.routing)


def open_folder(path: Path | str) -> Folder:
    """Look at the files of a trace folder, which a path or a URL names.

    Raises InputError with what is wrong, where, and what to do.
    """
    location = Location.of(path)
    requests, parts = _files(location)
    footers = {name: _footer(location, name) for name in requests}
    first, where = footers[requests[0]].schema, location.within(requests[0])
    meta = TraceMeta.decode(first.metadata, where)
    embedding = None
    if (index := first.get_field_index("embedding")) >= 0:
        embedding = getattr(first.field(index).type, "list_size", 0)
        if embedding < 1:
            raise InputError(
                f"{where}: column 'embedding' is {first.field(index).type}, not lists of a fixed size above 0"
            )
    listed = requests_schema(meta, embedding)
    for name in requests:
        require_columns(footers[name].schema, listed, location.within(name))
    if not parts:
        raise InputError(f"{path} is not a whole trace: it has no {ROUTING}/part-*.parquet")
    with ThreadPoolExecutor(AT_ONCE if location.remote else 1) as pool:
        footers.update(zip(parts, pool.map(partial(_footer, location), parts), strict=True))
    for name in parts:
        schema, part = footers[name].schema, location.within(name)
        if TraceMeta.decode(schema.metadata, part) != meta:
            raise InputError(f"{part} belongs to another trace than the {REQUESTS} beside it: their metadata differ")
        require_columns(schema, routing_schema(meta, set(schema.names) & set(OPTIONAL)), part)
    optional = tuple(name for name in OPTIONAL if all(name in footers[part].schema.names for part in parts))

    def files(names: Sequence[str], schema: pa.Schema, where: str) -> Files:
        return Files(location, tuple(names), tuple(footers[name].row_groups for name in names), schema, where)

    folder = Folder(
        location=location,
        meta=meta,
        listed=files(requests, listed, where),
        routing=files(parts, routing_schema(meta, optional), location.within(ROUTING)),
        optional=optional,
        embedding=embedding,
        fingerprint=_fingerprint({name: footer.digest for name, footer in footers.items()}),
    )
    if not len(folder.listed):
        raise InputError(f"{where} lists no requests: the trace is empty")
    return folder


def _tables(file: pq.ParquetFile, group: int, columns: list[str], size: int) -> Iterator[pa.Table]:
    """A row group at once if it has no more than `size` rows: a reader that could continue would hold some memory."""
    if file.metadata.row_group(group).num_rows <= size:
        yield file.read_row_group(group, columns)
    else:
        for batch in file.iter_batches(size, [group], columns):
            yield pa.Table.from_batches([batch])


def require_known(columns: Iterable[str]) -> tuple[str, ...]:
    """`columns`, all of EXTRA; raises InputError."""
    wanted = tuple(columns)
    for name in wanted:
        if name not in EXTRA:
            raise unknown("column", name, EXTRA)
    return wanted


@dataclass(frozen=True)
class Requests:
    """Requests as they are held in memory."""

    frame: pd.DataFrame
    eams: NDArray[np.uint32]  # [2, requests, L * E] prefill and decode
    embedding: NDArray[np.float16] | None  # [requests, size]

    @staticmethod
    def of(table: pa.Table) -> "Requests":
        """Requests from a table of the schema."""
        lists = [column.name for column in table.schema if _is_list(column)]
        arrays = {name: numpy(table.column(name)) for name in lists}
        eams = np.stack([arrays["eam_prefill"], arrays["eam_decode"]])
        return Requests(frame(table.drop_columns(lists)), eams, arrays.get("embedding"))


def frame(table: pa.Table) -> pd.DataFrame:
    """Requests, without their lists, as `traces.trace.Trace.requests` describes them."""
    whole_numbers = {pa.uint32(): pd.Int64Dtype(), pa.int64(): pd.Int64Dtype()}  # floats would round beside a null
    listed: pd.DataFrame = table.to_pandas(types_mapper=whole_numbers.get)
    listed["output_tokens"] = listed["output_tokens"].astype("int64")
    return listed


def numpy(column: pa.ChunkedArray) -> NDArray[Any]:
    """[rows], or [rows, width] of a fixed-size list; null token ids as -1."""
    if not pa.types.is_fixed_size_list(column.type):
        return np.asarray((column.fill_null(-1) if column.null_count else column).to_numpy())
    width = column.type.list_size
    chunks = [chunk.flatten() for chunk in column.chunks]
    if not chunks:
        return np.empty((0, width), column.type.value_type.to_pandas_dtype())
    parts = [chunk.to_numpy(zero_copy_only=True) for chunk in chunks]
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.asarray(flat.reshape(-1, width))


def _is_list(column: pa.Field) -> bool:
    return bool(pa.types.is_fixed_size_list(column.type))


def _files(location: Location) -> tuple[list[str], list[str]]:
    """The requests' files and the routing files of a folder."""
    path, names = location.path, location.names()
    if names is None:
        raise InputError(f"no trace at {path}: there is no such folder (`moe-trace record` makes one)")
    requests = [REQUESTS] if REQUESTS in names else _parts(location, GROWING)
    if not requests:
        raise InputError(f"{path} is not a trace: it has no {REQUESTS} (`moe-trace record` or `import` makes one)")
    return requests, _parts(location, ROUTING)


def _parts(location: Location, folder: str) -> list[str]:
    return [f"{folder}/{name}" for name in location.names(folder) or () if fnmatchcase(name, "part-*.parquet")]


@dataclass(frozen=True)
class _Footer:
    """What the end of a Parquet file tells."""

    schema: pa.Schema
    row_groups: tuple[int, ...]  # rows of each
    digest: bytes


def _footer(location: Location, name: str) -> _Footer:
    where = location.within(name)
    tail, size = location.tail(name)
    if not size:
        raise InputError(f"{where} is empty (0 bytes)")
    with location.telling(where, "is truncated, or no Parquet file"):
        file = pq.ParquetFile(pa.BufferReader(tail))
        rows = tuple(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        return _Footer(file.schema_arrow, rows, sha256(size.to_bytes(8) + tail).digest())


def _fingerprint(files: dict[str, bytes]) -> str:
    """Tells whether a trace was replaced by another: 16 hex digits of the files' names, sizes and last bytes.

    The last bytes hold the footer, which lists how long each column is and the least and greatest of it. What is in
    the middle of a file counts by its length alone; where the folder lies, and when it was written, does not count.
    """
    return sha256(b"".join(name.encode() + b"\0" + files[name] for name in sorted(files))).hexdigest()[:16]
