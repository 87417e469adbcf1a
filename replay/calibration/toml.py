"""TOML as this project writes it: values, tables, and lists of tables under headings. `tomllib` reads back the same.

A GPU machine has no library that writes it.
"""

import json
from collections.abc import Mapping
from typing import Any


def dumps(table: Mapping[str, Any]) -> str:
    values, headed = [], []
    for key, value in table.items():
        if isinstance(value, Mapping):
            headed += ["", f"[{_key(key)}]", *_lines(value)]
        elif isinstance(value, list | tuple) and value and all(isinstance(each, Mapping) for each in value):
            headed += [line for inner in value for line in ("", f"[[{_key(key)}]]", *_lines(inner))]
        else:
            values += _lines({key: value})
    return "\n".join([*values, *headed]) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items()]


def _key(text: str) -> str:
    bare = text.isascii() and text.replace("-", "").replace("_", "").isalnum()
    return text if bare else _value(text)


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(_lines(value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON leaves as it is
    return repr(value)
