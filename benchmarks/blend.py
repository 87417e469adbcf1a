"""The ablation of `eamc-blend`: `python -m benchmarks.blend TRACE TRACE ... [--as-decode]`.

Every variant differs from the shipped policy in one thing: a kind of evidence is left out, nothing is learned, or
another distance. Those without a kind are fitted again on the first half of the requests of the traces. Each is run
untimed, without prefetch, on the second half, at several cache sizes at once, since what it learns does not depend on
them. Figures are shares of the gap from LRU to Belady closed in hits, in percent, where both are counted untimed.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.fit_blend import UNMOVED, fit, leave_out
from policies.blend import eamc_blend
from policies.blend.decisions import Blend, observe
from policies.blend.evidence import AFTER, FAST, FOLLOWERS, HERE, NEVER, RECENT, REQUEST, SINCE, SLOW
from policies.blend.learning import CURVATURE, CURVED, WEIGHTS
from policies.core.compiled import compiled
from policies.core.events import Routing, event_at, routing_of
from policies.core.policy import Float, Int, Shape
from policies.core.spec import parse
from sim.engines.untimed import count
from sim.loop.requests import Requests
from sim.quantities import parse_cache_size
from traces.trace import Trace

NAMES = {
    "the fast average": [FAST],
    "the slow average": [SLOW],
    "the recent average": [RECENT],
    "the request": [REQUEST],
    "followers": [FOLLOWERS],
    "since": [SINCE],
    "never": [NEVER],
    "neighbours": [*range(AFTER, HERE)],
}


@dataclass(frozen=True)
class Variant:
    """What differs from the policy as shipped."""

    name: str
    without: Sequence[int] = ()  # kinds of evidence
    distance: float = eamc_blend.BlendOptions.distance
    fixed: bool = False  # nothing is learned as the run goes


VARIANTS = [
    Variant("as shipped"),
    *(Variant(f"without {name}", kinds) for name, kinds in NAMES.items()),
    Variant("fixed weights", fixed=True),
    *(Variant(f"distance {x}", distance=x) for x in (0.0, 0.5, 1.0)),
]


@compiled
def _play(own: Blend, routing: Routing, sizes: Int, slots: Int, places: Int, held: Int, hits: Int, serial: int) -> int:
    """Play a request in caches of several sizes at once, which learn as one; the number of the last event.

    slots: [sizes, L*E] experts, of which `held` [sizes] are there; places: [sizes, L*E] their slots, or -1.
    """
    keep, L = own.scores, own.layers.shape[1]
    for step in range(len(routing.phase)):
        for layer in range(L):
            serial += 1
            event = event_at(routing, step, layer, L, serial)
            for s in range(len(sizes)):
                for expert in event.experts:
                    if places[s, expert] >= 0:
                        hits[s] += 1
                        continue
                    slot = held[s]
                    if slot < sizes[s]:
                        held[s] += 1
                    else:
                        slot = 0
                        for other in range(1, sizes[s]):
                            a, b = slots[s, other], slots[s, slot]
                            if keep[a] < keep[b] or (keep[a] == keep[b] and a < b):
                                slot = other
                        places[s, slots[s, slot]] = -1
                    slots[s, slot] = expert
                    places[s, expert] = slot
            observe(own, event)
    return serial


def blended(trace: Trace, sizes: Int, variant: Variant, weights: Float) -> Int:
    """Return the hits of a variant in caches of so many slots, [sizes]."""
    shape = Shape(trace.layers, trace.num_experts)
    own = eamc_blend.begin(shape, eamc_blend.BlendOptions(distance=variant.distance))
    own.learning.weights[:] = weights
    leave_out(own, variant.without)
    if variant.fixed:
        own.learning.fits[:, CURVATURE:] *= UNMOVED
        own.learning.biases[CURVED] = np.inf
    slots, places = np.zeros((len(sizes), shape.total), np.int64), np.full((len(sizes), shape.total), -1)
    held, hits, serial = np.zeros(len(sizes), np.int64), np.zeros(len(sizes), np.int64), 0
    for request in Requests(trace):
        eamc_blend.begin_request(own, 0)
        serial = _play(own, routing_of(request), sizes, slots, places, held, hits, serial)
    return hits


def bound(trace: Trace, policy: str, sizes: Int) -> Int:
    """Hits of another policy, [sizes]."""
    counted = (count(Requests(trace), trace.layers, trace.num_experts, n, parse(policy)) for n in sizes.tolist())
    return np.array([int(log.hits.sum()) for log in counted])


def second_half(trace: Trace, most: int) -> Trace:
    """Its first requests, at most so many."""
    n = len(trace.requests)
    return trace.select(np.arange((n + 1) // 2, min((n + 1) // 2 + most, n)))


def main() -> None:
    """Read the command line; a row for each variant."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blend", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="folders of traces")
    parser.add_argument("--as-decode", action="store_true", help="run prefills token by token")
    parser.add_argument("--cache-sizes", default="10%,25%,50%", help="of all experts")
    parser.add_argument("--requests", type=int, default=10**9, help="at most so many are run of each half")
    parser.add_argument("--only", help="of the variants those whose names begin so")
    chosen = parser.parse_args()
    traces = [Trace.read(path) for path in chosen.traces]
    traces = [t.as_decode() if chosen.as_decode and t.phases != "decode" else t for t in traces]
    played = [second_half(trace, chosen.requests) for trace in traces]
    texts = chosen.cache_sizes.split(",")
    shapes = [(trace.layers, trace.layers * trace.num_experts) for trace in played]
    sizes = [np.array([parse_cache_size(text, all_, None, layers) for text in texts]) for layers, all_ in shapes]
    bounds = [[bound(t, name, n) for name in ("lru", "belady")] for t, n in zip(played, sizes, strict=True)]
    print("second half of", ", ".join(f"{path} at {chosen.cache_sizes}" for path in chosen.traces))
    for variant in VARIANTS:
        if chosen.only and not variant.name.startswith(chosen.only):
            continue
        weights = fit(traces, variant.without) if variant.without else WEIGHTS
        got = [blended(t, n, variant, weights) for t, n in zip(played, sizes, strict=True)]
        closed = [100 * (mine - low) / (high - low) for mine, (low, high) in zip(got, bounds, strict=True)]
        print(f"{variant.name:28}", "   ".join(" ".join(f"{x:5.1f}" for x in shares) for shares in closed), flush=True)


if __name__ == "__main__":
    main()
