"""The previous token's experts: after layer l of a token, what the token before it used in the next `depth` layers.

Past the last layer the coming token begins, whose previous token is this one: its first layers follow as far as
`depth` reaches. So what is proposed is, for each of the next `depth` layers around the cycle, the latest decoded
token's choice there. A prefill is many tokens and no token's choice: it is not remembered, nor is another request.
Priority is minus the distance in layers; ties fall to the lower id.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits, layers_ahead
from policies.core.policy import Compiled, Event, Float, Int, Prefetcher, Shape
from policies.core.ranking import add
from policies.core.registry import prefetcher
from traces.steps import DECODE


@dataclass(frozen=True)
class PreviousOptions(Limits):
    """One layer ahead, unless told otherwise; at most all but the current one."""

    keeps_to_depth = True

    depth: int = 1


class Latest(NamedTuple):
    """What the latest decoded token of each request chose."""

    chosen: Int  # [batch_slots, L, E] ids
    sizes: Int  # [batch_slots, L] how many of them
    depth: int  # layers ahead that are proposed


def begin(shape: Shape, options: PreviousOptions) -> Latest:
    depth = min(layers_ahead(options.depth, shape), shape.layers - 1)
    sizes = np.zeros((shape.batch_slots, shape.layers), np.int64)
    return Latest(np.empty((*sizes.shape, shape.experts), np.int64), sizes, depth)


def begin_request(latest: Latest, batch_slot: int) -> None:
    latest.sizes[batch_slot] = 0


@compiled
def observe(latest: Latest, event: Event) -> None:
    if event.phase == DECODE:
        for r in range(len(event.batch_slots)):
            batch_slot, first, last = event.batch_slots[r], event.offsets[r], event.offsets[r + 1]
            latest.sizes[batch_slot, event.layer] = last - first
            for i in range(first, last):
                latest.chosen[batch_slot, event.layer, i - first] = event.own_experts[i]


@compiled
def propose(latest: Latest, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the latest experts of the next layers around the cycle; how many."""
    n = 0
    for distance in range(1, latest.depth + 1):
        ahead, first = (event.layer + distance) % latest.sizes.shape[1], n
        for batch_slot in event.batch_slots:
            for i in range(latest.sizes[batch_slot, ahead]):
                n = add(ids, priorities, first, n, latest.chosen[batch_slot, ahead, i], -distance)
    return n


@prefetcher("previous")
class Previous(Prefetcher):
    """What the previous token used in the next layers."""

    Options = PreviousOptions
    compiled = Compiled(begin, observe, propose, begin_request)
