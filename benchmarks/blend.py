"""The search behind `eamc-blend`, and its ablation: `python -m benchmarks.blend TRACE TRACE ... [--as-decode]`.

Every variant differs from the shipped policy in one thing: a setting, or a kind of evidence left out. Each is fitted
again on the first half of the requests of the traces and run untimed, without prefetch, on both halves. The choice
between settings is made on the first half; the second only says what it was worth. Figures are shares of the gap from
LRU to Belady closed in hits, in percent.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from policies.blend import eamc_blend, fit
from policies.blend.evidence import AHEAD_RATE, EPS, FOLLOW_RATE, PRIOR_TOKENS, SETTINGS
from policies.core.policy import Float
from policies.core.spec import parse
from sim.engines.untimed import count
from sim.quantities import parse_cache_size
from sim.sweeps.setup import Requests
from traces.trace import Trace

KIND_NAMES = ("fast average", "slow average", "request", "followers", "since")


@dataclass(frozen=True)
class Variant:
    """What differs from the policy as shipped."""

    name: str
    settings: dict[int, float] = field(default_factory=dict)  # place in SETTINGS: value
    without: tuple[int, ...] = ()  # kinds of evidence
    distance: float | None = None
    horizon: int = fit.HORIZON


VARIANTS = [
    Variant("as shipped"),
    *[Variant(f"without {name}", without=(kind,)) for kind, name in enumerate(KIND_NAMES)],
    Variant("without either average", without=(0, 1)),
    Variant("without averages and since", without=(0, 1, 4)),
    Variant("without distance", distance=0.0),
    *[Variant(f"distance {x}", distance=x) for x in (0.15, 0.6)],
    *[Variant(f"rates {a}, {b}", {0: a, 1: b}) for a, b in ((0.15, 0.02), (0.1, 0.01), (0.02, 0.005), (0.01, 0.001))],
    *[Variant(f"follow rate {x}", {FOLLOW_RATE: x}) for x in (0.01, 0.05)],
    *[Variant(f"prior of {x} tokens", {PRIOR_TOKENS: x}) for x in (1.0, 16.0)],
    *[Variant(f"eps {x}", {EPS: x}) for x in (0.05, 0.4)],
    *[Variant(f"horizon {x}", horizon=x) for x in (64, 1024)],
]

assert AHEAD_RATE not in {place for variant in VARIANTS for place in variant.settings}  # it has no part in retention


@contextmanager
def parameters(p: Float) -> Iterator[None]:
    """The policy with these parameters in place of its own."""
    own = eamc_blend.PARAMETERS.copy()
    eamc_blend.PARAMETERS[:] = p
    try:
        yield
    finally:
        eamc_blend.PARAMETERS[:] = own


def fitted(variant: Variant, traces: Sequence[Trace]) -> Float:
    """All parameters of the variant, its weights fitted on the first halves of the traces."""
    settings = np.array(SETTINGS)
    for place, value in variant.settings.items():
        settings[place] = value
    found = [fit.samples(trace, settings, horizon=variant.horizon) for trace in traces]
    kept = [kind for kind in range(len(KIND_NAMES)) if kind not in variant.without]
    weights = np.zeros(len(KIND_NAMES))
    weights[kept] = fit.fit_keep([x[:, kept] for x, *_ in found], [y for _, y, *_ in found])
    return np.concatenate([settings, weights, eamc_blend.AHEAD_WEIGHTS])


def hits(trace: Trace, policy: str, slots: int) -> int:
    """Of all lookups."""
    log = count(Requests(trace), trace.layers, trace.num_experts, slots, parse(policy))
    return int(log.hits.sum())


def halves(trace: Trace, most: int) -> list[Trace]:
    """At most `most` requests of each half, the first ones."""
    n = len(trace.requests)
    middle = (n + 1) // 2
    return [trace.select(np.arange(a, min(a + most, b))) for a, b in ((0, middle), (middle, n))]


def main() -> None:
    """Read the command line; a row for each variant."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.blend", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="folders of traces")
    parser.add_argument("--as-decode", action="store_true", help="run prefills token by token")
    parser.add_argument("--cache-size", default="25%", help="of all experts")
    parser.add_argument("--requests", type=int, default=10**9, help="at most so many are run of each half")
    chosen = parser.parse_args()
    traces = [Trace.read(path) for path in chosen.traces]
    traces = [t.as_decode() if chosen.as_decode and t.phases != "decode" else t for t in traces]
    played = [half for trace in traces for half in halves(trace, chosen.requests)]
    sizes = [parse_cache_size(chosen.cache_size, t.layers * t.num_experts, None) for t in played]
    bounds = [[hits(t, name, n) for name in ("lru", "belady")] for t, n in zip(played, sizes, strict=True)]
    print("first and second half of", ", ".join(str(path) for path in chosen.traces))
    for variant in VARIANTS:
        p = fitted(variant, traces)
        distance = eamc_blend.BlendOptions.distance if variant.distance is None else variant.distance
        with parameters(p):
            got = [hits(t, f"eamc-blend:distance={distance}+none", n) for t, n in zip(played, sizes, strict=True)]
        closed = [100 * (mine - low) / (high - low) for mine, (low, high) in zip(got, bounds, strict=True)]
        weights = p[eamc_blend.KEEP : eamc_blend.FETCH].round(3).tolist()
        print(f"{variant.name:28}", " ".join(f"{share:6.1f}" for share in closed), " ", weights, flush=True)


if __name__ == "__main__":
    main()
