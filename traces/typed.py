"""Make typed values of a foreign table (TOML, JSON, keywords of a call): the one place that checks names and limits.

A dataclass states at each field what it may hold, by its type and `msgspec.Meta`, as in `Annotated[int, Meta(ge=1)]`.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from traces.errors import InputError, unknown

T = TypeVar("T")


def typed(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Return an instance of the dataclass `cls` with these values; numbers may be whole where a float is expected.

    Raises InputError, beginning with `where`, for an unknown key (near ones are offered), a missing key, a value of
    another type and one outside the field's limits.
    """
    prefix = f"{where}: " if where else ""
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise InputError(f"{prefix}{unknown('key', key, known)}")
    try:
        return msgspec.convert(values, cls)
    except msgspec.ValidationError as error:
        raise InputError(f"{prefix}{_reason(str(error), values)}") from None


def _reason(text: str, values: Mapping[str, Any]) -> str:
    """Return the message of msgspec with the key and the value in front."""
    reason, _, path = text.partition(" - at `$")
    if not path:
        return reason[:1].lower() + reason[1:]
    key = path.rstrip("`").lstrip(".")
    name = re.split(r"[.\[]", key)[0]
    value = f" = {values[name]!r}" if name in values else ""
    return f"{key}{value}: {reason[:1].lower()}{reason[1:].replace('`', '')}"
