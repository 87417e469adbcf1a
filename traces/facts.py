"""Facts that people and other programs wrote down: each is what it should be, or refused by its name.

JSON is parsed here, and its values are taken as whole numbers or texts, never converted silently. What is written as
JSON can be read by every reader of it.
"""

import json
import math
import reprlib
from typing import Any

from traces.errors import InputError

LARGEST = 2**63 - 1
"""What a signed 64-bit number holds."""


def parse_json(content: str | bytes, what: str) -> Any:
    """Return the content of a JSON text; the InputError starts with `what`."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{what} is no JSON: {error}") from None


def finite(value: Any) -> Any:
    """Return the same for JSON, which knows no infinity: it is written as text."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def whole(what: str, value: Any, low: int = 1, high: int = LARGEST) -> int:
    """Return `value` if it is a whole number from `low` to `high`."""
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    limits = f"from {low} to {high}" if high < LARGEST else f"of at least {low}"
    raise InputError(f"{what} is {reprlib.repr(value)}; a whole number {limits} is needed")


def text(what: str, value: Any) -> str:
    """`value` if it is a text that a file can hold (JSON can spell halves of characters, which none can)."""
    if isinstance(value, str) and value.encode(errors="ignore").decode() == value:
        return value
    raise InputError(f"{what} is {reprlib.repr(value)}; a text is needed")
