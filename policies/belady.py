"""Belady's rule with forced admission: evict the expert whose next use is furthest away. An oracle, never a winner.

Untimed it is the floor of demand misses (Belady 1966, MIN); with time and prefetch it is a good policy, not a bound.
An expert's next use is the number of the next event that looks it up; never again is furthest; ties to the lower id.
"""

import numpy as np
from numba import njit

from policies.compiled import compiled
from policies.contract import Event, Float, Int, Options, Requests, ScorePolicy, Shape
from policies.registry import retention

NEVER = np.iinfo(np.int64).max // 2


@njit(cache=True, nogil=True)
def _next_uses(experts: Int, events: Int, upcoming: Int) -> Int:
    """For each access, backwards: the event of the next one to the same expert; `upcoming` [L*E] is carried on."""
    following = np.empty(len(experts), np.int64)
    for i in range(len(experts) - 1, -1, -1):
        following[i] = upcoming[experts[i]]
        upcoming[experts[i]] = events[i]
    return following


@compiled
def observe(following: Int, keep: Float, experts: Int, first: int, last: int) -> None:
    """What was looked up now is next used later. following: [A] by access of the request."""
    for i in range(first, last):
        keep[0, experts[i]] = -following[i]


@retention("belady", oracle=True)
class Belady(ScorePolicy):
    """Belady's MIN with forced admission (oracle: sees the whole run)."""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.following: Int = np.empty(0, np.int64)  # [A] of the request, by access: the event of the next use
        self._by_request: list[Int] = []

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Note for every access of the run the event of the next one to the same expert."""
        sizes = [len(request.experts) if per_access else len(request.offsets) - 1 for request in requests]
        first_event = np.concatenate([[1], 1 + np.cumsum(sizes)])
        upcoming = np.full(self.shape.total, NEVER, np.int64)
        backwards = []
        for ordinal in range(len(requests) - 1, -1, -1):
            request = requests[ordinal]
            events = np.arange(sizes[ordinal], dtype=np.int64) + first_event[ordinal]
            if not per_access:
                events = np.repeat(events, np.diff(request.offsets))
            backwards.append(_next_uses(request.experts, events, upcoming))
        self._by_request = backwards[::-1]
        self.keep[0] = -upcoming

    def begin_request(self, request: int) -> None:
        """Turn to the request's next uses."""
        self.following = self._by_request[request]

    def observe(self, event: Event) -> None:
        """What was looked up now is next used later."""
        observe(self.following, self.keep, event.request_experts, event.first, event.last)
