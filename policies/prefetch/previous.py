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
from policies.core.limits import Limits
from policies.core.policy import Event, Float, Int, Prefetcher, Shape
from policies.core.registry import prefetcher
from traces.steps import DECODE


@dataclass(frozen=True)
class PreviousOptions(Limits):
    """One layer ahead, unless told otherwise; at most all but the current one."""

    keeps_to_depth = True

    depth: int = 1


class Latest(NamedTuple):
    """What the latest decoded token of the request chose."""

    chosen: Int  # [L, E] ids
    sizes: Int  # [L] how many of them
    depth: Int  # [1] layers ahead that are proposed


def nothing_decoded(shape: Shape, options: PreviousOptions) -> Latest:
    """The start of a run."""
    depth = min(options.depth or shape.layers, shape.layers - 1)
    chosen = np.empty((shape.layers, shape.experts), np.int64)
    return Latest(chosen, np.zeros(shape.layers, np.int64), np.array([depth]))


@compiled
def observe(latest: Latest, phase: int, layer: int, experts: Int, first: int, last: int) -> None:
    """Remember the token's choice."""
    if phase == DECODE:
        latest.sizes[layer] = last - first
        for i in range(first, last):
            latest.chosen[layer, i - first] = experts[i]


@compiled
def propose(latest: Latest, layer: int, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the latest experts of the next layers around the cycle; how many."""
    n = 0
    for distance in range(1, latest.depth[0] + 1):
        ahead = (layer + distance) % len(latest.sizes)
        for i in range(latest.sizes[ahead]):
            ids[n], priorities[n] = latest.chosen[ahead, i], -distance
            n += 1
    return n


@prefetcher("previous")
class Previous(Prefetcher):
    """What the previous token used in the next layers."""

    Options = PreviousOptions

    def __init__(self, shape: Shape, options: PreviousOptions) -> None:
        super().__init__(shape, options)
        self.latest = nothing_decoded(shape, options)
        self._ids, self._priorities = np.empty(shape.total, np.int64), np.empty(shape.total)

    def begin_request(self, request: int, seat: int) -> None:
        """No token has been decoded."""
        self.latest.sizes[:] = 0

    def observe(self, event: Event) -> None:
        """Remember the token's choice."""
        observe(self.latest, event.phase, event.layer, event.experts, 0, len(event.experts))

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The latest choices of the next layers, around the cycle."""
        n = propose(self.latest, event.layer, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
