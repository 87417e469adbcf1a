"""CLOCK, second chance: a hand goes round the experts, takes from the used ones a chance, and evicts the first without.

Corbato 1969; with `bits` > 1 the counters of GCLOCK. A new expert stands right behind the hand, with no chance yet;
each lookup that finds it gives one, up to 2**bits - 1. No ties. An expert that is not offered is passed untouched.
"""

from collections import OrderedDict
from dataclasses import dataclass

from policies.core.policy import Int, Options, Policy, Shape, bounded
from policies.core.registry import retention


@dataclass(frozen=True)
class ClockOptions(Options, policy="clock"):
    """bits: of the counter that each expert has."""

    bits: int = bounded(1, least=1, most=8)


@retention("clock")
class Clock(Policy):
    """Second chance: first in, first out, but what was used goes round again."""

    observes = False
    Options = ClockOptions

    def __init__(self, shape: Shape, options: ClockOptions) -> None:
        super().__init__(shape, options)
        self._most = 2**options.bits - 1
        self._chances: OrderedDict[int, int] = OrderedDict()  # from the hand onwards

    def on_hit(self, expert: int, serial: int) -> None:
        self._chances[expert] = min(self._chances[expert] + 1, self._most)

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        self._chances[expert] = 0

    def on_evict(self, expert: int) -> None:
        del self._chances[expert]

    def victim(self, evictable: Int) -> int:
        """Turn the hand to the first offered expert without a chance."""
        offered, chances = set(evictable.tolist()), self._chances
        while True:
            expert = next(iter(chances))
            if expert in offered:
                if chances[expert] == 0:
                    return expert
                chances[expert] -= 1
            chances.move_to_end(expert)
