"""What a run of `eamc-blend` knows, and the two decisions that it makes: the keep scores, and the prefetches.

One state, which both halves read and teach. `policies.blend.evidence` and `policies.blend.learning` hold its largest
parts. What depends on the cache is apart (`InCache`): caches that are run together have one each, and share the rest,
which `learn` teaches once for all of them before `follow` and `propose` are called for each.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.blend import evidence, learning, neighbours, worth
from policies.blend.evidence import Evidence, foresee, weigh
from policies.blend.learning import ENDS, HORIZON, LAYER, NUMBER, PASS, THIN, Learning
from policies.blend.neighbours import LATEST
from policies.blend.series import near_chance, near_log
from policies.blend.worth import CHARGE, WORKS, Worth
from policies.core.compiled import compiled
from policies.core.policy import CHANGED, CHANGED_HERE, DID_NOTHING, LEAVES, UNCHANGED, Event, Float, Int, Shape, Single
from policies.core.ranking import add
from traces.steps import DECODE

Learned = Mapping[str, NDArray[Any]]
"""By name, arrays of a policy's state: the state's own, not copies."""

SET_ASIDE = 1e9
"""What the keep scores of a layer lose that decode does not run."""

CERTAIN = 30.0
"""Log odds where every expert is used."""

TOP_K, STEPS, DECODED, DECODES, BEGUN, FORESEEN, NUMBERS = range(7)
"""Places in `Blend.numbers`: the most experts of a decoded token so far; steps so far, and those that decode; whether
the one that runs does; the latest event with which a step began, and after which the next layers were predicted."""

SCORE, TIE, CACHED, LRU = range(4)
"""Rows of `InCache.keep`: the two that every policy has; 1 where the expert is in the cache, or on its way there; LRU's
score: the event that last used or fetched the expert."""

NEAR, FURTHER, HEAD, GUESSED = range(4)
"""Kinds of guesses: at the layer that comes next, at one behind it, and at a layer of the next step."""

GUESS, LIKELY, ABSENT, PICK, MADE = range(5)
"""Rows of `InCache.guesses`: experts of a layer, within it; the log odds of use of each; 1 where it was not in the
cache; what its router picked then (`InCache.picks`)."""

SHIFT, SURE, MISSING = range(3)
"""Rows of `InCache.trust`: what a kind of guess adds to its log odds; the curvature of the log likelihood of that;
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


class InCache(NamedTuple):
    """What depends on the cache: what is in it, what was guessed of the rest, and whether that pays."""

    worth: Worth
    keep: Float  # [4, L*E]
    cached: Float  # [L, E] row CACHED of the keep scores when the latest event was looked up, in layers to come
    guesses: Float  # [depth + 1, L, MADE, E] by distance, and of the next step, the latest at each layer
    made: Int  # [depth + 1, L] how many
    guessed: Int  # [L] the latest step in which more than a layer ahead was guessed at each
    trust: Float  # [3, GUESSED, PICKS]
    picks: Int  # [L, E + 1] of the layer's router: SCORES * history + place of the score; last, whether there are any


class Blend(NamedTuple):
    """The evidence of one run and the keep scores it makes; both halves of `eamc-blend` read one."""

    known: Evidence
    learning: Learning  # the weights
    cache: InCache
    scores: Float  # [L*E] the keep scores: of the first cache its own, from which others copy
    predicted: Single  # [2, L, E]
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
    cache = nothing_cached(shape, depth)
    return Blend(
        known=evidence.nothing_known(shape),
        learning=learning.nothing_learned(shape),
        cache=cache,
        scores=cache.keep[SCORE],
        predicted=np.zeros((2, shape.layers, shape.experts), np.float32),
        numbers=np.array([0, 0, 0, 0, NONE, NONE]),
        layers=np.zeros((3, shape.layers), np.int64),
        steps=np.full(shape.batch_slots, NONE),
        scratch=np.empty((4, shape.experts), np.float32),
        distance=float(distance),
        depth=int(depth),
        later=float(later),
        least=0.0,
        least_at_head=0.0,
    )


def nothing_cached(shape: Shape, depth: int) -> InCache:
    L, E = shape.layers, shape.experts
    return InCache(
        worth=worth.nothing_saved(shape),
        keep=np.zeros((4, shape.total)),
        cached=np.zeros((L, E)),
        guesses=np.zeros((depth + 1, L, MADE, E)),
        made=np.zeros((depth + 1, L), np.int64),
        guessed=np.zeros(L, np.int64),
        trust=np.array([0.0, UNSHIFTED, 0.0])[:, None, None] * np.ones((GUESSED, PICKS)),
        picks=np.zeros((L, E + 1), np.int64),
    )


def beside(own: Blend, shape: Shape) -> Blend:
    """Return what a run knows in another cache, empty so far, which learns nothing by itself."""
    cache = nothing_cached(shape, own.depth)
    cache.keep[SCORE], cache.trust[:] = own.cache.keep[SCORE], own.cache.trust
    return own._replace(cache=cache)


def learned(own: Blend) -> Learned:
    """Return what a profile keeps: what the run has taught, and no request's own."""
    passes, of_all = own.known.passes, ("used", "uses", "links", "serial", "last")
    return {
        "rows": own.known.rows,
        "sums": own.known.layers,
        "followers": own.known.followers,
        **{name: getattr(passes, name) for name in of_all},
        **own.learning._asdict(),
        "keep": own.scores,
        "predicted": own.predicted,
        "trust": own.cache.trust,
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


# The keep scores: what each event teaches, and how it scores its layer's experts


@compiled
def observe(own: Blend, event: Event) -> int:
    """Learn from the event, and score its layer's experts again. Return which scores have changed, and whether it did
    nothing else.
    """
    stops_or_starts = _work_or_not(own, event)
    works = own.cache.worth.numbers[WORKS] != 0
    changed = _learn_event(own, event, works)
    return _take_scores(own, event, works, CHANGED if stops_or_starts else changed)


@compiled
def score(own: Blend, keep: Float, event: Event) -> int:
    """`observe`, whose keep scores are these."""
    return observe(own, event)


@compiled
def learn(own: Blend, event: Event) -> int:
    """What `observe` and `propose` learn for all caches of a run: which scores have changed."""
    changed = _learn_event(own, event, True)
    if event.phase == DECODE and own.numbers[TOP_K]:
        _foresee(own, event, 0)
    own.numbers[FORESEEN] = event.serial
    return changed


@compiled
def follow(own: Blend, keep: Float, event: Event, changed: int) -> int:
    """`score` for one cache of several, after `learn`, which said what has changed."""
    if own.numbers[BEGUN] == event.serial and not worth.pays(own.cache.worth, len(own.cache.cached)):
        return LEAVES
    return _take_scores(own, event, True, changed)


@compiled
def _work_or_not(own: Blend, event: Event) -> bool:
    """Where a step begins: start to work, or stop and do as LRU does, by what pays; return whether either."""
    begins = False
    for r in range(len(event.batch_slots)):
        begins |= own.steps[event.batch_slots[r]] != event.steps[r]
    here = own.cache
    (L, E), keep, layers = here.cached.shape, here.keep, own.layers
    if not begins or worth.pays(here.worth, L) == (here.worth.numbers[WORKS] != 0):
        return False
    works = here.worth.numbers[WORKS] == 0
    here.worth.numbers[WORKS] = works
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
        for made in range(len(here.made)):
            here.made[made, layer] = 0
        for expert in range(layer * E, (layer + 1) * E):  # until the layer runs: as if used once in so many passes
            passes = 1.0 + (event.serial - keep[LRU, expert]) / L
            keep[SCORE, expert] = -np.log(passes) - possible(own, layer, 1)
    return True


@compiled
def _learn_event(own: Blend, event: Event, works: bool) -> int:
    """Learn from the event, where that pays, and score its layer's experts; return which scores have changed."""
    changed = CHANGED if _begin_step(own, event, works) else CHANGED_HERE
    if not works or len(event.experts) == 0:
        return changed
    layer = event.layer
    own.layers[RAN, layer], own.layers[ASIDE, layer] = own.numbers[STEPS], 0
    for r in range(len(event.batch_slots)):
        first, last = event.offsets[r], event.offsets[r + 1]
        experts, counts = event.own_experts[first:last], event.own_counts[first:last]
        _learn(own, event.batch_slots[r], r == 0, layer, experts, counts)
    return changed


@compiled
def _begin_step(own: Blend, event: Event, works: bool) -> bool:
    """Take note of it where a step begins with this event; return whether layers are set aside."""
    numbers, decode, begins, changed = own.numbers, event.phase == DECODE, False, False
    for r in range(len(event.batch_slots)):
        batch_slot = event.batch_slots[r]
        if own.steps[batch_slot] != event.steps[r]:
            own.steps[batch_slot] = event.steps[r]
            if not begins:
                begins = True
                if numbers[DECODES] and works:
                    changed = _set_aside(own)
                numbers[DECODES] = decode and works
                numbers[STEPS] += works
                numbers[DECODED] += decode and works
                numbers[BEGUN] = event.serial
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
                own.scores[expert] -= SET_ASIDE
    return any_


@compiled
def _take_scores(own: Blend, event: Event, works: bool, changed: int) -> int:
    """Bring the keep scores of a cache up to date with the event, and what is known of the cache."""
    here, layer, (L, E) = own.cache, event.layer, own.cache.cached.shape
    if here.worth.sums[CHARGE] > 0.0:
        worth.count(here.worth, event, here.keep[CACHED], L)
        for expert in event.experts:
            here.keep[LRU, expert] = event.serial
        if not works:
            for expert in event.experts:
                here.keep[SCORE, expert] = event.serial
            return DID_NOTHING | changed
    first, last = (layer * E, (layer + 1) * E) if changed & CHANGED_HERE else (0, L * E)
    for expert in range(first, last):
        here.keep[SCORE, expert] = own.scores[expert]
    if len(event.experts):
        for ahead in range(1, min(own.depth, L) + 1):
            upcoming = (layer + ahead) % L
            for e in range(E):
                here.cached[upcoming, e] = here.keep[CACHED, upcoming * E + e]
    return changed


@compiled
def _learn(own: Blend, batch_slot: int, leads: bool, layer: int, experts: Int, counts: Int) -> None:
    """Learn what a request chose of `layer`; score the layer's experts."""
    known, numbers, decode = own.known, own.numbers, own.numbers[DECODES] != 0
    evidence.learn(known, batch_slot, layer, experts, counts, decode, numbers[TOP_K])
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
    keep, next_odds = own.scores[layer * E : (layer + 1) * E], own.predicted[NEXT_ODDS, layer]
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
    if event.phase != DECODE or not own.cache.worth.numbers[WORKS]:
        return 0
    layer, L, looks_ahead = event.layer, own.layers.shape[1], max(0, len(event.picked_offsets) - 1)
    _judge_guesses(own, event)
    if own.numbers[TOP_K] == 0:
        return 0
    if layer == L - 1:
        return _for_the_next_step(own, ids, priorities)
    n, guessed, alone = 0, own.cache.guessed, len(event.batch_slots) == 1
    for ahead in range(1, min(own.depth, L - 1 - layer, looks_ahead) + 1):
        _take_picks(own, event, ahead)
    for r in range(len(event.batch_slots)):
        if own.numbers[FORESEEN] != event.serial:
            _foresee(own, event, r)
        first = 0 if r else len(ids)
        for ahead in range(1, min(own.depth, L - 1 - layer) + 1):
            upcoming, kind = layer + ahead, NEAR if ahead == 1 else FURTHER
            if own.layers[ASIDE, upcoming]:
                continue
            odds, place = own.predicted[PASS_ODDS, upcoming], ahead - 1 if looks_ahead else kind
            if looks_ahead or not alone or ahead == 1 or guessed[upcoming] != own.numbers[STEPS]:
                _guess(own, place, upcoming, odds, own.least)
                guessed[upcoming] = own.numbers[STEPS]
            n = _add(own, kind, place, upcoming, ahead, 0, own.least, ids, priorities, first, n)
    return n


@compiled
def _foresee(own: Blend, event: Event, r: int) -> None:
    """Predict what the pass of the event's request number r uses in the layers that come next."""
    layer, L, batch_slot, alone = event.layer, own.layers.shape[1], event.batch_slots[r], len(event.batch_slots) == 1
    for ahead in range(1, min(own.depth, L - 1 - layer) + 1):
        upcoming = layer + ahead
        is_predicted = alone and ahead > 1 and own.layers[PREDICTED, upcoming] == own.numbers[STEPS]
        if own.layers[ASIDE, upcoming] or is_predicted:
            continue
        foresee(own.known, batch_slot, upcoming, own.numbers[TOP_K])
        rows, odds = own.known.rows[upcoming], own.predicted[PASS_ODDS, upcoming]
        learning.log_odds(own.learning, PASS, upcoming, rows, even_odds(own), odds)
        if r == 0 and ahead == 1 and (upcoming + own.numbers[DECODED]) % THIN == 0:
            latest = own.known.passes.request[batch_slot, LATEST]
            learning.ask(own.learning, upcoming, own.known.passes.serial[latest], rows)
        own.layers[PREDICTED, upcoming] = own.numbers[STEPS]


@compiled
def _take_picks(own: Blend, event: Event, ahead: int) -> None:
    """Take note of what the router `ahead` layers ahead picks, and how far above the least that tokens would choose."""
    first, last = event.picked_offsets[ahead - 1], event.picked_offsets[ahead]
    picks, least = own.cache.picks[event.layer + ahead], np.inf
    E = len(picks) - 1
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
    guesses, picks, n = own.cache.guesses[place, layer], own.cache.picks[layer], 0
    cached, from_ = own.cache.cached[layer], least - REACH
    for e in range(len(odds)):
        likely = odds[e]
        if likely >= from_ or picks[e] % SCORES:
            guesses[GUESS, n], guesses[LIKELY, n], guesses[ABSENT, n] = e, likely, 1.0 - cached[e]
            guesses[PICK, n] = picks[e]
            n += 1
    own.cache.made[place, layer] = n


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
    guesses, shifts = own.cache.guesses[place, layer], own.cache.trust[SHIFT, kind]
    for guess in range(own.cache.made[place, layer]):
        likely = guesses[LIKELY, guess] + shifts[int(guesses[PICK, guess])]
        if likely >= least:
            expert = layer * E + int(guesses[GUESS, guess])
            worth = float(np.log(near_chance(np.float32(likely)))) - distant
            n = add(ids, priorities, first, n, expert, worth)
    return n


@compiled
def _judge_guesses(own: Blend, event: Event) -> None:
    """Learn from what the layer has used how likely the guesses were that would have been fetched for it."""
    E, layer, picks = own.scratch.shape[1], event.layer, own.cache.picks[event.layer]
    for place in range(own.depth + 1):
        guesses = own.cache.guesses[place, layer]
        trust = own.cache.trust[:, HEAD if place == own.depth else FURTHER if place else NEAR]
        for guess in range(own.cache.made[place, layer]):
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
        own.cache.made[place, layer] = 0
    for e in range(E + 1 if picks[E] else 0):
        picks[e] = 0
