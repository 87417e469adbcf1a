"""Misses of LRU at every cache size, in one pass over the events.

LRU is a stack algorithm (Mattson, Gecsei, Slutz, Traiger 1970): one list, of which a cache of s slots holds the first
s, stands for all sizes. The experts of an event are looked up together (rule 1) and none of them leaves for another
(rule 2), so this holds for caches of at least the largest event; of plain accesses, for all.
"""

import numpy as np
from numpy.typing import NDArray

from policies.core.compiled import allocating
from policies.core.policy import Int

Ids = NDArray[np.int32]


def lru_misses(experts: Ids, total: int, ends: Int | None = None) -> Int:
    """Misses of LRU by number of slots: int64[total + 1], none first. experts: [N] ids below `total`.

    ends: int64[events] where each event ends in `experts`, ascending ids in between; None: every access is an event.

    The place of an expert is the number of distinct experts since its last use, itself included: of the marks
    that stand at each expert's last use those not before its own. They are counted in a Fenwick tree over a
    window of time of at least 2 * total accesses, which is closed up when full, so that an access costs
    O(log total) and memory O(total), whatever N is.
    """
    return misses_by_slots(_lru_places(experts, each_alone(experts) if ends is None else ends, total), len(experts))


def each_alone(experts: Ids) -> Int:
    """Return the ends of events of one access each."""
    return np.arange(1, len(experts) + 1)


def misses_by_slots(places: Int, accesses: int) -> Int:
    """Return the misses by number of slots. places: [total + 1] accesses by place of their expert; place 0: unused."""
    misses: Int = accesses - np.cumsum(places)
    return misses


@allocating
def _lru_places(experts: Ids, ends: Int, total: int) -> Int:
    """The number of accesses by the place of their expert when their event begins; first uses have none."""
    window = 2
    while window < 2 * total:
        window *= 2
    marks = np.zeros(window + 1, np.int32)  # Fenwick tree over the window: 1 at each expert's last use
    owner = np.full(window + 1, -1, np.int32)  # the expert whose mark stands there
    last = np.zeros(total, np.int32)  # where each expert's mark stands; 0: not used yet
    places = np.zeros(total + 1, np.int64)
    known = now = first = 0
    for end in ends:
        for expert in experts[first:end]:
            if last[expert]:
                before = 0
                i = last[expert]
                while i > 0:
                    before += marks[i]
                    i &= i - 1
                places[known - before + 1] += 1
        for expert in experts[first:end]:
            if now == window:
                now = _close_up(marks, owner, last)
            now += 1
            if last[expert]:
                owner[last[expert]] = -1
                _add(marks, last[expert], -1)
            else:
                known += 1
            last[expert] = now
            owner[now] = expert
            _add(marks, now, 1)
        first = end
    return places


@allocating
def _add(marks: Ids, at: int, change: int) -> None:
    while at < len(marks):
        marks[at] += change
        at += at & -at


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
