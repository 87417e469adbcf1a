"""Expert-map search by trajectory, as fMoE / FineMoE does (arXiv 2502.05370, sections 4.1 to 4.4).

An expert map is what one step chose in every layer. After layer l, the layers 0 to l of this step are matched by
cosine against the same layers of stored maps. Of the nearest one, in each of the next `distance` layers i, the most
chosen experts are proposed: as many as reach the mass 1 - cosine, at least as many as the current event has, none
that the map did not choose; priority is their share of the layer's mass / (i - l). A step's map is stored at its end;
when the store is full it replaces the most similar one, which is the most redundant. Ties: the lower place in the
store, the lower id; a map that shares nothing with this step is no match.

The real system stores the gate's probabilities; a trace has choices, so maps hold counts, 0 or 1 in decode, where the
top-k then always reach the mass. It proposes for layer l + distance alone and leaves earlier proposals queued; here
every proposal replaces the queue (rule 4), so the layers up to there are proposed with it. Its search by prompt
embedding, which serves the first `distance` layers before a trajectory exists and weighs in the redundancy, is left
out: traces of routing alone have no embeddings.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from policies.contract import NOTHING, Event, Float, Int, Prefetcher, Shape
from policies.ranking import best
from policies.registry import prefetcher
from traces.errors import InputError

NO_MATCH = -1
MOST_MAPS = 100_000


@dataclass(frozen=True)
class ExpertMapOptions:
    """capacity: maps kept; distance: layers ahead that are proposed."""

    capacity: int = 1000
    distance: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.capacity <= MOST_MAPS or self.distance < 1:
            raise InputError(
                f"expert-map needs a capacity of 1 to {MOST_MAPS:,} maps and a distance of at least 1 layer, "
                f"not {self.capacity} and {self.distance}"
            )


@njit(cache=True, nogil=True)
def _extend(
    dots: Int, stored: NDArray[np.int32], own: Int, size: int, experts: Int, counts: Int, first: int, last: int
) -> int:
    """Add an event to the step's map and to its dot product with every stored one; the event's squared norm."""
    squares = 0
    for i in range(first, last):
        own[experts[i]] = counts[i]
        squares += counts[i] * counts[i]
        for c in range(size):
            dots[c] += counts[i] * stored[experts[i], c]
    return squares


@njit(cache=True, nogil=True)
def _nearest(dots: Int, squares: Int, size: int) -> int:
    """The stored map of the greatest cosine above 0, NO_MATCH without one. squares: its squared norm so far."""
    nearest, greatest = NO_MATCH, 0.0
    for c in range(size):
        if dots[c] > 0:
            cosine = dots[c] / np.sqrt(squares[c])
            if cosine > greatest:
                nearest, greatest = c, cosine
    return nearest


@njit(cache=True, nogil=True)
def _candidates(
    stored: NDArray[np.int32],
    entry: int,
    cosine: float,
    least: int,
    layer: int,
    until: int,
    shares: Float,
    order: Int,
    ranked: Float,
    ids: Int,
    priorities: Float,
) -> int:
    """Fill ids and priorities with what `entry` proposes for the layers after `layer` before `until`; how many."""
    E = len(shares)
    n = 0
    for i in range(layer + 1, until):
        total = 0
        for e in range(E):
            total += stored[i * E + e, entry]
        if total == 0:
            continue
        for e in range(E):
            shares[e] = stored[i * E + e, entry] / total
        mass = 0.0
        for place in range(best(shares, i * E, 0.0, 0.0, order, ranked)):
            if place >= least and mass >= 1.0 - cosine:
                break
            mass += ranked[place]
            ids[n], priorities[n] = order[place], ranked[place] / (i - layer)
            n += 1
    return n


@prefetcher("expert-map")
class ExpertMap(Prefetcher):
    """fMoE's expert maps: fetch what the past step with the most similar trajectory used next."""

    Options = ExpertMapOptions

    def __init__(self, shape: Shape, options: ExpertMapOptions) -> None:
        super().__init__(shape, options)
        L, E, capacity = shape.layers, shape.experts, options.capacity
        self._distance = options.distance
        self._size = 0
        self._stored = np.zeros((shape.total, capacity), np.int32)  # [L*E, capacity] tokens
        self._squares = np.zeros((L, capacity), np.int64)  # squared norms of layers 0 to l
        self._dots = np.zeros(capacity, np.int64)  # of the step so far
        self._own = np.zeros(shape.total, np.int64)  # [L*E] the step's map
        self._own_squares = np.zeros(L, np.int64)
        self._step = -1
        self._layer = (np.empty(E), np.empty(E, np.int64), np.empty(E))
        self._ids, self._priorities = np.empty(shape.total, np.int64), np.empty(shape.total)

    def observe(self, event: Event) -> None:
        """The trajectory grows; a step that has ended is learned."""
        if event.step != self._step:
            self._learn()
            self._step = event.step
        experts, counts, first, last = event.request_experts, event.request_counts, event.first, event.last
        squares = _extend(self._dots, self._stored, self._own, self._size, experts, counts, first, last)
        self._own_squares[event.layer] = squares + (self._own_squares[event.layer - 1] if event.layer else 0)

    def end_request(self) -> None:
        """Its last step has ended as well."""
        self._learn()
        self._step = -1

    def propose(self, event: Event) -> tuple[Int, Float]:
        """What the nearest map chose in the next layers."""
        layer = event.layer
        entry = _nearest(self._dots, self._squares[layer], self._size)
        if entry == NO_MATCH:
            return NOTHING
        cosine = self._dots[entry] / np.sqrt(float(self._squares[layer, entry]) * float(self._own_squares[layer]))
        until = min(layer + 1 + self._distance, self.shape.layers)
        out = *self._layer, self._ids, self._priorities
        n = _candidates(self._stored, entry, cosine, event.last - event.first, layer, until, *out)
        return self._ids[:n], self._priorities[:n]

    def _learn(self) -> None:
        """Store the step's map, unless it is empty, and begin another."""
        if self._own_squares[-1]:
            entry = self._size
            if entry < len(self._dots):
                self._size += 1
            else:
                entry = max(_nearest(self._dots, self._squares[-1], self._size), 0)
            self._stored[:, entry] = self._own
            self._squares[:, entry] = self._own_squares
        self._dots[:] = 0
        self._own[:] = 0
        self._own_squares[:] = 0
