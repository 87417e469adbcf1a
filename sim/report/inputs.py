"""What a report is made of: folders of sweeps and of replays, read as far as they can be.

What is missing or made by another version is a sentence of the page, never its end.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
import pyarrow as pa

from sim.results.files import read_table
from sim.results.metrics import (
    MS,
    REQUESTS,
    REQUESTS_FILE,
    RESULTS,
    RESULTS_FILE,
    SHARE,
    TEXT,
    Row,
    require_possible,
    require_together,
)
from sim.sweeps import winner
from sim.sweeps.setup import Loaded, Setup
from sim.sweeps.winner import Winner
from traces.errors import InputError
from traces.files import plain
from traces.trace import Trace

T = TypeVar("T")

DEVICE = "device"
"""A column that replays have and sweeps have not."""

REPLAYED = pa.schema(
    [
        (DEVICE, TEXT),
        *[(f"predicted_tpot_{name}_ms", MS) for name in ("mean", "low", "high")],
        ("predicted_hit_rate", SHARE),
    ]
)
"""Columns that a report reads from replays alone."""


@dataclass(frozen=True)
class Results:
    """A folder of results. problems: sentences; requests: None where there is no such table."""

    folder: Path
    rows: list[Row]
    requests: pd.DataFrame | None
    winners: tuple[Winner, ...] = ()
    setup: Setup | None = None
    missing: tuple[str, ...] = ()  # columns that another version did not write
    problems: list[str] = field(default_factory=list)

    @property
    def replayed(self) -> bool:
        """Whether it was measured."""
        return any(row.get(DEVICE) for row in self.rows)

    @cached_property
    def loaded(self) -> Loaded | None:
        """The setup with its files read; None, with the reason among the problems, where that cannot be."""
        if self.setup is None:
            return None
        try:
            return self.setup.load()
        except InputError as error:
            self.note(f"{self.folder}: its trace or profiles cannot be read again: {error}")
            return None

    @cached_property
    def trace(self) -> Trace | None:
        """The trace in memory."""
        return self.loaded.whole if self.loaded else None

    def note(self, problem: str) -> None:
        """Add a sentence to the problems, once."""
        if problem not in self.problems:
            self.problems.append(problem)

    def attempt(self, make: Callable[[], Iterable[T]]) -> tuple[T, ...] | None:
        """Return what is made of the tables; None, with the reason among the problems, where that fails."""
        try:
            return tuple(make())
        except (TypeError, ValueError, LookupError, ArithmeticError) as error:
            if not self.missing:
                kind, said = type(error).__name__, str(error)
                why = f"{kind}: {said.splitlines()[0]}" if said else kind
                values = f"its tables hold values that no run writes ({why})"
                self.note(f"{self.folder}: {values}: run it again with --overwrite")
            return None


def read(folders: Iterable[Path]) -> list[Results]:
    """Return the results of these folders, and of the folders in one that holds several sweeps; each folder once."""
    places: dict[str, Path] = {}
    for folder in folders:
        for each in _tables(folder):
            places.setdefault(os.path.realpath(each), each)
    return list(map(_read, places.values()))


def _tables(folder: Path) -> list[Path]:
    below = sorted(file.parent for file in folder.glob(f"*/{RESULTS_FILE}"))
    return below if below and not (folder / REQUESTS_FILE).exists() else [folder]


def _read(folder: Path) -> Results:
    if not folder.exists():
        return Results(folder, [], None, problems=[f"{folder}: there is no such folder"])
    problems: list[str] = []
    cells, missing = _table(folder / RESULTS_FILE, RESULTS, problems)
    requests, _ = _table(folder / REQUESTS_FILE, REQUESTS, problems)
    if cells is not None and requests is not None:
        try:
            require_together(cells, requests)
        except InputError as error:
            problems.append(f"{folder}: {error}")
            requests = None
    rows = [] if cells is None else [_plain(row) for row in cells.to_dict("records")]
    if cells is not None and not rows:
        problems.append(f"{folder / RESULTS_FILE} holds no cells: nothing was run, or it was cut off")
    winners: tuple[Winner, ...] = ()
    setup = None
    if not any(row.get(DEVICE) for row in rows) and rows:
        read_winners = _tried(lambda: winner.read(folder), problems)
        if read_winners:
            setup, winners = read_winners[0], tuple(read_winners[1])
    return Results(folder, rows, requests, winners, setup, tuple(missing), problems)


def _table(path: Path, schema: pa.Schema, problems: list[str]) -> tuple[pd.DataFrame | None, list[str]]:
    """Return a table, or None, and the columns that another version did not write, which are empty in it."""
    try:
        found = _cast(read_table(plain(path)), schema).to_pandas()
        require_possible(found)
    except FileNotFoundError:
        problems.append(f"{path} is missing: moe-sim sweep and moe-replay run write it")
        return None, []
    except (OSError, ValueError, InputError, pa.ArrowException) as error:
        problems.append(f"{path} cannot be read: {str(error).splitlines()[0]}")
        return None, []
    if missing := [name for name in schema.names if name not in found.columns]:
        problems.append(f"{path} is of another version: it has no {', '.join(missing)}; what needs them is left out")
        found = found.assign(**dict.fromkeys(missing))
    return found, missing


def _cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the columns that the schema and REPLAYED name, in their types. Raise InputError where they are not."""
    here = [known for known in (*schema, *REPLAYED) if known.name in table.column_names]
    for known in here:
        if table.schema.get_field_index(known.name) < 0:
            raise InputError(f"it has {known.name} more than once")
    return table.select([known.name for known in here]).cast(pa.schema([(known.name, known.type) for known in here]))


def _plain(row: Any) -> Row:
    """Return a row of Python values, with None for what is missing."""
    return {str(name): None if pd.isna(value) else value for name, value in row.items()}


def _tried(read_it: Callable[[], T], problems: list[str]) -> T | None:
    try:
        return read_it()
    except InputError as error:
        problems.append(str(error))
        return None
