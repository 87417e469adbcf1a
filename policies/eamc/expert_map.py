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
from policies.core.limits import Limits, layers_ahead
from policies.core.policy import Compiled, Event, Float, Int, Prefetcher, ScorePolicy, Shape, bounded
from policies.core.ranking import add, best
from policies.core.registry import prefetcher, retention
from policies.eamc.matching import TIE

NO_MATCH, SEVERAL = -1, -2


@dataclass(frozen=True)
class ExpertMapOptions(Limits, policy="expert-map"):
    """capacity: maps kept; depth: the paper's prefetch distance."""

    keeps_to_depth = True

    depth: int = 3
    capacity: int = bounded(1000, least=1, most=100_000)


SIZE, LEARNED, SHOWN_MATCH, SHOWN_LEARNED, DEPTH, NUMBERS = range(6)
"""Places in `ExpertMaps.numbers`: maps stored; steps learned, with which alone the stored maps change; the match of
`shares` and the steps learned then; layers ahead that are proposed."""

STEP, MATCH, SQUARE, OWN_NUMBERS = range(4)
"""Places in `ExpertMaps.own_numbers`: the request's step that runs; the nearest map; squared norm of the step's map so
far."""

NOT_BEGUN = -1


class ExpertMaps(NamedTuple):
    """The store; by request the map of the running step, and the stored map that it resembles most so far."""

    stored: NDArray[np.int32]  # [L*E, capacity] tokens
    squares: Int  # [L, capacity] squared norms of layers 0 to l
    dots: Int  # [batch_slots, capacity] with the step so far
    own: Int  # [batch_slots, L*E] the step's map
    own_squares: Int  # [batch_slots, L] its squared norms of layers 0 to l; 0 where a layer has not come
    shares: Float  # [L*E] of each expert in the match, for retention
    layer: Float  # [2, E] shares of a layer in the match; the same, ranked
    order: Int  # [E] ids by rank
    numbers: Int  # [NUMBERS]
    own_numbers: Int  # [batch_slots, OWN_NUMBERS]


def begin(shape: Shape, options: ExpertMapOptions) -> ExpertMaps:
    L, E, C, batch_slots = shape.layers, shape.experts, options.capacity, shape.batch_slots
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[SHOWN_MATCH], numbers[DEPTH] = NO_MATCH, layers_ahead(options.depth, shape)
    own_numbers = np.zeros((batch_slots, OWN_NUMBERS), np.int64)
    own_numbers[:, STEP], own_numbers[:, MATCH] = NOT_BEGUN, NO_MATCH
    return ExpertMaps(
        stored=np.zeros((L * E, C), np.int32),
        squares=np.zeros((L, C), np.int64),
        dots=np.zeros((batch_slots, C), np.int64),
        own=np.zeros((batch_slots, L * E), np.int64),
        own_squares=np.zeros((batch_slots, L), np.int64),
        shares=np.zeros(L * E),
        layer=np.empty((2, E)),
        order=np.empty(E, np.int64),
        numbers=numbers,
        own_numbers=own_numbers,
    )


@compiled
def _nearest(dots: Int, squares: Int, size: int) -> int:
    """The stored map of the greatest cosine above 0, NO_MATCH without one. squares: its squared norm so far.

    Equal are cosines within TIE, as in policies/eamc/matching.py.
    """
    nearest, greatest = NO_MATCH, 0.0
    for c in range(size):
        if dots[c] > 0:
            cosine = dots[c] / np.sqrt(squares[c])
            if cosine > greatest * (1 + TIE):
                nearest, greatest = c, cosine
    return nearest


@compiled
def learn(maps: ExpertMaps, batch_slot: int) -> None:
    """Store the map of the request's step that has ended, unless it is empty, and begin another."""
    numbers, size, own_numbers = maps.numbers, maps.numbers[SIZE], maps.own_numbers[batch_slot]
    dots, own, own_squares = maps.dots[batch_slot], maps.own[batch_slot], maps.own_squares[batch_slot]
    if own_numbers[SQUARE]:
        entry = size
        if entry < len(dots):
            numbers[SIZE] += 1
        else:
            entry = max(_nearest(dots, maps.squares[len(maps.squares) - 1], size), 0)
        for expert in range(len(own)):
            maps.stored[expert, entry] = own[expert]
        square = 0
        for layer in range(len(own_squares)):
            square = max(square, own_squares[layer])
            maps.squares[layer, entry] = square
        for other in range(len(maps.own)):
            if other != batch_slot:
                _compare_again(maps, other, entry)
    numbers[LEARNED] += 1
    dots[:] = 0
    own[:] = 0
    own_squares[:] = 0
    own_numbers[SQUARE] = 0
    own_numbers[MATCH] = NO_MATCH


@compiled
def _compare_again(maps: ExpertMaps, batch_slot: int, entry: int) -> None:
    """Another map stands at `entry` than the one that the request's step was compared with."""
    dot = 0
    for expert in range(maps.own.shape[1]):
        dot += maps.own[batch_slot, expert] * maps.stored[expert, entry]
    maps.dots[batch_slot, entry] = dot


def end_request(maps: ExpertMaps, batch_slot: int) -> None:
    learn(maps, batch_slot)
    maps.own_numbers[batch_slot, STEP] = NOT_BEGUN


@compiled
def observe(maps: ExpertMaps, event: Event) -> None:
    """Trajectories grow, and are matched again; a step that has ended is learned."""
    for r in range(len(event.batch_slots)):
        if maps.own_numbers[event.batch_slots[r], STEP] != event.steps[r]:
            learn(maps, event.batch_slots[r])
            maps.own_numbers[event.batch_slots[r], STEP] = event.steps[r]
    size = maps.numbers[SIZE]
    for r in range(len(event.batch_slots)):
        batch_slot = event.batch_slots[r]
        numbers, dots = maps.own_numbers[batch_slot], maps.dots[batch_slot]
        for i in range(event.offsets[r], event.offsets[r + 1]):
            expert, count = event.own_experts[i], event.own_counts[i]
            maps.own[batch_slot, expert] = count
            numbers[SQUARE] += count * count
            for c in range(size):
                dots[c] += count * maps.stored[expert, c]
        maps.own_squares[batch_slot, event.layer] = numbers[SQUARE]
        numbers[MATCH] = _nearest(dots, maps.squares[event.layer], size)


@compiled
def score(maps: ExpertMaps, keep: Float, event: Event) -> None:
    """`observe`, then keep by the share in the match x lookups; then by lookups. Of several matches the mean counts."""
    observe(maps, event)
    numbers, shares, requests = maps.numbers, maps.shares, len(event.batch_slots)
    match = maps.own_numbers[event.batch_slots[0], MATCH]
    for expert in event.experts:
        keep[1, expert] += 1
    if requests == 1 and match == numbers[SHOWN_MATCH] and numbers[LEARNED] == numbers[SHOWN_LEARNED]:
        for expert in event.experts:
            keep[0, expert] = shares[expert] * keep[1, expert]
        return
    numbers[SHOWN_MATCH] = match if requests == 1 else SEVERAL
    numbers[SHOWN_LEARNED] = numbers[LEARNED]
    shares[:] = 0.0
    for batch_slot in event.batch_slots:
        if maps.own_numbers[batch_slot, MATCH] != NO_MATCH:
            _add_shares(maps.stored, maps.own_numbers[batch_slot, MATCH], len(maps.order), requests, shares)
    for expert in range(len(shares)):
        keep[0, expert] = shares[expert] * keep[1, expert]


@compiled
def propose(maps: ExpertMaps, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with what the matches chose in the next layers; how many."""
    n = 0
    for i in range(event.layer + 1, min(event.layer + 1 + maps.numbers[DEPTH], len(maps.squares))):
        first = n
        for r in range(len(event.batch_slots)):
            if maps.own_numbers[event.batch_slots[r], MATCH] != NO_MATCH:
                least, others = event.offsets[r + 1] - event.offsets[r], first if r else len(ids)
                n = _propose_layer(maps, event.batch_slots[r], event.layer, i, least, others, n, ids, priorities)
    return n


@compiled
def _propose_layer(
    maps: ExpertMaps, batch_slot: int, layer: int, i: int, least: int, first: int, n: int, ids: Int, priorities: Float
) -> int:
    """Add what the request's match chose in layer i, at least `least` experts; how many are proposed then."""
    entry, E = maps.own_numbers[batch_slot, MATCH], len(maps.order)
    square = float(maps.squares[layer, entry]) * float(maps.own_numbers[batch_slot, SQUARE])
    cosine = maps.dots[batch_slot, entry] / np.sqrt(square)
    shares, ranked, order = maps.layer[0], maps.layer[1], maps.order
    shares[:] = 0.0
    _add_shares(maps.stored[i * E : (i + 1) * E], entry, E, 1, shares)
    mass = 0.0
    for place in range(best(shares, i * E, 0.0, order, ranked)):
        if place >= least and mass >= 1.0 - cosine:
            break
        mass += ranked[place]
        n = add(ids, priorities, first, n, order[place], ranked[place] / (i - layer))
    return n


@compiled
def _add_shares(stored: NDArray[np.int32], entry: int, E: int, among: int, shares: Float) -> None:
    """shares[expert] grows by that of its layer's tokens in `entry`, as one of `among`."""
    for first in range(0, len(shares), E):
        total = 0
        for expert in range(first, first + E):
            total += stored[expert, entry]
        for expert in range(first, first + E):
            shares[expert] += stored[expert, entry] / total / among if total else 0.0


@retention("expert-map")
class ExpertMapRetention(ScorePolicy):
    """fMoE's expert maps: keep what is used often and stands in the past step of the most similar trajectory."""

    Options = ExpertMapOptions
    compiled = Compiled(begin, score, end_request=end_request)


@prefetcher("expert-map")
class ExpertMap(Prefetcher):
    """fMoE's expert maps: fetch what the past step with the most similar trajectory used next."""

    Options = ExpertMapOptions
    compiled = Compiled(begin, observe, propose, end_request=end_request)
