"""Perfect prefetch with a horizon: after an event, the experts of the next `horizon` events of the request.

A horizon of 1 is one layer ahead, of L one token, and so on to the end of the request. Each expert is proposed once,
for its first use; priority is minus the distance in events; ties to the lower id. `oracle1` stays within the token:
after layer l all experts of layer l + 1, at one priority. It is the bound of what any next-layer predictor can do.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import NO_INTS, Compiled, Event, Float, Int, Prefetcher, Requests, Shape, bounded
from policies.core.registry import prefetcher
from traces.steps import RequestSteps


@dataclass(frozen=True)
class OracleOptions(Limits, policy="oracle"):
    """horizon: events ahead that are known."""

    horizon: int = bounded(1, least=1)


class Horizon(NamedTuple):
    """The requests that run, one behind the other, and which experts the present proposal has named."""

    offsets: Int  # of each request in a batch slot [S * L + 1], into its own experts
    experts: Int  # of each [A]
    starts: Int  # [batch_slots, 2] where each begins in both
    ends: Int  # [batch_slots] events of each
    stamps: Int  # [L*E] number of the proposal that named each last
    proposals: Int  # [1] how many so far
    following: Int  # [A] of `fewest-reads`, the event of each one's next use, numbered as Belady does
    horizon: int
    layers: int


def begin(shape: Shape, options: Limits) -> Horizon:
    horizon = options.horizon if isinstance(options, OracleOptions) else 1
    starts, ends = np.zeros((shape.batch_slots, 2), np.int64), np.zeros(shape.batch_slots, np.int64)
    stamps, proposals = np.zeros(shape.total, np.int64), np.zeros(1, np.int64)
    return Horizon(NO_INTS, NO_INTS, starts, ends, stamps, proposals, NO_INTS, horizon, shape.layers)


@compiled
def add_next(seen: Horizon, event: Event, distance: int, ids: Int, priorities: Float, n: int, priority: float) -> int:
    """Add what the requests choose `distance` events after this one, each expert once in a proposal; how many then."""
    for r in range(len(event.batch_slots)):
        batch_slot = event.batch_slots[r]
        ahead = event.steps[r] * seen.layers + event.layer + distance
        if ahead < seen.ends[batch_slot]:
            offsets, experts = seen.offsets[seen.starts[batch_slot, 0] :], seen.experts[seen.starts[batch_slot, 1] :]
            for i in range(offsets[ahead], offsets[ahead + 1]):
                expert = experts[i]
                if seen.stamps[expert] != seen.proposals[0]:
                    seen.stamps[expert] = seen.proposals[0]
                    ids[n], priorities[n] = expert, priority
                    n += 1
    return n


@compiled
def propose(seen: Horizon, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the distinct experts of the events within the horizon; how many."""
    seen.proposals[0] += 1
    n, farthest = 0, 0
    for r in range(len(event.batch_slots)):
        left = seen.ends[event.batch_slots[r]] - event.steps[r] * seen.layers - event.layer - 1
        farthest = max(farthest, min(left, seen.horizon))
    for distance in range(1, farthest + 1):
        n = add_next(seen, event, distance, ids, priorities, n, -distance)
        if n == len(seen.stamps):
            break
    return n


@compiled
def propose_layer(seen: Horizon, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with all experts of the next layer, at one priority; how many."""
    seen.proposals[0] += 1
    return add_next(seen, event, 1, ids, priorities, 0, 1.0) if event.layer < seen.layers - 1 else 0


class Foreseeing(Prefetcher):
    """A prefetcher whose state is the routing of the requests that run."""

    def __init__(self, shape: Shape, options: Limits) -> None:
        super().__init__(shape, options)
        self._requests: Requests = []
        self._running: list[RequestSteps | None] = [None] * shape.batch_slots

    def foresee(self, requests: Requests) -> None:
        self._requests = requests

    def routing(self, request: int) -> RequestSteps:
        """Return what is known of a request."""
        return self._requests[request]

    def begin_request(self, request: int, batch_slot: int) -> None:
        self._running[batch_slot] = self.routing(request)
        offsets, experts = [NO_INTS], [NO_INTS]
        for place, running in enumerate(self._running):
            self.state.starts[place] = sum(map(len, offsets)), sum(map(len, experts))
            if running:
                self.state.ends[place] = len(running.offsets) - 1
                offsets.append(running.offsets)
                experts.append(running.experts)
        self.state = self.state._replace(offsets=np.concatenate(offsets), experts=np.concatenate(experts))

    def end_request(self, batch_slot: int) -> None:
        self._running[batch_slot] = None


@prefetcher("oracle", oracle=True)
class Oracle(Foreseeing):
    """The experts of the next events of the request, known ahead (oracle)."""

    Options = OracleOptions
    compiled = Compiled(begin, propose=propose)


@prefetcher("oracle1", oracle=True)
class NextLayerOracle(Foreseeing):
    """The next layer's experts, known one layer ahead (oracle)."""

    Options = Limits
    compiled = Compiled(begin, propose=propose_layer)
