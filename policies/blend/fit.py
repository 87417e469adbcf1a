"""Fit the weights of `eamc-blend`: `python -m policies.blend.fit TRACE TRACE ... [--as-decode]`.

Over the first half of the requests of each trace, at a random share of the events: WEIGHTS are the least squares of
the logarithm of the passes until an expert's next use (at most HORIZON, so that the rarest do not decide) on the
evidence at the end of its layer's pass, each trace with a level of its own; AHEAD_WEIGHTS are the logistic regression
of its use in the next layer's pass. What decides is judged on the other half: `python -m benchmarks.blend`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from policies.blend.evidence import KINDS, SETTINGS, begin_request, learn, learn_ahead, nothing_known, weigh_ahead
from policies.core.policy import Float, Int, Shape
from traces.errors import InputError
from traces.steps import DECODE
from traces.trace import Trace

HORIZON = 256
"""Passes: a next use further away counts as this."""

SHARE = 0.02
"""Of the events, drawn at random, that are fitted on."""

DEFAULTS = np.array(SETTINGS)


def samples(
    trace: Trace, p: Float = DEFAULTS, seed: int = 0, horizon: int = HORIZON
) -> tuple[Float, Float, Float, Float]:
    """What there is to fit on in the first half of the requests of `trace`.

    Evidence [n, KINDS] at the end of a pass and log passes until the next use [n]; evidence [m, KINDS + 1], AHEAD last,
    before a pass and whether it used the expert [m], 0 or 1.
    """
    shape, rng = Shape(trace.layers, trace.num_experts), np.random.default_rng(seed)
    known, E = nothing_known(shape), shape.experts

    def evidence(layer: int) -> Float:
        return known.rows[:KINDS, layer * E : (layer + 1) * E]

    passes: list[list[Int]] = [[] for _ in range(shape.layers)]
    drawn: list[tuple[int, int, Float]] = []
    before: list[Float] = []
    used: list[Float] = []
    for request in (trace.steps(i) for i in range((len(trace.requests) + 1) // 2)):
        begin_request(known, 0)
        for step, phase in enumerate(request.phase.tolist()):
            for layer in range(shape.layers):
                first, last = request.offsets[step * shape.layers + layer :][:2].tolist()
                chosen = request.experts[first:last] - layer * E
                if layer and phase == DECODE and rng.random() < SHARE:
                    ahead = np.empty(E)
                    weigh_ahead(known, p, 0, layer - 1, ahead)
                    before.append(np.concatenate([evidence(layer), ahead[None]]).T)
                    used.append(np.isin(np.arange(E), chosen).astype(float))
                event = request.experts[first:last], request.counts[first:last], phase == DECODE, True
                learn(known, p, 0, layer, *event, trace.top_k)
                if layer and phase == DECODE:
                    learn_ahead(known, p, 0, layer)
                passes[layer].append(chosen)
                if rng.random() < SHARE:
                    drawn.append((layer, len(passes[layer]), evidence(layer).T.copy()))
    drawn = [(layer, done, seen) for layer, done, seen in drawn if len(passes[layer]) - done >= horizon]
    if not drawn or not before:
        raise InputError(f"{trace.name}: too few decoded tokens to fit on; the first half needs more than {horizon}")
    wanted = [np.log(_next_use(passes[layer][done:][:horizon], E, horizon)) for layer, done, _ in drawn]
    return (
        np.concatenate([seen for _, _, seen in drawn]),
        np.concatenate(wanted),
        np.concatenate(before),
        np.concatenate(used),
    )


def _next_use(passes: Sequence[Int], experts: int, horizon: int) -> Float:
    """Passes [E] until each expert is used, `horizon` if it is not."""
    until = np.full(experts, float(horizon))
    for ahead in range(len(passes), 0, -1):
        until[passes[ahead - 1]] = ahead
    return until


def fit_keep(found: Sequence[Float], wanted: Sequence[Float]) -> Float:
    """Weights [KINDS] of log passes until the next use, less their sign: what is used soon is worth more."""
    centred = np.concatenate([y - y.mean() for y in wanted])
    evidence = np.concatenate(found)
    columns = np.concatenate([evidence, np.ones((len(evidence), 1))], axis=1)
    solution: Float = np.linalg.lstsq(columns, centred, rcond=None)[0]
    return -solution[:-1]


def fit_ahead(found: Sequence[Float], used: Sequence[Float]) -> Float:
    """Weights [KINDS + 2] of the log odds of use in the next pass over the even ones, by Newton's method."""
    columns = np.concatenate([np.concatenate(found), np.ones((sum(map(len, found)), 1))], axis=1)
    even = np.concatenate([np.full(len(y), np.log(y.mean() / (1 - y.mean()))) for y in used])
    wanted, weights = np.concatenate(used), np.zeros(columns.shape[1])
    for _ in range(30):
        chance = 1.0 / (1.0 + np.exp(-(even + columns @ weights)))
        curvature = (columns * (chance * (1.0 - chance))[:, None]).T @ columns
        step = np.linalg.lstsq(curvature, columns.T @ (wanted - chance), rcond=None)[0]
        weights += step
        if abs(step).max() < 1e-9:
            break
    return weights


def main() -> None:
    """Read the command line and print the weights."""
    parser = argparse.ArgumentParser(prog="python -m policies.blend.fit", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="folders of traces")
    parser.add_argument("--as-decode", action="store_true", help="run prefills token by token")
    chosen = parser.parse_args()
    traces = [Trace.read(path) for path in chosen.traces]
    found = [samples(t.as_decode() if chosen.as_decode and t.phases != "decode" else t) for t in traces]
    evidence, wanted, before, used = (list(column) for column in zip(*found, strict=True))
    print("WEIGHTS", fit_keep(evidence, wanted).round(3).tolist())
    print("AHEAD_WEIGHTS", fit_ahead(before, used).round(3).tolist())


if __name__ == "__main__":
    main()
