"""The Parquet files of a trace: how they are encoded, and how a row of them grows.

Each is written under a temporary name and gets its own when it is whole.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from traces.schema import row_bytes

ROW_GROUP_BYTES = 2**22
"""Of a row group, about: what is decoded at a time where a trace is larger than memory (`traces.blocks`)."""

PART = re.compile(r"part-\d+\.parquet|\.part-\d+\.parquet\.tmp")
"""Names of the files that grow, whole or being written."""


def temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


_COUNTERS = ("request", "position", "step")  # numbers that mostly go up by little, stored as differences
_FLOATS = ("weights", "scores")  # values that hardly repeat; all others are stored by dictionary


@contextmanager
def _writing(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    """Write a Parquet file under a temporary name, which gets its own when it is whole."""
    unfinished = temporary(path.absolute())  # Arrow takes a `~` at the beginning for a home
    lists = {name for name in schema.names if pa.types.is_fixed_size_list(schema.field(name).type)}
    repeating = set(schema.names) - set(_COUNTERS) - set(_FLOATS)
    unfinished.unlink(missing_ok=True)  # it may be a link
    try:
        with pq.ParquetWriter(
            unfinished,
            schema,
            compression="zstd",
            compression_level=3,
            write_page_checksum=True,
            use_dictionary=[f"{name}.list.element" if name in lists else name for name in sorted(repeating)],
            column_encoding={name: "DELTA_BINARY_PACKED" for name in _COUNTERS if name in schema.names},
        ) as writer:
            yield writer
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def read(path: Path) -> pa.Table:
    """Read a file, and compare the checksums of its pages."""
    return pq.read_table(str(path.absolute()), partitioning=None, page_checksum_verification=True)


def write(path: Path, table: pa.Table) -> None:
    with _writing(path, table.schema) as writer:
        writer.write_table(table, row_group_size=_rows_of_a_group(table.schema))


def _rows_of_a_group(schema: pa.Schema) -> int:
    return max(1, ROW_GROUP_BYTES // row_bytes(schema))


def join(files: list[Path], into: Path) -> None:
    """Write one file with the rows of several, in row groups of one size, however many rows each file has."""
    schema = pq.read_schema(str(files[0].absolute()))
    held, size = schema.empty_table(), _rows_of_a_group(schema)
    with _writing(into, schema) as writer:
        for file in files:
            with pq.ParquetFile(str(file.absolute()), page_checksum_verification=True) as rows:
                for group in range(rows.num_row_groups):
                    held = pa.concat_tables([held, rows.read_row_group(group).cast(schema)]).combine_chunks()
                    full = len(held) // size * size
                    if full:
                        writer.write_table(held.slice(0, full), row_group_size=size)
                        held = held.slice(full)
        if len(held):
            writer.write_table(held.combine_chunks())


class Parts:
    """A row of Parquet files; the last one is held, and rewritten by each flush, until it has `limit` rows."""

    def __init__(self, folder: Path, limit: int):
        self.folder = folder
        self.limit = limit
        self.rows = 0  # of the last file
        self._number = 0
        self._held: list[pa.Table] = []

    @property
    def path(self) -> Path:
        return self.folder / f"part-{self._number:05d}.parquet"

    @property
    def grown(self) -> bool:
        """Whether there is a last file to write; it may have no rows."""
        return bool(self._held)

    def add(self, table: pa.Table) -> None:
        self._held.append(table)
        self.rows += len(table)

    def table(self) -> pa.Table:
        self._held = [pa.concat_tables(self._held).combine_chunks()]
        return self._held[0]

    def flushed(self) -> None:
        """The last file was written: start the next one if it is full."""
        if self.rows >= self.limit:
            self._number, self.rows, self._held = self._number + 1, 0, []

    def reopen(self, schema: pa.Schema, keep: int | None = None) -> pa.Table:
        """Continue after the files that are there, cast to `schema`; of routing, the rows of `keep` requests.

        Return the rows of the last file.
        """
        for number, file in reversed(list(enumerate(sorted(self.folder.glob("part-*.parquet"))))):
            whole = read(file).cast(schema)
            table = whole if keep is None else whole.filter(pc.less(whole.column("request"), keep))
            if not len(table) and number:
                file.unlink()
                continue
            if len(table) < len(whole):
                write(file, table)
            self._number = number
            self.add(table)
            self.flushed()
            return table
        return schema.empty_table()
