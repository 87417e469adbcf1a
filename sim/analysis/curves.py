"""Misses of LRU and of Belady at every cache size, in one pass each, and how far apart the uses of an expert are.

Both policies are stack algorithms (Mattson, Gecsei, Slutz, Traiger 1970): the experts held by a smaller cache are
held by a larger one too, so one list, of which a cache of s slots holds the first s, stands for all sizes, and an
access hits from the size on that is its expert's place in the list. The counts are those of the untimed mode: an
access is an event of its own, layers share the cache, requests leave it warm.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.core.compiled import allocating
from traces.steps import RequestSteps

Int = NDArray[np.int64]
Ids = NDArray[np.int32]

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


def lru_misses(experts: Ids, total: int) -> Int:
    """Misses of LRU by number of slots: int64[total + 1], none first. experts: [N] ids below `total`.

    The place of an expert is the number of distinct experts since its last use, itself included: of the marks
    that stand at each expert's last use those not before its own. They are counted in a Fenwick tree over a
    window of time of at least 2 * total accesses, which is closed up when full, so that an access costs
    O(log total) and memory O(total), whatever N is.
    """
    return _misses(_lru_places(experts, total), len(experts))


def belady_misses(experts: Ids, total: int) -> Int:
    """Misses of Belady's MIN with forced admission by number of slots: int64[total + 1], none first.

    experts: [N] ids below `total`. Mattson's update by priority: the expert in use goes to the top, and from the
    second place down to the one that it left each expert gives way to the one pushed out above if that is used
    sooner. O(place) an access.
    """
    return _misses(_belady_places(next_uses(experts, total), total), len(experts))


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


def _misses(places: Int, accesses: int) -> Int:
    """places: [total + 1] accesses that found their expert at each place, from 1; place 0 is unused."""
    misses: Int = accesses - np.cumsum(places)
    return misses


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
def _lru_places(experts: Ids, total: int) -> Int:
    """The number of accesses by the place of their expert; first uses have none."""
    window = 2
    while window < 2 * total:
        window *= 2
    marks = np.zeros(window + 1, np.int32)  # Fenwick tree over the window: 1 at each expert's last use
    owner = np.full(window + 1, -1, np.int32)  # the expert whose mark stands there
    last = np.zeros(total, np.int32)  # where each expert's mark stands; 0: not used yet
    places = np.zeros(total + 1, np.int64)
    known = now = 0
    for expert in experts:
        if now == window:
            now = _close_up(marks, owner, last)
        now += 1
        if last[expert]:
            before = 0
            at = last[expert]
            owner[at] = -1
            i = at
            while i > 0:
                before += marks[i]
                i &= i - 1
            places[known - before + 1] += 1
            i = at
            while i <= window:
                marks[i] -= 1
                i += i & -i
        else:
            known += 1
        last[expert] = now
        owner[now] = expert
        i = now
        while i <= window:
            marks[i] += 1
            i += i & -i
    return places


@allocating
def _close_up(marks: Ids, owner: Ids, last: Ids) -> int:
    """Move the marks to the start of the window, in their order; how many there are."""
    held = 0
    for at in range(1, len(owner)):
        expert = owner[at]
        if expert >= 0:
            held += 1
            owner[at] = -1
            owner[held] = expert
            last[expert] = held
    for i in range(1, len(marks)):
        marks[i] = min(i, held) - min(i & (i - 1), held)
    return held


@allocating
def _belady_places(following: Int, total: int) -> Int:
    """The number of accesses by the place of their expert; first uses have none.

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
        if place < held:
            places[place + 1] += 1
        else:
            held += 1
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
