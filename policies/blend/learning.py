"""Chances of use that learn from the run: logistic regressions on the evidence, which start from WEIGHTS.

A model for each span of passes says how likely its layer uses an expert again in this span, if it has not done so
before; and one, of a layer that comes next in the pass at hand, how likely this pass uses it (PASS). The weights that
ship were fitted on several models together. What a run's own model and requests make of the evidence differs. So one
event in THIN is recorded, with its evidence, and each model learns from it once its span is over. Every few
steps each takes one of Newton's method on the log likelihood, where WEIGHTS count as observations of weight PRIOR: the
logistic regression of Bayes with a normal prior, one batch at a time (Spiegelhalter and Lauritzen 1990).
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.blend.evidence import CONSTANT, HERE, KINDS
from policies.blend.neighbours import Neighbours
from policies.blend.series import near_chance
from policies.core.compiled import apart, compiled
from policies.core.policy import Float, Int, Shape, Single

UNIT = np.float32(4096.0)
"""Evidence is below 8 (`near_log`), and fits 16 bits."""

ENDS = (0, 1, 2, 4, 8, 16, 32, 64)
"""A span ends with so many passes, and begins after the one before it."""

PASS = len(ENDS) - 1
MODELS = PASS + 1

THIN = 8
HORIZON = ENDS[-1] + 1

WEIGHTS = np.array(
    [
        [0.09, -0.76, 0.07, 0.14, 0.6, -0.12, 0.9, 0.54, 0.04, 0.0, -0.02, 0.0, 0.27],
        [0.16, -0.36, 0.01, 0.21, 0.17, -0.1, -1.22, 0.01, 0.45, 0.08, -0.02, 0.0, 0.13],
        [0.16, -0.08, 0.08, 0.06, 0.06, -0.06, 0.98, -0.04, 0.01, 0.45, 0.05, 0.0, 0.76],
        [0.46, -0.24, -0.02, 0.13, 0.02, -0.14, 0.86, -0.03, -0.02, 0.02, 0.42, 0.0, 1.57],
        [0.1, 0.12, 0.36, 0.2, 0.05, 0.0, 0.95, -0.03, 0.02, -0.03, 0.06, 0.0, 2.13],
        [0.07, 0.21, 0.24, -0.2, 0.1, -0.12, 0.24, 0.02, -0.02, 0.03, 0.05, 0.0, 2.72],
        [0.02, 0.06, -0.1, 0.23, -0.23, -0.25, -0.02, 0.09, 0.02, -0.08, 0.11, 0.0, 2.88],
        [0.12, -0.8, -0.02, 0.08, 0.37, -0.22, -0.05, -0.01, 0.02, 0.02, -0.01, 0.79, 0.34],
    ]
)
"""[models, kinds], as `python -m benchmarks.fit_blend` prints them: log odds over those of an expert drawn evenly."""

PRIOR = np.full(KINDS, 30.0)
"""Curvature of the log likelihood that WEIGHTS stand for, by kind; a row of evidence adds a tenth or so."""

GRADIENT, CURVATURE = 0, 1
"""Rows of `Learning.fits`, from which each begins."""

LAYER, NUMBER = range(2)
"""Of what is asked: the layer, or NONE, and the number of the pass."""

PLACE, SERIAL = range(2)
"""Rows of `Learning.leaders`."""

APART = 4
"""Decoded steps between two of a model's."""

SAMPLED = 8
"""Of the experts of an event one in so many adds to the curvature, for all of them."""

BIAS, CURVED = range(2)
"""Rows of `Learning.biases`."""

BIAS_PRIOR = 50.0

NONE = -1
USED, UNUSED, EARLIER = np.float32(1.0), np.float32(0.0), np.float32(-1.0)

ZERO, ONE = np.float32(0.0), np.float32(1.0)


class Learning(NamedTuple):
    """What the models have learned, and what they have recorded."""

    weights: Single  # [MODELS, KINDS]
    fits: Float  # [MODELS + 1, 1 + KINDS, KINDS] gradient and curvature; the last is scratch
    biases: Single  # [2, MODELS, L] what a layer adds to the log odds; the curvature of the log likelihood of that
    records: NDArray[np.int16]  # [HORIZON, ceil(L / THIN), KINDS, E] evidence by decoded step, in parts of 1 / UNIT
    recorded: Int  # [HORIZON, ceil(L / THIN)] the step, from 1
    leaders: Int  # [2, HORIZON] by decoded step the place of its first request's pass, and the number of that
    question: Single  # [KINDS, E] evidence that PASS is asked to judge
    asked: Int  # [2]
    recalled: Single  # [KINDS, E] scratch
    labels: Single  # [E] scratch
    scratch: Single  # [3, E]


def nothing_learned(shape: Shape) -> Learning:
    L, E, fits = shape.layers, shape.experts, np.zeros((MODELS + 1, 1 + KINDS, KINDS))
    fits[:MODELS, CURVATURE:] = np.diag(PRIOR)
    rows = -(-L // THIN)
    return Learning(
        weights=WEIGHTS.astype(np.float32),
        fits=fits,
        biases=np.stack([np.zeros((MODELS, L), np.float32), np.full((MODELS, L), BIAS_PRIOR, np.float32)]),
        records=np.zeros((HORIZON, rows, KINDS, E), np.int16),
        recorded=np.zeros((HORIZON, rows), np.int64),
        leaders=np.zeros((2, HORIZON), np.int64),
        question=np.zeros((KINDS, E), np.float32),
        asked=np.full(2, NONE),
        recalled=np.zeros((KINDS, E), np.float32),
        labels=np.zeros(E, np.float32),
        scratch=np.zeros((3, E), np.float32),
    )


@compiled
def log_odds(own: Learning, model: int, layer: int, evidence: Single, even: float, out: Single) -> None:
    """out[e]: the model's, by the layer's evidence [>= KINDS, E]. even: those of an expert drawn evenly."""
    weights, E = own.weights[model], len(out)
    constant = np.float32(even) + weights[CONSTANT] + own.biases[BIAS, model, layer]
    for e in range(E):
        out[e] = constant
    for kind in range(0, CONSTANT, 4):  # four at a time, as loads and stores take longer than sums
        a, b, c, d = evidence[kind], evidence[kind + 1], evidence[kind + 2], evidence[kind + 3]
        of_a, of_b, of_c, of_d = weights[kind], weights[kind + 1], weights[kind + 2], weights[kind + 3]
        for e in range(E):
            out[e] += of_a * a[e] + of_b * b[e] + of_c * c[e] + of_d * d[e]


@compiled
def _copy(evidence: Any, kept: Any, unit: np.float32) -> None:
    for kind in range(KINDS):
        row, copied = evidence[kind], kept[kind]
        for e in range(copied.shape[0]):
            copied[e] = row[e] * unit


@apart
@compiled
def learn(own: Learning, passes: Neighbours, layer: int, step: int, evidence: Single, even: float) -> None:
    """The layer has routed in decoded step number `step`: learn from what was recorded, and record its evidence.

    evidence: [KINDS, E] of which HERE does not count. even: log odds of use of an expert drawn evenly.
    """
    for span in range(PASS):
        before = step - ENDS[span + 1]
        if before > 0 and (layer + before) % THIN == 0:
            place = before % HORIZON
            if own.recorded[place, layer // THIN] == before and _label(own, passes, layer, before, span):
                _copy(own.records[place, layer // THIN], own.recalled, ONE / UNIT)
                _settle(own, span, layer, step, own.recalled, even)
    if (layer + step) % THIN == 0:
        _copy(evidence, own.records[step % HORIZON, layer // THIN], UNIT)
        own.recorded[step % HORIZON, layer // THIN] = step
        own.records[step % HORIZON, layer // THIN, HERE] = 0


@compiled
def _label(own: Learning, passes: Neighbours, layer: int, step: int, span: int) -> bool:
    """Fill the labels with what was used in the span after that step; whether all of its passes are still known."""
    labels = own.labels
    for e in range(len(labels)):
        labels[e] = UNUSED
    for later in range(1, ENDS[span + 1] + 1):
        place = own.leaders[PLACE, (step + later) % HORIZON]
        if passes.serial[place] != own.leaders[SERIAL, (step + later) % HORIZON]:
            return False
        used = passes.used[layer, place]
        for i in range(1, used[0] + 1):
            e = used[i]
            if later <= ENDS[span]:
                labels[e] = EARLIER
            elif labels[e] == UNUSED:
                labels[e] = USED
    return True


@apart
@compiled
def ask(own: Learning, layer: int, number: int, evidence: Single) -> None:
    """Record the evidence on a layer that comes next in the pass of that number."""
    _copy(evidence, own.question, ONE)
    own.asked[LAYER], own.asked[NUMBER] = layer, number


@apart
@compiled
def answer(own: Learning, experts: Int, even: float) -> None:
    """Learn from what the layer that was asked about has used."""
    for e in range(len(own.labels)):
        own.labels[e] = UNUSED
    for expert in experts:
        own.labels[expert % len(own.labels)] = USED
    _settle(own, PASS, own.asked[LAYER], own.asked[NUMBER], own.question, even)
    own.asked[LAYER] = NONE


@compiled
def _settle(own: Learning, model: int, layer: int, serial: int, evidence: Single, even: float) -> None:
    """Add to the model's gradient and curvature, and move the layer's bias. evidence: [KINDS, E]."""
    gradient, curvature, E = own.fits[model, GRADIENT], own.fits[model, CURVATURE:], evidence.shape[1]
    labels, odds, missing, spread = own.labels, own.scratch[0], own.scratch[1], own.scratch[2]
    log_odds(own, model, layer, evidence, even, odds)
    for e in range(E):
        chance, counts = near_chance(odds[e]), ONE if labels[e] >= ZERO else ZERO
        missing[e], spread[e] = counts * (labels[e] - chance), counts * chance * (ONE - chance)
    missed = spreads = ZERO
    for e in range(E):
        missed += missing[e]
        spreads += spread[e]
    own.biases[CURVED, model, layer] += spreads
    own.biases[BIAS, model, layer] += missed / own.biases[CURVED, model, layer]
    gradient[CONSTANT] += missed
    for kind in range(0, CONSTANT, 4):  # four sums at a time, as each waits for its last addition
        row, a, b, c, d = evidence[kind : kind + 4], ZERO, ZERO, ZERO, ZERO
        for e in range(E):
            a += missing[e] * row[0, e]
            b += missing[e] * row[1, e]
            c += missing[e] * row[2, e]
            d += missing[e] * row[3, e]
        gradient[kind] += a
        gradient[kind + 1] += b
        gradient[kind + 2] += c
        gradient[kind + 3] += d
    x = own.fits[MODELS, GRADIENT]
    for e in range(serial % SAMPLED, E, SAMPLED):
        for kind in range(KINDS):
            x[kind] = evidence[kind, e]
        for kind in range(KINDS):
            share = SAMPLED * spread[e] * x[kind]
            for other in range(KINDS):
                curvature[kind, other] += share * x[other]


@apart
@compiled
def begin_step(own: Learning, step: int, place: int, serial: int) -> None:
    """Decoded step number `step` begins, with a pass in this place: add to the weights curvature^-1 gradient.

    By Cholesky's method, of one model in APART.
    """
    own.leaders[PLACE, step % HORIZON], own.leaders[SERIAL, step % HORIZON] = place, serial
    root, x = own.fits[MODELS, CURVATURE:], own.fits[MODELS, GRADIENT]
    for model in range(step % APART, MODELS, APART):
        gradient, curvature = own.fits[model, GRADIENT], own.fits[model, CURVATURE:]
        for i in range(KINDS):
            for j in range(i + 1):
                total = curvature[i, j]
                for k in range(j):
                    total -= root[i, k] * root[j, k]
                root[i, j] = np.sqrt(total) if i == j else total / root[j, j]
        for i in range(KINDS):
            x[i] = gradient[i]
            for k in range(i):
                x[i] -= root[i, k] * x[k]
            x[i] /= root[i, i]
        for i in range(KINDS - 1, -1, -1):
            for k in range(i + 1, KINDS):
                x[i] -= root[k, i] * x[k]
            x[i] /= root[i, i]
        for i in range(KINDS):
            own.weights[model, i] += np.float32(x[i])
            gradient[i] = 0.0
