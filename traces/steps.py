"""Requests as an engine plays them: steps of L events, each the distinct experts that one router chose.

A step is one forward pass (the prefill of a request, or one decoded token); an event is one (step, layer).
Expert `e` of layer `l` has the id `l * E + e`; ids ascend within an event.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PREFILL, DECODE = 0, 1

Int = NDArray[np.int64]


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


def decode_steps(request: int, experts: NDArray[np.integer], E: int, sentinel: int, context: Int) -> RequestSteps:
    """Play each token as a step of its own.

    experts: [tokens, L, k] ids within a layer, `sentinel` where nothing was routed; context: [tokens].
    """
    tokens, L, _ = experts.shape
    chosen = np.sort(experts.astype(np.int64), axis=-1)
    here = chosen != sentinel
    ids = chosen + (np.arange(L, dtype=np.int64) * E)[None, :, None]
    offsets = np.zeros(tokens * L + 1, np.int64)
    np.cumsum(here.sum(axis=-1).ravel(), out=offsets[1:])
    flat = ids[here]
    return RequestSteps(
        request=request,
        phase=np.full(tokens, DECODE, np.uint8),
        tokens=np.ones(tokens, np.int64),
        context=context.astype(np.int64),
        offsets=offsets,
        experts=flat,
        counts=np.ones(len(flat), np.int64),
    )


def prefill_step(request: int, experts: NDArray[np.integer], E: int, sentinel: int) -> RequestSteps:
    """Play all tokens as one step. experts: [tokens, L, k] ids in a layer, `sentinel` where not routed."""
    tokens, L, _ = experts.shape
    chosen = experts.astype(np.int64)
    ids = chosen + (np.arange(L, dtype=np.int64) * E)[None, :, None]
    counts = np.bincount(ids[chosen != sentinel], minlength=L * E)
    used = np.flatnonzero(counts)
    offsets = np.zeros(L + 1, np.int64)
    np.cumsum(np.bincount(used // E, minlength=L), out=offsets[1:])
    return RequestSteps(
        request=request,
        phase=np.array([PREFILL], np.uint8),
        tokens=np.array([tokens], np.int64),
        context=np.array([tokens], np.int64),
        offsets=offsets,
        experts=used.astype(np.int64),
        counts=counts[used].astype(np.int64),
    )


def join(parts: list[RequestSteps]) -> RequestSteps:
    """The steps of one request, one part after the other (its prefill, then its decode)."""
    ends = np.cumsum([0] + [len(part.experts) for part in parts])
    return RequestSteps(
        request=parts[0].request,
        phase=np.concatenate([part.phase for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        context=np.concatenate([part.context for part in parts]),
        offsets=np.concatenate(
            [np.zeros(1, np.int64)] + [part.offsets[1:] + end for part, end in zip(parts, ends, strict=False)]
        ),
        experts=np.concatenate([part.experts for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
    )
