"""`eamc-blend`, our own: keep the experts that several kinds of evidence say will be used soonest.

The keep score of an expert is an estimate of minus the logarithm of the passes until its layer uses it again, linear
in the logarithms of its lifts (how much more often than evenly it is used, by each kind of evidence), less a share of
a pass for the layers still to go before it can be used at all. The evidence is recency at three rates, the request's
own frequencies (its rEAM so far, prior popularity blended in), and the experts that followed, one token later in the
same layer, the ones used now. WEIGHTS are a least-squares fit (`policies.blend_fit`); what was tried and left out is
told there. Prefill counts as its tokens' average, and teaches nothing about what follows what. Ties fall to the lower
id. Causal; an event costs O(E * k) for its layer.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from policies.contract import Event, Float, Int, Requests, ScorePolicy, Shape
from policies.registry import retention
from traces.errors import InputError
from traces.steps import DECODE

RATES = np.array([0.15, 0.02, 0.005])
"""Of the moving averages of use, per pass."""

FOLLOW_RATE = 0.02
"""Of the moving averages of what follows an expert, per use of it."""

PRIOR_TOKENS = 4.0
"""Weight of the run's popularity in a request's frequencies."""

EPS = 0.05
"""Added to lifts before the logarithm."""

REQUEST, FOLLOWERS = len(RATES), len(RATES) + 1
FEATURES = len(RATES) + 2
"""Log lifts: of each rate, in the request, of followers."""

WEIGHTS = np.array([0.165, 0.237, -0.236, 0.229, 0.364])


@dataclass(frozen=True)
class BlendOptions:
    """distance: what one pass of distance to the next possible use is worth, in logarithms of passes."""

    distance: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.distance < np.inf:
            raise InputError(f"eamc-blend needs a finite distance of at least 0, not {self.distance}")


@njit(cache=True, nogil=True)
def _open(recent: Float, follow: Float, used: Int, layer: int, E: int, passes: float, learns: bool) -> None:
    """A pass of `layer` begins: averages decay, and what was used in it becomes what was used before.

    recent: [3, L*E]; follow: [L, E, E]; used: [2, L, E + 1], ids and last their number, before and now.
    """
    for r in range(len(RATES)):
        kept = (1.0 - RATES[r]) ** passes
        for expert in range(layer * E, (layer + 1) * E):
            recent[r, expert] *= kept
    n = used[1, layer, E]
    for i in range(n):
        used[0, layer, i] = used[1, layer, i]
        if learns:
            for e in range(E):
                follow[layer, used[0, layer, i], e] *= 1.0 - FOLLOW_RATE
    used[0, layer, E] = n if learns else 0
    used[1, layer, E] = 0


@njit(cache=True, nogil=True)
def _use(
    recent: Float, follow: Float, used: Int, counts: Float, layer: int, E: int, e: int, share: float, passes: float
) -> None:
    """Expert `e` of the layer was used by the share `share` of the tokens of this pass. counts: [2, L*E]."""
    expert = layer * E + e
    for r in range(len(RATES)):
        recent[r, expert] += (1.0 - (1.0 - RATES[r]) ** passes) * share
    counts[0, expert] += share * passes
    counts[1, expert] += share * passes
    for i in range(used[0, layer, E]):
        follow[layer, used[0, layer, i], e] += FOLLOW_RATE
    n = used[1, layer, E]
    used[1, layer, n] = e
    used[1, layer, E] = n + 1


@njit(cache=True, nogil=True)
def _features(recent: Float, follow: Float, used: Int, counts: Float, layer: int, E: int, out: Float) -> None:
    """Fill out [E, FEATURES] with the log lifts of the layer's experts."""
    first = layer * E
    n = used[1, layer, E]
    requested = run = 0.0
    for e in range(E):
        requested += counts[0, first + e]
        run += counts[1, first + e]
    prior = PRIOR_TOKENS * max(n, 1)
    followed = 0.0
    for e in range(E):
        seen = 0.0
        for i in range(n):
            seen += follow[layer, used[1, layer, i], e]
        out[e, FOLLOWERS] = seen
        followed += seen
    totals = np.zeros(len(RATES))
    for r in range(len(RATES)):
        for e in range(E):
            totals[r] += recent[r, first + e]
    for e in range(E):
        for r in range(len(RATES)):
            lift = recent[r, first + e] * E / totals[r] if totals[r] > 0 else 1.0
            out[e, r] = np.log(lift + EPS)
        popular = (counts[1, first + e] + 0.01) / (run + 0.01 * E)
        out[e, REQUEST] = np.log((counts[0, first + e] + prior * popular) * E / (requested + prior) + EPS)
        out[e, FOLLOWERS] = np.log((out[e, FOLLOWERS] * E / followed if followed > 0 else 1.0) + EPS)


@njit(cache=True, nogil=True)
def _score(keep: Float, features: Float, layer: int, E: int, upto: int, possible: float) -> None:
    """Write the keep scores of the layer's experts up to number `upto`; `possible`: what the distance costs."""
    for e in range(upto + 1):
        value = -possible
        for i in range(FEATURES):
            value += WEIGHTS[i] * features[e, i]
        keep[0, layer * E + e] = value


@njit(cache=True, nogil=True)
def observe(
    evidence: tuple[Float, Float, Int, Float],
    features: Float,
    keep: Float,
    layer: int,
    event: tuple[Int, Int, int, int],
    decode: bool,
    opens: bool,
    top_k: int,
    upto: int,
    possible: float,
) -> None:
    """Learn from an event of `layer`, and score its experts up to number `upto`.

    evidence: recent, follow, used and counts; features: [E, FEATURES], filled; event: all experts and counts of the
    request, and where the event's begin and end; opens: a pass begins with it.
    """
    recent, follow, used, seen = evidence
    experts, counts, first, last = event
    E = len(features)
    total = 0
    for i in range(first, last):
        total += counts[i]
    passes = 1.0 if decode else max(1.0, total / top_k)
    if opens:
        _open(recent, follow, used, layer, E, passes, decode)
    for i in range(first, last):
        share = 1.0 if decode else min(1.0, counts[i] / passes)
        _use(recent, follow, used, seen, layer, E, experts[i] - layer * E, share, passes)
    _features(recent, follow, used, seen, layer, E, features)
    _score(keep, features, layer, E, upto, possible)


def new_evidence(shape: Shape) -> tuple[Float, Float, Int, Float]:
    """Nothing known: recent [3, L*E], follow [L, E, E], used [2, L, E + 1], and counts [2, L*E] of request and run."""
    L, E = shape.layers, shape.experts
    return (
        np.zeros((len(RATES), shape.total)),
        np.zeros((L, E, E)),
        np.zeros((2, L, E + 1), np.int64),
        np.zeros((2, shape.total)),
    )


@retention("eamc-blend")
class EamcBlend(ScorePolicy):
    """Ours: recency at three rates, the request's frequencies and what follows what, blended."""

    Options = BlendOptions

    def __init__(self, shape: Shape, options: BlendOptions) -> None:
        super().__init__(shape, options)
        self._distance = options.distance
        self._evidence = new_evidence(shape)
        self._features = np.empty((shape.experts, FEATURES))
        self._top_k = 1  # the most experts of a decoded token so far
        self._per_access = False
        self._step = -1, -1  # request, step
        self._steps = 0
        self._layer = -1  # whose pass is open

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Take note of the mode alone: untimed, an event's experts are told one by one."""
        self._per_access = per_access

    def begin_request(self, request: int) -> None:
        """The request's own counts start anew."""
        self._evidence[3][0] = 0

    def observe(self, event: Event) -> None:
        """Learn from the event, and score its layer's experts anew."""
        step, E = (event.request, event.step), self.shape.experts
        opens = not self._per_access or self._step != step or self._layer != event.layer
        if opens and self._per_access and self._layer >= 0:
            self._learn(event, self._layer, event.first, event.first, False, E - 1)  # the layer's pass is over
        if self._step != step:
            self._step = step
            self._steps += 1
        self._layer = event.layer
        decode = event.phase == DECODE
        if decode:
            self._top_k = max(self._top_k, event.last - event.first)
        # Untimed, what comes after the last expert in this event may still be used in it: its score stays as it is.
        upto = int(event.request_experts[event.last - 1]) - event.layer * E if self._per_access else E - 1
        self._learn(event, event.layer, event.first, event.last, opens, upto)

    def _learn(self, event: Event, layer: int, first: int, last: int, opens: bool, upto: int) -> None:
        observe(
            self._evidence,
            self._features,
            self.keep,
            layer,
            (event.request_experts, event.request_counts, first, last),
            event.phase == DECODE,
            opens,
            self._top_k,
            upto,
            self._distance * (self._steps + 1 + layer / self.shape.layers),
        )
