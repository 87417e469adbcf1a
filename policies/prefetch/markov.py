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
from policies.core.policy import Compiled, Event, Float, Int, Prefetcher, Shape, bounded
from policies.core.ranking import best
from policies.core.registry import prefetcher

Counts = NDArray[np.int32]


@dataclass(frozen=True)
class MarkovOptions(Limits, policy="markov"):
    """n: experts proposed for the next layer. A threshold is a share, 0 to 1."""

    n: int = bounded(4, least=0)


class Chain(NamedTuple):
    """What has followed what, over the whole run."""

    followed: Counts  # [L*E, E]
    times: Counts  # [L*E]
    before: Int  # [batch_slots, E + 1] by request, what the layer below chose in this step; last, how many
    scores: Float  # [E] of the next layer
    most: int  # experts proposed


def begin(shape: Shape, options: MarkovOptions) -> Chain:
    E = shape.experts
    return Chain(
        followed=np.zeros((shape.total, E), np.int32),
        times=np.zeros(shape.total, np.int32),
        before=np.zeros((shape.batch_slots, E + 1), np.int64),
        scores=np.empty(E),
        most=min(options.n, E),
    )


@compiled
def observe(chain: Chain, event: Event) -> None:
    """Each expert of the layer below was followed by each of the same request's."""
    E = len(chain.scores)
    for r in range(len(event.batch_slots)):
        before = chain.before[event.batch_slots[r]]
        first, last = event.offsets[r], event.offsets[r + 1]
        if event.layer:
            for i in range(before[E]):
                chain.times[before[i]] += 1
                for j in range(first, last):
                    chain.followed[before[i], event.own_experts[j] % E] += 1
        for i in range(first, last):
            before[i - first] = event.own_experts[i]
        before[E] = last - first


@compiled
def propose(chain: Chain, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the best of the next layer; how many."""
    most, E = chain.most, len(chain.scores)
    if event.layer == len(chain.times) // E - 1 or most == 0:
        return 0
    _score(chain.followed, chain.times, event.experts, chain.scores)
    return best(chain.scores, (event.layer + 1) * E, 0.0, ids[:most], priorities[:most])


@compiled
def _score(followed: Counts, times: Counts, experts: Int, scores: Float) -> None:
    """scores[b] = mean over `experts` of P(b | a); an expert that nothing has followed yet says nothing."""
    scores[:] = 0
    for a in experts:
        if times[a]:
            share = 1.0 / (times[a] * len(experts))
            for b in range(len(scores)):
                scores[b] += followed[a, b] * share


@prefetcher("markov")
class Markov(Prefetcher):
    """The next layer's experts that followed the current ones most often (learned as it runs)."""

    Options = MarkovOptions
    compiled = Compiled(begin, observe, propose)
