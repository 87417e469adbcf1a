"""A Markov chain over layers, learned as it runs: which experts of layer l + 1 follow those of layer l.

P(b | a) = (events in which b of layer l + 1 followed a of layer l) / (events of layer l + 1 that followed a), over
the whole run. The score of b is the mean of P(b | a) over the experts a of the current event, which orders as the
sum does and is itself a share. The `n` best above 0 are proposed, at their score as priority, ties to the lower id.
Steps do not chain: nothing is proposed at the last layer.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import Event, Float, Int, Prefetcher, Shape
from policies.core.ranking import best
from policies.core.registry import prefetcher
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


class Chain(NamedTuple):
    """What has followed what, over the whole run."""

    followed: Counts  # [L*E, E]
    times: Counts  # [L*E]
    before: Int  # [E + 1] of the layer below in this step; last, how many
    scores: Float  # [E] of the next layer
    most: Int  # [1] experts proposed


def nothing_followed(shape: Shape, options: MarkovOptions) -> Chain:
    """The start of a run."""
    E = shape.experts
    return Chain(
        followed=np.zeros((shape.total, E), np.int32),
        times=np.zeros(shape.total, np.int32),
        before=np.zeros(E + 1, np.int64),
        scores=np.empty(E),
        most=np.array([min(options.n, E)]),
    )


@compiled
def observe(chain: Chain, layer: int, experts: Int, first: int, last: int) -> None:
    """Each expert of the layer below was followed by each of experts[first:last]."""
    before = chain.before
    E = len(before) - 1
    if layer:
        for i in range(before[E]):
            chain.times[before[i]] += 1
            for j in range(first, last):
                chain.followed[before[i], experts[j] % E] += 1
    for i in range(first, last):
        before[i - first] = experts[i]
    before[E] = last - first


@compiled
def propose(chain: Chain, layer: int, L: int, experts: Int, first: int, last: int, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the best of the layer after `layer`, which chose experts[first:last]; how many."""
    most = chain.most[0]
    if layer == L - 1 or most == 0:
        return 0
    _score(chain.followed, chain.times, experts, first, last, chain.scores)
    return best(chain.scores, (layer + 1) * len(chain.scores), 0.0, ids[:most], priorities[:most])


@compiled
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
        self.chain = nothing_followed(shape, options)
        self._ids, self._priorities = np.empty(shape.experts, np.int64), np.empty(shape.experts)

    def observe(self, event: Event) -> None:
        """Learn what has followed the layer below."""
        observe(self.chain, event.layer, event.experts, 0, len(event.experts))

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The n best of the next layer."""
        accesses = event.experts, 0, len(event.experts)
        n = propose(self.chain, event.layer, self.shape.layers, *accesses, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
