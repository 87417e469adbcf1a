"""Which requests take part in which step. The loop plays the steps of a schedule and knows no requests beyond a step's.

So far requests run one after another. Batches of several users (rule 18) will be a second schedule: it decides at each
step boundary, from the time, whom it admits.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from policies.core.events import RequestEvents, alone
from policies.core.policy import NO_INTS, Event, Int, Requests


class Place(NamedTuple):
    """A request that takes part in a step."""

    ordinal: int  # in the order of play, which policies hear
    seat: int  # its place in the batch
    request: int  # index in the trace
    tokens: int


class Routing(Protocol):
    """What the routers of one step choose: all that a session asks of it, a layer at a time."""

    def chosen(self, layer: int) -> tuple[Int, dict[int, int]]:
        """Return the experts that the router of `layer` chose, int64[n] ascending, and the tokens of each.

        Nobody asks before that router has ended (rule 16).
        """
        ...

    def event(self, layer: int) -> Event:
        """Return the same as policies hear it."""
        ...


class LiveStep:
    """A step of the only request, of a model that runs now: `put` what a router has chosen, then have it routed.

    number: of the step in its request; events: how many the run had before this step.
    """

    def __init__(self, phase: int, number: int, events: int) -> None:
        self._phase = phase
        self._number = number
        self._events = events
        self._layer, self._experts, self._counts = -1, NO_INTS, NO_INTS

    def put(self, layer: int, experts: Int, counts: Int) -> None:
        """The router of `layer` has ended; experts: distinct ids over all layers, ascending; counts: tokens of each."""
        self._events += 1
        self._layer = layer
        self._experts, self._counts = np.ascontiguousarray(experts, np.int64), np.ascontiguousarray(counts, np.int64)

    def chosen(self, layer: int) -> tuple[Int, dict[int, int]]:
        """Return what was put."""
        assert layer == self._layer, "put what the router has chosen before it is routed"
        return self._experts, dict(zip(self._experts.tolist(), self._counts.tolist(), strict=True))

    def event(self, layer: int) -> Event:
        """Return the same as policies hear it."""
        return alone(self._phase, layer, self._number, self._experts.copy(), self._counts.copy(), self._events)


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
        """Return what the router of `layer` chose (`Routing`)."""
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
