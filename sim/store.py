"""Cells that are finished, on disk: each has a file the moment it ends, so that nothing which kills a sweep loses one.

While a sweep runs, FOLDER/cells/results holds a row and FOLDER/cells/requests the requests' rows of every finished
cell, one Parquet file each, named by the cell's key; both folders can be read as data sets at any time. A file
appears whole or not at all, the row last: a key with a row is done. When the sweep ends, they become the tables of its
results, and the folder `cells` goes.
"""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from sim.results import REQUESTS, REQUESTS_FILE, RESULTS, RESULTS_FILE, Row, replacing, write_rows, write_table
from traces.errors import InputError

NAME = "cells"
ROW_GROUP = 65_536
"""Rows of requests that are written together, about: what merging holds in memory."""


class Store:
    """Finished cells of the sweep in `folder`, by their keys; the folders `finished` hold some of earlier sweeps."""

    def __init__(self, folder: Path, finished: Iterable[Path] = ()) -> None:
        self.folder = folder
        self._results, self._requests = (folder / NAME / name for name in ("results", "requests"))
        self._rows: dict[str, Row] = {}
        self._tables: dict[str, Path] = {}
        for file in sorted(self._results.glob("[!.]*.parquet")):
            self._rows[file.stem] = _rows(file)[0]
            self._tables[file.stem] = self._requests / file.name
        for old in finished:
            self._take(old)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, key: str, row: Row, requests: pa.Table) -> None:
        """A cell has ended. InputError where it cannot be written."""
        try:
            for folder in (self._results, self._requests):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot write to {self.folder}: {error.strerror or error}") from error
        write_table(requests, self._requests / f"{key}.parquet")
        write_rows([row], RESULTS, self._results / f"{key}.parquet")
        self._rows[key], self._tables[key] = row, self._requests / f"{key}.parquet"

    def row(self, key: str) -> Row:
        """The row of a finished cell."""
        return dict(self._rows[key])

    def requests(self, key: str) -> pa.Table:
        """The rows of its requests, in the order of play."""
        return pq.read_table(str(self._tables[key]), schema=REQUESTS, filters=ds.field("cell") == key)

    def write_requests(self, keys: Iterable[str], path: Path) -> None:
        """The requests of these cells as one file, whole or not at all."""
        with replacing(path) as file, pq.ParquetWriter(file, REQUESTS) as writer:
            for table in _grouped(self.requests(key) for key in keys):
                writer.write_table(table)

    def clear(self) -> None:
        """The cells have become tables: remove their files."""
        shutil.rmtree(self.folder / NAME, ignore_errors=True)

    def _take(self, folder: Path) -> None:
        """Cells of a sweep that has ended there, if one has; those without their requests were being replaced."""
        rows, requests = folder / RESULTS_FILE, folder / REQUESTS_FILE
        if not (rows.is_file() and requests.is_file()):
            return
        whole = set(pq.read_table(str(requests), columns=["cell"]).column("cell").unique().to_pylist())
        for row in _rows(rows):
            key = row["cell"]
            if key in whole and key not in self._rows:
                self._rows[key], self._tables[key] = row, requests


def unfinished(folder: Path) -> int:
    """Cells that a sweep has left behind in `folder` without ending."""
    return len(list((folder / NAME / "results").glob("[!.]*.parquet")))


def _rows(file: Path) -> list[Row]:
    try:
        rows: list[Row] = pq.read_table(str(file), schema=RESULTS).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{file} is no table that moe-sim sweep wrote: {error}") from error
    return rows


def _grouped(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of about ROW_GROUP, so that many small cells make no small groups."""
    held: list[pa.Table] = []
    for table in tables:
        held.append(table)
        if sum(map(len, held)) >= ROW_GROUP:
            yield pa.concat_tables(held).combine_chunks()
            held = []
    if held:
        yield pa.concat_tables(held).combine_chunks()
