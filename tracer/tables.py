"""The rows of a file that people have: JSON lines, JSON, CSV, TSV, Parquet or text (one a line), also gzipped.

The end of a file's name says how it is read; what its columns mean is not known here.
"""

import csv
import gzip
import io
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from traces import facts
from traces.errors import InputError, refuse

Row = dict[str, Any]

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""What the names of files that can be read end in; .gz may follow."""


class Table(NamedTuple):
    """Rows, and the name of the list that held them if they come from a JSON object."""

    rows: list[Row]
    within: str | None = None


def stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


def is_table(path: Path) -> bool:
    """Whether `read_table` reads a file of this name."""
    return path.name.removesuffix(".gz").endswith(ENDINGS) and not path.name.startswith(".") and not path.is_dir()


def read_table(path: Path, headless: Callable[[list[list[str]]], bool]) -> Table:
    """Return the rows of a file. headless: whether these lines of a CSV have no header; columns are "0", "1", ..."""
    name = path.name.removesuffix(".gz")
    refuse(
        (not path.exists(), f"no prompts at {path}: there is no such file or folder"),
        (not name.endswith(ENDINGS), f"{path}: prompts are read from {', '.join(ENDINGS)}, also as .gz"),
    )
    if name.endswith(".parquet"):
        return Table(pq.read_table(path.absolute(), partitioning=None).to_pylist())
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    if name.endswith(".jsonl"):
        lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
        return Table([facts.parse_json(line, f"{path}: line {number}") for number, line in lines])
    if name.endswith(".json"):
        return _json(path, text)
    if name.endswith(".txt"):
        prompts = io.StringIO(text, newline=None)  # str.splitlines would also cut at U+2028 and form feeds
        return Table([{"prompt": prompt.removesuffix("\n")} for prompt in prompts if prompt.strip()])
    return Table(_csv(path, text, "\t" if name.endswith(".tsv") else ",", headless))


def _json(path: Path, text: str) -> Table:
    """Return the rows of a list of objects, or of an object that holds one such list."""
    content = facts.parse_json(text, str(path))
    named = content.items() if isinstance(content, dict) else [(None, content)]
    (table,) = (Table(value, name) for name, value in named if isinstance(value, list))
    return table


def _csv(path: Path, text: str, delimiter: str, headless: Callable[[list[list[str]]], bool]) -> list[Row]:
    """Return the rows of a table; a field may hold any length of text, with line breaks of any kind."""
    csv.field_size_limit(2**31 - 1)
    lines = [line for line in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True) if line]
    if not lines:
        return []
    names = [str(i) for i in range(max(map(len, lines)))] if headless(lines) else lines.pop(0)
    for number, line in enumerate(lines, start=1):
        if any(line[len(names) :]):
            reason = f"row {number} has {len(line)} fields for {len(names)} columns"
            raise InputError(f"{path}: {reason}: a text that holds {delimiter!r} needs quotes")
    return [dict(zip_longest(names, line[: len(names)])) for line in lines]
