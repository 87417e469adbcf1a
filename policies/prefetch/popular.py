"""Popularity prefetch: after layer l the n experts of layer l + 1 that most events so far have used.

Counts run over the whole run and include the current event; priority is the count, ties fall to the lower id,
experts never used are not proposed, and nothing is proposed at the last layer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import Compiled, Event, Float, Int, Prefetcher, Shape, bounded
from policies.core.ranking import best
from policies.core.registry import prefetcher


@dataclass(frozen=True)
class PopularOptions(Limits, policy="popular"):
    """n: experts proposed for the next layer."""

    n: int = bounded(4, least=0)


class Popularity(NamedTuple):
    """What is known of the run."""

    events: Int  # [L, E] that used each expert
    most: int  # experts proposed


def begin(shape: Shape, options: PopularOptions) -> Popularity:
    return Popularity(np.zeros((shape.layers, shape.experts), np.int64), min(options.n, shape.experts))


@compiled
def observe(known: Popularity, event: Event) -> None:
    E = known.events.shape[1]
    for expert in event.experts:
        known.events[event.layer, expert % E] += 1


@compiled
def propose(known: Popularity, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the most used of the next layer; how many."""
    L, E = known.events.shape
    most, ahead = known.most, event.layer + 1
    if ahead == L or most == 0:
        return 0
    return best(known.events[ahead], ahead * E, 0.0, ids[:most], priorities[:most])


@prefetcher("popular")
class Popular(Prefetcher):
    """The next layer's most used experts so far."""

    Options = PopularOptions
    compiled = Compiled(begin, observe, propose)
