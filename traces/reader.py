"""Trace folders as arrays: what is wrong with a file is told in one line, with the file's name.

Parquet is decoded once, by Arrow's threads; ids stay in the type that they have on disk. requests.parquet is
the commit record: routing of requests that it does not list was being written when the writer was killed, and
is left out.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from traces.errors import InputError
from traces.schema import (
    REQUESTS,
    ROUTING,
    TraceMeta,
    requests_schema,
    require_columns,
    require_whole,
    routing_schema,
)

OPTIONAL = ("weights", "token_id")
"""Columns of the routing files that are read only when asked for."""


@dataclass(frozen=True)
class Folder:
    """The content of a trace folder, rows in the order of execution."""

    meta: TraceMeta
    requests: pd.DataFrame
    eams: NDArray[np.uint32]  # [2, requests, L * E] prefill and decode
    columns: dict[str, NDArray[Any]]  # of the routing files, [rows] or [rows, L * k]


def read_folder(path: Path, optional: tuple[str, ...]) -> Folder:
    """Read a trace folder; `optional` names those of OPTIONAL that are wanted, where the trace has them."""
    requests_file, parts = _files(path)
    table = _read_requests(requests_file)
    meta = TraceMeta.decode(table.schema.metadata, str(requests_file))
    require_columns(table.schema, schema := requests_schema(meta), str(requests_file))
    table = table.select(schema.names)
    require_whole(table, schema, str(requests_file))
    if len(table) == 0:
        raise InputError(f"{requests_file} lists no requests: the trace is empty")
    with_weights = _check_parts(parts, meta)
    names = ["request", "position", "step", "phase", "experts"]
    names += [name for name in optional if name != "weights" or with_weights]
    try:
        rows = pq.read_table([str(part) for part in parts], columns=names, partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path / ROUTING} cannot be read, a file in it is damaged: {error}") from error
    require_whole(rows, routing_schema(meta, with_weights), str(path / ROUTING))
    columns = {name: _numpy(rows.column(name)) for name in names}
    listed = columns["request"] < len(table)
    if not listed.all():
        columns = {name: column[listed] for name, column in columns.items()}
    eams = np.stack([_numpy(table.column(name)) for name in ("eam_prefill", "eam_decode")])
    whole_numbers = {pa.uint32(): pd.Int64Dtype(), pa.int64(): pd.Int64Dtype()}  # floats would round beside a null
    frame = table.drop_columns(["eam_prefill", "eam_decode"]).to_pandas(types_mapper=whole_numbers.get)
    frame["output_tokens"] = frame["output_tokens"].astype("int64")
    return Folder(meta, frame, eams, columns)


def _files(path: Path) -> tuple[Path, list[Path]]:
    """requests.parquet and the routing files of a folder."""
    if not path.exists():
        raise InputError(f"no trace at {path}: there is no such folder (`moe-trace record` makes one)")
    if not path.is_dir():
        raise InputError(f"{path} is a file; a trace is a folder with {REQUESTS} and {ROUTING}/")
    requests = path / REQUESTS
    if not requests.is_file():
        raise InputError(f"{path} is not a trace: it has no {REQUESTS} (`moe-trace record` or `import` makes one)")
    parts = sorted((path / ROUTING).glob("part-*.parquet"))
    if not parts:
        raise InputError(f"{path} is not a whole trace: it has no {ROUTING}/part-*.parquet")
    return requests, parts


def _read_requests(path: Path) -> pa.Table:
    _open(path)
    try:
        return pq.read_table(str(path), partitioning=None)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is damaged: {error}") from error


def _check_parts(parts: list[Path], meta: TraceMeta) -> bool:
    """Whether all parts hold weights; an InputError if one is damaged, or not of the same trace as `meta`."""
    schemas = [_open(part) for part in parts]
    for part, schema in zip(parts, schemas, strict=True):
        if TraceMeta.decode(schema.metadata, str(part)) != meta:
            raise InputError(f"{part} belongs to another trace than the {REQUESTS} beside it: their metadata differ")
        require_columns(schema, routing_schema(meta, "weights" in schema.names), str(part))
    return all("weights" in schema.names for schema in schemas)


def _open(path: Path) -> pa.Schema:
    """The schema in a Parquet file's footer."""
    try:
        if path.stat().st_size == 0:
            raise InputError(f"{path} is empty (0 bytes)")
        return pq.read_schema(str(path))
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{path} is truncated, or no Parquet file: {error}") from error


def _numpy(column: pa.ChunkedArray) -> NDArray[Any]:
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
