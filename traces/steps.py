"""Requests as an engine runs them: steps of L events, each the distinct experts that one router chose.

A step is one forward pass (the prefill of a request or a chunk of it, or one decoded token, which may have drafted ones
behind it: `traces.drafts`); an event is one (step, layer).
Expert `e` of layer `l` has the id `l * E + e`; ids ascend within an event.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

PREFILL, DECODE = 0, 1

Int = NDArray[np.int64]
Flat = tuple[Int, Int, Int]
"""offsets [S * L + 1], expert ids [A], and the tokens [A] that chose each."""


@dataclass(frozen=True)
class Lookahead:
    """What each event's router picks when given what entered the MoE layer before it, laid out as the choices are.

    The pick for layer l is known once the router of layer l - 1 is, which had the same input: not before.
    """

    layers: int  # L
    offsets: Int  # [S * L + 1]
    experts: Int  # [A'] expert ids, ascending within an event
    counts: Int  # [A'] tokens of the step for which the expert is picked

    def after(self, step: int, layer: int) -> tuple[Int, Int]:
        """Return ids [n] and tokens [n] picked for the layer after `layer` in the step; none after the last one."""
        event = step * self.layers + layer + 1
        picked = slice(self.offsets[event], self.offsets[event + (layer + 1 < self.layers)])
        return self.experts[picked], self.counts[picked]


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
    lookahead: Lookahead | None = None  # None: not recorded
    token_ids: Int | None = None  # [sum of tokens] that the steps take in, in order; -1: withheld; None: not recorded
    drafted: Int | None = None  # [S] of the tokens those that were drafted (rule 20); None: nowhere any
    rejected: Int | None = None  # [S] of these the ones that are not accepted; None as before
    draft_ns: Int | None = None  # [S] what drafting takes before the step; None: no time


def steps_of_rows(
    request: int,
    experts: NDArray[np.integer],
    position: NDArray[np.integer],
    prompt: int,
    E: int,
    sentinel: int,
    lookahead: NDArray[np.integer] | None = None,
    token_id: NDArray[np.integer] | None = None,
    chunk: int | None = None,
) -> RequestSteps:
    """Return the rows of a request as an engine runs them: the first `prompt` as one step, then the others one by one.

    experts, lookahead: [tokens, L, k] ids within a layer, `sentinel` where nothing was routed; position, token_id:
    [tokens], -1 where the id was withheld. chunk: tokens of the prompt that make a step (rule 20); None: all.
    """
    context, parts = position.astype(np.int64) + 1, []
    for first in range(0, prompt, chunk or prompt or 1):
        last = min(first + (chunk or prompt), prompt)
        ahead = None if lookahead is None else lookahead[first:last]
        parts.append(prefill_step(request, experts[first:last], E, sentinel, ahead, first))
    if prompt < len(experts) or not parts:
        ahead = None if lookahead is None else lookahead[prompt:]
        parts.append(decode_steps(request, experts[prompt:], E, sentinel, context[prompt:], ahead))
    steps = join(parts) if len(parts) > 1 else parts[0]
    if token_id is None or (token_id < 0).all():
        return steps
    return replace(steps, token_ids=token_id.astype(np.int64))


def decode_steps(
    request: int,
    experts: NDArray[np.integer],
    E: int,
    sentinel: int,
    context: Int,
    lookahead: NDArray[np.integer] | None = None,
) -> RequestSteps:
    """Run each token as a step. experts, lookahead: [tokens, L, k] ids in a layer or `sentinel`; context: [tokens]."""
    tokens, L, _ = experts.shape
    ahead = None if lookahead is None else Lookahead(L, *_token_by_token(lookahead, E, sentinel))
    phase, ones = np.full(tokens, DECODE, np.uint8), np.ones(tokens, np.int64)
    choices = _token_by_token(experts, E, sentinel)
    return RequestSteps(request, phase, ones, context.astype(np.int64), *choices, lookahead=ahead)


def prefill_step(
    request: int,
    experts: NDArray[np.integer],
    E: int,
    sentinel: int,
    lookahead: NDArray[np.integer] | None = None,
    before: int = 0,
) -> RequestSteps:
    """Run all tokens, [tokens, L, k] ids or `sentinel`, as one step behind the `before` first ones of the prompt."""
    tokens, L, _ = experts.shape
    ahead = None if lookahead is None else Lookahead(L, *_all_together(lookahead, E, sentinel))
    phase, count = np.array([PREFILL], np.uint8), np.array([tokens], np.int64)
    return RequestSteps(request, phase, count, before + count, *_all_together(experts, E, sentinel), lookahead=ahead)


def _token_by_token(chosen: NDArray[np.integer], E: int, sentinel: int) -> Flat:
    """Return [tokens, L, k] laid out flat, an event for each (token, layer)."""
    tokens, L, _ = chosen.shape
    ascending = np.sort(chosen, axis=-1).astype(np.int64)
    here = ascending != sentinel
    ids = ascending + (np.arange(L, dtype=np.int64) * E)[None, :, None]
    offsets = np.zeros(tokens * L + 1, np.int64)
    np.cumsum(here.sum(axis=-1).ravel(), out=offsets[1:])
    flat = ids[here]
    return offsets, flat, np.ones(len(flat), np.int64)


def _all_together(chosen: NDArray[np.integer], E: int, sentinel: int) -> Flat:
    """Return [tokens, L, k] laid out flat, an event for each layer."""
    L = chosen.shape[1]
    wide = chosen.astype(np.int64)
    ids = wide + (np.arange(L, dtype=np.int64) * E)[None, :, None]
    counts = np.bincount(ids[wide != sentinel], minlength=L * E)
    used = np.flatnonzero(counts)
    offsets = np.zeros(L + 1, np.int64)
    np.cumsum(np.bincount(used // E, minlength=L), out=offsets[1:])
    return offsets, used.astype(np.int64), counts[used].astype(np.int64)


def join(parts: list[RequestSteps]) -> RequestSteps:
    """Return the steps of one request, one part after the other (its prefill, then its decode)."""
    offsets, experts, counts = _end_to_end([(part.offsets, part.experts, part.counts) for part in parts])
    ahead = [part.lookahead for part in parts if part.lookahead]
    picks = [(each.offsets, each.experts, each.counts) for each in ahead]
    return RequestSteps(
        request=parts[0].request,
        phase=np.concatenate([part.phase for part in parts]),
        tokens=np.concatenate([part.tokens for part in parts]),
        context=np.concatenate([part.context for part in parts]),
        offsets=offsets,
        experts=experts,
        counts=counts,
        lookahead=Lookahead(ahead[0].layers, *_end_to_end(picks)) if ahead else None,
    )


def _end_to_end(parts: list[Flat]) -> Flat:
    ends = np.cumsum([0] + [len(ids) for _, ids, _ in parts])
    shifted = [offsets[1:] + end for (offsets, _, _), end in zip(parts, ends, strict=False)]
    offsets = np.concatenate([np.zeros(1, np.int64), *shifted])
    return offsets, np.concatenate([ids for _, ids, _ in parts]), np.concatenate([counts for _, _, counts in parts])
