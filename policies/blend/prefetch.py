"""The prefetches of `eamc-blend`: what is likely enough in the layers that come next."""

import numpy as np

from policies.blend.evidence import (
    AGAIN_HERE,
    AHEAD,
    BLIND,
    HERE,
    KINDS,
    learn_ahead,
    near_chance,
    weigh,
    weigh_ahead,
    weigh_here,
)
from policies.blend.learning import WEIGHT, ask
from policies.blend.state import (
    ASIDE,
    NEVER,
    ODDS,
    PREDICTED,
    STEP_ODDS,
    STEPS,
    TIMES,
    TOP_K,
    Blend,
    begin_step,
    even_odds,
    note,
    possible,
    sees,
    weighed,
)
from policies.blend.weights import CHANCE_BLIND, LAYER, LAYER_BLIND, STEP
from policies.core.compiled import compiled
from policies.core.policy import START, Event, Float, Int
from policies.core.ranking import add
from traces.steps import DECODE


@compiled
def propose(own: Blend, event: Event, ids: Int, priorities: Float) -> int:
    """Learn what the layer has just used, and fill ids and priorities with what pays; how many."""
    if event.layer == START:
        begin_step(own, event)
    if event.phase != DECODE:
        return 0
    known, layer = own.known, event.layer
    L, E = known.after.shape[1], known.after.shape[3]
    if layer > 0:
        for seat in event.seats:
            learn_ahead(known, own.parameters, seat, layer)
        _judge_gate(own, event)
    if own.numbers[TOP_K] == 0:
        return 0
    if layer == L - 1:
        return _for_the_next_step(own, ids, priorities)
    picked_odds = NEVER if layer == START else _ask_gate(own, event)
    n = 0
    for r in range(len(event.seats)):
        seat, first = event.seats[r], 0 if r else len(ids)
        sighted = sees(own, seat)
        for ahead in range(1, min(own.depth, L - 1 - layer) + 1):
            if own.layers[ASIDE, layer + ahead] or (ahead > 1 and not sighted):
                continue
            if len(event.seats) > 1:
                weigh(known, own.parameters, seat, layer + ahead, own.numbers[TOP_K], True)
            upcoming, picked = layer + ahead, picked_odds if ahead == 1 else NEVER
            odds = own.predicted[STEP_ODDS, upcoming * E : (upcoming + 1) * E]
            is_predicted = ahead > 1 and own.layers[PREDICTED, upcoming] == own.numbers[STEPS]
            if not is_predicted or len(event.seats) > 1:
                _predict_step(own, seat, layer, upcoming, sighted, r == 0, odds)
                own.layers[PREDICTED, upcoming] = own.numbers[STEPS]
            n = _add(own, upcoming, ahead, 0, odds, own.least, picked, ids, priorities, first, n)
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
def _predict_step(own: Blend, seat: int, layer: int, upcoming: int, sighted: bool, asks: bool, odds: Float) -> None:
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
        weigh_ahead(known, p, seat, layer, ahead)
        for e in range(len(odds)):
            odds[e] += w[AHEAD] * ahead[e]
    if sighted:
        weigh_here(known, p, seat, upcoming, top_k, here, again)
        for e in range(len(odds)):
            odds[e] += w[HERE] * here[e] + w[AGAIN_HERE] * again[e]
    for e in range(len(odds)):
        odds[e] += even
    its_turn = asks and upcoming == own.numbers[STEPS] % known.after.shape[1]
    if its_turn and (follows or sighted):
        ask(own.learning, model, upcoming, own.numbers[STEPS], seat, even)
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
            n = _add(own, layer, layer + 1, 1, odds, own.least_at_head, NEVER, ids, priorities, len(ids), n)
    return n


@compiled
def _add(
    own: Blend,
    layer: int,
    ahead: int,
    steps: int,
    odds: Float,
    least: float,
    picked_odds: float,
    ids: Int,
    priorities: Float,
    first: int,
    n: int,
) -> int:
    """Add the experts of `layer`, `ahead` layers and `steps` steps away, whose log odds are at least `least`.

    Those that the gate picks have `picked_odds` at least. Returns how many are proposed then.
    """
    E, distant = len(odds), possible(own, layer, steps) + own.later * (ahead - 1)
    for e in range(E):
        likely, expert = odds[e], layer * E + e
        if picked_odds > likely and own.gate[layer, e] > 0.0:
            likely = picked_odds
        if likely >= least:
            worth = -own.predicted[TIMES, expert] * near_chance(-likely) - distant
            n = add(ids, priorities, first, n, expert, worth)
    return n
