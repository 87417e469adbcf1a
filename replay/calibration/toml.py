"""TOML as this project writes it: values, lists of values, tables, lists of tables. `tomllib` reads back the same."""

import json
from collections.abc import Iterator, Mapping
from typing import Any


def dumps(table: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """The table as a file; what stands in `comments` for a key of the top is told behind its value.

    TypeError for what has no place in it, None among it.
    """
    return "\n".join(_lines(table, "", comments or {})) + "\n"


def _lines(table: Mapping[str, Any], path: str, comments: Mapping[str, str]) -> Iterator[str]:
    """A table's own values first: what follows the head of another belongs to that."""
    tables = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    lists = {key: value for key, value in table.items() if _holds_tables(value)}
    for key, value in table.items():
        if key not in tables and key not in lists:
            yield f"{_key(key)} = {_value(value)}" + (f"  # {comments[key]}" if key in comments else "")
    for key, inner in tables.items():
        yield from ("", f"[{path}{_key(key)}]")
        yield from _lines(inner, f"{path}{_key(key)}.", {})
    for key, several in lists.items():
        for inner in several:
            yield from ("", f"[[{path}{_key(key)}]]")
            yield from _lines(inner, f"{path}{_key(key)}.", {})


def _holds_tables(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _key(text: str) -> str:
    bare = text.isascii() and text.replace("-", "").replace("_", "").isalnum()
    return text if bare else _value(text)


def _value(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON leaves as it is
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"no value of TOML: {value!r}")
