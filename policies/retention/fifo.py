"""FIFO: evict the expert whose transfer started first, however often it was used since.

Starts are numbered, so there are no ties. Rule 8 of docs/contract.md.
"""

from policies.core import scores
from policies.core.policy import ScorePolicy
from policies.core.registry import retention


@retention("fifo")
class FIFO(ScorePolicy):
    """First in, first out."""

    rule = scores.FIFO
    observes = False
    listed = True
