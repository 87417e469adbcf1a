"""The datasets that routing is recorded on, known in their native files by what the rows look like.

A file is one of KNOWN if every row of it fits; its own name decides nothing. What is known of a dataset is its label,
the task of rows that have no column for it, and (MMLU) how a row becomes a prompt. All else is as in any other file.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tracer.tables import Row, Table

LETTERS = ("A", "B", "C", "D")


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
