"""What an event costs `eamc`: the match alone and the whole policy, in compiled code and as the simulator calls them.

A collection of 300 EAMs of a model of the shape of DeepSeek-V2-Lite (26 x 64, top-6), learned from a synthetic trace
of as many requests; further requests are run against it, decode only. The target is the default's: at most BOUND us
an event, compiled. Best of ROUNDS.
"""

import time
from collections.abc import Callable

import numpy as np
from numba import njit

from policies.core.compiled import from_python
from policies.core.events import Events, Routing, event_at, routing_of
from policies.core.policy import Float, Int, Shape
from policies.core.runner import PolicyRunner
from policies.core.spec import parse
from policies.eamc import matching
from policies.eamc.build import build
from policies.eamc.eamc import Matched, Predictor, fetch, observe, observe_and_score
from traces.steps import DECODE, RequestSteps
from traces.synthetic import synthetic
from traces.trace import Trace

LAYERS, EXPERTS, TOP_K = 26, 64, 6
STORED, TOKENS, PLAYED = 300, 40, 5
ROUNDS = 9
BOUND = 5.0

MATCHES = [
    f"source={source}:layers={layers}:cosine={cosine}"
    for source in ("iteration", "request", "both")
    for layers in ("all", "past", "future")
    for cosine in ("flat", "rows")
    if layers != "future" or source == "request"
]
OTHERS = [
    "matches=5",
    "depth=1",
    "threshold=-1",
    "decay=next",
    "keep=most-visited",
]


@njit(nogil=True)
def match(bucket: matching.Bucket, routing: Routing, steps: int, layers: int) -> int:
    """All events of a decode: matched again, nothing else; how often the nearest changed."""
    changes = 0
    for step in range(steps):
        for layer in range(layers):
            changes += matching.observe(bucket, layer == 0, event_at(routing, step, layer, layers, 0), 0)
    return changes


@njit(nogil=True)
def decide(state: Matched, keep: Float, routing: Routing, steps: int, layers: int, ids: Int, priorities: Float) -> None:
    """The same with keep scores and a proposal after every event, default options."""
    for step in range(steps):
        for layer in range(layers):
            event = event_at(routing, step, layer, layers, 0)
            observe_and_score(state, keep, event)
            fetch(state, event, ids, priorities)


def us_an_event(work: Callable[[RequestSteps], object], requests: list[RequestSteps]) -> float:
    work(requests[0])
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for request in requests:
            work(request)
        best = min(best, time.process_time() - began)
    return best * 1e6 / (len(requests) * TOKENS * LAYERS)


def in_python(predictor: Predictor) -> Callable[[RequestSteps], None]:
    """The match as a policy calls it."""
    heard = from_python(observe)

    def work(request: RequestSteps) -> None:
        events = Events.of(request, LAYERS)
        for step in range(TOKENS):
            for layer in range(LAYERS):
                heard(predictor.matched, events.event(step, layer))

    return work


def whole(policy: str, saved: Predictor) -> Callable[[RequestSteps], None]:
    """Observe and propose, as an engine calls them."""
    runner = PolicyRunner(parse(policy), Shape(LAYERS, EXPERTS), [])
    for ours, theirs in zip(runner.retention.predictor.collections, saved.collections, strict=True):
        for entry in theirs.oldest_first:
            ours.add(theirs.eams[entry])
    number = iter(range(1 << 30))

    def work(request: RequestSteps) -> None:
        events = Events.of(request, LAYERS)
        runner.begin_request(next(number))
        for step in range(TOKENS):
            for layer in range(LAYERS):
                event = events.event(step, layer)
                runner.observe(event)
                runner.propose(event)

    return work


def row(policy: str, learned: Trace, requests: list[RequestSteps]) -> str:
    predictor = build(learned, policy)
    bucket = predictor.of_phase(DECODE).bucket
    took = (
        us_an_event(lambda request: match(bucket, routing_of(request), TOKENS, LAYERS), requests),
        us_an_event(in_python(predictor), requests),
        us_an_event(whole(policy, predictor), requests),
    )
    return "  {:5.2f}  {:5.2f}  {:6.2f}".format(*took)


def whole_compiled(policy: str, learned: Trace, requests: list[RequestSteps]) -> float:
    predictor = build(learned, policy)
    total = LAYERS * EXPERTS
    scratch = np.empty(total, np.int64), np.empty(total)

    def work(request: RequestSteps) -> None:
        decide(predictor.matched, np.zeros((5, total)), routing_of(request), TOKENS, LAYERS, *scratch)

    return us_an_event(work, requests)


def main() -> None:
    trace = synthetic(STORED + PLAYED, TOKENS, LAYERS, EXPERTS, TOP_K, seed=1)
    requests = [trace.steps(STORED + i) for i in range(PLAYED)]
    learned = trace.head(STORED)
    default = f"eamc:capacity={STORED}"
    took = whole_compiled(default, learned, requests)
    print(f"eamc at {STORED} EAMs of {LAYERS} x {EXPERTS}, top-{TOP_K}: match, scores and proposal, compiled, take")
    print(f"{took:.2f} us an event (at most {BOUND:g}). By options: the match compiled, called from Python, and with")
    print("scores and proposal from Python:")
    for options in [*MATCHES, *OTHERS]:
        print(f"{row(f'{default}:{options}', learned, requests)}  {options}")


if __name__ == "__main__":
    main()
