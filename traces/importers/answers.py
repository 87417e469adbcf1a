"""Files of answers of a server's HTTP interface: a JSON object or list (.json), or a line for each (.jsonl).

Lines of OpenAI's batch format, {"custom_id", "response": {"body"}}, are unwrapped. Experts stand in an answer as
base64 text, or as nested lists.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.facts import parse_json
from traces.importers.source import Count, read_json

TokenIds = list[Count]


@dataclass(frozen=True)
class Usage:
    """How many tokens an answer counts."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None


@dataclass(frozen=True)
class Answer:
    """One answer, and where it stands."""

    place: str
    body: dict[str, Any]
    id: str


def answers(path: Path) -> Iterator[Answer]:
    """Yield the answers in a file, or in those of a folder in the order of their names. Raises InputError."""
    if path.is_dir():
        for file in sorted(path.glob("*.json*")):
            yield from answers(file)
        return
    if path.suffix == ".json":
        value = read_json(path)
        for number, body in enumerate(value if isinstance(value, list) else [value]):
            yield _answer(f"{path} answer {number}", body, number, path)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(filter(bytes.strip, lines)):
            yield _answer(f"{path} answer {number}", parse_json(line, f"{path} answer {number}"), number, path)


def _answer(place: str, body: Any, number: int, path: Path) -> Answer:
    name = None
    if isinstance(body, dict) and isinstance(body.get("response"), dict):
        name, body = body.get("custom_id"), body["response"].get("body")
    if not isinstance(body, dict) or body.get("error"):
        raise InputError(f"{place} is an error of the server, or no answer: {str(body)[:200]}")
    meta = body.get("meta_info")
    names = (name, body.get("id"), body.get("request_id"), meta.get("id") if isinstance(meta, dict) else None)
    return Answer(place, body, str(next((one for one in names if one is not None), f"{path.stem}-{number}")))


def taken_in(
    prompt: list[int] | None, prompt_tokens: int | None, output: list[int] | None, rows: int
) -> NDArray[np.int32] | None:
    """Return ids [rows] of the tokens that the rows' passes took in, without the sequence's last; None if unknown.

    -1 where an answer holds only those of the prompt, or of what was generated. The rows are the sequence's last ones.
    """
    if prompt is None and (output is None or prompt_tokens is None):
        return None
    first = (prompt_tokens or 0) if prompt is None else len(prompt)
    length = max(first, rows) if output is None else first + max(0, len(output) - 1)
    if length < rows:
        return None
    known, left_out = np.full(rows, -1, np.int32), length - rows
    for begin, ids in ((0, prompt), (first, output and output[:-1])):
        shown = (ids or [])[max(0, left_out - begin) :]
        at = max(0, begin - left_out)
        known[at : at + len(shown)] = shown
    return known
