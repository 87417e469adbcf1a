"""`eamc-blend`, our own: keep the experts that several kinds of evidence say will be used soonest, and fetch of the
next layer's only what is likely enough.

The keep score of an expert is an estimate of minus the logarithm of the passes until its layer uses it again, linear
in the evidence of `policies.blend.evidence`, less a share of a pass for the layers still to go before it can be used
at all. A layer that a decoded token did not run, as an encoder's, is set aside until it runs again: whatever else is
worth more. Ties fall to the lower id.

Prefetch, in decode: after layer l, experts of layer l + 1, unless it is set aside, by their chance of use, a logistic
function of the evidence; one that the next layer's gate picks ahead of time, if the trace has lookahead, has at least
the chance with which its picks of that layer have come true. Where the link carries r experts while a layer computes, a
right guess saves so much of a transfer, and a wrong one delays the next miss and costs a slot, `wrong` transfers in
all: it pays from a chance of wrong / (wrong + r). Priorities are on the scale of the keep scores, so that a prefetch
never takes the place of what is worth as much (rule 6).

Of a step of several requests each one's choice is a pass of its own; what is worth most to any of them counts.

WEIGHTS and AHEAD_WEIGHTS are fitted by `python -m policies.blend.fit`; policies/README.md tells what was left out.
Causal; an event costs O(E * k) for its layer and the next.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.blend import evidence
from policies.blend.evidence import AHEAD, KINDS, SETTINGS, Evidence, learn, learn_ahead, weigh, weigh_ahead
from policies.core.compiled import compiled
from policies.core.policy import Event, Float, Int, Kernel, Options, Prefetcher, Requests, ScorePolicy, Shape, bounded
from policies.core.ranking import add
from policies.core.registry import prefetcher, retention
from traces.steps import DECODE

WEIGHTS = (0.251, -0.178, 0.409, 0.555, -0.201)
"""[KINDS] of the evidence, for the keep score."""

AHEAD_WEIGHTS = (-0.733, -2.119, 0.22, 1.159, -0.237, 3.215, -0.57)
"""[KINDS + 2] of the evidence, of AHEAD, and a constant: the logarithm of the odds of use in the next layer, over those
of an expert drawn evenly."""

PARAMETERS = np.array(SETTINGS + WEIGHTS + AHEAD_WEIGHTS)
KEEP, FETCH = len(SETTINGS), len(SETTINGS) + len(WEIGHTS)  # where the weights begin

SET_ASIDE = 1e9
"""What the keep scores of a layer lose that decode does not run."""


@dataclass(frozen=True)
class BlendOptions(Options, policy="eamc-blend"):
    """distance: what one pass of distance to the next possible use is worth, in logarithms of passes.

    wrong: what a wrong guess of the prefetch costs, in transfers; inf: nothing is fetched early.
    """

    distance: float = bounded(0.3, least=0, most=100)
    wrong: float = bounded(1.0, least=0)


UNTOLD_WINDOW = 0.5
"""Experts the link carries while a layer computes, where no engine has told."""


PER_ACCESS, TOP_K, STEPS, DECODES, LAYER, NUMBERS = range(6)
"""Places in `Blend.numbers`: whether an event's experts are told one by one (the untimed mode); the most experts of a
decoded token so far; steps so far; whether the one that runs decodes, the layer whose pass is open."""

RAN, ASIDE = range(2)
"""Rows of `Blend.layers`: the latest step in which each ran; whether it is set aside."""

NONE = -1


class Blend(NamedTuple):
    """The evidence of one run and the keep scores it makes; both halves of `eamc-blend` read one."""

    known: Evidence
    parameters: Float
    keep: Float  # [>= 1, L*E]
    gate: Float  # [L, E + 2] of each layer its gate's latest picks, how many of all came true, how many there were
    numbers: Int  # [NUMBERS]
    layers: Int  # [2, L]
    steps: Int  # [seats] each request's step that runs
    ahead: Float  # [E] evidence on the next layer
    distance: float  # the option
    least: float  # the log odds of use from which an expert is fetched


def begin(shape: Shape, options: BlendOptions) -> Blend:
    """Return the state of a run."""
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[LAYER] = NONE
    return Blend(
        known=evidence.nothing_known(shape),
        parameters=PARAMETERS,
        keep=np.zeros((3, shape.total)),
        gate=np.zeros((shape.layers, shape.experts + 2)),
        numbers=numbers,
        layers=np.zeros((2, shape.layers), np.int64),
        steps=np.full(shape.seats, NONE),
        ahead=np.empty(shape.experts),
        distance=float(options.distance),
        least=0.0,
    )


def begin_request(own: Blend, seat: int) -> None:
    """The request's own counts start anew."""
    evidence.begin_request(own.known, seat)
    own.steps[seat] = NONE


@compiled
def possible(own: Blend, layer: int, ahead: int) -> float:
    """What the distance to `layer`, `ahead` steps from this one, costs; the present counts from the run's start."""
    cost: float = own.distance * (own.numbers[STEPS] + ahead + layer / own.known.after.shape[1])
    return cost


@compiled
def _learn(own: Blend, event: Event, r: int, layer: int, first: int, last: int, opens: bool, upto: int) -> None:
    """Learn what request number r chose of `layer`, from `first` to `last`; score its experts up to number `upto`."""
    known, p, keep, decode = own.known, own.parameters, own.keep, event.phase == DECODE
    experts, counts = event.own_experts[first:last], event.own_counts[first:last]
    learn(known, p, event.seats[r], layer, experts, counts, decode, opens, own.numbers[TOP_K])
    distant = possible(own, layer, 1)
    base = layer * known.after.shape[3]
    for expert in range(base, base + upto + 1):
        value = -distant
        for kind in range(KINDS):
            value += p[KEEP + kind] * known.rows[kind, expert]
        keep[0, expert] = max(keep[0, expert], value) if r else value


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
def observe(own: Blend, event: Event) -> None:
    """Learn from the event, and score its layer's experts anew."""
    numbers, E, layer = own.numbers, own.known.after.shape[3], event.layer
    begins = False
    for r in range(len(event.seats)):
        begins |= own.steps[event.seats[r]] != event.steps[r]
        own.steps[event.seats[r]] = event.steps[r]
    opens = not numbers[PER_ACCESS] or begins or numbers[LAYER] != layer
    if opens and numbers[PER_ACCESS] and numbers[LAYER] >= 0:
        _learn(own, event, 0, numbers[LAYER], 0, 0, False, E - 1)  # the layer's pass is over
    if begins:
        if numbers[DECODES]:
            _set_aside(own)
        numbers[DECODES] = event.phase == DECODE
        numbers[STEPS] += 1
    if len(event.experts) == 0:
        return
    numbers[LAYER] = layer
    own.layers[RAN, layer], own.layers[ASIDE, layer] = numbers[STEPS], 0
    # Untimed, what comes after the last expert in this event may still be used in it: its score stays as it is.
    upto = event.experts[len(event.experts) - 1] - layer * E if numbers[PER_ACCESS] else E - 1
    for r in range(len(event.seats)):
        first, last = event.offsets[r], event.offsets[r + 1]
        if event.phase == DECODE:
            numbers[TOP_K] = max(numbers[TOP_K], last - first)
        _learn(own, event, r, layer, first, last, opens, upto)


@compiled
def score(own: Blend, keep: Float, event: Event) -> None:
    """`observe`, whose keep scores are these."""
    observe(own, event)


@compiled
def propose(own: Blend, event: Event, ids: Int, priorities: Float) -> int:
    """Learn what the layer has just used, and fill ids and priorities with what pays; how many."""
    if event.phase != DECODE:
        return 0
    known, layer, gate = own.known, event.layer, own.gate
    L, E = known.after.shape[1], known.after.shape[3]
    if layer and own.layers[RAN, layer] == own.numbers[STEPS]:  # what did not run says nothing
        for seat in event.seats:
            learn_ahead(known, own.parameters, seat, layer)
        for expert in event.experts:
            gate[layer, E] += gate[layer, expert % E]
        for e in range(E):
            gate[layer, e] = 0.0  # counted
    if layer == L - 1 or own.layers[ASIDE, layer + 1] or own.numbers[TOP_K] == 0:
        return 0
    for e in range(E):
        gate[layer + 1, e] = 0.0
    for expert in event.ahead_experts:
        gate[layer + 1, expert % E] = 1.0
    right, asked = gate[layer + 1, E], gate[layer + 1, E + 1]
    picked_odds = np.log((right + 1.0) / (asked - right + 1.0))
    gate[layer + 1, E + 1] += len(event.ahead_experts)
    n = 0
    for r in range(len(event.seats)):
        if len(event.seats) > 1:
            weigh(known, own.parameters, event.seats[r], layer + 1)
        n = _foretell(own, event.seats[r], layer, picked_odds, ids, priorities, 0 if r else len(ids), n)
    return n


@compiled
def _foretell(
    own: Blend, seat: int, layer: int, picked_odds: float, ids: Int, priorities: Float, first: int, n: int
) -> int:
    """Add those of the next layer that what the request used of `layer` makes likely; how many are proposed then."""
    known, p, gate, ahead = own.known, own.parameters, own.gate, own.ahead
    E, top_k = known.after.shape[3], own.numbers[TOP_K]
    weigh_ahead(known, p, seat, layer, ahead)
    even = np.log(top_k / (E - top_k)) if top_k < E else np.inf
    worth = np.log(E / top_k) - possible(own, layer + 1, 0)  # of one that is certain to be used
    for e in range(E):
        expert = (layer + 1) * E + e
        odds = even + p[FETCH + KINDS + 1] + p[FETCH + AHEAD] * ahead[e]
        for kind in range(KINDS):
            odds += p[FETCH + kind] * known.rows[kind, expert]
        if gate[layer + 1, e] > 0.0:
            odds = max(odds, picked_odds)
        if odds >= own.least:
            n = add(ids, priorities, first, n, expert, worth - np.log(1.0 + np.exp(-odds)))
    return n


@retention("eamc-blend")
class BlendRetention(ScorePolicy):
    """Ours: recency, the request's frequencies and what follows what, blended; fetches only what is likely enough."""

    Options = BlendOptions
    kernel = Kernel(begin, score, begin_request=begin_request)

    def __init__(self, shape: Shape, options: BlendOptions) -> None:
        super().__init__(shape, options)
        self.keep = self.state.keep

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Take note of the mode alone: untimed, an event's experts are told one by one."""
        self.state.numbers[PER_ACCESS] = per_access


@prefetcher("eamc-blend")
class BlendPrefetcher(Prefetcher):
    """Ours: the next layer's experts that are likely enough."""

    Options = BlendOptions
    one_scale_with = "eamc-blend"

    kernel = Kernel(begin, observe, propose, begin_request)

    def __init__(self, shape: Shape, options: BlendOptions, state: Blend | None = None) -> None:
        super().__init__(shape, options, state)
        self._wrong = options.wrong
        self.window(UNTOLD_WINDOW)

    def window(self, experts_per_layer: float) -> None:
        """What pays: the log odds of wrong / (wrong + r)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            least = np.log(self._wrong) - np.log(experts_per_layer)
        self.state = self.state._replace(least=float(least))
