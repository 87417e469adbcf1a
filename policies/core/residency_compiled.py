"""Residency, compiled: states of experts, slots, pins, queues, victims. Rules 1, 2, 4 to 7, 9, 10 and 19 live here.

All integers lie in one array, `m[ROW, i]`, where i is an expert's id, a slot, or a place in a queue. `keep`,
float64[2 or more, L*E], has the policy's keep scores; `proposals`, float64[4, L*E], the priorities of the latest
proposal of an even and of an odd number, NOT_PROPOSED elsewhere, and two more rows with the lowest id of each and the
one behind its highest. docs/architecture.md (How the residency works) says why.
"""

from collections.abc import Sequence

import numpy as np

from policies.core.admission import OWN, SCORE, SECOND
from policies.core.calling import EVICT, HIT, INSERT, VICTIM, ask, checked
from policies.core.calling import call as call_address
from policies.core.compiled import allocating, apart, compiled, inlined
from policies.core.policy import ABSENT as ABSENT
from policies.core.policy import CHANGED_HERE, UNCHANGED, Float, Int
from policies.core.policy import DEMANDED as DEMANDED
from policies.core.policy import LOADING as LOADING
from policies.core.policy import READY as READY

# Rows of m. By expert:
STATE, SLOT, WANTED, UNUSED, LEFT, PARTITION, KIND, SIZE, BELOW, BEFORE, AFTER, HOME, MISSED = range(13)
# by partition (its slots are FIRST to END - 1; FREE: room that no partition holds);
FIRST, END, FREE = range(13, 16)
# by kind (experts of one partition and size; SHUT: the attempt that found no slot for them);
SHUT = 16
# by slot (the expert that holds it, or -1); by place in a queue; by block of experts; and single numbers:
HELD, DEMANDS, HITS, VICTIMS, COPIES, GREATEST, LEAST_PRIMARY, LEAST_SECONDARY, MARKED, IN_SEARCH, ONE = range(17, 28)
ROWS = 28

# States of an expert. WANTED marks one that the current event looked up and has not computed yet (ON_GPU or ON_HOST
# says where it will be), so a pin is READY and WANTED; UNUSED one that was prefetched and not looked up since;
# LEFT the proposal in force when it last left the cache; BELOW one that the tier below can give. From the first
# search in a proposal on, no queued prefetch of a block has a `rank` above GREATEST. Of a block that is not MARKED, no
# expert with a slot has scores below LEAST_PRIMARY and LEAST_SECONDARY (`order`); IN_SEARCH: the last search in it. An
# expert that is not admitted has the partition STAGING in place of its HOME; MISSED is the step of its last miss (rule
# 21).
ON_GPU, ON_HOST = 1, 2

# Single numbers, m[ONE, ...]
# (LISTS: the column at which the first partition's list begins and ends, or 0 where residents are not listed)
SLOTS, LISTS, ATTEMPT, SERIAL, STARTS, PROPOSAL, NEXT_DEMAND, LAST_DEMAND, LOWEST, ACTIVE, PAUSED, LANDING = range(12)
# (PROPOSAL: the number of the one in force; its experts that may be queued have ids from LOWEST to HIGHEST - 1;
# SEARCHED: the latest proposal that was searched; SEARCH: how many searches by blocks for a victim there were; BLOCKS:
# how many blocks of scores there are; SCORES_ARE: what is known of these, UNSEEN to KNOWN)
# (SIZED: whether a cache is given in bytes, else every SIZE is 1; EVICTED: how many victims of the latest
# transfer m[VICTIMS] then holds; PARTIAL: whether the tier below may lack experts, else the row BELOW is not looked at;
# ASKED: the address of a policy that names its victims in Python (`policies.core.calling`); whether it also HEARS of
# hits, insertions or evictions; FAILED: whether a policy in Python has raised an error)
# (the last four: the addresses of a score policy's hooks, `policies.core.dispatch.HOOKS`)
SIZED, EVICTED, PARTIAL, ASKED, HEARS_HIT, HEARS_INSERT, HEARS_EVICT, FAILED, HIGHEST = range(12, 21)
ON_LOOKUP, ON_HOST_LOOKUP, ON_INSERT, ON_EVICT = range(21, 25)
HOOKS = slice(ON_LOOKUP, ON_EVICT + 1)
# and the counters of the run:
# (the last four in slots, or in bytes where experts differ in size)
N_HITS, N_LATE, N_MISSES, N_DEMAND, N_PREFETCH, N_USED, N_WASTED, N_ON_HOST = range(25, 33)
N_ADMITTED, N_BYPASSED, N_COPIES = range(33, 36)
DEMAND_ROOM, PREFETCH_ROOM, WASTED_ROOM, COPIED_ROOM = range(36, 40)
COUNTERS = slice(N_HITS, COPIED_ROOM + 1)
SCORES = 40  # the address of the keep scores (`policies.core.calling.Scores`)
SEARCHED = 41
# of rule 21: the kind of admission (`policies.core.admission`), its window, its cap, and whether the host computes what
# is not admitted; the staging partition or -1; copies that are queued, and that have started in the step; its number
ADMISSION, WINDOW, INSERT_CAP, OTHERS_ON_HOST, STAGING, QUEUED_COPIES, STEP_COPIES, STEP = range(42, 50)
SEARCH, BLOCKS, SCORES_ARE = range(50, 53)
ADMITTING = slice(ADMISSION, OTHERS_ON_HOST + 1)
WIDTH = 53  # columns that row ONE needs

NO_EXPERT = -1
BLOCKED = -2  # in place of an expert: something is queued, but no slot is there for it

NOT_PROPOSED = -np.inf  # in place of a priority

MOST = np.iinfo(np.int64).max
LEAST = -MOST - 1
RANK_NOT_PROPOSED = int(np.array(NOT_PROPOSED).view(np.int64)) ^ MOST  # its `rank`

BLOCK = 64  # experts whose priorities are looked at together
BLOCK_HELD = 256  # experts whose scores are
FEW_SLOTS = 512  # so many are looked through as they are

# What is known of scores: they may change unseen; all have changed, and no search has followed, or one has; or all is
# known but of MARKED blocks.
UNSEEN, NEW, AGAIN, KNOWN = range(4)


def new(total: int, partitions: Sequence[int], listed: bool, sizes: Int | None = None, staging: int = 0) -> Int:
    """The residency of a model of `total` experts, everything absent.

    partitions: slots of each; the experts are divided among them evenly, in ascending ids.
    listed: the residents of each partition are kept in a list (see `first_in_order`).
    sizes: bytes of every expert, [total]; `partitions` are bytes then too (rule 19), and slots mere places.
    staging: room in slots of the largest expert for what is not admitted (rule 21), the last partition; 0: none.
    """
    n = len(partitions)
    of = _partition_of(total, n)
    room = np.array(partitions, np.int64)
    places = places_of(total, partitions, sizes)
    if staging:
        n += 1
        most = staging if sizes is None else staging * int(sizes.max())
        room, places = np.append(room, most), np.append(places, places_of(total, [most], sizes))
    slots = int(places.sum())
    m = np.zeros((ROWS, max(total + n, slots, WIDTH)), np.int64)
    m[SLOT] = m[HELD] = NO_EXPERT
    m[BEFORE] = m[AFTER] = np.arange(m.shape[1])
    m[ONE, SLOTS], m[ONE, LISTS] = slots, total * listed
    m[ONE, BLOCKS] = -(-total // BLOCK_HELD)
    m[PARTITION, :total] = m[HOME, :total] = m[KIND, :total] = of
    m[ONE, STAGING] = n - 1 if staging else NO_EXPERT
    m[SIZE, :total], m[BELOW] = 1, 1
    m[FREE, :n] = room
    m[END, :n] = np.cumsum(places)
    m[FIRST, 1:n] = m[END, : n - 1]
    m[ONE, ACTIVE] = m[ONE, PAUSED] = m[ONE, LANDING] = NO_EXPERT
    if sizes is not None:
        m[ONE, SIZED], m[SIZE, :total] = 1, sizes
        m[KIND, :total] = np.unique(np.stack([of, sizes]), axis=1, return_inverse=True)[1].reshape(-1)
    return m


def places_of(total: int, partitions: Sequence[int], sizes: Int | None = None) -> Int:
    """The slots of each partition: as many as its smallest experts fit. Arguments as for `new`."""
    if sizes is None:
        return np.array(partitions, np.int64)
    of = _partition_of(total, len(partitions))
    fit = [np.cumsum(np.sort(sizes[of == p])) <= room for p, room in enumerate(partitions)]
    return np.array([each.sum() for each in fit], np.int64)


def _partition_of(total: int, partitions: int) -> Int:
    return np.arange(total) * partitions // total


@inlined
def call(m: Int, hook: int, expert: int, serial: int, start: int) -> None:
    """Rule 8: call one of a score policy's hooks, if it has that one."""
    if m[ONE, hook]:
        changed = checked(call_address(m[ONE, hook], m[ONE, SCORES], expert, serial, start))
        if changed & CHANGED_HERE:
            m[MARKED, expert // BLOCK_HELD] = 1
        else:
            note_change(m, changed, expert, expert + 1)


@apart
@compiled
def note_change(m: Int, changed: int, first: int, last: int) -> None:
    """A policy may have changed scores, as it says: those of experts from `first` to `last` - 1, or all."""
    if changed & CHANGED_HERE:
        for block in range(first // BLOCK_HELD, (last - 1) // BLOCK_HELD + 1):
            m[MARKED, block] = 1
    elif not changed & UNCHANGED and m[ONE, SCORES_ARE] != UNSEEN:
        m[ONE, SCORES_ARE] = NEW


@compiled
def route(m: Int, keep: Float, experts: Int, first: int, last: int) -> int:
    """Rules 1 to 3: look up experts[first:last] (ascending ids), pin, queue demands; the number of hits.

    The hits stand in m[HITS] in ascending order. Misses that the host is to compute are marked before (rule 13).
    """
    one = m[ONE]
    one[SERIAL] += 1
    hits = misses = on_host = 0
    for i in range(first, last):
        expert = experts[i]
        if one[QUEUED_COPIES]:
            withdraw(m, expert)
        state = m[STATE, expert]
        if state == READY:
            m[HITS, hits] = expert
            hits += 1
        elif state != LOADING:
            if m[WANTED, expert] == ON_HOST:
                on_host += 1
                call(m, ON_HOST_LOOKUP, expert, one[SERIAL], 0)
                continue
            m[STATE, expert] = DEMANDED
            m[DEMANDS, misses] = expert
            misses += 1
        if m[UNUSED, expert]:
            m[UNUSED, expert] = 0
            one[N_USED] += 1
        m[WANTED, expert] = ON_GPU
        if state >= LOADING and one[HEARS_HIT]:
            ask(one[ASKED], HIT, expert)
        score = keep[0, expert]
        call(m, ON_LOOKUP, expert, one[SERIAL], 0)
        if one[LISTS] and state >= LOADING and keep[0, expert] != score:
            unlink(m, expert)
            link(m, keep, expert)
    one[NEXT_DEMAND], one[LAST_DEMAND] = 0, misses
    one[N_HITS] += hits
    one[N_LATE] += last - first - hits - misses - on_host
    one[N_MISSES] += misses + on_host
    one[N_ON_HOST] += on_host
    return hits


@apart
@compiled
def admit(m: Int, keep: Float, proposals: Float, experts: Int, first: int, last: int, named: Int) -> None:
    """Rule 21, after rule 3: what becomes of the misses among experts[first:last]. named: what the policy admits."""
    one = m[ONE]
    one[LAST_DEMAND] = 0
    for i in range(first, last):
        expert = experts[i]
        if m[STATE, expert] >= LOADING:
            continue
        admitted = is_admitted(m, keep, proposals, expert, named)
        m[MISSED, expert] = one[STEP]
        one[N_ADMITTED] += admitted
        one[N_BYPASSED] += not admitted
        if m[STATE, expert] == DEMANDED and not admitted and one[OTHERS_ON_HOST]:
            m[STATE, expert], m[WANTED, expert] = ABSENT, ON_HOST
            one[N_ON_HOST] += 1
        elif m[STATE, expert] == DEMANDED:
            m[PARTITION, expert] = m[HOME, expert] if admitted else one[STAGING]
            m[DEMANDS, one[LAST_DEMAND]] = expert
            one[LAST_DEMAND] += 1
        elif admitted:
            m[COPIES, one[QUEUED_COPIES]] = expert
            one[QUEUED_COPIES] += 1


@compiled
def is_admitted(m: Int, keep: Float, proposals: Float, expert: int, named: Int) -> bool:
    """Whether rule 21 admits a miss."""
    admission = m[ONE, ADMISSION]
    if admission == SECOND:
        within: bool = m[MISSED, expert] > 0 and m[ONE, STEP] - m[MISSED, expert] <= m[ONE, WINDOW]
        return within
    if admission == OWN:
        for other in named:
            if other == expert:
                return True
    if admission != SCORE:
        return False
    partition = m[HOME, expert]
    if m[FREE, partition] >= m[SIZE, expert]:
        return True
    victim = first_to_go(m, keep, proposals, partition, True)
    if victim == NO_EXPERT:
        return False
    greater: bool = keep[0, expert] > keep[0, victim]
    return greater or (keep[0, expert] == keep[0, victim] and keep[1, expert] > keep[1, victim])


@compiled
def withdraw(m: Int, expert: int) -> None:
    """Rule 21: forget the background copy of `expert` if it is queued; the order of the others stays."""
    kept = 0
    for place in range(m[ONE, QUEUED_COPIES]):
        if m[COPIES, place] != expert:
            m[COPIES, kept] = m[COPIES, place]
            kept += 1
    m[ONE, QUEUED_COPIES] = kept


@compiled
def begin_step(m: Int) -> None:
    """Rule 21: a step begins."""
    m[ONE, STEP] += 1
    m[ONE, STEP_COPIES] = 0


@inlined
def computed(m: Int, expert: int) -> None:
    """The compute of `expert` in its event has ended: unpin it (rule 2); what is not admitted leaves (rule 21)."""
    m[WANTED, expert] = 0
    if m[PARTITION, expert] == m[ONE, STAGING]:
        leave_staging(m, expert)


@apart
@compiled
def leave_staging(m: Int, expert: int) -> None:
    m[FREE, m[ONE, STAGING]] += m[SIZE, expert]
    m[PARTITION, expert] = m[HOME, expert]
    m[STATE, expert], m[LEFT, expert] = ABSENT, m[ONE, PROPOSAL]
    m[HELD, m[SLOT, expert]] = m[SLOT, expert] = NO_EXPERT
    m[MARKED, expert // BLOCK_HELD] = 1


@compiled
def link(m: Int, keep: Float, expert: int) -> None:
    """Put `expert` in its place in its partition's list, which it walks from the end."""
    end = m[ONE, LISTS] + m[PARTITION, expert]
    score, before = keep[0, expert], m[BEFORE, end]
    while before != end and (keep[0, before] > score or (keep[0, before] == score and before > expert)):
        before = m[BEFORE, before]
    after = m[AFTER, before]
    m[BEFORE, expert], m[AFTER, expert] = before, after
    m[AFTER, before] = m[BEFORE, after] = expert


@compiled
def unlink(m: Int, expert: int) -> None:
    """Take `expert` out of its partition's list."""
    before, after = m[BEFORE, expert], m[AFTER, expert]
    m[AFTER, before], m[BEFORE, after] = after, before


@compiled
def first_in_order(m: Int, proposals: Float, partition: int, among_protected: bool) -> int:
    """`least` where residents are listed: of the list, in the order of (score, id), the first that may go.

    That is a step or two: what is pinned, loading or protected was used, or started, of late and stands near the end.
    So does whatever `link` puts in its place: a score that changes becomes the greatest of all, but for ties within an
    event (`Compiled.in_order`).
    """
    end = m[ONE, LISTS] + partition
    expert: int = m[AFTER, end]
    while expert != end:
        if m[STATE, expert] == READY and not m[WANTED, expert] and protected(m, proposals, expert) == among_protected:
            return expert
        expert = m[AFTER, expert]
    return NO_EXPERT


@compiled
def computed_hits(m: Int, first: int, last: int) -> None:
    """The compute of hits `first` to `last` - 1 of the event has ended: unpin them (rule 2)."""
    for i in range(first, last):
        m[WANTED, m[HITS, i]] = 0


def new_proposals(total: int) -> Float:
    """Two empty proposals, for a model of `total` experts."""
    proposals = np.full((4, max(total, 2)), NOT_PROPOSED)
    proposals[2:] = 0
    return proposals


@compiled
def write_proposal(proposals: Float, number: int, experts: Int, priorities: Float) -> None:
    """Rule 4: write down the proposal of this number, for all caches of a run, in place of the one before the last."""
    row, span, lowest, highest = proposals[number & 1], proposals[2 + (number & 1)], len(proposals[0]), NO_EXPERT
    row[int(span[0]) : int(span[1])] = NOT_PROPOSED
    for i in range(len(experts)):
        row[experts[i]] = priorities[i] + 0.0  # of zeros, which are equal, the positive one
    for i in range(len(experts)):
        lowest, highest = min(lowest, experts[i]), max(highest, experts[i])
    span[0], span[1] = lowest, highest + 1


@compiled
def take_proposal(m: Int, proposals: Float) -> None:
    """Rule 4: the next proposal replaces the queued prefetches; what is READY, LOADING or demanded is left out."""
    one = m[ONE]
    one[PROPOSAL] += 1
    span = proposals[2 + (one[PROPOSAL] & 1)]
    one[LOWEST], one[HIGHEST] = int(span[0]), int(span[1])


@inlined
def clear_queue(m: Int) -> None:
    """Forget the queued prefetches that have not started."""
    m[ONE, HIGHEST] = 0


@compiled
def propose(m: Int, proposals: Float, experts: Int, priorities: Float) -> None:
    """Rule 4, for a cache by itself."""
    write_proposal(proposals, m[ONE, PROPOSAL] + 1, experts, priorities)
    take_proposal(m, proposals)


@inlined
def queued(m: Int, proposals: Float, expert: int) -> bool:
    """Whether a prefetch of `expert` is queued: it was absent when it was proposed, and nothing has come of that."""
    one = m[ONE]
    absent: bool = m[STATE, expert] == ABSENT and m[LEFT, expert] != one[PROPOSAL]
    return absent and proposals[one[PROPOSAL] & 1, expert] != NOT_PROPOSED and expert < one[HIGHEST]


@compiled
def queued_prefetches(m: Int, proposals: Float) -> int:
    """Return how many prefetches are queued."""
    count = 0
    for expert in range(m[ONE, HIGHEST]):
        count += queued(m, proposals, expert)
    return count


@inlined
def rank(bits: int) -> int:
    """A whole number for the bits of a priority: these compare as priorities do, and in vectors."""
    return bits ^ ((bits >> 63) & MOST)


@inlined
def greatest_queued(state: Int, left: Int, number: int, bits: Int) -> int:
    """The greatest rank among experts that are queued, several of which are compared at once."""
    greatest = LEAST
    for i in range(len(bits)):
        greatest = max(greatest, rank(bits[i]) if (state[i] == ABSENT) & (left[i] != number) else LEAST)
    return greatest


@compiled
def best_queued(m: Int, proposals: Float) -> int:
    """The queued prefetch that is next, by priority descending, then id ascending; NO_EXPERT without one.

    Passed over are those that the tier below cannot give, and the kinds that this attempt has found no slot for.
    """
    one = m[ONE]
    state, left, number, bits = m[STATE], m[LEFT], one[PROPOSAL], proposals[one[PROPOSAL] & 1].view(np.int64)
    kind, shut, attempt, below, partial = m[KIND], m[SHUT], one[ATTEMPT], m[BELOW], one[PARTIAL]
    best, highest, greatest = NO_EXPERT, RANK_NOT_PROPOSED, m[GREATEST]
    for first in range(one[LOWEST], one[HIGHEST], BLOCK):
        last, block = min(first + BLOCK, one[HIGHEST]), first // BLOCK
        if one[SEARCHED] == number and greatest[block] <= highest:
            continue
        greatest[block] = greatest_queued(state[first:last], left[first:last], number, bits[first:last])
        if greatest[block] <= highest:
            continue
        for expert in range(first, last):
            if (
                rank(bits[expert]) > highest
                and state[expert] == ABSENT
                and left[expert] != number
                and shut[kind[expert]] != attempt
                and (below[expert] or not partial)
            ):
                best, highest = expert, rank(bits[expert])
    one[SEARCHED] = number
    return best


@compiled
def protected(m: Int, proposals: Float, expert: int) -> bool:
    """Rule 6: prefetched, not looked up since, and in the latest proposal."""
    unused: bool = m[UNUSED, expert] == 1
    return unused and proposals[m[ONE, PROPOSAL] & 1, expert] != NOT_PROPOSED


@allocating
def evictable(m: Int, proposals: Float, partition: int, among_protected: bool) -> Int:
    """Ascending ids of a partition's READY experts that nothing pins: the protected ones, or the others.

    int64[n].
    """
    found = np.empty(m[END, partition] - m[FIRST, partition], np.int64)
    n, state, wanted = 0, m[STATE], m[WANTED]
    for expert in range(len(state)):
        if state[expert] != READY or wanted[expert] or m[PARTITION, expert] != partition:
            continue
        if protected(m, proposals, expert) == among_protected:
            found[n] = expert
            n += 1
    return found[:n]


@compiled
def least(m: Int, keep: Float, proposals: Float, partition: int, among_protected: bool) -> int:
    """Of `evictable` the one with the least (primary, secondary, id), or NO_EXPERT.

    Where scores have changed, the slots are looked through; only at a second search it pays to do so by blocks.
    """
    one = m[ONE]
    if one[LISTS]:
        return first_in_order(m, proposals, partition, among_protected)
    if one[SCORES_ARE] == UNSEEN or m[END, partition] - m[FIRST, partition] <= FEW_SLOTS:
        return least_of_slots(m, keep, proposals, partition, among_protected)
    if one[SCORES_ARE] == NEW:
        one[SCORES_ARE] = AGAIN
        return least_of_slots(m, keep, proposals, partition, among_protected)
    if one[SCORES_ARE] == AGAIN:
        one[SCORES_ARE] = KNOWN
        m[MARKED, : one[BLOCKS]] = 1
    return least_of_blocks(m, keep, proposals, partition, among_protected)


@compiled
def least_of_blocks(m: Int, keep: Float, proposals: Float, partition: int, among_protected: bool) -> int:
    """`least`, from the block with the least score on until none is less than the best, and then what equals it."""
    one, marked, searched, primary, secondary = m[ONE], m[MARKED], m[IN_SEARCH], m[LEAST_PRIMARY], m[LEAST_SECONDARY]
    count, best = one[BLOCKS], NO_EXPERT
    one[SEARCH] += 1
    for block in range(count):
        if marked[block]:
            marked[block] = 0
            measure(m, keep, block)
    bits, tied, lowest = keep[0].view(np.int64), keep[1].view(np.int64), MOST
    while True:
        block = least_block(primary[:count], searched[:count], one[SEARCH])
        if block == count or primary[block] >= lowest:
            break
        searched[block] = one[SEARCH]
        best = least_of_block(m, keep, proposals, partition, among_protected, block, best)
        lowest = order(bits[best]) if best >= 0 else MOST
    for block in range(count):
        if best < 0 or primary[block] != lowest or searched[block] == one[SEARCH]:
            continue
        second = order(tied[best])
        if secondary[block] < second or (secondary[block] == second and block * BLOCK_HELD < best):
            best = least_of_block(m, keep, proposals, partition, among_protected, block, best)
    return best


@inlined
def least_block(primary: Int, searched: Int, search: int) -> int:
    """The first of the blocks with the least score that this search has not looked at; their number: all are."""
    least, block = MOST, 0
    for i in range(len(primary)):
        least = min(least, MOST if searched[i] == search else primary[i])
    while block < len(primary) and (primary[block] != least or searched[block] == search):
        block += 1
    return block


@inlined
def order(bits: int) -> int:
    """`rank` of a score; both zeros have the same."""
    number = rank(bits)
    return number + (number == -1)


@compiled
def measure(m: Int, keep: Float, block: int) -> None:
    """Note the least scores of a block's experts that hold a slot, several of which are compared at once."""
    first, last = block * BLOCK_HELD, min((block + 1) * BLOCK_HELD, keep.shape[1])
    state, bits = m[STATE, first:last], keep.view(np.int64)
    primary, secondary = bits[0, first:last], bits[1, first:last]
    lowest = second = MOST
    for i in range(len(state)):
        lowest = min(lowest, order(primary[i]) if state[i] >= LOADING else MOST)
    for i in range(len(state)):
        second = min(second, order(secondary[i]) if (state[i] >= LOADING) & (order(primary[i]) == lowest) else MOST)
    m[LEAST_PRIMARY, block], m[LEAST_SECONDARY, block] = lowest, second


@compiled
def least_of_block(
    m: Int, keep: Float, proposals: Float, partition: int, among_protected: bool, block: int, best: int
) -> int:
    """The least of a block and of `best`."""
    state, wanted, primary, secondary = m[STATE], m[WANTED], keep[0], keep[1]
    lowest, second = (primary[best], secondary[best]) if best >= 0 else (np.inf, np.inf)
    for expert in range(block * BLOCK_HELD, min((block + 1) * BLOCK_HELD, keep.shape[1])):
        if primary[expert] > lowest or state[expert] != READY or wanted[expert]:
            continue
        tie = best >= 0 and primary[expert] == lowest
        if tie and (secondary[expert] > second or (secondary[expert] == second and expert > best)):
            continue
        if m[PARTITION, expert] == partition and protected(m, proposals, expert) == among_protected:
            best, lowest, second = expert, primary[expert], secondary[expert]
    return best


@compiled
def least_of_slots(m: Int, keep: Float, proposals: Float, partition: int, among_protected: bool) -> int:
    """`least`, one slot after another.

    Scores go first: they pass over almost every slot. (After `expert < 0` no index is negative to the compiler.)
    """
    held, state, wanted, primary, secondary = m[HELD], m[STATE], m[WANTED], keep[0], keep[1]
    best, lowest = NO_EXPERT, np.inf
    for expert in held[m[FIRST, partition] : m[END, partition]]:
        if expert < 0 or primary[expert] > lowest or state[expert] != READY or wanted[expert]:
            continue
        if (
            best >= 0
            and primary[expert] == lowest
            and (secondary[expert] > secondary[best] or (secondary[expert] == secondary[best] and expert > best))
        ):
            continue
        if protected(m, proposals, expert) == among_protected:
            best, lowest = expert, primary[expert]
    return best


@compiled
def first_to_go(m: Int, keep: Float, proposals: Float, partition: int, demand: bool) -> int:
    """Rule 6: of what is not protected the least; for a demand, where there is none, of what is. NO_EXPERT: none."""
    victim = least(m, keep, proposals, partition, False)
    if demand and victim == NO_EXPERT:
        victim = least(m, keep, proposals, partition, True)
    return victim


@allocating
def offered(m: Int, proposals: Float, partition: int) -> Int:
    """Rule 6 for a policy that names its victims: what is not protected; where there is none, what is. int64[n]."""
    free_to_go = evictable(m, proposals, partition, False)
    return free_to_go if len(free_to_go) else evictable(m, proposals, partition, True)


@compiled
def find_victim(m: Int, keep: Float, proposals: Float, expert: int, demand: bool, one_scale: bool) -> int:
    """Rules 5 and 6: the victim whose slot `expert` takes, or NO_EXPERT where one is free.

    In their place: BLOCKED where there is none.
    """
    partition = m[PARTITION, expert]
    if m[ONE, SIZED]:
        return evict_until_it_fits(m, keep, proposals, expert, demand, one_scale)
    if m[FREE, partition]:
        return NO_EXPERT
    victim = first_to_go(m, keep, proposals, partition, demand)
    if victim == NO_EXPERT or (one_scale and not demand and keep[0, victim] >= proposals[m[ONE, PROPOSAL] & 1, expert]):
        return BLOCKED
    return ask(m[ONE, ASKED], VICTIM, expert) if m[ONE, ASKED] else victim


@apart
@compiled
def evict_until_it_fits(m: Int, keep: Float, proposals: Float, expert: int, demand: bool, one_scale: bool) -> int:
    """Rule 19: the same where sizes differ; several leave one after another, and m[VICTIMS] holds them, or none."""
    one, partition, size = m[ONE], m[PARTITION, expert], m[SIZE, expert]
    priority, room = proposals[one[PROPOSAL] & 1, expert], m[FREE, partition]
    if room >= size:
        return NO_EXPERT
    for slot in range(m[FIRST, partition], m[END, partition]):
        other = m[HELD, slot]
        if other < 0 or m[STATE, other] != READY or m[WANTED, other]:
            continue
        if demand or (not protected(m, proposals, other) and not (one_scale and keep[0, other] >= priority)):
            room += m[SIZE, other]
    if room < size:
        return BLOCKED
    victim = NO_EXPERT
    while m[FREE, partition] < size:
        victim = first_to_go(m, keep, proposals, partition, demand)
        if one[ASKED]:
            victim = ask(one[ASKED], VICTIM, expert)
        evict(m, keep, victim)
    return victim


@apart
@compiled
def evict(m: Int, keep: Float, victim: int) -> None:
    """Rule 19: `victim` leaves for the transfer that is about to start, and is the next of m[VICTIMS]."""
    m[VICTIMS, m[ONE, EVICTED]] = victim
    m[ONE, EVICTED] += 1
    leave(m, keep, victim)
    m[FREE, m[PARTITION, victim]] += m[SIZE, victim]


@compiled
def note_left(m: Int, victim: int, left: Int, count: int) -> int:
    """Write who left for the transfer that has started into `left`, from this place on; how many are there then.

    victim: the one who left where all experts are of one size, or NO_EXPERT.
    """
    if m[ONE, SIZED]:
        for i in range(m[ONE, EVICTED]):
            left[count + i] = m[VICTIMS, i]
        count += m[ONE, EVICTED]
        m[ONE, EVICTED] = 0
    elif victim >= 0:
        left[count] = victim
        count += 1
    return count


@compiled
def start(m: Int, keep: Float, expert: int, victim: int, copy: bool = False) -> None:
    """Rule 5: the transfer of `expert` starts, into the slot of `victim` or, without one, the lowest free slot.

    Where sizes differ the victims have left already, and a slot is any free place. copy: for rule 21.
    """
    one, partition = m[ONE], m[PARTITION, expert]
    if victim != NO_EXPERT and not one[SIZED]:
        slot = m[SLOT, victim]
        leave(m, keep, victim)
    else:
        slot = m[FIRST, partition]
        while m[HELD, slot] != NO_EXPERT:
            slot += 1
        m[FREE, partition] -= m[SIZE, expert]
    if m[STATE, expert] == DEMANDED:
        one[NEXT_DEMAND] += 1
        one[N_DEMAND] += 1
        one[DEMAND_ROOM] += m[SIZE, expert]
    elif copy:
        one[N_COPIES] += 1
        one[COPIED_ROOM] += m[SIZE, expert]
    else:
        m[UNUSED, expert] = 1
        one[N_PREFETCH] += 1
        one[PREFETCH_ROOM] += m[SIZE, expert]
    m[STATE, expert] = LOADING
    m[MARKED, expert // BLOCK_HELD] = 1
    m[SLOT, expert] = slot
    m[HELD, slot] = expert
    one[ACTIVE] = expert
    if one[QUEUED_COPIES]:
        withdraw(m, expert)
    if partition == one[STAGING]:
        return
    one[STARTS] += 1
    call(m, ON_INSERT, expert, one[SERIAL], one[STARTS])
    if one[HEARS_INSERT]:
        ask(one[ASKED], INSERT, expert)
    if one[LISTS]:
        link(m, keep, expert)


@compiled
def leave(m: Int, keep: Float, expert: int) -> None:
    """`expert` leaves the cache and its slot; the room that this frees is the caller's to count."""
    if m[UNUSED, expert]:
        m[UNUSED, expert] = 0
        m[ONE, N_WASTED] += 1
        m[ONE, WASTED_ROOM] += m[SIZE, expert]
    m[STATE, expert], m[LEFT, expert] = ABSENT, m[ONE, PROPOSAL]
    m[MARKED, expert // BLOCK_HELD] = 1
    m[HELD, m[SLOT, expert]] = NO_EXPERT
    m[SLOT, expert] = NO_EXPERT
    call(m, ON_EVICT, expert, 0, 0)
    if m[ONE, HEARS_EVICT]:
        ask(m[ONE, ASKED], EVICT, expert)
    if m[ONE, LISTS]:
        unlink(m, expert)


@compiled
def next_demand(m: Int) -> int:
    """The queued demand of the lowest id that the tier below can give (rule 17), or NO_EXPERT."""
    one = m[ONE]
    for place in range(one[NEXT_DEMAND], one[LAST_DEMAND]):
        expert: int = m[DEMANDS, place]
        if not one[PARTIAL] or m[BELOW, expert]:
            return expert
    return NO_EXPERT


@apart
@compiled
def put_first(m: Int, expert: int) -> None:
    """Put a queued demand before the others, whose order stays."""
    demands, first = m[DEMANDS], m[ONE, NEXT_DEMAND]
    place = first
    while demands[place] != expert:
        place += 1
    for other in range(place, first, -1):
        demands[other] = demands[other - 1]
    demands[first] = expert


@compiled
def start_demand(m: Int, keep: Float, proposals: Float) -> tuple[int, int]:
    """Start the first queued demand: (expert, victim), or BLOCKED or NO_EXPERT in place of an expert."""
    expert = next_demand(m)
    if expert == NO_EXPERT:
        return NO_EXPERT, NO_EXPERT
    victim = find_victim(m, keep, proposals, expert, True, False)
    if victim == BLOCKED:
        return BLOCKED, NO_EXPERT
    if m[DEMANDS, m[ONE, NEXT_DEMAND]] != expert:
        put_first(m, expert)
    start(m, keep, expert, victim)
    return expert, victim


@compiled
def start_prefetch(m: Int, keep: Float, proposals: Float, one_scale: bool) -> tuple[int, int]:
    """Start the best queued prefetch that can have a slot: (expert, victim).

    In place of an expert: BLOCKED where no queued one can, NO_EXPERT where none is queued. With one kind of experts it
    is the best queued or none: all would have the same slot, and on one scale none may evict more than the best.
    """
    m[ONE, ATTEMPT] += 1
    answer = NO_EXPERT
    while True:
        expert = best_queued(m, proposals)
        if expert == NO_EXPERT:
            return answer, NO_EXPERT
        victim = find_victim(m, keep, proposals, expert, False, one_scale)
        if victim == BLOCKED:
            m[SHUT, m[KIND, expert]] = m[ONE, ATTEMPT]
            answer = BLOCKED
            continue
        start(m, keep, expert, victim)
        return expert, victim


@apart
@compiled
def start_copy(m: Int, keep: Float, proposals: Float) -> tuple[int, int]:
    """Rule 21: start the first background copy that can have a slot, within the step's cap: as `start_prefetch`."""
    one, answer = m[ONE], NO_EXPERT
    if one[STEP_COPIES] == one[INSERT_CAP]:
        return NO_EXPERT, NO_EXPERT
    for place in range(one[QUEUED_COPIES]):
        expert: int = m[COPIES, place]
        if one[PARTIAL] and not m[BELOW, expert]:
            continue
        victim = find_victim(m, keep, proposals, expert, False, False)
        if victim == BLOCKED:
            answer = BLOCKED
            continue
        start(m, keep, expert, victim, True)
        one[STEP_COPIES] += 1
        return expert, victim
    return answer, NO_EXPERT


@compiled
def resume(m: Int) -> int:
    """The paused prefetch continues, if there is one."""
    m[ONE, ACTIVE] = m[ONE, PAUSED]
    m[ONE, PAUSED] = NO_EXPERT
    expert: int = m[ONE, ACTIVE]
    return expert


@inlined
def next_transfer(m: Int, keep: Float, proposals: Float, one_scale: bool) -> tuple[int, int, bool]:
    """Rule 5, the link being free: (expert now on the link, its victim or NO_EXPERT, whether it is a prefetch).

    In place of an expert: NO_EXPERT where nothing is queued, BLOCKED where no slot is there for it.
    """
    expert, victim = start_demand(m, keep, proposals)
    if expert >= 0:
        return expert, victim, False
    if m[ONE, PAUSED] != NO_EXPERT:
        return resume(m), NO_EXPERT, True
    if expert == BLOCKED:
        return BLOCKED, NO_EXPERT, False
    if m[ONE, QUEUED_COPIES]:
        expert, victim = start_copy(m, keep, proposals)
        if expert >= 0:
            return expert, victim, True
        blocked = expert == BLOCKED
        expert, victim = start_prefetch(m, keep, proposals, one_scale)
        return BLOCKED if blocked and expert < 0 else expert, victim, True
    expert, victim = start_prefetch(m, keep, proposals, one_scale)
    return expert, victim, True


@compiled
def land(m: Int) -> None:
    """The last bytes of the transfer on the link are sent, and the link takes others behind them: it `arrived` next."""
    m[ONE, LANDING] = m[ONE, ACTIVE]
    m[ONE, ACTIVE] = NO_EXPERT


@inlined
def arrived(m: Int) -> bool:
    """The transfer on the link has ended: its expert is READY; whether the current event waits for it."""
    which = ACTIVE if m[ONE, LANDING] == NO_EXPERT else LANDING
    expert = m[ONE, which]
    m[ONE, which] = NO_EXPERT
    m[STATE, expert] = READY
    awaited: bool = m[WANTED, expert] == ON_GPU
    return awaited


@inlined
def arrived_and_next(m: Int, keep: Float, proposals: Float, one_scale: bool) -> tuple[bool, int, int, bool]:
    """`arrived` and at once `next_transfer`: (awaited, expert, victim, is a prefetch)."""
    awaited = arrived(m)
    expert, victim, prefetch = next_transfer(m, keep, proposals, one_scale)
    return awaited, expert, victim, prefetch


@inlined
def interrupt(m: Int, keep: Float, proposals: Float) -> tuple[int, int]:
    """Rule 5 at a chunk boundary: a demand that can take a slot at once pauses the prefetch on the link.

    (expert, victim) of the demand; expert < 0 where the transfer continues, as does one that is awaited.
    """
    running = m[ONE, ACTIVE]
    if m[WANTED, running] == ON_GPU:
        return NO_EXPERT, NO_EXPERT
    expert, victim = start_demand(m, keep, proposals)
    if expert >= 0:
        m[ONE, PAUSED] = running
    return expert, victim


@allocating
def empty_cache(m: Int, keep: Float) -> Int:
    """Rule 10, `--cold`: every expert becomes ABSENT, queued and started transfers are discarded; ids that left."""
    one = m[ONE]
    clear_queue(m)
    one[QUEUED_COPIES] = 0
    one[ACTIVE] = one[PAUSED] = one[LANDING] = NO_EXPERT
    left = np.sort(m[HELD, : one[SLOTS]].copy())
    left = left[np.searchsorted(left, 0) :]
    for expert in left:
        leave(m, keep, expert)
        m[FREE, m[PARTITION, expert]] += m[SIZE, expert]
    return left
