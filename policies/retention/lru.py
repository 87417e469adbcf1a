"""LRU: evict the expert that was looked up, or whose transfer started, longest ago.

Recency is the number of an event, shared by its experts; ties fall to the lower id. Rule 8 of docs/contract.md.
"""

from policies.core import scores
from policies.core.policy import ScorePolicy
from policies.core.registry import retention


@retention("lru")
class LRU(ScorePolicy):
    """Least recently used."""

    rule = scores.LRU
    observes = False
    listed = True
