"""Fit the weights of `eamc-blend`: `python -m policies.blend_fit TRACE TRACE ... [--as-decode]`.

Least squares of the logarithm of the passes until an expert's next use (at most HORIZON, so that the rarest do not
decide) on the evidence at the end of each pass, over the first half of the requests of each trace, each trace with a
level of its own. What decides is judged on the other half, by `moe-sim sweep --untimed`.

What was tried on requests of gpt-oss-20b and DeepSeek-V2-Lite and left out, in points of the gap from LRU to Belady,
untimed at 25% (experiments of November 2026, whose code is not kept): the nearest EAM of past requests and the mean of
the five nearest (no gain beside what follows what), the time since the last use, the run's popularity and rates of 0.7,
0.35 and 0.06 a pass (together under half a point), the next layers' experts by what the layers before chose (under one
point: what comes at once is kept anyway), fitting the chance of use at the next pass instead of the time until it (two
to four points less), and boosted trees on all of these (about one point more).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from policies.contract import Float, Int, Shape
from policies.eamc_blend import FEATURES, new_evidence, observe
from traces.steps import DECODE
from traces.trace import Trace

HORIZON = 64
"""Passes: a next use further away counts as this."""

SHARE = 0.02
"""Of the passes of a layer, drawn at random, that are fitted on."""


def samples(trace: Trace, seed: int = 0) -> tuple[Float, Float]:
    """Evidence [n, FEATURES] and log passes until the next use [n] of experts of the first half of the requests."""
    shape, rng = Shape(trace.layers, trace.num_experts), np.random.default_rng(seed)
    requests = [trace.steps(i) for i in range((len(trace.requests) + 1) // 2)]
    evidence, keep = new_evidence(shape), np.zeros((3, shape.total))
    features, found, wanted = np.empty((shape.experts, FEATURES)), [], []
    passes: list[list[Int]] = [[] for _ in range(shape.layers)]
    drawn: list[tuple[int, int, Float]] = []
    top_k = trace.top_k
    for request in requests:
        evidence[3][0] = 0
        for step, phase in enumerate(request.phase.tolist()):
            for layer in range(shape.layers):
                first, last = request.offsets[step * shape.layers + layer :][:2].tolist()
                event, decode = (request.experts, request.counts, first, last), phase == DECODE
                observe(evidence, features, keep, layer, event, decode, True, top_k, shape.experts - 1, 0.0)
                passes[layer].append(request.experts[first:last] - layer * shape.experts)
                if rng.random() < SHARE:
                    drawn.append((layer, len(passes[layer]), features.copy()))
    for layer, done, seen in drawn:
        next_use = np.full(shape.experts, HORIZON)
        for ahead in range(min(HORIZON, len(passes[layer]) - done), 0, -1):
            next_use[passes[layer][done + ahead - 1]] = ahead
        if len(passes[layer]) - done >= HORIZON:
            found.append(seen)
            wanted.append(np.log(next_use))
    return np.concatenate(found), np.concatenate(wanted)


def fit(traces: Sequence[Trace]) -> Float:
    """The weights [FEATURES] of log passes until the next use, less their sign: what is used soon is worth more."""
    found, wanted = zip(*map(samples, traces), strict=True)
    centred = [y - y.mean() for y in wanted]
    ones = [np.ones((len(x), 1)) for x in found]
    columns = np.concatenate([np.concatenate(found), np.concatenate(ones)], axis=1)
    solution: Float = np.linalg.lstsq(columns, np.concatenate(centred), rcond=None)[0]
    return -solution[:FEATURES]


def main() -> None:
    """Read the command line and print the weights."""
    parser = argparse.ArgumentParser(prog="python -m policies.blend_fit", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="folders of traces")
    parser.add_argument("--as-decode", action="store_true", help="play prefills token by token")
    chosen = parser.parse_args()
    traces = [Trace.read(path) for path in chosen.traces]
    print(fit([t.as_decode() if chosen.as_decode and t.phases != "decode" else t for t in traces]).round(3).tolist())


if __name__ == "__main__":
    main()
