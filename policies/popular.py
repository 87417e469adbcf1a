"""Popularity prefetch: after layer l the n experts of layer l + 1 that most events so far have used.

Counts run over the whole run and include the current event; priority is the count, ties fall to the lower id,
experts never used are not proposed, and nothing is proposed at the last layer.
"""

from dataclasses import dataclass

import numpy as np

from policies.contract import NOTHING, Event, Float, Int, Prefetcher, Shape
from policies.registry import prefetcher


@dataclass(frozen=True)
class PopularOptions:
    """n: experts proposed for the next layer."""

    n: int = 4


@prefetcher("popular")
class Popular(Prefetcher):
    """The next layer's most used experts so far."""

    Options = PopularOptions

    def __init__(self, shape: Shape, options: PopularOptions) -> None:
        super().__init__(shape, options)
        self._n = options.n
        self._events = np.zeros(shape.total, np.int64)

    def observe(self, event: Event) -> None:
        """Count the event for each of its experts."""
        self._events[event.experts] += 1

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The n most used of the next layer."""
        if event.layer == self.shape.layers - 1:
            return NOTHING
        base = (event.layer + 1) * self.shape.experts
        counts = self._events[base : base + self.shape.experts]
        best = np.argsort(-counts, kind="stable")[: self._n]
        best = best[counts[best] > 0]
        return best + base, counts[best].astype(np.float64)
