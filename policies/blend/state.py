"""What a run of `eamc-blend` knows: one state, which its keep scores and its prefetches read and teach.

`policies.blend.evidence` and `policies.blend.learning` hold its largest parts.
"""

from typing import NamedTuple

import numpy as np

from policies.blend import evidence, learning, tokens
from policies.blend.evidence import KINDS, SETTINGS, Evidence
from policies.blend.learning import CURVATURE, WEIGHT, Learning
from policies.blend.profile import ADVICE, Learned
from policies.blend.weights import CONSTANT
from policies.core.compiled import compiled
from policies.core.policy import Event, Float, Int, Shape
from traces.errors import InputError
from traces.steps import DECODE

PARAMETERS = np.array(SETTINGS)
"""The settings of `policies.blend.evidence`."""

SET_ASIDE = 1e9
"""What the keep scores of a layer lose that decode does not run."""

CERTAIN = 30.0
"""Log odds where every expert is used."""

PER_ACCESS, TOP_K, STEPS, DECODES, OPEN, NUMBERS = range(6)
"""Places in `Blend.numbers`: whether an event's experts are reported one by one (the untimed mode); the most experts of
a decoded token so far; steps so far; whether the one that runs decodes; the layer whose pass is open."""

RAN, ASIDE, PREDICTED = range(3)
"""Rows of `Blend.layers`: the latest step in which each ran; whether it is set aside; the latest step in which its
STEP_ODDS were computed."""

ODDS, TIMES, STEP_ODDS = range(3)
"""Rows of `Blend.predicted`: of each expert at the end of its layer's latest pass the log odds of use in the next, and
g; the log odds of use in the step that runs, from ids."""

NONE = -1

NEVER = -np.inf
"""Log odds."""


class Blend(NamedTuple):
    """The evidence of one run and the keep scores it makes; both halves of `eamc-blend` read one."""

    known: Evidence
    parameters: Float
    learning: Learning  # the weights
    keep: Float  # [>= 1, L*E]
    predicted: Float  # [3, L*E]
    gate: Float  # [L, E + 2] of each layer its gate's latest picks, how many of all came true, how many there were
    numbers: Int  # [NUMBERS]
    layers: Int  # [3, L]
    steps: Int  # [seats] each request's step that runs
    upcoming: Float  # [3, E] evidence AHEAD, HERE and AGAIN_HERE on a layer
    scratch: Float  # [2, E]
    distance: float  # the options
    depth: int
    later: float
    least: float  # the log odds of use from which an expert is fetched
    least_at_head: float


def nothing_known(shape: Shape, distance: float, depth: int, later: float) -> Blend:
    """Return the start of a run, with options of `eamc-blend`."""
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[OPEN] = NONE
    return Blend(
        known=evidence.nothing_known(shape),
        parameters=PARAMETERS,
        learning=learning.nothing_learned(shape),
        keep=np.zeros((3, shape.total)),
        predicted=np.zeros((3, shape.total)),
        gate=np.zeros((shape.layers, shape.experts + 2)),
        numbers=numbers,
        layers=np.zeros((3, shape.layers), np.int64),
        steps=np.full(shape.seats, NONE),
        upcoming=np.empty((3, shape.experts)),
        scratch=np.empty((2, shape.experts)),
        distance=float(distance),
        depth=int(depth),
        later=float(later),
        least=0.0,
        least_at_head=0.0,
    )


MOST_LOG = 1500.0
"""Of evidence and weights: no ratio of two floats has a greater logarithm."""


def require_sound(own: Blend, path: str) -> None:
    """Raise InputError for numbers that no run has taught, as those of a damaged profile."""
    rows, taught = own.known.rows, own.learning
    logs = (rows[:KINDS], taught.questions, taught.kept, taught.fits[:-1, WEIGHT])
    if any((abs(part) > MOST_LOG).any() for part in logs):
        raise InputError(f"{path} is damaged: it holds evidence that is beyond all logarithms: {ADVICE}")
    right, picked = own.gate[:, -2], own.gate[:, -1]
    counts = rows[KINDS:], own.known.after, taught.waits[:, : own.known.after.shape[3]], right, picked - right
    if any((part < 0).any() for part in counts):
        raise InputError(f"{path} is damaged: it holds counts below 0: {ADVICE}")
    try:
        np.linalg.cholesky(own.learning.fits[:-1, CURVATURE])  # reads the lower triangles
    except np.linalg.LinAlgError:
        raise InputError(f"{path} is damaged: the curvature of a fit is not positive: {ADVICE}") from None
    if not 0 <= own.numbers[TOP_K] <= own.known.after.shape[3] or own.numbers[STEPS] < 0:
        raise InputError(
            f"{path} is damaged: {own.numbers[TOP_K]} experts a token, {own.numbers[STEPS]} steps: {ADVICE}"
        )


def learned(own: Blend) -> Learned:
    """Return what a profile keeps: what the run has taught, and no request's own."""
    return {
        "rows": own.known.rows,
        "after": own.known.after,
        "chosen": own.known.ids.chosen,
        "passes": own.known.ids.passes,
        **own.learning._asdict(),
        "keep": own.keep[0],
        "predicted": own.predicted,
        "gate": own.gate,
        "numbers": own.numbers[TOP_K:DECODES],
        "layers": own.layers,
    }


@compiled
def possible(own: Blend, layer: int, ahead: int) -> float:
    """What the distance to `layer`, `ahead` steps from this one, costs; the present counts from the run's start."""
    cost: float = own.distance * (own.numbers[STEPS] + ahead + layer / own.known.after.shape[1])
    return cost


@compiled
def sees(own: Blend, seat: int) -> bool:
    """Whether the id of the request's token is known."""
    seen: bool = own.known.ids.request[seat, tokens.ROW] >= 0
    return seen


@compiled
def even_odds(own: Blend) -> float:
    """Log odds of use of an expert drawn evenly."""
    E, top_k = own.known.after.shape[3], max(1, own.numbers[TOP_K])
    return float(np.log(top_k / (E - top_k))) if top_k < E else CERTAIN


@compiled
def weighed(own: Blend, layer: int, model: int, kinds: int, out: Float) -> None:
    """out[e]: the first `kinds` of the layer's evidence, weighed as `model` weighs them, and its constant."""
    w, E = own.learning.fits[model, WEIGHT], len(out)
    for e in range(E):
        out[e] = w[CONSTANT]
    for kind in range(kinds):
        row = own.known.rows[kind, layer * E : (layer + 1) * E]
        for e in range(E):
            out[e] += w[kind] * row[e]


@compiled
def note(own: Blend, model: int, layer: int, kinds: int) -> None:
    """Fill the first `kinds` places of the model's question with the layer's evidence."""
    asked, E = own.learning.questions[model], own.known.after.shape[3]
    for kind in range(kinds):
        row = own.known.rows[kind, layer * E : (layer + 1) * E]
        for e in range(E):
            asked[kind, e] = row[e]


@compiled
def begin_step(own: Blend, event: Event) -> bool:
    """Whether a step begins with this event; take note of it, and of its tokens."""
    numbers, ids, decode, begins = own.numbers, event.token_ids, event.phase == DECODE, False
    for r in range(len(event.seats)):
        if own.steps[event.seats[r]] != event.steps[r]:
            own.steps[event.seats[r]] = event.steps[r]
            begins = True
            token = NONE if len(ids) == 0 else ids[r] if decode else ids[len(ids) - 1]
            tokens.begin_step(own.known.ids, event.seats[r], token, decode)
    if begins:
        if numbers[DECODES]:
            _set_aside(own)
        numbers[DECODES] = decode
        numbers[STEPS] += 1
    return begins


@compiled
def _set_aside(own: Blend) -> None:
    """A decoded token has ended: layers that it did not run are set aside."""
    L, E = own.known.after.shape[1], own.known.after.shape[3]
    for layer in range(L):
        if own.layers[RAN, layer] != own.numbers[STEPS] and not own.layers[ASIDE, layer]:
            own.layers[ASIDE, layer] = 1
            for expert in range(layer * E, (layer + 1) * E):
                own.keep[0, expert] -= SET_ASIDE
