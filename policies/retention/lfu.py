"""LFU: evict the expert with the fewest lookups while resident, ties to the least recently looked up.

The lookup that misses counts 1, a prefetch alone 0; eviction forgets the count, not the last lookup. Unaged, it
freezes on layer-cyclic traffic: a classic baseline, not a recommendation. Rule 8 of docs/contract.md.
"""

from policies.core.compiled import compiled
from policies.core.policy import CHANGED_HERE, Compiled, Float, ScorePolicy
from policies.core.registry import retention


@compiled
def count(keep: Float, expert: int, serial: int) -> int:
    keep[0, expert] += 1
    keep[1, expert] = serial
    return CHANGED_HERE


@compiled
def note_recency(keep: Float, expert: int, serial: int) -> int:
    """A lookup that the host computes is not counted."""
    keep[1, expert] = serial
    return CHANGED_HERE


@compiled
def forget(keep: Float, expert: int) -> int:
    keep[0, expert] = 0
    return CHANGED_HERE


@retention("lfu")
class LFU(ScorePolicy):
    """Least frequently used while resident (unaged)."""

    compiled = Compiled(on_lookup=count, on_host_lookup=note_recency, on_evict=forget)
