"""LRFU: evict the expert with the least combined recency and frequency: the sum of (1/2)^(decay * age) of its lookups.

Lee et al., IEEE Transactions on Computers 50(12), 2001: decay 0 is perfect LFU, decay 1 LRU. The sum runs over every
lookup, evicted since or not; age counts events, each access in untimed mode. All sums shrink alike, so what is kept is
the binary logarithm of sum((1/2)^(-decay * event)), which changes at a lookup alone and stays finite; sums that
differ by less than its rounding count as equal, and the less recently looked up goes. A prefetch alone counts nothing.
"""

from dataclasses import dataclass

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import CHANGED_HERE, KEEP_ROWS, Compiled, Float, Options, ScorePolicy, Shape, bounded
from policies.core.registry import retention

DECAY = KEEP_ROWS
"""Rows of `keep`."""

NEVER = -1e300  # the logarithm of nothing, but finite


@dataclass(frozen=True)
class LRFUOptions(Options, policy="lrfu"):
    """decay: the paper's lambda; a lookup is worth half after 1 / decay events."""

    decay: float = bounded(1 / 1024, least=0, most=1)


@compiled
def on_lookup(keep: Float, expert: int, serial: int) -> int:
    keep[0, expert] = np.logaddexp2(keep[0, expert], keep[DECAY, 0] * serial)
    keep[1, expert] = serial
    return CHANGED_HERE


@retention("lrfu")
class LRFU(ScorePolicy):
    """Least combined recency and frequency, lookups decaying exponentially."""

    compiled = Compiled(on_lookup=on_lookup, more_rows=1)
    Options = LRFUOptions

    def __init__(self, shape: Shape, options: LRFUOptions) -> None:
        super().__init__(shape, options)
        self.keep[0] = NEVER
        self.keep[DECAY] = options.decay
