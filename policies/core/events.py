"""How events are made: from the routing of one request that is played alone.

An event gets copies, so that a policy that keeps, or spoils, an event's arrays reaches nothing else. In the compiled
engine, whose policies are all of this package, it gets slices.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from policies.core.compiled import inlined
from policies.core.policy import NO_INTS, Event, Int
from traces.steps import RequestSteps


def alone(
    phase: int,
    layer: int,
    step: int,
    experts: Int,
    counts: Int,
    serial: int = 0,
    ahead: tuple[Int, Int] = (NO_INTS, NO_INTS),
) -> Event:
    """Return an event of the only request, in step number `step`."""
    own = np.zeros(1, np.int64), np.array([step]), np.array([0, len(experts)])
    return Event(serial, phase, layer, experts, counts, *own, experts, counts, *ahead)


class RequestEvents:
    """The events of one request, as it is played alone after `before` events of others.

    With `per_access` every access is an event of its own (the untimed mode), without lookahead.
    """

    def __init__(self, request: RequestSteps, layers: int, before: int = 0, per_access: bool = False) -> None:
        self.request = request
        self.layers = layers
        self._before = before
        self.count = len(request.experts) if per_access else len(request.phase) * layers
        self._offsets: list[int] = request.offsets.tolist()
        self._experts: list[int] = request.experts.tolist()
        self._counts: list[int] = request.counts.tolist()
        self._phases: list[int] = request.phase.tolist()
        self._seats, self._steps = np.zeros(1, np.int64), np.zeros(1, np.int64)  # of every event, as `_ends`
        self._ends: dict[int, Int] = {}

    def chosen(self, step: int, layer: int) -> tuple[Int, dict[int, int]]:
        """Return the experts of that event, int64[n] ascending, and the tokens of each."""
        place = step * self.layers + layer
        first, last = self._offsets[place], self._offsets[place + 1]
        tokens = dict(zip(self._experts[first:last], self._counts[first:last], strict=True))
        return self.request.experts[first:last], tokens

    def event(self, step: int, layer: int) -> Event:
        """Return the event of `layer` in step number `step`."""
        request, number = self.request, step * self.layers + layer
        chosen = slice(self._offsets[number], self._offsets[number + 1])
        experts, counts = request.experts[chosen].copy(), request.counts[chosen].copy()
        ahead = request.lookahead.after(step, layer) if request.lookahead else (NO_INTS, NO_INTS)
        if (ends := self._ends.get(len(experts))) is None:
            ends = self._ends[len(experts)] = np.array([0, len(experts)])
        self._steps[0] = step
        serial, phase = self._before + number + 1, self._phases[step]
        own = self._seats, self._steps, ends
        return Event(serial, phase, layer, experts, counts, *own, experts, counts, *ahead)

    def accesses(self, step: int, layer: int) -> Iterator[Event]:
        """Yield an event for each access of `layer` in step number `step`."""
        request, number = self.request, step * self.layers + layer
        for i in range(self._offsets[number], self._offsets[number + 1]):
            one = slice(i, i + 1)
            experts, counts = request.experts[one].copy(), request.counts[one].copy()
            yield alone(self._phases[step], layer, step, experts, counts, self._before + i + 1)


class Routing(NamedTuple):
    """A request's routing as the compiled engine takes it; without lookahead the arrays of that are empty."""

    phase: Int  # [S]
    offsets: Int  # [S * L + 1]
    experts: Int  # [A]
    counts: Int  # [A]
    ahead_offsets: Int  # [S * L + 1]
    ahead_experts: Int
    ahead_counts: Int
    seats: Int  # [1] of the event at hand, as are:
    steps: Int  # [1]
    own: Int  # [2] offsets of the only request


def routing_of(request: RequestSteps) -> Routing:
    """Return the request's arrays."""
    ahead = request.lookahead
    picks = (ahead.offsets, ahead.experts, ahead.counts) if ahead else (NO_INTS, NO_INTS, NO_INTS)
    arrays = map(np.ascontiguousarray, (request.offsets, request.experts, request.counts, *picks))
    alone = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(2, np.int64)
    return Routing(*(request.phase.astype(np.int64), *arrays, *alone))


@inlined
def event_at(routing: Routing, step: int, layer: int, L: int, serial: int) -> Event:
    """Return the event of `layer` in step number `step`; the one before is gone."""
    number = step * L + layer
    first, last = routing.offsets[number], routing.offsets[number + 1]
    routing.steps[0] = step
    routing.own[1] = last - first
    begin = end = 0
    if len(routing.ahead_offsets) and layer < L - 1:
        begin, end = routing.ahead_offsets[number + 1], routing.ahead_offsets[number + 2]
    experts, counts = routing.experts[first:last], routing.counts[first:last]
    return Event(
        serial,
        routing.phase[step],
        layer,
        experts,
        counts,
        routing.seats,
        routing.steps,
        routing.own,
        experts,
        counts,
        routing.ahead_experts[begin:end],
        routing.ahead_counts[begin:end],
    )
