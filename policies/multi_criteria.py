"""Several criteria at once, as HOBBIT weighs them (arXiv 2411.01433, multidimensional expert caching). Unverified.

Keep score of an expert of layer i, in step T of a request (from 1), after the event of layer l:

    recency * (its last step / T) + frequency * (steps that used it / T) + distance * (1 - ((i - l - 1) mod L) / L)

The least goes; ties fall to the lower id. A prefill is one step; each request begins anew, since the paper calls its
policy sequence-level. Its fourth criterion, how often an expert was needed in high precision, has no counterpart: here
all experts are of one precision. Only its abstract and our memory of the formula were at hand: the weights, and that
the current layer counts as the farthest, are our choice.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from policies.contract import Event, Float, Int, ScorePolicy, Shape
from policies.registry import retention
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


@njit(cache=True, nogil=True)
def _weigh(
    keep: Float,
    last: Int,
    used: Int,
    step: int,
    layer: int,
    L: int,
    weights: tuple[float, float, float],
    experts: Int,
    first: int,
    end: int,
) -> None:
    """Count an event of step number `step`, from 1, and score all experts. last, used: [L*E]."""
    for i in range(first, end):
        if last[experts[i]] != step:
            last[experts[i]] = step
            used[experts[i]] += 1
    recency, frequency, distance = weights
    E = len(last) // L
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
        self._weights = float(options.recency), float(options.frequency), float(options.distance)
        self._last = np.zeros(shape.total, np.int64)  # [L*E] step of the latest use, from 1; 0: none
        self._used = np.zeros(shape.total, np.int64)  # [L*E] steps that used it

    def begin_request(self, request: int) -> None:
        """No step has used anything."""
        self._last[:] = 0
        self._used[:] = 0

    def observe(self, event: Event) -> None:
        """Count the event, and score all experts for where the step now is."""
        at = event.step + 1, event.layer, self.shape.layers
        accesses = event.request_experts, event.first, event.last
        _weigh(self.keep, self._last, self._used, *at, self._weights, *accesses)
