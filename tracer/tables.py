"""The rows of a file that people have: JSON lines, JSON, CSV, TSV, Parquet or text (one a line), also gzipped.

The end of a file's name says how it is read. Datasets that routing is recorded on are known in their native files by
what the rows look like: a file is one of KNOWN if every row of it fits; its own name decides nothing. What is known of
a dataset is its label, the task of rows that have no column for it, and (MMLU) how a row becomes a prompt.
"""

import csv
import io
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

from traces import facts
from traces.errors import InputError, refuse
from traces.files import unpacked

Row = dict[str, Any]

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
"""What the names of files that can be read end in; .gz may follow."""

LETTERS = ("A", "B", "C", "D")


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
    text = unpacked(path).decode("utf-8-sig")
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


@dataclass(frozen=True)
class Dataset:
    """A dataset in its native file."""

    name: str
    fits: Callable[[Row], bool]  # what each of its rows looks like
    task: Callable[[str], str]  # the task of a row that has no column with one, from the stem of the file's name
    read: Callable[[Row], Row] = dict  # the row with its prompt and response under usual names
    within: str | None = None  # the name of the list that holds the rows in a JSON object


def recognize(table: Table) -> Dataset | None:
    """The dataset that these rows are of; None if it is not a known one."""
    fitting = (known for known in KNOWN if known.within in (None, table.within) and all(map(known.fits, table.rows)))
    return next(fitting, None)


def is_mmlu(lines: list[list[str]]) -> bool:
    """Whether each line is a question, four choices and the right one's letter."""
    return all(len(line) == 6 and line[5].strip() in LETTERS for line in lines)


def _texts(row: Row, *columns: str) -> bool:
    return all(isinstance(row.get(column), str) for column in columns)


def _is_mt_bench(row: Row) -> bool:
    turns = row.get("turns")
    two = isinstance(turns, list) and len(turns) == 2 and all(isinstance(turn, str) for turn in turns)
    return two and _texts(row, "category") and "question_id" in row


def _read_mmlu(row: Row) -> Row:
    """The wording of Hendrycks et al. (2021), format_example in evaluate.py; the numbered columns stay for options."""
    question, *choices, answer = row.values()
    lines = [question, *(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)), "Answer:"]
    return {**row, "question": "\n".join(lines) if question.strip() else "", "answer": answer.strip()}


def _subject(stem: str) -> str:
    head, _, split = stem.rpartition("_")
    return head if head and split in ("test", "dev", "val") else stem


KNOWN = (
    # A worked answer ends in "#### 18".
    Dataset("gsm8k", lambda row: _texts(row, "question", "answer") and "####" in row["answer"], lambda _: "gsm8k"),
    # No other columns: HumanEval-X, HumanEval+ and MBPP+ have these and more.
    Dataset(
        "humaneval",
        lambda row: (
            _texts(row, "task_id", "prompt", "canonical_solution")
            and row.keys() <= {"task_id", "prompt", "canonical_solution", "entry_point", "test"}
        ),
        lambda _: "humaneval",
    ),
    Dataset("mt_bench", _is_mt_bench, lambda _: ""),
    Dataset("bbh", lambda row: _texts(row, "input", "target") and len(row) == 2, str, within="examples"),
    Dataset(
        "mmlu",
        lambda row: len(row) == 6 and _texts(row, *"012345") and row["5"].strip() in LETTERS,
        _subject,
        _read_mmlu,
    ),
    Dataset("flan", lambda row: _texts(row, "inputs", "targets"), str),
)
