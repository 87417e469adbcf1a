"""What a policy takes for an event, where no table says it: its own calls over the first tokens of a run, timed.

A first pass has the guard on, so that a faulty policy ends with file and line; the passes that count do without. Each
step counts with the shortest time of a pass for it, less that of a policy that hears of nothing. A policy that names
its victims has a cache of a quarter of the experts beside it, whose own time does not count.
"""

import gc
import tracemalloc
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from policies.core.events import Events
from policies.core.guard import OF_VICTIMS
from policies.core.policy import Event, Int, Requests, ScorePolicy, Shape
from policies.core.residency import BLOCKED
from policies.core.runner import PolicyRunner
from policies.core.spec import PolicySpec, parse
from policies.expert_cache import ExpertCache
from traces.steps import DECODE, RequestSteps

EVENTS = 1_000
"""Of a pass, to whole steps."""

PASSES = 5


def measured_us(policy: PolicySpec, shape: Shape, requests: Requests) -> float:
    """Return the mean microseconds of an event in `observe`, `propose`, `victim` and the other calls about victims, to
    three digits; 0 of an oracle.

    Of decoded tokens; of prefills where the first requests have nothing else. Raise PolicyError for what the policy
    raises.
    """
    if policy.oracle:
        return 0.0
    first = _first(requests, shape.layers)
    runner = PolicyRunner(policy, shape, first, 1.0)
    if runner.silent and isinstance(runner.retention, ScorePolicy):
        return 0.0
    own, idle = (_shortest_ns(each, shape, first) for each in (policy, parse("lru")))
    decoded = np.concatenate([each.phase for each in first])[: len(own)] == DECODE
    counted = decoded if decoded.any() else ~decoded
    us = float((own - idle)[counted].mean()) / shape.layers / 1_000
    return float(f"{max(0.0, us):.3g}")


def measured_bytes(policy: PolicySpec, shape: Shape, requests: Requests) -> int:
    """Return the bytes that a policy holds beyond what LRU does, with a quarter of the experts cached; 0 of an oracle.

    Compiled policies allocate when they are made whatever they will fill; of others it is what EVENTS events have left.
    """
    if policy.oracle:
        return 0
    first = _first(requests, shape.layers)
    lru, own = (_held_bytes(each, shape, first) for each in (parse("lru"), policy))
    return max(0, own - lru)


def _held_bytes(policy: PolicySpec, shape: Shape, requests: Requests) -> int:
    _cache(policy, shape, requests)  # what is imported or compiled for it stays in memory too
    gc.collect()
    tracemalloc.start()
    try:
        cache = _cache(policy, shape, requests)
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
        del cache
    finally:
        tracemalloc.stop()
    return held


def _cache(policy: PolicySpec, shape: Shape, requests: Requests) -> ExpertCache:
    """Return a cache under the policy; of one that is not compiled after EVENTS events, or all, in a request."""
    cache = ExpertCache(policy, shape.layers, shape.experts, _slots(shape))
    left = 0 if policy.compiled else EVENTS
    for ordinal, request in enumerate(requests):
        events = Events.of(request, shape.layers)
        if ordinal:
            cache.end_request()
        cache.begin_request()
        for step in range(min(len(request.phase), -(-left // shape.layers))):
            cache.begin_step()
            for layer in range(shape.layers):
                event = events.event(step, layer)
                cache.route(layer, event.experts - layer * shape.experts, event.counts)
        left -= shape.layers * len(request.phase)
    return cache


def _slots(shape: Shape) -> int:
    return max(shape.layers, shape.total // 4)


def _first(requests: Requests, layers: int) -> Requests:
    """Return the first requests, as many as hold EVENTS events."""
    found, events = list[RequestSteps](), 0
    for request in requests:
        found.append(request)
        events += layers * len(request.phase)
        if events >= EVENTS:
            break
    return found


def _shortest_ns(policy: PolicySpec, shape: Shape, requests: Requests) -> Int:
    """Return of each step the shortest time of all its events, int64[steps]."""
    _pass_ns(PolicyRunner(policy, shape, requests, 1.0), requests)
    runners = (PolicyRunner(policy, shape, requests, 1.0, guarded=False) for _ in range(PASSES))
    shortest: Int = np.min([_pass_ns(runner, requests) for runner in runners], axis=0)
    return shortest


def _pass_ns(runner: PolicyRunner, requests: Requests) -> Sequence[int]:
    """Run EVENTS events, or all; return what those of each step took."""
    took, before = list[int](), 0
    victims = None if isinstance(runner.retention, ScorePolicy) else _Victims(runner)
    for ordinal, request in enumerate(requests):
        events = Events.of(request, runner.shape.layers, before)
        before += events.count
        runner.begin_request(ordinal)
        for step in range(min(len(request.phase), -(-EVENTS // events.layers) - len(took))):
            start = [events.start(step)] if runner.at_start else []
            made = [events.event(step, layer) for layer in range(events.layers)]
            began = perf_counter_ns()
            for event in start:
                runner.propose(event)
            for event in made:
                runner.observe(event)
                runner.propose(event)
                began += 0 if victims is None else victims.cache_ns(event)
            took.append(perf_counter_ns() - began)
        runner.end_request()
    return took


class _Victims:
    """A cache whose policy names its victims, and the time that the policy takes for that."""

    def __init__(self, runner: PolicyRunner) -> None:
        self._spent = 0
        self._residency = runner.residency(_slots(runner.shape))
        for name in OF_VICTIMS:
            setattr(runner.retention, name, self._timed(getattr(runner.retention, name)))

    def cache_ns(self, event: Event) -> int:
        """Look up and load the experts of an event; return the nanoseconds without those in calls of the policy."""
        began, before, waiting = perf_counter_ns(), self._spent, event.experts.tolist()
        self._residency.route(event.experts)
        while (expert := self._residency.next_transfer()[0]) >= 0 or (expert == BLOCKED and waiting):
            if expert == BLOCKED:
                self._residency.computed(waiting.pop(0))
            else:
                self._residency.arrived()
        for expert in waiting:
            self._residency.computed(expert)
        return perf_counter_ns() - began - (self._spent - before)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = perf_counter_ns()
            answer = call(*given)
            self._spent += perf_counter_ns() - began
            return answer

        return timed
