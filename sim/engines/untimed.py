"""Counted mode: hits, misses and evictions as on a machine that takes no time at all. Compiled, one event a layer.

At one instant the link comes before compute (rule 15): all that an event looked up stays pinned until its last miss has
a slot, or none is left; then experts are computed as they came. `one_at_a_time` makes every access an event, as
simulators of plain caches do: then the misses equal theirs to the unit.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from policies.core import residency_compiled as core
from policies.core.admission import OWN
from policies.core.bent import COUNTS, Bending, Rule, bend
from policies.core.calling import ADMIT, OBSERVE, Held, ask, call, checked, put
from policies.core.compiled import apart, compiled, inlined
from policies.core.dispatch import EVENT, Native
from policies.core.events import Events, Routing, event_at, routing_of
from policies.core.policy import CHANGED, NO_INTS, Float, Int, Requests, Shape
from policies.core.runner import AskedRunner, PolicyRunner
from policies.core.spec import FETCHED, PolicySpec
from sim.loop.log import COLUMNS, Ended, RequestLog, RunLog, joined
from traces.steps import PREFILL, RequestSteps

MOST_EVICTIONS = 1 << 16

PHASE, TOKENS = COLUMNS.index("phase"), COLUMNS.index("tokens")
FIRST_COUNTER = COLUMNS.index("hits")
N_COUNTERS = core.COUNTERS.stop - core.COUNTERS.start
COUNTED = [*range(FIRST_COUNTER, FIRST_COUNTER + N_COUNTERS), *map(COLUMNS.index, COUNTS)]


class Heard(NamedTuple):
    """Who hears of events (rule 3): addresses, 0 for none."""

    asks: int  # a policy in Python
    keeps: int  # a compiled one,
    keeper: int  # what it knows,
    event: int  # room for the event at hand,
    experts: int  # experts of a layer,
    named: Int  # [L*E] and room for what the policy itself admits


@apart
@compiled
def hear(m: Int, who: Heard, routing: Routing, step: int, layer: int, L: int) -> None:
    """Rule 3."""
    if who.asks:
        ask(who.asks, OBSERVE, step * L + layer)
        core.note_change(m, CHANGED, 0, 0)
    elif who.keeps:
        put(event_at(routing, step, layer, L, m[core.ONE, core.SERIAL]), who.event)
        changed = checked(call(who.keeps, who.keeper, m[core.ONE, core.SCORES], who.event, 0))
        core.note_change(m, changed, layer * who.experts, (layer + 1) * who.experts)


@apart
@compiled
def admit(m: Int, keep: Float, proposals: Float, who: Heard, experts: Int, first: int, last: int) -> None:
    """Rule 21."""
    named = ask(who.asks, ADMIT, 0) if m[core.ONE, core.ADMISSION] == OWN else 0
    core.admit(m, keep, proposals, experts, first, last, who.named[:named])


@inlined
def queued(m: Int, hits: int, place: int) -> int:
    """Rule 11: what is computed in that place of an event's queue, the hits first."""
    expert: int = m[core.HITS, place] if place < hits else m[core.DEMANDS, place - hits]
    return expert


@compiled
def count_steps(
    m: Int, keep: Float, proposals: Float, who: Heard, routing: Routing, L: int, step: int, totals: Int, evictions: Int
) -> tuple[int, int]:
    """Count the steps from `step` on, until their end or until `evictions` might not hold a step's more.

    totals: [S, counters], filled for the steps that ran. Returns the step to continue with, and how many evictions.
    """
    S, evicted, one = len(routing.phase), 0, m[core.ONE]
    sized = one[core.SIZED]
    while step < S and not one[core.FAILED]:
        # Each lookup may push out one expert; where sizes differ, all that are there and all that came since.
        if evicted + keep.shape[1] * (2 if sized else 1) > len(evictions):
            break
        core.begin_step(m)
        for layer in range(L):
            if routing.bent.kind:
                bend(routing, m[core.STATE], step, layer, L)
            first, last = routing.offsets[step * L + layer], routing.offsets[step * L + layer + 1]
            hits = core.route(m, keep, routing.experts, first, last)
            if who.asks or who.keeps:
                hear(m, who, routing, step, layer, L)
            if one[core.ADMISSION]:
                admit(m, keep, proposals, who, routing.experts, first, last)
            computed = 0
            while one[core.NEXT_DEMAND] < one[core.LAST_DEMAND]:
                expert, victim = core.start_demand(m, keep, proposals)
                if expert == core.BLOCKED:
                    core.computed(m, queued(m, hits, computed))
                    computed += 1
                    continue
                evicted = core.note_left(m, victim, evictions, evicted)
                core.arrived(m)
            for place in range(computed, hits + one[core.LAST_DEMAND]):
                core.computed(m, queued(m, hits, place))
        for counter in range(N_COUNTERS):
            totals[step, counter] = one[core.N_HITS + counter]
        for count in range(len(routing.bent.counts)):
            totals[step, N_COUNTERS + count] = routing.bent.counts[count]
        step += 1
    return step, evicted


def count(
    requests: Requests,
    layers: int,
    experts: int,
    slots: int,
    policy: PolicySpec,
    cold: bool = False,
    one_at_a_time: bool = False,
) -> RunLog:
    """Run `requests` with no clock: the log's durations are zero, its lookups, misses and evictions exact."""
    if one_at_a_time:
        requests, layers, experts = [_one_at_a_time(each) for each in requests], 1, layers * experts
    parts: list[RunLog] = []
    play(requests, layers, experts, slots, policy, parts.append, cold)
    return joined(parts)


def _one_at_a_time(request: RequestSteps) -> RequestSteps:
    """Return the accesses of a request as steps of one expert each, of a model of one layer."""
    n = len(request.experts)
    one, phase = np.ones(n, np.int64), np.full(n, request.phase[-1] if n else 0, np.uint8)
    return RequestSteps(request.request, phase, one, np.cumsum(one), np.arange(n + 1), request.experts, one)


def play(
    requests: Requests,
    layers: int,
    experts: int,
    slots: int,
    policy: PolicySpec,
    ended: Ended,
    cold: bool = False,
    expert_bytes: int = 0,
    sizes: Int | None = None,
    top_k: int = 1,
    rule: Rule | None = None,
) -> None:
    """Run requests; `ended` takes the log of each as it ends. expert_bytes: of one, 0 where it is not known.

    sizes: bytes of each expert, int64[L*E], where they differ; `slots` are bytes then (rule 19). rule: bends routing.
    """
    shape = Shape(layers, experts, top_k=top_k)
    policy = replace(policy.without_prefetch(), placement=FETCHED)
    bending = Bending(rule, shape) if rule else None
    runner = PolicyRunner(policy, shape, requests)
    residency, keeper = runner.residency(slots, sizes), runner.retention
    asked = None if policy.compiled or runner.silent else AskedRunner(runner, residency)
    native, event = Native(keeper, asked=asked is not None), Held(EVENT)
    named = asked.proposal.ids if asked else NO_INTS
    who = Heard(asked.address if asked else 0, native.observe, native.state, event.address, experts, named)
    room = np.zeros(max(MOST_EVICTIONS, layers * experts * (layers + 1)), np.int64)
    before = np.zeros(len(COUNTED), np.int64)
    cache = residency.m, residency.keep, residency.proposals
    last, done = len(requests) - 1, 0
    for ordinal in range(last + 1):
        request = requests[ordinal]
        runner.begin_request(ordinal)
        routing = routing_of(request, bending)
        native.refresh()
        residency.m[core.ONE, core.SCORES_ARE] = core.NEW
        if asked:
            asked.events = Events(routing, layers, done)
        done += len(request.phase) * layers
        totals, step, evictions = np.zeros((len(request.phase), len(before)), np.int64), 0, [np.zeros(0, np.int64)]
        while step < len(request.phase):
            step, evicted = count_steps(*cache, who, routing, layers, step, totals, room)
            evictions.append(room[:evicted].copy())
            residency.check()
            if asked:
                asked.check()
        runner.end_request()
        residency.end_request(cold and ordinal != last)
        if len(totals):
            totals[-1, :N_COUNTERS] = residency.counters()
        ended(_log(request, totals, before, np.concatenate(evictions), expert_bytes, sizes is not None))
        before[:N_COUNTERS], before[N_COUNTERS:] = residency.counters(), bending.counts if bending else 0


def _log(request: RequestSteps, totals: Int, before: Int, evictions: Int, expert_bytes: int, sized: bool) -> RunLog:
    """Return the log of a request; totals: of the run at the end of each step."""
    S = len(totals)
    table = np.zeros((S, len(COLUMNS)), np.int64)
    table[:, PHASE], table[:, TOKENS] = request.phase, request.tokens
    table[:, COUNTED] = np.diff(totals, axis=0, prepend=np.reshape(before, (1, -1)))
    none = np.zeros(S, np.int64)
    rejected = none if request.rejected is None else request.rejected
    shares = np.arange(S), np.full(S, request.request), request.tokens, none, none, rejected
    by_request = RequestLog(*shares, (request.phase == PREFILL).astype(np.int64))
    return RunLog.of_table(table, by_request, expert_bytes, evictions, sized=sized)
