"""Perfect prefetch one layer ahead: after the router of layer l, the experts of layer l + 1 of the same step.

A bound for what any next-layer predictor can do; at the last layer it proposes nothing. An oracle.
"""

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import NOTHING, Event, Float, Int, Prefetcher, Requests, Shape
from policies.core.registry import prefetcher
from traces.steps import RequestSteps


@compiled
def propose(event: int, L: int, offsets: Int, experts: Int, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with all experts of the layer after event number `event` of the request; how many.

    offsets, experts: of the whole request.
    """
    n = 0
    if event % L < L - 1:
        for i in range(offsets[event + 1], offsets[event + 2]):
            ids[n], priorities[n] = experts[i], 1.0
            n += 1
    return n


@prefetcher("oracle1", oracle=True)
class NextLayerOracle(Prefetcher):
    """The next layer's experts, known one layer ahead (oracle)."""

    Options = Limits

    def __init__(self, shape: Shape, options: Limits) -> None:
        super().__init__(shape, options)
        self._requests: Requests = []
        self._request: RequestSteps | None = None
        self._ids, self._priorities = np.empty(shape.experts, np.int64), np.empty(shape.experts)

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Keep the run's requests."""
        self._requests = requests

    def begin_request(self, request: int, seat: int) -> None:
        """Turn to the request's routing."""
        self._request = self._requests[request]

    def propose(self, event: Event) -> tuple[Int, Float]:
        """All experts of the next layer, at one priority."""
        if self._request is None:
            return NOTHING
        L, future = self.shape.layers, (self._request.offsets, self._request.experts)
        n = propose(int(event.steps[0]) * L + event.layer, L, *future, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
