"""Profiles are TOML files, one per machine or model: shipped ones beside this file, others by their path.

Every key carries its unit in its name. What a field may hold stands at the field, and `traces.typed` checks it.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os.path import exists  # of any name, however long
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

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

LEAST = 1 / MOST
"""Of any number above 0: times that are divided by less leave all ranges."""

MAY_BE_ZERO = {"zero": True}
"""Field metadata: 0 is possible here. All other numbers are above 0."""

MAY_BE_NEGATIVE = {"negative": True}
"""Field metadata: any number is possible here."""


def below(limit: int) -> dict[str, Any]:
    """Field metadata: from 0 to below `limit`, whatever `MOST` is."""
    return {"zero": True, "most": limit - 1}


def one_of(names: Sequence[str]) -> dict[str, Any]:
    """Field metadata: one of these texts."""
    return {"names": tuple(names)}


class FieldError(InputError):
    """A value that a field cannot have."""

    def __init__(self, key: str, value: object, reason: str) -> None:
        super().__init__(f"{key} = {value!r}: {reason}")
        self._of_option = f"`{key}` {value}: {reason}"

    @property
    def of_option(self) -> str:
        """The text for the parameter of that name."""
        return self._of_option


Reader = Callable[[str, Any], Any]
"""What makes the value of a field: of its key, and of what the file holds for it."""


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
            given[key] = readers[kind](key, value) if kind in readers else checked(key, value, kind, **field.metadata)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise InputError(f"the key {key!r} is missing")
    return cls(**given)


def check(instance: Any, limits: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Raise FieldError where a field of a dataclass holds what it cannot have; `limits`: metadata, if not its own."""
    kinds = get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        own = field.metadata if limits is None else limits.get(field.name, {})
        checked(field.name, getattr(instance, field.name), kinds[field.name], **own)


def checked(
    key: str,
    value: object,
    kind: Any,
    zero: bool = False,
    negative: bool = False,
    most: int = MOST,
    names: Sequence[str] = (),
) -> object:
    """Return `value` as a field of the type `kind` holds it, or raise FieldError. The rest is the field's metadata."""
    same = partial(checked, zero=zero, negative=negative, most=most, names=names)
    if get_origin(kind) is UnionType and NoneType in (kinds := get_args(kind)):
        return None if value is None else same(key, value, next(k for k in kinds if k is not NoneType))
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise FieldError(key, value, "must be a list")
        return tuple(same(key, one, get_args(kind)[0]) for one in value)
    if get_origin(kind) in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise FieldError(key, value, "must be a table")
        return {name: same(f"{key}.{name}", one, get_args(kind)[1]) for name, one in value.items()}
    if names and value not in names:
        raise unknown(key, str(value), names)
    if (kind is str and isinstance(value, str) and (value or zero)) or (kind is bool and isinstance(value, bool)):
        return value
    if kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        least: float = -most if negative else 0 if zero else 1 if kind is int else LEAST
        if not least <= value <= most:
            limit = "above 0" if 0 < least < 1 else f"at least {least:.0e}" if negative else f"at least {least}"
            smallest = f"at least {least:.0e}, " if 0 < value < least < 1 else ""
            greatest = f"{most:.0e}" if most == MOST else f"{most}"
            limit += " and finite" * (kind is float)
            raise FieldError(key, value, f"must be {limit}, {smallest}at most {greatest}")
        if kind is float:
            return float(value)
        if isinstance(value, int):
            return value
    expected = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}[kind]
    raise FieldError(key, value, f"must be {expected}")
