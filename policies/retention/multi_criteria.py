"""Several criteria at once, as HOBBIT weighs them (arXiv 2411.01433, multidimensional expert caching). Unverified.

Keep score of an expert of layer i, in step T of a request (from 1), after the event of layer l:

    recency * (its last step / T) + frequency * (steps that used it / T) + distance * (1 - ((i - l - 1) mod L) / L)

The least goes; ties fall to the lower id. A prefill is one step; each request starts over, since the paper calls its
policy sequence-level. Its fourth criterion, uses in high precision, has no counterpart: here all experts are of one.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import Compiled, Event, Float, Int, Options, ScorePolicy, Shape, bounded
from policies.core.registry import retention


@dataclass(frozen=True)
class MultiCriteriaOptions(Options, policy="multi-criteria"):
    """recency, frequency, distance: weights of the criteria."""

    recency: float = bounded(0.4, least=0, most=1)
    frequency: float = bounded(0.4, least=0, most=1)
    distance: float = bounded(0.2, least=0, most=1)


class Uses(NamedTuple):
    """Of the running requests, and what each criterion weighs."""

    last: Int  # [batch_slots, L*E] step of the latest use, from 1; 0: none
    used: Int  # [batch_slots, L*E] steps that used it
    layers: int
    recency: float
    frequency: float
    distance: float


def begin(shape: Shape, options: MultiCriteriaOptions) -> Uses:
    last, used = np.zeros((2, shape.batch_slots, shape.total), np.int64)
    return Uses(last, used, shape.layers, options.recency, options.frequency, options.distance)


def begin_request(uses: Uses, batch_slot: int) -> None:
    uses.last[batch_slot] = 0
    uses.used[batch_slot] = 0


@compiled
def observe(uses: Uses, keep: Float, event: Event) -> None:
    """Count the event, and score all experts; what several requests use counts for the one that uses it most."""
    L = uses.layers
    E = uses.last.shape[1] // L
    for r in range(len(event.batch_slots)):
        step, last, used = event.steps[r] + 1, uses.last[event.batch_slots[r]], uses.used[event.batch_slots[r]]
        for i in range(event.offsets[r], event.offsets[r + 1]):
            expert = event.own_experts[i]
            if last[expert] != step:
                last[expert] = step
                used[expert] += 1
        for i in range(L):
            near = uses.distance * (1.0 - ((i - event.layer - 1) % L) / L)
            for expert in range(i * E, (i + 1) * E):
                value = (uses.recency * last[expert] + uses.frequency * used[expert]) / step + near
                keep[0, expert] = max(keep[0, expert], value) if r else value


@retention("multi-criteria")
class MultiCriteria(ScorePolicy):
    """HOBBIT's: keep by a weighted sum of recency, frequency and layer distance (unverified)."""

    Options = MultiCriteriaOptions
    compiled = Compiled(begin, observe, begin_request=begin_request)
