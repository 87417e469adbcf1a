"""What a user's policy is given, which it cannot write into, and what it may hand on to compiled functions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from policies.core.policy import START, Event, Int, Requests, Shape
from traces.steps import DECODE, PREFILL, RequestSteps

T = TypeVar("T")


def read_only(event: Event) -> Event:
    """Return the event with views that cannot be written into; arrays that are one in the event are one here."""
    together = [*map(read_only_array, event[3:8])]
    if event.own_experts is event.experts:
        return Event(*event[:3], *together, *together[:2], *map(read_only_array, event[10:]))
    return Event(*event[:3], *together, *map(read_only_array, event[8:]))


def read_only_array(array: NDArray[Any]) -> NDArray[Any]:
    """Return a view that cannot be made writeable."""
    return np.asarray(memoryview(array).toreadonly())  # type: ignore[arg-type]


class ReadOnly(Sequence[RequestSteps]):
    """The routing of a run, of arrays that cannot be written into."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    @overload
    def __getitem__(self, i: int) -> RequestSteps: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[RequestSteps]: ...
    def __getitem__(self, i: int | slice) -> RequestSteps | Sequence[RequestSteps]:
        found = self._requests[i]
        return _steps(found) if isinstance(found, RequestSteps) else [_steps(each) for each in found]


def _steps(request: RequestSteps) -> RequestSteps:
    return _arrays_read_only(replace(request, lookahead=request.lookahead and _arrays_read_only(request.lookahead)))


def _arrays_read_only(holder: T) -> T:
    """Return a dataclass with read-only views of its arrays."""
    arrays = {name: read_only_array(value) for name, value in vars(holder).items() if isinstance(value, np.ndarray)}
    return replace(holder, **arrays)  # type: ignore[type-var]


def event_fault(event: Event, shape: Shape) -> str | None:
    """Return what is wrong with an event for compiled functions, which check nothing; None if they can take it."""
    arrays = event[3:]
    if not all(isinstance(each, np.ndarray) and each.dtype == np.int64 and each.ndim == 1 for each in arrays):
        return "an event with something else than arrays of int64"
    requests, ends, L, E = len(event.seats), event.offsets, shape.layers, shape.experts
    fits = (
        START <= event.layer < L
        and event.phase in (PREFILL, DECODE)
        and 0 < requests == len(event.steps) == len(ends) - 1
        and (event.phase == PREFILL or len(event.token_ids) in (0, requests))
        and (np.diff(ends, prepend=0, append=len(event.own_experts)) >= 0).all()
        and ((event.seats >= 0) & (event.seats < shape.seats)).all()
        and (event.steps >= 0).all()
        and len(event.counts) == len(event.experts)
        and len(event.own_counts) == len(event.own_experts)
        and len(event.ahead_counts) == len(event.ahead_experts)
        and _ascending(event.ahead_experts, 0, shape.total)
        and all(
            _ascending(ids, max(event.layer, 0) * E, (event.layer + 1) * E)
            for ids in (event.experts, *(own for _, _, own, _ in event.by_request()))
        )
    )
    return None if fits else "an event whose numbers do not go together"


def _ascending(ids: Int, first: int, end: int) -> bool:
    """Return whether distinct ids ascend from `first` at least to below `end`."""
    return len(ids) == 0 or bool(first <= ids[0] and ids[-1] < end and (np.diff(ids) > 0).all())
