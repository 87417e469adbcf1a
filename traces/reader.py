"""Trace folders as tables and arrays: what is wrong with a file is told in one line, with the file's name.

Parquet is decoded once, by Arrow's threads; ids stay in the type that they have on disk. The requests are the
commit record: routing of requests that they do not list was being written when the writer was killed, and is
left out. They lie in requests.parquet, or in requests/ while the trace grows.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from traces.errors import InputError, unknown
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

CORE = ("request", "position", "step", "phase", "experts")


@dataclass(frozen=True)
class Folder:
    """A trace folder that was opened: the files are there, of one trace, and have the columns that it needs."""

    path: Path
    meta: TraceMeta
    request_files: tuple[Path, ...]
    parts: tuple[Path, ...]
    optional: tuple[str, ...]  # those of OPTIONAL that the routing files hold
    embedding: int | None  # size of the prompts' embeddings; None: the trace has none

    def row_columns(self, extra: Iterable[str]) -> list[str]:
        """The routing columns to read where `extra` is wanted: those of it that are there."""
        return [*CORE, *(name for name in extra if name == "token_id" or name in self.optional)]

    def requests(self) -> pa.Table:
        """All requests."""
        table = pa.concat_tables(_read(file) for file in self.request_files)
        self._check_requests(table)
        return table

    def labels(self) -> pd.DataFrame:
        """The id, dataset and task of each request, without the EAMs."""
        tables = [pq.read_table(str(file), columns=["id", "dataset", "task"]) for file in self.request_files]
        labels: pd.DataFrame = pa.concat_tables(tables).to_pandas()
        return labels

    @property
    def size(self) -> tuple[int, int]:
        """Requests and rows, as the files' footers tell."""
        counts = [
            sum(pq.read_metadata(str(file)).num_rows for file in files) for files in (self.request_files, self.parts)
        ]
        return counts[0], counts[1]

    def rows(self, extra: Iterable[str]) -> pa.Table:
        """All rows, those of requests that are not listed included."""
        names, where = self.row_columns(extra), self.path / ROUTING
        try:
            table = pq.read_table([str(part) for part in self.parts], columns=names, partitioning=None)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{where} cannot be read, a file in it is damaged: {error}") from error
        self._check_rows(table)
        return table

    def request_batches(self, size: int) -> Iterator[pa.Table]:
        """The requests, `size` at a time."""
        for file in self.request_files:
            for table in _batches(file, None, size):
                self._check_requests(table)
                yield table

    def row_batches(self, columns: list[str], size: int) -> Iterator[pa.Table]:
        """The rows, up to `size` at a time."""
        for part in self.parts:
            for table in _batches(part, columns, size):
                self._check_rows(table)
                yield table

    def _check_requests(self, table: pa.Table) -> None:
        require_whole(table, requests_schema(self.meta, self.embedding), str(self.request_files[0]))

    def _check_rows(self, table: pa.Table) -> None:
        require_whole(table, routing_schema(self.meta, self.optional), str(self.path / ROUTING))


def open_folder(path: Path) -> Folder:
    """Look at a trace folder's files; raises InputError with what is wrong, where, and what to do."""
    request_files, parts = _files(path)
    schemas = [_open(file) for file in request_files]
    meta = TraceMeta.decode(schemas[0].metadata, str(request_files[0]))
    embedding = None
    if (index := schemas[0].get_field_index("embedding")) >= 0:
        embedding = getattr(schemas[0].field(index).type, "list_size", 0)
    for file, schema in zip(request_files, schemas, strict=True):
        require_columns(schema, requests_schema(meta, embedding), str(file))
    if not parts:
        raise InputError(f"{path} is not a whole trace: it has no {ROUTING}/part-*.parquet")
    held = [_open(part) for part in parts]
    for part, schema in zip(parts, held, strict=True):
        if TraceMeta.decode(schema.metadata, str(part)) != meta:
            raise InputError(f"{part} belongs to another trace than the {REQUESTS} beside it: their metadata differ")
        require_columns(schema, routing_schema(meta, set(schema.names) & set(OPTIONAL)), str(part))
    optional = tuple(name for name in OPTIONAL if all(name in schema.names for schema in held))
    folder = Folder(path, meta, tuple(request_files), tuple(parts), optional, embedding)
    if not folder.size[0]:
        raise InputError(f"{request_files[0]} lists no requests: the trace is empty")
    return folder


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
        lists = [name for name in ("eam_prefill", "eam_decode", "embedding") if name in table.column_names]
        arrays = {name: numpy(table.column(name)) for name in lists}
        whole_numbers = {pa.uint32(): pd.Int64Dtype(), pa.int64(): pd.Int64Dtype()}  # floats would round beside a null
        frame = table.drop_columns(lists).to_pandas(types_mapper=whole_numbers.get)
        frame["output_tokens"] = frame["output_tokens"].astype("int64")
        eams = np.stack([arrays["eam_prefill"], arrays["eam_decode"]])
        return Requests(frame, eams, arrays.get("embedding"))


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


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """The requests' files and the routing files of a folder."""
    if not path.exists():
        raise InputError(f"no trace at {path}: there is no such folder (`moe-trace record` makes one)")
    if not path.is_dir():
        raise InputError(f"{path} is a file; a trace is a folder with {REQUESTS} and {ROUTING}/")
    whole = path / REQUESTS
    requests = [whole] if whole.is_file() else sorted((path / GROWING).glob("part-*.parquet"))
    if not requests:
        raise InputError(f"{path} is not a trace: it has no {REQUESTS} (`moe-trace record` or `import` makes one)")
    return requests, sorted((path / ROUTING).glob("part-*.parquet"))


def _read(path: Path) -> pa.Table:
    try:
        return pq.read_table(str(path), partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _batches(path: Path, columns: list[str] | None, size: int) -> Iterator[pa.Table]:
    try:
        with pq.ParquetFile(str(path)) as file:
            for batch in file.iter_batches(batch_size=size, columns=columns):
                yield pa.Table.from_batches([batch])
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _open(path: Path) -> pa.Schema:
    """The schema in a Parquet file's footer."""
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty (0 bytes)")
        return pq.read_schema(str(path))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is truncated, or no Parquet file: {error}") from error
