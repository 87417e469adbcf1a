"""S3-FIFO: a small FIFO queue sifts, a main one keeps, a ghost queue remembers what the small one let go.

Yang et al., FIFO Queues are All You Need for Cache Eviction, SOSP 2023, as in libCacheSim: new experts enter the small
queue, a tenth of the slots, those remembered the main one; until the cache is first full what does not fit the small
queue enters the main one, and what `--cold` takes is not remembered. A main queue above its share gives the victim: its
oldest goes, or goes round with one lookup less (at most 3 count). Else the small queue does: its oldest moves to the
main queue if `threshold` lookups found it, or goes and is remembered. No ties. Experts that are not offered are passed
and keep their places; a queue with none offered, or none at all, leaves the turn to the other. The small queue has at
least one slot and takes an expert also if it has but one, where libCacheSim, below 20 slots, caches nothing.
"""

from collections import OrderedDict
from dataclasses import dataclass
from fractions import Fraction

from policies.core.policy import Int, Options, Policy, Shape, bounded
from policies.core.registry import retention

MOST_LOOKUPS = 3


@dataclass(frozen=True)
class S3FIFOOptions(Options, policy="s3fifo"):
    """small, ghost: share of the slots that the queues have, rounded down; threshold: lookups that lead to main."""

    small: float = bounded(0.1, above=0, below=1)
    ghost: float = bounded(0.9, least=0, most=100)
    threshold: int = bounded(2, least=1)


@retention("s3fifo")
class S3FIFO(Policy):
    """Three FIFO queues: quick demotion of what is used once."""

    observes = False
    Options = S3FIFOOptions

    def __init__(self, shape: Shape, options: S3FIFOOptions) -> None:
        super().__init__(shape, options)
        self._shares = options
        self._main_slots = self._ghost_slots = -1  # not known before the cache is full
        self._small: OrderedDict[int, int] = OrderedDict()  # lookups that found it, the oldest first
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghost: OrderedDict[int, None] = OrderedDict()

    def on_hit(self, expert: int, serial: int) -> None:
        (self._small if expert in self._small else self._main)[expert] += 1

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        """Enter the small queue, or the main one if the ghost queue remembers it."""
        remembered = expert in self._ghost
        (self._main if remembered else self._small)[expert] = 0
        if remembered:
            del self._ghost[expert]
        while len(self._ghost) > self._ghost_slots >= 0:
            self._ghost.popitem(last=False)

    def on_evict(self, expert: int) -> None:
        """Leave; what leaves the small queue is remembered."""
        if expert in self._small:
            del self._small[expert]
            if self._ghost_slots >= 0:
                self._ghost[expert] = None
        else:
            del self._main[expert]

    def victim(self, evictable: Int) -> int:
        """The oldest offered of the queue whose turn it is, once it has no more lookups to its credit."""
        if self._main_slots < 0:
            self._first_full()
        offered, small, main = set(evictable.tolist()), self._small, self._main
        turn, other = (main, small) if len(main) > self._main_slots else (small, main)
        while True:
            queue = other if offered.isdisjoint(turn) else turn
            expert = next(expert for expert in queue if expert in offered)
            lookups = queue[expert]
            if lookups < (self._shares.threshold if queue is small else 1):
                return expert
            del queue[expert]
            main[expert] = 0 if queue is small else min(lookups, MOST_LOOKUPS) - 1

    def _first_full(self) -> None:
        """A victim is asked for when every slot is taken: what did not fit the small queue is in the main one."""
        slots = len(self._small) + len(self._main)
        shares = (Fraction(str(share)) for share in (self._shares.small, self._shares.ghost))  # 100 * 0.29 is below 29
        small_slots, self._ghost_slots = (int(slots * share) for share in shares)
        small_slots = max(1, small_slots)
        self._main_slots = slots - small_slots
        for expert in list(self._small)[small_slots:]:
            self._main[expert] = self._small.pop(expert)
