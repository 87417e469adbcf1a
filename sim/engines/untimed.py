"""Untimed mode: exact cache counts. The experts of an event are looked up, loaded and released one at a time.

Ascending id within a (token, layer) whatever the trace stores; no link, no prefetch, no pins; every access is an
event of its own for recency, counts and EAMs. Misses equal those of an independent cache simulator to the unit.
"""

from policies.core.events import RequestEvents
from policies.core.policy import Int, Requests, Shape
from policies.core.residency import PolicyResidency
from policies.core.runner import PolicyRunner
from policies.core.spec import PolicySpec
from sim.loop.log import COLUMNS, COUNTERS, Ended, RunLog, Share, StepRow, joined

BYTES = COUNTERS.index("demand_bytes")


def count(requests: Requests, layers: int, experts: int, slots: int, policy: PolicySpec, cold: bool = False) -> RunLog:
    """Run `requests` with no clock: the log's durations are zero, its lookups, misses and evictions exact."""
    parts: list[RunLog] = []
    play(requests, layers, experts, slots, policy, parts.append, cold)
    return joined(parts)


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
) -> None:
    """The same; `ended` takes the log of each request as it ends.

    expert_bytes: of one, 0 where it is not known. sizes: bytes of each expert, int64[L*E], where they differ; `slots`
    are bytes then (rule 19).
    """
    runner = PolicyRunner(policy, Shape(layers, experts), requests, per_access=True)
    residency = runner.residency(slots, sizes)
    last, done = len(requests) - 1, 0
    for ordinal in range(last + 1):
        request, evictions = requests[ordinal], list[int]()
        events = RequestEvents(request, layers, done, per_access=True)
        done += events.count
        runner.begin_request(ordinal)
        rows = _play(runner, residency, events, evictions, sized=sizes is not None)
        runner.end_request()
        residency.end_request(cold and ordinal != last)
        ended(RunLog.of_rows(rows, expert_bytes, evictions, sized=sizes is not None))


def _play(
    runner: PolicyRunner, residency: PolicyResidency, events: RequestEvents, evictions: list[int], sized: bool
) -> list[StepRow]:
    """Run one request; return the row of each step."""
    rows, request, layers = [], events.request, events.layers
    experts, offsets = request.experts.tolist(), request.offsets.tolist()
    moved = residency.counters()[BYTES]
    for step, (phase, tokens) in enumerate(zip(request.phase.tolist(), request.tokens.tolist(), strict=True)):
        hits = 0
        for layer in range(layers):
            heard = None if runner.silent else events.accesses(step, layer)
            for i in range(offsets[step * layers + layer], offsets[step * layers + layer + 1]):
                hit = len(residency.route(request.experts[i : i + 1])[0])
                if heard:
                    runner.observe(next(heard))
                if not hit:
                    _, victim, _ = residency.next_transfer()
                    if sized:
                        evictions += residency.victims()
                    elif victim >= 0:
                        evictions.append(victim)
                    residency.arrived()
                residency.computed(experts[i])
                hits += hit
        lookups = offsets[(step + 1) * layers] - offsets[step * layers]
        moved, before = residency.counters()[BYTES], moved
        rows.append(_row(request.request, phase, tokens, hits, lookups - hits, moved - before))
    return rows


def _row(request: int, phase: int, tokens: int, hits: int, misses: int, moved: int) -> StepRow:
    counted = {"phase": phase, "tokens": tokens, "hits": hits, "misses": misses, "demand_transfers": misses}
    counted["demand_bytes"] = moved
    return StepRow([counted.get(name, 0) for name in COLUMNS], [Share(request, tokens, 0)])
