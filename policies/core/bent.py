"""Bent routing: a rule of a run that changes what tokens compute, mostly by what the cache holds (rule 22).

Before an event is looked up its tokens choose again, each for itself, and what they choose is written over the event.
All later rules, policies and logs know the new choices alone.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.compiled import compiled
from policies.core.policy import LOADING, NO_FLOATS, NO_INTS, Float, Int, Options, Shape, bounded
from traces.errors import InputError, refuse
from traces.steps import Choices, RequestSteps

Routing = Any
"""`policies.core.events.Routing`, of which a `Bent` is a part."""

DROP, RANK = 1, 2

WHOLE = 1_000_000_000
"""The weight of all choices of a token, in the unit of what is counted as lost."""

COUNTS = ("routed", "choices", "changed", "lost")
"""Counted of a run: tokens that chose, layer by layer; what their routers chose; what of it they did not compute; and
its share of the router's weight, in billionths of a token's, each rounded."""


class Candidates(NamedTuple):
    """What each of T tokens may choose in L layers, C experts at most: the router's own choices first."""

    ids: Int  # [T, L, C] in a layer, -1 for none
    shares: Float  # [T, L, C] of the weight of the router's choices
    scores: Float  # [T, L, C] by which they are ranked


class Bent(NamedTuple):
    """A rule and the candidates of some steps, as compiled code takes them."""

    kind: int
    by: float  # the least share of an absent expert, or the bonus of a present one
    k: int  # of the candidates the first are the router's choices
    first: Int  # [S, R] rows of the tokens of each step and request, and
    last: Int  # [S, R]
    ids: Int
    shares: Float
    scores: Float
    weight: Float  # [T, L] of the router's choices together
    chosen: Int  # [C] of the token at hand: 1 what it chooses
    tokens: Int  # [2, E] room: of a request, of all
    weights: Float  # [E] room
    counts: Int  # by COUNTS, so far


_NONE, _DEEP, _FLOATS = np.zeros((0, 0), np.int64), np.zeros((0, 0, 0), np.int64), np.zeros((0, 0, 0))
NOT_BENT = Bent(
    0, 0.0, 0, _NONE, _NONE, _DEEP, _FLOATS, _FLOATS, _FLOATS[0:0].reshape(0, 0), NO_INTS, _NONE, NO_FLOATS, NO_INTS
)


class Rule(ABC):
    """How choices are bent. Rules are written as policies are: `drop:below=0.1`."""

    name: ClassVar[str]
    kind: ClassVar[int] = RANK
    Options: ClassVar[type] = Options

    def __init__(self, options: object, text: str) -> None:
        """Take the options, and the text that states the rule."""
        self.options, self.text = options, text

    def by(self, top_k: int) -> float:
        """Return the number that the rule compares with, of a model that chooses `top_k` experts."""
        return 0.0

    def is_lossy(self, top_k: int) -> bool:
        """Return whether it may change any choice."""
        return self.by(top_k) > 0

    @abstractmethod
    def missing(self, choices: Choices) -> str:
        """Return which option of `moe-trace record` gives what a trace lacks for this rule; nothing: it has all."""

    def candidates(self, choices: Choices) -> Candidates:
        """Return what tokens may choose."""
        ids = choices.ids(choices.experts)
        return Candidates(ids, shares_of(ids, choices.weights), np.zeros(ids.shape))


@dataclass(frozen=True)
class DropOptions(Options, policy="drop"):
    """below: share of a token's weight below which an absent expert is left out; N/k: N times the mean share."""

    below: str = "0.75/k"


class Drop(Rule):
    """Leave out absent experts of low weight, never a token's best; nothing takes their place."""

    name, kind = "drop", DROP
    Options = DropOptions
    options: DropOptions

    def by(self, top_k: int) -> float:
        number = re.fullmatch(r"(\d*\.?\d+)(/k)?", below := self.options.below, re.ASCII)
        if not number:
            raise InputError(f"drop needs below as a share (0.1) or by the model's k (0.75/k), not {below}")
        return float(number[1]) / (top_k if number[2] else 1)

    def missing(self, choices: Choices) -> str:
        return "" if choices.weights is not None else "--weights"


@dataclass(frozen=True)
class SubstituteOptions(Options, policy="substitute"):
    """bonus: added to the scores of present experts, as a share of the range of a token's scores."""

    bonus: float = bounded(0.15, least=0)


class Substitute(Rule):
    """Choose the experts of the highest scores, after a bonus for those that are present (arXiv 2412.00099)."""

    name = "substitute"
    Options = SubstituteOptions
    options: SubstituteOptions

    def by(self, top_k: int) -> float:
        return self.options.bonus

    def missing(self, choices: Choices) -> str:
        return "" if choices.scores is not None else "--scores"

    def candidates(self, choices: Choices) -> Candidates:
        assert choices.candidates is not None
        assert choices.scores is not None
        return ranked(choices.ids(choices.candidates), choices.scores.astype(np.float64), choices.top_k)


def ranked(ids: Int, scores: Float, top_k: int) -> Candidates:
    """Return candidates by log probabilities: whatever a router passed over ranks behind its choices, the first."""
    known = ids >= 0
    weights = np.where(known, np.exp(scores), 0)
    own = scores[..., :top_k].min(-1, keepdims=True, where=known[..., :top_k], initial=np.inf)
    whole = weights[..., :top_k].sum(-1, keepdims=True)
    shares = np.divide(weights, whole, out=np.zeros(ids.shape), where=whole > 0)
    return Candidates(ids, shares, np.where(np.arange(ids.shape[-1]) < top_k, scores, np.minimum(scores, own)))


@dataclass(frozen=True)
class CommitOptions(Options, policy="commit"):
    """layers: how many layers ahead the choice is made."""

    layers: int = bounded(1, least=1)


class Commit(Rule):
    """Compute what the lookahead of a layer so many layers before names, in place of the router's choices."""

    name = "commit"
    Options = CommitOptions
    options: CommitOptions

    def is_lossy(self, top_k: int) -> bool:
        return True

    def missing(self, choices: Choices) -> str:
        far = self.options.layers
        return f"--weights --lookahead {far}" if choices.weights is None or far not in choices.distances else ""

    def candidates(self, choices: Choices) -> Candidates:
        assert choices.ahead is not None
        far, k = self.options.layers, choices.top_k
        own = super().candidates(choices)
        picks = choices.ids(choices.ahead[:, :, choices.distances.index(far), :k])
        picks[:, :far] = -1
        return committed(own, picks)


def committed(own: Candidates, picks: Int) -> Candidates:
    """Return the candidates of tokens that take `picks` [T, L, k], where there are any."""
    same = picks[..., :, None] == own.ids[..., None, :]
    is_new = ~same.any(-1) & (picks >= 0)
    least = own.shares.min(-1, keepdims=True)
    return Candidates(
        np.concatenate([own.ids, np.where(is_new, picks, -1)], -1),
        np.concatenate([own.shares, np.where(is_new, least, 0)], -1),
        np.concatenate([same.any(-2).astype(np.float64), is_new.astype(np.float64)], -1),
    )


RULES: dict[str, type[Rule]] = {cls.name: cls for cls in (Drop, Substitute, Commit)}


def shares_of(ids: Int, weights: NDArray[np.floating] | None) -> Float:
    """Return the shares of choices [..., k] in their weight; of equal ones where all weigh nothing."""
    held = np.where(ids >= 0, 0 if weights is None else np.asarray(weights, np.float64), 0)
    whole = held.sum(-1, keepdims=True)
    return np.where(whole > 0, held / np.where(whole > 0, whole, 1), 1 / ids.shape[-1])


class Bending:
    """A rule in a run, and what it has changed so far."""

    def __init__(self, rule: Rule, shape: Shape) -> None:
        self.rule, self._shape = rule, shape
        self.counts = np.zeros(len(COUNTS), np.int64)

    def over(self, candidates: Candidates, top_k: int, first: Int, last: Int, weight: Float) -> Bent:
        """Return the rule over candidates; first, last: rows of each step and request; weight: [T, L]."""
        E = self._shape.experts
        room = np.zeros(candidates.ids.shape[-1], np.int64), np.zeros((2, E), np.int64), np.zeros(E)
        return Bent(self.rule.kind, self.rule.by(top_k), top_k, first, last, *candidates, weight, *room, self.counts)

    def routing(self, routing: Routing, parts: Sequence[tuple[int, RequestSteps]], steps: int) -> Routing:
        """Return routing of so many steps whose events are yet to be written by `bend`.

        parts: the first step of each request, in the order of its batch slots. Raise InputError for what a trace lacks.
        """
        L, E, R = self._shape.layers, self._shape.experts, len(parts)
        held, weights, tokens, first = list[Candidates](), list[Float](), *np.empty((2, steps, R), np.int64)
        begin = 0
        for r, (step, request) in enumerate(parts):
            tokens[:, r] = request.tokens[step : step + steps]
            before = int(request.tokens[:step].sum())
            choices = require(self.rule, request.choices).rows(slice(before, before + int(tokens[:, r].sum())))
            held.append(self.rule.candidates(choices))
            known = 0 if choices.weights is None else choices.weights
            weights.append(np.where(choices.chosen, known, 0).sum(-1, dtype=np.float64))
            first[:, r] = begin + np.cumsum(tokens[:, r]) - tokens[:, r]
            begin += len(held[-1].ids)
        joined = Candidates(*(np.concatenate(each) for each in zip(*held, strict=True)))
        room, of_each = (L * int(np.minimum(n * choices.top_k, E).sum()) for n in (tokens.sum(1), tokens))
        return routing._replace(
            offsets=np.zeros(steps * L + 1, np.int64),
            experts=np.zeros(room, np.int64),
            counts=np.full(room, tokens.sum(1).max(), np.int64),
            weights=np.zeros(room if len(routing.weights) else 0),
            own_offsets=np.zeros(steps * L * R + 1, np.int64),
            own_experts=np.zeros(of_each, np.int64),
            own_counts=np.zeros(of_each, np.int64),
            bent=self.over(joined, choices.top_k, first, first + tokens, np.concatenate(weights)),
        )


def require(rule: Rule, choices: Choices | None) -> Choices:
    """Return choices that have what a rule needs. Raise InputError for what is missing."""
    lacks = "tokens" if choices is None else rule.missing(choices)
    refuse((lacks, f"`routing` {rule.name} needs what the trace does not have: record it with `{lacks}`"))
    assert choices
    return choices


@compiled
def choose(bent: Bent, row: int, layer: int, present: Int) -> None:
    """Rule 22: mark what a token chooses, and count what that changes; present: [E] states of the layer's experts."""
    ids, shares, scores, chosen = bent.ids[row, layer], bent.shares[row, layer], bent.scores[row, layer], bent.chosen
    own = best = 0
    for i in range(bent.k):
        if ids[i] >= 0:
            if own == 0 or shares[i] > shares[best]:
                best = i
            own += 1
    for i in range(len(ids)):
        chosen[i] = 0
        if bent.kind == DROP and ids[i] >= 0:
            chosen[i] = present[ids[i]] >= LOADING or shares[i] >= bent.by or i == best
    if bent.kind == RANK:
        most, least = -np.inf, np.inf
        for i in range(len(ids)):
            if ids[i] >= 0:
                most, least = max(most, scores[i]), min(least, scores[i])
        for _ in range(own):
            first, highest = -1, -np.inf
            for i in range(len(ids)):
                if ids[i] >= 0 and not chosen[i]:
                    score = scores[i] + (bent.by * (most - least) if present[ids[i]] >= LOADING else 0.0)
                    if first < 0 or score > highest:
                        first, highest = i, score
            chosen[first] = 1
    bent.counts[0] += own > 0
    bent.counts[1] += own
    for i in range(bent.k):
        if ids[i] >= 0 and not chosen[i]:
            bent.counts[2] += 1
            bent.counts[3] += int(np.rint(shares[i] * WHOLE))


@compiled
def choose_all(bent: Bent, present: Int, into: Int) -> None:
    """Write what all tokens of one layer choose, [T, k]: -1 in the place of what is dropped, others in their order."""
    for row in range(len(into)):
        choose(bent, row, 0, present)
        n = 0
        for i in range(len(bent.chosen)):
            if bent.chosen[i] or bent.kind == DROP:
                into[row, n] = bent.ids[row, 0, i] if bent.chosen[i] else -1
                n += 1
        into[row, n:] = -1


@compiled
def bend(routing: Routing, states: Int, step: int, layer: int, L: int) -> None:
    """Write an event as its tokens choose by `states` [L*E], behind the event before."""
    bent, R, number = routing.bent, len(routing.batch_slots), step * L + layer
    E = len(bent.weights)
    base, at, mine = layer * E, routing.offsets[number], routing.own_offsets[number * R]
    present = states[base : base + E]
    for r in range(R):
        for row in range(bent.first[step, r], bent.last[step, r]):
            choose(bent, row, layer, present)
            for i in range(len(bent.chosen)):
                if bent.chosen[i]:
                    expert = bent.ids[row, layer, i]
                    bent.tokens[0, expert] += 1
                    bent.tokens[1, expert] += 1
                    bent.weights[expert] += bent.shares[row, layer, i] * bent.weight[row, layer]
        for expert in range(E):
            if bent.tokens[0, expert]:
                routing.own_experts[mine], routing.own_counts[mine] = base + expert, bent.tokens[0, expert]
                bent.tokens[0, expert] = 0
                mine += 1
        routing.own_offsets[number * R + r + 1] = mine
    for expert in range(E):
        if bent.tokens[1, expert]:
            routing.experts[at], routing.counts[at] = base + expert, bent.tokens[1, expert]
            if len(routing.weights):
                routing.weights[at] = bent.weights[expert]
            bent.tokens[1, expert], bent.weights[expert] = 0, 0.0
            at += 1
    routing.offsets[number + 1] = at
