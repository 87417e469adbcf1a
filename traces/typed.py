"""Make typed values of a foreign table (TOML, JSON, keywords of a call): the one place that checks names and limits.

A dataclass states at each field what it may hold, by its type and `msgspec.Meta`, as in `Annotated[int, Meta(ge=1)]`.
"""

import dataclasses
import re
import reprlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec

from traces.errors import InputError, unknown

T = TypeVar("T")

Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclasses.dataclass(frozen=True)
class Option:
    """What commands print of a field annotated with it. shown: the default in the help, where it is not the value."""

    help: str
    panel: str | None = None
    shown: str | None = None


def typed(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Return an instance of the dataclass `cls` with these values; numbers may be whole where a float is expected.

    Raises InputError, beginning with `where`, for an unknown key (near ones are offered), a missing key, a value of
    another type and one outside the field's limits, also in tables of a list of dataclasses.
    """
    prefix = f"{where}: " if where else ""
    _require_known(cls, values, prefix)
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, InputError):  # of `__post_init__`
            raise InputError(f"{prefix}{error.__cause__}") from None
        raise InputError(f"{prefix}{_reason(str(error), values)}") from None


def _require_known(cls: Any, values: Mapping[str, Any], prefix: str) -> None:
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    kinds = get_type_hints(cls)
    for key, value in values.items():
        if key not in known:
            raise unknown("key", key, known, prefix.removesuffix(": "))
        inner = next(filter(dataclasses.is_dataclass, get_args(kinds[key])), None)
        tables = value.items() if isinstance(value, Mapping) else enumerate(value if isinstance(value, list) else ())
        for place, table in tables if inner else ():
            if isinstance(table, Mapping):
                _require_known(inner, table, f"{prefix}{key}[{place}]: ")


def _reason(text: str, values: Any) -> str:
    """Return the message of msgspec with the key and the value in front."""
    reason, _, path = text.partition(" - at `$")
    reason = f"{reason[:1].lower()}{reason[1:].replace('`', '')}"
    key = path.rstrip("`").lstrip(".")
    for step in re.findall(r"[^.\[\]]+", key):
        if isinstance(values, Mapping) and step in values:
            values = values[step]
        elif isinstance(values, list) and step.isdigit():
            values = values[int(step)]
        else:  # of a value of a mapping msgspec names no key
            return f"{key}: {reason}"
    value = "" if isinstance(values, Mapping) else f" = {reprlib.repr(values)}"
    return f"{key}{value}: {reason}" if key else reason
