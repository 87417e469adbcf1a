"""Whether `eamc-blend` is worth its time: what it saves over LRU, against what an event of it is charged, in transfers.

Beside the cache an LRU cache of the same size is kept, without its experts. What LRU loads again, having evicted it,
is what a policy can save. The policy works as long as the share of these loads that it saves, times how many there are
of late, is more than its charge. Otherwise it evicts as LRU does, which is charged nothing. What it has learned of the
share is forgotten meanwhile, so that it tries again where what it usually saves would pay.
"""

from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import Event, Float, Int, Shape
from traces.steps import DECODE

NEWER, OLDER, USED = range(3)
"""Rows of `Worth.recency`: in the LRU cache an expert's neighbours in the order of their latest use, or NONE; whether
it was used since the cache was empty."""

SLOTS, FILLED, WORKS = range(3)
"""Places in `Worth.numbers`: of the cache; how many of them LRU fills; whether the policy works."""

CHARGE, LOADS, RELOADS, SAVED, OF = range(5)
"""Places in `Worth.sums`: transfers that take as long as an event of the policy; what LRU loads in an event of
late, and of these again; what was saved of late over LRU, and of how many such loads."""

SHARE = 0.25
"""What it saves of the loads, where nothing is known."""

LEARNING = 0.03
"""Of the time that LRU's loads take, what learning may cost that does not pay yet."""

LATELY, KNOWN, FORGOTTEN = 16, 64, 1024
"""Steps that are of late; those that count of what was saved, and those after which it is forgotten if idle."""

SURE = 16
"""Steps that SHARE counts as."""

NONE = -1


class Worth(NamedTuple):
    """The LRU cache beside the policy's, and what is counted of both."""

    recency: Int  # [3, L*E + 1] the last is between the newest and the oldest
    numbers: Int  # [3]
    sums: Float  # [5]


def nothing_saved(shape: Shape) -> Worth:
    found = Worth(np.zeros((3, shape.total + 1), np.int64), np.array([0, 0, 1]), np.array([0.0, np.inf, 0.0, 0.0, 0.0]))
    empty(found)
    return found


def empty(own: Worth) -> None:
    """The cache is empty."""
    own.recency[:USED], own.recency[USED], own.numbers[FILLED] = NONE, 0, 0
    own.recency[:USED, -1] = own.recency.shape[1] - 1


@compiled
def pays(own: Worth, layers: int) -> bool:
    """Return whether the policy is to work in the step that begins."""
    sums = own.sums
    if sums[CHARGE] == 0.0:
        return True
    prior = SURE * layers * sums[RELOADS]
    share = (sums[SAVED] + SHARE * prior) / (sums[OF] + prior) if prior > 0.0 else SHARE
    return bool(share * sums[RELOADS] + LEARNING * sums[LOADS] > sums[CHARGE])


@compiled
def count(own: Worth, event: Event, cached: Float, layers: int) -> None:
    """Look up an event's experts in the LRU cache. cached: [L*E] 1 where they are in the cache, or on their way."""
    recency, numbers, sums = own.recency, own.numbers, own.sums
    misses = loads = reloads = 0.0
    newer, older, end = recency[NEWER], recency[OLDER], recency.shape[1] - 1
    for expert in event.experts:
        misses += cached[expert] == 0.0
        if newer[expert] == NONE:
            loads += 1.0
            reloads += recency[USED, expert]
            if numbers[FILLED] < numbers[SLOTS]:
                numbers[FILLED] += 1
            else:
                _unlink(newer, older, newer[end])
        else:
            _unlink(newer, older, expert)
        newer[expert], older[expert] = end, older[end]
        newer[older[end]], older[end] = expert, expert
        recency[USED, expert] = 1
    if event.phase == DECODE:
        sums[LOADS] = loads if sums[LOADS] == np.inf else sums[LOADS] + (loads - sums[LOADS]) / (LATELY * layers)
        sums[RELOADS] += (reloads - sums[RELOADS]) / (LATELY * layers)
        kept = 1.0 - 1.0 / ((KNOWN if numbers[WORKS] else FORGOTTEN) * layers)
        sums[SAVED] *= kept
        sums[OF] *= kept
        if numbers[WORKS]:
            sums[SAVED] += loads - misses
            sums[OF] += reloads


@compiled
def _unlink(newer: Int, older: Int, expert: int) -> None:
    newer[older[expert]], older[newer[expert]] = newer[expert], older[expert]
    newer[expert] = older[expert] = NONE
