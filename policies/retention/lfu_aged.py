"""Aged LFU: evict the expert with the smallest count, ties to the least recently looked up; all counts halve in time.

They halve, fractions kept, with events number `half_life`, 2 x `half_life` and so on, and outlive eviction. An event
is one (step, layer), so a token of a model of L layers is L events; in untimed mode each access is one. Robinson and
Devarakonda, SIGMETRICS 1990 (there halved when the mean count passes a limit); TinyLFU's reset (Einziger et al. 2017).
"""

from dataclasses import dataclass

import numpy as np

from policies.core import scores
from policies.core.policy import ScorePolicy, Shape
from policies.core.registry import retention
from traces.errors import InputError


@dataclass(frozen=True)
class AgedOptions:
    """half_life: events between two halvings of all counts."""

    half_life: int = 1024

    def __post_init__(self) -> None:
        if not 1 <= self.half_life < 2**53:
            raise InputError(f"lfu-aged needs a half_life of at least 1 event, not {self.half_life}")


@retention("lfu-aged")
class AgedLFU(ScorePolicy):
    """Least frequently used, all counts halved at intervals."""

    rule = scores.LFU_AGED
    observes = False
    Options = AgedOptions

    def __init__(self, shape: Shape, options: AgedOptions) -> None:
        super().__init__(shape, options)
        self.keep = np.zeros((scores.ROWS, shape.total))
        self.keep[scores.OPTION] = options.half_life
