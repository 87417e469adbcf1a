"""Read prompts from a file, or from all files of a folder: each with its dataset, its task and, if given, its answers.

Known datasets need no options (see `tracer.datasets`). In other files, columns are found by their usual names. Options
that name columns or labels come before both; a CSV with no header has columns 0, 1, ...
"""

import reprlib
import textwrap
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracer.datasets import first_unlike_mmlu, recognize
from tracer.tables import ENDINGS, Row, is_table, read_table, stem
from traces import facts
from traces.errors import InputError

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
    turns: tuple[str, ...]  # what the user says, one text a turn; at least one, none blank
    responses: tuple[str, ...] = ()  # the answer to each turn; () if the file does not give one for every turn


@dataclass(frozen=True)
class Columns:
    """Which column holds what, where the usual names do not fit; and labels for all prompts alike."""

    prompt: str | None = None
    task: str | None = None
    id: str | None = None
    labels: dict[str, str] = field(default_factory=dict)  # "dataset" and "task" -> their value for every prompt
    response: str | None = None


def read_prompts(path: Path, columns: Columns, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, or of a folder's files in the order of their names.

    In a folder, files that are no tables and folders are passed over; where ids repeat from file to file, all get the
    stem of their file before them ("snarks/0"). Raises InputError with the file and row that cannot be used.
    """
    return _read_folder(path, columns)[:limit] if path.is_dir() else _read_file(path, columns, limit)


def _read_folder(path: Path, columns: Columns) -> list[Prompt]:
    """All prompts: whether their ids need the name of the file must not depend on a limit."""
    try:
        files = [file for file in sorted(path.iterdir()) if is_table(file)]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not files:
        raise InputError(f"{path} holds no prompts: none of its files ends in {', '.join(ENDINGS)} or these with .gz")
    found = [(file, prompt) for file in files for prompt in _read_file(file, columns)]
    if len({prompt.id for _, prompt in found}) < len(found):
        found = [(file, replace(prompt, id=f"{stem(file)}/{prompt.id}")) for file, prompt in found]
    owners: dict[str, Path] = {}
    for file, prompt in found:
        owner = owners.setdefault(prompt.id, file)
        if owner != file:
            raise InputError(f"{path}: {owner.name} and {file.name} both hold a request {prompt.id!r}; take one away")
    return [prompt for _, prompt in found]


def _read_file(path: Path, columns: Columns, limit: int | None = None) -> list[Prompt]:
    table = read_table(path, lambda lines: _headless(path, columns, lines))
    if not table.rows:
        raise InputError(f"{path} holds no prompts")
    known = recognize(table)
    rows = table.rows if known is None else [known.read(row) for row in table.rows]
    defaults = {"dataset": known.name, "task": known.task(stem(path))} if known else {"dataset": stem(path), "task": ""}
    names = _find_columns(path, columns, rows)
    prompts = []
    for number, row in enumerate(rows[:limit]):
        where = f"{path}: row {number + 1}"
        held = {what: row.get(name) for what, name in names.items()}
        own = {what: label if held.get(what) in (None, "") else held[what] for what, label in defaults.items()}
        labels = own | columns.labels
        turns, answers = _said(where, names["prompt"], held["prompt"])
        spoken = () if columns.response is not None else _responses(answers, turns)
        prompt = Prompt(
            id=_label(where, number if held.get("id") is None else held["id"]),
            dataset=_label(where, labels["dataset"]),
            task=_label(where, labels["task"]),
            turns=tuple(turns),
            responses=spoken or _responses(held.get("response"), turns),
        )
        for text in (*prompt.turns, *prompt.responses):
            facts.text(f"{where}: a value", text)
        prompts.append(prompt)
    _require_unique(path, prompts)
    return prompts


def _label(where: str, value: Any) -> str:
    """An id, a task or a data set, which may be numbered. Raise InputError for what holds others, or no number."""
    if isinstance(value, list | dict | bytes) or value != value:
        raise InputError(f"{where}: a label is {reprlib.repr(value)}; a text or a number is needed")
    return facts.short(f"{where}: a label", str(value))


def _headless(path: Path, columns: Columns, lines: list[list[str]]) -> bool:
    """Whether a CSV has no header: --prompt-column is a number, or each line is a question of MMLU."""
    if columns.prompt is not None:
        return columns.prompt.isdigit()
    unlike = first_unlike_mmlu(lines)
    if unlike is None:
        return not {columns.task, columns.id, columns.response} & set(lines[0])
    if unlike > 0 and not set(USUAL["prompt"]) & set(lines[0]):
        raise InputError(
            f"{path}: row {unlike + 1} is not a question, four choices and a letter from A to D, as row 1 is "
            "(MMLU without a header); for another kind of table, name its prompts with --prompt-column"
        )
    return False


def _find_columns(path: Path, columns: Columns, rows: list[Row]) -> dict[str, str]:
    """The columns that hold what a prompt needs: those named, which must be there, else the first usual ones."""
    have = {name for row in rows for name in row}
    found = {}
    for what, usual in USUAL.items():
        named = getattr(columns, what, None)
        if named is not None and named not in have:
            raise InputError(f"{path} has no column {named!r} for --{what}-column; it has {_names(rows)}")
        unnamed = (name for name in usual if name in have and name != columns.prompt)
        column = next(unnamed, None) if named is None else named
        if column is not None:
            found[what] = column
    if "prompt" not in found:
        raise InputError(
            f"{path} has no column that looks like a prompt; name one with --prompt-column (has: {_names(rows)})"
        )
    return found


def _names(rows: list[Row]) -> str:
    return textwrap.shorten(", ".join(map(str, rows[0])), 300)


def _said(where: str, column: str, value: Any) -> tuple[list[str], list[Any]]:
    """What the user says turn by turn, and the answers between: of a text, a list of texts, or one of messages."""
    listed = value if isinstance(value, list) and value else [value]
    if all(isinstance(item, dict) for item in listed):
        return _dialogue(f"{where}: column {column!r}", listed)
    for number, turn in enumerate(listed, start=1):
        if not isinstance(turn, str) or not turn.strip():
            which = f" for turn {number}" if len(listed) > 1 else ""
            raise InputError(f"{where} has no prompt in column {column!r}{which}")
    return listed, []


def _dialogue(where: str, messages: list[Row]) -> tuple[list[str], list[Any]]:
    """What user and assistant say in turn; a system message may come first, and is put before the first turn."""
    said = [_message(message) for message in messages]
    leading = int(said[0][0] == "system")
    if len(said) == leading:
        raise InputError(f"{where} has no message of the user")
    for place, (speaker, text) in enumerate(said):
        due = "system" if place < leading else ("user", "assistant")[(place - leading) % 2]
        if speaker != due:
            raise InputError(f"{where} has message {place + 1} from {speaker!r}, not from the {due}, whose turn it is")
        if speaker != "assistant" and not (isinstance(text, str) and (text.strip() or speaker == "system")):
            raise InputError(f"{where} has no text in message {place + 1}")
    texts = [text for _, text in said]
    turns, answers = texts[leading::2], texts[leading + 1 :: 2]
    opening = [text for text in texts[: leading + 1] if text.strip()]
    return ["\n\n".join(opening), *turns[1:]], answers


def _message(message: Row) -> tuple[str, Any]:
    """Who says what: {role, content} or {from, value}."""
    speaker = str(message.get("role", message.get("from")))
    return SPEAKERS.get(speaker, speaker), message.get("content", message.get("value"))


def _responses(answers: Any, turns: list[str]) -> tuple[str, ...]:
    """The answer to each turn; none at all if one is missing or blank."""
    listed = answers if isinstance(answers, list) else [answers]
    texts = tuple(str(answer) for answer in listed if isinstance(answer, str | int | float) and str(answer).strip())
    return texts if len(texts) == len(listed) == len(turns) else ()


def _require_unique(path: Path, prompts: list[Prompt]) -> None:
    seen: set[str] = set()
    for row, prompt in enumerate(prompts):
        if prompt.id in seen:
            raise InputError(f"{path}: row {row + 1} repeats the id {prompt.id!r}; name another with --id-column")
        seen.add(prompt.id)
