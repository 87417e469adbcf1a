"""A Markov chain over layers, learned as it runs: which experts of layer l + 1 follow those of layer l.

P(b | a) = (events in which b of layer l + 1 followed a of layer l) / (events of layer l + 1 that followed a), over
the whole run. The score of b is the mean of P(b | a) over the experts a of the current event, which orders as the
sum does and is itself a share. The `n` best above 0 are proposed, at their score as priority, ties to the lower id.
Steps do not chain: nothing is proposed at the last layer.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from policies.contract import NOTHING, Event, Float, Int, Prefetcher, Shape
from policies.limits import Limits
from policies.ranking import best
from policies.registry import prefetcher
from traces.errors import InputError

Counts = NDArray[np.int32]


@dataclass(frozen=True)
class MarkovOptions(Limits):
    """n: experts proposed for the next layer. A threshold is a share, 0 to 1."""

    n: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n < 0:
            raise InputError(f"markov needs n >= 0, not {self.n}")


@njit(cache=True, nogil=True)
def _learn(followed: Counts, times: Counts, E: int, before: Int, experts: Int, first: int, last: int) -> None:
    """Each of `before` (ids of the layer below) was followed by each of experts[first:last]."""
    for a in before:
        times[a] += 1
        for i in range(first, last):
            followed[a, experts[i] % E] += 1


@njit(cache=True, nogil=True)
def _score(followed: Counts, times: Counts, experts: Int, first: int, last: int, scores: Float) -> None:
    """scores[b] = mean over experts[first:last] of P(b | a); an expert that nothing has followed yet says nothing."""
    scores[:] = 0
    for i in range(first, last):
        a = experts[i]
        if times[a]:
            share = 1.0 / (times[a] * (last - first))
            for b in range(len(scores)):
                scores[b] += followed[a, b] * share


@prefetcher("markov")
class Markov(Prefetcher):
    """The next layer's experts that followed the current ones most often (learned as it runs)."""

    Options = MarkovOptions

    def __init__(self, shape: Shape, options: MarkovOptions) -> None:
        super().__init__(shape, options)
        self._followed: Counts = np.zeros((shape.total, shape.experts), np.int32)  # [L*E, E]
        self._times: Counts = np.zeros(shape.total, np.int32)  # [L*E]
        self._before: Int = np.empty(0, np.int64)  # of the layer below in this step
        self._scores = np.empty(shape.experts)
        n = min(options.n, shape.experts)
        self._best, self._priorities = np.empty(n, np.int64), np.empty(n)

    def observe(self, event: Event) -> None:
        """Learn what has followed the layer below."""
        experts, first, last = event.request_experts, event.first, event.last
        if event.layer:
            _learn(self._followed, self._times, self.shape.experts, self._before, experts, first, last)
        self._before = event.experts.copy()

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The n best of the next layer."""
        if event.layer == self.shape.layers - 1 or not len(self._best):
            return NOTHING
        _score(self._followed, self._times, event.request_experts, event.first, event.last, self._scores)
        base = (event.layer + 1) * self.shape.experts
        n = best(self._scores, base, 0.0, self._best, self._priorities)
        return self._best[:n], self._priorities[:n]
