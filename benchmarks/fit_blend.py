"""Fit the weights of `eamc-blend`: `python -m benchmarks.fit_blend TRACE TRACE ... [--as-decode]`.

The policy learns as it does in a run, from no weights at all and with a weak prior, on the first half of the requests
of each trace; printed is the mean of what it ends with, as `policies.blend.learning.WEIGHTS`. What decides is judged on
the other half: `python -m benchmarks.blend`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from policies.blend.decisions import Blend, observe, propose
from policies.blend.eamc_blend import BlendOptions, begin, begin_request
from policies.blend.evidence import KINDS
from policies.blend.learning import CURVATURE, CURVED, MODELS
from policies.core.compiled import compiled
from policies.core.events import Routing, event_at, routing_of
from policies.core.policy import Float, Int, Shape
from traces.trace import Trace

WEAK = 3.0
"""Curvature of the log likelihood that the start stands for."""

UNMOVED = 1e12
"""One that no evidence moves."""


@compiled
def _play(own: Blend, routing: Routing, ids: Int, priorities: Float) -> None:
    """Learn a request, with the guesses of the prefetcher."""
    L = own.layers.shape[1]
    for step in range(len(routing.phase)):
        for layer in range(L):
            event = event_at(routing, step, layer, L, 0)
            observe(own, event)
            propose(own, event, ids, priorities)


def leave_out(own: Blend, kinds: Sequence[int]) -> None:
    """Give these kinds of evidence no weight, now and later."""
    for kind in kinds:
        own.learning.weights[:, kind] = 0.0
        own.learning.fits[:MODELS, CURVATURE + kind, kind] = UNMOVED


def fitted(trace: Trace, without: Sequence[int] = ()) -> Float:
    """Return the weights [MODELS, KINDS] that the first half of a trace leads to."""
    shape = Shape(trace.layers, trace.num_experts)
    own = begin(shape, BlendOptions())
    own.learning.weights[:] = 0.0
    own.learning.fits[:MODELS, CURVATURE:] = WEAK * np.eye(KINDS)
    own.learning.biases[CURVED] = np.inf  # layers get none
    leave_out(own, without)
    for i in range((len(trace.requests) + 1) // 2):
        begin_request(own, 0)
        _play(own, routing_of(trace.steps(i)), np.empty(shape.total, np.int64), np.empty(shape.total))
    return own.learning.weights.astype(np.float64)


def fit(traces: Sequence[Trace], without: Sequence[int] = ()) -> Float:
    """Return the mean over traces."""
    mean: Float = np.mean([fitted(trace, without) for trace in traces], axis=0)
    return mean


def main() -> None:
    """Read the command line and print the weights."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_blend", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="folders of traces")
    parser.add_argument("--as-decode", action="store_true", help="run prefills token by token")
    chosen = parser.parse_args()
    traces = [Trace.read(path) for path in chosen.traces]
    for row in (
        fit([t.as_decode() if chosen.as_decode and t.phases != "decode" else t for t in traces]).round(2).tolist()
    ):
        print(f"        {row},")


if __name__ == "__main__":
    main()
