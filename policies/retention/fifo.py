"""FIFO: evict the expert whose transfer started first, however often it was used since.

Starts are numbered, so there are no ties. Rule 8 of docs/contract.md.
"""

from policies.core.compiled import compiled
from policies.core.policy import Compiled, Float, ScorePolicy
from policies.core.registry import retention


@compiled
def on_insert(keep: Float, expert: int, serial: int, start: int) -> None:
    keep[0, expert] = start


@retention("fifo")
class FIFO(ScorePolicy):
    """First in, first out."""

    compiled = Compiled(on_insert=on_insert, in_order=True)
