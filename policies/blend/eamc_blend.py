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

WEIGHTS and AHEAD_WEIGHTS are fitted by `python -m policies.blend.fit`; policies/README.md tells what was left out.
Causal; an event costs O(E * k) for its layer and the next.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.blend.evidence import (
    AHEAD,
    KINDS,
    SETTINGS,
    TOKENS,
    Evidence,
    learn,
    learn_ahead,
    nothing_known,
    weigh_ahead,
)
from policies.core.compiled import compiled
from policies.core.policy import Event, Float, Int, Prefetcher, Requests, RetentionPolicy, ScorePolicy, Shape
from policies.core.registry import prefetcher, retention
from traces.errors import InputError
from traces.steps import DECODE

WEIGHTS = (0.251, -0.178, 0.409, 0.555, -0.201)
"""[KINDS] of the evidence, for the keep score."""

AHEAD_WEIGHTS = (-0.733, -2.119, 0.22, 1.159, -0.237, 3.215, -0.57)
"""[KINDS + 2] of the evidence, of AHEAD, and a constant: the logarithm of the odds of use in the next layer, over those
of an expert drawn evenly."""

PARAMETERS = np.array(SETTINGS + WEIGHTS + AHEAD_WEIGHTS)
KEEP, FETCH = len(SETTINGS), len(SETTINGS) + len(WEIGHTS)  # where the weights begin

MOST_DISTANCE = 100

SET_ASIDE = 1e9
"""What the keep scores of a layer lose that decode does not run."""


@dataclass(frozen=True)
class BlendOptions:
    """distance: what one pass of distance to the next possible use is worth, in logarithms of passes.

    wrong: what a wrong guess of the prefetch costs, in transfers; inf: nothing is fetched early.
    """

    distance: float = 0.3
    wrong: float = 1.0

    def __post_init__(self) -> None:
        if not (0 <= self.distance <= MOST_DISTANCE and self.wrong >= 0):
            raise InputError(
                f"eamc-blend needs a distance of 0 to {MOST_DISTANCE} and a wrong of at least 0, "
                f"not {self.distance} and {self.wrong}"
            )


UNTOLD_WINDOW = 0.5
"""Experts the link carries while a layer computes, where no engine has told."""


DISTANCE, LEAST = range(2)
"""Places in `Blend.settings`; LEAST: the log odds of use from which an expert is fetched."""

PER_ACCESS, TOP_K, STEPS, STEP, DECODES, LAYER, NUMBERS = range(7)
"""Places in `Blend.numbers`: whether an event's experts are told one by one (the untimed mode); the most experts of a
decoded token so far; steps so far; the request's step that runs, whether it decodes, the layer whose pass is open."""

RAN, ASIDE = range(2)
"""Rows of `Blend.layers`: the latest step in which each ran; whether it is set aside."""

NONE = -1


class Blend(NamedTuple):
    """The evidence of one run and the keep scores it makes; both halves of `eamc-blend` read one."""

    known: Evidence
    parameters: Float
    keep: Float  # [>= 1, L*E]
    gate: Float  # [L, E + 2] of each layer its gate's latest picks, how many of all came true, how many there were
    settings: Float  # [2]
    numbers: Int  # [NUMBERS]
    layers: Int  # [2, L]


def blend(shape: Shape, options: BlendOptions, keep: Float) -> Blend:
    """The start of a run."""
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[STEP] = numbers[LAYER] = NONE
    settings = np.array([options.distance, 0.0], np.float64)
    layers = np.zeros((2, shape.layers), np.int64)
    gate = np.zeros((shape.layers, shape.experts + 2))
    return Blend(nothing_known(shape), PARAMETERS, keep, gate, settings, numbers, layers)


def begin_request(own: Blend) -> None:
    """The request's own counts start anew."""
    own.known.rows[TOKENS] = 0
    own.known.used[:] = 0
    own.numbers[STEP] = NONE


@compiled
def possible(own: Blend, layer: int, ahead: int) -> float:
    """What the distance to `layer`, `ahead` steps from this one, costs; the present counts from the run's start."""
    cost: float = own.settings[DISTANCE] * (own.numbers[STEPS] + ahead + layer / own.known.after.shape[1])
    return cost


@compiled
def _learn(
    own: Blend, layer: int, experts: Int, counts: Int, first: int, last: int, decode: bool, opens: bool, upto: int
) -> None:
    """Learn from an event of `layer` and write the keep scores of its experts up to number `upto`."""
    known, p, keep = own.known, own.parameters, own.keep
    learn(known, p, layer, experts, counts, first, last, decode, opens, own.numbers[TOP_K])
    distant = possible(own, layer, 1)
    base = layer * known.after.shape[3]
    for expert in range(base, base + upto + 1):
        value = -distant
        for kind in range(KINDS):
            value += p[KEEP + kind] * known.rows[kind, expert]
        keep[0, expert] = value


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
def observe(own: Blend, phase: int, step: int, layer: int, experts: Int, counts: Int, first: int, last: int) -> None:
    """Learn from the event, and score its layer's experts anew."""
    numbers, E, decode = own.numbers, own.known.after.shape[3], phase == DECODE
    begins = numbers[STEP] != step
    opens = not numbers[PER_ACCESS] or begins or numbers[LAYER] != layer
    if opens and numbers[PER_ACCESS] and numbers[LAYER] >= 0:
        _learn(own, numbers[LAYER], experts, counts, first, first, decode, False, E - 1)  # the layer's pass is over
    if begins:
        if numbers[DECODES]:
            _set_aside(own)
        numbers[STEP], numbers[DECODES] = step, decode
        numbers[STEPS] += 1
    if first == last:
        return
    numbers[LAYER] = layer
    own.layers[RAN, layer], own.layers[ASIDE, layer] = numbers[STEPS], 0
    if decode:
        numbers[TOP_K] = max(numbers[TOP_K], last - first)
    # Untimed, what comes after the last expert in this event may still be used in it: its score stays as it is.
    upto = experts[last - 1] - layer * E if numbers[PER_ACCESS] else E - 1
    _learn(own, layer, experts, counts, first, last, decode, opens, upto)


@compiled
def propose(own: Blend, phase: int, layer: int, picks: Int, ids: Int, priorities: Float) -> int:
    """Learn what `layer` has just used, and fill ids and priorities with what pays; how many.

    picks: ids of what the next layer's gate picks ahead of time, if the trace tells.
    """
    if phase != DECODE:
        return 0
    known, L, E = own.known, own.known.after.shape[1], own.known.after.shape[3]
    if layer and own.layers[RAN, layer] == own.numbers[STEPS]:  # what did not run says nothing
        learn_ahead(known, own.parameters, layer)
        for i in range(known.used[1, layer, E]):
            own.gate[layer, E] += own.gate[layer, known.used[1, layer, i]]
        for e in range(E):
            own.gate[layer, e] = 0.0  # counted
    if layer == L - 1 or own.layers[ASIDE, layer + 1] or own.numbers[TOP_K] == 0:
        return 0
    return _foretell(own, layer, picks, ids, priorities[:E])


@compiled
def _foretell(own: Blend, layer: int, picks: Int, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with those of the next layer that what `layer` used makes likely; how many.

    priorities: [E].
    """
    known, p, gate = own.known, own.parameters, own.gate
    E, top_k = known.after.shape[3], own.numbers[TOP_K]
    for e in range(E):
        gate[layer + 1, e] = 0.0
    for expert in picks:
        gate[layer + 1, expert % E] = 1.0
    right, asked = gate[layer + 1, E], gate[layer + 1, E + 1]
    picked_odds = np.log((right + 1.0) / (asked - right + 1.0))
    gate[layer + 1, E + 1] += len(picks)
    ahead = priorities  # until it is what it says
    weigh_ahead(known, p, layer, ahead)
    even = np.log(top_k / (E - top_k)) if top_k < E else np.inf
    worth = np.log(E / top_k) - possible(own, layer + 1, 0)  # of one that is certain to be used
    n = 0
    for e in range(E):
        expert = (layer + 1) * E + e
        odds = even + p[FETCH + KINDS + 1] + p[FETCH + AHEAD] * ahead[e]
        for kind in range(KINDS):
            odds += p[FETCH + kind] * known.rows[kind, expert]
        if gate[layer + 1, e] > 0.0:
            odds = max(odds, picked_odds)
        if odds >= own.settings[LEAST]:
            ids[n], priorities[n] = expert, worth - np.log(1.0 + np.exp(-odds))
            n += 1
    return n


@retention("eamc-blend")
class BlendRetention(ScorePolicy):
    """Ours: recency, the request's frequencies and what follows what, blended; fetches only what is likely enough."""

    Options = BlendOptions

    def __init__(self, shape: Shape, options: BlendOptions) -> None:
        super().__init__(shape, options)
        self.blend = blend(shape, options, self.keep)

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Take note of the mode alone: untimed, an event's experts are told one by one."""
        self.blend.numbers[PER_ACCESS] = per_access

    def begin_request(self, request: int, seat: int) -> None:
        """The request's own counts start anew."""
        begin_request(self.blend)

    def observe(self, event: Event) -> None:
        """Learn from the event, and score its layer's experts anew."""
        accesses = event.experts, event.counts, 0, len(event.experts)
        observe(self.blend, event.phase, int(event.steps[0]), event.layer, *accesses)


@prefetcher("eamc-blend")
class BlendPrefetcher(Prefetcher):
    """Ours: the next layer's experts that are likely enough."""

    Options = BlendOptions
    one_scale_with = "eamc-blend"

    def __init__(self, shape: Shape, options: BlendOptions, beside: Blend | None = None) -> None:
        super().__init__(shape, options)
        self.observes = beside is None
        self.blend = beside or blend(shape, options, np.zeros((1, shape.total)))
        self._wrong = options.wrong
        self.window(UNTOLD_WINDOW)
        self._ids, self._priorities = np.empty(shape.experts, np.int64), np.empty(shape.experts)

    @classmethod
    def beside(cls, keeper: RetentionPolicy) -> "BlendPrefetcher":
        """The other half of a retention `eamc-blend`: it reads the same evidence."""
        assert isinstance(keeper, BlendRetention)
        assert isinstance(keeper.options, BlendOptions)
        return cls(keeper.shape, keeper.options, keeper.blend)

    def window(self, experts_per_layer: float) -> None:
        """What pays: the log odds of wrong / (wrong + r)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            self.blend.settings[LEAST] = np.log(self._wrong) - np.log(experts_per_layer)

    def begin_request(self, request: int, seat: int) -> None:
        """The request's own counts start anew (a prefetcher on its own)."""
        if self.observes:
            begin_request(self.blend)

    def observe(self, event: Event) -> None:
        """Learn from the event (a prefetcher on its own)."""
        accesses = event.experts, event.counts, 0, len(event.experts)
        observe(self.blend, event.phase, int(event.steps[0]), event.layer, *accesses)

    def propose(self, event: Event) -> tuple[Int, Float]:
        """What is likely enough in the next layer."""
        picks = event.ahead_experts
        n = propose(self.blend, event.phase, event.layer, picks, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
