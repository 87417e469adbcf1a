"""The traces that policies are compared on, each with a card: what it is, where it is from, what is wrong with it.

`traces.toml` has the cards, and a version that rises whenever a figure made with these traces may change. Traces whose
licence allows it lie beside it; of the others the card has the commands that make them from their source.
docs/board.md has the cards as a table, made by `python -m benchmarks.cards`.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traces.files import read_toml
from traces.typed import Positive, typed

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Card:
    """What there is to know of a trace. `sha256` is of its files (`sum_of`); empty: it is not here."""

    name: str
    model: str
    decoded: str  # of what, and by which engine
    requests: Positive
    tokens: Positive
    layers: Positive
    experts: Positive  # of a layer
    top_k: Positive
    source: str
    licence: str
    commands: tuple[str, ...]  # that make it of the files of its source
    defects: tuple[str, ...] = ()
    expert_sizes: str = ""  # precision that it is timed at; empty: as the trace states
    sha256: str = ""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name


@dataclass(frozen=True)
class Board:
    """All cards, and the version of the set."""

    version: Positive
    cards: tuple[Card, ...]


def board() -> Board:
    """Return the cards. Raise InputError for a file that does not hold them."""
    found: dict[str, Any] = read_toml(FOLDER / "traces.toml")
    return typed(Board, found, "traces.toml")


def sum_of(folder: Path) -> str:
    """Return the SHA-256 of a trace's files, each behind its name, in the order of their names."""
    files = sorted(folder.rglob("*.parquet"))
    sums = (
        f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(folder).as_posix()}\n" for file in files
    )
    return hashlib.sha256("".join(sums).encode()).hexdigest()
