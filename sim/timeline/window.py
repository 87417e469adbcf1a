"""Which part of a run a timeline shows: everything between the ends of two of its decode steps."""

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from traces.errors import InputError
from traces.steps import DECODE

if TYPE_CHECKING:
    from policies.core.policy import Requests

SHOWN_WHOLE = 2_000
"""Steps up to which a run is shown whole unasked."""
FIRST = 100
"""Decode steps, or prefills where nothing is decoded, that are shown of a longer run."""


@dataclass(frozen=True)
class Window:
    """From where `first` decode steps of the run have ended to where `last` have; of prefills, if it has no others."""

    first: int
    last: int | None  # None: to the end of the run
    decodes: bool = True
    stops: bool = True  # whether the run stops with the request in which the window ends


WHOLE = Window(0, None)


def chosen(tokens: str, requests: "Requests") -> Window:
    """Return the window FROM:TO, either left out, TO not included. Raise InputError for one that shows nothing."""
    match = re.fullmatch(r"(\d*):(\d*)", tokens.strip())
    first, last = (int(end) if end else None for end in match.groups()) if match else (0, 0)
    if last is not None and last <= (first or 0):
        raise InputError(f"--tokens {tokens!r}: write FROM:TO, TO not included and above FROM, as in 100:140 or :40")
    window = Window(first or 0, last)
    counts = (int((request.phase == DECODE).sum()) for request in requests)
    found = 0
    for found in accumulate(counts):
        if found > window.first:
            return window
    raise InputError(f"--tokens begins at {window.first}: the run has {found} decode steps, counted from 0")


def first_steps(requests: "Requests") -> Window:
    """Return all of a short run, else its beginning, behind which the run continues."""
    if all(steps <= SHOWN_WHOLE for steps in accumulate(len(request.phase) for request in requests)):
        return WHOLE
    decodes = any((request.phase == DECODE).any() for request in requests)
    return Window(0, FIRST, decodes, stops=False)
