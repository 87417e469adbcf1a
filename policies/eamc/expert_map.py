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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import Event, Float, Int, Prefetcher, RetentionPolicy, ScorePolicy, Shape
from policies.core.ranking import best
from policies.core.registry import prefetcher, retention
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


STEP, SIZE, MATCH, LEARNED, SQUARE, SHOWN_MATCH, SHOWN_LEARNED, DEPTH, NUMBERS = range(9)
"""Places in `ExpertMaps.numbers`: the request's step that runs; maps stored; the nearest one; steps learned, with which
alone the stored maps change; squared norm of the step's map so far; the match of `shares` and the steps learned then;
layers ahead that are proposed."""

NOT_BEGUN = -1


class ExpertMaps(NamedTuple):
    """The store, the map of the running step, and the stored map that it resembles most so far."""

    stored: NDArray[np.int32]  # [L*E, capacity] tokens
    squares: Int  # [L, capacity] squared norms of layers 0 to l
    dots: Int  # [capacity] with the step so far
    own: Int  # [L*E] the step's map
    own_squares: Int  # [L] its squared norms of layers 0 to l; 0 where a layer has not come
    shares: Float  # [L*E] of each expert in the match, for retention
    layer: Float  # [2, E] shares of a layer in the match; the same, ranked
    order: Int  # [E] ids by rank
    numbers: Int  # [NUMBERS]


def no_maps(shape: Shape, options: ExpertMapOptions) -> ExpertMaps:
    """The start of a run."""
    L, E, C = shape.layers, shape.experts, options.capacity
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[STEP] = numbers[MATCH] = numbers[SHOWN_MATCH] = NO_MATCH
    numbers[DEPTH] = options.depth or L
    return ExpertMaps(
        stored=np.zeros((L * E, C), np.int32),
        squares=np.zeros((L, C), np.int64),
        dots=np.zeros(C, np.int64),
        own=np.zeros(L * E, np.int64),
        own_squares=np.zeros(L, np.int64),
        shares=np.zeros(L * E),
        layer=np.empty((2, E)),
        order=np.empty(E, np.int64),
        numbers=numbers,
    )


@compiled
def _nearest(dots: Int, squares: Int, size: int) -> int:
    """The stored map of the greatest cosine above 0, NO_MATCH without one. squares: its squared norm so far."""
    nearest, greatest = NO_MATCH, 0.0
    for c in range(size):
        if dots[c] > 0:
            cosine = dots[c] / np.sqrt(squares[c])
            if cosine > greatest:
                nearest, greatest = c, cosine
    return nearest


@compiled
def learn(maps: ExpertMaps) -> None:
    """Store the map of the step that has ended, unless it is empty, and begin another."""
    numbers, size = maps.numbers, maps.numbers[SIZE]
    if numbers[SQUARE]:
        entry = size
        if entry < len(maps.dots):
            numbers[SIZE] += 1
        else:
            entry = max(_nearest(maps.dots, maps.squares[len(maps.squares) - 1], size), 0)
        for expert in range(len(maps.own)):
            maps.stored[expert, entry] = maps.own[expert]
        square = 0
        for layer in range(len(maps.own_squares)):
            square = max(square, maps.own_squares[layer])
            maps.squares[layer, entry] = square
    numbers[LEARNED] += 1
    maps.dots[:] = 0
    maps.own[:] = 0
    maps.own_squares[:] = 0
    numbers[SQUARE] = 0
    numbers[MATCH] = NO_MATCH


def end_request(maps: ExpertMaps) -> None:
    """The last step has ended as well."""
    learn(maps)
    maps.numbers[STEP] = NOT_BEGUN


@compiled
def observe(maps: ExpertMaps, step: int, layer: int, experts: Int, counts: Int, first: int, last: int) -> None:
    """The trajectory grows, and is matched anew; a step that has ended is learned."""
    numbers, stored, dots = maps.numbers, maps.stored, maps.dots
    if numbers[STEP] != step:
        learn(maps)
        numbers[STEP] = step
    size = numbers[SIZE]
    for i in range(first, last):
        maps.own[experts[i]] = counts[i]
        numbers[SQUARE] += counts[i] * counts[i]
        for c in range(size):
            dots[c] += counts[i] * stored[experts[i], c]
    maps.own_squares[layer] = numbers[SQUARE]
    numbers[MATCH] = _nearest(dots, maps.squares[layer], size)


@compiled
def score(maps: ExpertMaps, keep: Float, experts: Int, first: int, last: int) -> None:
    """After `observe`: keep by the share in the match x lookups; then by lookups."""
    numbers, shares = maps.numbers, maps.shares
    match = numbers[MATCH]
    for i in range(first, last):
        keep[1, experts[i]] += 1
    if match == numbers[SHOWN_MATCH] and numbers[LEARNED] == numbers[SHOWN_LEARNED]:
        for i in range(first, last):
            keep[0, experts[i]] = shares[experts[i]] * keep[1, experts[i]]
        return
    numbers[SHOWN_MATCH], numbers[SHOWN_LEARNED] = match, numbers[LEARNED]
    if match == NO_MATCH:
        shares[:] = 0.0
    else:
        _shares(maps.stored, match, len(maps.order), shares)
    for expert in range(len(shares)):
        keep[0, expert] = shares[expert] * keep[1, expert]


@compiled
def propose(maps: ExpertMaps, layer: int, least: int, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with what the match chose after `layer`, of whose event `least` is the size; how many."""
    numbers, entry = maps.numbers, maps.numbers[MATCH]
    if entry == NO_MATCH:
        return 0
    cosine = maps.dots[entry] / np.sqrt(float(maps.squares[layer, entry]) * float(numbers[SQUARE]))
    shares, ranked, order = maps.layer[0], maps.layer[1], maps.order
    E = len(order)
    n = 0
    for i in range(layer + 1, min(layer + 1 + numbers[DEPTH], len(maps.squares))):
        total = 0
        for e in range(E):
            total += maps.stored[i * E + e, entry]
        if total == 0:
            continue
        for e in range(E):
            shares[e] = maps.stored[i * E + e, entry] / total
        mass = 0.0
        for place in range(best(shares, i * E, 0.0, order, ranked)):
            if place >= least and mass >= 1.0 - cosine:
                break
            mass += ranked[place]
            ids[n], priorities[n] = order[place], ranked[place] / (i - layer)
            n += 1
    return n


@compiled
def _shares(stored: NDArray[np.int32], entry: int, E: int, shares: Float) -> None:
    """shares[expert]: of its layer's tokens in `entry`."""
    for first in range(0, len(shares), E):
        total = 0
        for expert in range(first, first + E):
            total += stored[expert, entry]
        for expert in range(first, first + E):
            shares[expert] = stored[expert, entry] / total if total else 0.0


@retention("expert-map")
class ExpertMapRetention(ScorePolicy):
    """fMoE's expert maps: keep what is used often and stands in the past step of the most similar trajectory."""

    Options = ExpertMapOptions

    def __init__(self, shape: Shape, options: ExpertMapOptions) -> None:
        super().__init__(shape, options)
        self.maps = no_maps(shape, options)

    def observe(self, event: Event) -> None:
        """Match anew; share in the match x lookups, then lookups."""
        experts, last = event.experts, len(event.experts)
        observe(self.maps, int(event.steps[0]), event.layer, experts, event.counts, 0, last)
        score(self.maps, self.keep, experts, 0, last)

    def end_request(self, seat: int) -> None:
        """The maps learn the last step."""
        end_request(self.maps)


@prefetcher("expert-map")
class ExpertMap(Prefetcher):
    """fMoE's expert maps: fetch what the past step with the most similar trajectory used next."""

    Options = ExpertMapOptions

    def __init__(self, shape: Shape, options: ExpertMapOptions, maps: ExpertMaps | None = None) -> None:
        super().__init__(shape, options)
        self.observes = maps is None
        self.maps = maps or no_maps(shape, options)
        self._ids, self._priorities = np.empty(shape.total, np.int64), np.empty(shape.total)

    @classmethod
    def beside(cls, keeper: RetentionPolicy) -> "ExpertMap":
        """The other half of a retention `expert-map`: it reads what that one has matched."""
        assert isinstance(keeper, ExpertMapRetention)
        assert isinstance(keeper.options, ExpertMapOptions)
        return cls(keeper.shape, keeper.options, keeper.maps)

    def observe(self, event: Event) -> None:
        """Match anew (a prefetcher on its own)."""
        accesses = event.experts, event.counts, 0, len(event.experts)
        observe(self.maps, int(event.steps[0]), event.layer, *accesses)

    def end_request(self, seat: int) -> None:
        """Learn the last step (a prefetcher on its own)."""
        if self.observes:
            end_request(self.maps)

    def propose(self, event: Event) -> tuple[Int, Float]:
        """What the nearest map chose in the next layers."""
        n = propose(self.maps, event.layer, len(event.experts), self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
