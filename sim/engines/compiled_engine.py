"""The compiled engine: the same as the SimPy engine (`sim.engines.simpy_engine`), bit for bit, as one loop over arrays.

The compute stream is straight-line code that moves the clock; `advance` lets the link do meanwhile, in the order of
rule 15, what ends up to then: a transfer or a chunk before the end of a hit, either before the stream goes on. Every
decision is the residency's (`policies.core.residency_compiled`) or a policy's (`policies.core.dispatch`);
every rule about time has its
twin in `sim.engines.simpy_engine` under the same name, where it is explained. One call plays a request; what policies
do between requests (`begin_request`, learning in `end_request`) stays Python.
"""

from typing import Any, NamedTuple

import numpy as np

from policies.core import dispatch, limits
from policies.core import residency_compiled as core
from policies.core.compiled import apart, compiled, inlined
from policies.core.dispatch import NONE, PolicyStates
from policies.core.events import Routing, event_at, routing_of
from policies.core.limits import Bounds, limiter
from policies.core.policy import Float, Int, Shape
from policies.core.residency_compiled import BLOCKED
from policies.core.runner import PolicyRunner
from policies.core.spec import parse
from sim.loop.log import BEHIND_PREFETCH, DEMAND, LATE, PREDICTOR, STALLS, Ended, RequestLog, RunLog, whole
from sim.loop.run import Run, gpu_run
from sim.loop.session import decider_of
from sim.profiles.timing import Durations, DurationTables, FixedTiming, Link
from traces.errors import InputError
from traces.steps import RequestSteps

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
    NUMBERS,
) = range(24)

NOT_WAITING = -1

# Columns of `rows`: totals of the run when a step ends
CLOCK, STALL, COUNTERS, LINK_BUSY, COLUMNS = 0, 1, 6, 13, 14  # the stall by cause; the residency's counters
N_COUNTERS = LINK_BUSY - COUNTERS

MOST = 2**62  # ns, bytes: beyond lie overflows


class Streams(NamedTuple):
    """The residency, the link and the compute stream of one run."""

    m: Int
    keep: Float
    rule: int
    one_scale: bool
    n: Int  # [NUMBERS]
    ends: Int  # [E] of the event's hits
    arrivals: Int  # [E] experts of the event that came
    stall: Int  # [5] by cause, so far
    evictions: Int  # since they were last read


class Plan(NamedTuple):
    """Which policies are told and asked, by their numbers in `policies.core.dispatch`, and within which limits."""

    keeps: int  # the retention policy, if it hears of events
    listens: int  # the prefetcher, if it hears of events by itself
    fetches: int  # the prefetcher, if it proposes
    hears: bool  # either wants to know of events
    limited: bool
    bounds: Bounds
    ids: Int  # [L*E] of the proposal
    priorities: Float  # [L*E]


@compiled
def used_ns(n: Int, sent: int) -> int:
    """What a transfer has used after `sent` bytes (`sim.profiles.timing.Link`)."""
    if sent == 0:
        return 0
    ns: int = n[LATENCY_NS] - (-sent * n[PER_BYTE_NUM] // n[PER_BYTE_DEN])
    return ns


@inlined
def act(run: Streams) -> None:
    """Rule 5, if the link is free."""
    n = run.n
    if n[LINK_END] == NEVER and not n[NOTHING_QUEUED]:
        take(run)


@compiled
def take(run: Streams) -> None:
    """The free link takes what comes next."""
    expert, victim, prefetch = core.next_transfer(run.m, run.keep, run.rule, run.one_scale)
    turn_to(run, expert, victim, prefetch)


@compiled
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


@compiled
def start(run: Streams, expert: int, victim: int, prefetch: bool) -> None:
    """A transfer starts, or a paused one goes on."""
    n = run.n
    if victim >= 0:
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
def send_chunk(n: Int) -> None:
    """The next chunk of a prefetch."""
    moved = n[MOVED]
    upto = min(moved + n[CHUNK_BYTES], n[EXPERT_BYTES])
    n[MOVED] = upto
    n[BEGAN] = n[NOW]
    n[WHOLE] = upto == n[EXPERT_BYTES]
    n[LINK_END] = n[NOW] + used_ns(n, upto) - used_ns(n, moved)


@compiled
def account(run: Streams) -> None:
    """A chunk has ended: unpin the hits before now, charge the time to the link and, if it waited, to compute."""
    m, n, ends = run.m, run.n, run.ends
    now = n[NOW]
    n[BUSY] += now - n[BEGAN]
    if n[HITS]:
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
def link_event(run: Streams) -> None:
    """The chunk on the link has ended."""
    n = run.n
    n[NOW] = n[LINK_END]
    account(run)
    if n[WHOLE]:
        arrival = n[EXPERT]
        n[MOVED] = 0
        awaited, expert, victim, prefetch = core.arrived_and_next(run.m, run.keep, run.rule, run.one_scale)
        if awaited:
            run.arrivals[n[ARRIVED]] = arrival
            n[ARRIVED] += 1
            n[WAITING_SINCE] = NOT_WAITING
        turn_to(run, expert, victim, prefetch)
    else:
        expert, victim = core.interrupt(run.m, run.keep, run.rule)
        if expert >= 0:
            n[PAUSED] = n[MOVED]
            start(run, expert, victim, False)
        else:
            send_chunk(n)


@compiled
def hit_event(run: Streams) -> None:
    """The hit has ended that a stuck transfer waits for."""
    m, n = run.m, run.n
    n[NOW] = n[HIT_END]
    n[HIT_END] = NEVER
    m[core.WANTED, m[core.HITS, n[UNPINNED]]] = 0
    n[UNPINNED] += 1
    act(run)


@inlined
def advance(run: Streams, until: int) -> None:
    """Let everything happen that ends up to `until`, which is the present then."""
    n = run.n
    while n[LINK_END] <= until or n[HIT_END] <= until:
        if n[LINK_END] <= n[HIT_END]:
            link_event(run)
        else:
            hit_event(run)
    n[NOW] = until


@compiled
def busy_until_now(n: Int) -> int:
    """Time during which the link moved bytes, latency included."""
    busy: int = n[BUSY] + (n[NOW] - n[BEGAN] if n[LINK_END] != NEVER else 0)
    return busy


@apart
@compiled
def decide(run: Streams, plan: Plan, states: PolicyStates, routing: Routing, step: int, layer: int, L: int) -> int:
    """Rules 3 and 4: the policies hear of the event, and propose; how many experts."""
    event = event_at(routing, step, layer, L, run.m[core.ONE, core.SERIAL])
    if plan.keeps != NONE:
        dispatch.observe(plan.keeps, states, run.keep, event)
    if plan.listens != NONE:
        dispatch.observe(plan.listens, states, run.keep, event)
    if plan.fetches == NONE:
        return 0
    ids, priorities, state = plan.ids, plan.priorities, run.m[core.STATE]
    proposed: int = dispatch.propose(plan.fetches, states, event, ids, priorities)
    if plan.limited:
        proposed = limits.within(plan.bounds, ids, priorities, proposed, layer, len(run.ends), state, ids, priorities)
    return proposed


@compiled
def play_steps(
    run: Streams,
    plan: Plan,
    states: PolicyStates,
    routing: Routing,
    durations: Durations,
    predictor_ns: int,
    step: int,
    rows: Int,
) -> int:
    """Play the request from `step` on, until its end or until the log of evictions might not hold a step's more.

    rows: [S, COLUMNS], filled for the steps played. Returns the step to go on with.
    """
    m, keep, n, stall, ends, arrivals = run.m, run.keep, run.n, run.stall, run.ends, run.arrivals
    S, L = durations.dense.shape
    E = len(ends)
    fetches = plan.fetches != NONE
    experts, counts, expert_ns = routing.experts, routing.counts, durations.expert
    most_evictions = (L + 1) * (L * E + E)  # of a step: each proposal starts at once, and each expert of an event
    while step < S and n[EVICTED] + most_evictions <= len(run.evictions):
        combine_ns = durations.combine[step]
        for layer in range(L):
            advance(run, n[NOW] + durations.dense[step, layer])
            first, last = routing.offsets[step * L + layer], routing.offsets[step * L + layer + 1]
            hits = core.route(m, keep, run.rule, experts, first, last)
            others = last - first - hits
            proposed = 0
            if plan.hears:
                proposed = decide(run, plan, states, routing, step, layer, L)
            if predictor_ns:
                n[NOTHING_QUEUED] = 0
                act(run)
                advance(run, n[NOW] + predictor_ns)
                stall[PREDICTOR] += predictor_ns
            if fetches:
                core.propose(m, keep, plan.ids[:proposed], plan.priorities[:proposed])
            if hits:
                end = n[NOW]
                i = first
                for h in range(hits):
                    while experts[i] != m[core.HITS, h]:
                        i += 1
                    end += expert_ns[counts[i]]
                    ends[h] = end
                n[HITS], n[UNPINNED] = hits, 0
            if others or fetches:
                n[NOTHING_QUEUED] = 0
                act(run)
            if hits:
                advance(run, ends[hits - 1])
                core.computed_hits(m, n[UNPINNED], hits)
                n[HITS] = 0
                act(run)
            for _ in range(others):
                while n[TAKEN] == n[ARRIVED]:
                    if n[WAITING_SINCE] == NOT_WAITING:
                        n[WAITING_SINCE] = n[NOW]
                    link_event(run)
                expert = arrivals[n[TAKEN]]
                n[TAKEN] += 1
                i = first
                while experts[i] != expert:
                    i += 1
                advance(run, n[NOW] + expert_ns[counts[i]])
                m[core.WANTED, expert] = 0
                act(run)
            n[ARRIVED] = n[TAKEN] = 0
            if combine_ns:
                advance(run, n[NOW] + combine_ns)
        advance(run, n[NOW] + durations.head[step])
        rows[step, CLOCK] = n[NOW]
        for cause in range(len(stall)):
            rows[step, STALL + cause] = stall[cause]
        for counter in range(N_COUNTERS):
            rows[step, COUNTERS + counter] = m[core.ONE, core.N_HITS + counter]
        rows[step, LINK_BUSY] = busy_until_now(n)
        step += 1
    return step


def simulate(run: Run) -> RunLog:
    """Play a run and keep its log whole. NotServedError for a policy that this engine cannot play."""
    return whole(play, run)


def play(run: Run, ended: Ended) -> None:
    """As `simpy_engine.play`, whose logs these are. NotServedError for a policy that this engine cannot play."""
    runner = decider_of(run)
    if reason := dispatch.refusal(runner.retention, runner.prefetcher):
        raise NotServedError(f"the compiled engine does not play {run.policy.text}: {reason} (--engine simpy does)")
    Engine(run, runner).play(ended)


def on_disk() -> bool:
    """Whether a process of before has left the compiled engine on disk, of these sources, or this one has it."""
    dispatcher: Any = play_steps
    cache = getattr(dispatcher, "_cache", None)  # None under NUMBA_DISABLE_JIT
    return cache is None or bool(dispatcher.overloads or cache._cache_file._load_index())


def prepare() -> None:
    """Compile the engine, or load it: once for the processes that come after."""
    none, one = np.zeros(0, np.int64), np.ones(1, np.int64)
    request = RequestSteps(0, np.ones(1, np.uint8), one, one, np.zeros(2, np.int64), none, none)
    simulate(gpu_run([request], Shape(1, 1), 1, parse("lru"), FixedTiming(0, 0, 0, 0, 0), Link(0, 1, 1, 1)))


class NotServedError(InputError):
    """The policy is none that the compiled engine plays."""


class Engine:
    """One run: the residency, the policies' states, and the rows that requests leave behind."""

    def __init__(self, run: Run, runner: PolicyRunner) -> None:
        shape, timing, link = runner.shape, run.timing, run.gpu.link
        L, E = shape.layers, shape.experts
        self.requests = run.requests
        self.cold = run.cold
        self.runner = runner
        self.residency = runner.residency(run.gpu.slots)
        self.plan = _plan(runner, run.gpu.experts_per_layer)
        self.tables = DurationTables(timing, L)
        self.predictor_ns = timing.predictor_ns
        self.link = link
        self.whole_ns = link.used_ns(link.expert_bytes)
        self.state = Streams(
            m=self.residency.m,
            keep=self.residency.keep,
            rule=self.residency.rule,
            one_scale=self.residency.one_scale,
            n=_numbers(link),
            ends=np.zeros(E, np.int64),
            arrivals=np.zeros(E, np.int64),
            stall=np.zeros(len(STALLS), np.int64),
            evictions=np.zeros(max(1 << 16, 2 * (L + 1) * (shape.total + E)), np.int64),
        )
        self.totals = np.zeros(COLUMNS, np.int64)  # of the run when the last step ended

    def play(self, ended: Ended) -> None:
        """Play everything; the run ends with the last head."""
        last = len(self.requests) - 1
        for ordinal in range(last + 1):
            request = self.requests[ordinal]
            if not len(request.tokens):
                continue
            self.runner.begin_request(ordinal)
            totals, evictions = self._play(request)
            self._end_request(self.cold and ordinal != last)
            # What --cold discards is within the step that has ended.
            totals[-1, COUNTERS:LINK_BUSY] = self.residency.counters()
            ended(self._log(request, totals, evictions))

    def _play(self, request: RequestSteps) -> tuple[Int, list[Int]]:
        """All steps of a request: totals [S, COLUMNS] of the run at the end of each; the experts evicted."""
        rows, evictions = np.zeros((len(request.tokens), COLUMNS), np.int64), [np.empty(0, np.int64)]
        routing, durations = routing_of(request), self.tables.of(request)
        self._check_range(routing, durations)
        states = dispatch.states(self.runner.retention, self.runner.prefetcher)
        step, n = 0, self.state.n
        while step < len(rows):
            step = play_steps(self.state, self.plan, states, routing, durations, self.predictor_ns, step, rows)
            evictions.append(self.state.evictions[: n[EVICTED]].copy())
            n[EVICTED] = 0
        return rows, evictions

    def _end_request(self, cold: bool) -> None:
        """Rule 10; `cold` discards what is under way."""
        self.runner.end_request()
        n = self.state.n
        if cold:
            n[BUSY] = busy_until_now(n)
            n[LINK_END] = NEVER
            n[MOVED] = n[PAUSED] = 0
        self.residency.end_request(cold)

    def _check_range(self, routing: Routing, durations: Durations) -> None:
        """Compiled numbers wrap around: OverflowError before they can, should a run last more than a century."""
        events = durations.dense.size
        longest = float(durations.dense.sum(dtype=float)) + events * (
            float(durations.combine.max()) + float(durations.head.max()) + self.predictor_ns
        )
        longest += len(routing.experts) * (float(durations.expert.max()) + 2 * self.whole_ns)
        if self.state.n[NOW] + longest > MOST:
            raise OverflowError("the run takes more nanoseconds than there are whole numbers of 62 bits")

    def _log(self, request: RequestSteps, totals: Int, evictions: list[Int]) -> RunLog:
        spent = np.diff(totals, axis=0, prepend=self.totals[None])
        self.totals = totals[-1]
        stall = spent[:, STALL:COUNTERS]
        busy_ns = spent[:, CLOCK] - stall.sum(axis=1)
        table = np.column_stack([request.phase, request.tokens, spent, busy_ns]).astype(np.int64)
        numbers = np.arange(len(spent)), np.full(len(spent), request.request)
        by_request = RequestLog(*numbers, request.tokens, spent[:, CLOCK])
        return RunLog.of_table(table, by_request, self.link.expert_bytes, np.concatenate(evictions))


def _plan(runner: PolicyRunner, experts_per_layer: float | None) -> Plan:
    keeper, fetcher, total = runner.retention, runner.prefetcher, runner.shape.total
    limited = limiter(fetcher.options, runner.shape, experts_per_layer)
    number = dispatch.NUMBERS.get(type(fetcher), NONE)
    return Plan(
        keeps=dispatch.NUMBERS[type(keeper)] if keeper.observes else NONE,
        listens=number if fetcher.observes else NONE,
        fetches=number if fetcher.proposes else NONE,
        hears=keeper.observes or fetcher.observes or fetcher.proposes,
        limited=limited is not None,
        bounds=(limited or limits.Limiter(limits.Limits(), runner.shape, None)).bounds,
        ids=np.empty(total, np.int64),
        priorities=np.empty(total),
    )


def _numbers(link: Link) -> Int:
    """The link at rest."""
    whole = link.expert_bytes
    if whole * max(link.ns_per_byte_num, 1) + link.latency_ns > MOST:
        raise OverflowError(f"a transfer of {whole} bytes takes more nanoseconds than there are numbers of 62 bits")
    n = np.zeros(NUMBERS, np.int64)
    n[LINK_END] = n[HIT_END] = NEVER
    n[WAITING_SINCE] = NOT_WAITING
    n[NOTHING_QUEUED] = 1
    n[WHOLE_NS] = link.used_ns(whole)
    n[EXPERT_BYTES] = whole
    n[CHUNK_BYTES] = min(link.chunk_bytes or whole, whole)
    n[LATENCY_NS], n[PER_BYTE_NUM], n[PER_BYTE_DEN] = link.latency_ns, link.ns_per_byte_num, link.ns_per_byte_den
    return n
