"""Least-Stale: experts not yet looked up in the current pass go first; among equals early layers, then the lower id.

After SpecMD (arXiv 2602.03921): what the running forward pass has touched is fresh until the next one begins. Only
the paper's abstract and its summary in our design notes were at hand, and no code is public, so this is unverified:
the order among fresh experts (here by layer as well), whether a prefetch counts as a touch (here it does not: the
contract's protection shields it), and whether passes of a request's prefill and decode are told apart (here not).
"""

import numpy as np
from numba import njit

from policies.contract import Event, Float, Int, Options, ScorePolicy, Shape
from policies.registry import retention


@njit(cache=True, nogil=True)
def _touch(keep: Float, experts: Int, first: int, last: int) -> None:
    for i in range(first, last):
        keep[0, experts[i]] = 1.0


@retention("least-stale")
class LeastStale(ScorePolicy):
    """SpecMD's: what the current pass has not touched goes first, early layers first."""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self._pass = -1, -1  # request and step
        self.keep[1] = np.repeat(np.arange(shape.layers), shape.experts)

    def observe(self, event: Event) -> None:
        """A new pass makes everything stale; what is looked up is fresh."""
        if self._pass != (event.request, event.step):
            self._pass = event.request, event.step
            self.keep[0] = 0.0
        _touch(self.keep, event.request_experts, event.first, event.last)
