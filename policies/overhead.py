"""What a policy takes for an event, where no table says it: its own calls over the first tokens of a run, timed.

A first pass has the guard on, so that a faulty policy ends with file and line; the passes that count do without, since
the guard is no work of the policy. Each step counts with the shortest time that a pass took for it, as what disturbs
a measurement only makes it longer, less that of a policy that hears of nothing.
"""

from collections.abc import Sequence
from time import perf_counter_ns

import numpy as np

from policies.core.events import Events
from policies.core.policy import Int, Requests, Shape
from policies.core.runner import PolicyRunner
from policies.core.spec import PolicySpec, parse
from traces.steps import DECODE, RequestSteps

EVENTS = 1_000
"""Of a pass, to whole steps."""

PASSES = 5


def measured_us(policy: PolicySpec, shape: Shape, requests: Requests) -> float:
    """Return the mean microseconds in `observe` and `propose` of an event, to three digits; 0 of an oracle.

    Of decoded tokens; of prefills where the first requests have nothing else. Raise PolicyError for what the policy
    raises.
    """
    if policy.oracle:
        return 0.0
    first = _first(requests, shape.layers)
    if PolicyRunner(policy, shape, first, 1.0).silent:
        return 0.0
    own, idle = (_shortest_ns(each, shape, first) for each in (policy, parse("lru")))
    decoded = np.concatenate([each.phase for each in first])[: len(own)] == DECODE
    counted = decoded if decoded.any() else ~decoded
    us = float((own - idle)[counted].mean()) / shape.layers / 1_000
    return float(f"{max(0.0, us):.3g}")


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
            took.append(perf_counter_ns() - began)
        runner.end_request()
    return took
