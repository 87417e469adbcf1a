"""Read prompts from a file, or from all files of a folder: each with its dataset, its task and, if given, its answers.

Known datasets need no options (see `tracer.tables`). In other files, columns are found by their usual names. Options
that name columns or labels come before both; a CSV with no header has columns 0, 1, ...
"""

import textwrap
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tracer.tables import Row, is_mmlu, is_table, read_table, recognize, stem
from traces.errors import InputError
from traces.typed import Option, Positive

USUAL = {
    "prompt": (
        *("prompt", "question", "instruction", "text", "input", "inputs"),
        *("turns", "messages", "conversations", "conversation"),
    ),
    "response": (
        *("response", "completion", "output", "answer", "target", "targets", "reference"),
        "canonical_solution",
    ),
    "task": ("task", "task_name", "category", "subject", "domain", "topic"),
    "id": ("id", "task_id", "question_id", "uid"),
    "dataset": ("dataset", "source"),
}

SPEAKERS = {"human": "user", "gpt": "assistant"}
"""Who speaks in a {from, value} message, by the names of {role, content} messages."""


@dataclass(frozen=True)
class Prompt:
    """One request to be; with several turns, a conversation: one request a turn."""

    id: str
    dataset: str
    task: str
    turns: tuple[str, ...]  # the texts of the user, one a turn; at least one, none blank
    responses: tuple[str, ...] = ()  # the answer to each turn; () if the file does not give one for every turn


PANEL = "Prompts"


@dataclass(frozen=True)
class Columns:
    """Which column holds what, where the usual names do not fit; labels for all prompts alike; how many are read."""

    prompt_column: Annotated[str | None, Option("Column with the prompt; a number: no header.", PANEL)] = None
    response_column: Annotated[str | None, Option("Column with the response to force.", PANEL)] = None
    task_column: Annotated[str | None, Option("Column with the task's name.", PANEL)] = None
    id_column: Annotated[str | None, Option("Column with the request's id.", PANEL)] = None
    dataset: Annotated[str | None, Option("Dataset of all prompts.", PANEL, "its own, or the file's")] = None
    task: Annotated[str | None, Option("Task of all prompts, instead of their own.", PANEL)] = None
    limit: Annotated[Positive | None, Option("Only the first prompts; of a folder, of its first files.", PANEL)] = None


def read_prompts(path: Path, columns: Columns) -> list[Prompt]:
    """Return the first `columns.limit` prompts of a file, or of a folder's files in the order of their names.

    In a folder, files that are no tables and folders are passed over; where ids repeat from file to file, all get the
    stem of their file before them ("snarks/0"). Raise InputError with the file and row that cannot be used.
    """
    if path.is_dir():  # all: whether their ids need the name of the file must not depend on the limit
        all_of_it = replace(columns, limit=None)
        rows = [(file, one) for file in sorted(path.iterdir()) if is_table(file) for one in _read_file(file, all_of_it)]
        if len({prompt.id for _, prompt in rows}) < len(rows):
            rows = [(file, replace(prompt, id=f"{stem(file)}/{prompt.id}")) for file, prompt in rows]
        prompts = [prompt for _, prompt in rows[: columns.limit]]
    else:
        prompts = _read_file(path, columns)
    if not prompts:
        raise InputError(f"{path} holds no prompts")
    return prompts


def _read_file(path: Path, columns: Columns) -> list[Prompt]:
    table = read_table(path, lambda lines: _headless(columns, lines))
    if not table.rows:
        return []
    known = recognize(table)
    rows = table.rows if known is None else [known.read(row) for row in table.rows]
    defaults = {"dataset": known.name, "task": known.task(stem(path))} if known else {"dataset": stem(path), "task": ""}
    names = _find_columns(path, columns, rows)
    prompts = []
    for number, row in enumerate(rows[: columns.limit]):
        values = {what: row.get(name) for what, name in names.items()}
        own = {what: label if values.get(what) in (None, "") else str(values[what]) for what, label in defaults.items()}
        turns, answers = _conversation(f"{path}: row {number + 1}", names["prompt"], values["prompt"])
        between = () if columns.response_column is not None else _responses(answers, turns)
        prompts.append(
            Prompt(
                id=str(number if values.get("id") is None else values["id"]),
                turns=tuple(turns),
                responses=between or _responses(values.get("response"), turns),
                dataset=own["dataset"] if columns.dataset is None else columns.dataset,
                task=own["task"] if columns.task is None else columns.task,
            )
        )
    return prompts


def _headless(columns: Columns, lines: list[list[str]]) -> bool:
    """Whether a CSV has no header: --prompt-column is a number, or each line is a question of MMLU."""
    if columns.prompt_column is not None:
        return columns.prompt_column.isdigit()
    named = {columns.task_column, columns.id_column, columns.response_column}
    return is_mmlu(lines) and not named & set(lines[0])


def _find_columns(path: Path, columns: Columns, rows: list[Row]) -> dict[str, str]:
    """Return the columns that hold what a prompt needs: those named, which must exist, else the first usual ones."""
    have = {name for row in rows for name in row}
    listed = textwrap.shorten(", ".join(map(str, rows[0])), 300)
    chosen = {}
    for what, usual in USUAL.items():
        named = getattr(columns, f"{what}_column", None)
        if named is not None and named not in have:
            raise InputError(f"{path} has no column {named!r} for --{what}-column; it has {listed}")
        unnamed = (name for name in usual if name in have and name != columns.prompt_column)
        column = next(unnamed, None) if named is None else named
        if column is not None:
            chosen[what] = column
    if "prompt" not in chosen:
        raise InputError(f"{path} has no column like a prompt; name one with --prompt-column (has: {listed})")
    return chosen


def _conversation(where: str, column: str, value: Any) -> tuple[list[str], list[Any]]:
    """Return the user's turns, and the answers between: of a text, a list of texts, or one of messages."""
    listed = value if isinstance(value, list) and value else [value]
    answers: list[Any] = []
    if all(isinstance(item, dict) for item in listed):
        listed, answers = _dialogue(f"{where}: column {column!r}", listed)
    if not all(isinstance(turn, str) and turn.strip() for turn in listed):
        raise InputError(f"{where} has no prompt in column {column!r}")
    return listed, answers


def _dialogue(where: str, messages: list[Row]) -> tuple[list[str], list[Any]]:
    """Return the same of messages of user and assistant in turn; a system message is put before the first turn."""
    named = [str(message.get("role", message.get("from"))) for message in messages]
    speakers = [SPEAKERS.get(name, name) for name in named]
    texts: list[Any] = [message.get("content", message.get("value")) for message in messages]
    leading = int(speakers[0] == "system")
    in_turn = [("user", "assistant")[place % 2] for place in range(len(speakers) - leading)]
    if speakers[leading:] != in_turn or not in_turn:
        raise InputError(f"{where} has messages from {', '.join(speakers)}: user and assistant must take turns")
    turns, answers = texts[leading::2], texts[leading + 1 :: 2]
    if leading and turns[0].strip() and texts[0].strip():
        turns[0] = f"{texts[0]}\n\n{turns[0]}"
    return turns, answers


def _responses(answers: Any, turns: list[str]) -> tuple[str, ...]:
    """Return the answer to each turn; none at all if one is missing or blank."""
    listed = answers if isinstance(answers, list) else [answers]
    texts = tuple(str(answer) for answer in listed if isinstance(answer, str | int | float) and str(answer).strip())
    return texts if len(texts) == len(listed) == len(turns) else ()
