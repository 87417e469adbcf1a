"""Fewest reads of host memory, beside `belady`, where the host computes what misses: an oracle with a lead.

A copy reads an expert once, as the host's compute of it would. So a copy saves a read only if the expert is used once
more before the expert that leaves for it is used: its priority is minus the event of that use, on one scale with
Belady's scores (rule 6). docs/contract.md, *Oracles*.
"""

from dataclasses import dataclass

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import NO_INTS, Compiled, Event, Float, Int, Options, Requests, Shape, bounded
from policies.core.registry import prefetcher
from policies.prefetch.oracle import Foreseeing, Horizon
from policies.prefetch.oracle import begin as foreseen
from policies.retention.belady import NEVER, Belady, next_uses


@dataclass(frozen=True)
class LeadOptions(Limits, policy="fewest-reads"):
    """lead: layers ahead of its use that a copy begins, at most."""

    lead: int = bounded(1, least=1)


def begin(shape: Shape, options: LeadOptions) -> Horizon:
    return foreseen(shape, options)._replace(horizon=options.lead)


@compiled
def propose(seen: Horizon, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the distinct experts of the next events of each request; how many."""
    seen.proposals[0] += 1
    n = 0
    for r in range(len(event.batch_slots)):
        batch_slot = event.batch_slots[r]
        offsets, first = seen.offsets[seen.starts[batch_slot, 0] :], seen.starts[batch_slot, 1]
        now = event.steps[r] * seen.layers + event.layer
        last = min(now + seen.horizon, seen.ends[batch_slot] - 1)
        for i in range(first + offsets[now + 1], first + offsets[last + 1]):
            expert = seen.experts[i]
            if seen.stamps[expert] != seen.proposals[0]:
                seen.stamps[expert] = seen.proposals[0]
                ids[n] = expert
                priorities[n] = (now if len(seen.ends) > 1 else 0) - seen.following[i]
                n += 1
    return n


@prefetcher("fewest-reads", oracle=True)
class FewestReads(Foreseeing):
    """What is used within a lead and once more before what leaves for it, known ahead (oracle)."""

    Options = LeadOptions
    compiled = Compiled(begin, propose=propose)
    one_scale_with = "belady"

    def __init__(self, shape: Shape, options: LeadOptions) -> None:
        super().__init__(shape, options)
        self._belady = Belady(shape, Options())
        self._following = [NO_INTS] * shape.batch_slots

    def foresee(self, requests: Requests) -> None:
        super().foresee(requests)
        self._belady.foresee(requests)

    def begin_request(self, request: int, batch_slot: int) -> None:
        super().begin_request(request, batch_slot)
        if self.shape.batch_slots > 1:
            routed, never = self.routing(request), np.full(self.shape.total, NEVER, np.int64)
            self._following[batch_slot] = next_uses(routed.offsets, routed.experts, len(routed.offsets) - 1, never)
        else:
            self._belady.begin_request(request, batch_slot)
            self._following[batch_slot] = self._belady.state.following
        running = [uses for uses, routed in zip(self._following, self._running, strict=True) if routed]
        self.state = self.state._replace(following=np.concatenate([NO_INTS, *running]))
