"""How events are made: from the routing of one request that is played alone, or of several that share a step.

An event gets copies of the routing, so that a policy that keeps it reaches nothing else. In the compiled engine, whose
policies are all of this package, it gets slices.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from policies.core.compiled import inlined
from policies.core.policy import NO_INTS, Event, Int
from traces.steps import RequestSteps

NOTHING_AHEAD = NO_INTS, NO_INTS


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
    one = np.array([0, step, 0, len(experts)])
    return Event(serial, phase, layer, experts, counts, one[:1], one[1:2], one[2:], experts, counts, *ahead)


class RequestEvents:
    """The events of one request, as it is played alone after `before` events of others.

    With `per_access` every access is an event of its own (the untimed mode), without lookahead.
    """

    def __init__(self, request: RequestSteps, layers: int, before: int = 0, per_access: bool = False) -> None:
        self.request = request
        self.layers = layers
        self.count = len(request.experts) if per_access else len(request.phase) * layers
        self._before = before
        self._first: list[int] = request.offsets.tolist()
        self._experts: list[int] = request.experts.tolist()
        self._counts: list[int] = request.counts.tolist()
        self._tokens: list[int] = request.tokens.tolist()
        self._ids = np.ascontiguousarray(request.experts)
        self._phases: list[int] = request.phase.tolist()
        self._seats = np.zeros(1, np.int64)
        self._step, self._steps = 0, np.zeros(1, np.int64)
        self._offsets: dict[int, Int] = {}  # by number of experts

    def chosen(self, step: int, layer: int) -> tuple[Int, dict[int, int]]:
        """Return the experts of that event, int64[n] ascending, and the tokens of each."""
        place = step * self.layers + layer
        first, last = self._first[place], self._first[place + 1]
        experts = self._experts[first:last]
        if self._tokens[step] == 1:
            tokens = dict.fromkeys(experts, 1)
        else:
            tokens = dict(zip(experts, self._counts[first:last], strict=True))
        return self._ids[first:last], tokens

    def event(self, step: int, layer: int) -> Event:
        """Return the event of `layer` in step number `step`."""
        lookahead, number = self.request.lookahead, step * self.layers + layer
        ahead = lookahead.after(step, layer) if lookahead else NOTHING_AHEAD
        return self._made(step, layer, self._first[number], self._first[number + 1], number, ahead)

    def accesses(self, step: int, layer: int) -> Iterator[Event]:
        """Yield an event for each access of `layer` in step number `step`."""
        number = step * self.layers + layer
        for i in range(self._first[number], self._first[number + 1]):
            yield self._made(step, layer, i, i + 1, i, NOTHING_AHEAD)

    def _made(self, step: int, layer: int, first: int, last: int, number: int, ahead: tuple[Int, Int]) -> Event:
        """Return the event of accesses `first` to `last` - 1, the `number`-th of the request."""
        request, n = self.request, last - first
        if step != self._step:
            self._step, self._steps = step, np.array([step])
        if n not in self._offsets:
            self._offsets[n] = np.array([0, n])
        experts, counts = request.experts[first:last].copy(), request.counts[first:last].copy()
        own = self._seats, self._steps, self._offsets[n], experts, counts
        return Event(self._before + number + 1, self._phases[step], layer, experts, counts, *own, *ahead)


class Merged:
    """The events of one step of several requests (rule 18): parts are (seat, step of the request, its events).

    before: how many events the run had before this step.
    """

    def __init__(self, parts: Sequence[tuple[int, int, RequestEvents]], before: int) -> None:
        self._parts = parts
        self._before = before
        self._seats = np.array([seat for seat, _, _ in parts])
        self._steps = np.array([step for _, step, _ in parts])

    def chosen(self, layer: int) -> tuple[Int, dict[int, int]]:
        """Return the experts that any request chose, int64[n] ascending, and the tokens of each."""
        if len(self._parts) == 1:
            _, step, events = self._parts[0]
            return events.chosen(step, layer)
        tokens: dict[int, int] = {}
        for _, step, events in self._parts:
            for expert, count in events.chosen(step, layer)[1].items():
                tokens[expert] = tokens.get(expert, 0) + count
        tokens = dict(sorted(tokens.items()))
        return np.array(list(tokens), np.int64), tokens

    def event(self, layer: int) -> Event:
        """Return the same as policies hear it."""
        own = [events.event(step, layer) for _, step, events in self._parts]
        ids, counts = [each.experts for each in own], [each.counts for each in own]
        offsets = np.cumsum([0, *map(len, ids)])
        ahead = merged([each.ahead_experts for each in own], [each.ahead_counts for each in own])
        together = *merged(ids, counts), self._seats, self._steps, offsets, np.concatenate(ids), np.concatenate(counts)
        return Event(self._before + layer + 1, own[0].phase, layer, *together, *ahead)


def merged(ids: Sequence[Int], counts: Sequence[Int]) -> tuple[Int, Int]:
    """Return the distinct ids, ascending, and the sum of the counts of each."""
    distinct, places = np.unique(np.concatenate(ids), return_inverse=True)
    return distinct, np.bincount(places, np.concatenate(counts), len(distinct)).astype(np.int64)


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
