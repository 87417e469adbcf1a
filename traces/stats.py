"""What a trace shows about its routing: the properties that expert caching lives on.

Sparsity (few experts per request), reuse (adjacent tokens agree) and similarity (requests fall into groups by
their EAMs) are what MoE-Infinity (arXiv 2401.14361) observes and builds on. Working sets (Denning 1968) show reuse
beyond the token before. Phases are kept apart.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.steps import DECODE, PREFILL
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


def foresight(trace: Trace) -> list[Foresight]:
    """Return the quality of the trace's picks, over all its tokens, by distance and least score; none without."""
    if trace.lookahead is None or trace.lookahead_scores is None or trace.meta.lookahead is None:
        return []
    found = []
    for place, distance in enumerate(trace.meta.lookahead.distances):
        ids, scores = trace.lookahead[:, distance:, place], trace.lookahead_scores[:, distance:, place]
        chosen, here = trace.experts[:, distance:], ids != trace.sentinel
        right = np.zeros(ids.shape, bool)
        for rank in range(trace.top_k):
            right |= here & (ids == chosen[..., rank, None])
        needed = int(np.count_nonzero((chosen != trace.sentinel) & here.any(-1, keepdims=True)))
        for least in SCORES if needed else ():
            picked = here & (np.arange(ids.shape[-1]) < trace.top_k if least is None else scores >= least)
            hits, total = int(np.count_nonzero(right & picked)), int(np.count_nonzero(picked))
            found.append(Foresight(distance, least, hits / needed, hits / total if total else None))
    return found


def statistics(trace: Trace) -> dict[str, PhaseStats]:
    """Return the statistics of each phase that the trace holds, by its name."""
    names = {PREFILL: "prefill", DECODE: "decode"}
    held = {
        phase: (trace.phase == phase).any() if trace.aggregate is None else trace.aggregate[phase].any()
        for phase in names
    }
    return {name: _of_phase(trace, phase) for phase, name in names.items() if held[phase]}


def summary(trace: Trace) -> dict[str, Any]:
    """Return what `moe-trace info` prints, as plain values that JSON can hold."""
    meta, requests = trace.meta, trace.requests
    return {
        "name": trace.name,
        **asdict(meta),
        "requests": len(requests),
        "datasets": sorted({name for name in requests["dataset"] if name}),
        "tasks": sorted({name for name in requests["task"] if name}),
        "phase": trace.phases if trace.aggregate is None else "EAMs only",
        "tokens": len(trace.experts) if trace.aggregate is None else None,
        **{name: asdict(stats) for name, stats in statistics(trace).items()},
        "foresight": [asdict(each) for each in foresight(trace)],
    }


def _of_phase(trace: Trace, phase: int) -> PhaseStats:
    eams = trace.eams(phase)
    eams, tasks = eams[used := eams.any(axis=(1, 2))], _tasks(trace)[used]
    return PhaseStats(
        requests=len(eams),
        tokens=int(np.count_nonzero(trace.phase == phase)) if trace.aggregate is None else None,
        activated=_mean(eams > 0),
        repeated=_mean(eams > 1),
        popular=_popular(eams.sum(axis=0)),
        reuse=Reuse(_reuse(trace, phase), trace.top_k / trace.num_experts),
        working_sets=_working_sets(trace, phase),
        similarity=_similarity(eams, tasks),
    )


def _tasks(trace: Trace) -> NDArray[np.int64]:
    """[requests] a number for each task; -1: no label."""
    labels = trace.requests["task"].where(trace.requests["task"] != "", trace.requests["dataset"])
    return pd.factorize(labels.where(labels != ""))[0]


def _reuse(trace: Trace, phase: int) -> float | None:
    """Return `Reuse.share`, over all pairs of adjacent tokens and all layers that the first of them uses."""
    request = np.repeat(np.arange(len(trace.requests)), np.diff(trace.offsets))
    here = trace.phase == phase
    second = np.flatnonzero((request[1:] == request[:-1]) & here[1:] & here[:-1]) + 1
    common = routed = 0
    for rows in np.array_split(second, max(1, len(second) // 4096)):
        now, before = trace.experts[rows], trace.experts[rows - 1]
        for j in range(trace.top_k):
            common += int(np.count_nonzero((before == now[..., j : j + 1]) & (before != trace.sentinel)))
        uses = (before != trace.sentinel).any(axis=2, keepdims=True)
        routed += int(np.count_nonzero((now != trace.sentinel) & uses))
    return common / routed if routed else None


def _popular(counts: NDArray[np.int64]) -> float | None:
    """Return the share of `counts` [L, E] in the largest quarter of each row, rounded up."""
    quarter = -(-counts.shape[1] // 4)
    total = int(counts.sum())
    return float(np.sort(counts, axis=1)[:, -quarter:].sum() / total) if total else None


def _working_sets(trace: Trace, phase: int) -> list[WorkingSet] | None:
    kept, hits, lookups = np.zeros(len(WINDOWS), np.int64), np.zeros(len(WINDOWS), np.int64), 0
    for first, last in pairwise(trace.offsets.tolist()):
        ids = trace.experts[first:last][trace.phase[first:last] == phase]
        token, layer, _ = np.nonzero(ids != trace.sentinel)
        expert = layer * trace.num_experts + ids[ids != trace.sentinel]
        order = np.argsort(expert, kind="stable")
        expert, token = expert[order], token[order]
        again = expert[1:] == expert[:-1]
        gaps, rest = np.diff(token)[again], len(ids) - token[np.append(~again, True)[: len(token)]]
        lookups += len(token)
        for i, window in enumerate(WINDOWS):
            kept[i] += np.minimum(gaps, window).sum() + np.minimum(rest, window).sum()
            hits[i] += np.count_nonzero(gaps <= window)
    tokens, total = int(np.count_nonzero(trace.phase == phase)), trace.layers * trace.num_experts
    if not lookups:
        return None
    return [
        WorkingSet(n, float(h / tokens / total), float(x / lookups))
        for n, h, x in zip(WINDOWS, kept, hits, strict=True)
    ]


def _similarity(eams: NDArray[np.int64], tasks: NDArray[np.int64]) -> Similarity:
    """eams: [requests, L, E], none of them zero; tasks: [requests]."""
    chosen = np.linspace(0, len(eams) - 1, min(len(eams), SAMPLE)).astype(np.int64)
    flat, tasks = eams[chosen].reshape(len(chosen), eams.shape[1] * eams.shape[2]).astype(np.float64), tasks[chosen]
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    cosine = flat @ flat.T
    other = ~np.eye(len(chosen), dtype=bool)
    if not other.any():
        return Similarity(None, None, None, None, None, None, None, len(chosen))
    labelled = np.flatnonzero(tasks >= 0)
    tasks = tasks[labelled]
    of_tasks, apart = cosine[np.ix_(labelled, labelled)], other[np.ix_(labelled, labelled)]
    same = tasks[:, None] == tasks
    several = len(set(tasks.tolist())) > 1
    return Similarity(
        all_pairs=_mean(cosine[other]),
        nearest=_mean(np.where(other, cosine, -1.0).max(axis=1)),
        next=_mean(np.diag(cosine, 1)) if len(chosen) == len(eams) else None,
        within_task=_mean(of_tasks[same & apart]) if several else None,
        across_tasks=_mean(of_tasks[~same]),
        nearest_same_task=_mean(tasks[np.where(apart, of_tasks, -1.0).argmax(axis=1)] == tasks) if several else None,
        chance=_mean(same[apart]) if several else None,
        compared=len(chosen),
    )


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if values.size else None
