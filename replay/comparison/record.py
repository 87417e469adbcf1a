"""The file of real runs: one JSON, written again after each cell, so that a run cut off loses the cell it was at.

At its top stand the facts of the machine and of the run, then a list of cells. A cell has a key, a digest of all that
decides it: model, trace and options, the hardware profile's content, and this project's code; the machine is the same
for the whole file. A file that is resumed keeps the cells that are finished; one that failed (it has `error`, one line,
in place of figures) is due again.
"""

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from replay.keys import code_digest, digest_of, plain_values
from sim.results.metrics import Row
from sim.results.provenance import commit
from traces.errors import InputError
from traces.files import plain
from traces.output import replacing

TOP = (
    *("gpu", "driver", "torch", "commit", "date", "device", "machine"),
    *("copy_gb_per_s", "ceiling_gb_per_s", "hardware"),
)
"""Keys that stand before the cells; others may follow these. `machine`: what the device is, a GPU or not."""

MACHINE = ("device", "machine")
"""Of these what a resumed file says must hold of this run too."""

ERROR, KEY, CONTENT, CELLS = "error", "key", "content", "cells"
"""CONTENT: a digest of all else in the file, by which a damaged one is noticed."""


class Record:
    """Facts and cells at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: Row = dict.fromkeys(TOP)
        self._cells: dict[str, Row] = {}

    @classmethod
    def open(cls, path: Path, resume: bool, otherwise: str = "run without --resume") -> "Record":
        """With the finished cells of before, or empty; writes nothing. InputError for a file that is none of these."""
        record = cls(path)
        if not resume or not path.exists():
            return record
        try:
            read = json.loads(plain(path).read_text(encoding="utf-8"))
            if read.pop(CONTENT, None) != digest_of(read):
                raise ValueError("it was changed, or other code wrote it")
            cells = read.pop(CELLS)
            record._cells = {
                cell[KEY]: cell for cell in cells if cell[KEY] and ERROR not in cell and "measured" in cell
            }
            record.facts |= read
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path} is not a record of cells ({error}): {otherwise}") from error
        return record

    def tell(self, **facts: Any) -> None:
        """Set keys at the top. InputError where the file is of another machine."""
        for name in MACHINE:
            before, now = self.facts[name], facts.get(name)
            if self._cells and name in facts and before != now:
                raise InputError(f"{self.path} is of {name} {before}, this is {now}: name another folder with --out")
        self.facts |= facts

    def require_code(self) -> None:
        """InputError where finished cells were run by other code: they would be judged beside new ones."""
        if self._cells and self.facts.get("code") != code_digest():
            raise InputError(f"{self.path} is of other code than this: run without --resume")

    def begin(self, **facts: Any) -> None:
        """`tell`, and the commit, this project's code and the date (UTC) of now."""
        self.tell(**facts, commit=commit(), code=code_digest(), date=datetime.now(UTC).isoformat(timespec="seconds"))

    def __contains__(self, key: str) -> bool:
        return key in self._cells and ERROR not in self._cells[key]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._cells.values())

    def __len__(self) -> int:
        return sum(ERROR not in cell for cell in self)

    def __getitem__(self, key: str) -> Row:
        return self._cells[key]

    def put(self, key: str, cell: Mapping[str, Any]) -> None:
        """A cell has ended: write the file, whole or not at all. InputError where it cannot be written."""
        before = dict(self._cells)
        self._cells.pop(key, None)
        self._cells[key] = {KEY: key, **cell}
        try:
            self.write()
        except InputError:
            self._cells = before  # what the file holds
            raise

    def fail(self, key: str, cell: Mapping[str, Any], error: Exception) -> None:
        """A cell could not be run."""
        self.put(key, {**cell, ERROR: " ".join(str(error).split())})

    def write(self) -> None:
        """The file as it stands now."""
        with replacing(self.path) as part:
            part.write_text(self.text() + "\n", encoding="utf-8")

    def text(self) -> str:
        """As JSON."""
        cells = list(self)
        content = digest_of({**self.facts, CELLS: cells})
        return json.dumps(plain_values({**self.facts, CONTENT: content, CELLS: cells}), indent=1, allow_nan=False)
