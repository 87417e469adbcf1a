"""Least-Stale: experts not yet looked up in the current pass go first; among equals early layers, then the lower id.

After SpecMD (arXiv 2602.03921): what the running forward pass has touched is fresh until the next one begins. Only
the paper's abstract and a summary were read, and no code is public, so this is unverified: the order among fresh
experts (here by layer as well), whether a prefetch counts as a touch (here it does not: rule 6 protects it), and
whether passes of a request's prefill and decode are told apart (here not).
"""

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import Event, Float, Int, Options, ScorePolicy, Shape
from policies.core.registry import retention

NOT_BEGUN = -1


@compiled
def observe(current: Int, keep: Float, step: int, experts: Int, first: int, last: int) -> None:
    """A new pass makes everything stale; what is looked up is fresh. current: [1] the request's step that runs."""
    if current[0] != step:
        current[0] = step
        for expert in range(keep.shape[1]):
            keep[0, expert] = 0.0
    for i in range(first, last):
        keep[0, experts[i]] = 1.0


@retention("least-stale")
class LeastStale(ScorePolicy):
    """SpecMD's: what the current pass has not touched goes first, early layers first."""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.current: Int = np.array([NOT_BEGUN])
        self.keep[1] = np.repeat(np.arange(shape.layers), shape.experts)

    def begin_request(self, request: int, seat: int) -> None:
        """Its first step is another pass."""
        self.current[0] = NOT_BEGUN

    def observe(self, event: Event) -> None:
        """What is looked up is fresh, until the next pass begins."""
        observe(self.current, self.keep, int(event.steps[0]), event.experts, 0, len(event.experts))
