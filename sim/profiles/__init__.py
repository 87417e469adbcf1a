"""Profiles are TOML files, one per machine or model: shipped ones beside this file, others by their path.

Every key carries its unit in its name. What a field may hold stands at the field, and `traces.typed` checks it.
"""

import os
from os.path import exists  # of any name, however long
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta

from traces.errors import InputError, unknown
from traces.files import expanded, read_toml
from traces.typed import typed

T = TypeVar("T")

MOST = 10**15
"""Of any number: beyond, times leave the range of a clock of 64 bits, and nothing is so large."""

Positive = Annotated[float, Meta(gt=0, le=MOST)]
NotNegative = Annotated[float, Meta(ge=0, le=MOST)]
Count = Annotated[int, Meta(ge=1, le=MOST)]
Size = Annotated[int, Meta(ge=0, le=MOST)]
"""0 where there is none."""


def names(kind: str) -> list[str]:
    """Return the names of the shipped profiles of a kind, `hardware` or `models`."""
    return sorted(path.stem for path in (Path(__file__).parent / kind).glob("*.toml"))


def find(kind: str, what: str, text: str) -> Path:
    """Return the file of a shipped profile, or of a path. Raise InputError with near names if there is none."""
    if text in names(kind):
        return Path(__file__).parent / kind / f"{text}.toml"
    path = expanded(text)
    if exists(path) and not path.is_dir():
        return path
    if path.suffix == ".toml":
        raise InputError(f"no {what} profile at {path}")
    raise unknown(f"{what} profile", text, names(kind))


def absolute(kind: str, text: str) -> str:
    """Return the absolute path of a profile in a file; the name of a shipped one as it is."""
    return text if text in names(kind) else os.path.realpath(expanded(text))


def read(cls: type[T], path: Path) -> T:
    """Return a profile as an instance of the dataclass `cls`, its field `name` being the file's stem."""
    return typed(cls, {**read_toml(path), "name": path.stem}, str(path))
