"""How events are made: from the routing of one request that is played alone.

An event gets copies, so that a policy that keeps, or spoils, an event's arrays reaches nothing else.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

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
    return Event(
        serial, phase, layer, experts, counts, SEAT_0, number(step), ends(len(experts)), experts, counts, *ahead
    )


SEAT_0: Int = np.zeros(1, np.int64)
SEAT_0.flags.writeable = False


@lru_cache(4)
def number(n: int) -> Int:
    """Return int64[1] that holds `n`, shared and read-only."""
    array = np.array([n], np.int64)
    array.flags.writeable = False
    return array


@lru_cache(1024)
def ends(n: int) -> Int:
    """Return the offsets of one request with `n` experts, shared and read-only."""
    array = np.array([0, n], np.int64)
    array.flags.writeable = False
    return array


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
        return alone(self._phases[step], layer, step, experts, counts, self._before + number + 1, ahead)

    def accesses(self, step: int, layer: int) -> Iterator[Event]:
        """Yield an event for each access of `layer` in step number `step`."""
        request, number = self.request, step * self.layers + layer
        for i in range(self._offsets[number], self._offsets[number + 1]):
            one = slice(i, i + 1)
            experts, counts = request.experts[one].copy(), request.counts[one].copy()
            yield alone(self._phases[step], layer, step, experts, counts, self._before + i + 1)
