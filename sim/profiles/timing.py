"""How long things take, as an engine needs it: whole nanoseconds, every duration rounded up.

Rules 11, 12 and 14 of docs/contract.md: the compute stream's parts as functions of tokens and context length, and
the host link as latency plus bytes over bandwidth.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, repeat
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Int = NDArray[np.int64]


class Timing(Protocol):
    """Durations of everything that the compute stream does."""

    @property
    def predictor_ns(self) -> int:
        """The predictor's time on the compute stream, paid once an event."""

    def dense_ns(self, layer: int, tokens: int, context: int, requests: int = 1) -> int:
        """Return the time before the router of `layer`. context: tokens in the caches of all `requests` at the end."""

    def expert_ns(self, tokens: int, layer: int = 0) -> int:
        """Return the time of one expert of `layer`, in GPU memory. Layers differ where their experts' sizes do."""

    @property
    def hop_ns(self) -> int:
        """The activations' way to the host and back, once an event (rule 13)."""

    def host_ns(self, tokens: int, layer: int = 0) -> int:
        """Return the time of one expert of `layer` on the host."""

    def combine_ns(self, tokens: int, layer: int = 0, context: int = 0) -> int:
        """Return the time of the weighted sum of the experts' outputs, once an event; context: as for `dense_ns`."""

    def head_ns(self, tokens: int, requests: int = 1) -> int:
        """Return the time behind the last MoE layer, with the vocabulary matmul of each request."""


class Durations(NamedTuple):
    """What the parts of one request take, in ns."""

    dense: Int  # [S, L] before each router
    expert: Int  # [L, most + 1] one expert on the GPU, by its tokens
    host: Int  # [L, most + 1] on the host; [0, 0] where it computes none
    combine: Int  # [S, L] after each layer's experts
    head: Int  # [S]


class DurationTables:
    """`Durations` of stretch after stretch of steps, each value computed once; host: experts on the host too."""

    def __init__(self, timing: Timing, layers: int, host: bool = False) -> None:
        self._timing = timing
        self._layers = layers
        self._places: dict[tuple[int, int, int], int] = {}  # of (tokens, context, requests) in the tables
        self._table: Int = np.empty((0, 2 * layers + 1), np.int64)  # every layer's dense part, combine; head
        self._expert = np.zeros((layers, 1), np.int64)
        self._host = np.zeros((layers if host else 0, 1 if host else 0), np.int64)

    def of(self, tokens: Int, context: Int, most: int, requests: int = 1) -> Durations:
        """Return those of S steps of so many requests each; tokens, context: [S]; most: tokens of an expert at most."""
        steps = list(zip(tokens.tolist(), context.tolist(), repeat(requests)))
        if new := [step for step in dict.fromkeys(steps) if step not in self._places]:
            self._places.update(zip(new, count(len(self._places))))
            self._table = np.concatenate([self._table, np.array([self._of_step(*step) for step in new], np.int64)])
        self._expert = self._extended(self._expert, self._timing.expert_ns, most)
        if self._host.size:
            self._host = self._extended(self._host, self._timing.host_ns, most)
        rows = self._table[[*map(self._places.__getitem__, steps)]]
        L = self._layers
        dense, combine, head = (np.ascontiguousarray(part) for part in (rows[:, :L], rows[:, L:-1], rows[:, -1]))
        return Durations(dense, self._expert, self._host, combine, head)

    def _extended(self, table: Int, ns: Callable[[int, int], int], most: int) -> Int:
        """Return a table of durations by layer and tokens, up to `most` of them."""
        more = [[ns(n, layer) for n in range(table.shape[1], most + 1)] for layer in range(self._layers)]
        return np.concatenate([table, np.array(more, np.int64)], axis=1) if more[0] else table

    def _of_step(self, tokens: int, context: int, requests: int) -> list[int]:
        timing = self._timing
        dense = [timing.dense_ns(layer, tokens, context, requests) for layer in range(self._layers)]
        combine = [timing.combine_ns(tokens, layer, context) for layer in range(self._layers)]
        return [*dense, *combine, timing.head_ns(tokens, requests)]


@dataclass(frozen=True)
class FixedTiming:
    """Durations that are constants, the experts' linear in tokens: for closed forms and conformance cases."""

    dense: int
    expert: int
    expert_per_token: int
    combine: int
    head: int
    predictor_ns: int = 0
    hop_ns: int = 0
    host: int = 0
    host_per_token: int = 0

    def dense_ns(self, layer: int, tokens: int, context: int, requests: int = 1) -> int:
        return self.dense

    def expert_ns(self, tokens: int, layer: int = 0) -> int:
        return self.expert + self.expert_per_token * tokens

    def host_ns(self, tokens: int, layer: int = 0) -> int:
        return self.host + self.host_per_token * tokens

    def combine_ns(self, tokens: int, layer: int = 0, context: int = 0) -> int:
        return self.combine

    def head_ns(self, tokens: int, requests: int = 1) -> int:
        return self.head


@dataclass(frozen=True)
class Link:
    """The way up from one tier: bandwidth as a fraction of whole numbers, so that rounding never depends on floats.

    layer_bytes: of an expert of each layer, where they differ (rule 19); `expert_bytes` is the largest then.
    """

    latency_ns: int
    ns_per_byte_num: int
    ns_per_byte_den: int
    expert_bytes: int
    chunk_bytes: int | None = None  # None: the whole expert
    layer_bytes: tuple[int, ...] | None = None

    def bytes_of(self, layer: int) -> int:
        return self.layer_bytes[layer] if self.layer_bytes else self.expert_bytes

    def sizes(self, experts: int) -> Int | None:
        """Return the bytes of every expert, int64[L*E], of a model with so many a layer; None if they are all equal."""
        return np.repeat(np.array(self.layer_bytes, np.int64), experts) if self.layer_bytes else None

    def used_ns(self, sent_bytes: int) -> int:
        """Return the time of a transfer up to `sent_bytes`, latency included; 0 before its first byte."""
        if not sent_bytes:
            return 0
        return self.latency_ns - (-sent_bytes * self.ns_per_byte_num // self.ns_per_byte_den)


def experts_per_layer(timing: Timing, link: Link, layers: int, top_k: int) -> float:
    """Return how many experts the link carries while one layer of a decoded token computes, all experts at hand.

    The context is empty, so that a prefetch budget, a share of this (`policies.core.limits`), is never overrated.
    """
    dense_ns = sum(timing.dense_ns(layer, 1, 1) for layer in range(layers)) / layers
    computing_ns = dense_ns + top_k * timing.expert_ns(1) + timing.combine_ns(1)
    moving_ns = link.used_ns(link.expert_bytes)
    return computing_ns / moving_ns if moving_ns else math.inf
