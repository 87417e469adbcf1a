"""Perfect prefetch with a horizon: after an event, the experts of the next `horizon` events of the request.

An event is a (token, layer): a horizon of 1 is one layer ahead, of L one token, a large one the rest of the request.
Unlike `oracle1`, which stays within the token, it goes on from the last layer to the next token. Each expert is
proposed once, for its first use; priority is minus the distance in events; ties fall to the lower id. An oracle.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from policies.contract import NOTHING, Event, Float, Int, Prefetcher, Requests, Shape
from policies.limits import Limits
from policies.registry import prefetcher
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


@njit(cache=True, nogil=True)
def _look_ahead(
    offsets: Int, experts: Int, first: int, last: int, stamps: Int, stamp: int, ids: Int, priorities: Float
) -> int:
    """Fill ids and priorities with the distinct experts of events `first` to `last` - 1; how many."""
    n = 0
    for event in range(first, last):
        for i in range(offsets[event], offsets[event + 1]):
            expert = experts[i]
            if stamps[expert] != stamp:
                stamps[expert] = stamp
                ids[n], priorities[n] = expert, first - event - 1
                n += 1
        if n == len(ids):
            break
    return n


@prefetcher("oracle", oracle=True)
class Oracle(Prefetcher):
    """The experts of the next events of the request, known ahead (oracle)."""

    Options = OracleOptions

    def __init__(self, shape: Shape, options: OracleOptions) -> None:
        super().__init__(shape, options)
        self._horizon = options.horizon
        self._requests: Requests = []
        self._request: RequestSteps | None = None
        self._stamps: Int = np.zeros(shape.total, np.int64)
        self._proposals = 0
        self._ids, self._priorities = np.empty(shape.total, np.int64), np.empty(shape.total)

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Keep the run's requests."""
        self._requests = requests

    def begin_request(self, request: int) -> None:
        """Turn to the request's routing."""
        self._request = self._requests[request]

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The distinct experts of the events within the horizon."""
        if self._request is None:
            return NOTHING
        offsets = self._request.offsets
        first = event.step * self.shape.layers + event.layer + 1
        last = min(first + self._horizon, len(offsets) - 1)
        self._proposals += 1
        buffers = self._stamps, self._proposals, self._ids, self._priorities
        n = _look_ahead(offsets, self._request.experts, first, last, *buffers)
        return self._ids[:n], self._priorities[:n]
