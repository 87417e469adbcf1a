"""How events are made: from the routing of one request that runs alone, or of several that share a step.

An event gets copies of the routing, so that a policy that keeps it reaches nothing else. In the compiled engine, whose
policies are all of this package, it gets slices.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from policies.core.bent import NOT_BENT, Bending, Bent, bend
from policies.core.compiled import compiled, inlined
from policies.core.policy import NO_FLOATS, NO_INTS, START, Event, Float, Int, Shape
from traces.steps import Flat, Lookahead, RequestSteps, grouped

Picked = tuple[Int, Int, Int, Float]
"""Offsets by distance, expert ids, tokens and scores."""

NOTHING_PICKED: Picked = NO_INTS, NO_INTS, NO_INTS, NO_FLOATS


def alone(
    phase: int,
    layer: int,
    step: int,
    experts: Int,
    counts: Int,
    serial: int = 0,
    token_ids: Int = NO_INTS,
    picks: "Picked" = NOTHING_PICKED,
    weights: Float = NO_FLOATS,
) -> Event:
    """Return an event of the only request, in step number `step`."""
    one = np.array([0, step, 0, len(experts)])
    both = experts, counts
    own = one[:1], one[1:2], one[2:], *both
    return Event._make((serial, phase, layer, *both, *own, token_ids, *picks, weights))


class Routing(NamedTuple):
    """Routing of S steps of R requests as the compiled engine takes it; without lookahead the arrays of that are empty.

    What all requests chose together, and each request's own; of one request these are the same arrays.
    """

    phase: Int  # [S]
    offsets: Int  # [S * L + 1]
    experts: Int  # [A]
    counts: Int  # [A]
    picked_offsets: Int  # [S * L * D + 1]
    picked_experts: Int
    picked_counts: Int
    picked_scores: Float
    weights: Float  # [A]
    token_offsets: Int  # [S + 1] of each step into the ids of the tokens that it takes in
    token_ids: Int
    own_offsets: Int  # [S * L * R + 1] a request after another in each event
    own_experts: Int
    own_counts: Int
    batch_slots: Int  # [R]
    first: Int  # [R] the number that the first of these steps has in each request
    steps: Int  # [R] of the event at hand, as are:
    own: Int  # [R + 1] offsets of each request
    picked: Int  # [D + 1] offsets of each distance
    bent: Bent  # what writes each event as it comes


class Events:
    """Makes in Python the events of what `routing` holds, after `before` events of others, as `event_at` does compiled.

    Those of one request that runs alone: `Events.of`.
    """

    def __init__(self, routing: Routing, layers: int, before: int = 0) -> None:
        self.routing = routing
        self.layers = layers
        self.count = len(routing.phase) * layers
        self._before = before
        self._phases: list[int] = routing.phase.tolist()
        self._own = len(routing.batch_slots) > 1
        self._first_token: list[int] = routing.token_offsets.tolist()
        self._step, self._steps, self._token_ids = -1, NO_INTS, NO_INTS
        self._offsets: dict[int, Int] = {}  # by number of experts

    @classmethod
    def of(cls, request: RequestSteps, layers: int, before: int = 0, bending: Bending | None = None) -> "Events":
        """Return those of a request that runs alone."""
        return cls(routing_of(request, bending), layers, before)

    def chosen(self, step: int, layer: int) -> tuple[Int, dict[int, int]]:
        """Return the experts that all requests chose, int64[n] ascending, and the tokens of each."""
        event = slice(*self.routing.offsets[(place := step * self.layers + layer) : place + 2])
        experts = self.routing.experts[event]
        return experts, dict(zip(experts.tolist(), self.routing.counts[event].tolist(), strict=True))

    def bend(self, step: int, layer: int, states: Int) -> None:
        """Bend the event by the states of all experts (rule 22)."""
        bend(self.routing, states, step, layer, self.layers)

    def event(self, step: int, layer: int) -> Event:
        """Return the event of `layer` in step number `step` of these."""
        routing, number = self.routing, step * self.layers + layer
        first, last = routing.offsets[number : number + 2].tolist()
        picks, depth = NOTHING_PICKED, len(routing.picked) - 1
        if depth > 0:
            bounds = routing.picked_offsets[number * depth : (number + 1) * depth + 1]
            part = slice(bounds[0], bounds[-1])
            picks = (
                *(bounds - bounds[0], routing.picked_experts[part].copy(), routing.picked_counts[part].copy()),
                routing.picked_scores[part].copy(),
            )
        experts, counts = routing.experts[first:last].copy(), routing.counts[first:last].copy()
        if not self._own:
            offsets, own = self._up_to(last - first), (experts, counts)
        else:
            bounds = routing.own_offsets[number * (R := len(routing.batch_slots)) : (number + 1) * R + 1]
            mine = slice(bounds[0], bounds[-1])
            offsets = bounds - bounds[0]
            own = routing.own_experts[mine].copy(), routing.own_counts[mine].copy()
        weights = routing.weights[first:last].copy()
        return self._made(step, layer, number, (experts, counts, offsets, *own), (*picks, weights))

    def start(self, step: int) -> Event:
        """Return what is known when step number `step` of these starts."""
        offsets = np.zeros(len(self.routing.batch_slots) + 1, np.int64)
        none = NO_INTS, NO_INTS
        return self._made(step, START, step * self.layers - 1, (*none, offsets, *none), (*NOTHING_PICKED, NO_FLOATS))

    def _up_to(self, n: int) -> Int:
        if n not in self._offsets:
            self._offsets[n] = np.array([0, n])
        return self._offsets[n]

    def _made(self, step: int, layer: int, number: int, chosen: tuple[Int, ...], others: tuple[Any, ...]) -> Event:
        routing, (experts, counts, *own) = self.routing, chosen
        if step != self._step:
            self._step, self._steps = step, routing.first + step
            self._token_ids = routing.token_ids[self._first_token[step] : self._first_token[step + 1]].copy()
        known = self._before + number + 1, self._phases[step], layer, experts, counts
        return Event._make((*known, routing.batch_slots, self._steps, *own, self._token_ids, *others))


def routing_of(request: RequestSteps, bending: Bending | None = None) -> Routing:
    """Return the arrays of a request that runs alone, to be bent if `bending` says how."""
    ahead = request.lookahead
    own = [np.ascontiguousarray(part) for part in (request.offsets, request.experts, request.counts)]
    picks = (ahead.offsets, ahead.experts, ahead.counts, ahead.scores) if ahead else NOTHING_PICKED
    weights = NO_FLOATS if request.weights is None else request.weights
    at_hand = np.zeros(ahead.depth + 1 if ahead else 0, np.int64)
    one, two = np.zeros((3, 1), np.int64), np.zeros(2, np.int64)
    ids = NO_INTS if request.token_ids is None else np.ascontiguousarray(request.token_ids)
    tokens = np.zeros(len(request.phase) + 1, np.int64)
    if len(ids):
        np.cumsum(request.tokens, out=tokens[1:])
    phase = request.phase.astype(np.int64)
    rest = tokens, ids, *own, one[0], one[1], one[2], two, at_hand
    routing = Routing._make((phase, *own, *picks, weights, *rest, NOT_BENT))
    return bending.routing(routing, [(0, request)], len(phase)) if bending else routing


def routing_of_batch(
    parts: Sequence[tuple[int, int, RequestSteps]], steps: int, shape: Shape, bending: Bending | None = None
) -> Routing:
    """Return the arrays of so many steps of several requests (rule 18).

    A step in which any of them decodes is a decode step: others may be at chunks of their prompts (rule 20).
    parts: (batch_slot, first of its steps, request) of each.
    """
    L, R = shape.layers, len(parts)
    batch_slots, first = (np.array([part[place] for part in parts], np.int64) for place in (0, 1))
    phase = np.max([each.phase[at : at + steps] for _, at, each in parts], axis=0).astype(np.int64)
    together, own = _merged([(request, step) for _, step, request in parts], steps, shape)
    picks, depth = _picked(parts, steps, shape)
    weights = _weights(parts, steps, shape)
    assert len(own[0]) == steps * L * R + 1
    tokens = _token_ids(parts, steps)
    at_hand = np.zeros(R, np.int64), np.zeros(R + 1, np.int64), np.zeros(depth + 1 if depth else 0, np.int64)
    rest = *tokens, *own, batch_slots, first, *at_hand
    routing = Routing._make((phase, *together, *picks, weights, *rest, NOT_BENT))
    return bending.routing(routing, [part[1:] for part in parts], steps) if bending else routing


def _weights(parts: Sequence[tuple[int, int, RequestSteps]], steps: int, shape: Shape) -> Float:
    """Return the router weights of what all requests chose together; none where one has none."""
    L, found = shape.layers, list[tuple[Int, Int, Float]]()
    for _, at, request in parts:
        if request.weights is None:
            return NO_FLOATS
        event, part = _events(request.offsets, at * L, steps * L)
        found.append((event, request.experts[part], request.weights[part]))
    event, ids, weights = (np.concatenate(each) for each in zip(*found, strict=True))
    return np.asarray(grouped(event, ids, [weights], steps * L, shape.total)[2])


def _picked(parts: Sequence[tuple[int, int, RequestSteps]], steps: int, shape: Shape) -> tuple[Picked, int]:
    """Return what the routers of all requests pick for the next layers, as `routing_of` does, and how far."""
    held = [(request.lookahead, at) for _, at, request in parts if request.lookahead]
    if not held:
        return NOTHING_PICKED, 0
    depth = held[0][0].depth
    events = steps * (per := shape.layers * depth)
    taken = [(ahead, *_events(ahead.offsets, at * per, events)) for ahead, at in held]
    event = np.concatenate([event for _, event, _ in taken])
    experts, counts, scores = (
        np.concatenate([getattr(ahead, name)[part] for ahead, _, part in taken])
        for name in ("experts", "counts", "scores")
    )
    together = Lookahead(shape.layers, depth, *grouped(event, experts, (counts, scores), events, shape.total))
    return (together.offsets, together.experts, together.counts, together.scores), depth


def _events(offsets: Int, first: int, events: int) -> tuple[Int, slice]:
    """Return the event, from 0, of each entry of so many events behind `first`, and where these entries are."""
    bounds = offsets[first : first + events + 1]
    return np.repeat(np.arange(events), np.diff(bounds)), slice(bounds[0], bounds[-1])


def _token_ids(parts: Sequence[tuple[int, int, RequestSteps]], steps: int) -> tuple[Int, Int]:
    """Return offsets [S + 1] and ids: by step those of each request, -1 for each that does not tell; or no ids."""
    if all(request.token_ids is None for *_, request in parts):
        return np.zeros(steps + 1, np.int64), NO_INTS
    ids, ends = [], np.zeros(steps, np.int64)
    firsts = [np.concatenate([[0], np.cumsum(request.tokens)]) for *_, request in parts]
    for s in range(steps):
        for (_, step, request), first in zip(parts, firsts, strict=True):
            held = request.token_ids
            own = slice(first[step + s], first[step + s + 1])
            ids.append(np.full(own.stop - own.start, -1) if held is None else held[own])
            ends[s] += len(ids[-1])
    return np.concatenate([[0], np.cumsum(ends)]), np.concatenate(ids)


def _merged(parts: Sequence[tuple[RequestSteps, int]], steps: int, shape: Shape) -> tuple[Flat, Flat]:
    """Return what all parts hold together, and one after another within each event; parts: with their first step."""
    L, R = shape.layers, len(parts)
    bounds = [part.offsets[step * L : (step + steps) * L + 1] for part, step in parts]
    offsets, begin = np.empty((R, steps * L + 1), np.int64), 0
    for r, bound in enumerate(bounds):
        offsets[r] = bound - bound[0] + begin
        begin = offsets[r, -1]
    slices = [slice(bound[0], bound[-1]) for bound in bounds]
    experts = np.concatenate([part.experts[own] for (part, _), own in zip(parts, slices, strict=True)])
    counts = np.concatenate([part.counts[own] for (part, _), own in zip(parts, slices, strict=True)])
    together = np.zeros(steps * L + 1, np.int64), np.empty(len(experts), np.int64), np.empty(len(experts), np.int64)
    own = np.zeros(steps * L * R + 1, np.int64), np.empty(len(experts), np.int64), np.empty(len(experts), np.int64)
    n = merge(offsets, experts, counts, L, np.zeros(shape.experts, np.int64), together, own)
    return (together[0], together[1][:n], together[2][:n]), own


@compiled
def merge(offsets: Int, experts: Int, counts: Int, L: int, tokens: Int, together: Flat, own: Flat) -> int:
    """Fill both: by event the distinct experts of all requests, ascending, and each request's own; how many distinct.

    offsets: [R, S * L + 1] of each request into experts and counts; tokens: [E] zeros.
    """
    n = at = 0
    for event in range(offsets.shape[1] - 1):
        base = event % L * len(tokens)
        for r in range(len(offsets)):
            for i in range(offsets[r, event], offsets[r, event + 1]):
                own[1][at], own[2][at] = experts[i], counts[i]
                at += 1
                tokens[experts[i] - base] += counts[i]
            own[0][event * len(offsets) + r + 1] = at
        for e in range(len(tokens)):
            if tokens[e]:
                together[1][n], together[2][n] = base + e, tokens[e]
                n += 1
                tokens[e] = 0
        together[0][event + 1] = n
    return n


@inlined
def event_at(routing: Routing, step: int, layer: int, L: int, serial: int) -> Event:
    """Return the event of `layer` in the `step`-th of these steps; the one before is gone."""
    number, R = step * L + layer, len(routing.batch_slots)
    first, last = routing.offsets[number], routing.offsets[number + 1]
    mine = routing.own_offsets[number * R]
    for r in range(R):
        routing.steps[r] = routing.first[r] + step
        routing.own[r + 1] = routing.own_offsets[number * R + r + 1] - mine
    others = routing.own_offsets[number * R + R]
    depth, nearest, farthest = len(routing.picked) - 1, 0, 0
    if depth > 0:
        nearest, farthest = routing.picked_offsets[number * depth], routing.picked_offsets[(number + 1) * depth]
        for distance in range(1, depth + 1):
            routing.picked[distance] = routing.picked_offsets[number * depth + distance] - nearest
    return Event(
        serial,
        routing.phase[step],
        layer,
        routing.experts[first:last],
        routing.counts[first:last],
        routing.batch_slots,
        routing.steps,
        routing.own,
        routing.own_experts[mine:others],
        routing.own_counts[mine:others],
        routing.token_ids[routing.token_offsets[step] : routing.token_offsets[step + 1]],
        routing.picked,
        routing.picked_experts[nearest:farthest],
        routing.picked_counts[nearest:farthest],
        routing.picked_scores[nearest:farthest],
        routing.weights[first:last],
    )


@inlined
def start_at(routing: Routing, step: int, serial: int) -> Event:
    """Return what is known when the `step`-th of these steps starts; the event before is gone."""
    for r in range(len(routing.batch_slots)):
        routing.steps[r] = routing.first[r] + step
        routing.own[r + 1] = 0
    none, tokens = routing.experts[:0], routing.token_offsets
    ids = routing.token_ids[tokens[step] : tokens[step + 1]]
    one = routing.batch_slots, routing.steps, routing.own
    no_floats = routing.weights[:0]
    return Event(
        *(serial, routing.phase[step], START, none, none, *one, none, none, ids),
        *(none, none, none, no_floats, no_floats),
    )


_ONE = np.ones(1, np.int64)
ROUTING = routing_of(RequestSteps(0, np.ones(1, np.uint8), _ONE, _ONE, np.zeros(2, np.int64), NO_INTS, NO_INTS))
"""One that compiled code takes others like."""
