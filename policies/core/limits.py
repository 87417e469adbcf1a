"""Limits on what a prefetcher proposes, the same options for all: how far ahead, how likely, how much the link carries.

A prefetcher takes them by declaring `Limits`, or options derived from it. They drop experts from its proposal, never
change their order. After the event of layer l an expert of layer i is j = ((i - l - 1) mod L) + 1 layers ahead, around
the cycle. policies/README.md (Limits on prefetch) says what `budget` counts.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from policies.core.compiled import allocating, compiled
from policies.core.policy import READY, Float, Int, Options, Shape, bounded


@dataclass(frozen=True)
class Limits(Options):
    """depth: layers ahead (0: all); threshold: the least priority worth a transfer; budget: share of the window."""

    keeps_to_depth: ClassVar[bool] = False  # True: the prefetcher itself looks no further ahead

    depth: int = bounded(0, least=0)
    threshold: float = bounded(-math.inf, least=-math.inf)
    budget: float = bounded(math.inf, least=0)


def layers_ahead(depth: int, shape: Shape) -> int:
    """Return how many layers ahead `depth` is, 0 being all: no more than there are, so that sums with it stay small."""
    return min(depth or shape.layers, shape.layers)


class Bounds(NamedTuple):
    """Limits of one run, as compiled code takes them."""

    threshold: Float  # [1]
    depth: Int  # [1] layers ahead
    room: Int  # [L] experts that arrive before the layer j ahead, j from 1; empty: no end
    due: Int  # [L] scratch: of those kept, how many are at most j layers ahead


class Limiter:
    """Limits at work on one run. `state` holds the states of all experts when the event was looked up."""

    def __init__(self, limits: Limits, shape: Shape, experts_per_layer: float | None) -> None:
        L = shape.layers
        ahead = layers_ahead(limits.depth, shape)
        self.state: Int = np.zeros(shape.total, np.int64)
        self._experts = shape.experts
        room: Int = np.empty(0, np.int64)
        if limits.budget < math.inf:
            if experts_per_layer is None:
                raise ValueError(f"budget={limits.budget}: the engine has not told what the link carries in a layer")
            if experts_per_layer < math.inf:
                carried = [min(limits.budget * j * experts_per_layer, shape.total) for j in range(1, L + 1)]
                room = np.maximum(np.floor(carried), 1).astype(np.int64)
        self.bounds = Bounds(np.array([limits.threshold], np.float64), np.array([ahead]), room, np.empty(L, np.int64))
        self._ids, self._priorities = np.empty(shape.total, np.int64), np.empty(shape.total)

    def __call__(self, layer: int, ids: Int, priorities: Float) -> tuple[Int, Float]:
        """What is left of a proposal made after the event of `layer`; the arrays are reused by the next call."""
        kept = self._ids, self._priorities
        n = within(self.bounds, ids, priorities, len(ids), layer, self._experts, self.state, *kept)
        return self._ids[:n], self._priorities[:n]


def limiter(options: object, shape: Shape, experts_per_layer: float | None) -> Limiter | None:
    """For a prefetcher with these options; None where they set no limit, so that none is paid for."""
    if not isinstance(options, Limits):
        return None
    limits = Limits(0 if options.keeps_to_depth else options.depth, options.threshold, options.budget)
    return None if limits == Limits() else Limiter(limits, shape, experts_per_layer)


@compiled
def comes_later(ids: Int, priorities: Float, one: int, other: int) -> bool:
    """Whether a proposed expert comes after another: by priority, ties to the lower id."""
    if priorities[one] != priorities[other]:
        return bool(priorities[one] < priorities[other])
    return bool(ids[one] > ids[other])


@compiled
def sink(ids: Int, priorities: Float, order: Int, root: int, end: int) -> None:
    """Restore a heap whose root may be too early."""
    child = 2 * root + 1
    while child < end:
        if child + 1 < end and comes_later(ids, priorities, order[child + 1], order[child]):
            child += 1
        if not comes_later(ids, priorities, order[child], order[root]):
            return
        order[root], order[child] = order[child], order[root]
        root, child = child, 2 * child + 1


@compiled
def sort(ids: Int, priorities: Float, order: Int) -> None:
    """Fill `order` [n] with the places of the first n experts in the order of `comes_later`.

    A heap: numpy's sorts take ten seconds to compile.
    """
    n = len(order)
    for i in range(n):
        order[i] = i
    for root in range(n // 2 - 1, -1, -1):
        sink(ids, priorities, order, root, n)
    for end in range(n - 1, 0, -1):
        order[0], order[end] = order[end], order[0]
        sink(ids, priorities, order, 0, end)


@allocating
def _in_time(ids: Int, priorities: Float, n: int, layer: int, E: int, room: Int, due: Int, state: Int) -> int:
    """Of the first `n` leave what the link can carry, in place; how many. due: [L] kept ones at most j layers ahead."""
    L = len(room)
    due[:] = 0
    kept, order = np.zeros(n, np.bool_), np.empty(n, np.int64)
    sort(ids, priorities, order)
    for place in range(n):
        i = order[place]
        kept[i] = True
        if state[ids[i]] == READY:
            continue
        nearest = (ids[i] // E - layer - 1) % L
        for j in range(nearest, L):
            if due[j] >= room[j]:
                kept[i] = False
        if kept[i]:
            due[nearest:] += 1
    left = 0
    for i in range(n):
        if kept[i]:
            ids[left], priorities[left] = ids[i], priorities[i]
            left += 1
    return left


@compiled
def within(
    bounds: Bounds,
    ids: Int,
    priorities: Float,
    n: int,
    layer: int,
    E: int,
    state: Int,
    kept_ids: Int,
    kept_priorities: Float,
) -> int:
    """Fill the kept arrays with what all limits leave of the first `n` proposed after the event of `layer`; how many.

    They may be the same arrays as those of the proposal.
    """
    left = 0
    for i in range(n):
        if (ids[i] // E - layer - 1) % len(bounds.due) < bounds.depth[0] and priorities[i] >= bounds.threshold[0]:
            kept_ids[left], kept_priorities[left] = ids[i], priorities[i]
            left += 1
    if len(bounds.room) == 0:
        return left
    return _in_time(kept_ids, kept_priorities, left, layer, E, bounds.room, bounds.due, state)
