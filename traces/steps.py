"""Requests as an engine runs them: steps of L events, each the distinct experts that one router chose.

A step is one forward pass (the prefill of a request or a chunk of it, or one decoded token, which may have drafted ones
behind it: `traces.drafts`); an event is one (step, layer).
Expert `e` of layer `l` has the id `l * E + e`; ids ascend within an event.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.schema import TraceMeta

PREFILL, DECODE = 0, 1

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Flat = tuple[Int, Int, Int]
"""offsets [S * L + 1], expert ids [A], and the tokens [A] that chose each."""


@dataclass(frozen=True)
class Lookahead:
    """What routers pick ahead of time, by the event after which it is known: its layer's input is what they are given.

    Behind event (s, l) lie the picks for layer l + 1, then those for l + 2, ... up to l + depth.
    """

    layers: int  # L
    depth: int  # D, the greatest distance in layers
    offsets: Int  # [S * L * D + 1]
    experts: Int  # [A'] expert ids, ascending within each distance of an event
    counts: Int  # [A'] tokens of the step that would choose the expert; 0: it is a further pick of all
    scores: Float  # [A'] the router's probabilities of it, added up over the tokens that pick it

    @staticmethod
    def of(
        step: Int, ids: NDArray[np.integer], scores: NDArray[np.floating], steps: int, meta: TraceMeta
    ) -> "Lookahead":
        """Return the columns of a trace as a run has them; step: [T] of each row, one of `steps`."""
        assert meta.lookahead
        L, E, distances = meta.layers, meta.experts, np.array(meta.lookahead.distances)
        depth = int(distances.max())
        there = np.arange(L)[:, None] >= distances  # a layer so far before
        row, layer, place, rank = np.nonzero((ids != meta.sentinel) & there[..., None])
        event = (step[row] * L + layer - distances[place]) * depth + distances[place] - 1
        experts = layer * E + ids[row, layer, place, rank]
        values = (rank < meta.top_k).astype(np.int64), scores[row, layer, place, rank].astype(np.float64)
        return Lookahead(L, depth, *grouped(event, experts, values, steps * L * depth, L * E))


@dataclass(frozen=True)
class Choices:
    """What each of T tokens chose by itself, as its trace has it, in the order of the steps (rule 22)."""

    experts: NDArray[np.integer]  # [T, L, k] in a layer, `sentinel` for none
    sentinel: int
    weights: NDArray[np.floating] | None  # [T, L, k]
    candidates: NDArray[np.integer] | None  # [T, L, C] the router's choices first
    scores: NDArray[np.floating] | None  # [T, L, C] log probabilities
    ahead: NDArray[np.integer] | None  # [T, L, distances, picks] what routers picked for this layer before
    distances: tuple[int, ...]

    @property
    def top_k(self) -> int:
        return int(self.experts.shape[2])

    @property
    def chosen(self) -> NDArray[np.bool_]:
        """[T, L, k] where anything was routed."""
        chosen: NDArray[np.bool_] = self.experts != self.sentinel
        return chosen

    def ids(self, stored: NDArray[np.integer]) -> Int:
        """Return ids in a layer as int64, -1 for none."""
        return np.where(stored == self.sentinel, -1, stored.astype(np.int64))

    def rows(self, taken: slice | Int) -> "Choices":
        """Return those of some tokens."""
        names = ("experts", "weights", "candidates", "scores", "ahead")
        return replace(self, **{name: each[taken] for name in names if (each := getattr(self, name)) is not None})


@dataclass(frozen=True)
class RequestSteps:
    """One request of S steps and A accesses, laid out flat; event (s, l) is the slice between two offsets."""

    request: int  # its index in the trace
    phase: NDArray[np.uint8]  # [S] PREFILL or DECODE
    tokens: Int  # [S] tokens of the step
    context: Int  # [S] tokens in the KV cache when the step ends
    offsets: Int  # [S * L + 1] event (s, l) owns accesses offsets[s*L + l] to offsets[s*L + l + 1]
    experts: Int  # [A] expert ids, ascending within an event
    counts: Int  # [A] tokens of the step that chose the expert
    weights: Float | None = None  # [A] the router's weights of it, added up over these tokens; None: not recorded
    lookahead: Lookahead | None = None  # None: not recorded
    token_ids: Int | None = None  # [sum of tokens] that the steps take in, in order; -1: withheld; None: not recorded
    drafted: Int | None = None  # [S] of the tokens those that were drafted (rule 20); None: nowhere any
    rejected: Int | None = None  # [S] of these the ones that are not accepted; None as before
    draft_ns: Int | None = None  # [S] what drafting takes before the step; None: no time
    choices: Choices | None = None  # [sum of tokens] of each token; None: not known


def steps_of_rows(
    request: int, rows: Mapping[str, NDArray[Any]], prompt: int, meta: TraceMeta, chunk: int | None = None
) -> RequestSteps:
    """Return the rows of a request as an engine runs them: the first `prompt` as one step, then the others one by one.

    rows: its columns in a trace (`traces.schema`). chunk: tokens of the prompt that make a step (rule 20); None: all.
    """
    experts, E, sentinel = rows["experts"], meta.experts, meta.sentinel
    decoded, cuts = len(experts) - prompt, [*range(0, prompt, chunk or prompt or 1), prompt]
    tokens = np.concatenate([np.diff(cuts), np.ones(decoded, np.int64)])
    step, count = np.repeat(np.arange(len(tokens)), tokens), len(tokens)
    steps = RequestSteps(
        request,
        np.repeat(np.array([PREFILL, DECODE], np.uint8), [len(cuts) - 1, decoded]),
        tokens,
        np.concatenate([cuts[1:], rows["position"][prompt:].astype(np.int64) + 1]).astype(np.int64),
        *_flat(experts, step, count, E, sentinel),
    )
    names = ("token_id", "weights", "lookahead", "candidates", "scores")
    token_id, weights, ahead, candidates, scores = map(rows.get, names)
    distances = meta.lookahead.distances if meta.lookahead else ()
    choices = Choices(experts, sentinel, weights, candidates, scores, ahead, distances)
    steps = replace(steps, choices=choices)
    if weights is not None:
        row, layer, rank = np.nonzero(experts != sentinel)
        event, ids = step[row] * meta.layers + layer, layer * E + experts[row, layer, rank]
        added = grouped(
            event, ids, [weights[row, layer, rank].astype(np.float64)], count * meta.layers, meta.layers * E
        )
        steps = replace(steps, weights=added[2])
    if ahead is not None:
        steps = replace(steps, lookahead=Lookahead.of(step, ahead, rows["lookahead_scores"], count, meta))
    if token_id is None or (token_id < 0).all():
        return steps
    return replace(steps, token_ids=token_id.astype(np.int64))


def grouped(event: Int, ids: Int, values: Sequence[NDArray[Any]], events: int, total: int) -> tuple[Any, ...]:
    """Return offsets [events + 1], ids and sums of `values`, in which each id stands once in an event, ascending."""
    keys = event * total + ids
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.diff(keys, prepend=-1))
    sums = (np.add.reduceat(each[order], first) if len(first) else each[:0] for each in values)
    return np.searchsorted(keys[first], np.arange(events + 1) * total), keys[first] % total, *sums


def _flat(chosen: NDArray[np.integer], step: Int, steps: int, E: int, sentinel: int) -> Flat:
    """Return [tokens, L, k] laid out flat, an event for each (step, layer); step: [tokens] of each, one of `steps`."""
    L = chosen.shape[1]
    narrow = np.min_scalar_type(-1 - max(1, steps) * L * E)  # sorts in less time
    events = (step[:, None] * L + np.arange(L)).astype(narrow) * E
    keys, counts = np.unique((events[..., None] + chosen)[chosen != sentinel], return_counts=True)
    event = keys // E
    offsets = np.zeros(steps * L + 1, np.int64)
    np.cumsum(np.bincount(event, minlength=steps * L), out=offsets[1:])
    return offsets, (keys - event // L * (L * E)).astype(np.int64), counts  # a remainder takes twice as long
