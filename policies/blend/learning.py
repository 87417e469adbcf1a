"""Weights that learn from the run: each starts from WEIGHTS and is fitted while the run lasts.

The weights that ship were fitted on all models together. What a run's own model and requests make of the evidence
differs: ids of tokens may be missing, shuffled or say much more than elsewhere. So about once a step each model asks
about one layer, keeps the evidence as its prediction had it, and learns which experts that layer used. It then takes a
step of Newton's method on the log likelihood, where the fitted weights count as observations of weight PRIOR: the
logistic regression of Bayes with a normal prior, one batch at a time (Spiegelhalter and Lauritzen 1990). A question is
settled when the same model asks the next one, and dropped if its pass never came.

How long an expert waits that the next pass does not use is known late: of one layer a step the evidence is kept, and
the first pass that uses each expert, for HORIZON steps. Then a step of recursive least squares follows, in which the
fitted weights count as observations in the same way.
"""

from typing import NamedTuple

import numpy as np

from policies.blend.evidence import BLIND
from policies.core.compiled import apart, compiled
from policies.core.policy import Float, Int, Shape

CHANCE, CHANCE_BLIND, LAYER, LAYER_BLIND, STEP, TIME = range(6)
"""Models."""

CONSTANT = 11

HORIZON = 64
"""Passes: a next use further away counts as this."""

WEIGHTS = np.array(
    [
        [0.14, -1.519, 0.109, 1.286, 0.448, -0.181, 0.57, 0.526, 0.0, 0.0, 0.0, 0.4],
        [-0.033, -1.437, 0.227, 1.844, 0.686, -0.155, 0.0, 0.0, 0.0, 0.0, 0.0, 0.131],
        [-0.492, -1.653, -0.006, 0.403, 0.148, -0.313, 0.206, 0.093, 1.997, 0.732, 0.39, 0.295],
        [-0.889, -1.451, 0.17, 0.794, 0.237, -0.247, 0.0, 0.0, 2.697, 0.0, 0.0, -0.197],
        [0.227, -1.688, 0.001, 1.046, 0.394, -0.27, 0.228, 0.092, 0.0, 1.048, 0.489, 0.548],
        [-0.184, 0.099, -0.193, -0.073, -0.082, 0.093, 0.0, 0.0, 0.0, 0.0, 0.0, 2.084],
    ]
)
"""[models, places], as `python -m benchmarks.fit_blend` prints them.

Places are the kinds of `policies.blend.evidence`, in their order, and a constant. Models, a row each: the log odds of
use in the next pass over those of an expert drawn evenly, with ids of tokens and without (CHANCE); of use in the layer
that is next in this pass (LAYER); of use in another layer of this pass, from ids (STEP); and the logarithm of the
passes until the next use of one that the next pass does not use (TIME).
"""

PLACES = CONSTANT + 1

PRIOR = np.full(PLACES, 100.0)
"""Curvature of the log likelihood that the fitted weights stand for, by place; a row of evidence adds a tenth or so."""

MODELS = len(WEIGHTS)

WEIGHT = 0
CURVATURE = slice(1, PLACES + 1)
"""Rows of `Learning.fits`: a model's weights, and the lower triangle of its curvature."""

USED, EVEN, ROWS = PLACES, PLACES + 1, PLACES + 2
"""Rows of `Learning.questions` after the evidence: whether the expert was used, as far as is known; in the first place
the log odds of use of one drawn evenly."""

OF_LAYER, OF_STEP, OF_BATCH_SLOT, SHOWN, MARKS = range(5)
"""Places in `Learning.asked`: which layer is asked about, in which step and of which request; whether it has shown."""

NONE = -1


class Learning(NamedTuple):
    """What the models have learned, and what they have asked."""

    fits: Float  # [MODELS + 1, PLACES + 1, PLACES]; the last is scratch
    questions: Float  # [MODELS, ROWS, E] of each model the latest
    asked: Int  # [MODELS, MARKS]
    kept: Float  # [HORIZON, BLIND, E] evidence at the end of a pass, by its step
    waits: (
        Int  # [HORIZON, E + 2] passes of its layer until the first that used the expert, 0 before; then the layer, or
    )
    # NONE, and its passes since


def nothing_learned(shape: Shape) -> Learning:
    E, fits = shape.experts, np.zeros((MODELS + 1, PLACES + 1, PLACES))
    fits[:MODELS, WEIGHT], fits[:MODELS, CURVATURE] = WEIGHTS, np.diag(PRIOR)
    waits = np.zeros((HORIZON, E + 2), np.int64)
    waits[:, E] = NONE
    return Learning(
        fits=fits,
        questions=np.zeros((MODELS, ROWS, E)),
        asked=np.full((MODELS, MARKS), NONE),
        kept=np.zeros((HORIZON, BLIND, E)),
        waits=waits,
    )


@apart
@compiled
def ask(own: Learning, model: int, layer: int, step: int, batch_slot: int, even: float) -> None:
    """Settle the last question of the model and ask the next, whose evidence is still to be filled in."""
    asked, question = own.asked[model], own.questions[model]
    if asked[SHOWN] == 1:
        _settle(own.fits, model, question)
    asked[OF_LAYER], asked[OF_STEP], asked[OF_BATCH_SLOT], asked[SHOWN] = layer, step, batch_slot, 0
    for e in range(question.shape[1]):
        question[USED, e] = 0.0
        question[CONSTANT, e] = 1.0
    question[EVEN, 0] = even


@compiled
def show(own: Learning, layer: int, step: int, batch_slot: int, experts: Int) -> None:
    """The layer has used these experts in that step: note it where it was asked about."""
    E = own.questions.shape[2]
    for model in range(MODELS):
        asked = own.asked[model]
        if asked[OF_LAYER] == layer and asked[OF_STEP] == step and asked[OF_BATCH_SLOT] == batch_slot:
            asked[SHOWN] = 1
            for expert in experts:
                own.questions[model, USED, expert % E] = 1.0


@compiled
def _settle(fits: Float, model: int, question: Float) -> None:
    weights, curvature, gradient = fits[model, WEIGHT], fits[model, 1:], fits[MODELS, WEIGHT]
    gradient[:] = 0.0
    for e in range(question.shape[1]):
        odds = question[EVEN, 0]
        for place in range(PLACES):
            odds += weights[place] * question[place, e]
        chance = 1.0 / (1.0 + np.exp(-odds))
        for place in range(PLACES):
            x = question[place, e]
            gradient[place] += (question[USED, e] - chance) * x
            x *= chance * (1.0 - chance)
            for other in range(place + 1):
                curvature[place, other] += x * question[other, e]
    _move(fits, model)


@compiled
def pass_on(own: Learning, layer: int, experts: Int) -> None:
    """A pass of the layer uses these experts."""
    E = own.questions.shape[2]
    for place in range(HORIZON):
        waits = own.waits[place]
        if waits[E] == layer:
            waits[E + 1] += 1
            for expert in experts:
                if not waits[expert % E]:
                    waits[expert % E] = waits[E + 1]


@apart
@compiled
def keep(own: Learning, rows: Float, layer: int, step: int) -> None:
    """Learn from what was kept HORIZON steps ago; keep the layer's evidence, `rows` [>= BLIND, L*E], in its place."""
    place, E = step % HORIZON, own.questions.shape[2]
    waits, kept = own.waits[place], own.kept[place]
    if waits[E] != NONE:
        _learn_times(own.fits, kept, waits)
    for e in range(E):
        waits[e] = 0
        for kind in range(BLIND):
            kept[kind, e] = rows[kind, layer * E + e]
    waits[E], waits[E + 1] = layer, 0


@compiled
def _learn_times(fits: Float, kept: Float, waits: Int) -> None:
    """One step of recursive least squares: of those that the next pass did not use, the logarithm of their wait."""
    weights, curvature, gradient = fits[TIME, WEIGHT], fits[TIME, 1:], fits[MODELS, WEIGHT]
    gradient[:] = 0.0
    for e in range(kept.shape[1]):
        if waits[e] == 1:
            continue
        missing = np.log(float(min(waits[e] or HORIZON, HORIZON))) - weights[CONSTANT]
        for kind in range(BLIND):
            missing -= weights[kind] * kept[kind, e]
        for kind in range(BLIND):
            gradient[kind] += missing * kept[kind, e]
            for other in range(kind + 1):
                curvature[kind, other] += kept[kind, e] * kept[other, e]
            curvature[CONSTANT, kind] += kept[kind, e]
        gradient[CONSTANT] += missing
        curvature[CONSTANT, CONSTANT] += 1.0
    _move(fits, TIME)


@compiled
def _move(fits: Float, model: int) -> None:
    """Add to the model's weights curvature^-1 gradient, by Cholesky's method."""
    curvature, root, x = fits[model, 1:], fits[MODELS, 1:], fits[MODELS, WEIGHT]
    for i in range(PLACES):
        for j in range(i + 1):
            total = curvature[i, j]
            for k in range(j):
                total -= root[i, k] * root[j, k]
            root[i, j] = np.sqrt(total) if i == j else total / root[j, j]
    for i in range(PLACES):
        for k in range(i):
            x[i] -= root[i, k] * x[k]
        x[i] /= root[i, i]
    for i in range(PLACES - 1, -1, -1):
        for k in range(i + 1, PLACES):
            x[i] -= root[k, i] * x[k]
        x[i] /= root[i, i]
    for i in range(PLACES):
        fits[model, WEIGHT, i] += x[i]
