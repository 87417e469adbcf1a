"""Popularity prefetch: after layer l the n experts of layer l + 1 that most events so far have used.

Counts run over the whole run and include the current event; priority is the count, ties fall to the lower id,
experts never used are not proposed, and nothing is proposed at the last layer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import Event, Float, Int, Prefetcher, Shape
from policies.core.registry import prefetcher
from traces.errors import InputError


@dataclass(frozen=True)
class PopularOptions(Limits):
    """n: experts proposed for the next layer."""

    n: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 0:
            raise InputError(f"popular needs n >= 0, not {self.n}")


class Popularity(NamedTuple):
    """What is known."""

    events: Int  # [L*E] that used each expert
    most: Int  # [1] experts proposed


def nothing_used(shape: Shape, options: PopularOptions) -> Popularity:
    """The start of a run."""
    return Popularity(np.zeros(shape.total, np.int64), np.array([min(options.n, shape.experts)]))


@compiled
def observe(known: Popularity, experts: Int, first: int, last: int) -> None:
    """Count the event for each of its experts."""
    for i in range(first, last):
        known.events[experts[i]] += 1


@compiled
def propose(known: Popularity, layer: int, L: int, E: int, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the most used of the next layer; how many."""
    most = known.most[0]
    if layer == L - 1 or most == 0:
        return 0
    return _most_used(known.events, layer + 1, E, ids[:most], priorities[:most])


@compiled
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
        self.known = nothing_used(shape, options)
        self._ids, self._priorities = np.empty(shape.experts, np.int64), np.empty(shape.experts)

    def observe(self, event: Event) -> None:
        """Count the event for each of its experts."""
        observe(self.known, event.experts, 0, len(event.experts))

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The n most used of the next layer."""
        L, E = self.shape.layers, self.shape.experts
        n = propose(self.known, event.layer, L, E, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
