"""Expert-map search by trajectory, as fMoE / FineMoE does (arXiv 2502.05370, sections 4.1 to 4.5).

An expert map is what one step chose in every layer. After layer l, the layers 0 to l of this step are matched by
cosine against the same layers of stored maps. Of the nearest one, in each of the next `depth` layers i, the most
chosen experts are proposed: as many as reach the mass 1 - cosine, at least as many as the current event has, none
that the map did not choose; priority is their share of the layer's mass / (i - l). A step's map is stored at its end;
when the store is full it replaces the most similar one, which is the most redundant. Ties: the lower place in the
store, the lower id; a map that shares nothing with this step is no match.

As retention it evicts the expert of the least (share of its layer in the nearest map x lookups since the run began);
ties, and all experts as long as nothing matches, by lookups, then the lower id.

The real system stores the gate's probabilities; a trace has choices, so maps hold counts, 0 or 1 in decode, where the
top-k then always reach the mass. It proposes for layer l + depth alone and leaves earlier proposals queued; here
every proposal replaces the queue (rule 4), so the layers up to there are proposed with it. Its search by prompt
embedding, which serves the first `depth` layers before a trajectory exists and weighs in the redundancy, is left
out: traces of routing alone have no embeddings.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from policies.contract import NOTHING, Event, Float, Int, Prefetcher, RetentionPolicy, ScorePolicy, Shape
from policies.limits import Limits
from policies.ranking import best
from policies.registry import prefetcher, retention
from traces.errors import InputError

NO_MATCH = -1
MOST_MAPS = 100_000


@dataclass(frozen=True)
class ExpertMapOptions(Limits):
    """capacity: maps kept; depth: the paper's prefetch distance."""

    keeps_to_depth = True

    depth: int = 3
    capacity: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.capacity <= MOST_MAPS:
            raise InputError(f"expert-map needs a capacity of 1 to {MOST_MAPS:,} maps, not {self.capacity}")


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
        for place in range(best(shares, i * E, 0.0, order, ranked)):
            if place >= least and mass >= 1.0 - cosine:
                break
            mass += ranked[place]
            ids[n], priorities[n] = order[place], ranked[place] / (i - layer)
            n += 1
    return n


@njit(cache=True, nogil=True)
def _shares(stored: NDArray[np.int32], entry: int, E: int, shares: Float) -> None:
    """shares[expert]: of its layer's tokens in `entry`."""
    for first in range(0, len(shares), E):
        total = 0
        for expert in range(first, first + E):
            total += stored[expert, entry]
        for expert in range(first, first + E):
            shares[expert] = stored[expert, entry] / total if total else 0.0


class ExpertMaps:
    """The store, the map of the running step, and the stored map that it resembles most so far."""

    def __init__(self, shape: Shape, capacity: int) -> None:
        self.match = NO_MATCH
        self.learned = 0  # steps; what is stored changes with it alone
        self.stored = np.zeros((shape.total, capacity), np.int32)  # [L*E, capacity] tokens
        self._size = 0
        self._squares = np.zeros((shape.layers, capacity), np.int64)  # squared norms of layers 0 to l
        self._dots = np.zeros(capacity, np.int64)  # of the step so far
        self._own = np.zeros(shape.total, np.int64)  # [L*E] the step's map
        self._own_square = 0  # its squared norm so far
        self._own_squares = np.zeros(shape.layers, np.int64)
        self._step = -1

    def observe(self, event: Event) -> None:
        """The trajectory grows, and is matched anew; a step that has ended is learned."""
        if event.step != self._step:
            self._learn()
            self._step = event.step
        experts, counts, first, last = event.request_experts, event.request_counts, event.first, event.last
        self._own_square += _extend(self._dots, self.stored, self._own, self._size, experts, counts, first, last)
        self._own_squares[event.layer] = self._own_square
        self.match = _nearest(self._dots, self._squares[event.layer], self._size)

    def end_request(self) -> None:
        """Its last step has ended as well."""
        self._learn()
        self._step = -1

    def cosine(self, layer: int) -> float:
        """Of the match, over the layers up to `layer`, the latest."""
        norms = float(self._squares[layer, self.match]) * float(self._own_square)
        return float(self._dots[self.match] / np.sqrt(norms))

    def _learn(self) -> None:
        """Store the step's map, unless it is empty, and begin another."""
        if self._own_square:
            entry = self._size
            if entry < len(self._dots):
                self._size += 1
            else:
                entry = max(_nearest(self._dots, self._squares[-1], self._size), 0)
            self.stored[:, entry] = self._own
            self._squares[:, entry] = np.maximum.accumulate(self._own_squares)
        self.learned += 1
        self._dots[:] = 0
        self._own[:] = 0
        self._own_square = 0
        self._own_squares[:] = 0
        self.match = NO_MATCH


@retention("expert-map")
class ExpertMapRetention(ScorePolicy):
    """fMoE's expert maps: keep what is used often and stands in the past step of the most similar trajectory."""

    Options = ExpertMapOptions

    def __init__(self, shape: Shape, options: ExpertMapOptions) -> None:
        super().__init__(shape, options)
        self.maps = ExpertMaps(shape, options.capacity)
        self._shares = np.zeros(shape.total)  # of each expert in the match
        self._shown = NO_MATCH, 0  # which match, after how many steps learned

    def observe(self, event: Event) -> None:
        """Share in the match x lookups; then lookups."""
        self.maps.observe(event)
        self.keep[1, event.experts] += 1
        match, learned = self.maps.match, self.maps.learned
        if (match, learned) == self._shown:
            self.keep[0, event.experts] = self._shares[event.experts] * self.keep[1, event.experts]
            return
        self._shown = match, learned
        if match == NO_MATCH:
            self._shares[:] = 0
        else:
            _shares(self.maps.stored, match, self.shape.experts, self._shares)
        np.multiply(self._shares, self.keep[1], out=self.keep[0])

    def end_request(self) -> None:
        """The maps learn the last step."""
        self.maps.end_request()


@prefetcher("expert-map")
class ExpertMap(Prefetcher):
    """fMoE's expert maps: fetch what the past step with the most similar trajectory used next."""

    Options = ExpertMapOptions

    def __init__(self, shape: Shape, options: ExpertMapOptions, maps: ExpertMaps | None = None) -> None:
        super().__init__(shape, options)
        self.observes = maps is None
        self._maps = maps or ExpertMaps(shape, options.capacity)
        self._depth = options.depth or shape.layers
        self._layer = np.empty(shape.experts), np.empty(shape.experts, np.int64), np.empty(shape.experts)
        self._ids, self._priorities = np.empty(shape.total, np.int64), np.empty(shape.total)

    @classmethod
    def beside(cls, keeper: RetentionPolicy) -> "ExpertMap":
        """The other half of a retention `expert-map`: it reads what that one has matched."""
        assert isinstance(keeper, ExpertMapRetention)
        assert isinstance(keeper.options, ExpertMapOptions)
        return cls(keeper.shape, keeper.options, keeper.maps)

    def observe(self, event: Event) -> None:
        """Match anew (a prefetcher on its own)."""
        self._maps.observe(event)

    def end_request(self) -> None:
        """Learn the last step (a prefetcher on its own)."""
        if self.observes:
            self._maps.end_request()

    def propose(self, event: Event) -> tuple[Int, Float]:
        """What the nearest map chose in the next layers."""
        layer, maps = event.layer, self._maps
        if maps.match == NO_MATCH:
            return NOTHING
        until = min(layer + 1 + self._depth, self.shape.layers)
        least = event.last - event.first
        out = *self._layer, self._ids, self._priorities
        n = _candidates(maps.stored, maps.match, maps.cosine(layer), least, layer, until, *out)
        return self._ids[:n], self._priorities[:n]
