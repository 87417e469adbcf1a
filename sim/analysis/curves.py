"""Misses of Belady at every cache size, in one pass, and how far apart the uses of an expert are.

Belady's is a stack algorithm, as is LRU: `policies.core.stack_distances` tells what that is. The counts are those of
the untimed mode: an access is an event of its own, layers share the cache, requests leave it warm.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from policies.core.compiled import allocating
from policies.core.policy import Int
from policies.core.stack_distances import Ids, misses_by_slots
from traces.steps import RequestSteps

BINS = 63
"""Of a histogram in powers of two: all that an int64 can hold."""


@dataclass(frozen=True)
class Accesses:
    """All lookups of a run, in order."""

    experts: Ids  # [N] ids, layer * E + expert
    tokens: Int  # [N] tokens of the run up to the end of the lookup's step
    total: int  # experts of all layers

    @staticmethod
    def of(requests: Iterable[RequestSteps], layers: int, experts: int) -> "Accesses":
        """Lay the requests of a model of `layers` layers of `experts` experts end to end."""
        ids, tokens, before = [np.empty(0, np.int32)], [np.empty(0, np.int64)], 0
        for request in requests:
            ends = before + np.cumsum(request.tokens)
            ids.append(request.experts.astype(np.int32))
            tokens.append(np.repeat(ends, np.diff(request.offsets[::layers])))
            before += int(request.tokens.sum())
        return Accesses(np.concatenate(ids), np.concatenate(tokens), layers * experts)


def belady_misses(experts: Ids, total: int, first: int = 0) -> Int:
    """Misses of Belady's MIN with forced admission by number of slots: int64[total + 1], none first.

    experts: [N] ids below `total`. first: the access from which on misses are counted. Mattson's update by priority:
    the expert in use goes to the top, and from the second place down to the one that it left each expert gives way to
    the one pushed out above if that is used sooner. O(place) an access.
    """
    return misses_by_slots(_belady_places(next_uses(experts, total), total, first), len(experts) - first)


@dataclass(frozen=True)
class Reuse:
    """Distances between two uses of an expert that follow each other; bin b counts those of 2**b to 2**(b+1) - 1.

    accesses: lookups from one to the other, 1 being the next. tokens: from the end of one step to the end of the
    other's, 1 being the next decoded token. The distance in distinct experts is what the LRU curve shows.
    """

    accesses: Int  # [bins]
    tokens: Int  # [bins]


def reuse(accesses: Accesses) -> Reuse:
    """The histograms of all uses but the first ones."""
    by_accesses, by_tokens = _distances(accesses.experts, accesses.tokens, accesses.total)
    used = 1 + max(np.flatnonzero(by_accesses + by_tokens), default=0)
    return Reuse(by_accesses[:used], by_tokens[:used])


@allocating
def next_uses(experts: Ids, total: int) -> Int:
    """For each access the number of the next one to the same expert, N if there is none: int64[N]."""
    following = np.empty(len(experts), np.int64)
    upcoming = np.full(total, len(experts), np.int64)
    for now in range(len(experts) - 1, -1, -1):
        following[now] = upcoming[experts[now]]
        upcoming[experts[now]] = now
    return following


@allocating
def _belady_places(following: Int, total: int, first: int) -> Int:
    """The number of accesses, from `first` on, by the place of their expert; first uses have none.

    An expert stands in the list by the number of the access that uses it next, so the one in use is `now`.
    """
    stack = np.empty(total, np.int64)
    places = np.zeros(total + 1, np.int64)
    held = 0
    for now in range(len(following)):
        pushed = -1  # which stays in the first place until the expert in use takes it
        place = 0
        while place < held:
            here = stack[place]
            if here == now:
                break
            stack[place], pushed = min(here, pushed), max(here, pushed)
            place += 1
        stack[place] = pushed
        stack[0] = following[now]
        if place == held:
            held += 1
        elif now >= first:
            places[place + 1] += 1
    return places


@allocating
def _distances(experts: Ids, tokens: Int, total: int) -> tuple[Int, Int]:
    """Histograms, int64[BINS] each, in powers of two."""
    last = np.full(total, -1, np.int64)
    by_accesses, by_tokens = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
    for now in range(len(experts)):
        before = last[experts[now]]
        if before >= 0:
            by_accesses[_power(now - before)] += 1
            by_tokens[_power(tokens[now] - tokens[before])] += 1
        last[experts[now]] = now
    return by_accesses, by_tokens


@allocating
def _power(distance: int) -> int:
    power = 0
    while distance > 1:
        distance >>= 1
        power += 1
    return power
