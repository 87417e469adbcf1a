"""What a run of `eamc-blend` knows, and the two decisions that it makes: the keep scores, and the prefetches.

One state, which both halves read and teach. `policies.blend.evidence` and `policies.blend.learning` hold its largest
parts.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.blend import evidence, learning, neighbours, worth
from policies.blend.evidence import Evidence, foresee, learn, weigh
from policies.blend.learning import ENDS, HORIZON, LAYER, NUMBER, PASS, THIN, Learning
from policies.blend.neighbours import LATEST
from policies.blend.series import near_chance, near_log
from policies.blend.worth import CHARGE, WORKS, Worth
from policies.core.compiled import compiled
from policies.core.policy import CHANGED, CHANGED_HERE, DID_NOTHING, UNCHANGED, Event, Float, Int, Shape, Single
from policies.core.ranking import add
from traces.steps import DECODE

Learned = Mapping[str, NDArray[Any]]
"""By name, arrays of a policy's state: the state's own, not copies."""

SET_ASIDE = 1e9
"""What the keep scores of a layer lose that decode does not run."""

CERTAIN = 30.0
"""Log odds where every expert is used."""

TOP_K, STEPS, DECODED, DECODES, NUMBERS = range(5)
"""Places in `Blend.numbers`: the most experts of a decoded token so far; steps so far, and those that decode; whether
the one that runs does."""

SCORE, TIE, CACHED, LRU = range(4)
"""Rows of `Blend.keep`: the two that every policy has; 1 where the expert is in the cache, or on its way there; LRU's
score: the event that last used or fetched the expert."""

NEAR, FURTHER, HEAD, GUESSED = range(4)
"""Kinds of guesses: at the layer that comes next, at one behind it, and at a layer of the next step."""

GUESS, LIKELY, ABSENT, PICK, MADE = range(5)
"""Rows of `Blend.guesses`: experts of a layer, within it; the log odds of use of each; 1 where it was not in the
cache; what its router picked then (`Blend.picks`)."""

SHIFT, SURE, MISSING = range(3)
"""Rows of `Blend.trust`: what a kind of guess adds to its log odds; the curvature of the log likelihood of that;
scratch of an event."""

UNSHIFTED = 4.0
"""The curvature that no shift at all counts as: that of 16 guesses at even odds."""

REACH = 2.0
"""Guesses are made and judged whose log odds are this much below what pays, or more: with a shift they may pay."""

RAN, ASIDE, PREDICTED = range(3)
"""Rows of `Blend.layers`: the latest step in which each ran; whether it is set aside; the latest step in which its
PASS_ODDS were computed."""

PASS_ODDS, NEXT_ODDS = range(2)
"""Rows of `Blend.predicted`: log odds of use in the pass that runs, and, at the end of the layer's latest pass, in the
next."""

ODDS, LEFT, WAIT, RATE = range(4)
"""Rows of `Blend.scratch`, of each expert of a layer: log odds of use in a span; the chance that it is not used until
then; the passes that it is expected to wait until it is used or the span ends; the greatest share of these."""

SCALE = np.float32(64.0)
"""Near logarithms of rates are taken of so many times the rate."""

FIRST, NEW, AGAIN, HISTORIES = range(4)
"""Whether a router's pick from one layer further away named the expert: there was none, no, or yes."""

SCORES, LEAST_CHOSEN = 8, 4
"""Places of the score of a pick, half an e-fold each, 0 of what is not picked; the least that tokens would choose."""

PICKS = SCORES * HISTORIES

TINIEST = 1e-9
"""Added to scores, whose logarithms are taken."""

NONE = -1

ZERO, HALF, ONE, TINY = np.float32(0.0), np.float32(0.5), np.float32(1.0), np.float32(1e-3)


class Blend(NamedTuple):
    """The evidence of one run and the keep scores it makes; both halves of `eamc-blend` read one."""

    known: Evidence
    learning: Learning  # the weights
    worth: Worth
    keep: Float  # [>= 1, L*E]
    predicted: Single  # [2, L, E]
    cached: Float  # [L, E] row CACHED of the keep scores when the latest event was looked up, in layers to come
    guesses: Float  # [depth + 1, L, MADE, E] by distance, and of the next step, the latest at each layer
    made: Int  # [depth + 1, L] how many
    trust: Float  # [3, GUESSED, PICKS]
    picks: Int  # [L, E + 1] of the layer's router: SCORES * history + place of the score; last, whether there are any
    numbers: Int  # [NUMBERS]
    layers: Int  # [3, L]
    steps: Int  # [batch_slots] each request's step that runs
    scratch: Single  # [4, E]
    distance: float  # the options
    depth: int
    later: float
    least: float  # the log odds of use from which an expert is fetched
    least_at_head: float


def nothing_known(shape: Shape, distance: float, depth: int, later: float) -> Blend:
    """Return the start of a run, with options of `eamc-blend`."""
    depth = min(depth, shape.layers)
    return Blend(
        known=evidence.nothing_known(shape),
        learning=learning.nothing_learned(shape),
        worth=worth.nothing_saved(shape),
        keep=np.zeros((4, shape.total)),
        predicted=np.zeros((2, shape.layers, shape.experts), np.float32),
        cached=np.zeros((shape.layers, shape.experts)),
        guesses=np.zeros((depth + 1, shape.layers, MADE, shape.experts)),
        made=np.zeros((depth + 1, shape.layers), np.int64),
        trust=np.array([0.0, UNSHIFTED, 0.0])[:, None, None] * np.ones((GUESSED, PICKS)),
        picks=np.zeros((shape.layers, shape.experts + 1), np.int64),
        numbers=np.zeros(NUMBERS, np.int64),
        layers=np.zeros((3, shape.layers), np.int64),
        steps=np.full(shape.batch_slots, NONE),
        scratch=np.empty((4, shape.experts), np.float32),
        distance=float(distance),
        depth=int(depth),
        later=float(later),
        least=0.0,
        least_at_head=0.0,
    )


def learned(own: Blend) -> Learned:
    """Return what a profile keeps: what the run has taught, and no request's own."""
    passes, of_all = own.known.passes, ("used", "uses", "links", "serial", "last")
    return {
        "rows": own.known.rows,
        "sums": own.known.layers,
        "followers": own.known.followers,
        **{name: getattr(passes, name) for name in of_all},
        **own.learning._asdict(),
        "keep": own.keep[0],
        "predicted": own.predicted,
        "trust": own.trust,
        "numbers": own.numbers[:DECODES],
        "layers": own.layers,
    }


@compiled
def possible(own: Blend, layer: int, ahead: int) -> float:
    """What the distance to `layer`, `ahead` steps from this one, costs; the present counts from the run's start."""
    cost: float = own.distance * (own.numbers[STEPS] + ahead + layer / own.layers.shape[1])
    return cost


@compiled
def even_odds(own: Blend) -> float:
    """Log odds of use of an expert drawn evenly."""
    E, top_k = own.scratch.shape[1], max(1, own.numbers[TOP_K])
    return float(np.log(top_k / (E - top_k))) if top_k < E else CERTAIN


@compiled
def begin_step(own: Blend, event: Event) -> bool:
    """Take note of it where a step begins with this event, and whether what it does pays in this step.

    Return whether scores of any layer have changed.
    """
    numbers, decode, begins, changed = own.numbers, event.phase == DECODE, False, False
    for r in range(len(event.batch_slots)):
        batch_slot = event.batch_slots[r]
        if own.steps[batch_slot] != event.steps[r]:
            own.steps[batch_slot] = event.steps[r]
            if not begins:
                begins = True
                if numbers[DECODES]:
                    changed = _set_aside(own)
                changed |= _work_or_not(own, event.serial)
                works = own.worth.numbers[WORKS] != 0
                numbers[DECODES] = decode and works
                numbers[STEPS] += works
                numbers[DECODED] += decode and works
            if numbers[DECODES]:
                neighbours.begin_pass(own.known.passes, batch_slot)
                if r == 0:
                    place = own.known.passes.request[batch_slot, LATEST]
                    learning.begin_step(own.learning, numbers[DECODED], place, own.known.passes.serial[place])
    return changed


@compiled
def _set_aside(own: Blend) -> bool:
    """A decoded token has ended: layers that it did not run are set aside; return whether there are any."""
    L, E, any_ = own.layers.shape[1], own.scratch.shape[1], False
    for layer in range(L):
        if own.layers[RAN, layer] != own.numbers[STEPS] and not own.layers[ASIDE, layer]:
            own.layers[ASIDE, layer], any_ = 1, True
            for expert in range(layer * E, (layer + 1) * E):
                own.keep[0, expert] -= SET_ASIDE
    return any_


@compiled
def _work_or_not(own: Blend, serial: int) -> bool:
    """A step begins: start to work, or stop and do as LRU does, by what pays; return whether either."""
    keep, layers, (L, E), works = own.keep, own.layers, own.cached.shape, worth.pays(own.worth, own.cached.shape[0])
    if works == own.worth.numbers[WORKS]:
        return False
    own.worth.numbers[WORKS] = works
    if not works:
        for expert in range(L * E):
            keep[SCORE, expert] = keep[LRU, expert]
        return True
    own.numbers[DECODED] += HORIZON  # nothing that is recorded is judged by what comes now
    own.learning.asked[LAYER] = NONE
    for batch_slot in range(len(own.steps)):
        neighbours.begin_request(own.known.passes, batch_slot)
    for layer in range(L):
        layers[ASIDE, layer] = 0
        for made in range(len(own.made)):
            own.made[made, layer] = 0
        for expert in range(layer * E, (layer + 1) * E):  # until the layer runs: as if used once in so many passes
            passes = 1.0 + (serial - keep[LRU, expert]) / L
            keep[SCORE, expert] = -np.log(passes) - possible(own, layer, 1)
    return True


# The keep scores: what each event teaches, and how it scores its layer's experts


@compiled
def observe(own: Blend, event: Event) -> int:
    """Learn from the event, and score its layer's experts again. Return which scores have changed, and whether it did
    nothing else.
    """
    layer, (L, E) = event.layer, own.cached.shape
    changed = CHANGED if begin_step(own, event) else CHANGED_HERE
    if own.worth.sums[CHARGE] > 0.0:
        worth.count(own.worth, event, own.keep[CACHED], L)
        for expert in event.experts:
            own.keep[LRU, expert] = event.serial
        if not own.worth.numbers[WORKS]:
            for expert in event.experts:
                own.keep[SCORE, expert] = event.serial
            return DID_NOTHING | changed
    if len(event.experts) == 0:
        return changed
    own.layers[RAN, layer], own.layers[ASIDE, layer] = own.numbers[STEPS], 0
    for r in range(len(event.batch_slots)):
        first, last = event.offsets[r], event.offsets[r + 1]
        experts, counts = event.own_experts[first:last], event.own_counts[first:last]
        _learn(own, event.batch_slots[r], r == 0, layer, experts, counts)
    for ahead in range(1, min(own.depth, L) + 1):
        upcoming = (layer + ahead) % L
        for e in range(E):
            own.cached[upcoming, e] = own.keep[CACHED, upcoming * E + e]
    return changed


@compiled
def score(own: Blend, keep: Float, event: Event) -> int:
    """`observe`, whose keep scores are these."""
    return observe(own, event)


@compiled
def _learn(own: Blend, batch_slot: int, leads: bool, layer: int, experts: Int, counts: Int) -> None:
    """Learn what a request chose of `layer`; score the layer's experts."""
    known, numbers, decode = own.known, own.numbers, own.numbers[DECODES] != 0
    learn(known, batch_slot, layer, experts, counts, decode, numbers[TOP_K])
    if decode:
        numbers[TOP_K] = max(numbers[TOP_K], len(experts))
    weigh(known, batch_slot, layer, experts, decode, numbers[TOP_K])
    if decode and leads:
        even, asked = even_odds(own), own.learning.asked
        number = known.passes.serial[known.passes.request[batch_slot, LATEST]]
        if asked[LAYER] == layer and asked[NUMBER] == number:
            learning.answer(own.learning, experts, even)
        learning.learn(own.learning, known.passes, layer, numbers[DECODED], known.rows[layer], even)
    _score(own, leads, layer)


@compiled
def _score(own: Blend, leads: bool, layer: int) -> None:
    """Score the layer's experts by the evidence on what a request wants: the first, or another of the same step."""
    E, even = own.scratch.shape[1], even_odds(own)
    odds, left, wait, rate = own.scratch[ODDS], own.scratch[LEFT], own.scratch[WAIT], own.scratch[RATE]
    keep, next_odds = own.keep[0, layer * E : (layer + 1) * E], own.predicted[NEXT_ODDS, layer]
    for e in range(E):
        left[e], wait[e], rate[e] = ONE, ZERO, ZERO
    for span in range(PASS):
        learning.log_odds(own.learning, span, layer, own.known.rows[layer], even, odds)
        if span == 0:
            for e in range(E):
                next_odds[e] = odds[e] if leads else max(next_odds[e], odds[e])
        passes = np.float32(ENDS[span + 1] - ENDS[span])
        within = (passes - ONE) * HALF
        for e in range(E):
            used = left[e] * near_chance(odds[e])
            wait[e] += passes * left[e] - used * within
            left[e] -= used
            rate[e] = max(rate[e], np.true_divide(ONE - left[e], max(wait[e], TINY)))
    near_log(rate, SCALE, ZERO)
    distant = possible(own, layer, 1) + np.log(SCALE)
    if leads:
        for e in range(E):
            keep[e] = rate[e] - distant
    else:
        for e in range(E):
            keep[e] = max(keep[e], rate[e] - distant)


@compiled
def note_insert(keep: Float, expert: int, serial: int, start: int) -> int:
    """A transfer of the expert starts."""
    keep[CACHED, expert], keep[LRU, expert] = 1.0, serial
    return UNCHANGED


@compiled
def note_eviction(keep: Float, expert: int) -> int:
    """The expert leaves the cache."""
    keep[CACHED, expert] = 0.0
    return UNCHANGED


# The prefetches: what is likely enough in the layers that come next


@compiled
def propose(own: Blend, event: Event, ids: Int, priorities: Float) -> int:
    """Learn what the layer has just used, and fill ids and priorities with what pays; how many."""
    if event.phase != DECODE or not own.worth.numbers[WORKS]:
        return 0
    layer, L, looks_ahead = event.layer, own.layers.shape[1], max(0, len(event.picked_offsets) - 1)
    _judge_guesses(own, event)
    if own.numbers[TOP_K] == 0:
        return 0
    if layer == L - 1:
        return _for_the_next_step(own, ids, priorities)
    n = 0
    for ahead in range(1, min(own.depth, L - 1 - layer, looks_ahead) + 1):
        _take_picks(own, event, ahead)
    for r in range(len(event.batch_slots)):
        batch_slot, first = event.batch_slots[r], 0 if r else len(ids)
        for ahead in range(1, min(own.depth, L - 1 - layer) + 1):
            upcoming, kind = layer + ahead, NEAR if ahead == 1 else FURTHER
            if own.layers[ASIDE, upcoming]:
                continue
            is_predicted = ahead > 1 and own.layers[PREDICTED, upcoming] == own.numbers[STEPS]
            odds, place = own.predicted[PASS_ODDS, upcoming], ahead - 1 if looks_ahead else kind
            if not is_predicted or len(event.batch_slots) > 1:
                foresee(own.known, batch_slot, upcoming, own.numbers[TOP_K])
                learning.log_odds(own.learning, PASS, upcoming, own.known.rows[upcoming], even_odds(own), odds)
                if r == 0 and ahead == 1 and (upcoming + own.numbers[DECODED]) % THIN == 0:
                    latest = own.known.passes.request[batch_slot, LATEST]
                    learning.ask(own.learning, upcoming, own.known.passes.serial[latest], own.known.rows[upcoming])
                own.layers[PREDICTED, upcoming], is_predicted = own.numbers[STEPS], False
            if looks_ahead or not is_predicted:
                _guess(own, place, upcoming, odds, own.least)
            n = _add(own, kind, place, upcoming, ahead, 0, own.least, ids, priorities, first, n)
    return n


@compiled
def _take_picks(own: Blend, event: Event, ahead: int) -> None:
    """Take note of what the router `ahead` layers ahead picks, and how far above the least that tokens would choose."""
    first, last, picks = event.picked_offsets[ahead - 1], event.picked_offsets[ahead], own.picks[event.layer + ahead]
    E, least = len(picks) - 1, np.inf
    if first == last:
        return
    for i in range(first, last):
        if event.picked_counts[i]:
            least = min(least, event.picked_scores[i])
    for e in range(E):
        picks[e] = SCORES * ((AGAIN if picks[e] % SCORES else NEW) if picks[E] else FIRST)
    picks[E] = 1
    for i in range(first, last):
        above = 2.0 * (np.log(event.picked_scores[i] + TINIEST) - np.log(least + TINIEST))
        place = LEAST_CHOSEN + np.floor(max(1.0 - LEAST_CHOSEN, min(above, SCORES - 1.0 - LEAST_CHOSEN)))
        picks[event.picked_experts[i] % E] += int(place)


@compiled
def _for_the_next_step(own: Blend, ids: Int, priorities: Float) -> int:
    """Add what is likely in the first layers of the next step, while its token is not known; how many."""
    n = 0
    for layer in range(min(own.depth, own.layers.shape[1])):
        if not own.layers[ASIDE, layer]:
            _guess(own, own.depth, layer, own.predicted[NEXT_ODDS, layer], own.least_at_head)
            n = _add(own, HEAD, own.depth, layer, layer + 1, 1, own.least_at_head, ids, priorities, len(ids), n)
    return n


@compiled
def _guess(own: Blend, place: int, layer: int, odds: Single, least: float) -> None:
    """Guess that the layer will use the experts whose log odds come near `least`, and those that its router picks."""
    guesses, picks, n = own.guesses[place, layer], own.picks[layer], 0
    cached, from_ = own.cached[layer], least - REACH
    for e in range(len(odds)):
        likely = odds[e]
        if likely >= from_ or picks[e] % SCORES:
            guesses[GUESS, n], guesses[LIKELY, n], guesses[ABSENT, n] = e, likely, 1.0 - cached[e]
            guesses[PICK, n] = picks[e]
            n += 1
    own.made[place, layer] = n


@compiled
def _add(
    own: Blend,
    kind: int,
    place: int,
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
    E, distant = own.scratch.shape[1], possible(own, layer, steps) + own.later * (ahead - 1)
    guesses, shifts = own.guesses[place, layer], own.trust[SHIFT, kind]
    for guess in range(own.made[place, layer]):
        likely = guesses[LIKELY, guess] + shifts[int(guesses[PICK, guess])]
        if likely >= least:
            expert = layer * E + int(guesses[GUESS, guess])
            worth = float(np.log(near_chance(np.float32(likely)))) - distant
            n = add(ids, priorities, first, n, expert, worth)
    return n


@compiled
def _judge_guesses(own: Blend, event: Event) -> None:
    """Learn from what the layer has used how likely the guesses were that would have been fetched for it."""
    E, layer, picks = own.scratch.shape[1], event.layer, own.picks[event.layer]
    for place in range(own.depth + 1):
        guesses = own.guesses[place, layer]
        trust = own.trust[:, HEAD if place == own.depth else FURTHER if place else NEAR]
        for guess in range(own.made[place, layer]):
            if guesses[ABSENT, guess] > 0.0:
                pick = int(guesses[PICK, guess])
                chance = float(near_chance(np.float32(guesses[LIKELY, guess] + trust[SHIFT, pick])))
                trust[MISSING, pick] -= chance
                for expert in event.experts:
                    trust[MISSING, pick] += expert == layer * E + int(guesses[GUESS, guess])
                trust[SURE, pick] += chance * (1.0 - chance)
        for pick in range(PICKS if picks[E] else 1):
            trust[SHIFT, pick] += trust[MISSING, pick] / trust[SURE, pick]
            trust[MISSING, pick] = 0.0
        own.made[place, layer] = 0
    for e in range(E + 1 if picks[E] else 0):
        picks[e] = 0
