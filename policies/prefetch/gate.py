"""The next layer's gate, applied early: what router l + 1 picks when given what entered MoE layer l.

Speculative loading of mixtral-offloading (Eliseev and Mazur, arXiv 2312.17238, section 3.2), also in AdapMoE
(2408.10284) and HOBBIT (2411.01433): hidden states change little from layer to layer, so the next gate is mostly right
about them. The picks stand in the trace (`moe-trace record --lookahead`); of a prefill they are those of all its
tokens. Priority is the number of tokens, ties fall to the lower id, and nothing is proposed at the last layer.
"""

from typing import NamedTuple

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import NO_INTS, Compiled, Event, Float, Int, Prefetcher, Shape
from policies.core.registry import prefetcher


class Nothing(NamedTuple):
    """Nothing is learned: the picks stand in the event."""

    unused: Int


def begin(shape: Shape, options: Limits) -> Nothing:
    return Nothing(NO_INTS)


@compiled
def propose(state: Nothing, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the picks and the tokens of each; how many."""
    n = len(event.ahead_experts)
    for i in range(n):
        ids[i], priorities[i] = event.ahead_experts[i], event.ahead_counts[i]
    return n


@prefetcher("gate")
class Gate(Prefetcher):
    """What the next layer's router picks for this layer's input (needs a trace with lookahead)."""

    Options = Limits
    needs_lookahead = True
    compiled = Compiled(begin, propose=propose)
