"""Fit the weights of `eamc-blend`: `python -m benchmarks.fit_blend TRACE TRACE ... [--as-decode]`.

Over the first half of the requests of each trace, at a random share of the events, for all traces together: logistic
regressions of the use of an expert on the evidence, at the end of its layer's pass for the next one, and before a pass
for that; and, of those that the next pass does not use, the least squares of the logarithm of the passes until their
next use (at most HORIZON, so that the rarest do not decide). Prints `policies.blend.learning.WEIGHTS`. What decides is
judged on the other half: `python -m benchmarks.blend`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from policies.blend import tokens
from policies.blend.evidence import (
    AGAIN_HERE,
    AHEAD,
    BLIND,
    HERE,
    KINDS,
    SETTINGS,
    Evidence,
    begin_request,
    learn,
    learn_ahead,
    nothing_known,
    weigh,
    weigh_ahead,
    weigh_here,
)
from policies.blend.learning import CHANCE, CHANCE_BLIND, CONSTANT, HORIZON, LAYER, LAYER_BLIND, STEP, TIME, WEIGHTS
from policies.core.compiled import compiled
from policies.core.policy import Float, Int, Shape
from traces.errors import InputError
from traces.steps import DECODE, RequestSteps
from traces.trace import Trace

SHARE = 0.02
"""Of the events, drawn at random, that are fitted on, both at the end of a pass and before one."""

DEFAULTS = np.array(SETTINGS)

EVIDENCE = {
    CHANCE: (*range(KINDS),),
    CHANCE_BLIND: (*range(BLIND),),
    LAYER: (*range(KINDS), AHEAD, HERE, AGAIN_HERE),
    LAYER_BLIND: (*range(BLIND), AHEAD),
    STEP: (*range(KINDS), HERE, AGAIN_HERE),
    TIME: (*range(BLIND),),
}
"""What each model weighs."""


class Samples(NamedTuple):
    """What there is to fit on in a trace."""

    even: float  # log odds of use of an expert drawn evenly
    after: Float  # [n, KINDS] evidence at the end of a pass
    until: Float  # [n] passes until the next use, at most HORIZON
    before: Float  # [m, CONSTANT] evidence before a pass
    used: Float  # [m] whether it used the expert
    inner: Float  # [m] whether it is not of the first layer


@compiled
def _copy(known: Evidence, layer: int, out: Float) -> None:
    """The layer's evidence, [KINDS, E]."""
    E = out.shape[1]
    for kind in range(KINDS):
        for e in range(E):
            out[kind, e] = known.rows[kind, layer * E + e]


@compiled
def _play(
    known: Evidence,
    p: Float,
    top_k: int,
    phase: Int,
    offsets: Int,
    experts: Int,
    counts: Int,
    token_ids: Int,
    first_token: Int,
    drawn: Int,
    after: Float,
    before: Float,
) -> None:
    """Learn a request; fill after [n, KINDS, E] and before [m, CONSTANT, E] at the events that are drawn for each.

    drawn: [S * L] bits 1, for the evidence at the end, and 2.
    """
    L, n, m = known.after.shape[1], 0, 0
    for step in range(len(phase)):
        decode = phase[step] == DECODE
        last = first_token[step + 1]
        tokens.begin_step(known.ids, 0, token_ids[last - 1 : last], decode)
        for layer in range(L):
            event = step * L + layer
            first, last = offsets[event], offsets[event + 1]
            if drawn[event] & 2:
                _copy(known, layer, before[m])
                before[m, AHEAD, :] = 0.0
                if layer:
                    weigh_ahead(known, p, 0, layer - 1, before[m, AHEAD])
                weigh_here(known, p, 0, layer, top_k, before[m, HERE], before[m, AGAIN_HERE])
                m += 1
            learn(known, p, 0, layer, experts[first:last], counts[first:last], decode, top_k)
            weigh(known, p, 0, layer, top_k, False)
            if layer and decode:
                learn_ahead(known, p, 0, layer)
            if drawn[event] & 1:
                _copy(known, layer, after[n])
                n += 1


def samples(trace: Trace, p: Float = DEFAULTS, seed: int = 0, horizon: int = HORIZON) -> Samples:
    """Return what there is to fit on in the first half of the requests of `trace`. Raises InputError."""
    shape, rng = Shape(trace.layers, trace.num_experts), np.random.default_rng(seed)
    known, L, E = nothing_known(shape), shape.layers, shape.experts
    passes: list[list[Int]] = [[] for _ in range(L)]
    places: list[tuple[int, int]] = []  # layer, and passes of it so far, of each event in `after`
    after, before, used, inner = list[Float](), list[Float](), list[Float](), list[Float]()
    for request in (trace.steps(i) for i in range((len(trace.requests) + 1) // 2)):
        drawn = _drawn(request, L, rng)
        found = np.empty((np.count_nonzero(drawn & 1), KINDS, E)), np.empty((np.count_nonzero(drawn & 2), CONSTANT, E))
        begin_request(known, 0)
        _play(known, p, trace.top_k, *_arrays(request, trace.name), drawn, *found)
        ends = request.offsets.tolist()
        for event, bits in enumerate(drawn.tolist()):
            layer, chosen = event % L, request.experts[ends[event] : ends[event + 1]] - event % L * E
            passes[layer].append(chosen)
            if bits & 1:
                places.append((layer, len(passes[layer])))
            if bits & 2:
                used.append(np.isin(np.arange(E), chosen).astype(float))
                inner.append(np.full(E, float(layer > 0)))
        after.append(found[0])
        before.append(found[1])
    late = [len(passes[layer]) - done < horizon for layer, done in places]
    if all(late) or not used:
        raise InputError(f"{trace.name}: too few decoded tokens to fit on; the first half needs more than {horizon}")
    until = [
        _next_use(passes[layer][done:][:horizon], E, horizon)
        for (layer, done), ends_too_soon in zip(places, late, strict=True)
        if not ends_too_soon
    ]
    return Samples(
        even=float(np.log(trace.top_k / (E - trace.top_k))),
        after=np.concatenate(after)[~np.array(late)].transpose(0, 2, 1).reshape(-1, KINDS),
        until=np.concatenate(until),
        before=np.concatenate(before).transpose(0, 2, 1).reshape(-1, CONSTANT),
        used=np.concatenate(used),
        inner=np.concatenate(inner),
    )


def _drawn(request: RequestSteps, layers: int, rng: np.random.Generator) -> Int:
    """Return which events of a request are fitted on: bits 1 and 2; of a prefill none."""
    decoded = np.repeat(request.phase == DECODE, layers)
    one, two = (decoded & (rng.random(len(decoded)) < SHARE) for _ in range(2))
    return one + 2 * two.astype(np.int64)


def _arrays(request: RequestSteps, name: str) -> tuple[Int, Int, Int, Int, Int, Int]:
    if request.token_ids is None:
        raise InputError(f"{name} holds no ids of tokens: eamc-blend is fitted on traces with them")
    first_token = np.concatenate([[0], np.cumsum(request.tokens)])
    routed = request.offsets, request.experts, request.counts
    return request.phase.astype(np.int64), *routed, request.token_ids, first_token


def _next_use(passes: Sequence[Int], experts: int, horizon: int) -> Float:
    """Passes [E] until each expert is used, `horizon` if it is not."""
    until = np.full(experts, float(horizon))
    for ahead in range(len(passes), 0, -1):
        until[passes[ahead - 1]] = ahead
    return until


def fit_time(kinds: Sequence[int], found: Sequence[Samples]) -> Float:
    """Weights [kinds + 1] of the log passes until the next use, of those that the next pass does not use."""
    rows = [one.after[one.until > 1][:, kinds] for one in found]
    wanted = np.concatenate([np.log(one.until[one.until > 1]) for one in found])
    solution: Float = np.linalg.lstsq(_with_constant(rows), wanted, rcond=None)[0]
    return solution


def fit_chance(rows: Sequence[Float], used: Sequence[Float], even: Sequence[float]) -> Float:
    """Weights [kinds + 1] of the log odds of use over the even ones, by Newton's method."""
    columns, wanted = _with_constant(rows), np.concatenate(used)
    offset = np.concatenate([np.full(len(y), log_odds) for y, log_odds in zip(used, even, strict=True)])
    weights = np.zeros(columns.shape[1])
    for _ in range(30):
        chance = 1.0 / (1.0 + np.exp(-(offset + columns @ weights)))
        curvature = (columns * (chance * (1.0 - chance))[:, None]).T @ columns
        step = np.linalg.lstsq(curvature, columns.T @ (wanted - chance), rcond=None)[0]
        weights += step
        if abs(step).max() < 1e-9:
            break
    return weights


def _with_constant(rows: Sequence[Float]) -> Float:
    together = np.concatenate(rows)
    return np.concatenate([together, np.ones((len(together), 1))], axis=1)


def fit(found: Sequence[Samples], kept: Sequence[int] = range(CONSTANT)) -> Float:
    """Return all weights, [models, places] as `policies.blend.learning` has them, from the kinds of evidence `kept`."""
    weights, even = np.zeros_like(WEIGHTS), [one.even for one in found]
    for model, all_kinds in EVIDENCE.items():
        kinds = [kind for kind in all_kinds if kind in kept]
        if model == TIME:
            fitted = fit_time(kinds, found)
        elif model in (CHANCE, CHANCE_BLIND):
            fitted = fit_chance([one.after[:, kinds] for one in found], [one.until == 1 for one in found], even)
        else:
            rows = [(one.inner > 0) | (model == STEP) for one in found]
            some = [one.before[here][:, kinds] for one, here in zip(found, rows, strict=True)]
            fitted = fit_chance(some, [one.used[here] for one, here in zip(found, rows, strict=True)], even)
        weights[model, [*kinds, CONSTANT]] = fitted
    return weights


def main() -> None:
    """Read the command line and print the weights."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_blend", description=__doc__)
    parser.add_argument("traces", type=Path, nargs="+", help="folders of traces, with ids of tokens")
    parser.add_argument("--as-decode", action="store_true", help="run prefills token by token")
    chosen = parser.parse_args()
    traces = [Trace.read(path, ["token_id"]) for path in chosen.traces]
    found = [samples(t.as_decode() if chosen.as_decode and t.phases != "decode" else t) for t in traces]
    for row in fit(found).round(3).tolist():
        print(f"    {row},")


if __name__ == "__main__":
    main()
