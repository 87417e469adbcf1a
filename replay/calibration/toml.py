"""TOML as this project writes it: values, then tables and lists of tables. `tomllib` reads back the same.

A GPU machine has no library that writes it.
"""

import json
from collections.abc import Mapping
from typing import Any


def dumps(table: Mapping[str, Any], above: str = "") -> str:
    """Return a table as text. above: the names of those that it lies in, each with a point behind it."""
    values, headed = [], []
    for key, value in table.items():
        name = key if key.isascii() and key.isidentifier() else _text(key)
        if isinstance(value, Mapping):
            headed += ["", f"[{above}{name}]", dumps(value, f"{above}{name}.")]
        elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
            headed += [line for each in value for line in ("", f"[[{above}{name}]]", dumps(each, f"{above}{name}."))]
        else:
            values.append(f"{name} = {_text(value)}")
    return "\n".join([*values, *headed])


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON leaves as it is
