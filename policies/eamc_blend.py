"""`eamc-blend`, our own: keep the experts that several kinds of evidence say will be used soonest, and fetch of the
next layer's only what is likely enough.

The keep score of an expert is an estimate of minus the logarithm of the passes until its layer uses it again, linear
in the evidence of `policies.blend_evidence`, less a share of a pass for the layers still to go before it can be used
at all. Ties fall to the lower id.

Prefetch, in decode: after layer l, experts of layer l + 1 by their chance of use, a logistic function of the evidence;
one that the next layer's gate picks ahead of time, if the trace has lookahead, has at least the chance with which its
picks of that layer have come true. Where the link carries r experts while a layer computes, a right guess saves so much
of a transfer, and a wrong one delays the next miss and costs a slot, `wrong` transfers in all: it pays from a chance of
wrong / (wrong + r). After the last layer, while the head computes, experts of the first layer take the place of what
is worth less by `margin`, which the common scale of scores and priorities decides (rule 6); without this retention
beside it the prefetcher leaves that out.

WEIGHTS and AHEAD_WEIGHTS are fitted by `python -m policies.blend_fit`; what was tried and left out is told there.
Causal; an event costs O(E * k) for its layer and the next.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from policies.blend_evidence import (
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
from policies.contract import NOTHING, Event, Float, Int, Prefetcher, Requests, RetentionPolicy, ScorePolicy, Shape
from policies.limits import Limits
from policies.registry import prefetcher, retention
from traces.errors import InputError
from traces.steps import DECODE

WEIGHTS = (0.251, -0.178, 0.409, 0.555, -0.201)
"""[KINDS] of the evidence, for the keep score."""

AHEAD_WEIGHTS = (-0.733, -2.119, 0.22, 1.159, -0.237, 3.215, -0.57)
"""[KINDS + 2] of the evidence, of AHEAD, and a constant: the logarithm of the odds of use in the next layer, over those
of an expert drawn evenly."""

PARAMETERS = np.array(SETTINGS + WEIGHTS + AHEAD_WEIGHTS)
KEEP, FETCH = len(SETTINGS), len(SETTINGS) + len(WEIGHTS)  # where the weights begin


@dataclass(frozen=True)
class BlendOptions(Limits):
    """distance: what one pass of distance to the next possible use is worth, in logarithms of passes.

    wrong: what a wrong guess costs, in transfers; margin: by how much an expert has to be worth more than another to
    take its place while the head computes, in logarithms of passes.
    """

    distance: float = 0.3
    wrong: float = 1.0
    margin: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.distance < np.inf and self.wrong >= 0 and self.margin >= 0):
            raise InputError(
                "eamc-blend needs a finite distance, a wrong and a margin, each of at least 0, "
                f"not {self.distance}, {self.wrong} and {self.margin}"
            )


UNTOLD_WINDOW = 0.5
"""Experts the link carries while a layer computes, where no engine has told."""


@njit(cache=True, nogil=True)
def observe(
    known: Evidence,
    p: Float,
    keep: Float,
    layer: int,
    experts: Int,
    counts: Int,
    first: int,
    last: int,
    decode: bool,
    opens: bool,
    top_k: int,
    upto: int,
    possible: float,
) -> None:
    """Learn from an event of `layer` and write the keep scores of its experts up to number `upto`.

    possible: what the distance to the layer's next pass costs.
    """
    learn(known, p, layer, experts, counts, first, last, decode, opens, top_k)
    base = layer * known.after.shape[3]
    for expert in range(base, base + upto + 1):
        value = -possible
        for kind in range(KINDS):
            value += p[KEEP + kind] * known.rows[kind, expert]
        keep[0, expert] = value


@njit(cache=True, nogil=True)
def foretell(
    known: Evidence,
    p: Float,
    layer: int,
    top_k: int,
    least: float,
    possible: float,
    picks: Int,
    gate: Float,
    ids: Int,
    priorities: Float,
) -> int:
    """Learn what `layer` has just used, and fill ids and priorities with those of the next that it makes likely.

    least: the log odds from which an expert is fetched; possible: what the distance to the next layer costs;
    picks: ids of what the next layer's gate picks ahead of time, if the trace tells; gate: [L, E + 2] its latest picks
    of each layer, how many of all of them came true, and how many there were; ids, priorities: [E]. Returns how many.
    """
    L, E = known.after.shape[1], known.after.shape[3]
    if layer:
        learn_ahead(known, p, layer)
        for i in range(known.used[1, layer, E]):
            gate[layer, E] += gate[layer, known.used[1, layer, i]]
    if layer == L - 1:
        return 0
    gate[layer + 1, :E] = 0.0
    for expert in picks:
        gate[layer + 1, expert % E] = 1.0
    right, asked = gate[layer + 1, E], gate[layer + 1, E + 1]
    picked_odds = np.log((right + 1.0) / (asked - right + 1.0))
    gate[layer + 1, E + 1] += len(picks)
    ahead = priorities  # until it is what it says
    weigh_ahead(known, p, layer, ahead)
    even = np.log(top_k / (E - top_k)) if top_k < E else np.inf
    worth = np.log(E / top_k) - possible  # of one that is certain to be used
    n = 0
    for e in range(E):
        expert = (layer + 1) * E + e
        odds = even + p[FETCH + KINDS + 1] + p[FETCH + AHEAD] * ahead[e]
        for kind in range(KINDS):
            odds += p[FETCH + kind] * known.rows[kind, expert]
        if gate[layer + 1, e] > 0.0:
            odds = max(odds, picked_odds)
        if odds >= least:
            ids[n], priorities[n] = expert, worth - np.log(1.0 + np.exp(-odds))
            n += 1
    return n


class Blend:
    """The evidence of one run and the keep scores it makes; both halves of `eamc-blend` read one."""

    def __init__(self, shape: Shape, distance: float, keep: Float) -> None:
        self.shape = shape
        self.known = nothing_known(shape)
        self.keep = keep  # [>= 1, L*E]
        self.per_access = False
        self.top_k = 1  # the most experts of a decoded token so far
        self.steps = 0
        self._distance = distance
        self._step = -1, -1  # request, step
        self._layer = -1  # whose pass is open

    def begin_request(self) -> None:
        """The request's own counts start anew."""
        self.known.rows[TOKENS] = 0

    def possible(self, layer: int, ahead: int) -> float:
        """What the distance to `layer`, `ahead` steps from this one, costs; the present counts from the run's start."""
        return self._distance * (self.steps + ahead + layer / self.shape.layers)

    def observe(self, event: Event) -> None:
        """Learn from the event, and score its layer's experts anew."""
        step, E = (event.request, event.step), self.shape.experts
        opens = not self.per_access or self._step != step or self._layer != event.layer
        if opens and self.per_access and self._layer >= 0:
            self._observe(event, self._layer, event.first, event.first, False, E - 1)  # the layer's pass is over
        if self._step != step:
            self._step = step
            self.steps += 1
        self._layer = event.layer
        if event.phase == DECODE:
            self.top_k = max(self.top_k, event.last - event.first)
        # Untimed, what comes after the last expert in this event may still be used in it: its score stays as it is.
        upto = int(event.request_experts[event.last - 1]) - event.layer * E if self.per_access else E - 1
        self._observe(event, event.layer, event.first, event.last, opens, upto)

    def _observe(self, event: Event, layer: int, first: int, last: int, opens: bool, upto: int) -> None:
        told = event.request_experts, event.request_counts, first, last, event.phase == DECODE, opens
        observe(self.known, PARAMETERS, self.keep, layer, *told, self.top_k, upto, self.possible(layer, ahead=1))


@retention("eamc-blend")
class BlendRetention(ScorePolicy):
    """Ours: recency, the request's frequencies and what follows what, blended; fetches only what is likely enough."""

    Options = BlendOptions

    def __init__(self, shape: Shape, options: BlendOptions) -> None:
        super().__init__(shape, options)
        self.blend = Blend(shape, options.distance, self.keep)

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Take note of the mode alone: untimed, an event's experts are told one by one."""
        self.blend.per_access = per_access

    def begin_request(self, request: int) -> None:
        """The request's own counts start anew."""
        self.blend.begin_request()

    def observe(self, event: Event) -> None:
        """Learn from the event, and score its layer's experts anew."""
        self.blend.observe(event)


@prefetcher("eamc-blend")
class BlendPrefetcher(Prefetcher):
    """Ours: the next layer's experts that are likely enough, and while the head computes the first layer's best."""

    Options = BlendOptions
    one_scale_with = "eamc-blend"

    def __init__(self, shape: Shape, options: BlendOptions, blend: Blend | None = None) -> None:
        super().__init__(shape, options)
        self.observes = blend is None
        self._blend = blend or Blend(shape, options.distance, np.zeros((1, shape.total)))
        self._swaps = blend is not None
        self._wrong = options.wrong
        self.window(UNTOLD_WINDOW)
        self._margin = options.margin
        self._gate = np.zeros((shape.layers, shape.experts + 2))
        self._ids, self._priorities = np.empty(shape.experts, np.int64), np.empty(shape.experts)
        self._first_layer = np.arange(shape.experts)

    @classmethod
    def beside(cls, keeper: RetentionPolicy) -> "BlendPrefetcher":
        """The other half of a retention `eamc-blend`: it reads the same evidence."""
        assert isinstance(keeper, BlendRetention)
        assert isinstance(keeper.options, BlendOptions)
        return cls(keeper.shape, keeper.options, keeper.blend)

    def window(self, experts_per_layer: float) -> None:
        """What pays: the log odds of wrong / (wrong + r)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            self._least = float(np.log(self._wrong) - np.log(experts_per_layer))

    def begin_request(self, request: int) -> None:
        """The request's own counts start anew (a prefetcher on its own)."""
        if self.observes:
            self._blend.begin_request()

    def observe(self, event: Event) -> None:
        """Learn from the event (a prefetcher on its own)."""
        self._blend.observe(event)

    def propose(self, event: Event) -> tuple[Int, Float]:
        """What is likely enough in the next layer; after the last one, what is worth more than what is kept."""
        if event.phase != DECODE:
            return NOTHING
        blend, layer = self._blend, event.layer
        possible, out = blend.possible(layer + 1, ahead=0), (event.ahead[0], self._gate, self._ids, self._priorities)
        n = foretell(blend.known, PARAMETERS, layer, blend.top_k, self._least, possible, *out)
        if self._swaps and layer == self.shape.layers - 1:
            return self._first_layer, blend.keep[0, : self.shape.experts] - self._margin
        return self._ids[:n], self._priorities[:n]
