"""Least-Stale: experts not yet looked up in the current pass go first; among equals early layers, then the lower id.

After SpecMD (arXiv 2602.03921): what the running forward pass has touched is fresh until the next one begins.
Unverified: the order among fresh experts, and that a prefetch is no touch.
"""

from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import Compiled, Event, Float, Int, Options, ScorePolicy, Shape
from policies.core.registry import retention

NOT_BEGUN = -1


class Passes(NamedTuple):
    """The pass that runs."""

    steps: Int  # [batch_slots] each request's step in it


def begin(shape: Shape, options: Options) -> Passes:
    return Passes(np.full(shape.batch_slots, NOT_BEGUN))


def begin_request(passes: Passes, batch_slot: int) -> None:
    passes.steps[batch_slot] = NOT_BEGUN


@compiled
def begins(steps: Int, event: Event) -> bool:
    """Return whether a pass begins, with a new step of any request; take note of their steps [batch_slots]."""
    new = False
    for r in range(len(event.batch_slots)):
        new |= steps[event.batch_slots[r]] != event.steps[r]
        steps[event.batch_slots[r]] = event.steps[r]
    return new


@compiled
def observe(passes: Passes, keep: Float, event: Event) -> None:
    """A new pass makes everything stale; what is looked up is fresh."""
    if begins(passes.steps, event):
        for expert in range(keep.shape[1]):
            keep[0, expert] = 0.0
    for expert in event.experts:
        keep[0, expert] = 1.0


@retention("least-stale")
class LeastStale(ScorePolicy):
    """SpecMD's: what the current pass has not touched goes first, early layers first."""

    compiled = Compiled(begin, observe, begin_request=begin_request)

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.keep[1] = np.repeat(np.arange(shape.layers), shape.experts)
