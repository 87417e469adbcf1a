"""What a trace shows about its routing: the properties that expert caching lives on.

Sparsity (few experts per request), reuse (adjacent tokens agree) and similarity (requests fall into groups by
their EAMs) are what MoE-Infinity (arXiv 2401.14361) observes and builds on. Working sets (Denning 1968) show reuse
beyond the token before. Phases are kept apart.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.steps import DECODE, PREFILL, Int
from traces.trace import Trace

WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Lengths of the windows of working sets, in tokens."""

SAMPLE = 2_000
"""Requests that are compared with each other at most; more are thinned out evenly."""


@dataclass(frozen=True)
class Reuse:
    """Of the experts that tokens choose in a layer that the token before them used, the share chosen there by both.

    Within a request and phase. `chance` is what random routing would give (k / E).
    """

    share: float | None  # None if no two tokens with routed experts are adjacent
    chance: float


@dataclass(frozen=True)
class Similarity:
    """Cosine of flattened EAMs, averaged over pairs of requests; the dataset stands in for a task not labelled.

    `nearest` is the cosine with the most similar other request, and `next` with the request that follows. What has to
    do with tasks is of labelled requests alone: `nearest_same_task` is the share of them whose most similar other one
    has the same task; `chance` what a random other one would give. None where the trace has no such pairs, or only one
    task, or (`next`) more than SAMPLE requests.
    """

    all_pairs: float | None
    nearest: float | None
    next: float | None
    within_task: float | None
    across_tasks: float | None
    nearest_same_task: float | None
    chance: float | None
    compared: int  # requests


@dataclass(frozen=True)
class WorkingSet:
    """The experts that the last `tokens` tokens of a request and phase chose, averaged over its tokens.

    A cache of so many hits about the share `hits`, under LRU. Requests start with nothing, so first uses are misses.
    """

    tokens: int
    experts: float  # share of the L * E experts
    hits: float  # share of lookups


@dataclass(frozen=True)
class PhaseStats:
    """One phase of a trace. Shares are of the L * E experts, a mean over requests that routed; None if none did."""

    requests: int  # that routed in this phase
    tokens: int | None  # None: the trace holds EAMs only
    activated: float | None  # share of the experts that a request uses at all
    repeated: float | None  # share of the experts that a request uses for two tokens or more
    popular: float | None  # share of the lookups that go to the most popular quarter of their layer's experts
    reuse: Reuse
    working_sets: list[WorkingSet] | None  # None: no sequences, or nothing routed
    similarity: Similarity


@dataclass(frozen=True)
class Foresight:
    """How good the picks ahead of time are at a distance in MoE layers; those of at least a score (None: the best k).

    recall: share of the experts chosen that are picked. precision: share of the picks that are chosen.
    """

    distance: int
    score: float | None
    recall: float
    precision: float | None  # None: none is picked


SCORES = (None, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Least scores of picks whose quality is stated."""


class _Foresight:
    """The quality of picks over the traces added, all of one model, by distance and least score."""

    def __init__(self) -> None:
        self._needed: dict[int, int] = {}
        self._picked: dict[tuple[int, float | None], Int] = {}  # right ones, and all

    def add(self, trace: Trace) -> None:
        if trace.lookahead is None or trace.lookahead_scores is None or trace.meta.lookahead is None:
            return
        for place, distance in enumerate(trace.meta.lookahead.distances):
            ids, scores = trace.lookahead[:, distance:, place], trace.lookahead_scores[:, distance:, place]
            chosen, here = trace.experts[:, distance:], ids != trace.sentinel
            right = np.zeros(ids.shape, bool)
            for rank in range(trace.top_k):
                right |= here & (ids == chosen[..., rank, None])
            needed = np.count_nonzero((chosen != trace.sentinel) & here.any(-1, keepdims=True))
            self._needed[distance] = self._needed.get(distance, 0) + int(needed)
            for least in SCORES:
                picked = here & (np.arange(ids.shape[-1]) < trace.top_k if least is None else scores >= least)
                counts = np.array([np.count_nonzero(right & picked), np.count_nonzero(picked)])
                self._picked[distance, least] = self._picked.get((distance, least), 0) + counts

    def found(self) -> list[Foresight]:
        return [
            Foresight(distance, least, hits / self._needed[distance], hits / total if total else None)
            for (distance, least), (hits, total) in ((key, counts.tolist()) for key, counts in self._picked.items())
            if self._needed[distance]
        ]


def statistics(trace: Trace) -> dict[str, PhaseStats]:
    """Return the statistics of each phase that the trace holds, by its name."""
    return {name: sums.found() for name, phase in PHASES.items() if (sums := _PhaseSums(phase, [trace])).there}


def summary(pieces: Iterable[Trace]) -> dict[str, Any]:
    """Return what `moe-trace info` prints of the pieces of a trace, as plain values that JSON can hold."""
    sums, seen = [_PhaseSums(phase) for phase in PHASES.values()], _Foresight()
    labels: dict[str, set[str]] = {"dataset": set(), "task": set()}
    requests = 0
    for piece in pieces:
        requests += len(piece.requests)
        for name, known in labels.items():
            known.update(piece.requests[name])
        seen.add(piece)
        for each in sums:
            each.add(piece)
    tokens = [each.tokens for each in sums]
    phases = "both" if all(tokens) else "prefill" if tokens[PREFILL] else "decode"
    aggregate = piece.aggregate is not None
    return {
        "name": piece.name,
        **asdict(piece.meta),
        "requests": requests,
        **{f"{name}s": sorted(known - {""}) for name, known in labels.items()},
        "phase": "EAMs only" if aggregate else phases,
        "tokens": None if aggregate else sum(tokens),
        **{name: asdict(sums[phase].found()) for name, phase in PHASES.items() if sums[phase].there},
        "foresight": [asdict(each) for each in seen.found()],
    }


PHASES = {"prefill": PREFILL, "decode": DECODE}


class _PhaseSums:
    """What the statistics of a phase are made of, added up over the pieces of a trace."""

    def __init__(self, phase: int, pieces: Iterable[Trace] = ()) -> None:
        self.tokens = self.requests = 0
        self.there = False
        self._phase = phase
        self._counted = np.zeros(3, np.int64)  # experts of requests, and those activated, and repeatedly
        self._popular: Int = np.zeros((1, 1), np.int64)  # [L, E] lookups
        self._reuse = np.zeros(2, np.int64)  # experts in common with the token before, of so many
        self._windows = np.zeros((2, len(WINDOWS)), np.int64)  # kept and hits
        self._lookups = 0
        self._sample, self._labels = list[NDArray[np.uint32]](), list[str]()  # of every `_every`-th request
        self._every = 1
        for piece in pieces:
            self.add(piece)

    def add(self, trace: Trace) -> None:
        self._trace, here = trace, trace.phase == self._phase
        self.tokens += int(np.count_nonzero(here))
        eams = trace.eams(self._phase)
        self.there |= bool(eams.any() if trace.aggregate is not None else here.any())
        used = eams.any(axis=(1, 2))
        eams, labels = eams[used], _labels(trace)[used]
        self._counted += np.array([eams.size, np.count_nonzero(eams), np.count_nonzero(eams > 1)])
        self._popular = self._popular + eams.sum(axis=0)
        self._reuse += _reuse(trace, here)
        self._add_windows(trace, here)
        for eam, label in zip(eams, labels, strict=True):
            if self.requests % self._every == 0:
                self._sample.append(eam.astype(np.uint32).ravel())
                self._labels.append(label)
            self.requests += 1
            if len(self._sample) > SAMPLE:
                self._sample, self._labels, self._every = self._sample[::2], self._labels[::2], 2 * self._every

    def found(self) -> PhaseStats:
        """Return the statistics of the phase. At least one piece was added."""
        trace, (size, activated, repeated), (common, routed) = self._trace, self._counted.tolist(), self._reuse.tolist()
        return PhaseStats(
            requests=self.requests,
            tokens=self.tokens if trace.aggregate is None else None,
            activated=activated / size if size else None,
            repeated=repeated / size if size else None,
            popular=_popular(self._popular),
            reuse=Reuse(common / routed if routed else None, trace.top_k / trace.num_experts),
            working_sets=self._working_sets(trace.layers * trace.num_experts),
            similarity=_similarity(self._sample, self._labels, self._every == 1),
        )

    def _add_windows(self, trace: Trace, here: NDArray[np.bool_]) -> None:
        for first, last in pairwise(trace.offsets.tolist()):
            ids = trace.experts[first:last][here[first:last]]
            token, layer, _ = np.nonzero(ids != trace.sentinel)
            expert = layer * trace.num_experts + ids[ids != trace.sentinel]
            order = np.argsort(expert, kind="stable")
            expert, token = expert[order], token[order]
            again = expert[1:] == expert[:-1]
            gaps, rest = np.diff(token)[again], len(ids) - token[np.append(~again, True)[: len(token)]]
            self._lookups += len(token)
            for i, window in enumerate(WINDOWS):
                kept = np.minimum(gaps, window).sum() + np.minimum(rest, window).sum()
                self._windows[:, i] += kept, np.count_nonzero(gaps <= window)

    def _working_sets(self, total: int) -> list[WorkingSet] | None:
        if not self._lookups:
            return None
        return [
            WorkingSet(n, kept / self.tokens / total, hits / self._lookups)
            for n, kept, hits in zip(WINDOWS, *self._windows.tolist(), strict=True)
        ]


def _labels(trace: Trace) -> NDArray[Any]:
    """[requests] the task, or the dataset in its place; "": no label."""
    return trace.requests["task"].where(trace.requests["task"] != "", trace.requests["dataset"]).to_numpy(object)


def _reuse(trace: Trace, here: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the experts of `Reuse.share`, and of how many, over all pairs of adjacent tokens."""
    request = np.repeat(np.arange(len(trace.requests)), np.diff(trace.offsets))
    second = np.flatnonzero((request[1:] == request[:-1]) & here[1:] & here[:-1]) + 1
    common = routed = 0
    for rows in np.array_split(second, max(1, len(second) // 4096)):
        now, before = trace.experts[rows], trace.experts[rows - 1]
        for j in range(trace.top_k):
            common += int(np.count_nonzero((before == now[..., j : j + 1]) & (before != trace.sentinel)))
        uses = (before != trace.sentinel).any(axis=2, keepdims=True)
        routed += int(np.count_nonzero((now != trace.sentinel) & uses))
    return common, routed


def _popular(counts: NDArray[np.int64]) -> float | None:
    """Return the share of `counts` [L, E] in the largest quarter of each row, rounded up."""
    quarter = -(-counts.shape[1] // 4)
    total = int(counts.sum())
    return float(np.sort(counts, axis=1)[:, -quarter:].sum() / total) if total else None


def _similarity(eams: Sequence[NDArray[np.uint32]], labels: Sequence[str], all_: bool) -> Similarity:
    """eams: of each request [L * E], none of them zero; labels: of each, "" without; all_: none is left out."""
    flat, tasks = np.array(eams, np.float64), pd.factorize(np.array([label or None for label in labels], object))[0]
    flat /= np.linalg.norm(flat, axis=-1, keepdims=True)
    cosine = flat @ flat.T
    other = ~np.eye(len(eams), dtype=bool)
    if not other.any():
        return Similarity(None, None, None, None, None, None, None, len(eams))
    labelled = np.flatnonzero(tasks >= 0)
    tasks = tasks[labelled]
    of_tasks, apart = cosine[np.ix_(labelled, labelled)], other[np.ix_(labelled, labelled)]
    same = tasks[:, None] == tasks
    several = len(set(tasks.tolist())) > 1
    return Similarity(
        all_pairs=_mean(cosine[other]),
        nearest=_mean(np.where(other, cosine, -1.0).max(axis=1)),
        next=_mean(np.diag(cosine, 1)) if all_ else None,
        within_task=_mean(of_tasks[same & apart]) if several else None,
        across_tasks=_mean(of_tasks[~same]),
        nearest_same_task=_mean(tasks[np.where(apart, of_tasks, -1.0).argmax(axis=1)] == tasks) if several else None,
        chance=_mean(same[apart]) if several else None,
        compared=len(eams),
    )


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if values.size else None
