"""The next layer's gate, applied early: what router l + 1 picks when given what entered MoE layer l.

Speculative loading of mixtral-offloading (Eliseev and Mazur, arXiv 2312.17238, section 3.2), also in AdapMoE
(2408.10284) and HOBBIT (2411.01433): hidden states change little from layer to layer, so the next gate is mostly right
about them. The picks stand in the trace (`moe-trace record --lookahead`); of a prefill they are those of all its
tokens. Priority is the number of tokens, ties fall to the lower id, and nothing is proposed at the last layer.
"""

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import Limits
from policies.core.policy import Event, Float, Int, Prefetcher, Shape
from policies.core.registry import prefetcher


@compiled
def propose(picks: Int, tokens: Int, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the picks and the tokens of each; how many."""
    for i in range(len(picks)):
        ids[i], priorities[i] = picks[i], tokens[i]
    return len(picks)


@prefetcher("gate")
class Gate(Prefetcher):
    """What the next layer's router picks for this layer's input (needs a trace with lookahead)."""

    Options = Limits
    needs_lookahead = True
    observes = False

    def __init__(self, shape: Shape, options: Limits) -> None:
        super().__init__(shape, options)
        self._ids, self._priorities = np.empty(shape.experts, np.int64), np.empty(shape.experts)

    def propose(self, event: Event) -> tuple[Int, Float]:
        """All the picks."""
        n = propose(event.ahead_experts, event.ahead_counts, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
