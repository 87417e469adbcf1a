"""What an event costs `eamc`: the match alone and the whole policy, in compiled code and as the simulator calls them.

A collection of 300 EAMs of a model of the shape of DeepSeek-V2-Lite (26 x 64, top-6), learned from a synthetic trace
of as many requests; further requests are played against it, decode only. The target is the default's: at most BOUND us
an event, compiled. Best of ROUNDS.
"""

import time
from collections.abc import Callable

import numpy as np
from numba import njit

from policies.core.policy import Event, Float, Int, Shape
from policies.core.runner import Pair
from policies.core.spec import parse
from policies.eamc import matching
from policies.eamc.build import build
from policies.eamc.eamc import Predictor, predict, propose, weigh
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
def match(bucket: matching.Bucket, experts: Int, steps: int, layers: int, top_k: int, counts: Int) -> int:
    """All events of a decode: matched anew, nothing else; how often the nearest changed."""
    changes, first = 0, 0
    for _ in range(steps):
        for layer in range(layers):
            changes += matching.observe(bucket, layer == 0, layer, experts, counts, first, first + top_k)
            first += top_k
    return changes


@njit(nogil=True)
def decide(
    bucket: matching.Bucket,
    experts: Int,
    steps: int,
    layers: int,
    top_k: int,
    counts: Int,
    prediction: tuple[Int, Float, Int, Int],
    decay: Float,
    keep: Float,
    priorities: Float,
) -> None:
    """The same with keep scores and a proposal after every event, default options."""
    eams, ratios, ids, starts = prediction
    first = 0
    for _ in range(steps):
        for layer in range(layers):
            if matching.observe(bucket, layer == 0, layer, experts, counts, first, first + top_k):
                predict(eams, bucket.matched, 0.0, ratios, ids, starts)
                weigh(ratios, 1e-8, decay, keep)
            propose(ratios, ids, starts, layer, layers, 1e-8, priorities)
            first += top_k


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
    collection, event = predictor.of_phase(DECODE), Event(phase=DECODE)

    def work(request: RequestSteps) -> None:
        event.request_experts, event.request_counts = request.experts, request.counts
        for i in range(TOKENS * LAYERS):
            event.layer, event.first, event.last = i % LAYERS, i * TOP_K, (i + 1) * TOP_K
            collection.observe(event, i % LAYERS == 0)

    return work


def whole(policy: str, saved: Predictor) -> Callable[[RequestSteps], None]:
    """Observe and propose, as an engine calls them."""
    pair = Pair(parse(policy), Shape(LAYERS, EXPERTS), [])
    for ours, theirs in zip(pair.retention.predictor.collections, saved.collections, strict=True):
        for entry in theirs.oldest_first:
            ours.add(theirs.eams[entry])
    number = iter(range(1 << 30))

    def work(request: RequestSteps) -> None:
        pair.begin_request(next(number), request)
        for step in range(TOKENS):
            pair.begin_step(step, DECODE)
            for layer in range(LAYERS):
                first = (step * LAYERS + layer) * TOP_K
                pair.observe(layer, first, first + TOP_K)
                pair.propose()

    return work


def row(policy: str, learned: Trace, requests: list[RequestSteps]) -> str:
    predictor = build(learned, policy)
    bucket = predictor.of_phase(DECODE).bucket
    took = (
        us_an_event(lambda request: match(bucket, request.experts, TOKENS, LAYERS, TOP_K, request.counts), requests),
        us_an_event(in_python(predictor), requests),
        us_an_event(whole(policy, predictor), requests),
    )
    return "  {:5.2f}  {:5.2f}  {:6.2f}".format(*took)


def whole_compiled(policy: str, learned: Trace, requests: list[RequestSteps]) -> float:
    predictor = build(learned, policy)
    held, total = predictor.of_phase(DECODE), LAYERS * EXPERTS
    prediction = held.eams, predictor.ratios, predictor.ids, predictor.starts
    scores = np.ones(LAYERS), np.empty(total), np.empty(total)

    def work(request: RequestSteps) -> None:
        decide(held.bucket, request.experts, TOKENS, LAYERS, TOP_K, request.counts, prediction, *scores)

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
