"""The residency machine, compiled: states of experts, slots, pins, queues, victims. It owns rules 1, 2 and 4 to 10.

All integers of the machine live in one array, so that a call from Python unboxes one array and costs well under a
microsecond: `m[ROW, i]`, where i is an expert's id, a slot, or a place in a queue. Floats (keep scores, priorities)
are `keep`, float64[3 or more, L*E]. `policies/residency.py` gives these functions a class and tells the theory.

The slots are divided into partitions, contiguous ranges of them, each for a contiguous range of experts (one for all,
or one for each layer): a free slot, and a victim, are of the expert's partition.
"""

from collections.abc import Sequence

import numpy as np
from numba import njit

from policies.compiled import compiled
from policies.contract import Float, Int
from policies.scores import on_evict, on_insert, on_lookup

# Rows of m. By expert:
STATE, SLOT, WANTED, UNUSED, PROPOSED, PARTITION = range(6)
# by partition (its slots are FIRST to END - 1; SHUT: the attempt that found no slot in it);
FIRST, END, FREE, SHUT = range(6, 10)
# by slot (the expert that holds it, or -1); by place in a queue; and single numbers:
HELD, DEMANDS, QUEUE, HITS, ONE = range(10, 15)
ROWS = 15

# States of an expert. WANTED marks one that the current event looked up and has not computed yet, so a pin is
# READY and WANTED; UNUSED one that was prefetched and not looked up since; PROPOSED the last proposal that named it.
ABSENT, QUEUED, DEMANDED, LOADING, READY = range(5)

# Single numbers, m[ONE, ...]
SLOTS, ATTEMPT, SERIAL, STARTS, PROPOSAL, NEXT_DEMAND, LAST_DEMAND, QUEUE_LENGTH, ACTIVE, PAUSED = range(10)
# and the counters of the run:
N_HITS, N_LATE, N_MISSES, N_DEMAND, N_PREFETCH, N_USED, N_WASTED = range(10, 17)
COUNTERS = slice(N_HITS, N_WASTED + 1)
WIDTH = 17  # columns that row ONE needs

PRIORITY = 2  # row of `keep`

NO_EXPERT = -1
BLOCKED = -2  # in place of an expert: something is queued, but no slot is to be had


def new(total: int, partitions: Sequence[int]) -> Int:
    """The machine of a model of `total` experts, everything absent.

    partitions: slots of each; the experts are divided among them evenly, in ascending ids.
    """
    slots, n = sum(partitions), len(partitions)
    m = np.zeros((ROWS, max(total, slots, WIDTH)), np.int64)
    m[SLOT] = m[HELD] = NO_EXPERT
    m[ONE, SLOTS] = slots
    m[PARTITION, :total] = np.arange(total) * n // total
    m[FREE, :n] = partitions
    m[END, :n] = np.cumsum(partitions)
    m[FIRST, 1:n] = m[END, : n - 1]
    m[ONE, ACTIVE] = m[ONE, PAUSED] = NO_EXPERT
    return m


@compiled
def route(m: Int, keep: Float, rule: int, experts: Int, first: int, last: int) -> int:
    """Rules 1 to 3: look up experts[first:last] (ascending ids), pin, queue demands; the number of hits.

    The hits stand in m[HITS] in ascending order.
    """
    one = m[ONE]
    one[SERIAL] += 1
    one[NEXT_DEMAND] = one[LAST_DEMAND] = 0
    hits = 0
    for i in range(first, last):
        expert = experts[i]
        state = m[STATE, expert]
        if state == READY:
            m[HITS, hits] = expert
            hits += 1
        elif state == LOADING:
            one[N_LATE] += 1
        else:
            m[STATE, expert] = DEMANDED
            m[DEMANDS, one[LAST_DEMAND]] = expert
            one[LAST_DEMAND] += 1
        if m[UNUSED, expert]:
            m[UNUSED, expert] = 0
            one[N_USED] += 1
        m[WANTED, expert] = 1
        on_lookup(rule, keep, expert, one[SERIAL])
    one[N_HITS] += hits
    one[N_MISSES] += one[LAST_DEMAND]
    return hits


@compiled
def computed_hits(m: Int, first: int, last: int) -> None:
    """The compute of hits `first` to `last` - 1 of the event has ended: unpin them (rule 2)."""
    for i in range(first, last):
        m[WANTED, m[HITS, i]] = 0


@compiled
def clear_queue(m: Int) -> None:
    """Forget the queued prefetches that have not started."""
    for i in range(m[ONE, QUEUE_LENGTH]):
        if m[STATE, m[QUEUE, i]] == QUEUED:
            m[STATE, m[QUEUE, i]] = ABSENT
    m[ONE, QUEUE_LENGTH] = 0


@compiled
def propose(m: Int, keep: Float, experts: Int, priorities: Float) -> None:
    """Rule 4: replace the queued prefetches by these; what is READY, LOADING or demanded is left out."""
    clear_queue(m)
    m[ONE, PROPOSAL] += 1
    queue, state, proposed, priority = m[QUEUE], m[STATE], m[PROPOSED], keep[PRIORITY]
    n = 0
    for i in range(len(experts)):
        expert = experts[i]
        proposed[expert] = m[ONE, PROPOSAL]
        if state[expert] == ABSENT:
            state[expert] = QUEUED
            priority[expert] = priorities[i]
            queue[n] = expert
            n += 1
    m[ONE, QUEUE_LENGTH] = n


@compiled
def best_queued(m: Int, keep: Float) -> int:
    """The queued prefetch that is next, by priority descending, then id ascending; NO_EXPERT without one.

    Those of a partition that this attempt has found without a slot are passed over.
    A scan, which also drops what a demand or a start has taken: a proposal is long, but few of it ever start.
    """
    queue, state, priority = m[QUEUE], m[STATE], keep[PRIORITY]
    partition, shut, attempt = m[PARTITION], m[SHUT], m[ONE, ATTEMPT]
    best, n = NO_EXPERT, 0
    for i in range(m[ONE, QUEUE_LENGTH]):
        expert = queue[i]
        if state[expert] != QUEUED:
            continue
        queue[n] = expert
        n += 1
        if (
            best == NO_EXPERT
            or priority[expert] > priority[best]
            or (priority[expert] == priority[best] and expert < best)
        ) and shut[partition[expert]] != attempt:
            best = expert
    m[ONE, QUEUE_LENGTH] = n
    return best


@compiled
def protected(m: Int, expert: int) -> bool:
    """Rule 6: prefetched, not looked up since, and in the latest proposal."""
    unused: bool = m[UNUSED, expert] == 1
    return unused and m[PROPOSED, expert] == m[ONE, PROPOSAL]


@njit(cache=True, nogil=True)
def evictable(m: Int, partition: int, shielded: bool) -> Int:
    """Ascending ids of a partition's READY experts that nothing pins: the protected ones (`shielded`), or the others.

    int64[n].
    """
    found = np.empty(m[END, partition] - m[FIRST, partition], np.int64)
    n = 0
    for slot in range(m[FIRST, partition], m[END, partition]):
        expert = m[HELD, slot]
        if (
            expert != NO_EXPERT
            and m[STATE, expert] == READY
            and not m[WANTED, expert]
            and protected(m, expert) == shielded
        ):
            found[n] = expert
            n += 1
    return np.sort(found[:n])


@compiled
def least(m: Int, keep: Float, partition: int, shielded: bool) -> int:
    """Of `evictable(m, partition, shielded)` the one with the least (primary, secondary, id), or NO_EXPERT.

    Scores go first: they pass over almost every slot. (`expert < 0` tells the compiler that no index is negative.)
    """
    held, state, wanted, primary, secondary = m[HELD], m[STATE], m[WANTED], keep[0], keep[1]
    best, lowest = NO_EXPERT, np.inf
    for slot in range(m[FIRST, partition], m[END, partition]):
        expert = held[slot]
        if expert < 0 or primary[expert] > lowest or state[expert] != READY or wanted[expert]:
            continue
        if (
            best >= 0
            and primary[expert] == lowest
            and (secondary[expert] > secondary[best] or (secondary[expert] == secondary[best] and expert > best))
        ):
            continue
        if protected(m, expert) == shielded:
            best, lowest = expert, primary[expert]
    return best


@compiled
def start(m: Int, keep: Float, rule: int, expert: int, victim: int) -> None:
    """Rule 5: the transfer of `expert` starts, into the slot of `victim` or, without one, the lowest free slot."""
    one, partition = m[ONE], m[PARTITION, expert]
    if victim != NO_EXPERT:
        slot = m[SLOT, victim]
        leave(m, keep, rule, victim)
    else:
        slot = m[FIRST, partition]
        while m[HELD, slot] != NO_EXPERT:
            slot += 1
    if m[STATE, expert] == DEMANDED:
        one[NEXT_DEMAND] += 1
        one[N_DEMAND] += 1
    else:
        m[UNUSED, expert] = 1
        one[N_PREFETCH] += 1
    m[STATE, expert] = LOADING
    m[SLOT, expert] = slot
    m[HELD, slot] = expert
    m[FREE, partition] -= 1
    one[STARTS] += 1
    one[ACTIVE] = expert
    on_insert(rule, keep, expert, one[SERIAL], one[STARTS])


@compiled
def leave(m: Int, keep: Float, rule: int, expert: int) -> None:
    """`expert` leaves the cache and its slot is free."""
    m[ONE, N_WASTED] += m[UNUSED, expert]
    m[UNUSED, expert] = 0
    m[STATE, expert] = ABSENT
    m[HELD, m[SLOT, expert]] = NO_EXPERT
    m[SLOT, expert] = NO_EXPERT
    m[FREE, m[PARTITION, expert]] += 1
    on_evict(rule, keep, expert)


@compiled
def start_demand(m: Int, keep: Float, rule: int) -> tuple[int, int]:
    """Start the first queued demand: (expert, victim), or (BLOCKED, NO_EXPERT), or (NO_EXPERT, NO_EXPERT)."""
    one = m[ONE]
    if one[NEXT_DEMAND] == one[LAST_DEMAND]:
        return NO_EXPERT, NO_EXPERT
    expert = m[DEMANDS, one[NEXT_DEMAND]]
    partition, victim = m[PARTITION, expert], NO_EXPERT
    if m[FREE, partition] == 0:
        victim = least(m, keep, partition, False)
        if victim == NO_EXPERT:
            victim = least(m, keep, partition, True)
        if victim == NO_EXPERT:
            return BLOCKED, NO_EXPERT
    start(m, keep, rule, expert, victim)
    return expert, victim


@compiled
def start_prefetch(m: Int, keep: Float, rule: int, one_scale: bool) -> tuple[int, int]:
    """Start the best queued prefetch that can have a slot: (expert, victim).

    In place of an expert: BLOCKED where no queued one can, NO_EXPERT where none is queued. With one partition it is the
    best queued or none: all would have the same slot, and on one scale none may evict more than the best.
    """
    m[ONE, ATTEMPT] += 1
    answer = NO_EXPERT
    while True:
        expert = best_queued(m, keep)
        if expert == NO_EXPERT:
            return answer, NO_EXPERT
        partition, victim = m[PARTITION, expert], NO_EXPERT
        if m[FREE, partition] == 0:
            victim = least(m, keep, partition, False)
            if victim == NO_EXPERT or (one_scale and keep[0, victim] >= keep[PRIORITY, expert]):
                m[SHUT, partition] = m[ONE, ATTEMPT]
                answer = BLOCKED
                continue
        start(m, keep, rule, expert, victim)
        return expert, victim


@compiled
def resume(m: Int) -> int:
    """The paused prefetch goes on, if there is one."""
    m[ONE, ACTIVE] = m[ONE, PAUSED]
    m[ONE, PAUSED] = NO_EXPERT
    expert: int = m[ONE, ACTIVE]
    return expert


@compiled
def next_transfer(m: Int, keep: Float, rule: int, one_scale: bool) -> tuple[int, int, bool]:
    """Rule 5, the link being free: (expert now on the link, its victim or NO_EXPERT, whether it is a prefetch).

    In place of an expert: NO_EXPERT where nothing is queued, BLOCKED where no slot is to be had.
    """
    expert, victim = start_demand(m, keep, rule)
    if expert >= 0:
        return expert, victim, False
    if m[ONE, PAUSED] != NO_EXPERT:
        return resume(m), NO_EXPERT, True
    if expert == BLOCKED:
        return BLOCKED, NO_EXPERT, False
    expert, victim = start_prefetch(m, keep, rule, one_scale)
    return expert, victim, True


@compiled
def arrived(m: Int) -> bool:
    """The transfer on the link has ended: its expert is READY; whether the current event waits for it."""
    expert = m[ONE, ACTIVE]
    m[ONE, ACTIVE] = NO_EXPERT
    m[STATE, expert] = READY
    awaited: bool = m[WANTED, expert] == 1
    return awaited


@compiled
def arrived_and_next(m: Int, keep: Float, rule: int, one_scale: bool) -> tuple[bool, int, int, bool]:
    """`arrived` and at once `next_transfer`: (awaited, expert, victim, is a prefetch)."""
    awaited = arrived(m)
    expert, victim, prefetch = next_transfer(m, keep, rule, one_scale)
    return awaited, expert, victim, prefetch


@compiled
def interrupt(m: Int, keep: Float, rule: int) -> tuple[int, int]:
    """Rule 5 at a chunk boundary: a demand that can take a slot at once pauses the prefetch on the link.

    (expert, victim) of the demand; expert < 0 where the transfer goes on, as does one that is awaited.
    """
    running = m[ONE, ACTIVE]
    if m[WANTED, running]:
        return NO_EXPERT, NO_EXPERT
    expert, victim = start_demand(m, keep, rule)
    if expert >= 0:
        m[ONE, PAUSED] = running
    return expert, victim


@njit(cache=True, nogil=True)
def empty_cache(m: Int, keep: Float, rule: int) -> Int:
    """Rule 10, `--cold`: every expert becomes ABSENT, queued and started transfers are discarded; ids that left."""
    clear_queue(m)
    one = m[ONE]
    one[ACTIVE] = one[PAUSED] = NO_EXPERT
    left = np.sort(m[HELD, : one[SLOTS]].copy())
    left = left[np.searchsorted(left, 0) :]
    for expert in left:
        leave(m, keep, rule, expert)
    return left
