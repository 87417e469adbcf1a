"""Cells that are finished, on disk: each has a file the moment it ends, so that nothing which kills a sweep loses one.

FOLDER/cells/results holds a row and FOLDER/cells/requests the requests' rows of each, Parquet files named by the cell's
key. A file appears whole or not at all, the row last: a key with a row is done. What else lies there is left alone.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sim.results import plot
from sim.results.files import REQUESTS_FILE, RESULTS_FILE, read, write_rows, write_table, writing
from sim.results.metrics import REQUESTS, RESULTS, Row
from traces.output import MARKER, claim, make_folder, marked, unlink_link

MAKER = "moe-sim sweep"
CELLS = "cells"
WRITTEN = (RESULTS_FILE, REQUESTS_FILE, "winner.toml", *(name for name, _ in plot.DRAWN.values()))
"""Files of a table of a sweep that has ended."""

ROW_GROUP = 65_536
"""Rows of requests that are written together, about: what merging holds in memory."""


class Store:
    """Finished cells in `folder`, by their keys: of a sweep under way there, and of one that has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._results, self._requests = (folder / CELLS / name for name in ("results", "requests"))
        self._rows: dict[str, Row] = {}
        self._tables: dict[str, Path] = {}
        for file in sorted(self._results.glob("[!.]*.parquet")):
            if (requests := self._requests / file.name).is_file():
                (self._rows[file.stem],) = read(file, RESULTS).to_pylist()
                self._tables[file.stem] = requests
        for table in _ended(folder):
            self._take(table)

    def __contains__(self, key: str) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def put(self, key: str, row: Row, requests: pa.Table) -> None:
        """A cell has ended. InputError where it cannot be written."""
        places = _folders(self.folder)
        if not all(place.is_dir() for place in places):
            claim(self.folder, MAKER, [CELLS])
            for place in places:
                make_folder(place)
        write_table(requests, self._requests / f"{key}.parquet")
        write_rows([row], RESULTS, self._results / f"{key}.parquet")
        self._rows[key], self._tables[key] = row, self._requests / f"{key}.parquet"

    def row(self, key: str) -> Row:
        return dict(self._rows[key])

    def requests(self, key: str) -> pa.Table:
        table = read(self._tables[key], REQUESTS)
        return table.filter(pc.equal(table.column("cell"), key))

    def write_requests(self, keys: Iterable[str], path: Path) -> None:
        with writing(path, REQUESTS) as writer:
            for table in _grouped(self.requests(key) for key in keys):
                writer.write_table(table)

    def _take(self, folder: Path) -> None:
        """Cells of a sweep that has ended there, if one has; those without their requests were being replaced."""
        rows, requests = folder / RESULTS_FILE, folder / REQUESTS_FILE
        if not (rows.is_file() and requests.is_file() and {RESULTS_FILE, REQUESTS_FILE} <= set(_ours(folder))):
            return
        whole = set(read(requests, pa.schema([REQUESTS.field("cell")])).column("cell").unique().to_pylist())
        for row in read(rows, RESULTS).to_pylist():
            key = row["cell"]
            if key in whole and key not in self._rows:
                self._rows[key], self._tables[key] = row, requests


def held(folder: Path) -> bool:
    return (folder / CELLS).exists() or (folder / RESULTS_FILE).exists()


def drop(folder: Path) -> None:
    """Remove all that sweeps have written in `folder`, and nothing else."""
    clear(folder)
    for table in _ended(folder):
        for file in (table / name for name in _ours(table)):
            if file.parent == table and file.is_file():
                file.unlink()
        if table != folder:
            (table / MARKER).unlink(missing_ok=True)
            with suppress(OSError):  # something else lies there
                table.rmdir()


_CELL = re.compile(r"\.?[0-9a-f]{16}\.parquet(\.part|\.lock)?")
"""The name of a cell's file, whole or being written."""


def clear(folder: Path) -> None:
    """Remove the cells' files, rows first: a key with a row is done; and folders in which nothing else lies."""
    for place in _folders(folder):
        for file in list(place.iterdir()) if place.is_dir() else ():
            if _CELL.fullmatch(file.name):
                file.unlink()
        with suppress(OSError):
            place.rmdir()


def _folders(folder: Path) -> list[Path]:
    """Return the folders of cells, the innermost first; a link in the place of one is removed."""
    places = [folder / CELLS, folder / CELLS / "requests", folder / CELLS / "results"]
    for place in places:
        unlink_link(place)
    return places[::-1]


def _ended(folder: Path) -> list[Path]:
    """Folders with the tables of a sweep that has ended: `folder`, and those in it that are ours."""
    below = (folder / name for name in sorted(_ours(folder)) if name != CELLS)
    return [folder, *(table for table in below if table.is_dir() and not table.is_symlink())]


def _ours(folder: Path) -> list[str]:
    return [name for name, maker in marked(folder).items() if maker == MAKER]


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
