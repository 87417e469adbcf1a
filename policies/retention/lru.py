"""LRU: evict the expert that was looked up, or whose transfer started, longest ago.

Recency is the number of an event, shared by its experts; ties fall to the lower id. Rule 8 of docs/contract.md.
"""

from policies.core.compiled import compiled
from policies.core.policy import Compiled, Float, ScorePolicy
from policies.core.registry import retention


@compiled
def on_lookup(keep: Float, expert: int, serial: int) -> None:
    keep[0, expert] = serial


@compiled
def on_insert(keep: Float, expert: int, serial: int, start: int) -> None:
    keep[0, expert] = serial


@retention("lru")
class LRU(ScorePolicy):
    """Least recently used."""

    compiled = Compiled(on_lookup=on_lookup, on_insert=on_insert, in_order=True)
