"""The keep scores of `eamc-blend`: what each event teaches, and how it scores its layer's experts."""

import numpy as np

from policies.blend.evidence import BLIND, KINDS, learn, near_chance, weigh
from policies.blend.learning import ask, pass_on, show
from policies.blend.learning import keep as keep_for_times
from policies.blend.state import (
    ASIDE,
    DECODES,
    NONE,
    ODDS,
    OPEN,
    PER_ACCESS,
    RAN,
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
from policies.blend.weights import CHANCE, CHANCE_BLIND, TIME
from policies.core.compiled import compiled
from policies.core.policy import Event, Float, Int

LEAST_TIME = float(np.log(2))
"""An expert that is not used in the next pass is used in the one after it at the soonest."""


@compiled
def observe(own: Blend, event: Event) -> None:
    """Learn from the event, and score its layer's experts again."""
    numbers, E, layer = own.numbers, own.known.after.shape[3], event.layer
    begins = own.steps[event.seats[0]] != event.steps[0]
    opens = not numbers[PER_ACCESS] or begins or numbers[OPEN] != layer
    if opens:
        close(own, event.seats[0])
    begin_step(own, event)
    if len(event.experts) == 0:
        return
    numbers[OPEN] = layer
    own.layers[RAN, layer], own.layers[ASIDE, layer] = numbers[STEPS], 0
    # Untimed, what comes after the last expert in this event may still be used in it: its score stays as it is.
    upto = event.experts[len(event.experts) - 1] - layer * E if numbers[PER_ACCESS] else E - 1
    pass_on(own.learning, layer, event.experts, opens)
    for r in range(len(event.seats)):
        first, last = event.offsets[r], event.offsets[r + 1]
        experts, counts = event.own_experts[first:last], event.own_counts[first:last]
        _learn(own, event.seats[r], r, layer, experts, counts, opens, upto)


@compiled
def score(own: Blend, keep: Float, event: Event) -> None:
    """`observe`, whose keep scores are these."""
    observe(own, event)


@compiled
def close(own: Blend, seat: int) -> None:
    """End the pass that is open, in the untimed mode: only what comes next says that it is over."""
    numbers = own.numbers
    if numbers[PER_ACCESS] and numbers[OPEN] >= 0:
        nothing = own.steps[:0]
        _learn(own, seat, 0, numbers[OPEN], nothing, nothing, False, own.known.after.shape[3] - 1)
        numbers[OPEN] = NONE


@compiled
def _learn(own: Blend, seat: int, r: int, layer: int, experts: Int, counts: Int, opens: bool, upto: int) -> None:
    """Learn what request number r chose of `layer`; score the layer's experts up to number `upto`.

    Untimed, none chosen: the layer's pass is over.
    """
    known, numbers, decode = own.known, own.numbers, own.numbers[DECODES] != 0
    if decode:
        show(own.learning, layer, numbers[STEPS], seat, experts)
    learn(known, own.parameters, seat, layer, experts, counts, decode, opens, numbers[TOP_K])
    if decode:
        numbers[TOP_K] = max(numbers[TOP_K], known.used[seat, 2, layer, known.after.shape[3]])
    weigh(known, own.parameters, seat, layer, numbers[TOP_K], False)
    _score(own, seat, r, layer, upto)
    is_over = (len(experts) > 0) != numbers[PER_ACCESS]
    if decode and r == 0 and is_over and layer == numbers[STEPS] % known.after.shape[1]:
        sighted = sees(own, seat)
        model, kinds = (CHANCE, KINDS) if sighted else (CHANCE_BLIND, BLIND)
        ask(own.learning, model, layer, numbers[STEPS] + 1, seat, even_odds(own))
        note(own, model, layer, kinds)
        keep_for_times(own.learning, known.rows, layer, numbers[STEPS])


@compiled
def _score(own: Blend, seat: int, r: int, layer: int, upto: int) -> None:
    """Score the layer's experts up to number `upto` by the evidence on what request number r wants."""
    E, sighted = own.known.after.shape[3], sees(own, seat)
    odds, times = own.scratch[0], own.scratch[1]
    weighed(own, layer, CHANCE if sighted else CHANCE_BLIND, KINDS if sighted else BLIND, odds)
    weighed(own, layer, TIME, BLIND, times)
    even, distant = even_odds(own), possible(own, layer, 1)
    keep, n = own.keep[0, layer * E : (layer + 1) * E], upto + 1
    layer_odds = own.predicted[ODDS, layer * E : (layer + 1) * E]
    layer_times = own.predicted[TIMES, layer * E : (layer + 1) * E]
    for e in range(n):
        odds[e] += even
        times[e] = max(LEAST_TIME, times[e])
    if r == 0:
        for e in range(n):
            layer_odds[e], layer_times[e] = odds[e], times[e]
            keep[e] = -times[e] * near_chance(-odds[e]) - distant
    else:
        for e in range(n):
            layer_odds[e], layer_times[e] = max(layer_odds[e], odds[e]), min(layer_times[e], times[e])
            keep[e] = max(keep[e], -times[e] * near_chance(-odds[e]) - distant)
