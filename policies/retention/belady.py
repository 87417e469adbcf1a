"""Belady's rule with forced admission: evict the expert whose next use is furthest away. An oracle, never a winner.

Untimed it is the floor of demand misses (Belady 1966, MIN); with time and prefetch it is a good policy, not a bound.
Ties fall to the lower id. With several requests at a time the next use is counted within each of those that run, in
events of its own, and the nearest decides; an expert that none of them uses again comes after all of those, in the
order of the trace. What follows is learned backwards, and kept after every sqrt(R)-th of R requests: a stretch between
two of these is gone through again when the run comes to it.
"""

from math import isqrt
from typing import NamedTuple

import numpy as np

from policies.core.compiled import allocating, compiled
from policies.core.policy import (
    CHANGED,
    CHANGED_HERE,
    NO_INTS,
    Compiled,
    Event,
    Float,
    Int,
    Options,
    Requests,
    ScorePolicy,
    Shape,
)
from policies.core.registry import retention

NEVER = np.iinfo(np.int64).max // 2
FAR = 2**40
"""More events than a request has."""


@allocating
def next_uses(offsets: Int, experts: Int, number: int, upcoming: Int) -> Int:
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
    """Of the requests that run, one behind the other; events are numbered over the run, of several in each request."""

    following: Int  # [A] by access, the event of the next one to the same expert
    heard: Int  # [batch_slots] place in it of each one's next access
    upcoming: Int  # [batch_slots, L*E] event of each one's next use; [0, 0] with one at a time, as are:
    latest: Int  # [batch_slots] each one's latest event
    later: Int  # [L*E] next use in a request that has not begun
    layers: int


def begin(shape: Shape, options: Options) -> NextUses:
    batch_slots, several = shape.batch_slots, shape.batch_slots > 1
    upcoming = np.full((batch_slots * several, shape.total * several), NEVER, np.int64)
    later = np.full(shape.total * several, NEVER, np.int64)
    return NextUses(
        NO_INTS, np.zeros(batch_slots, np.int64), upcoming, np.zeros(batch_slots, np.int64), later, shape.layers
    )


@compiled
def observe(uses: NextUses, keep: Float, event: Event) -> int:
    """What was looked up now is next used later."""
    if len(uses.upcoming) == 0:
        for expert in event.experts:
            keep[0, expert] = -uses.following[uses.heard[0]]
            uses.heard[0] += 1
        return CHANGED_HERE
    for r in range(len(event.batch_slots)):
        batch_slot = event.batch_slots[r]
        uses.latest[batch_slot] = event.steps[r] * uses.layers + event.layer
        for i in range(event.offsets[r], event.offsets[r + 1]):
            uses.upcoming[batch_slot, event.own_experts[i]] = uses.following[uses.heard[batch_slot]]
            uses.heard[batch_slot] += 1
    for expert in range(len(uses.later)):
        nearest = NEVER
        for batch_slot in range(len(uses.latest)):
            if uses.upcoming[batch_slot, expert] < NEVER:
                nearest = min(nearest, uses.upcoming[batch_slot, expert] - uses.latest[batch_slot])
        keep[0, expert] = -nearest if nearest < NEVER else -(FAR + uses.later[expert])
    return CHANGED


@retention("belady", oracle=True)
class Belady(ScorePolicy):
    """Belady's MIN with forced admission (oracle: sees the whole run)."""

    compiled = Compiled(begin, observe)

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self._requests: Requests = []
        self._stretch = 1  # requests between two that are kept
        self._ends: Int = NO_INTS  # [R] number of the first event after each request
        self._after_stretch: Int = NO_INTS  # [R / stretch, L*E] next uses after each stretch
        self._after: dict[int, Int] = {}  # [L*E] after each request of the stretch that runs
        self._running: list[Int] = [NO_INTS] * shape.batch_slots  # of several requests: next uses by access
        self._last = 0  # of the requests that have begun

    def foresee(self, requests: Requests) -> None:
        """Go through the run backwards, and keep what is used next after each stretch of requests."""
        self._requests = requests
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

    def begin_request(self, request: int, batch_slot: int) -> None:
        """Turn to the request's next uses, which are known where requests run one after another."""
        if self.shape.batch_slots > 1:
            self._begin_one_of_several(request, batch_slot)
            return
        following = self._look_back(request, self._uses_after(request).copy())[1]
        self.state = self.state._replace(following=following, heard=np.zeros(1, np.int64))

    def _begin_one_of_several(self, request: int, batch_slot: int) -> None:
        state, routed, first = self.state, self._requests[request], np.full(self.shape.total, NEVER, np.int64)
        heard = state.heard - self._starts()
        self._running[batch_slot] = next_uses(routed.offsets, routed.experts, len(routed.offsets) - 1, first)
        heard[batch_slot] = 0
        state.upcoming[batch_slot], state.latest[batch_slot] = first, -1
        self._last = max(self._last, request)
        state.later[:] = self._uses_after(self._last)
        self.state = state._replace(following=np.concatenate(self._running), heard=heard + self._starts())

    def _starts(self) -> Int:
        """int64[batch_slots]: where each request that runs begins in `following`."""
        return np.cumsum([0, *map(len, self._running[:-1])])

    def end_request(self, batch_slot: int) -> None:
        """The request in `batch_slot` uses nothing any more."""
        if self.shape.batch_slots > 1:
            self.state.upcoming[batch_slot] = NEVER

    def _uses_after(self, request: int) -> Int:
        if request not in self._after:
            self._turn_to_stretch(request // self._stretch)
        return self._after[request]

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
        routed = self._requests[request]
        following = next_uses(routed.offsets, routed.experts, int(self._ends[request]), upcoming)
        return len(routed.offsets) - 1, following
