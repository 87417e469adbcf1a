"""Which requests take part in which step. The loop plays the steps of a schedule and knows no requests beyond a step's.

So far requests run one after another. Batches of several users (rule 18) will be a second schedule: it decides at each
step boundary, from the time, whom it admits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from policies.core.events import RequestEvents
from policies.core.policy import Event, Int, Requests


class Place(NamedTuple):
    """A request that takes part in a step."""

    ordinal: int  # in the order of play, which policies hear
    seat: int  # its place in the batch
    request: int  # index in the trace
    tokens: int


@dataclass(slots=True)
class Step:
    """One forward pass of one or more requests.

    begins: places of the requests whose first step this is; ends: of those whose last one it is. `more`: whether any
    request runs, waits or is still to arrive when it has ended.
    """

    phase: int
    tokens: int
    context: int
    places: tuple[Place, ...]
    begins: tuple[Place, ...]
    ends: tuple[Place, ...]
    more: bool
    events: RequestEvents
    number: int  # of the step in its request

    def chosen(self, layer: int) -> tuple[Int, dict[int, int]]:
        """Return the experts that the router of `layer` chose, int64[n] ascending, and the tokens of each.

        Nobody asks before that router has ended (rule 16).
        """
        return self.events.chosen(self.number, layer)

    def event(self, layer: int) -> Event:
        """Return the same as policies hear it."""
        return self.events.event(self.number, layer)


class Schedule(Protocol):
    """The steps of a run, one at a time."""

    def steps(self, first: int = 0) -> Iterator[Step]:
        """Yield the steps, from those of the request with ordinal `first` on."""
        ...


class OneAtATime:
    """The requests of a trace, one after another."""

    def __init__(self, requests: Requests, layers: int) -> None:
        self._requests = requests
        self._layers = layers

    def steps(self, first: int = 0) -> Iterator[Step]:
        """Yield each request's prefill and then its decoded tokens, from the request with ordinal `first` on."""
        last = len(self._requests) - 1
        before = sum(len(self._requests[ordinal].phase) for ordinal in range(first)) * self._layers
        for ordinal in range(first, last + 1):
            events = RequestEvents(self._requests[ordinal], self._layers, before)
            before += events.count
            yield from _steps_of(ordinal, events, more=ordinal < last)


def _steps_of(ordinal: int, events: RequestEvents, more: bool) -> Iterator[Step]:
    request = events.request
    last = len(request.tokens) - 1
    each = zip(request.phase.tolist(), request.tokens.tolist(), request.context.tolist(), strict=True)
    for number, (phase, tokens, context) in enumerate(each):
        places = (Place(ordinal, 0, request.request, tokens),)
        begins, ends = places if number == 0 else (), places if number == last else ()
        yield Step(phase, tokens, context, places, begins, ends, more or number < last, events, number)
