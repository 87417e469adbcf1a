"""Files of answers of a server's HTTP interface: a JSON object or list (.json), or a line for each (.jsonl).

Lines of OpenAI's batch format, {"custom_id", "response": {"body"}}, are unwrapped. Experts stand in an answer as
base64 text, or as nested lists.
"""

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError, located
from traces.facts import parse_json
from traces.files import plain
from traces.importers.source import label, read_json, tokens

NEEDED = "to import"


@dataclass(frozen=True)
class Answer:
    """One answer, and where it stands."""

    place: str
    body: dict[str, Any]
    id: str


def answers(path: Path) -> Iterator[Answer]:
    """The answers in a file, one at a time. Raises InputError."""
    serial = count()
    for place, value in _values(path):
        listed = value if isinstance(value, list) else [value]
        for i, body in enumerate(listed):
            yield _answer(f"{place} answer {i}" if len(listed) > 1 else place, body, f"{path.stem}-{next(serial)}")


def is_file(path: Path) -> bool:
    """Whether a file is of answers, by its name."""
    return path.suffix in (".json", ".jsonl")


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".json":
        yield str(path), read_json(path, NEEDED)
        return
    try:
        with plain(path).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path} line {number}", parse_json(line, f"{path} line {number}")
    except FileNotFoundError:
        raise InputError(f"no file {path} {NEEDED}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _answer(place: str, body: Any, fallback: str) -> Answer:
    name = None
    if isinstance(body, dict) and isinstance(body.get("response"), dict):
        name, body = body.get("custom_id"), body["response"].get("body")
    if not isinstance(body, dict):
        raise InputError(f"{place} is no answer of a server: no JSON object")
    if "error" in body and body["error"] is not None:
        raise InputError(f"{place} is an error of the server, not an answer: {str(body['error'])[:200]}")
    meta = body.get("meta_info")
    names = (name, body.get("id"), body.get("request_id"), meta.get("id") if isinstance(meta, dict) else None)
    name = next((one for one in names if one is not None), fallback)
    with located(place):
        return Answer(place, body, label("id", name))


def token_count(place: str, counts: Any, key: str) -> int | None:
    """`counts[key]` if it is a number of tokens; None if it is not there."""
    value = counts.get(key) if isinstance(counts, dict) else None
    with located(place):
        return None if value is None else tokens(key, value)


def token_ids(place: str, holder: dict[str, Any], key: str) -> list[int] | None:
    """The list of token ids under `key`; None if there is none."""
    ids = holder.get(key)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one < 2**31 for one in ids):
        raise InputError(f"{place}: {key} is no list of token ids")
    return ids


def taken_in(
    prompt: list[int] | None, prompt_tokens: int | None, output: list[int] | None, rows: int
) -> NDArray[np.int32] | None:
    """Ids [rows] of the tokens that the rows' passes took in, the last of the sequence left out; None if none is known.

    -1 where an answer tells only those of the prompt, or of what was generated. The rows are the sequence's last ones.
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


def unbase64(place: str, value: Any) -> bytes:
    """The bytes of a base64 text. Raises InputError."""
    if not isinstance(value, str):
        raise InputError(f"{place}: routed_experts is {type(value).__name__}, not a base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(f"{place}: routed_experts is no base64: {error}") from error
