"""`eamc-blend`, our own: keep the experts that several kinds of evidence say will be used soonest, and fetch early only
what is likely enough.

The keep score of an expert is minus an estimate of the logarithm of the passes until its layer uses it again, less a
share of a pass for the layers still to go before it can be used at all. The estimate has two parts: q, the chance of
use in the next pass, a logistic function of the evidence of `policies.blend.evidence`, and g, the logarithm where it is
not used then, linear in the evidence that needs no ids of tokens: (1 - q) g. A layer that a decoded token did not run,
as an encoder's, is set aside until it runs again: whatever else is worth more. Ties fall to the lower id.

Prefetch, in decode, of the `depth` layers that come next, unless they are set aside, by their experts' chance of use:
when a step starts and after each layer but the last from the ids of tokens, in the next layer also from what the
layer before has used (without ids, from that alone, and in the first layer by q), and after the last layer, while the
head computes, the first layers of the next step, whose token is not known yet, by q. One that the next layer's gate
picks ahead of time, if the trace has lookahead, has at least the chance with which its picks of that layer have come
true. Where the link carries r experts while a layer computes, a right guess saves so much of a transfer, and a wrong
one delays the next miss and costs a slot, `wrong` transfers in all: it pays from a chance of wrong / (wrong + r). The
head counts as `head` layers. Priorities are on the scale of the keep scores, so that a prefetch never takes the place
of what is worth as much (rule 6); each layer further away takes `later` from them.

Of a step of several requests each one's choice is a pass of its own; what is worth most to any of them counts.

All weights begin as `python -m policies.blend.fit` fitted them and learn from the run (`policies.blend.learning`), so
that ids that foretell nothing soon count nothing. policies/README.md says what was left out. Causal; an event costs
O(E * k) for its layer and the next ones.
"""

from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np

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
from policies.blend.learning import CURVATURE, WEIGHT, Learning, ask, pass_on, show
from policies.blend.learning import keep as keep_for_times
from policies.blend.profile import ADVICE, Learned, Profile
from policies.blend.weights import CHANCE, CHANCE_BLIND, CONSTANT, LAYER, LAYER_BLIND, STEP, TIME
from policies.core.compiled import compiled
from policies.core.policy import (
    START,
    Event,
    Float,
    Int,
    Kernel,
    Listener,
    Options,
    Prefetcher,
    Requests,
    ScorePolicy,
    Shape,
    bounded,
)
from policies.core.ranking import add
from policies.core.registry import prefetcher, retention
from traces.errors import InputError
from traces.steps import DECODE

PARAMETERS = np.array(SETTINGS)
"""The settings of `policies.blend.evidence`."""

SET_ASIDE = 1e9
"""What the keep scores of a layer lose that decode does not run."""

LEAST_TIME = float(np.log(2))
"""An expert that is not used in the next pass is used in the one after it at the soonest."""

CERTAIN = 30.0
"""Log odds where every expert is used."""


@dataclass(frozen=True)
class BlendOptions(Options, policy="eamc-blend"):
    """distance: what one pass of distance to the next possible use is worth, in logarithms of passes.

    wrong: what a wrong guess of the prefetch costs, in transfers; inf: nothing is fetched early. depth: layers ahead of
    which experts are fetched. later: what each of these after the first takes from a priority. head: how many layers'
    window the head gives. profile: file of `moe-sim profile build` to start from; none: nothing is known.
    """

    distance: float = bounded(0.75, least=0, most=100)
    wrong: float = bounded(1.0, least=0)
    depth: int = bounded(3, least=1)
    later: float = bounded(0.3, least=0, most=100)
    head: float = bounded(4.0, above=0)
    profile: str = ""


DEFAULT_WINDOW = 0.5
"""Experts the link carries while a layer computes, where no engine has said."""


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


def begin(shape: Shape, options: BlendOptions) -> Blend:
    """Return the state of a run."""
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[OPEN] = NONE
    own = Blend(
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
        distance=float(options.distance),
        depth=int(options.depth),
        later=float(options.later),
        least=0.0,
        least_at_head=0.0,
    )
    if options.profile:
        Profile.read(options.profile).fill(learned(own), options.profile)
        _require_sound(own, options.profile)
    return own


MOST_LOG = 1500.0
"""Of evidence and weights: no ratio of two floats has a greater logarithm."""


def _require_sound(own: Blend, path: str) -> None:
    """InputError for numbers that no run has taught."""
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


def begin_request(own: Blend, seat: int) -> None:
    """The request before it in this seat is over, and the new one has counts of its own."""
    close(own, seat)
    evidence.begin_request(own.known, seat)
    own.steps[seat] = NONE


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
        _note(own, model, layer, kinds)
        keep_for_times(own.learning, known.rows, layer, numbers[STEPS])


@compiled
def _note(own: Blend, model: int, layer: int, kinds: int) -> None:
    """Fill the first `kinds` places of the model's question with the layer's evidence."""
    asked, E = own.learning.questions[model], own.known.after.shape[3]
    for kind in range(kinds):
        row = own.known.rows[kind, layer * E : (layer + 1) * E]
        for e in range(E):
            asked[kind, e] = row[e]


@compiled
def _set_aside(own: Blend) -> None:
    """A decoded token has ended: layers that it did not run are set aside."""
    L, E = own.known.after.shape[1], own.known.after.shape[3]
    for layer in range(L):
        if own.layers[RAN, layer] != own.numbers[STEPS] and not own.layers[ASIDE, layer]:
            own.layers[ASIDE, layer] = 1
            for expert in range(layer * E, (layer + 1) * E):
                own.keep[0, expert] -= SET_ASIDE


@compiled
def close(own: Blend, seat: int) -> None:
    """End the pass that is open, in the untimed mode: only what comes next says that it is over."""
    numbers = own.numbers
    if numbers[PER_ACCESS] and numbers[OPEN] >= 0:
        nothing = own.steps[:0]
        _learn(own, seat, 0, numbers[OPEN], nothing, nothing, False, own.known.after.shape[3] - 1)
        numbers[OPEN] = NONE


@compiled
def _begin(own: Blend, event: Event) -> bool:
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
def observe(own: Blend, event: Event) -> None:
    """Learn from the event, and score its layer's experts anew."""
    numbers, E, layer = own.numbers, own.known.after.shape[3], event.layer
    begins = own.steps[event.seats[0]] != event.steps[0]
    opens = not numbers[PER_ACCESS] or begins or numbers[OPEN] != layer
    if opens:
        close(own, event.seats[0])
    _begin(own, event)
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
def propose(own: Blend, event: Event, ids: Int, priorities: Float) -> int:
    """Learn what the layer has just used, and fill ids and priorities with what pays; how many."""
    if event.layer == START:
        _begin(own, event)
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
        _note(own, model, upcoming, KINDS if sighted else BLIND)
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


def profile_of(half: Listener, *sources: str) -> Profile:
    """Return what a half of `eamc-blend` has learned, from `sources` and from what it started with."""
    assert isinstance(half.options, BlendOptions)
    start = half.options.profile
    before = Profile.read(start).traces if start else ()
    return Profile(half.shape, (*before, *sources), learned(half.state))


@retention("eamc-blend")
class BlendRetention(ScorePolicy):
    """Ours: recency, the request's frequencies, what follows what and ids of tokens; fetches what is likely enough."""

    Options = BlendOptions
    kernel = Kernel(begin, score, begin_request=begin_request)
    starts_from = "profile"

    def __init__(self, shape: Shape, options: BlendOptions) -> None:
        super().__init__(shape, options)
        self.keep = self.state.keep

    def save(self, file: BinaryIO, source: str) -> None:
        """Write a profile."""
        profile_of(self, source).write(file)

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Take note of the mode alone: untimed, an event's experts are reported one by one."""
        self.state.numbers[PER_ACCESS] = per_access


@prefetcher("eamc-blend")
class BlendPrefetcher(Prefetcher):
    """Ours: experts of the layers that come next, that are likely enough."""

    Options = BlendOptions
    one_scale_with = "eamc-blend"
    at_start = True

    kernel = Kernel(begin, observe, propose, begin_request)
    starts_from = "profile"

    def __init__(self, shape: Shape, options: BlendOptions, state: Blend | None = None) -> None:
        super().__init__(shape, options, state)
        self._wrong, self._head = options.wrong, options.head
        self.window(DEFAULT_WINDOW)

    def save(self, file: BinaryIO, source: str) -> None:
        """Write a profile."""
        profile_of(self, source).write(file)

    def window(self, experts_per_layer: float) -> None:
        """What pays: the log odds of wrong / (wrong + r)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            least, head = (np.log(self._wrong) - np.log(experts_per_layer * n) for n in (1.0, self._head))
        self.state = self.state._replace(least=float(least), least_at_head=float(head))
