"""Belady's rule with forced admission: evict the expert whose next use is furthest away. An oracle, never a winner.

Untimed it is the floor of demand misses (Belady 1966, MIN); with time and prefetch it is a good policy, not a bound.
An expert's next use is the number of the next event that looks it up; never again is furthest; ties to the lower id.

The next uses of a run are learned from its end to its start. All of them would take more memory than the run's ids, so
only what comes after every sqrt(R)-th of the R requests is kept; a stretch between two of these is gone through again
when play comes to it, and a request once more when it begins. Memory is that of 2 sqrt(R) EAMs and one request.
"""

from math import isqrt
from typing import NamedTuple

import numpy as np

from policies.core.compiled import allocating, compiled
from policies.core.policy import NO_INTS, Event, Float, Int, Kernel, Options, Requests, ScorePolicy, Shape
from policies.core.registry import retention

NEVER = np.iinfo(np.int64).max // 2


@allocating
def _next_uses(offsets: Int, experts: Int, number: int, upcoming: Int) -> Int:
    """For each access of a request, backwards: the event of the next one to the same expert.

    number: of the first event after the request; upcoming: [L*E] the next use of each expert, carried on.
    """
    following = np.empty(len(experts), np.int64)
    for event in range(len(offsets) - 2, -1, -1):
        number -= 1
        for i in range(offsets[event], offsets[event + 1]):
            following[i] = upcoming[experts[i]]
            upcoming[experts[i]] = number
    return following


class NextUses(NamedTuple):
    """Of the request that runs."""

    following: Int  # [A] by access, the event of the next one to the same expert
    heard: Int  # [1] accesses so far


def begin(shape: Shape, options: Options) -> NextUses:
    """Return the state of a run."""
    return NextUses(NO_INTS, np.zeros(1, np.int64))


@compiled
def observe(uses: NextUses, keep: Float, event: Event) -> None:
    """What was looked up now is next used later."""
    for expert in event.experts:
        keep[0, expert] = -uses.following[uses.heard[0]]
        uses.heard[0] += 1


@retention("belady", oracle=True)
class Belady(ScorePolicy):
    """Belady's MIN with forced admission (oracle: sees the whole run)."""

    kernel = Kernel(begin, observe)

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self._requests: Requests = []
        self._per_access = False
        self._stretch = 1  # requests between two that are kept
        self._ends: Int = NO_INTS  # [R] number of the first event after each request
        self._after_stretch: Int = NO_INTS  # [R / stretch, L*E] next uses after each stretch
        self._after: dict[int, Int] = {}  # [L*E] after each request of the stretch at play

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Go through the run backwards, and keep what is used next after each stretch of requests."""
        self._requests, self._per_access = requests, per_access
        self._stretch = max(1, isqrt(len(requests)))
        self._ends = np.zeros(len(requests), np.int64)
        self._after_stretch = np.empty((-(-len(requests) // self._stretch), self.shape.total), np.int64)
        upcoming, number = np.full(self.shape.total, NEVER, np.int64), 0
        for request in range(len(requests) - 1, -1, -1):
            self._ends[request] = number
            if request == len(requests) - 1 or (request + 1) % self._stretch == 0:
                self._after_stretch[request // self._stretch] = upcoming
            number -= self._look_back(request, upcoming)[0]
        for numbers in (self._ends, self._after_stretch, upcoming):  # counted from the end so far, from now on from 1
            numbers[numbers < NEVER] += 1 - number
        self.keep[0] = -upcoming

    def begin_request(self, request: int, seat: int) -> None:
        """Turn to the request's next uses, which are known where requests run one after another."""
        if request not in self._after:
            self._turn_to_stretch(request // self._stretch)
        following = self._look_back(request, self._after[request].copy())[1]
        self.state = NextUses(following, np.zeros(1, np.int64))

    def _turn_to_stretch(self, stretch: int) -> None:
        """Learn what is used next after each request of a stretch."""
        first = stretch * self._stretch
        upcoming = self._after_stretch[stretch].copy()
        self._after = {}
        for request in range(min(first + self._stretch, len(self._requests)) - 1, first - 1, -1):
            self._after[request] = upcoming.copy()
            if request > first:
                self._look_back(request, upcoming)

    def _look_back(self, request: int, upcoming: Int) -> tuple[int, Int]:
        """The events of a request and, by access, the next uses; `upcoming` is carried from its end to its start."""
        played = self._requests[request]
        offsets = np.arange(len(played.experts) + 1) if self._per_access else played.offsets
        return len(offsets) - 1, _next_uses(offsets, played.experts, int(self._ends[request]), upcoming)
