"""SIEVE: a hand sweeps a queue from old to new, spares and unmarks what was looked up, and evicts the first unmarked.

Zhang et al., SIEVE is Simpler than LRU, NSDI 2024. Unlike CLOCK's, what is spared keeps its place among the older
ones, and new experts join at the far end, so that the hand meets them last. No ties. An expert that is not offered
is passed untouched.
"""

from collections import OrderedDict

from policies.core.policy import Int, Options, Policy, Shape
from policies.core.registry import retention


@retention("sieve")
class Sieve(Policy):
    """A sweeping hand that evicts what was not used since its last visit."""

    observes = False

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self._passed: OrderedDict[int, bool] = OrderedDict()  # behind the hand, the oldest first: looked up since?
        self._ahead: OrderedDict[int, bool] = OrderedDict()  # from the hand to the newest

    def on_hit(self, expert: int, serial: int) -> None:
        (self._ahead if expert in self._ahead else self._passed)[expert] = True

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        self._ahead[expert] = False

    def on_evict(self, expert: int) -> None:
        del (self._ahead if expert in self._ahead else self._passed)[expert]
        self._wrap()

    def victim(self, evictable: Int) -> int:
        """Move the hand to the first offered expert without a mark."""
        offered = set(evictable.tolist())
        while True:
            expert, marked = next(iter(self._ahead.items()))
            if expert in offered and not marked:
                return expert
            del self._ahead[expert]
            self._passed[expert] = marked and expert not in offered
            self._wrap()

    def _wrap(self) -> None:
        """Past the newest the hand starts again at the oldest."""
        if not self._ahead:
            self._ahead, self._passed = self._passed, self._ahead
