"""The file of real runs: one JSON, written again after each cell, so that a run cut off loses the cell it was at.

A cell has a key, a digest of all that decides it: model, trace and options, the hardware profile's content, and this
project's code. A file that is resumed keeps the cells that are finished; one that failed (it has `error`, one line, in
place of figures) is due again.
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
from traces.output import replacing

TOP = (
    *("gpu", "driver", "torch", "commit", "date", "device", "machine"),
    *("copy_gb_per_s", "ceiling_gb_per_s", "hardware"),
)
"""Keys that stand before the cells; others may follow these. `machine`: what the device is, a GPU or not."""

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
        """Return one with the finished cells of before, or empty. Raise InputError for a damaged one."""
        record = cls(path)
        if resume and path.exists():
            try:
                facts = json.loads(path.read_text(encoding="utf-8"))
                if facts.pop(CONTENT, None) != digest_of(facts):
                    raise ValueError("it was changed, or other code wrote it")
                cells = facts.pop(CELLS)
                record._cells = {cell[KEY]: cell for cell in cells if ERROR not in cell}
                record.facts |= facts
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                raise InputError(f"{path} is not a record of cells ({error}): {otherwise}") from error
        return record

    def set_facts(self, **facts: Any) -> None:
        """Set keys at the top. Raise InputError where finished cells were run on another machine."""
        for name in ("device", "machine"):
            before, now = self.facts[name], facts.get(name)
            if self._cells and name in facts and before != now:
                raise InputError(f"{self.path} is of {name} {before}, this is {now}: name another folder with --out")
        self.facts |= facts

    def begin(self, **facts: Any) -> None:
        """Set facts, and the commit, this project's code and the date (UTC) of now."""
        self.set_facts(
            **facts, commit=commit(), code=code_digest(), date=datetime.now(UTC).isoformat(timespec="seconds")
        )

    def __contains__(self, key: str) -> bool:
        return key in self._cells and ERROR not in self._cells[key]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._cells.values())

    def __len__(self) -> int:
        return sum(ERROR not in cell for cell in self)

    def __getitem__(self, key: str) -> Row:
        return self._cells[key]

    def put(self, key: str, cell: Mapping[str, Any]) -> None:
        """Write the file with a cell that has ended, whole or not at all."""
        self._cells.pop(key, None)
        self._cells[key] = {KEY: key, **cell}
        self.write()

    def fail(self, key: str, cell: Mapping[str, Any], error: Exception) -> None:
        self.put(key, {**cell, ERROR: " ".join(str(error).split())})

    def write(self) -> None:
        with replacing(self.path) as part:
            part.write_text(self.text() + "\n", encoding="utf-8")

    def text(self) -> str:
        """Return it as JSON; numbers that are not finite are null."""
        cells = list(self)
        content = digest_of({**self.facts, CELLS: cells})
        return json.dumps(plain_values({**self.facts, CONTENT: content, CELLS: cells}), indent=1, allow_nan=False)
