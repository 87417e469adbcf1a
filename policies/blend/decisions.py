"""What a run of `eamc-blend` knows, and the two decisions that it makes: the keep scores, and the prefetches.

One state, which both halves read and teach. `policies.blend.evidence` and `policies.blend.learning` hold its largest
parts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.blend import evidence, learning, tokens
from policies.blend.evidence import (
    AGAIN_HERE,
    AHEAD,
    BLIND,
    HERE,
    KINDS,
    SETTINGS,
    Evidence,
    learn,
    learn_ahead,
    near_chance,
    weigh,
    weigh_ahead,
    weigh_here,
)
from policies.blend.learning import (
    CHANCE,
    CHANCE_BLIND,
    CONSTANT,
    LAYER,
    LAYER_BLIND,
    STEP,
    TIME,
    WEIGHT,
    Learning,
    ask,
    pass_on,
    show,
)
from policies.core.compiled import compiled
from policies.core.policy import START, Event, Float, Int, Shape
from policies.core.ranking import add
from traces.steps import DECODE

Learned = Mapping[str, NDArray[Any]]
"""By name, arrays of a policy's state: the state's own, not copies."""

PARAMETERS = np.array(SETTINGS)
"""The settings of `policies.blend.evidence`."""

SET_ASIDE = 1e9
"""What the keep scores of a layer lose that decode does not run."""

CERTAIN = 30.0
"""Log odds where every expert is used."""

TOP_K, STEPS, DECODES, NUMBERS = range(4)
"""Places in `Blend.numbers`: the most experts of a decoded token so far; steps so far; whether the one that runs
decodes."""

SCORE, TIE, CACHED = range(3)
"""Rows of `Blend.keep`: the two that every policy has; 1 where the expert is in the cache, or on its way there."""

NEAR, FURTHER, HEAD, GUESSED = range(4)
"""Kinds of guesses: at the layer that comes next, at one behind it, and at a layer of the next step."""

GUESS, LIKELY, ABSENT, MADE = range(4)
"""Rows of `Blend.guesses`: experts of a layer, within it; the log odds of use of each; 1 where it was not in the
cache."""

SHIFT, SURE = range(2)
"""Rows of `Blend.trust`: what a kind of guess adds to its log odds; the curvature of the log likelihood of that."""

UNSHIFTED = 4.0
"""The curvature that no shift at all counts as: that of 16 guesses at even odds."""

REACH = 2.0
"""Guesses are made and judged whose log odds are this much below what pays, or more: with a shift they may pay."""

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
    guesses: Float  # [GUESSED, L, MADE, E] of each kind the latest at each layer
    made: Int  # [GUESSED, L] how many
    trust: Float  # [2, GUESSED]
    gate: Float  # [L, E + 2] of each layer its gate's latest picks, how many of all came true, how many there were
    numbers: Int  # [NUMBERS]
    layers: Int  # [3, L]
    steps: Int  # [batch_slots] each request's step that runs
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
    return Blend(
        known=evidence.nothing_known(shape),
        parameters=PARAMETERS,
        learning=learning.nothing_learned(shape),
        keep=np.zeros((3, shape.total)),
        predicted=np.zeros((3, shape.total)),
        guesses=np.zeros((GUESSED, shape.layers, MADE, shape.experts)),
        made=np.zeros((GUESSED, shape.layers), np.int64),
        trust=np.array([[0.0] * GUESSED, [UNSHIFTED] * GUESSED]),
        gate=np.zeros((shape.layers, shape.experts + 2)),
        numbers=numbers,
        layers=np.zeros((3, shape.layers), np.int64),
        steps=np.full(shape.batch_slots, NONE),
        upcoming=np.empty((3, shape.experts)),
        scratch=np.empty((2, shape.experts)),
        distance=float(distance),
        depth=int(depth),
        later=float(later),
        least=0.0,
        least_at_head=0.0,
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
        "trust": own.trust,
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
def sees(own: Blend, batch_slot: int) -> bool:
    """Whether the id of the request's token is known."""
    seen: bool = own.known.ids.request[batch_slot, tokens.ROW] >= 0
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
        row, weight = own.known.rows[kind, layer * E : (layer + 1) * E], w[kind]
        for e in range(E):
            out[e] += weight * row[e]


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
    for r in range(len(event.batch_slots)):
        if own.steps[event.batch_slots[r]] != event.steps[r]:
            own.steps[event.batch_slots[r]] = event.steps[r]
            begins = True
            first, last = (0 if decode else len(ids) - 1), len(ids)
            if len(event.batch_slots) > 1:
                first, last = r, r + 1
                if len(ids) != len(event.batch_slots):  # some take in several, and whose is which is not known
                    first, last = 0, 0
            tokens.begin_step(own.known.ids, event.batch_slots[r], ids[max(0, first) : last], decode)
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


# The keep scores: what each event teaches, and how it scores its layer's experts

LEAST_TIME = float(np.log(2))
"""An expert that is not used in the next pass is used in the one after it at the soonest."""


@compiled
def observe(own: Blend, event: Event) -> None:
    """Learn from the event, and score its layer's experts again."""
    layer = event.layer
    begin_step(own, event)
    if len(event.experts) == 0:
        return
    own.layers[RAN, layer], own.layers[ASIDE, layer] = own.numbers[STEPS], 0
    pass_on(own.learning, layer, event.experts)
    for r in range(len(event.batch_slots)):
        first, last = event.offsets[r], event.offsets[r + 1]
        experts, counts = event.own_experts[first:last], event.own_counts[first:last]
        _learn(own, event.batch_slots[r], r, layer, experts, counts)


@compiled
def score(own: Blend, keep: Float, event: Event) -> None:
    """`observe`, whose keep scores are these."""
    observe(own, event)


@compiled
def _learn(own: Blend, batch_slot: int, r: int, layer: int, experts: Int, counts: Int) -> None:
    """Learn what request number r chose of `layer`; score the layer's experts."""
    known, numbers, decode = own.known, own.numbers, own.numbers[DECODES] != 0
    if decode:
        show(own.learning, layer, numbers[STEPS], batch_slot, experts)
    learn(known, own.parameters, batch_slot, layer, experts, counts, decode, numbers[TOP_K])
    if decode:
        numbers[TOP_K] = max(numbers[TOP_K], known.used[batch_slot, 2, layer, known.after.shape[3]])
    weigh(known, own.parameters, batch_slot, layer, numbers[TOP_K], False)
    _score(own, batch_slot, r, layer)
    if decode and r == 0 and len(experts) and layer == numbers[STEPS] % known.after.shape[1]:
        sighted = sees(own, batch_slot)
        model, kinds = (CHANCE, KINDS) if sighted else (CHANCE_BLIND, BLIND)
        ask(own.learning, model, layer, numbers[STEPS] + 1, batch_slot, even_odds(own))
        note(own, model, layer, kinds)
        learning.keep(own.learning, known.rows, layer, numbers[STEPS])


@compiled
def _score(own: Blend, batch_slot: int, r: int, layer: int) -> None:
    """Score the layer's experts by the evidence on what request number r wants."""
    E, sighted = own.known.after.shape[3], sees(own, batch_slot)
    odds, times = own.scratch[0], own.scratch[1]
    weighed(own, layer, CHANCE if sighted else CHANCE_BLIND, KINDS if sighted else BLIND, odds)
    weighed(own, layer, TIME, BLIND, times)
    even, distant = even_odds(own), possible(own, layer, 1)
    keep = own.keep[0, layer * E : (layer + 1) * E]
    layer_odds = own.predicted[ODDS, layer * E : (layer + 1) * E]
    layer_times = own.predicted[TIMES, layer * E : (layer + 1) * E]
    for e in range(E):
        odds[e] += even
    for e in range(E):
        times[e] = max(LEAST_TIME, times[e])
    if r == 0:
        for e in range(E):
            layer_odds[e] = odds[e]
        for e in range(E):
            layer_times[e] = times[e]
        for e in range(E):
            keep[e] = -times[e] * near_chance(-odds[e]) - distant
    else:
        for e in range(E):
            layer_odds[e], layer_times[e] = max(layer_odds[e], odds[e]), min(layer_times[e], times[e])
            keep[e] = max(keep[e], -times[e] * near_chance(-odds[e]) - distant)


@compiled
def note_insert(keep: Float, expert: int, serial: int, start: int) -> None:
    """A transfer of the expert starts."""
    keep[CACHED, expert] = 1.0


@compiled
def note_eviction(keep: Float, expert: int) -> None:
    """The expert leaves the cache."""
    keep[CACHED, expert] = 0.0


# The prefetches: what is likely enough in the layers that come next


@compiled
def propose(own: Blend, event: Event, ids: Int, priorities: Float) -> int:
    """Learn what the layer has just used, and fill ids and priorities with what pays; how many."""
    if event.layer == START:
        begin_step(own, event)
    if event.phase != DECODE:
        return 0
    known, layer = own.known, event.layer
    L, E = known.after.shape[1], known.after.shape[3]
    if layer >= 0:
        _judge_guesses(own, event)
    if layer > 0:
        for batch_slot in event.batch_slots:
            learn_ahead(known, own.parameters, batch_slot, layer)
        _judge_gate(own, event)
    if own.numbers[TOP_K] == 0:
        return 0
    if layer == L - 1:
        return _for_the_next_step(own, ids, priorities)
    picked_odds = NEVER if layer == START else _ask_gate(own, event)
    n = 0
    for r in range(len(event.batch_slots)):
        batch_slot, first = event.batch_slots[r], 0 if r else len(ids)
        sighted = sees(own, batch_slot)
        for ahead in range(1, min(own.depth, L - 1 - layer) + 1):
            if own.layers[ASIDE, layer + ahead] or (ahead > 1 and not sighted):
                continue
            if len(event.batch_slots) > 1:
                weigh(known, own.parameters, batch_slot, layer + ahead, own.numbers[TOP_K], True)
            upcoming, kind = layer + ahead, NEAR if ahead == 1 else FURTHER
            is_predicted = ahead > 1 and own.layers[PREDICTED, upcoming] == own.numbers[STEPS]
            if not is_predicted or len(event.batch_slots) > 1:
                odds = own.predicted[STEP_ODDS, upcoming * E : (upcoming + 1) * E]
                _predict_step(own, batch_slot, layer, upcoming, sighted, r == 0, odds)
                own.layers[PREDICTED, upcoming] = own.numbers[STEPS]
                _guess(own, kind, upcoming, odds, own.least, picked_odds if ahead == 1 else NEVER)
            n = _add(own, kind, upcoming, ahead, 0, own.least, ids, priorities, first, n)
    return n


@compiled
def _judge_gate(own: Blend, event: Event) -> None:
    """Count which of the gate's picks of this layer have come true."""
    picks, E = own.gate[event.layer], own.known.after.shape[3]
    for expert in event.experts:
        picks[E] += picks[expert % E]
    for e in range(E):
        picks[e] = 0.0  # counted


@compiled
def _ask_gate(own: Blend, event: Event) -> float:
    """Take note of what the next layer's gate picks; the log odds with which its picks have come true."""
    picks, E = own.gate[event.layer + 1], own.known.after.shape[3]
    for e in range(E):
        picks[e] = 0.0
    for expert in event.ahead_experts:
        picks[expert % E] = 1.0
    right, asked = picks[E], picks[E + 1]
    picks[E + 1] += len(event.ahead_experts)
    return float(np.log((right + 1.0) / (asked - right + 1.0)))


@compiled
def _predict_step(
    own: Blend, batch_slot: int, layer: int, upcoming: int, sighted: bool, asks: bool, odds: Float
) -> None:
    """Fill `odds` [E] with the log odds of use of the experts of `upcoming`, a layer of this step, after `layer`.

    asks: whether the model may learn from it, if it is the layer's turn.
    """
    known, p, top_k = own.known, own.parameters, own.numbers[TOP_K]
    follows = layer != START and upcoming == layer + 1
    model = (LAYER if sighted else LAYER_BLIND) if follows else STEP if sighted else CHANCE_BLIND
    w, even = own.learning.fits[model, WEIGHT], even_odds(own)
    ahead, here, again = own.upcoming[0], own.upcoming[1], own.upcoming[2]
    weighed(own, upcoming, model, KINDS if sighted else BLIND, odds)
    if follows:
        weigh_ahead(known, p, batch_slot, layer, ahead)
        of_ahead = w[AHEAD]
        for e in range(len(odds)):
            odds[e] += of_ahead * ahead[e]
    if sighted:
        weigh_here(known, p, batch_slot, upcoming, top_k, here, again)
        of_here, of_again = w[HERE], w[AGAIN_HERE]
        for e in range(len(odds)):
            odds[e] += of_here * here[e] + of_again * again[e]
    for e in range(len(odds)):
        odds[e] += even
    its_turn = asks and upcoming == own.numbers[STEPS] % known.after.shape[1]
    if its_turn and (follows or sighted):
        ask(own.learning, model, upcoming, own.numbers[STEPS], batch_slot, even)
        note(own, model, upcoming, KINDS if sighted else BLIND)
        asked = own.learning.questions[model]
        for e in range(len(odds)):
            if follows:
                asked[AHEAD, e] = ahead[e]
            if sighted:
                asked[HERE, e], asked[AGAIN_HERE, e] = here[e], again[e]


@compiled
def _for_the_next_step(own: Blend, ids: Int, priorities: Float) -> int:
    """Add what is likely in the first layers of the next step, while its token is not known; how many."""
    n, E = 0, own.known.after.shape[3]
    for layer in range(min(own.depth, own.known.after.shape[1])):
        if not own.layers[ASIDE, layer]:
            odds = own.predicted[ODDS, layer * E : (layer + 1) * E]
            _guess(own, HEAD, layer, odds, own.least_at_head, NEVER)
            n = _add(own, HEAD, layer, layer + 1, 1, own.least_at_head, ids, priorities, len(ids), n)
    return n


@compiled
def _guess(own: Blend, kind: int, layer: int, odds: Float, least: float, picked_odds: float) -> None:
    """Guess that the layer will use the experts whose log odds come near `least`.

    Those that the gate picks have `picked_odds` at least.
    """
    guesses, picks, n = own.guesses[kind, layer], own.gate[layer], 0
    cached, from_ = own.keep[CACHED, layer * len(odds) : (layer + 1) * len(odds)], least - REACH
    for e in range(len(odds)):
        likely = odds[e]
        if picked_odds > likely and picks[e] > 0.0:
            likely = picked_odds
        if likely >= from_:
            guesses[GUESS, n], guesses[LIKELY, n], guesses[ABSENT, n] = e, likely, 1.0 - cached[e]
            n += 1
    own.made[kind, layer] = n


@compiled
def _add(
    own: Blend,
    kind: int,
    layer: int,
    ahead: int,
    steps: int,
    least: float,
    ids: Int,
    priorities: Float,
    first: int,
    n: int,
) -> int:
    """Add the guesses at `layer`, `ahead` layers and `steps` steps away, whose log odds are at least `least`.

    Returns how many are proposed then.
    """
    E, distant = own.known.after.shape[3], possible(own, layer, steps) + own.later * (ahead - 1)
    guesses, shift = own.guesses[kind, layer], own.trust[SHIFT, kind]
    for guess in range(own.made[kind, layer]):
        likely = guesses[LIKELY, guess] + shift
        if likely >= least:
            expert = layer * E + int(guesses[GUESS, guess])
            worth = -own.predicted[TIMES, expert] * near_chance(-likely) - distant
            n = add(ids, priorities, first, n, expert, worth)
    return n


@compiled
def _judge_guesses(own: Blend, event: Event) -> None:
    """Learn from what the layer has used how likely the guesses were that would have been fetched for it."""
    E, layer = own.known.after.shape[3], event.layer
    for kind in range(GUESSED):
        guesses, trust, missing = own.guesses[kind, layer], own.trust[:, kind], 0.0
        for guess in range(own.made[kind, layer]):
            if guesses[ABSENT, guess] > 0.0:
                chance = near_chance(guesses[LIKELY, guess] + trust[SHIFT])
                missing -= chance
                for expert in event.experts:
                    missing += expert == layer * E + int(guesses[GUESS, guess])
                trust[SURE] += chance * (1.0 - chance)
        trust[SHIFT] += missing / trust[SURE]
        own.made[kind, layer] = 0
