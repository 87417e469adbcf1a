"""How long things take, as an engine asks for it: whole nanoseconds, every duration rounded up.

Rules 11, 12 and 14 of docs/contract.md: the compute stream's parts as functions of tokens and context length, and
the host link as latency plus bytes over bandwidth.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from traces.steps import RequestSteps

Int = NDArray[np.int64]


class Timing(Protocol):
    """Durations of everything that the compute stream does."""

    @property
    def predictor_ns(self) -> int:
        """The predictor's time on the compute stream, paid once an event."""
        ...

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """Before the router of MoE layer `layer`; `context`: tokens in the KV cache when the step ends."""
        ...

    def expert_ns(self, tokens: int) -> int:
        """One expert on `tokens` tokens."""
        ...

    def combine_ns(self, tokens: int) -> int:
        """The weighted sum of the experts' outputs, once an event."""
        ...

    def head_ns(self, tokens: int) -> int:
        """After the last MoE layer: whatever is left of the model, and its vocabulary matmul."""
        ...


class Durations(NamedTuple):
    """What the parts of one request take, in ns."""

    dense: Int  # [S, L] before each router
    expert: Int  # [most + 1] one expert, by its tokens
    combine: Int  # [S] of each event of the step
    head: Int  # [S]


class DurationTables:
    """`Durations` of request after request. Each value is the timing's own, asked for once and remembered."""

    def __init__(self, timing: Timing, layers: int) -> None:
        self._timing = timing
        self._layers = layers
        self._places: dict[tuple[int, int], int] = {}  # of (tokens, context) in the tables
        self._steps: list[list[int]] = []  # of each: every layer's dense part, combine, head
        self._table: Int = np.empty((0, layers + 2), np.int64)
        self._expert = [0]

    def of(self, request: RequestSteps) -> Durations:
        """Of a request of S steps."""
        steps = list(zip(request.tokens.tolist(), request.context.tolist(), strict=True))
        for tokens, context in steps:
            if (tokens, context) not in self._places:
                self._places[tokens, context] = len(self._steps)
                self._steps.append(self._of_step(tokens, context))
        if len(self._table) < len(self._steps):
            new = np.array(self._steps[len(self._table) :], np.int64)
            self._table = np.concatenate([self._table, new])
        most = int(request.counts.max(initial=1))
        self._expert += [self._timing.expert_ns(tokens) for tokens in range(len(self._expert), most + 1)]
        found = self._table[[self._places[step] for step in steps]]
        dense, combine, head = (np.ascontiguousarray(part) for part in (found[:, :-2], found[:, -2], found[:, -1]))
        return Durations(dense, np.array(self._expert, np.int64), combine, head)

    def _of_step(self, tokens: int, context: int) -> list[int]:
        timing = self._timing
        dense = [timing.dense_ns(layer, tokens, context) for layer in range(self._layers)]
        return [*dense, timing.combine_ns(tokens), timing.head_ns(tokens)]


@dataclass(frozen=True)
class FixedTiming:
    """Durations that are constants, the experts' linear in tokens: for closed forms and conformance cases."""

    dense: int
    expert: int
    expert_per_token: int
    combine: int
    head: int
    predictor_ns: int = 0

    def dense_ns(self, layer: int, tokens: int, context: int) -> int:
        """The same for all layers, tokens and contexts."""
        return self.dense

    def expert_ns(self, tokens: int) -> int:
        """A constant, and so much more a token."""
        return self.expert + self.expert_per_token * tokens

    def combine_ns(self, tokens: int) -> int:
        """The same for all tokens."""
        return self.combine

    def head_ns(self, tokens: int) -> int:
        """The same for all tokens."""
        return self.head


@dataclass(frozen=True)
class Link:
    """The host link: bandwidth as a fraction of whole numbers, so that rounding never depends on floats."""

    latency_ns: int
    ns_per_byte_num: int
    ns_per_byte_den: int
    expert_bytes: int
    chunk_bytes: int | None = None  # None: the whole expert

    def used_ns(self, sent_bytes: int) -> int:
        """What a transfer has used after `sent_bytes`, latency included; nothing before its first byte."""
        if not sent_bytes:
            return 0
        return self.latency_ns - (-sent_bytes * self.ns_per_byte_num // self.ns_per_byte_den)


def experts_per_layer(timing: Timing, link: Link, layers: int, top_k: int) -> float:
    """How many experts the link carries while one layer of a decoded token computes, all its experts at hand.

    Dense part (mean of the layers), `top_k` experts and combine over one transfer. The context is empty, so that a
    prefetch budget, which is a share of this (`policies.core.limits`), is never overrated.
    """
    dense_ns = sum(timing.dense_ns(layer, 1, 1) for layer in range(layers)) / layers
    computing_ns = dense_ns + top_k * timing.expert_ns(1) + timing.combine_ns(1)
    moving_ns = link.used_ns(link.expert_bytes)
    return computing_ns / moving_ns if moving_ns else math.inf
