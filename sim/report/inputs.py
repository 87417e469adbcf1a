"""What a report is made of: folders of sweeps and of replays, read as far as they can be.

What is missing, or made by another version, is a sentence of the page, never its end.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import pandas as pd

from sim.experiment import Experiment
from sim.loaded import Loaded, load
from sim.results import files
from sim.results.compare import SweptRun, swept_runs
from sim.results.metrics import REQUESTS, RESULTS, Row
from sim.sweeps import winner
from traces.errors import InputError

T = TypeVar("T")

RUN_FILE = "run.json"
"""Of a replay: the commands that make it again."""


@dataclass(frozen=True)
class Results:
    """A folder of results. problems: sentences; requests: None where there is no such table."""

    folder: Path
    rows: list[Row]
    requests: pd.DataFrame | None
    experiment: Experiment | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def replayed(self) -> bool:
        return any(map(_measured, self.rows))

    @property
    def commands(self) -> list[str]:
        file = self.folder / RUN_FILE
        return list(json.loads(file.read_text("utf-8")).get("commands", [])) if file.exists() else []

    @cached_property
    def loaded(self) -> Loaded | None:
        """The setup with its files read; None, with the reason among the problems, where that cannot be."""
        if self.experiment is None:
            return None
        try:
            return load(self.experiment)
        except (InputError, ModuleNotFoundError) as error:
            self.note(f"{self.folder}: its trace or profiles cannot be read again: {error}")
            return None

    @cached_property
    def cells(self) -> list[SweptRun]:
        """The cells with their requests, to pair; none where these are missing."""
        return [] if self.requests is None else swept_runs(self.rows, self.requests, self.folder)

    def note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


def read(folders: Iterable[Path], trust: bool = False) -> list[Results]:
    """Return the results of these folders and of folders in them, each once; trust: open what `from_file` refuses."""
    places: dict[str, Path] = {}
    for folder in folders:
        for each in _tables(folder):
            places.setdefault(os.path.realpath(each), each)
    return [_read(place, trust) for place in places.values()]


def _tables(folder: Path) -> list[Path]:
    below = sorted(file.parent for file in folder.glob(f"*/{files.RESULTS_FILE}"))
    return below if below and not (folder / files.REQUESTS_FILE).exists() else [folder]


def _read(folder: Path, trust: bool) -> Results:
    problems: list[str] = []

    def attempt(read_it: Callable[[], T]) -> T | None:
        try:
            return read_it()
        except InputError as error:
            problems.append(str(error))
            return None

    table = attempt(lambda: files.read(folder / files.RESULTS_FILE, RESULTS, more=True))
    requests = attempt(lambda: files.read(folder / files.REQUESTS_FILE, REQUESTS).to_pandas())
    rows: list[Row] = table.to_pylist() if table else []
    swept = attempt(lambda: winner.read(folder, trust=trust)) if rows and not any(map(_measured, rows)) else None
    return Results(folder, rows, requests, swept[0] if swept else None, problems)


def _measured(row: Row) -> bool:
    return row.get("device") is not None  # a column that replays have and sweeps have not
