"""Popularity prefetch: after layer l the n experts of layer l + 1 that most events so far have used.

Counts run over the whole run and include the current event; priority is the count, ties fall to the lower id,
experts never used are not proposed, and nothing is proposed at the last layer.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from policies.contract import NOTHING, Event, Float, Int, Prefetcher, Shape
from policies.limits import Limits
from policies.registry import prefetcher
from traces.errors import InputError


@dataclass(frozen=True)
class PopularOptions(Limits):
    """n: experts proposed for the next layer."""

    n: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 0:
            raise InputError(f"popular needs n >= 0, not {self.n}")


@njit(cache=True, nogil=True)
def _count(events: Int, experts: Int, first: int, last: int) -> None:
    for i in range(first, last):
        events[experts[i]] += 1


@njit(cache=True, nogil=True)
def _most_used(events: Int, layer: int, E: int, best: Int, priorities: Float) -> int:
    """Fill `best` with the most used experts of `layer`, ties to the lower id; how many of them were ever used."""
    n = 0
    for expert in range(layer * E, (layer + 1) * E):
        used = events[expert]
        if used == 0 or (n == len(best) and used <= priorities[n - 1]):
            continue
        place = min(n, len(best) - 1)
        while place > 0 and priorities[place - 1] < used:
            best[place], priorities[place] = best[place - 1], priorities[place - 1]
            place -= 1
        best[place], priorities[place] = expert, used
        n = min(n + 1, len(best))
    return n


@prefetcher("popular")
class Popular(Prefetcher):
    """The next layer's most used experts so far."""

    Options = PopularOptions

    def __init__(self, shape: Shape, options: PopularOptions) -> None:
        super().__init__(shape, options)
        self._events = np.zeros(shape.total, np.int64)
        n = min(options.n, shape.experts)
        self._best, self._priorities = np.empty(n, np.int64), np.empty(n)

    def observe(self, event: Event) -> None:
        """Count the event for each of its experts."""
        _count(self._events, event.request_experts, event.first, event.last)

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The n most used of the next layer."""
        if event.layer == self.shape.layers - 1 or not len(self._best):
            return NOTHING
        n = _most_used(self._events, event.layer + 1, self.shape.experts, self._best, self._priorities)
        return self._best[:n], self._priorities[:n]
