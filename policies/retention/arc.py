"""ARC: two LRU lists, of what was looked up once (T1) and more often (T2), whose shares adapt to what they let go.

Megiddo and Modha, FAST 2003. Of each list the evicted are remembered (B1, B2; |T1| + |B1| <= slots, all four <= 2 x
slots). A miss that B1 remembers raises the target p of |T1|, one that B2 remembers lowers it; T1 gives the victim
while it is above p (or at p, and B2 remembers the expert that needs the slot), else T2: the least recently used. Lists
are ordered by lookup, so there are no ties; experts of one event in ascending id. Experts that are not offered are
passed; a list with none offered leaves the turn to the other. A prefetch enters as a miss does, but moves p at no time;
a miss that the host computes moves p, but does not enter. The number of slots is known from the first eviction on; what
`--cold` takes before that is not remembered.
"""

from collections import OrderedDict

from policies.core.policy import Event, Int, Options, Policy, Shape
from policies.core.registry import retention

List = OrderedDict[int, None]  # the least recently used first


@retention("arc")
class ARC(Policy):
    """Adaptive replacement: recency and frequency share the cache by what each would have kept."""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self._t1, self._t2, self._b1, self._b2 = List(), List(), List(), List()
        self._slots = 0  # not known before the cache is full
        self._target = 0.0  # p
        self._returns = False  # whether B2 remembers the expert that needs a slot

    def on_hit(self, expert: int, serial: int) -> None:
        """Looked up once more: the most recent of T2."""
        self._t1.pop(expert, None)
        self._t2[expert] = None
        self._t2.move_to_end(expert)

    def observe(self, event: Event) -> None:
        """Each miss that is remembered moves p (cases II and III)."""
        b1, b2 = self._b1, self._b2
        for expert in event.experts.tolist():
            if expert in b1:
                self._target = min(self._target + max(len(b2) / len(b1), 1.0), self._slots)
            elif expert in b2:
                self._target = max(self._target - max(len(b1) / len(b2), 1.0), 0.0)

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        """Enter T1, or T2 if it is remembered; what B1 and B2 hold too much, they forget."""
        b1, b2 = self._b1, self._b2
        remembered = expert in b1 or expert in b2
        b1.pop(expert, None)
        b2.pop(expert, None)
        (self._t2 if remembered else self._t1)[expert] = None
        if self._slots:
            while b1 and len(self._t1) + len(b1) > self._slots:
                b1.popitem(last=False)
            while b2 and len(self._t1) + len(self._t2) + len(b1) + len(b2) > 2 * self._slots:
                b2.popitem(last=False)

    def on_evict(self, expert: int) -> None:
        """Leave, remembered as the most recent of its list."""
        held, remembered = (self._t1, self._b1) if expert in self._t1 else (self._t2, self._b2)
        del held[expert]
        if self._slots:
            remembered[expert] = None

    def on_need(self, expert: int) -> None:
        """Whether B2 remembers it decides where T1 is as long as p."""
        self._returns = expert in self._b2

    def victim(self, evictable: Int) -> int:
        """REPLACE: the least recently used offered expert of the list whose turn it is."""
        offered, t1, t2 = set(evictable.tolist()), self._t1, self._t2
        self._slots = len(t1) + len(t2)
        turn, other = (t1, t2) if len(t1) > self._target or (len(t1) == self._target and self._returns) else (t2, t1)
        return next(expert for queue in (turn, other) for expert in queue if expert in offered)
