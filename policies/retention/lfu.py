"""LFU: evict the expert with the fewest lookups while resident, ties to the least recently looked up.

The lookup that misses counts 1, a prefetch alone 0; eviction forgets the count, not the last lookup. Unaged, it
freezes on layer-cyclic traffic: a classic baseline, not a recommendation. Rule 8 of docs/contract.md.
"""

from policies.core import scores
from policies.core.policy import ScorePolicy
from policies.core.registry import retention


@retention("lfu")
class LFU(ScorePolicy):
    """Least frequently used while resident (unaged)."""

    rule = scores.LFU
    observes = False
