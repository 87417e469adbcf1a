"""Host memory over a disk: which experts it holds, what is read next, what leaves it. Rule 17 lives here.

The same kind of state machine as `policies.core.residency_compiled`, beside it: one array `h`, no clock, no bytes. Both
engines call these functions. Of GPU memory (`m`) it reads what is queued and what is LOADING; it tells it, in m[BELOW],
which experts the link can take. Room is counted as there, in slots or in bytes (rule 19).
"""

import numpy as np

from policies.core import residency_compiled as core
from policies.core.compiled import compiled
from policies.core.policy import Float, Int
from policies.core.residency_compiled import BLOCKED, NO_EXPERT

# Rows of h. By expert: under way from the disk; demanded, and what it was demanded for has not ended; serial number of
# its latest read, transfer or compute; whether it holds room here; the attempt that found no room for it. By place in a
# queue: demanded reads; victims so far.
READING, DEMANDED, RECENCY, HELD, TRIED, READS, VICTIMS, ONE = range(8)
ROWS = 8

# Single numbers, h[ONE, ...]
FREE, SERIAL, NEXT_READ, LAST_READ, ATTEMPT, EVICTED, N_DEMAND, N_PREFETCH = range(8)
"""EVICTED: how many victims h[VICTIMS] holds since they were last read."""
COUNTERS = slice(N_DEMAND, N_PREFETCH + 1)
WIDTH = 8


def new(m: Int, total: int, room: int) -> Int:
    """Return an empty host memory of `room` slots, or bytes if experts differ in size. `m` hears that it is empty."""
    h = np.zeros((ROWS, max(total, WIDTH)), np.int64)
    h[ONE, FREE] = room
    m[core.BELOW, :total], m[core.ONE, core.PARTIAL] = 0, 1
    return h


@compiled
def demand(h: Int, m: Int, experts: Int, first: int, last: int) -> None:
    """An event has been looked up: its misses in experts[first:last] (ascending ids) are demanded of host memory."""
    h[ONE, NEXT_READ] = n = 0
    for i in range(first, last):
        expert = experts[i]
        if m[core.STATE, expert] == core.DEMANDED or m[core.WANTED, expert] == core.ON_HOST:
            h[DEMANDED, expert] = 1
            if not m[core.BELOW, expert]:
                h[READS, n] = expert
                n += 1
    h[ONE, LAST_READ] = n


@compiled
def touch(h: Int, expert: int) -> None:
    """A read or transfer of `expert` starts, or its compute on the host."""
    h[ONE, SERIAL] += 1
    h[RECENCY, expert] = h[ONE, SERIAL]


@compiled
def release(h: Int, expert: int) -> None:
    h[DEMANDED, expert] = 0


@compiled
def evictable(h: Int, m: Int, proposals: Float, expert: int, demanded: bool) -> bool:
    """Whether `expert` may leave for a read that is demanded, or for that of a prefetch."""
    if not m[core.BELOW, expert] or h[DEMANDED, expert] or m[core.STATE, expert] == core.LOADING:
        return False
    free: bool = demanded or not core.queued(m, proposals, expert)
    return free


@compiled
def make_room(h: Int, m: Int, proposals: Float, total: int, expert: int, demanded: bool) -> bool:
    """Have the least recent leave until there is room for `expert`; False, and none leaves, if that cannot be."""
    one, size = h[ONE], m[core.SIZE, expert]
    if one[FREE] >= size:
        return True
    room = one[FREE]
    for other in range(total):
        if evictable(h, m, proposals, other, demanded):
            room += m[core.SIZE, other]
    if room < size:
        return False
    while one[FREE] < size:
        victim = NO_EXPERT
        for other in range(total):
            if (victim == NO_EXPERT or h[RECENCY, other] < h[RECENCY, victim]) and evictable(
                h, m, proposals, other, demanded
            ):
                victim = other
        m[core.BELOW, victim] = h[HELD, victim] = 0
        one[FREE] += m[core.SIZE, victim]
        h[VICTIMS, one[EVICTED]] = victim
        one[EVICTED] += 1
    return True


@compiled
def best_prefetch(h: Int, m: Int, proposals: Float) -> int:
    """Return the first queued prefetch that is ABSENT here and that this attempt has not tried, or NO_EXPERT."""
    best: int = NO_EXPERT
    priority = proposals[m[core.ONE, core.PROPOSAL] & 1]
    for expert in range(m[core.ONE, core.LOWEST], m[core.ONE, core.HIGHEST]):
        if best != NO_EXPERT and priority[expert] <= priority[best]:
            continue
        if m[core.BELOW, expert] or h[READING, expert] or h[TRIED, expert] == h[ONE, ATTEMPT]:
            continue
        if core.queued(m, proposals, expert):
            best = expert
    return best


@compiled
def next_read(h: Int, m: Int, proposals: Float, total: int) -> int:
    """Return what the free disk reads; NO_EXPERT where nothing is to be read, BLOCKED where there is no room."""
    one = h[ONE]
    while one[NEXT_READ] < one[LAST_READ]:
        expert: int = h[READS, one[NEXT_READ]]
        if h[READING, expert] or m[core.BELOW, expert] or not h[DEMANDED, expert]:  # its prefetch read it
            one[NEXT_READ] += 1
            continue
        if not make_room(h, m, proposals, total, expert, True):
            return BLOCKED
        one[NEXT_READ] += 1
        one[N_DEMAND] += 1
        start(h, m, expert)
        return expert
    one[ATTEMPT] += 1
    while True:
        best = best_prefetch(h, m, proposals)
        if best == NO_EXPERT:
            return NO_EXPERT
        if make_room(h, m, proposals, total, best, False):
            one[N_PREFETCH] += 1
            start(h, m, best)
            return best
        if not m[core.ONE, core.SIZED]:
            return BLOCKED
        h[TRIED, best] = one[ATTEMPT]  # a smaller one may have room


@compiled
def start(h: Int, m: Int, expert: int) -> None:
    h[READING, expert] = h[HELD, expert] = 1
    h[ONE, FREE] -= m[core.SIZE, expert]
    touch(h, expert)


@compiled
def read_ended(h: Int, m: Int, expert: int) -> None:
    """The read of `expert` has ended: it is READY here, and the link may take it."""
    h[READING, expert] = 0
    m[core.BELOW, expert] = 1


@compiled
def empty(h: Int, m: Int, total: int) -> None:
    """Rule 10, `--cold`: every expert is ABSENT, reads are discarded."""
    for expert in range(total):
        if h[HELD, expert]:
            h[ONE, FREE] += m[core.SIZE, expert]
        h[READING, expert] = h[HELD, expert] = h[DEMANDED, expert] = m[core.BELOW, expert] = 0
    h[ONE, NEXT_READ] = h[ONE, LAST_READ] = 0


class HostMemory:
    """Host memory under a disk, below the residency `m` of GPU memory (rule 17).

    room: slots, or bytes where experts differ in size.
    """

    def __init__(self, m: Int, proposals: Float, total: int, room: int) -> None:
        self.h = new(m, total, room)
        self._m, self._proposals, self._total = m, proposals, total

    def empty(self) -> None:
        empty(self.h, self._m, self._total)
