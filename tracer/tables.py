"""The rows of a file that people have: JSON lines, JSON, CSV, TSV, Parquet or text (one a line), also gzipped.

The end of a file's name says how it is read; what its columns mean is not known here.
"""

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from traces import facts
from traces.arrays import MOST_TIMES, MOST_UNPACKED
from traces.errors import InputError
from traces.files import plain

Row = dict[str, Any]

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""What the names of files that can be read end in; .gz may follow."""


@dataclass(frozen=True)
class Table:
    """Rows, and the name of the list that held them if they come from a JSON object."""

    rows: list[Row]
    within: str | None = None


def stem(path: Path) -> str:
    """The name of a file without its ending and without .gz."""
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


def is_table(path: Path) -> bool:
    """Whether this is what `read_table` knows by its name, and no folder."""
    return path.name.removesuffix(".gz").endswith(ENDINGS) and not path.name.startswith(".") and not path.is_dir()


def read_table(path: Path, headless: Callable[[list[list[str]]], bool]) -> Table:
    """The rows of a file; `headless` tells of a CSV's lines if they have no header: its columns are "0", "1", ... then.

    Raises InputError with the line that cannot be read.
    """
    if not path.exists():
        raise InputError(f"no prompts at {path}: there is no such file or folder")
    plain(path)
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith(".parquet"):
            _require_once(path, pq.read_schema(path.absolute()).names)
            return Table(pq.read_table(path.absolute(), partitioning=None).to_pylist())
        content = path.read_bytes()
        text = (_unpacked(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, OverflowError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if name.endswith(".jsonl"):
        return Table(_json_lines(path, text))
    if name.endswith(".json"):
        return _json(path, text)
    if name.endswith((".csv", ".tsv")):
        return Table(_csv(path, text, "\t" if name.endswith(".tsv") else ",", headless))
    if name.endswith(".txt"):
        lines = io.StringIO(text, newline=None)  # str.splitlines would also cut at U+2028 and form feeds
        return Table([{"prompt": line.removesuffix("\n")} for line in lines if line.strip()])
    raise InputError(f"{path}: prompts are read from {', '.join(ENDINGS)}, also as .gz")


def _unpacked(content: bytes) -> bytes:
    """What is gzipped in `content`. Raise OSError where that is far more than it is."""
    most = max(MOST_UNPACKED, MOST_TIMES * len(content))
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        unpacked = file.read(most + 1)
    if len(unpacked) > most:
        raise OSError(f"it unpacks to more than {most} bytes, far more than it has")
    return unpacked


def _json_lines(path: Path, text: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            row = facts.parse_json(line, f"{path}: line {number}")
            if not isinstance(row, dict):
                raise InputError(f"{path}: line {number} is no JSON object")
            rows.append(row)
    return rows


def _json(path: Path, text: str) -> Table:
    """A list of objects, or an object that holds one such list."""
    content = facts.parse_json(text, str(path))
    named = content.items() if isinstance(content, dict) else [(None, content)]
    lists = [Table(value, name) for name, value in named if isinstance(value, list)]
    if len(lists) != 1 or not all(isinstance(row, dict) for row in lists[0].rows):
        raise InputError(f"{path} holds no list of JSON objects")
    return lists[0]


def _csv(path: Path, text: str, delimiter: str, headless: Callable[[list[list[str]]], bool]) -> list[Row]:
    """The rows of a table; a field may hold any length of text, with line breaks of any kind."""
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        lines = [line for line in reader if line]
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num} is no CSV: {error}") from error
    if not lines:
        return []
    names = [str(i) for i in range(max(map(len, lines)))] if headless(lines) else lines.pop(0)
    _require_once(path, [name for name in names if name])
    for number, line in enumerate(lines, start=1):
        if any(line[len(names) :]):
            reason = f"row {number} has {len(line)} fields for {len(names)} columns"
            raise InputError(f"{path}: {reason}: a text that holds {delimiter!r} needs quotes")
    return [dict(zip_longest(names, line[: len(names)])) for line in lines]


def _require_once(path: Path, names: list[str]) -> None:
    """Raise InputError for a column that stands there twice: only one of the two would be read."""
    for name, times in Counter(names).items():
        if times > 1:
            raise InputError(f"{path} has the column {name!r} twice: rename one, or take it away")
