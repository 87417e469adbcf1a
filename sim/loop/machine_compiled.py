"""The loop between two completions: one machine over arrays, compiled. Rules 1 to 5, 11 to 14 and 17.

A device reports what has ended (`handle`), the driver that a router has ended (`route`); the machine keeps the account
of time, and writes down the work that is to be submitted (`Machine.given`). What holds slots is decided in
`policies.core.residency_compiled` and `policies.core.host_memory`.

The link. Copy engines know no priorities, so what comes next is chosen late: a chunk is a body and a tail that flies no
longer than the host takes to answer, and the choice is made when the body has ended. Behind a demand it may be made as
soon as all arrived experts are computed: no router can end before. At most two transfers are in flight.

The compute stream. Hits of an event go in at once, and each other expert behind them as soon as its last piece is on
its way: the device waits for it (rule 9 needs no more: an event may be larger than the cache).
"""

from typing import Any, NamedTuple

import numpy as np

from policies.core import host_memory as memory
from policies.core import residency_compiled as core
from policies.core.calling import INTERRUPT, LOOKED_UP, LOOKUP, NEXT, PROPOSED, ask, call, put, value
from policies.core.compiled import apart, compiled, inlined
from policies.core.events import Routing, event_at
from policies.core.policy import DID_NOTHING, UNCHANGED, Float, Int
from policies.core.residency_compiled import BLOCKED, NO_EXPERT
from sim.loop.device import ALL, COPIES, ROUTERS, Kind
from sim.loop.log import BEHIND_PREFETCH, DEMAND, DISK, HOST, LATE, PREDICTOR, SLOT

COPY, PREDICTED, EXPERT, COMBINE, HEAD, ROUTER, READ, HOP, HOSTED, WAKE = range(len(Kind))

NO_CAUSE = -1
NOTHING, HOPPING = -1, -2
"""What the host does, or the disk, in place of an expert."""

COMPUTING, PREDICTING, WAITING = range(3)
"""What the compute stream does. WAITING: for an expert, or for the host, which has submitted nothing."""

NOT_YET = -1
"""In place of when the link became busy: as soon as the piece is submitted."""

PIECES_IN_FLIGHT = 2
"""Of a prefetch, at most."""


FIELDS = (
    # The compute stream: up to when its time is accounted for; what it does; work submitted to it. The event: its
    # experts, those not submitted, those arrived and not computed; the kind of work behind its combine, or 0.
    *("since", "doing", "compute_ns", "queued", "queue_first", "event", "waiting", "computing", "follows"),
    # Work to be submitted; what the machine answers when it ends (ROUTERS, COPIES, ALL); evictions not read yet.
    *("given", "answers", "evicted"),
    # The link: pieces in flight; whether the last one was a body; how many transfers there were; the one that sends and
    # the one that is paused (expert or NO_EXPERT, number, bytes).
    *("tail_bytes", "chunk_bytes", "flying", "first", "flying_bytes", "busy_ns", "busy_since", "owes_tail"),
    *("transfers", "active", "active_number", "active_sent", "active_demand"),
    *("paused", "paused_number", "paused_sent"),
    # Demands queued and not started; whether prefetches may be queued or paused; whether something queued found
    # no slot: it is tried again when an expert was computed.
    *("demands", "proposed", "blocked"),
    # Host and disk: whether there is any, and the hop takes time; what they do, since when. The event's experts on the
    # host: how many, how many left; its queue.
    *("has_host", "has_disk", "hops", "host_doing", "host_began", "host_busy_ns"),
    *("host_experts", "host_left", "host_next", "host_queued", "reading", "read_began", "disk_busy_ns"),
    # Who decides: whether anybody wants to hear of events, demands start before prefetches are proposed (rule 14), no
    # predictor's work comes before hits. Compiled policies as in `sim.engines.compiled_streams.Plan`; whether limits go
    # by states; experts proposed (NO_EXPERT: no proposal); an error of one (`policies.core.calling.checked`), or 0.
    # Addresses of who scripts the link and who observes, or 0.
    *("layers", "one_scale", "admits", "hears", "predicts", "at_once", "decides", "keeps", "keeper", "listens"),
    *("fetcher", "fetches", "proposer", "event_at_hand", "proposal", "may_be_idle", "limited", "idle", "proposes"),
    "error",
    *("scripted", "observer"),
)
"""Single numbers of a machine."""
NUMBERS = np.dtype((np.record, [(name, np.int64) for name in FIELDS]))

# Rows of x. By expert: tokens of the current event that were not submitted, on the GPU and on the host; whether it was
# submitted while its last piece is flying; its bytes; its state when the event was looked up. By place: the event's
# experts; those of the host, and its queue.
TOKENS, HOST_TOKENS, LANDING, BYTES, STATES, EVENT, HOST_EVENT, HOST_QUEUE = range(8)
ROWS = 8

# Columns of a piece in flight
OF, NUMBER, IS_DEMAND, BEGINS, ENDS = range(5)
PIECES = 8

# What an observer hears
ROUTED, EVENT_ROUTED, TOOK_PROPOSAL, TURNED_TO, INTERRUPTED, LEFT, LANDED, ARRIVED = range(8)
SUBMITTED, ENDED, STALLED, COPYING, COPIED, HOST_BEGAN, READ_BEGAN = range(8, 15)


class Machine(NamedTuple):
    """Residency, link, compute stream, host and disk of one run."""

    m: Int
    keep: Float
    proposals: Float
    h: Int  # host memory (`policies.core.host_memory`)
    n: Any  # the single numbers
    x: Int
    stall: Int  # [7] by cause, so far
    pieces: Int  # [PIECES, 5] a ring
    queue: Int  # a ring: of what was submitted to the compute stream the expert, or NO_EXPERT
    given: Int  # [n, 5] kind of work; of a copy: expert, slot, first byte, the one behind the last; of experts: the
    # first and the one behind the last of
    works: Int  # [E, 3] expert, slot, tokens
    ended: Int  # [2 * n] what has ended, 16 * expert + kind, and when, in turn
    evictions: Int  # of GPU memory the expert e, of host memory ~e
    told: Int  # [4] to the observer
    ids: Int  # [L*E] the proposal
    priorities: Float


@inlined
def tell(s: Machine, what: int, a: int = 0, b: int = 0, c: int = 0, d: int = 0) -> None:
    """Have an observer hear of something, if there is one."""
    if s.n.observer:
        s.told[0], s.told[1], s.told[2], s.told[3] = a, b, c, d
        ask(s.n.observer, what, a)


@inlined
def give(s: Machine, kind: int, a: int, b: int, c: int, d: int) -> None:
    row = s.given[s.n.given]
    row[0], row[1], row[2], row[3], row[4] = kind, a, b, c, d
    s.n.given += 1


# Where the time went


@compiled
def turn(s: Machine, now: int, doing: int) -> None:
    """Attribute the compute stream's time since the last turn to what it did; from now on it does `doing`.

    Time in which nothing is submitted and nothing awaited is the host's own: it is in no column, only in step_ns.
    """
    n = s.n
    began, did = n.since, n.doing
    n.since, n.doing = now, doing
    if now == began:
        return
    if did == COMPUTING:
        n.compute_ns += now - began
        return
    cause = PREDICTOR if did == PREDICTING else cause_of(s)
    if cause == NO_CAUSE:
        return
    s.stall[cause] += now - began
    tell(s, STALLED, cause, began, now, s.pieces[n.first, OF] if n.flying else NO_EXPERT)


@compiled
def cause_of(s: Machine) -> int:
    """What the compute stream has been waiting for; NO_CAUSE: for nothing of an event."""
    m, n = s.m, s.n
    if not (n.queued or n.waiting or n.host_left):
        return NO_CAUSE
    if n.flying:
        piece = s.pieces[n.first]
        if piece[IS_DEMAND]:
            return DEMAND
        if m[core.WANTED, piece[OF]] == core.ON_GPU:
            return LATE
        if not n.has_host or (n.demands > 0 and core.next_demand(m) >= 0):
            return BEHIND_PREFETCH
    elif not n.has_host:
        return NO_CAUSE
    if n.has_disk:
        for i in range(n.event):
            expert = s.x[EVENT, i]
            if (s.x[TOKENS, expert] or s.x[HOST_TOKENS, expert]) and not m[core.BELOW, expert]:
                return DISK
    return HOST if n.host_doing != NOTHING else SLOT


# The link (rules 5 and 12)


@compiled
def pump(s: Machine, now: int) -> None:
    """Let the link act; what lands of the event is computed behind what was submitted before."""
    send(s, now)
    if s.n.waiting:
        first = s.n.event - s.n.waiting
        give_works(s, first, land(s, now))


@compiled
def send(s: Machine, now: int) -> None:
    """Submit pieces until the link has enough; behind the last one of a transfer goes the next transfer."""
    n = s.n
    if not n.flying and n.doing == WAITING:  # up to now nothing waited for the link
        turn(s, now, WAITING)
    while (not n.flying or (n.tail_bytes and has_room(s))) and sending(s):
        expert, first = n.active, n.active_sent
        upto = piece_end(s, s.x[BYTES, expert])
        n.active_sent = upto
        tell(s, COPYING, expert, first, upto, n.active_demand)
        give(s, COPY, expert, s.m[core.SLOT, expert], first, upto)
        if not n.flying:
            n.busy_since = NOT_YET
        piece = s.pieces[(n.first + n.flying) % PIECES]
        piece[OF], piece[NUMBER], piece[IS_DEMAND] = expert, n.active_number, n.active_demand
        piece[BEGINS], piece[ENDS] = first, upto
        n.flying += 1
        n.flying_bytes += upto - first


@inlined
def has_room(s: Machine) -> bool:
    """For a tail behind its own body; for what is chosen behind a demand, or as a tail flies."""
    n = s.n
    if n.owes_tail:
        return True
    first, last = s.pieces[n.first], s.pieces[(n.first + n.flying - 1) % PIECES]
    if last[IS_DEMAND] and not n.computing:
        alone: bool = first[NUMBER] == last[NUMBER]
        return alone
    few: bool = n.flying < PIECES_IN_FLIGHT and n.flying_bytes <= n.tail_bytes
    return few


@inlined
def piece_end(s: Machine, size: int) -> int:
    """Where the piece ends that comes next; notes whether it is the chunk's body, with its tail to follow."""
    n = s.n
    n.owes_tail = 0
    if n.active_demand and not n.computing:
        return size
    chunk_end = size
    if n.chunk_bytes and not n.active_demand:
        chunk_end = min((n.active_sent // n.chunk_bytes + 1) * n.chunk_bytes, size)
    if chunk_end - n.active_sent > n.tail_bytes > 0:
        n.owes_tail = 1
        chunk_end -= n.tail_bytes
    return chunk_end


@inlined
def sending(s: Machine) -> bool:
    """Have a transfer be active of which the next piece is; False: there is none."""
    n = s.n
    if n.active != NO_EXPERT and n.active_sent == s.x[BYTES, n.active]:
        core.land(s.m)
        n.active = NO_EXPERT
        tell(s, LANDED)
    if n.active == NO_EXPERT:
        return take(s)
    if n.chunk_bytes and not n.active_demand and n.active_sent % n.chunk_bytes == 0:
        if n.scripted:
            expert, victim, _ = scripted(s, INTERRUPT)
        else:
            expert, victim = core.interrupt(s.m, s.keep, s.proposals)
        tell(s, INTERRUPTED, expert, victim)
        if expert >= 0:
            n.paused, n.paused_number, n.paused_sent = n.active, n.active_number, n.active_sent
            begin(s, expert, victim, False)
    return True


@apart
@compiled
def take(s: Machine) -> bool:
    """Take the transfer that comes next, if there is one."""
    n = s.n
    if not (n.demands or n.proposed):
        return False
    if n.scripted:
        expert, victim, prefetch = scripted(s, NEXT)
    else:
        expert, victim, prefetch = core.next_transfer(s.m, s.keep, s.proposals, n.one_scale != 0)
    tell(s, TURNED_TO, expert, victim, prefetch)
    n.blocked = expert == BLOCKED
    if expert < 0:
        if not n.blocked and not n.has_host:  # else what is queued may wait for the disk
            n.demands = n.proposed = 0
        return False
    if n.paused == expert:
        n.active, n.active_number, n.active_sent, n.active_demand = expert, n.paused_number, n.paused_sent, 0
        n.paused = NO_EXPERT
        return True
    begin(s, expert, victim, prefetch)
    return True


@apart
@compiled
def scripted(s: Machine, question: int) -> tuple[int, int, bool]:
    """The same from a script: (expert, victim, is a prefetch)."""
    answer = ask(s.n.scripted, question, 0)
    prefetch, answer = answer & 1, answer >> 1
    total = s.x.shape[1] + 1
    return answer // total - 2, answer % total - 1, prefetch != 0


@compiled
def begin(s: Machine, expert: int, victim: int, prefetch: bool) -> None:
    m, n = s.m, s.n
    if m[core.ONE, core.SIZED]:
        tell(s, LEFT)
    n.evicted = core.note_left(m, victim, s.evictions, n.evicted)
    if n.has_disk:
        memory.touch(s.h, expert)
    n.demands -= not prefetch
    n.transfers += 1
    n.active, n.active_number, n.active_sent, n.active_demand = expert, n.transfers, 0, not prefetch


# The compute stream (rule 11)


@compiled
def submitted(s: Machine, now: int, kind: int) -> None:
    """The compute stream is given a dense part, a combine, a head or the predictor."""
    if not s.n.queued:
        turn(s, now, COMPUTING)
    enqueue(s, NO_EXPERT)
    tell(s, SUBMITTED, kind, 1)


@inlined
def enqueue(s: Machine, expert: int) -> None:
    s.queue[(s.n.queue_first + s.n.queued) % len(s.queue)] = expert
    s.n.queued += 1


@inlined
def compute(s: Machine, expert: int) -> None:
    """Submit an expert of the event, which is in its slot or landing."""
    n = s.n
    enqueue(s, expert)
    work = s.works[n.event - n.waiting]
    work[0], work[1], work[2] = expert, s.m[core.SLOT, expert], s.x[TOKENS, expert]
    s.x[TOKENS, expert] = 0
    n.waiting -= 1


@compiled
def land(s: Machine, now: int) -> int:
    """Submit those that the event waits for; their last pieces are flying. Returns how many."""
    n, landing = s.n, 0
    for i in range(n.flying):
        piece = s.pieces[(n.first + i) % PIECES]
        if piece[ENDS] == s.x[BYTES, piece[OF]] and s.x[TOKENS, piece[OF]]:
            if not n.queued:
                turn(s, now, WAITING)
            s.x[LANDING, piece[OF]] = 1
            compute(s, piece[OF])
            landing += 1
    return landing


@inlined
def give_works(s: Machine, first: int, count: int) -> None:
    """Give the device experts in one call, from the first of `works` on."""
    if count:
        give(s, EXPERT, first, first + count, 0, 0)
        tell(s, SUBMITTED, EXPERT, count)


@compiled
def submit_behind(s: Machine, now: int) -> None:
    """Once all experts of an event are submitted, so is what follows them."""
    n = s.n
    if not n.waiting and not n.host_left:
        submitted(s, now, COMBINE)
        submitted(s, now, n.follows)
        n.follows = 0


# Host and disk (rules 13 and 17): each gets one piece of work at a time, since what comes next is chosen when one ends


@inlined
def act_below(s: Machine, now: int) -> None:
    if s.n.has_host:
        start_below(s, now)


@apart
@compiled
def start_below(s: Machine, now: int) -> None:
    """Let disk and host start what they can; the link has been asked before."""
    n, h = s.n, s.h
    if n.has_disk and n.reading == NOTHING:
        expert = memory.next_read(h, s.m, s.proposals, s.x.shape[1])
        one = h[memory.ONE]
        for i in range(one[memory.EVICTED]):
            s.evictions[n.evicted] = ~h[memory.VICTIMS, i]
            n.evicted += 1
        one[memory.EVICTED] = 0
        if expert >= 0:
            tell(s, READ_BEGAN, expert, h[memory.DEMANDED, expert])
            n.reading, n.read_began = expert, now
            give(s, READ, expert, 0, 0, 0)
    if n.host_next < n.host_queued and n.host_doing == NOTHING:
        expert = s.x[HOST_QUEUE, n.host_next]
        n.host_next += 1
        tell(s, HOST_BEGAN, HOSTED, expert, s.x[HOST_TOKENS, expert])
        n.host_doing, n.host_began = expert, now
        if n.has_disk:
            memory.touch(h, expert)
        give(s, HOSTED, expert, s.x[HOST_TOKENS, expert], 0, 0)


@apart
@compiled
def begin_below(s: Machine) -> None:
    """The lookup has been made: misses are demanded of host memory, and the hop begins."""
    n, x = s.n, s.x
    if n.has_disk:
        memory.demand(s.h, s.m, x[EVENT], 0, n.event)
    n.host_next = n.host_queued = 0
    for i in range(n.host_experts):
        if not n.has_disk or s.m[core.BELOW, x[HOST_EVENT, i]]:
            x[HOST_QUEUE, n.host_queued] = x[HOST_EVENT, i]
            n.host_queued += 1
    if n.host_left and n.hops:
        tell(s, HOST_BEGAN, HOP, NOTHING)
        n.host_doing = HOPPING
        give(s, HOP, 0, 0, 0, 0)


@apart
@compiled
def ended_below(s: Machine, now: int, kind: int, expert: int) -> None:
    """A read, the hop or an expert's compute on the host has ended, or the wait of an idle run."""
    n, x = s.n, s.x
    turn(s, now, n.doing)
    tell(s, ENDED, kind, expert)
    if not n.has_host or kind == WAKE:
        return
    if kind == READ:
        n.disk_busy_ns += now - n.read_began
        n.reading = NOTHING
        memory.read_ended(s.h, s.m, expert)
        if x[HOST_TOKENS, expert]:
            x[HOST_QUEUE, n.host_queued] = expert
            n.host_queued += 1
    else:
        if kind == HOSTED:
            n.host_busy_ns += now - n.host_began
            core.computed(s.m, expert)
            if n.has_disk:
                memory.release(s.h, expert)
            x[HOST_TOKENS, expert] = 0
            n.host_left -= 1
        n.host_doing = NOTHING
    pump(s, now)
    start_below(s, now)


# Completions


@compiled
def handle(s: Machine, now: int, kind: int, expert: int) -> None:
    """One piece of work has ended: account for it, and let start what it lets start."""
    n = s.n
    if kind == COPY:
        copied(s, now)
        return
    if kind > ROUTER:  # of no stream that every run has
        ended_below(s, now, kind, expert)
        return
    tell(s, ENDED, kind, expert)
    n.queue_first = (n.queue_first + 1) % len(s.queue)
    n.queued -= 1
    front = s.queue[n.queue_first] if n.queued else NO_EXPERT
    if not n.queued or (front != NO_EXPERT and s.x[LANDING, front]):
        turn(s, now, WAITING)
    if kind == EXPERT:
        core.computed(s.m, expert)
        n.computing -= 1
        if n.blocked or n.has_host or (n.demands and not n.computing):
            pump(s, now)
            act_below(s, now)
    elif kind == PREDICTED:
        if n.doing == PREDICTING:
            turn(s, now, COMPUTING)
        take_proposal(s)
        pump(s, now)
        act_below(s, now)


@compiled
def copied(s: Machine, now: int) -> None:
    """The oldest piece on the link has ended."""
    n = s.n
    if n.doing != COMPUTING:
        turn(s, now, n.doing)
    tell(s, COPIED)
    piece = s.pieces[n.first]
    expert = piece[OF]
    n.first = (n.first + 1) % PIECES
    n.flying -= 1
    n.flying_bytes -= piece[ENDS] - piece[BEGINS]
    if not n.flying:
        n.busy_ns += now - n.busy_since
    if piece[ENDS] == s.x[BYTES, expert]:
        if n.active != NO_EXPERT and n.active_number == piece[NUMBER]:
            n.active = NO_EXPERT
        core.arrived(s.m)
        tell(s, ARRIVED)
        if n.has_disk and not s.x[HOST_TOKENS, expert]:
            memory.release(s.h, expert)
        if s.x[LANDING, expert]:
            s.x[LANDING, expert] = 0
            n.computing += 1
            if n.doing == WAITING and s.queue[n.queue_first] == expert:
                turn(s, now, COMPUTING)
    if n.demands > 0 or n.proposed or n.active != NO_EXPERT:
        pump(s, now)
    act_below(s, now)


# Events


@inlined
def take_event(s: Machine, routing: Routing, number: int) -> None:
    """Put experts and tokens of an event where the lookup expects them."""
    first, last = routing.offsets[number], routing.offsets[number + 1]
    s.n.event = last - first
    for i in range(first, last):
        s.x[EVENT, i - first] = routing.experts[i]
        s.x[TOKENS, routing.experts[i]] = routing.counts[i]
    for i in range(s.n.host_experts):
        s.x[TOKENS, s.x[HOST_EVENT, i]] = 0


@compiled
def look_up(s: Machine) -> None:
    """Rules 1 and 2; before it the host was given its part of the event (rule 13)."""
    n, x = s.n, s.x
    if n.scripted:
        ask(n.scripted, LOOKUP, n.event)
    hits = core.route(s.m, s.keep, x[EVENT], 0, n.event)
    n.computing, n.demands = hits, s.m[core.ONE, core.LAST_DEMAND]
    n.waiting = n.event - n.host_left
    if n.scripted:
        n.demands = ask(n.scripted, LOOKED_UP, 0)
    tell(s, ROUTED, hits)
    if n.has_host and not n.admits:
        begin_below(s)
    tell(s, EVENT_ROUTED, hits)


@apart
@compiled
def observe(s: Machine, routing: Routing, number: int) -> None:
    """Rule 3, of compiled policies."""
    m, n = s.m, s.n
    layer, E = number % n.layers, s.x.shape[1] // n.layers
    changed = UNCHANGED
    if n.limited:
        for expert in range(s.x.shape[1]):
            s.x[STATES, expert] = m[core.STATE, expert]
    put(event_at(routing, number // n.layers, layer, n.layers, m[core.ONE, core.SERIAL]), n.event_at_hand)
    idle = n.may_be_idle != 0
    if n.keeps:
        changed = call(n.keeps, n.keeper, m[core.ONE, core.SCORES], n.event_at_hand, 0)
        n.error = min(changed, 0)
        idle &= (changed & DID_NOTHING) != 0
    if n.listens:
        heard = call(n.listens, n.fetcher, m[core.ONE, core.SCORES], n.event_at_hand, 0)
        n.error = min(n.error, heard)
        idle &= heard == 1
    n.idle = idle and (n.keeps != 0 or n.listens != 0)
    core.note_change(m, changed, layer * E, (layer + 1) * E)


@apart
@compiled
def propose(s: Machine) -> None:
    """Rule 4, of compiled policies."""
    n = s.n
    if n.fetches:
        proposes = 0 if n.idle else call(n.fetches, n.proposer, n.event_at_hand, n.proposal, 0)
        n.error, n.proposes = min(n.error, proposes), max(proposes, 0)


@apart
@compiled
def take_proposal(s: Machine) -> None:
    """Rule 4: a proposal has arrived, if one was made."""
    n = s.n
    if n.proposes == NO_EXPERT:
        return
    core.propose(s.m, s.proposals, s.ids[: n.proposes], s.priorities[: n.proposes])
    if n.scripted:
        ask(n.scripted, PROPOSED, 0)
    tell(s, TOOK_PROPOSAL, n.proposes)
    n.proposes = NO_EXPERT
    n.proposed = 1


@apart
@compiled
def admit(s: Machine, named: int) -> None:
    """Rule 21. What is copied waits for the link as proposals do; only now is it known what the host computes."""
    m, n, x = s.m, s.n, s.x
    core.admit(m, s.keep, s.proposals, x[EVENT], 0, n.event, s.ids[:named])
    n.demands, n.proposed = m[core.ONE, core.LAST_DEMAND], 1
    for i in range(n.event):
        expert = x[EVENT, i]
        if x[TOKENS, expert] and m[core.WANTED, expert] == core.ON_HOST:
            x[HOST_TOKENS, expert], x[TOKENS, expert] = x[TOKENS, expert], 0
            x[HOST_EVENT, n.host_experts] = expert
            n.host_experts += 1
            n.host_left += 1
            n.waiting -= 1
    begin_below(s)


@compiled
def submit(s: Machine, now: int, predictor: bool) -> None:
    """All is decided: hits are computed behind the predictor's work, if it takes any; the link takes what it can."""
    n = s.n
    if n.doing == PREDICTING:
        turn(s, now, WAITING)
    if predictor:
        submitted(s, now, PREDICTED)
        turn(s, now, PREDICTING)
    else:
        take_proposal(s)
    hits, first = n.computing, n.event - n.waiting
    if hits and not n.queued:
        turn(s, now, COMPUTING)
    for i in range(hits):
        compute(s, s.m[core.HITS, i])
    landing = land(s, now) if n.waiting and n.flying else 0
    if n.demands or n.proposed:
        send(s, now)
        landing += land(s, now) if n.waiting else 0
    give_works(s, first, hits + landing)
    act_below(s, now)
    if n.follows:
        submit_behind(s, now)


# What Python calls

TURN, SUBMITTING, ENDED_NOW, ENDED_THEN, LOOK_UP, BEGIN_EVENT, PROPOSE, SUBMIT, PUMP, CUT = range(10)


def act(state: Any, question: int, now: int, number: int) -> int:
    """Do what Python asks for, now; return how much work is to be submitted."""
    s = value(state)
    n = s.n
    if question == ENDED_THEN:  # several works, each at its time
        for i in range(0, number, 2):
            handle(s, s.ended[i + 1], s.ended[i] & 15, s.ended[i] >> 4)
    elif question == ENDED_NOW:
        handle(s, now, number & 15, number >> 4)
    elif question == SUBMITTING:
        submitted(s, now, number)
    elif question == SUBMIT:
        submit(s, now, number != 0)
    elif question == TURN:
        turn(s, now, number)
    elif question == LOOK_UP:
        look_up(s)
        if not n.hears:
            begin_event(s, 0, now)
    elif question == BEGIN_EVENT:
        begin_event(s, number, now)
    elif question == PROPOSE:
        turn(s, now, PREDICTING)
        propose(s)
    elif question == PUMP:
        take_proposal(s)
        pump(s, now)
        act_below(s, now)
    else:
        cut(s, now)
    if n.follows and question in (ENDED_THEN, ENDED_NOW):
        submit_behind(s, now)
    return work_given(s)


def route(state: Any, events: Any, now: int, number: int) -> int:
    """Look up an event of the trace; compiled policies decide, and a device's streams start what they can (rule 14).

    Where the predictor takes no time of its own, what follows is submitted as well (`at_once`). number < 0: policies
    only hear of the event ~number, since what they take counts. Returns as `act`.
    """
    s, routing = value(state), value(events)
    n, timed = s.n, number < 0
    event = ~number if timed else number
    take_event(s, routing, event)
    look_up(s)
    if n.decides:
        if timed:
            turn(s, now, PREDICTING)
        observe(s, routing, event)
        if not timed:
            begin_event(s, 0, now)
            propose(s)
    elif not n.hears:
        begin_event(s, 0, now)
    if n.at_once and not timed and (n.decides or not n.hears):
        submit(s, now, False)
    return work_given(s)


@inlined
def work_given(s: Machine) -> int:
    """How much work is to be submitted, or a policy's error; notes what is to be reported at once when it ends."""
    n = s.n
    n.answers = ROUTERS
    if n.blocked or n.has_host or n.observer:
        n.answers = ALL
    elif n.demands or n.proposed or (n.active != NO_EXPERT and n.active_sent < s.x[BYTES, n.active]):
        n.answers = COPIES
    given: int = n.error if n.error else n.given
    return given


@compiled
def begin_event(s: Machine, named: int, now: int) -> None:
    """Policies have heard: admit (rule 21); all streams but compute start what they can before they propose (rule 14).

    named: how many experts the policy itself admits.
    """
    if s.n.admits:
        admit(s, named)
    if s.n.predicts:
        turn(s, now, WAITING)
        send(s, now)
        act_below(s, now)


@apart
@compiled
def cut(s: Machine, now: int) -> None:
    """`--cold`: discard what is under way. Where copies cannot be stopped, the link was busy until they had ended."""
    n = s.n
    if n.flying:
        n.busy_ns += now - n.busy_since
    n.flying = n.flying_bytes = n.owes_tail = n.computing = 0
    n.active = n.paused = NO_EXPERT
    if n.has_disk:
        if n.reading != NOTHING:
            n.disk_busy_ns += now - n.read_began
        n.reading = NOTHING
        memory.empty(s.h, s.m, s.x.shape[1])
