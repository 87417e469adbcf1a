"""Perfect prefetch one layer ahead: after the router of layer l, the experts of layer l + 1 of the same step.

A bound for what any next-layer predictor can do; at the last layer it proposes nothing. An oracle.
"""

import numpy as np

from policies.contract import NOTHING, Event, Float, Int, Prefetcher, Requests, Shape
from policies.limits import Limits
from policies.registry import prefetcher
from traces.steps import RequestSteps


@prefetcher("oracle1", oracle=True)
class NextLayerOracle(Prefetcher):
    """The next layer's experts, known one layer ahead (oracle)."""

    Options = Limits

    def __init__(self, shape: Shape, options: Limits) -> None:
        super().__init__(shape, options)
        self._requests: Requests = []
        self._request: RequestSteps | None = None

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Keep the run's requests."""
        self._requests = requests

    def begin_request(self, request: int) -> None:
        """Turn to the request's routing."""
        self._request = self._requests[request]

    def propose(self, event: Event) -> tuple[Int, Float]:
        """All experts of the next layer, at one priority."""
        if self._request is None or event.layer == self.shape.layers - 1:
            return NOTHING
        following = event.step * self.shape.layers + event.layer + 1
        first, last = self._request.offsets[following : following + 2]
        experts = self._request.experts[first:last]
        return experts, np.ones(len(experts))
