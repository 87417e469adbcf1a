"""What is known of a dump beside the dump itself: options, and facts in a JSON.

Nothing is believed: a fact is of its kind or refused by its name, and two that disagree are refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from traces.check import MOST_POSITIONS, check_unique
from traces.errors import InputError, located
from traces.facts import parse_json, text, whole
from traces.files import plain

LONGEST_CONTEXT = 2**24
"""Tokens of a request for which rows are made, although the dump has none."""

MOST_MADE = 2**29
"""Bytes made of a dump at most, or MADE_TIMES what it holds where that is more: large numbers are cheap to write."""

MADE_TIMES = 8

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What the user says of a dump on the command line. None: nothing."""

    phase: str | None = None  # "prefill" or "decode", where the dump does not say
    experts: int | None = None  # E
    layers: int | None = None  # that the dump counts, dense ones too
    top_k: int | None = None  # k
    layer_map: str | None = None  # which of the dump's layers are MoE layers: "1-26", "3:", "[0, 2]"
    start: int | None = None  # leading tokens that the server was told to leave out
    token_ids: Path | None = None  # a .npz with `token_ids`, or a .npy, [tokens], where they lie apart


@dataclass(frozen=True)
class Source:
    """A dump to import, and all that is said of it."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)  # the JSON's content
    told: str = ""  # the file that the facts are of, for messages; the dump where there is none
    options: Options = Options()
    load_pt: Callable[[Path], Any] | None = None  # reads a torch file as plain dicts and numpy arrays
    notes: list[str] = field(default_factory=list)  # what was assumed, one line each
    asked: set[str] = field(default_factory=set)  # keys of the JSON that were looked for

    def stated(self, key: str) -> Any:
        """What the JSON has at `key`, as it is; None where it has nothing."""
        self.asked.add(key)
        return self.facts.get(key)

    def note_misspelt(self) -> None:
        """Take note of keys that differ in case from one that was looked for."""
        for key in sorted(self.facts.keys() - self.asked):
            if key.lower() in self.asked:
                self.notes.append(f"{self.told}: {key} was ignored: write {key.lower()}")

    def fact(self, key: str, kind: Callable[[str, Any], T], default: T) -> T:
        """What the JSON says of `key`, held against its kind; `default` where it says nothing."""
        self.asked.add(key)
        with located(self.told):
            return fact(self.facts, key, kind, default)

    @property
    def start(self) -> int:
        """Leading tokens that the server left out of each request that says nothing else."""
        if self.options.start is not None:
            return leading("--start", self.options.start)
        return self.fact("start", leading, 0)

    def agreed(self, key: str, option: str, have: int | None) -> int | None:
        """The number that the JSON's `key`, the option and the dump (`have`) tell; None if none does."""
        stated, said = self.fact(key, whole, None), getattr(self.options, option)
        known = [
            (have, f"{self.path} has"),
            (stated, f"{self.told} says"),
            (said, f"--{option.replace('_', '-')} says"),
        ]
        known = [(number, who) for number, who in known if number is not None]
        for number, who in known[1:]:
            if number != known[0][0]:
                raise InputError(f"{known[0][1]} {known[0][0]} {option}, but {who} {number}: correct or leave it out")
        return known[0][0] if known else None

    def disagrees(self, reason: str) -> InputError:
        """The error for facts that the dump does not bear out."""
        return InputError(f"{self.told}: {reason}")


@dataclass(frozen=True)
class Request:
    """What is known of one request. None: nothing."""

    id: str
    dataset: str = ""
    task: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    arrival_ns: int | None = None
    routed_tokens: int | None = None  # rows
    start: int = 0  # position of its first row


def fact(facts: dict[str, Any], key: str, kind: Callable[[str, Any], T], default: T) -> T:
    """What `facts` say of `key`, held against its kind; `default` where they say nothing."""
    value = facts.get(key)
    return default if value is None else kind(key, value)


def read_json(path: Path, what: str) -> Any:
    """The content of a JSON file; `what` says what it is needed for."""
    return parse_json(read_bytes(path, what), str(path))


def read_bytes(path: Path, what: str) -> bytes:
    """The content of a file; `what` says what it is needed for."""
    try:
        return plain(path).read_bytes()
    except FileNotFoundError:
        raise InputError(f"no file {path} {what}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def requests_of(source: Source, found: Sequence[dict[str, Any]]) -> list[Request]:
    """The dump's requests: what it tells of each (`found`), completed by the JSON's `requests`.

    Those are a list of objects, a count, or absent. The objects are in the dump's order; where the dump names
    its requests and each object has an id, they are matched by id.
    """
    stated = source.stated("requests")
    with located(source.told):
        number = len(stated) if isinstance(stated, list) else fact(source.facts, "requests", whole, len(found))
        if number != len(found):
            raise InputError(f"it lists {number} requests, but {source.path} holds {len(found)}")
        listed = stated if isinstance(stated, list) else [{}] * number
        for i, one in enumerate(listed):
            if not isinstance(one, dict):
                raise InputError(f"request {i} is no object; `requests` must list objects, or be a count")
        if found and all("id" in one for one in [*found, *listed]):
            listed = _by_id(listed, [one["id"] for one in found])
    requests = [_request(source, i, dict(one), listed[i]) for i, one in enumerate(found)]
    with located(source.told):
        check_unique(pd.Series([request.id for request in requests], dtype=str))
    return requests


def _by_id(listed: list[dict[str, Any]], ids: list[str]) -> list[dict[str, Any]]:
    by_id = {label("id", one["id"]): one for one in listed}
    for name in ids:
        if name not in by_id:
            raise InputError(f"it does not list the request {name!r}")
    return [by_id[name] for name in ids]


def _request(source: Source, i: int, found: dict[str, Any], told: dict[str, Any]) -> Request:
    plain = {"id": str(i), "dataset": source.fact("dataset", label, ""), "start": source.start}
    with located(source.told), located(f"request {i}"):
        known = {key: value for key, kind in _FACTS.items() if (value := fact(told, key, kind, None)) is not None}
        for key in ("prompt_tokens", "output_tokens"):
            if key in known and known[key] != found.get(key, known[key]):
                raise InputError(f"it says {known[key]} {key}, but the dump has {found[key]}")
    return Request(**{**plain, "task": known.pop("category", ""), **found, **known})


def require_modest(needed: int, held: int, what: str) -> None:
    """Raise InputError where `what`, made of a dump that holds `held` bytes, takes `needed` bytes, far more."""
    if needed > max(MOST_MADE, MADE_TIMES * held):
        raise InputError(
            f"{what} would take {needed} bytes, far more than the dump itself: correct it, or import fewer requests"
        )


def count(what: str, value: Any) -> int:
    """`value` if it is a whole number of at least 0."""
    return whole(what, value, low=0)


def tokens(what: str, value: Any) -> int:
    """`value` if it is a number of tokens."""
    return whole(what, value, low=0, high=MOST_POSITIONS)


def leading(what: str, value: Any) -> int:
    """`value` if it is a number of tokens that a server may have left out: rows are made for them."""
    return whole(what, value, low=0, high=LONGEST_CONTEXT)


def label(what: str, value: Any) -> str:
    """A text, or a whole number as one: ids and tasks are often numbered."""
    return str(count(what, value)) if isinstance(value, int) else text(what, value)


_FACTS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("id", "dataset", "task", "category"), label),
    **dict.fromkeys(("prompt_tokens", "output_tokens"), tokens),
    "start": leading,
    **dict.fromkeys(("arrival_ns", "routed_tokens"), count),
}
"""What the JSON may tell of a request."""
