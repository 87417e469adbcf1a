"""What a trace shows about its routing: the three properties that expert caching lives on.

Sparsity (few experts per request), reuse (adjacent tokens agree) and similarity (requests fall into groups by
their EAMs) are what MoE-Infinity (arXiv 2401.14361) observes and builds on. Phases are kept apart.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.steps import DECODE, PREFILL
from traces.trace import Trace

SAMPLE = 2_000
"""Requests that are compared with each other at most; more are thinned out evenly."""


@dataclass(frozen=True)
class Reuse:
    """Agreement of tokens that follow each other in a request and phase, by layer and then averaged.

    The share of a token's experts that the token before it chose in the same layer; `chance` is what routing
    at random would give (k / E).
    """

    share: float | None  # None if no two tokens with routed experts are adjacent
    chance: float


@dataclass(frozen=True)
class Similarity:
    """Cosine of flattened EAMs, averaged over pairs of requests; the dataset stands in for a task not labelled.

    `nearest_same_task` is the share of requests whose most similar other request has the same task; `chance`
    what a random other request would give. None where the trace has no such pairs, or only one task.
    """

    all_pairs: float | None
    within_task: float | None
    across_tasks: float | None
    nearest_same_task: float | None
    chance: float | None
    compared: int  # requests


@dataclass(frozen=True)
class PhaseStats:
    """One phase of a trace. Shares are of the L * E experts, averaged over the requests that routed in this
    phase; None if none did.
    """

    requests: int  # that routed in this phase
    tokens: int | None  # None: the trace holds EAMs only
    activated: float | None  # share of the experts that a request uses at all
    repeated: float | None  # share of the experts that a request uses for two tokens or more
    reuse: Reuse
    similarity: Similarity


def statistics(trace: Trace) -> dict[str, PhaseStats]:
    """The statistics of each phase that the trace holds, by its name."""
    names = {PREFILL: "prefill", DECODE: "decode"}
    held = {
        phase: (trace.phase == phase).any() if trace.aggregate is None else trace.aggregate[phase].any()
        for phase in names
    }
    return {name: _of_phase(trace, phase) for phase, name in names.items() if held[phase]}


def summary(trace: Trace) -> dict[str, Any]:
    """What `moe-trace info` tells, as plain values that JSON can hold."""
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
    }


def _of_phase(trace: Trace, phase: int) -> PhaseStats:
    eams = trace.eams(phase)
    eams, tasks = eams[used := eams.any(axis=(1, 2))], _tasks(trace)[used]
    return PhaseStats(
        requests=len(eams),
        tokens=int(np.count_nonzero(trace.phase == phase)) if trace.aggregate is None else None,
        activated=_mean(eams > 0),
        repeated=_mean(eams > 1),
        reuse=Reuse(_reuse(trace, phase), trace.top_k / trace.num_experts),
        similarity=_similarity(eams, tasks),
    )


def _tasks(trace: Trace) -> NDArray[np.int64]:
    """[requests] a number for each task."""
    labels = trace.requests["task"].where(trace.requests["task"] != "", trace.requests["dataset"])
    return np.unique(labels.to_numpy(str), return_inverse=True)[1]


def _reuse(trace: Trace, phase: int) -> float | None:
    """Mean over (adjacent tokens, layer) of |experts in common| / k."""
    request = np.repeat(np.arange(len(trace.requests)), np.diff(trace.offsets))
    here = trace.phase == phase
    second = np.flatnonzero((request[1:] == request[:-1]) & here[1:] & here[:-1]) + 1
    common = 0
    for rows in np.array_split(second, max(1, len(second) // 4096)):
        now, before = trace.experts[rows], trace.experts[rows - 1]
        for j in range(trace.top_k):
            common += int(np.count_nonzero((before == now[..., j : j + 1]) & (before != trace.sentinel)))
    routed = int(np.count_nonzero(trace.experts[second] != trace.sentinel))
    return common / routed if routed else None


def _similarity(eams: NDArray[np.int64], tasks: NDArray[np.int64]) -> Similarity:
    """eams: [requests, L, E], none of them zero; tasks: [requests]."""
    chosen = np.linspace(0, len(eams) - 1, min(len(eams), SAMPLE)).astype(np.int64)
    flat, tasks = eams[chosen].reshape(len(chosen), eams.shape[1] * eams.shape[2]).astype(np.float64), tasks[chosen]
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    cosine = flat @ flat.T
    same = tasks[:, None] == tasks
    other = ~np.eye(len(chosen), dtype=bool)
    if not other.any():
        return Similarity(None, None, None, None, None, len(chosen))
    several = len(set(tasks.tolist())) > 1
    nearest = np.argmax(np.where(other, cosine, -1.0), axis=1)
    return Similarity(
        all_pairs=_mean(cosine[other]),
        within_task=_mean(cosine[same & other]) if several else None,
        across_tasks=_mean(cosine[~same]),
        nearest_same_task=float((tasks[nearest] == tasks).mean()) if several else None,
        chance=float(same[other].mean()) if several else None,
        compared=len(chosen),
    )


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if values.size else None
