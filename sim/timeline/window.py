"""Which part of a run a timeline shows: everything from one moment to another, both ends of steps or of requests."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from traces.errors import InputError
from traces.steps import DECODE

if TYPE_CHECKING:
    from policies.core.policy import Requests

TOKENS, REQUESTS = "--tokens", "--window-requests"

SHOWN_WHOLE = 2_000
"""Steps up to which a run is shown whole unasked."""
FIRST = 100
"""Decode steps, or requests where nothing is decoded, that are shown of a longer run."""


@dataclass(frozen=True)
class Window:
    """From where `first` decode steps, or requests, of the run have ended, to where `last` have."""

    of: Literal["decode steps", "requests"]
    first: int
    last: int | None  # None: to the end of the run
    stops: bool = True  # whether run stops with the request in which the window ends


WHOLE = Window("requests", 0, None)


def parse(tokens: str | None, requests: str | None) -> Window | None:
    """The window as given, FROM:TO with either left out, TO not included; None without one. InputError."""
    stated = {option: text for option, text in ((TOKENS, tokens), (REQUESTS, requests)) if text is not None}
    match = re.fullmatch(r"(\d*):(\d*)", " ".join(stated.values()).strip())
    first, last = (int(end) if end else None for end in match.groups()) if match else (0, 0)
    if stated and last is not None and last <= (first or 0):
        asked_for = " and ".join(f"{option} {text!r}" for option, text in stated.items())
        raise InputError(f"{asked_for}: give one window FROM:TO, TO not included and above FROM: 100:140 or :40")
    return Window("requests" if tokens is None else "decode steps", first or 0, last) if stated else None


def check(window: Window, requests: "Requests") -> None:
    """InputError for a window that begins where the run has ended."""
    if window.of == "requests":
        found = len(requests)
    else:
        found = _counted((int((request.phase == DECODE).sum()) for request in requests), window.first)
    if found <= window.first:
        option = REQUESTS if window.of == "requests" else TOKENS
        raise InputError(f"{option} begins at {window.first}: the run has {found} {window.of}, counted from 0")


def first_steps(requests: "Requests") -> Window:
    """All of a short run, else its beginning; run continues after that."""
    if _counted((len(request.phase) for request in requests), SHOWN_WHOLE) <= SHOWN_WHOLE:
        return WHOLE
    decodes = any((request.phase == DECODE).any() for request in requests)
    return Window("decode steps" if decodes else "requests", 0, FIRST, stops=False)


def _counted(steps: Iterable[int], enough: int) -> int:
    """The sum of `steps`, or what it is once it is above `enough`: a long trace is not read for it."""
    found = 0
    for n in steps:
        found += n
        if found > enough:
            break
    return found
