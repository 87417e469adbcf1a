"""JSON as it is read from people and other programs, and as every reader of it can read what is written."""

import json
import math
from typing import Any

from traces.errors import InputError


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
