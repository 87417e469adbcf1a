"""Perfect prefetch with a horizon: after an event, the experts of the next `horizon` events of the request.

An event is a (token, layer): a horizon of 1 is one layer ahead, of L one token, a large one the rest of the request.
Unlike `oracle1`, which stays within the token, it goes on from the last layer to the next token. Each expert is
proposed once, for its first use; priority is minus the distance in events; ties fall to the lower id. An oracle.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import NOTHING, Event, Float, Int, Prefetcher, Requests, Shape
from policies.core.registry import prefetcher
from traces.errors import InputError
from traces.steps import RequestSteps


@dataclass(frozen=True)
class OracleOptions(Limits):
    """horizon: events ahead that are known."""

    horizon: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.horizon < 1:
            raise InputError(f"oracle needs a horizon of at least 1 event, not {self.horizon}")


class Horizon(NamedTuple):
    """How far is seen, and which experts the present proposal has named."""

    stamps: Int  # [L*E] number of the proposal that named each last
    numbers: Int  # [2] the horizon; proposals so far


def horizon(shape: Shape, options: OracleOptions) -> Horizon:
    """The start of a run."""
    return Horizon(np.zeros(shape.total, np.int64), np.array([options.horizon, 0]))


@compiled
def propose(seen: Horizon, event: int, offsets: Int, experts: Int, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the distinct experts of the events within the horizon of number `event`; how many.

    offsets, experts: of the whole request.
    """
    stamps = seen.stamps
    seen.numbers[1] += 1
    stamp = seen.numbers[1]
    first = event + 1
    last = min(first + seen.numbers[0], len(offsets) - 1)
    n = 0
    for ahead in range(first, last):
        for i in range(offsets[ahead], offsets[ahead + 1]):
            expert = experts[i]
            if stamps[expert] != stamp:
                stamps[expert] = stamp
                ids[n], priorities[n] = expert, event - ahead
                n += 1
        if n == len(stamps):
            break
    return n


@prefetcher("oracle", oracle=True)
class Oracle(Prefetcher):
    """The experts of the next events of the request, known ahead (oracle)."""

    Options = OracleOptions

    def __init__(self, shape: Shape, options: OracleOptions) -> None:
        super().__init__(shape, options)
        self._requests: Requests = []
        self._request: RequestSteps | None = None
        self.seen = horizon(shape, options)
        self._ids, self._priorities = np.empty(shape.total, np.int64), np.empty(shape.total)

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Keep the run's requests."""
        self._requests = requests

    def begin_request(self, request: int, seat: int) -> None:
        """Turn to the request's routing."""
        self._request = self._requests[request]

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The distinct experts of the events within the horizon."""
        if self._request is None:
            return NOTHING
        number = int(event.steps[0]) * self.shape.layers + event.layer
        future = self._request.offsets, self._request.experts
        n = propose(self.seen, number, *future, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
