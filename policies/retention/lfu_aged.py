"""Aged LFU: evict the expert with the smallest count, ties to the least recently looked up; all counts halve in time.

They halve, fractions kept, with events number `half_life`, 2 x `half_life` and so on, and outlive eviction. An event
is one (step, layer), so a token of a model of L layers is L events; in untimed mode each access is one. Robinson and
Devarakonda, SIGMETRICS 1990 (there halved when the mean count passes a limit); TinyLFU's reset (Einziger et al. 2017).
"""

from dataclasses import dataclass

import numpy as np

from policies.core import scores
from policies.core.policy import Options, ScorePolicy, Shape, bounded
from policies.core.registry import retention


@dataclass(frozen=True)
class AgedOptions(Options, policy="lfu-aged"):
    """half_life: events between two halvings of all counts."""

    half_life: int = bounded(1024, least=1, below=2**53)


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
