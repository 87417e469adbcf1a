"""Local routing consistency: how far the tokens of a segment agree on their experts, whatever a cache does.

SRP and SCH of "Not All Models Suit Expert Offloading" (arXiv 2505.16056, sections 2.2, 2.3 and appendix C.1). Where its
text is silent, the authors' code (github.com/ljcleo/moe-lrc: `srp_calc`, `calc_fsf`) decides; a difference is named at
its place. A sequence is a request, all its tokens in order of execution, prefill and decode alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from policies.core.compiled import allocating
from traces.trace import AnyTrace

SEGMENTS = (4, 16, 64)
"""Lengths of segments, in tokens."""

Int = NDArray[np.int64]


@dataclass(frozen=True)
class Locality:
    """The metrics of one segment length, of all experts of the model as one group; None if no request is as long.

    `sch` of a cache as large as one token's experts, `sch2` of one twice that, which the paper recommends.
    """

    segment: int
    srp: float | None
    size_ratio: float | None  # experts that the best segment router activates, over those of the router
    sch: float
    sch2: float


def locality(trace: AnyTrace, segments: tuple[int, ...] = SEGMENTS) -> list[Locality]:
    total, active = trace.layers * trace.num_experts, trace.layers * trace.top_k
    found = []
    for m in segments:
        best, ratio = srp(trace, m)
        rates = sch(trace, m, min(2 * active, total))
        found.append(Locality(m, best, ratio, float(rates[active]), float(rates[-1])))
    return found


def srp(trace: AnyTrace, m: int) -> tuple[float | None, float | None]:
    """Segment routing best performance, and the size ratio of the router that reaches it (equations 5 and 6).

    SRP(E, m) = max over a of 2 * sum_{f >= a} f / (sum_{f >= a} m + sum f), over all (segment, expert): f is the number
    of the segment's m tokens that activate the expert; a segment starts at every token that has m from there on. It is
    the best F1 of a router that may decide only once a segment. None for both without such a segment.
    """
    pairs = np.zeros(m + 1, np.int64)
    for ids in _sequences(trace):
        _count_segments(ids, m, trace.layers * trace.num_experts, pairs)
    f = np.arange(m + 1)
    matched, predicted = (np.cumsum((pairs * each)[::-1])[::-1] for each in (f, m))
    active = int(matched[0])
    if not active:
        return None, None
    f1 = 2 * matched / (predicted + active)
    best = int(f1.argmax())
    return float(f1[best]), float(predicted[best] / active)


def sch(trace: AnyTrace, m: int, slots: int) -> NDArray[np.float64]:
    """Segment cache best hit rate of caches up to `slots`, float64[slots + 1], that of none first: mean over requests.

    The cache is shared by all layers and looked up for a token at once (section 2.3); then it takes in the token's
    experts one by one, each time evicting the expert activated least often in the segment that starts with this
    token, m tokens long, less what has been served of it; ties to the least recently used. As in the authors' code,
    free slots are filled ahead of time: the n-th distinct expert of a request hits if the cache has n slots.
    """
    total, routed = trace.layers * trace.num_experts, (ids for ids in _sequences(trace) if (ids >= 0).any())
    rates = [_segment_hits(ids, m, total, slots) / np.count_nonzero(ids >= 0) for ids in routed]
    by_place = np.mean(rates, axis=0) if rates else np.zeros(slots)
    return np.concatenate([[0.0], np.cumsum(by_place)])


def _sequences(trace: AnyTrace) -> Iterator[Int]:
    """For each request the ids of its tokens' experts, int64[tokens, L * k], ascending; -1: nothing routed."""
    first = np.arange(trace.layers, dtype=np.int64)[:, None] * trace.num_experts
    for i in range(len(trace.requests)):
        chosen = trace.rows(i)["experts"].astype(np.int64)
        ids = np.where(chosen == trace.sentinel, -1, chosen + first)
        yield np.sort(ids.reshape(len(ids), trace.layers * trace.top_k), axis=1)


@allocating
def _count_segments(ids: Int, m: int, total: int, pairs: Int) -> None:
    f, with_f = np.zeros(total, np.int64), np.zeros(m + 1, np.int64)
    with_f[0] = total
    for token in range(len(ids)):
        if token >= m:
            for expert in ids[token - m]:
                if expert >= 0:
                    with_f[f[expert]] -= 1
                    f[expert] -= 1
                    with_f[f[expert]] += 1
        for expert in ids[token]:
            if expert >= 0:
                with_f[f[expert]] -= 1
                f[expert] += 1
                with_f[f[expert]] += 1
        if token >= m - 1:
            pairs += with_f


@allocating
def _segment_hits(ids: Int, m: int, total: int, slots: int) -> Int:
    """Hits of one request by place in the list, int64[slots]; a stack algorithm, see sim.analysis.curves."""
    uses, last = np.zeros(total, np.int64), np.zeros(total, np.int64)
    stack, place = np.empty(slots, np.int64), np.full(total, -1, np.int64)
    hits = np.zeros(slots, np.int64)
    held = clock = distinct = 0
    for token in range(min(m - 1, len(ids))):
        _use(uses, ids[token])
    for token in range(len(ids)):
        if token + m - 1 < len(ids):
            _use(uses, ids[token + m - 1])
        for i in range(held):
            place[stack[i]] = i
        for expert in ids[token]:
            if expert >= 0:
                at = place[expert]
                if last[expert] == 0:
                    at = distinct
                    distinct += 1
                if 0 <= at < slots:
                    hits[at] += 1
        for i in range(held):
            place[stack[i]] = -1
        for expert in ids[token]:
            if expert >= 0:
                clock += 1
                uses[expert] -= 1
                last[expert] = clock
                held = _to_top(stack, held, expert, uses, last)
    return hits


@allocating
def _use(uses: Int, experts: Int) -> None:
    for expert in experts:
        if expert >= 0:
            uses[expert] += 1


@allocating
def _to_top(stack: Int, held: int, expert: int, uses: Int, last: Int) -> int:
    """Put an expert first; down to its old place each gives way to a better one pushed out above. The new length."""
    pushed = expert
    for i in range(held):
        here = stack[i]
        better = uses[here] > uses[pushed] or (uses[here] == uses[pushed] and last[here] > last[pushed])
        if here == expert or i == 0 or not better:
            stack[i], pushed = pushed, here
        if here == expert:
            return held
    if held < len(stack):
        stack[held] = pushed
        held += 1
    return held
