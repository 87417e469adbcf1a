"""Misses of Belady at every cache size, in one pass.

Belady's is a stack algorithm, as is LRU: `policies.core.stack_distances` explains it, and from which size on it
holds of events. The counts are those of the counted mode: layers share the cache, requests leave it warm.
"""

from collections.abc import Iterable

import numpy as np

from policies.core.compiled import allocating
from policies.core.policy import Int
from policies.core.stack_distances import Ids, each_alone, misses_by_slots
from traces.steps import RequestSteps


def accesses(requests: Iterable[RequestSteps]) -> tuple[Ids, Int]:
    """Return all lookups in order, ids layer * E + expert, [N], and where each event ends in them, [events]."""
    ids, ends, before = [np.empty(0, np.int32)], [np.empty(0, np.int64)], 0
    for request in requests:
        ids.append(request.experts.astype(np.int32))
        ends.append(before + request.offsets[1:])
        before += len(request.experts)
    return np.concatenate(ids), np.concatenate(ends)


def belady_misses(experts: Ids, total: int, first: int = 0, ends: Int | None = None) -> Int:
    """Return the misses of Belady's MIN with forced admission by number of slots: int64[total + 1], none first.

    experts: [N] ids below `total`. first: the access from which on misses are counted. ends: as `lru_misses` takes
    them. Mattson's update by priority: experts in use go to the top and push others out; down to the last place that
    they left, each place takes the one used soonest of those pushed out above and its own. O(place) an access.
    """
    ends = each_alone(experts) if ends is None else ends
    return misses_by_slots(_belady_places(next_uses(experts, total, ends), ends, total, first), len(experts) - first)


@allocating
def next_uses(experts: Ids, total: int, ends: Int) -> Int:
    """For each access the number of the next event with the same expert, len(ends) if there is none: int64[N]."""
    following = np.empty(len(experts), np.int64)
    upcoming = np.full(total, len(ends), np.int64)
    for event in range(len(ends) - 1, -1, -1):
        for i in range(ends[event - 1] if event else 0, ends[event]):
            following[i] = upcoming[experts[i]]
            upcoming[experts[i]] = event
    return following


@allocating
def _belady_places(following: Int, ends: Int, total: int, first: int) -> Int:
    """Return the accesses from `first` on by the place of their expert, which stands by the event that uses it next."""
    stack = np.empty(total, np.int64)
    pushed = np.empty(total, np.int64)  # out of the places above, in no order
    places = np.zeros(total + 1, np.int64)
    held = begin = 0
    for event in range(len(ends)):
        n = ends[event] - begin
        out = place = 0
        while place < n or out:
            here = stack[place] if place < held else -1  # none
            if here == event:
                if begin >= first:
                    places[place + 1] += 1
            elif here >= 0:
                pushed[out] = here
                out += 1
            if place < n:
                pass  # takes an expert in use, below
            elif out:
                soonest = 0
                for i in range(1, out):
                    if pushed[i] < pushed[soonest]:
                        soonest = i
                stack[place] = pushed[soonest]
                out -= 1
                pushed[soonest] = pushed[out]
            place += 1
        held = max(held, place)
        stack[:n] = following[begin : begin + n]
        begin += n
    return places
