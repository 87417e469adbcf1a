"""Read prompts from JSON lines, JSON, CSV, Parquet or text (one a line), each with its dataset and task.

Columns are found by their usual names unless options name them; a CSV with no header has columns 0, 1, ...
"""

import csv
import gzip
import io
import zlib
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from traces import facts
from traces.errors import InputError

Record = dict[str, Any]

USUAL = {
    "prompt": ("prompt", "question", "instruction", "text", "input", "turns"),
    "task": ("task", "category", "subject", "domain", "topic"),
    "id": ("id", "task_id", "question_id", "uid"),
    "dataset": ("dataset", "source"),
}


@dataclass(frozen=True)
class Prompt:
    """One request to be."""

    id: str
    dataset: str
    task: str
    text: str


@dataclass(frozen=True)
class Columns:
    """Which column holds what, where the usual names do not fit; and labels for all prompts alike."""

    prompt: str | None = None
    task: str | None = None
    id: str | None = None
    labels: dict[str, str] = field(default_factory=dict)  # "dataset" and "task" -> their value for every prompt


def read_prompts(path: Path, columns: Columns, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file; raises InputError with the row that cannot be used."""
    records = _records(path, headless=(columns.prompt or "").isdigit())
    if limit is not None:
        records = records[:limit]
    if not records:
        raise InputError(f"{path} holds no prompts")
    names = {what: _column(path, records, what, getattr(columns, what, None)) for what in USUAL}
    if names["prompt"] is None:
        have = ", ".join(map(str, records[0]))
        raise InputError(f"{path} has no column that looks like a prompt; name one with --prompt-column (has: {have})")
    labels = {"dataset": _stem(path), **columns.labels}
    prompts = []
    for row, record in enumerate(records):
        held = {what: record.get(name) for what, name in names.items() if name is not None}
        held |= {what: label for what, label in labels.items() if what in columns.labels or not held.get(what)}
        text = held["prompt"][0] if isinstance(held["prompt"], list) and held["prompt"] else held["prompt"]
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{path}: row {row + 1} has no prompt in column {names['prompt']!r}")
        identity = row if held.get("id") is None else held["id"]
        values = (str(identity), str(held["dataset"]), str(held.get("task") or ""), text)
        prompts.append(Prompt(*(facts.text(f"{path}: row {row + 1}: a value", value) for value in values)))
    _require_unique(path, prompts)
    return prompts


def _records(path: Path, headless: bool) -> list[Record]:
    """The rows of a file, by the end of its name; .gz is unpacked."""
    if not path.is_file():
        raise InputError(f"no prompts at {path}: there is no such file")
    name = path.name.removesuffix(".gz")
    try:
        if name.endswith(".parquet"):
            rows: list[Record] = pq.read_table(path, partitioning=None).to_pylist()
            return rows
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, pa.ArrowException) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if name.endswith(".jsonl"):
        return _json_lines(path, text)
    if name.endswith(".json"):
        return _json(path, text)
    if name.endswith((".csv", ".tsv")):
        return _csv(path, text, "\t" if name.endswith(".tsv") else ",", headless)
    if name.endswith(".txt"):
        return [{"prompt": line} for line in text.splitlines() if line.strip()]
    raise InputError(f"{path}: prompts are read from .jsonl, .json, .csv, .tsv, .parquet or .txt, also as .gz")


def _json_lines(path: Path, text: str) -> list[Record]:
    records = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            record = facts.parse_json(line, f"{path}: line {number}")
            if not isinstance(record, dict):
                raise InputError(f"{path}: line {number} is no JSON object")
            records.append(record)
    return records


def _json(path: Path, text: str) -> list[Record]:
    """A list of objects, or an object that holds one such list."""
    content = facts.parse_json(text, str(path))
    lists = [value for value in content.values() if isinstance(value, list)] if isinstance(content, dict) else [content]
    if len(lists) != 1 or not isinstance(lists[0], list) or not all(isinstance(row, dict) for row in lists[0]):
        raise InputError(f"{path} holds no list of JSON objects")
    return lists[0]


def _csv(path: Path, text: str, delimiter: str, headless: bool) -> list[Record]:
    """The rows of a table; a field may hold any length of text, with line breaks of any kind."""
    csv.field_size_limit(2**31 - 1)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        rows = [line for line in lines if line]
    except csv.Error as error:
        raise InputError(f"{path}: line {lines.line_num} is no CSV: {error}") from error
    if not rows:
        return []
    names = [str(i) for i in range(max(map(len, rows)))] if headless else rows.pop(0)
    return [dict(zip_longest(names, line[: len(names)])) for line in rows]


def _column(path: Path, records: list[Record], what: str, named: str | None) -> str | None:
    """The column that holds `what`: the one named, which must be there, else the first usual one."""
    have = records[0]
    if named is not None:
        if named not in have:
            raise InputError(f"{path} has no column {named!r} for --{what}-column; it has {', '.join(map(str, have))}")
        return named
    return next((name for name in USUAL[what] if name in have), None)


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").rsplit(".", 1)[0]


def _require_unique(path: Path, prompts: list[Prompt]) -> None:
    seen: set[str] = set()
    for row, prompt in enumerate(prompts):
        if prompt.id in seen:
            raise InputError(f"{path}: row {row + 1} repeats the id {prompt.id!r}; name another with --id-column")
        seen.add(prompt.id)
