"""Layer-ordered prefetch of everything: after layer l, every expert of the next `depth` layers, the nearest first.

What ZeRO-Inference does with the layers of a dense model (DeepSpeed Inference, arXiv 2207.00032), applied to
experts: no prediction, all the bytes. Priority is minus the distance in layers, so within a layer ties fall to the
lower id; nothing is proposed at the last layer, since a token's layers are streamed in their order of execution.
"""

from dataclasses import dataclass

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import Event, Float, Int, Prefetcher, Shape
from policies.core.registry import prefetcher


@dataclass(frozen=True)
class AllOptions(Limits):
    """One layer ahead, unless told otherwise."""

    keeps_to_depth = True

    depth: int = 1


@compiled
def propose(depth: Int, layer: int, L: int, E: int, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the next depth[0] layers, as far as there are any; how many experts."""
    n = 0
    for ahead in range(layer + 1, min(layer + 1 + depth[0], L)):
        for expert in range(ahead * E, (ahead + 1) * E):
            ids[n], priorities[n] = expert, layer - ahead
            n += 1
    return n


@prefetcher("all")
class All(Prefetcher):
    """Every expert of the next layers, in the order of execution."""

    Options = AllOptions
    observes = False

    def __init__(self, shape: Shape, options: AllOptions) -> None:
        super().__init__(shape, options)
        self.depth: Int = np.array([options.depth or shape.layers])
        self._ids, self._priorities = np.empty(shape.total, np.int64), np.empty(shape.total)

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The next `depth` layers, as far as there are any."""
        L, E = self.shape.layers, self.shape.experts
        n = propose(self.depth, event.layer, L, E, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
