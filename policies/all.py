"""Layer-ordered prefetch of everything: after layer l, every expert of the next `depth` layers, the nearest first.

What ZeRO-Inference does with the layers of a dense model (DeepSpeed Inference, arXiv 2207.00032), applied to
experts: no prediction, all the bytes. Priority is minus the distance in layers, so within a layer ties fall to the
lower id; nothing is proposed at the last layer, since a token's layers are streamed in their order of execution.
"""

from dataclasses import dataclass

import numpy as np

from policies.contract import NOTHING, Event, Float, Int, Prefetcher, Shape
from policies.limits import Limits
from policies.registry import prefetcher


@dataclass(frozen=True)
class AllOptions(Limits):
    """One layer ahead, unless told otherwise."""

    keeps_to_depth = True

    depth: int = 1


@prefetcher("all")
class All(Prefetcher):
    """Every expert of the next layers, in the order of execution."""

    Options = AllOptions
    observes = False

    def __init__(self, shape: Shape, options: AllOptions) -> None:
        super().__init__(shape, options)
        self._ids: Int = np.arange(shape.total, dtype=np.int64)
        self._priorities: Float = -np.repeat(np.arange(1.0, shape.layers + 1), shape.experts)
        self._most = (options.depth or shape.layers) * shape.experts

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The next `depth` layers, as far as there are any."""
        first = (event.layer + 1) * self.shape.experts
        ids = self._ids[first : first + self._most]
        return (ids, self._priorities[: len(ids)]) if len(ids) else NOTHING
