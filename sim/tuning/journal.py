"""The finished trials of a search on disk, a line each, so that a journal cut off anywhere is a beginning of the whole.

A line is a checksum and JSON. The first one has the version of this format and what the search depends on.
"""

import importlib
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traces.errors import InputError

NAME = "trials.log"
SCHEMA = 1

WORKERS = "--workers"
"""One of the words for what a search depends on."""


def optuna() -> Any:
    module = importlib.import_module("optuna")
    module.logging.set_verbosity(module.logging.CRITICAL)
    return module


class Journal:
    """The journal in `folder`, which `begin` makes. Raise InputError for a damaged file and for another version.

    searched: what its search depends on, by the words for it. trials: in their order, each with what was drawn
    (`drawn`), `policy` and `refusal` as of `tune.Trial`, and `value`.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.searched: dict[str, str] = {}
        self.trials: list[dict[str, Any]] = []
        *lines, _ = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]  # the last was cut off
        self._size = sum(len(line) + 1 for line in lines)
        contents = [json.loads(line[9:]) if line == _line(line[9:]) else {} for line in lines]
        if not all(contents) or (contents and contents[0].get("schema") != SCHEMA):
            raise InputError(f"{self.path} is damaged or of another version: name another folder with --out")
        if contents:
            self.searched, self.trials = contents[0]["searched"], contents[1:]

    @property
    def workers(self) -> int | None:
        """How many run its trials, drawn together; None if there are none."""
        return int(self.searched[WORKERS]) if self.trials else None

    def begin(self, searched: Mapping[str, str]) -> None:
        """Make it; one without trials becomes this search's, one that was cut off loses the end of a line."""
        if self.trials:
            with self.path.open("r+b") as file:
                file.truncate(self._size)
        else:
            self.searched = dict(searched)
            self.path.write_bytes(_line(_json({"schema": SCHEMA, "searched": self.searched})) + b"\n")

    def add(self, trial: dict[str, Any]) -> None:
        self.trials.append(trial)
        with self.path.open("ab") as file:
            file.write(_line(_json(trial)) + b"\n")

    def discard(self) -> None:
        self.path.unlink(missing_ok=True)


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def _line(text: bytes) -> bytes:
    return b"%08x %s" % (zlib.crc32(text), text)
