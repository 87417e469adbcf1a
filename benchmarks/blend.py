"""The search behind `eamc-blend`, and its ablation: `python -m benchmarks.blend TRACE TRACE ... [--as-decode]`.

Every variant differs from the shipped policy in one thing: a setting, or a kind of evidence left out. Each is fitted
again on the first half of the requests of the traces and run untimed, without prefetch, on the second, at several
cache sizes at once, since what it learns does not depend on them; a layer is scored with its whole event, which gives
up to a quarter of a point more than `--untimed`, which reports experts one by one. Figures are shares of the gap from
LRU to Belady closed in hits, in percent, where both bounds are counted untimed.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import fit_blend as fit
from policies.blend import eamc_blend
from policies.blend.decisions import PARAMETERS, Blend, observe
from policies.blend.evidence import AGAIN, EPS, EPS_IDS, FOLLOW_RATE, KINDS, NEXT, PRIOR_PASSES, PRIOR_TOKENS, SETTINGS
from policies.blend.learning import CONSTANT, HORIZON, PLACES, PRIOR, WEIGHTS
from policies.core.compiled import compiled
from policies.core.events import Routing, event_at, routing_of
from policies.core.policy import Float, Int, Shape
from policies.core.spec import parse
from sim.engines.untimed import count
from sim.loop.requests import Requests
from sim.quantities import parse_cache_size
from traces.trace import Trace

KIND_NAMES = ("fast average", "slow average", "request", "followers", "second followers", "since", "next", "again")

assert len(KIND_NAMES) == KINDS


UNMOVED = 1e12
"""A prior that no evidence moves."""


@dataclass(frozen=True)
class Variant:
    """What differs from the policy as shipped."""

    name: str
    settings: dict[int, float] = field(default_factory=dict)  # place in SETTINGS: value
    without: tuple[int, ...] = ()  # kinds of evidence
    distance: float = eamc_blend.BlendOptions.distance
    horizon: int = HORIZON
    fixed: bool = False  # nothing is learned as the run goes


VARIANTS = [
    Variant("as shipped"),
    *[Variant(f"without {name}", without=(kind,)) for kind, name in enumerate(KIND_NAMES)],
    Variant("without ids of tokens", without=(NEXT, AGAIN)),
    Variant("fixed weights", fixed=True),
    Variant("without distance", distance=0.0),
    *[Variant(f"distance {x}", distance=x) for x in (0.5, 1.0)],
    *[Variant(f"rates {a}, {b}", {0: a, 1: b}) for a, b in ((0.1, 0.01), (0.03, 0.003), (0.01, 0.001))],
    *[Variant(f"follow rate {x}", {FOLLOW_RATE: x}) for x in (0.01, 0.05)],
    *[Variant(f"prior of {x} tokens", {PRIOR_TOKENS: x}) for x in (1.0, 16.0)],
    *[Variant(f"prior of {x} passes", {PRIOR_PASSES: x}) for x in (1.0, 16.0)],
    *[Variant(f"eps {x}", {EPS: x, EPS_IDS: x}) for x in (0.05, 0.2)],
    *[Variant(f"horizon {x}", horizon=x) for x in (32, 256)],
]


@contextmanager
def parameters(settings: Float, weights: Float, without: Sequence[int]) -> Iterator[None]:
    """The policy with these settings and weights in place of its own; it does not learn those of what is left out."""
    own = PARAMETERS.copy(), WEIGHTS.copy(), PRIOR.copy()
    PARAMETERS[:], WEIGHTS[:], PRIOR[list(without)] = settings, weights, UNMOVED
    try:
        yield
    finally:
        PARAMETERS[:], WEIGHTS[:], PRIOR[:] = own


def fitted(variant: Variant, traces: Sequence[Trace]) -> tuple[Float, Float]:
    """The settings of the variant, and its weights, fitted on the first halves of the traces."""
    settings = np.array(SETTINGS)
    for place, value in variant.settings.items():
        settings[place] = value
    kept = [kind for kind in range(CONSTANT) if kind not in variant.without]
    return settings, fit.fit([fit.samples(trace, settings, horizon=variant.horizon) for trace in traces], kept)


@compiled
def _play(own: Blend, routing: Routing, sizes: Int, slots: Int, places: Int, held: Int, hits: Int, serial: int) -> int:
    """Play a request in caches of several sizes at once, which learn as one; the number of the last event.

    slots: [sizes, L*E] experts, of which `held` [sizes] are there; places: [sizes, L*E] their slots, or -1.
    """
    keep, L = own.keep[0], own.known.after.shape[1]
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


def blended(trace: Trace, sizes: Int, distance: float) -> Int:
    """Hits of `eamc-blend` in caches of so many slots, [sizes]."""
    shape = Shape(trace.layers, trace.num_experts)
    own = eamc_blend.begin(shape, eamc_blend.BlendOptions(distance=distance))
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
    parser.add_argument("traces", type=Path, nargs="+", help="folders of traces, with ids of tokens")
    parser.add_argument("--as-decode", action="store_true", help="run prefills token by token")
    parser.add_argument("--cache-sizes", default="10%,25%,50%", help="of all experts")
    parser.add_argument("--requests", type=int, default=10**9, help="at most so many are run of each half")
    parser.add_argument("--only", help="of the variants those whose names begin so")
    chosen = parser.parse_args()
    traces = [Trace.read(path, ["token_id"]) for path in chosen.traces]
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
        shipped = np.array(SETTINGS), WEIGHTS.copy()
        found = shipped if variant.name == "as shipped" else fitted(variant, traces)
        with parameters(*found, range(PLACES) if variant.fixed else variant.without):
            got = [blended(t, n, variant.distance) for t, n in zip(played, sizes, strict=True)]
        closed = [100 * (mine - low) / (high - low) for mine, (low, high) in zip(got, bounds, strict=True)]
        print(f"{variant.name:28}", "   ".join(" ".join(f"{x:5.1f}" for x in shares) for shares in closed), flush=True)


if __name__ == "__main__":
    main()
