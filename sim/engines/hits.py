"""The hits of an event on the compute stream. Their ends are known from the start, so they need no events.

Each is unpinned at its own place in the order of rule 15: `settle` does so for those that lie in the past, and only
while a transfer is stuck for want of a slot does the end of a hit become an event.
"""

from collections.abc import Sequence
from itertools import accumulate

from policies.core.residency import Residency


class HitQueue:
    """When each hit of the current event ends, and how many of them have been unpinned."""

    def __init__(self, machine: Residency) -> None:
        self._machine = machine
        self.ends: Sequence[int] = ()
        self._unpinned = 0

    def begin(self, n: int, now: int, durations: dict[int, int] | None, each_ns: int) -> int:
        """The event's `n` hits start, one after another; the time they take together."""
        if durations is not None:
            self.ends = list(accumulate((durations[e] for e in self._machine.hits(n)), initial=now))[1:]
        elif each_ns:
            self.ends = range(now + each_ns, now + each_ns * n + 1, each_ns)
        else:
            self.ends = (now,) * n
        return self.ends[-1] - now

    def settle(self, now: int) -> None:
        """Unpin the hits that ended before `now`: a transfer's completion precedes compute of the same instant."""
        done = self._unpinned
        while done < len(self.ends) and self.ends[done] < now:
            done += 1
        if done > self._unpinned:
            self._machine.computed_hits(self._unpinned, done)
            self._unpinned = done

    def next_end(self) -> int | None:
        """When the next hit ends; None where that is the last one: the compute stream waits for it itself."""
        return self.ends[self._unpinned] if self._unpinned < len(self.ends) - 1 else None

    def unpin_next(self) -> None:
        """Unpin the next hit: its end is an event this time."""
        self._machine.computed_hits(self._unpinned, self._unpinned + 1)
        self._unpinned += 1

    def finish(self) -> None:
        """The last hit has ended."""
        self._machine.computed_hits(self._unpinned, len(self.ends))
        self.ends, self._unpinned = (), 0
