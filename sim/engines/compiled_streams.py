"""The compiled engine's streams: compute, link, host and disk of one run, as one loop over arrays.

The compute stream is straight-line code that moves the clock; `advance` lets the other streams do meanwhile, in the
order of rule 15, what ends up to then. Every decision is the residency's (`policies.core.residency_compiled`,
`policies.core.host_memory`) or a policy's, which is called by address; every rule about time has its twin in `sim.loop`
and `sim.engines.simpy_engine`, where it is explained. `run_steps` is what Python calls.

Runs with a host that computes, a disk, or experts of several sizes are compiled apart: the length of `Streams.tiers`
belongs to its type, so that runs without these pay nothing for the question.
"""

from typing import NamedTuple

import numpy as np

from policies.core import host_memory as memory
from policies.core import residency_compiled as core
from policies.core.calling import OBSERVE, PROPOSE, ask, call_observe, call_propose, like
from policies.core.calling import START as AT_START
from policies.core.compiled import apart, compiled, inlined
from policies.core.dispatch import put_event
from policies.core.events import Routing, event_at, start_at
from policies.core.placement import FETCH, LAYERS, SPLIT
from policies.core.policy import Float, Int
from policies.core.residency_compiled import BLOCKED, N_HITS, WASTED_ROOM
from sim.loop.log import BEHIND_PREFETCH, DEMAND, LATE, PREDICTOR, STALLS
from sim.loop.log import DISK as ON_DISK
from sim.loop.log import HOST as ON_HOST
from sim.loop.log import SLOT as NO_SLOT
from sim.profiles.timing import Durations

NEVER = np.iinfo(np.int64).max

# Single numbers of the link and the clock
(
    NOW,
    LINK_END,  # of the chunk on the link; NEVER without one
    HIT_END,  # when a hit ends that a stuck transfer waits for; NEVER without one
    WHOLE,  # whether the chunk is the transfer's last
    EXPERT,
    BEGAN,
    BUSY,
    MOVED,
    PAUSED,
    CAUSE,
    NOTHING_QUEUED,
    WAITING_SINCE,
    HITS,  # of the event; 0 once they have been computed
    UNPINNED,  # of these
    ARRIVED,  # experts of the event that came, and of these
    TAKEN,  # those computed
    EVICTED,  # since the log of evictions was last read
    WHOLE_NS,
    EXPERT_BYTES,
    CHUNK_BYTES,
    LATENCY_NS,
    PER_BYTE_NUM,
    PER_BYTE_DEN,
    READ_END,  # of the read under way; NEVER without one, as for the next
    HOST_END,  # of the hop, or of the host's compute
    READING,
    READ_BEGAN,
    HOSTING,  # the expert that the host computes, or HOP
    HOST_BEGAN,
    HOST_BUSY,
    DISK_BUSY,
    HOST_NEXT,  # place in the host's queue, and of its end:
    HOST_QUEUED,
    HOST_LEFT,  # experts of the event that the host has not computed yet
    DISK_THERE,  # whether host memory is over a disk
    ALL_EXPERTS,  # L * E
    PLACEMENT,
    HOST_LAYERS,  # of the placement
    HOP_NS,
    EVENT_LAYER,
    EVENT_HITS,
    EVENT_OTHERS,  # experts that are to come over the link
    NUMBERS,
) = range(43)

NOT_WAITING = -1
HOP = -1

LINK, DISK, COMPUTE, HOST, ROUTER, WAKE = range(6)
"""Rule 15, the order within one nanosecond."""

# Columns of `rows`: totals of the run when a step ends
CLOCK, STALL = 0, 1  # the stall by cause
COUNTERS = STALL + len(STALLS)  # the residency's
N_COUNTERS = WASTED_ROOM + 1 - N_HITS
READS = COUNTERS + N_COUNTERS
LINK_BUSY, HOST_BUSY_NS, DISK_BUSY_NS, COLUMNS = range(READS + 2, READS + 6)

# More rows of `Streams.h`, which is one array since each costs every call: of an expert of each layer the bytes, the
# time of its transfer and of its read; of the event's experts those for the host to compute, in order, and, by their
# place in the layer, their compute there.
LAYER_BYTES, LAYER_NS, READ_NS, HOST_QUEUE, HOST_NS = range(memory.ROWS, memory.ROWS + 5)


STRETCH = 128
"""Steps of a batch that are merged at a time; an admission discards the rest."""


class Streams(NamedTuple):
    """The residency, the link and the compute stream of one run."""

    m: Int
    keep: Float
    proposals: Float
    one_scale: bool
    n: Int  # [NUMBERS]
    ends: Int  # [E] of the event's hits
    arrivals: Int  # [E] experts of the event that came
    stall: Int  # [7] by cause, so far
    evictions: Int  # since they were last read: of GPU memory the expert e, of host memory ~e
    tiers: tuple[int, ...]  # (): only GPU memory over all of host memory, all experts of one size
    h: Int  # host memory (`policies.core.host_memory`), with the rows below


class Plan(NamedTuple):
    """Which policies hear of events and are asked, by address (`policies.core.dispatch`).

    asks: where they run in Python (`policies.core.calling`); 0: they are compiled.
    """

    keeps: int  # of the retention policy, if it hears of events
    keeper: int  # what it knows
    listens: int  # of the prefetcher, if it hears of events by itself
    fetches: int  # of the prefetcher, if it proposes
    fetcher: int  # what it knows,
    proposer: int  # with the limits on its proposals
    event: int  # room for the event at hand
    asks: int
    hears: bool  # either wants to know of events
    at_start: bool  # the prefetcher is asked when a step starts as well
    ids: Int  # [L*E] of the proposal
    priorities: Float  # [L*E]
    span: Int  # [2] from which id to which, exclusive


@inlined
def used_ns(n: Int, sent: int) -> int:
    """What a transfer has used after `sent` bytes (`sim.profiles.timing.Link`)."""
    if sent == 0:
        return 0
    ns: int = n[LATENCY_NS] - (-sent * n[PER_BYTE_NUM] // n[PER_BYTE_DEN])
    return ns


@inlined
def act(run: Streams) -> None:
    """Rule 5, if the link is free, and the other streams behind it."""
    n = run.n
    if len(run.tiers):
        act_all(run)
    elif n[LINK_END] == NEVER and not n[NOTHING_QUEUED]:
        take(run)


@compiled
def act_all(run: Streams) -> None:
    """Link, disk, then host: what is free starts what comes next."""
    if run.n[LINK_END] == NEVER:
        take(run)
    act_below(run)


@compiled
def act_below(run: Streams) -> None:
    """Disk, then host: what is free starts what comes next."""
    m, n, h = run.m, run.n, run.h
    if n[DISK_THERE] and n[READ_END] == NEVER:
        expert = memory.next_read(h, m, run.proposals, n[ALL_EXPERTS])
        one = h[memory.ONE]
        for i in range(one[memory.EVICTED]):
            run.evictions[n[EVICTED]] = ~h[memory.VICTIMS, i]
            n[EVICTED] += 1
        one[memory.EVICTED] = 0
        if expert >= 0:
            n[READING], n[READ_BEGAN] = expert, n[NOW]
            n[READ_END] = n[NOW] + h[READ_NS, expert // len(run.ends)]
    if n[HOST_END] == NEVER and n[HOST_NEXT] < n[HOST_QUEUED]:
        expert = h[HOST_QUEUE, n[HOST_NEXT]]
        n[HOST_NEXT] += 1
        n[HOSTING], n[HOST_BEGAN] = expert, n[NOW]
        n[HOST_END] = n[NOW] + h[HOST_NS, expert % len(run.ends)]
        if n[DISK_THERE]:
            memory.touch(h, expert)


@inlined
def take(run: Streams) -> None:
    """The free link takes what comes next."""
    expert, victim, prefetch = core.next_transfer(run.m, run.keep, run.proposals, run.one_scale)
    turn_to(run, expert, victim, prefetch)


@inlined
def turn_to(run: Streams, expert: int, victim: int, prefetch: bool) -> None:
    """The residency has answered what comes next."""
    n = run.n
    if expert >= 0:
        start(run, expert, victim, prefetch)
        return
    n[LINK_END] = NEVER
    if expert == BLOCKED:
        if n[UNPINNED] < n[HITS] - 1:
            n[HIT_END] = run.ends[n[UNPINNED]]
    else:
        n[NOTHING_QUEUED] = 1


@inlined
def start(run: Streams, expert: int, victim: int, prefetch: bool) -> None:
    """A transfer starts, or a paused one continues."""
    n = run.n
    if len(run.tiers):
        start_sized(run, expert, victim, prefetch)
    elif victim >= 0:
        run.evictions[n[EVICTED]] = victim
        n[EVICTED] += 1
    n[EXPERT] = expert
    n[BEGAN] = n[NOW]
    if prefetch:
        n[CAUSE] = BEHIND_PREFETCH
        n[MOVED] = n[PAUSED]
        n[PAUSED] = 0
        send_chunk(n)
    else:
        n[CAUSE] = DEMAND
        n[WHOLE] = 1
        n[LINK_END] = n[NOW] + n[WHOLE_NS]


@compiled
def start_sized(run: Streams, expert: int, victim: int, prefetch: bool) -> None:
    """The same where experts differ in size, or lie on a disk: all who left, the transfer's size, its recency."""
    m, n = run.m, run.n
    if m[core.ONE, core.SIZED]:
        for i in range(m[core.ONE, core.EVICTED]):
            run.evictions[n[EVICTED]] = m[core.VICTIMS, i]
            n[EVICTED] += 1
        m[core.ONE, core.EVICTED] = 0
    elif victim >= 0:
        run.evictions[n[EVICTED]] = victim
        n[EVICTED] += 1
    layer = expert // len(run.ends)
    n[EXPERT_BYTES], n[WHOLE_NS] = run.h[LAYER_BYTES, layer], run.h[LAYER_NS, layer]
    if n[DISK_THERE] and not (prefetch and n[PAUSED]):
        memory.touch(run.h, expert)


@inlined
def send_chunk(n: Int) -> None:
    """The next chunk of a prefetch."""
    moved = n[MOVED]
    upto = min(moved + n[CHUNK_BYTES], n[EXPERT_BYTES])
    n[MOVED] = upto
    n[BEGAN] = n[NOW]
    n[WHOLE] = upto == n[EXPERT_BYTES]
    n[LINK_END] = n[NOW] + used_ns(n, upto) - used_ns(n, moved)


@inlined
def account(run: Streams) -> None:
    """A chunk has ended: unpin the hits before now, charge the time to the link and, if it waited, to compute."""
    m, n, ends = run.m, run.n, run.ends
    now = n[NOW]
    n[BUSY] += now - n[BEGAN]
    if len(run.tiers):
        account_tiers(run, now)
    elif n[HITS]:
        done = n[UNPINNED]
        while done < n[HITS] and ends[done] < now:
            m[core.WANTED, m[core.HITS, done]] = 0
            done += 1
        n[UNPINNED] = done
    elif n[WAITING_SINCE] != NOT_WAITING:
        cause = n[CAUSE]
        if cause == BEHIND_PREFETCH and m[core.WANTED, n[EXPERT]]:
            cause = LATE
        run.stall[cause] += now - n[WAITING_SINCE]
        n[WAITING_SINCE] = now


@compiled
def account_tiers(run: Streams, before: int) -> None:
    """Anything ends now: unpin the hits that ended before a time, charge the time to what compute waited for."""
    m, n, ends = run.m, run.n, run.ends
    done = n[UNPINNED]
    while done < n[HITS] and ends[done] < before:
        m[core.WANTED, m[core.HITS, done]] = 0
        done += 1
    n[UNPINNED] = done
    if n[WAITING_SINCE] != NOT_WAITING:
        run.stall[cause_of(run)] += n[NOW] - n[WAITING_SINCE]
        n[WAITING_SINCE] = n[NOW]


@compiled
def cause_of(run: Streams) -> int:
    """What the compute stream has been waiting for."""
    m, n = run.m, run.n
    if n[LINK_END] != NEVER:
        if n[CAUSE] == DEMAND:
            return DEMAND
        if m[core.WANTED, n[EXPERT]] == core.ON_GPU:
            return LATE
        if core.next_demand(m) != core.NO_EXPERT:
            return BEHIND_PREFETCH
    base = n[EVENT_LAYER] * len(run.ends)
    for expert in range(base, base + len(run.ends)):
        if m[core.WANTED, expert] and not m[core.BELOW, expert]:
            return ON_DISK
    return ON_HOST if n[HOST_END] != NEVER else NO_SLOT


@inlined
def link_event(run: Streams) -> None:
    """The chunk on the link has ended."""
    n = run.n
    n[NOW] = n[LINK_END]
    account(run)
    if n[WHOLE]:
        arrival = n[EXPERT]
        n[MOVED] = 0
        awaited, expert, victim, prefetch = core.arrived_and_next(run.m, run.keep, run.proposals, run.one_scale)
        if awaited:
            run.arrivals[n[ARRIVED]] = arrival
            n[ARRIVED] += 1
            n[WAITING_SINCE] = NOT_WAITING
        turn_to(run, expert, victim, prefetch)
        if len(run.tiers) and n[DISK_THERE] and run.m[core.WANTED, arrival] != core.ON_HOST:
            memory.release(run.h, arrival)
    else:
        expert, victim = core.interrupt(run.m, run.keep, run.proposals)
        if expert >= 0:
            n[PAUSED] = n[MOVED]
            start(run, expert, victim, False)
        else:
            send_chunk(n)
    if len(run.tiers):
        act_below(run)


@compiled
def read_event(run: Streams) -> None:
    """The read has ended."""
    m, n = run.m, run.n
    n[NOW] = n[READ_END]
    account_tiers(run, n[NOW])
    expert = n[READING]
    n[DISK_BUSY] += n[NOW] - n[READ_BEGAN]
    n[READ_END] = NEVER
    memory.read_ended(run.h, m, expert)
    if m[core.WANTED, expert] == core.ON_HOST:
        run.h[HOST_QUEUE, n[HOST_QUEUED]] = expert
        n[HOST_QUEUED] += 1
    act(run)


@compiled
def host_event(run: Streams) -> None:
    """The hop has ended, or an expert's compute on the host."""
    m, n = run.m, run.n
    n[NOW] = n[HOST_END]
    account_tiers(run, n[NOW] + 1)
    n[HOST_END] = NEVER
    expert = n[HOSTING]
    if expert != HOP:
        n[HOST_BUSY] += n[NOW] - n[HOST_BEGAN]
        m[core.WANTED, expert] = 0
        n[HOST_LEFT] -= 1
        if n[DISK_THERE]:
            memory.release(run.h, expert)
    act(run)


@inlined
def hit_event(run: Streams) -> None:
    """The hit has ended that a stuck transfer waits for."""
    m, n = run.m, run.n
    n[NOW] = n[HIT_END]
    n[HIT_END] = NEVER
    m[core.WANTED, m[core.HITS, n[UNPINNED]]] = 0
    n[UNPINNED] += 1
    act(run)


@inlined
def advance(run: Streams, until: int, rank: int) -> None:
    """Let everything happen that comes before an end of `rank` at `until`, which is the present then."""
    n = run.n
    if len(run.tiers):
        while happens(run, until, rank):
            pass
    else:
        while n[LINK_END] <= until or n[HIT_END] <= until:
            if n[LINK_END] <= n[HIT_END]:
                link_event(run)
            else:
                hit_event(run)
    n[NOW] = until


@compiled
def happens(run: Streams, until: int, rank: int) -> bool:
    """Handle what ends next, if that comes before an end of `rank` at `until`."""
    n = run.n
    time, first = n[LINK_END], LINK
    if n[READ_END] < time:
        time, first = n[READ_END], DISK
    if n[HIT_END] < time:
        time, first = n[HIT_END], COMPUTE
    if n[HOST_END] < time:
        time, first = n[HOST_END], HOST
    if time > until or (time == until and first > rank):
        return False
    if first == LINK:
        link_event(run)
    elif first == DISK:
        read_event(run)
    elif first == COMPUTE:
        hit_event(run)
    else:
        host_event(run)
    return True


@compiled
def wait(run: Streams) -> None:
    """The compute stream waits: handle what ends next."""
    n = run.n
    if n[WAITING_SINCE] == NOT_WAITING:
        n[WAITING_SINCE] = n[NOW]
    if len(run.tiers):
        happens(run, NEVER, WAKE)
    else:
        link_event(run)


@compiled
def wait_until(run: Streams, until: int) -> None:
    """No request is active up to then (rule 18)."""
    advance(run, until, WAKE)


@compiled
def place(run: Streams, routing: Routing, first: int, last: int, layer: int, expert_ns: Int, host_ns: Int) -> None:
    """Rule 13, before the lookup: which misses of the event the host computes (`policies.core.placement`)."""
    m, n, experts, counts = run.m, run.n, routing.experts, routing.counts
    n[HOST_LEFT] = n[HOST_NEXT] = n[HOST_QUEUED] = 0
    n[EVENT_LAYER] = layer
    placement = n[PLACEMENT]
    if placement == FETCH or (placement == LAYERS and layer >= n[HOST_LAYERS]):
        return
    link_ready, host_ready, transfer_ns = 0, n[HOP_NS], run.h[LAYER_NS, layer]
    if n[LINK_END] != NEVER:
        link_ready = n[LINK_END] - n[NOW]
        if n[CAUSE] != DEMAND and n[EXPERT] // len(run.ends) == layer:
            for i in range(first, last):
                if experts[i] == n[EXPERT]:  # late
                    link_ready += used_ns(n, n[EXPERT_BYTES]) - used_ns(n, n[MOVED])
    for i in range(first, last):
        expert = experts[i]
        if m[core.STATE, expert] >= core.LOADING:
            continue
        here = host_ns[counts[i]]
        if placement == SPLIT:
            if host_ready + here >= link_ready + transfer_ns + expert_ns[counts[i]]:
                link_ready += transfer_ns
                continue
            host_ready += here
        m[core.WANTED, expert] = core.ON_HOST
        run.h[HOST_NS, expert % len(run.ends)] = here
        n[HOST_LEFT] += 1


@compiled
def begin_below(run: Streams, experts: Int, first: int, last: int) -> None:
    """The event has been looked up: demands of host memory, the host's queue, its hop."""
    m, n = run.m, run.n
    if n[DISK_THERE]:
        memory.demand(run.h, m, experts, first, last)
    if n[HOST_LEFT] == 0:
        return
    for i in range(first, last):
        if m[core.WANTED, experts[i]] == core.ON_HOST and m[core.BELOW, experts[i]]:
            run.h[HOST_QUEUE, n[HOST_QUEUED]] = experts[i]
            n[HOST_QUEUED] += 1
    if n[HOP_NS]:
        n[HOSTING] = HOP
        n[HOST_END] = n[NOW] + n[HOP_NS]


@compiled
def busy_until_now(n: Int) -> int:
    """Time during which the link moved bytes, latency included."""
    busy: int = n[BUSY] + (n[NOW] - n[BEGAN] if n[LINK_END] != NEVER else 0)
    return busy


@compiled
def disk_busy_until_now(n: Int) -> int:
    """Time during which the disk read."""
    busy: int = n[DISK_BUSY] + (n[NOW] - n[READ_BEGAN] if n[READ_END] != NEVER else 0)
    return busy


@apart
@compiled
def decide(run: Streams, plan: Plan, routing: Routing, step: int, layer: int, L: int) -> int:
    """Rules 3 and 4: the policies hear of the event, and propose, if they are compiled; how many experts."""
    if plan.asks:
        ask(plan.asks, OBSERVE, step * L + layer)
        return 0
    put_event(event_at(routing, step, layer, L, run.m[core.ONE, core.SERIAL]), plan.event)
    if plan.keeps:
        call_observe(plan.keeps, plan.keeper, run.keep, plan.event)
    if plan.listens:
        call_observe(plan.listens, plan.fetcher, run.keep, plan.event)
    if plan.fetches:
        return call_propose(plan.fetches, plan.proposer, plan.event, plan.ids, plan.priorities)
    return 0


@apart
@compiled
def decide_at_start(run: Streams, plan: Plan, routing: Routing, step: int) -> int:
    """Rules 4 and 16: the prefetcher proposes as a step starts; how many experts."""
    if plan.asks:
        return ask(plan.asks, AT_START, step)
    put_event(start_at(routing, step, run.m[core.ONE, core.SERIAL]), plan.event)
    return call_propose(plan.fetches, plan.proposer, plan.event, plan.ids, plan.priorities)


@inlined
def route_layer(run: Streams, routing: Routing, durations: Durations, step: int, layer: int) -> None:
    """Rules 11 and 1: the dense part of a layer, then its experts are looked up."""
    n = run.n
    advance(run, n[NOW] + durations.dense[step, layer], ROUTER)
    event = step * durations.dense.shape[1] + layer
    first, last = routing.offsets[event], routing.offsets[event + 1]
    if len(run.tiers):
        place(run, routing, first, last, layer, durations.expert[layer], durations.host[layer])
    n[EVENT_HITS] = core.route(run.m, run.keep, routing.experts, first, last)
    n[EVENT_OTHERS] = last - first - n[EVENT_HITS]
    if len(run.tiers):
        n[EVENT_OTHERS] -= n[HOST_LEFT]
        begin_below(run, routing.experts, first, last)


@inlined
def act_at_once(run: Streams) -> None:
    """Rule 14: what the lookup asked for starts before the predictor runs."""
    run.n[NOTHING_QUEUED] = 0
    act(run)


@apart
@compiled
def write_proposal(run: Streams, plan: Plan, n_proposed: int) -> None:
    """Rule 4: write down what has been proposed, for all cells of `run`'s engine, which take it when it arrives."""
    number = run.m[core.ONE, core.PROPOSAL] + 1
    ids, priorities = plan.ids[:n_proposed], plan.priorities[:n_proposed]
    plan.span[0], plan.span[1] = core.write_proposal(run.proposals, number, ids, priorities)


@inlined
def compute_hits(run: Streams, routing: Routing, expert_ns: Int, first: int, hits: int) -> None:
    """Rule 11: when each hit's compute ends, one after another."""
    n, i = run.n, first
    end = n[NOW]
    for h in range(hits):
        while routing.experts[i] != run.m[core.HITS, h]:
            i += 1
        end += expert_ns[routing.counts[i]]
        run.ends[h] = end
    n[HITS], n[UNPINNED] = hits, 0


@inlined
def compute_arrivals(run: Streams, routing: Routing, expert_ns: Int, first: int, others: int) -> None:
    """Rule 11: the others are computed in the order of their arrival."""
    n = run.n
    for _ in range(others):
        while n[TAKEN] == n[ARRIVED]:
            wait(run)
        expert = run.arrivals[n[TAKEN]]
        n[TAKEN] += 1
        i = first
        while routing.experts[i] != expert:
            i += 1
        advance(run, n[NOW] + expert_ns[routing.counts[i]], COMPUTE)
        run.m[core.WANTED, expert] = 0
        act(run)
    n[ARRIVED] = n[TAKEN] = 0


@inlined
def compute_layer(run: Streams, plan: Plan, routing: Routing, durations: Durations, step: int, layer: int) -> None:
    """Rules 4, 5 and 11: the proposal arrives, the streams start what they can, all is computed and combined."""
    n, expert_ns, fetches = run.n, durations.expert[layer], plan.fetches != 0
    first, hits, others = routing.offsets[step * durations.dense.shape[1] + layer], n[EVENT_HITS], n[EVENT_OTHERS]
    if fetches:
        core.take_proposal(run.m, plan.span[0], plan.span[1])
    if hits:
        compute_hits(run, routing, expert_ns, first, hits)
    if others or fetches or len(run.tiers):
        act_at_once(run)
    if hits:
        advance(run, run.ends[hits - 1], COMPUTE)
        core.computed_hits(run.m, n[UNPINNED], hits)
        n[HITS] = 0
        act(run)
    compute_arrivals(run, routing, expert_ns, first, others)
    if len(run.tiers):
        while n[HOST_LEFT]:
            wait(run)
        n[WAITING_SINCE] = NOT_WAITING
    if durations.combine[step, layer]:
        advance(run, n[NOW] + durations.combine[step, layer], COMPUTE)


@apart
@compiled
def write_row(run: Streams, row: Int) -> None:
    """Write the totals of the run so far, [COLUMNS]."""
    n = run.n
    row[CLOCK] = n[NOW]
    for cause in range(len(run.stall)):
        row[STALL + cause] = run.stall[cause]
    for counter in range(N_COUNTERS):
        row[COUNTERS + counter] = run.m[core.ONE, core.N_HITS + counter]
    row[LINK_BUSY] = busy_until_now(n)
    if len(run.tiers):
        row[HOST_BUSY_NS] = n[HOST_BUSY]
        if n[DISK_THERE]:
            row[DISK_BUSY_NS] = disk_busy_until_now(n)
            row[READS] = run.h[memory.ONE, memory.N_DEMAND]
            row[READS + 1] = run.h[memory.ONE, memory.N_PREFETCH]


@apart
@compiled
def goes_on(cells: Int, some: Streams, L: int, admit_at: int) -> bool:
    """Whether each run's log of evictions holds a step's more, and no request is to be admitted."""
    # Of a step: each proposal starts at once, and each expert of an event; and may be read, or push out smaller ones.
    E = len(some.ends)
    most = (L + 2) * (L * E + E)
    if len(some.tiers):
        most = 2 * most + L * E
    for c in range(len(cells)):
        run = like(cells[c], some)
        if run.n[EVICTED] + most > len(run.evictions) or run.n[NOW] >= admit_at or run.m[core.ONE, core.FAILED]:
            return False
    return True


@compiled
def run_steps(
    cells: Int,
    some: Streams,
    plan: Plan,
    routing: Routing,
    durations: Durations,
    predictor_ns: int,
    step: int,
    rows: Int,
    admit_at: int,
) -> int:
    """Run the steps from `step` on, until their end or until a log of evictions might not hold a step's more.

    cells: [K] addresses of the `Streams` of runs that differ in their caches alone, of the type of `some`: policies
    hear of each event once. rows: [K, S, COLUMNS], filled for the steps that ran; admit_at: the first step that ends
    then is the last one. Returns the step to continue with.
    """
    S, L = durations.dense.shape
    K, one = len(cells), like(cells[0], some)
    while step < S and goes_on(cells, some, L, admit_at):
        if plan.at_start:
            write_proposal(one, plan, decide_at_start(one, plan, routing, step))
            for c in range(K):
                core.take_proposal(like(cells[c], some).m, plan.span[0], plan.span[1])
                act_at_once(like(cells[c], some))
        for layer in range(L):
            for c in range(K):
                route_layer(like(cells[c], some), routing, durations, step, layer)
            n_proposed = decide(one, plan, routing, step, layer, L) if plan.hears else 0
            if predictor_ns:
                for c in range(K):
                    act_at_once(like(cells[c], some))
            if plan.asks and plan.fetches:
                n_proposed = ask(plan.asks, PROPOSE, step * L + layer)
            if plan.fetches:
                write_proposal(one, plan, n_proposed)
            for c in range(K):
                run = like(cells[c], some)
                if predictor_ns:
                    advance(run, run.n[NOW] + predictor_ns, COMPUTE)
                    run.stall[PREDICTOR] += predictor_ns
                compute_layer(run, plan, routing, durations, step, layer)
        for c in range(K):
            run = like(cells[c], some)
            advance(run, run.n[NOW] + durations.head[step], COMPUTE)
            write_row(run, rows[c, step])
        step += 1
    return step
