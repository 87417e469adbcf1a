"""The compiled engine's streams: compute, link, host and disk of one run, as one loop over arrays (`run_steps`).

The compute stream is straight-line code that moves the clock; `advance` lets the other streams do meanwhile, in the
order of rule 15, what ends up to then. Decisions are the residency's (`policies.core.residency_compiled`,
`policies.core.host_memory`) or a policy's; rules about time are explained at their twins in `sim.loop`.
"""

from typing import NamedTuple

import numpy as np

from policies.core import host_memory as memory
from policies.core import residency_compiled as core
from policies.core.admission import OWN
from policies.core.bent import COUNTS, bend
from policies.core.calling import ADMIT, OBSERVE, PROPOSE, ask, call, checked, like, put
from policies.core.calling import START as AT_START
from policies.core.compiled import apart, compiled, inlined
from policies.core.events import Routing, event_at, start_at
from policies.core.placement import ADMITTED, FETCH, LAYERS, SPLIT
from policies.core.policy import CHANGED, DID_NOTHING, LEAVES, UNCHANGED, Float, Int
from policies.core.residency_compiled import BLOCKED
from sim.loop.log import BEHIND_PREFETCH, DEMAND, LATE, PREDICTOR, STALLS
from sim.loop.log import DISK as ON_DISK
from sim.loop.log import HOST as ON_HOST
from sim.loop.log import SLOT as NO_SLOT
from sim.profiles.timing import Durations

NEVER = np.iinfo(np.int64).max

IDLE = -3
"""Of what is proposed: nothing, and the event is free."""


class Numbers:
    """Single numbers of the streams of one run, as the fields of a record (NUMBERS)."""

    now: int
    link_end: int  # of the chunk on the link; NEVER without one
    hit_end: int  # when a hit ends that a stuck transfer waits for; NEVER without one
    whole: int  # whether the chunk is the transfer's last
    expert: int  # of the transfer
    began: int  # the chunk
    busy: int  # the link, so far
    moved: int  # bytes of the transfer
    paused: int  # bytes of the prefetch that is paused
    cause: int  # of a stall, while this transfer is under way
    nothing_queued: int
    waiting_since: int
    hits: int  # of the event; 0 once they have been computed
    unpinned: int  # of these
    arrived: int  # experts of the event that came, and of these
    taken: int  # those computed
    evicted: int  # since the log of evictions was last read
    whole_ns: int
    expert_bytes: int
    chunk_bytes: int
    latency_ns: int
    per_byte_num: int
    per_byte_den: int
    read_end: int  # of the read under way; NEVER without one, as for the next
    host_end: int  # of the hop, or of the host's compute
    reading: int
    read_began: int
    hosting: int  # the expert that the host computes, or HOP
    host_began: int
    host_busy: int
    disk_busy: int
    host_next: int  # place in the host's queue, and of its end:
    host_queued: int
    host_left: int  # experts of the event that the host has not computed yet
    disk_there: int  # whether host memory is over a disk
    all_experts: int  # L * E
    placement: int
    host_layers: int  # of the placement
    hop_ns: int
    event_layer: int
    event_hits: int
    event_others: int  # experts that are to come over the link
    leaves: int  # whether the policy would learn otherwise in it alone


NUMBERS = np.dtype((np.record, [(name, np.int64) for name in Numbers.__annotations__]))

NOT_WAITING = -1
HOP = -1

LINK, DISK, COMPUTE, HOST, ROUTER, WAKE = range(6)
"""Rule 15, the order within one nanosecond."""

# Columns of `rows`: totals of the run when a step ends
CLOCK, STALL = 0, 1  # the stall by cause
COUNTERS = STALL + len(STALLS)  # the residency's
N_COUNTERS = core.COUNTERS.stop - core.COUNTERS.start
READS = COUNTERS + N_COUNTERS
BENT = READS + 2
LINK_BUSY, HOST_BUSY_NS, DISK_BUSY_NS, COLUMNS = range(BENT + len(COUNTS), BENT + len(COUNTS) + 4)

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
    n: Numbers
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
    keepers: Int  # what it knows; with `learns` in each run
    listens: int  # of the prefetcher, if it hears of events by itself
    fetches: int  # of the prefetcher, if it proposes
    fetcher: int  # what it knows,
    proposers: Int  # with the limits on its proposals; with `learns` in each run
    learns: int  # of the retention policy, if it learns for several runs
    follows: int  # and then hears of events for each
    event: int  # room for the event at hand
    asks: int
    hears: bool  # either wants to know of events
    may_be_idle: bool  # an event of which those that hear do nothing is free
    changed: Int  # [1] which scores the retention policy says that it changed at the event
    at_start: bool  # the prefetcher is asked when a step starts as well
    proposal: int  # room for one, of which these are the arrays
    ids: Int  # [L*E]
    priorities: Float  # [L*E]


@inlined
def used_ns(n: Numbers, sent: int) -> int:
    """What a transfer has used after `sent` bytes (`sim.profiles.timing.Link`)."""
    if sent == 0:
        return 0
    ns: int = n.latency_ns - (-sent * n.per_byte_num // n.per_byte_den)
    return ns


@inlined
def act(run: Streams) -> None:
    """Rule 5, if the link is free, and the other streams behind it."""
    n = run.n
    if len(run.tiers):
        act_all(run)
    elif n.link_end == NEVER and not n.nothing_queued:
        take(run)


@compiled
def act_all(run: Streams) -> None:
    """Link, disk, then host: what is free starts what comes next."""
    if run.n.link_end == NEVER:
        take(run)
    act_below(run)


@compiled
def act_below(run: Streams) -> None:
    """Disk, then host: what is free starts what comes next."""
    m, n, h = run.m, run.n, run.h
    if n.disk_there and n.read_end == NEVER:
        expert = memory.next_read(h, m, run.proposals, n.all_experts)
        one = h[memory.ONE]
        for i in range(one[memory.EVICTED]):
            run.evictions[n.evicted] = ~h[memory.VICTIMS, i]
            n.evicted += 1
        one[memory.EVICTED] = 0
        if expert >= 0:
            n.reading, n.read_began = expert, n.now
            n.read_end = n.now + h[READ_NS, expert // len(run.ends)]
    if n.host_end == NEVER and n.host_next < n.host_queued:
        expert = h[HOST_QUEUE, n.host_next]
        n.host_next += 1
        n.hosting, n.host_began = expert, n.now
        n.host_end = n.now + h[HOST_NS, expert % len(run.ends)]
        if n.disk_there:
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
    n.link_end = NEVER
    if expert == BLOCKED:
        if n.unpinned < n.hits - 1:
            n.hit_end = run.ends[n.unpinned]
    else:
        n.nothing_queued = 1


@inlined
def start(run: Streams, expert: int, victim: int, prefetch: bool) -> None:
    """A transfer starts, or a paused one continues."""
    n = run.n
    if len(run.tiers):
        start_sized(run, expert, victim, prefetch)
    elif victim >= 0:
        run.evictions[n.evicted] = victim
        n.evicted += 1
    n.expert = expert
    n.began = n.now
    if prefetch:
        n.cause = BEHIND_PREFETCH
        n.moved = n.paused
        n.paused = 0
        send_chunk(n)
    else:
        n.cause = DEMAND
        n.whole = 1
        n.link_end = n.now + n.whole_ns


@compiled
def start_sized(run: Streams, expert: int, victim: int, prefetch: bool) -> None:
    """The same where experts differ in size, or lie on a disk: all who left, the transfer's size, its recency."""
    m, n = run.m, run.n
    n.evicted = core.note_left(m, victim, run.evictions, n.evicted)
    layer = expert // len(run.ends)
    n.expert_bytes, n.whole_ns = run.h[LAYER_BYTES, layer], run.h[LAYER_NS, layer]
    if n.disk_there and not (prefetch and n.paused):
        memory.touch(run.h, expert)


@inlined
def send_chunk(n: Numbers) -> None:
    """The next chunk of a prefetch."""
    moved = n.moved
    upto = min(moved + n.chunk_bytes, n.expert_bytes)
    n.moved = upto
    n.began = n.now
    n.whole = upto == n.expert_bytes
    n.link_end = n.now + used_ns(n, upto) - used_ns(n, moved)


@inlined
def account(run: Streams) -> None:
    """A chunk has ended: unpin the hits before now, charge the time to the link and, if it waited, to compute."""
    m, n, ends = run.m, run.n, run.ends
    now = n.now
    n.busy += now - n.began
    if len(run.tiers):
        account_tiers(run, now)
    elif n.hits:
        done = n.unpinned
        while done < n.hits and ends[done] < now:
            m[core.WANTED, m[core.HITS, done]] = 0
            done += 1
        n.unpinned = done
    elif n.waiting_since != NOT_WAITING:
        cause = n.cause
        if cause == BEHIND_PREFETCH and m[core.WANTED, n.expert]:
            cause = LATE
        run.stall[cause] += now - n.waiting_since
        n.waiting_since = now


@compiled
def account_tiers(run: Streams, before: int) -> None:
    """Anything ends now: unpin the hits that ended before a time, charge the time to what compute waited for."""
    m, n, ends = run.m, run.n, run.ends
    done = n.unpinned
    while done < n.hits and ends[done] < before:
        m[core.WANTED, m[core.HITS, done]] = 0
        done += 1
    n.unpinned = done
    if n.waiting_since != NOT_WAITING:
        run.stall[cause_of(run)] += n.now - n.waiting_since
        n.waiting_since = n.now


@compiled
def cause_of(run: Streams) -> int:
    """What the compute stream has been waiting for."""
    m, n = run.m, run.n
    if n.link_end != NEVER:
        if n.cause == DEMAND:
            return DEMAND
        if m[core.WANTED, n.expert] == core.ON_GPU:
            return LATE
        if core.next_demand(m) != core.NO_EXPERT:
            return BEHIND_PREFETCH
    base = n.event_layer * len(run.ends)
    for expert in range(base, base + len(run.ends)):
        if m[core.WANTED, expert] and not m[core.BELOW, expert]:
            return ON_DISK
    return ON_HOST if n.host_end != NEVER else NO_SLOT


@inlined
def link_event(run: Streams) -> None:
    n = run.n
    n.now = n.link_end
    account(run)
    if n.whole:
        arrival = n.expert
        n.moved = 0
        awaited, expert, victim, prefetch = core.arrived_and_next(run.m, run.keep, run.proposals, run.one_scale)
        if awaited:
            run.arrivals[n.arrived] = arrival
            n.arrived += 1
            n.waiting_since = NOT_WAITING
        turn_to(run, expert, victim, prefetch)
        if len(run.tiers) and n.disk_there and run.m[core.WANTED, arrival] != core.ON_HOST:
            memory.release(run.h, arrival)
    else:
        expert, victim = core.interrupt(run.m, run.keep, run.proposals)
        if expert >= 0:
            n.paused = n.moved
            start(run, expert, victim, False)
        else:
            send_chunk(n)
    if len(run.tiers):
        act_below(run)


@compiled
def read_event(run: Streams) -> None:
    m, n = run.m, run.n
    n.now = n.read_end
    account_tiers(run, n.now)
    expert = n.reading
    n.disk_busy += n.now - n.read_began
    n.read_end = NEVER
    memory.read_ended(run.h, m, expert)
    if m[core.WANTED, expert] == core.ON_HOST:
        run.h[HOST_QUEUE, n.host_queued] = expert
        n.host_queued += 1
    act(run)


@compiled
def host_event(run: Streams) -> None:
    """The hop has ended, or an expert's compute on the host."""
    m, n = run.m, run.n
    n.now = n.host_end
    account_tiers(run, n.now + 1)
    n.host_end = NEVER
    expert = n.hosting
    if expert != HOP:
        n.host_busy += n.now - n.host_began
        m[core.WANTED, expert] = 0
        n.host_left -= 1
        if n.disk_there:
            memory.release(run.h, expert)
    act(run)


@inlined
def hit_event(run: Streams) -> None:
    """The hit has ended that a stuck transfer waits for."""
    m, n = run.m, run.n
    n.now = n.hit_end
    n.hit_end = NEVER
    m[core.WANTED, m[core.HITS, n.unpinned]] = 0
    n.unpinned += 1
    act(run)


@inlined
def advance(run: Streams, until: int, rank: int) -> None:
    """Let everything happen that comes before an end of `rank` at `until`, which is the present then."""
    n = run.n
    if len(run.tiers):
        while happens(run, until, rank):
            pass
    else:
        while n.link_end <= until or n.hit_end <= until:
            if n.link_end <= n.hit_end:
                link_event(run)
            else:
                hit_event(run)
    n.now = until


@compiled
def happens(run: Streams, until: int, rank: int) -> bool:
    """Handle what ends next, if that comes before an end of `rank` at `until`."""
    n = run.n
    time, first = n.link_end, LINK
    if n.read_end < time:
        time, first = n.read_end, DISK
    if n.hit_end < time:
        time, first = n.hit_end, COMPUTE
    if n.host_end < time:
        time, first = n.host_end, HOST
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
    if n.waiting_since == NOT_WAITING:
        n.waiting_since = n.now
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
    n.host_left = n.host_next = n.host_queued = 0
    n.event_layer = layer
    placement = n.placement
    if placement in (FETCH, ADMITTED) or (placement == LAYERS and layer >= n.host_layers):
        return
    link_ready, host_ready, transfer_ns = 0, n.hop_ns, run.h[LAYER_NS, layer]
    if n.link_end != NEVER:
        link_ready = n.link_end - n.now
        if n.cause != DEMAND and n.expert // len(run.ends) == layer:
            for i in range(first, last):
                if experts[i] == n.expert:  # late
                    link_ready += used_ns(n, n.expert_bytes) - used_ns(n, n.moved)
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
        n.host_left += 1


@compiled
def begin_below(run: Streams, experts: Int, first: int, last: int) -> None:
    """The event has been looked up: demands of host memory, the host's queue, its hop."""
    m, n = run.m, run.n
    if n.disk_there:
        memory.demand(run.h, m, experts, first, last)
    if n.host_left == 0:
        return
    for i in range(first, last):
        if m[core.WANTED, experts[i]] == core.ON_HOST and m[core.BELOW, experts[i]]:
            run.h[HOST_QUEUE, n.host_queued] = experts[i]
            n.host_queued += 1
    if n.hop_ns:
        n.hosting = HOP
        n.host_end = n.now + n.hop_ns


@compiled
def busy_until_now(n: Numbers) -> int:
    """Time during which the link moved bytes, latency included."""
    busy: int = n.busy + (n.now - n.began if n.link_end != NEVER else 0)
    return busy


@compiled
def disk_busy_until_now(n: Numbers) -> int:
    busy: int = n.disk_busy + (n.now - n.read_began if n.read_end != NEVER else 0)
    return busy


@apart
@compiled
def decide(run: Streams, plan: Plan, routing: Routing, step: int, layer: int, L: int) -> int:
    """Rules 3 and 4: the policies hear of the event, and propose, if they are compiled; how many experts, or IDLE."""
    plan.changed[0] = CHANGED if plan.asks else UNCHANGED
    if plan.asks:
        return IDLE if ask(plan.asks, OBSERVE, step * L + layer) else 0
    idle = plan.may_be_idle
    put(event_at(routing, step, layer, L, run.m[core.ONE, core.SERIAL]), plan.event)
    if plan.keeps:
        plan.changed[0] = checked(call(plan.keeps, plan.keepers[0], run.m[core.ONE, core.SCORES], plan.event, 0))
        idle &= (plan.changed[0] & DID_NOTHING) != 0
    if plan.listens:
        idle &= checked(call(plan.listens, plan.fetcher, run.m[core.ONE, core.SCORES], plan.event, 0)) == 1
    if idle:
        return IDLE
    if plan.fetches:
        return checked(call(plan.fetches, plan.proposers[0], plan.event, plan.proposal, 0))
    return 0


@apart
@compiled
def decide_for_each(cells: Int, some: Streams, plan: Plan, routing: Routing, step: int, layer: int, L: int) -> None:
    """`decide` of policies that learn for several runs at once, with the proposal of each written down."""
    E = len(some.ends)
    put(event_at(routing, step, layer, L, like(cells[0], some).m[core.ONE, core.SERIAL]), plan.event)
    learned = checked(call(plan.learns, plan.keepers[0], plan.event, 0, 0))
    for c in range(len(cells)):
        run = like(cells[c], some)
        changed = checked(call(plan.follows, plan.keepers[c], run.m[core.ONE, core.SCORES], plan.event, learned))
        run.n.leaves |= (changed & LEAVES) != 0
        core.note_change(run.m, changed, layer * E, (layer + 1) * E)
        write_proposal(run, plan, checked(call(plan.fetches, plan.proposers[c], plan.event, plan.proposal, 0)))


@apart
@compiled
def admit(cells: Int, some: Streams, plan: Plan, routing: Routing, event: int, host_ns: Int) -> None:
    """Rule 21: each run decides what becomes of the event's misses, and where the host computes those not admitted."""
    named = ask(plan.asks, ADMIT, event) if some.m[core.ONE, core.ADMISSION] == OWN else 0
    first, last, experts = routing.offsets[event], routing.offsets[event + 1], routing.experts
    for c in range(len(cells)):
        run = like(cells[c], some)
        core.admit(run.m, run.keep, run.proposals, experts, first, last, plan.ids[:named])
        if run.n.placement == ADMITTED:
            for i in range(first, last):
                if run.m[core.WANTED, experts[i]] == core.ON_HOST:
                    run.h[HOST_NS, experts[i] % len(run.ends)] = host_ns[routing.counts[i]]
                    run.n.host_left += 1
                    run.n.event_others -= 1
        begin_below(run, experts, first, last)


@apart
@compiled
def decide_at_start(run: Streams, plan: Plan, routing: Routing, step: int) -> int:
    """Rules 4 and 16: the prefetcher proposes as a step starts; how many experts."""
    if plan.asks:
        return ask(plan.asks, AT_START, step)
    put(start_at(routing, step, run.m[core.ONE, core.SERIAL]), plan.event)
    return checked(call(plan.fetches, plan.proposers[0], plan.event, plan.proposal, 0))


@inlined
def route_layer(run: Streams, routing: Routing, durations: Durations, step: int, layer: int) -> None:
    """Rules 11 and 1: the dense part of a layer, then its experts are looked up."""
    n = run.n
    advance(run, n.now + durations.dense[step, layer], ROUTER)
    if routing.bent.kind:
        bend(routing, run.m[core.STATE], step, layer, durations.dense.shape[1])
    event = step * durations.dense.shape[1] + layer
    first, last = routing.offsets[event], routing.offsets[event + 1]
    if len(run.tiers):
        place(run, routing, first, last, layer, durations.expert[layer], durations.host[layer])
    n.event_hits = core.route(run.m, run.keep, routing.experts, first, last)
    n.event_others = last - first - n.event_hits
    if len(run.tiers):
        n.event_others -= n.host_left
        if not run.m[core.ONE, core.ADMISSION]:
            begin_below(run, routing.experts, first, last)


@inlined
def act_at_once(run: Streams) -> None:
    """Rule 14: what the lookup asked for starts before the predictor runs."""
    run.n.nothing_queued = 0
    act(run)


@apart
@compiled
def write_proposal(run: Streams, plan: Plan, n_proposed: int) -> None:
    """Rule 4: write down what has been proposed, for all cells of `run`'s engine, which take it when it arrives."""
    number = run.m[core.ONE, core.PROPOSAL] + 1
    ids, priorities = plan.ids[:n_proposed], plan.priorities[:n_proposed]
    core.write_proposal(run.proposals, number, ids, priorities)


@inlined
def compute_hits(run: Streams, routing: Routing, expert_ns: Int, first: int, hits: int) -> None:
    """Rule 11: when each hit's compute ends, one after another."""
    n, i = run.n, first
    end = n.now
    for h in range(hits):
        while routing.experts[i] != run.m[core.HITS, h]:
            i += 1
        end += expert_ns[routing.counts[i]]
        run.ends[h] = end
    n.hits, n.unpinned = hits, 0


@inlined
def compute_arrivals(run: Streams, routing: Routing, expert_ns: Int, first: int, others: int) -> None:
    """Rule 11: the others are computed in the order of their arrival."""
    n = run.n
    for _ in range(others):
        while n.taken == n.arrived:
            wait(run)
        expert = run.arrivals[n.taken]
        n.taken += 1
        i = first
        while routing.experts[i] != expert:
            i += 1
        advance(run, n.now + expert_ns[routing.counts[i]], COMPUTE)
        core.computed(run.m, expert)
        act(run)
    n.arrived = n.taken = 0


@inlined
def compute_layer(run: Streams, plan: Plan, routing: Routing, durations: Durations, step: int, layer: int) -> None:
    """Rules 4, 5 and 11: the proposal arrives, the streams start what they can, all is computed and combined."""
    n, expert_ns, fetches = run.n, durations.expert[layer], plan.fetches != 0
    first, hits, others = routing.offsets[step * durations.dense.shape[1] + layer], n.event_hits, n.event_others
    if fetches:
        core.take_proposal(run.m, run.proposals)
    if hits:
        compute_hits(run, routing, expert_ns, first, hits)
    if others or fetches or len(run.tiers):
        act_at_once(run)
    if hits:
        advance(run, run.ends[hits - 1], COMPUTE)
        core.computed_hits(run.m, n.unpinned, hits)
        n.hits = 0
        act(run)
    compute_arrivals(run, routing, expert_ns, first, others)
    if len(run.tiers):
        while n.host_left:
            wait(run)
        n.waiting_since = NOT_WAITING
    if durations.combine[step, layer]:
        advance(run, n.now + durations.combine[step, layer], COMPUTE)


@apart
@compiled
def write_row(run: Streams, bent: Int, row: Int) -> None:
    """Write the totals of the run so far, [COLUMNS]."""
    n = run.n
    row[CLOCK] = n.now
    for cause in range(len(run.stall)):
        row[STALL + cause] = run.stall[cause]
    for counter in range(N_COUNTERS):
        row[COUNTERS + counter] = run.m[core.ONE, core.N_HITS + counter]
    for count in range(len(bent)):
        row[BENT + count] = bent[count]
    row[LINK_BUSY] = busy_until_now(n)
    if len(run.tiers):
        row[HOST_BUSY_NS] = n.host_busy
        if n.disk_there:
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
        most = 2 * most + 3 * L * E  # also what was to be copied before, and what missed in the step
    for c in range(len(cells)):
        run = like(cells[c], some)
        if run.n.evicted + most > len(run.evictions) or run.n.now >= admit_at or run.m[core.ONE, core.FAILED]:
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
    admits = one.m[core.ONE, core.ADMISSION] != 0
    while step < S and goes_on(cells, some, L, admit_at):
        if plan.at_start:
            write_proposal(one, plan, decide_at_start(one, plan, routing, step))
        for c in range(K if plan.at_start or admits else 0):
            run = like(cells[c], some)
            core.begin_step(run.m)
            if plan.at_start:
                core.note_change(run.m, CHANGED, 0, 0)
                core.take_proposal(run.m, run.proposals)
            act_at_once(run)
        for layer in range(L):
            for c in range(K):
                route_layer(like(cells[c], some), routing, durations, step, layer)
            n_proposed = 0
            if plan.learns:
                decide_for_each(cells, some, plan, routing, step, layer, L)
            elif plan.hears:
                n_proposed = decide(one, plan, routing, step, layer, L)
                for c in range(K if plan.changed[0] != UNCHANGED else 0):
                    run = like(cells[c], some)
                    core.note_change(run.m, plan.changed[0], layer * len(run.ends), (layer + 1) * len(run.ends))
            overhead_ns = 0 if n_proposed == IDLE else predictor_ns
            n_proposed = max(n_proposed, 0)
            if admits:
                admit(cells, some, plan, routing, step * L + layer, durations.host[layer])
            if predictor_ns:
                for c in range(K):
                    act_at_once(like(cells[c], some))
            if plan.asks and plan.fetches:
                n_proposed = ask(plan.asks, PROPOSE, step * L + layer)
            if plan.fetches and not plan.learns:
                write_proposal(one, plan, n_proposed)
            for c in range(K):
                run = like(cells[c], some)
                if overhead_ns:
                    advance(run, run.n.now + overhead_ns, COMPUTE)
                    run.stall[PREDICTOR] += overhead_ns
                compute_layer(run, plan, routing, durations, step, layer)
        for c in range(K):
            run = like(cells[c], some)
            advance(run, run.n.now + durations.head[step], COMPUTE)
            write_row(run, routing.bent.counts, rows[c, step])
        step += 1
    return step
