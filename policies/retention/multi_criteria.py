"""Several criteria at once, as HOBBIT weighs them (arXiv 2411.01433, multidimensional expert caching). Unverified.

Keep score of an expert of layer i, in step T of a request (from 1), after the event of layer l:

    recency * (its last step / T) + frequency * (steps that used it / T) + distance * (1 - ((i - l - 1) mod L) / L)

The least goes; ties fall to the lower id. A prefill is one step; each request begins anew, since the paper calls its
policy sequence-level. Its fourth criterion, how often an expert was needed in high precision, has no counterpart: here
all experts are of one precision. Only its abstract and our memory of the formula were at hand: the weights, and that
the current layer counts as the farthest, are our choice.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import Event, Float, Int, ScorePolicy, Shape
from policies.core.registry import retention
from traces.errors import InputError


@dataclass(frozen=True)
class MultiCriteriaOptions:
    """recency, frequency, distance: weights of the criteria, each 0 to 1."""

    recency: float = 0.4
    frequency: float = 0.4
    distance: float = 0.2

    def __post_init__(self) -> None:
        weights = self.recency, self.frequency, self.distance
        if not all(0 <= weight <= 1 for weight in weights) or not any(weights):
            raise InputError(f"multi-criteria needs weights of 0 to 1, not all 0, and has {weights}")


class Uses(NamedTuple):
    """Of the running request, and what each criterion weighs."""

    weights: Float  # [3] of recency, frequency, distance
    last: Int  # [L, E] step of the latest use, from 1; 0: none
    used: Int  # [L, E] steps that used it


def unused(shape: Shape, options: MultiCriteriaOptions) -> Uses:
    """The start of a request."""
    weights = np.array([options.recency, options.frequency, options.distance], np.float64)
    of_all = shape.layers, shape.experts
    return Uses(weights, np.zeros(of_all, np.int64), np.zeros(of_all, np.int64))


@compiled
def observe(uses: Uses, keep: Float, step: int, layer: int, experts: Int, first: int, end: int) -> None:
    """Count an event of step number `step`, from 1, and score all experts."""
    L, E = uses.last.shape
    last, used = uses.last.reshape(L * E), uses.used.reshape(L * E)
    for i in range(first, end):
        if last[experts[i]] != step:
            last[experts[i]] = step
            used[experts[i]] += 1
    recency, frequency, distance = uses.weights[0], uses.weights[1], uses.weights[2]
    for i in range(L):
        near = distance * (1.0 - ((i - layer - 1) % L) / L)
        for expert in range(i * E, (i + 1) * E):
            keep[0, expert] = (recency * last[expert] + frequency * used[expert]) / step + near


@retention("multi-criteria")
class MultiCriteria(ScorePolicy):
    """HOBBIT's: keep by a weighted sum of recency, frequency and layer distance (unverified)."""

    Options = MultiCriteriaOptions

    def __init__(self, shape: Shape, options: MultiCriteriaOptions) -> None:
        super().__init__(shape, options)
        self.uses = unused(shape, options)

    def begin_request(self, request: int, seat: int) -> None:
        """No step has used anything."""
        self.uses.last[:] = 0
        self.uses.used[:] = 0

    def observe(self, event: Event) -> None:
        """Count the event, and score all experts for where the step now is."""
        accesses = event.experts, 0, len(event.experts)
        observe(self.uses, self.keep, int(event.steps[0]) + 1, event.layer, *accesses)
