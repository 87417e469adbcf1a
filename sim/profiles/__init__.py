"""Profiles are TOML files, one per machine or model: shipped ones beside this file, others by their path.

Every key carries its unit in its name; an unknown, missing or impossible one is refused with the file's name.
"""

import dataclasses
import math
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from traces.errors import InputError, unknown

T = TypeVar("T")

MOST = 10**15
"""Of any number: beyond, times leave the range of a clock of 64 bits, and nothing is so large."""

MAY_BE_ZERO = {"zero": True}
"""Field metadata: 0 is possible here. All other numbers are above 0."""

Reader = Callable[[str, Any], Any]
"""What makes the value of a field: of its key, and of what the file holds for it."""


def names(kind: str) -> list[str]:
    """The shipped profiles of a kind, `hardware` or `models`."""
    return sorted(path.stem for path in (Path(__file__).parent / kind).glob("*.toml"))


def find(kind: str, what: str, text: str) -> Path:
    """The file of a shipped profile, or of a path as typed; InputError with near names if there is none."""
    if text in names(kind):
        return Path(__file__).parent / kind / f"{text}.toml"
    path = Path(text).expanduser()
    if path.is_file():
        return path
    if path.suffix == ".toml":
        raise InputError(f"no {what} profile at {path}")
    raise unknown(f"{what} profile", text, names(kind))


def absolute(kind: str, text: str) -> str:
    """The path of a profile in a file, from the root; the name of a shipped one as it is."""
    return text if text in names(kind) else str(Path(text).expanduser().resolve())


def read(cls: type[T], path: Path, readers: Mapping[Any, Reader] | None = None) -> T:
    """A profile as an instance of the dataclass `cls`, its field `name` being the file's stem; the rest as `make`."""
    try:
        with path.open("rb") as file:
            held = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:  # a number of too many digits is a ValueError
        raise InputError(f"{path}: cannot be read as TOML: {error}") from error
    try:
        return make(cls, held, readers or {}, name=path.stem)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def make(cls: type[T], held: Mapping[str, Any], readers: Mapping[Any, Reader], **given: Any) -> T:
    """An instance of the dataclass `cls` from a table of a file; `readers` are by the types of fields.

    Fields that are `given` must not stand in the file. InputError, naming the key, for what cannot be.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in given}  # type: ignore[arg-type]
    types = get_type_hints(cls)
    for key in held:
        if key not in fields:
            raise unknown("key", key, fields)
    for key, field in fields.items():
        if key in held:
            kind, value = types[key], held[key]
            given[key] = readers[kind](key, value) if kind in readers else _checked(key, value, kind, **field.metadata)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(f"the key {key!r} is missing")
    return cls(**given)


def _checked(key: str, value: object, kind: Any, zero: bool = False) -> object:
    """`value` as `kind` (str, int, float or a tuple of str), or InputError."""
    if kind is str and isinstance(value, str) and value:
        return value
    if kind == tuple[str, ...] and isinstance(value, list) and all(isinstance(one, str) for one in value):
        return tuple(value)
    if kind == tuple[int, ...] and isinstance(value, list):
        return tuple(_checked(key, one, int) for one in value)
    if kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) > MOST or not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            least = "at least" if zero else "above"
            raise InputError(f"{key} = {value}: must be {least} 0 and finite, at most {MOST:.0e}")
        if kind is float:
            return float(value)
        if isinstance(value, int):
            return value
    expected = {str: "a text", int: "a whole number", float: "a number"}.get(kind, "a list of texts")
    raise InputError(f"{key} = {value!r}: must be {expected}")
