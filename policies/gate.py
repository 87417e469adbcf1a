"""The next layer's gate, applied early: what router l + 1 picks when given what entered MoE layer l.

Speculative loading of mixtral-offloading (Eliseev and Mazur, arXiv 2312.17238, section 3.2), also in AdapMoE
(2408.10284) and HOBBIT (2411.01433): hidden states change little from layer to layer, so the next gate is mostly right
about them. The picks stand in the trace (`moe-trace record --lookahead`); of a prefill they are those of all its
tokens. Priority is the number of tokens, ties fall to the lower id, and nothing is proposed at the last layer.
"""

import numpy as np

from policies.contract import Event, Float, Int, Prefetcher
from policies.limits import Limits
from policies.registry import prefetcher


@prefetcher("gate")
class Gate(Prefetcher):
    """What the next layer's router picks for this layer's input (needs a trace with lookahead)."""

    Options = Limits
    needs_lookahead = True
    observes = False

    def propose(self, event: Event) -> tuple[Int, Float]:
        """All the picks."""
        ids, tokens = event.ahead
        return ids, tokens.astype(np.float64)
