"""The next layer's gate, applied early: what router l + 1 picks when given what entered MoE layer l.

Speculative loading of mixtral-offloading (Eliseev and Mazur, arXiv 2312.17238, section 3.2), also in AdapMoE
(2408.10284) and HOBBIT (2411.01433): hidden states change little from layer to layer, so the next gate is mostly right
about them. The picks stand in the trace (`moe-trace record --lookahead`); proposed are those that a token would choose,
up to `distance` layers ahead. Priority is the score, the router's probability, added up over the tokens of a prefill,
divided by the distance: `threshold` asks for guesses that are few but sure. Ties fall to the lower id.
"""

from dataclasses import dataclass
from typing import NamedTuple

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import Compiled, Event, Float, Int, Prefetcher, Shape, bounded
from policies.core.registry import prefetcher


@dataclass(frozen=True)
class GateOptions(Limits, policy="gate"):
    """distance: layers ahead whose picks are proposed, as far as they are known."""

    distance: int = bounded(1, least=1)


class Reach(NamedTuple):
    """How far it looks ahead; nothing is learned, the picks stand in the event."""

    distance: int


def begin(shape: Shape, options: GateOptions) -> Reach:
    return Reach(options.distance)


@compiled
def propose(state: Reach, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the picks and their scores by distance; how many."""
    n = 0
    for distance in range(1, min(state.distance, len(event.picked_offsets) - 1) + 1):
        for i in range(event.picked_offsets[distance - 1], event.picked_offsets[distance]):
            if event.picked_counts[i]:
                ids[n], priorities[n] = event.picked_experts[i], event.picked_scores[i] / distance
                n += 1
    return n


@prefetcher("gate")
class Gate(Prefetcher):
    """What the next layer's router picks for this layer's input (needs a trace with lookahead)."""

    Options = GateOptions
    needs_lookahead = True
    compiled = Compiled(begin, propose=propose)
