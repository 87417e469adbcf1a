"""Scope: what shares the slots of the cache. One pool for all layers (`global`), or each layer its own (`layer`).

Slots per layer are even, what is left over one each to the first layers; or, with `profile`, AdapMoE's (arXiv
2408.10284, cache allocation): those that minimise the sum of the misses of the layers under LRU in a trace, by exact
dynamic programming, as miss curves need not be convex. Ties give the first layer most, then the second, and so on.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from policies.core.policy import NO_INTS, Int, Options, Shape
from policies.core.stack_distances import lru_misses
from traces.errors import InputError
from traces.reader import open_folder
from traces.steps import PREFILL, RequestSteps
from traces.trace import Trace


class Scope(ABC):
    """How the slots of a cache are divided into partitions, each for a contiguous range of layers."""

    name: ClassVar[str]
    per_layer: ClassVar[bool]
    Options: ClassVar[type] = Options

    def __init__(self, options: object) -> None:
        self.options = options

    @abstractmethod
    def divide(self, shape: Shape, room: int, sizes: Int | None = None) -> tuple[int, ...]:
        """Slots of each partition, in the order of their layers. InputError where that is impossible.

        sizes: bytes of each expert, int64[L*E], where layers differ; room and partitions are bytes then.
        """


class Global(Scope):
    """One pool of slots for the experts of all layers."""

    name = "global"
    per_layer = False

    def divide(self, shape: Shape, room: int, sizes: Int | None = None) -> tuple[int, ...]:
        return (room,)


@dataclass(frozen=True)
class LayerOptions:
    """profile: a trace folder of the model (no colon in its path) whose misses under LRU divide the slots."""

    profile: str = ""


class Layer(Scope):
    """Slots of each layer's own."""

    name = "layer"
    per_layer = True
    Options = LayerOptions
    options: LayerOptions

    def divide(self, shape: Shape, room: int, sizes: Int | None = None) -> tuple[int, ...]:
        """Each layer's, at least 1 and at most E."""
        profile = self.options.profile
        if sizes is not None:
            if profile:
                raise InputError("a profile divides slots of one size: leave it out where experts differ in size")
            return even_bytes(sizes[:: shape.experts], shape.experts, room)
        if room < shape.layers:
            raise InputError(
                f"a cache of {room} slots cannot be divided among {shape.layers} layers: scope layer needs "
                f"{shape.layers} or more, scope global makes do with less"
            )
        slots = min(room, shape.total)
        return optimal(_curves_of(profile, shape), slots) if profile else even(shape.layers, slots)


SCOPES: dict[str, type[Scope]] = {scope.name: scope for scope in (Global, Layer)}


def even(layers: int, slots: int) -> tuple[int, ...]:
    """`slots` divided by `layers`, what is left over one each to the first."""
    each, more = divmod(slots, layers)
    return (each + 1,) * more + (each,) * (layers - more)


def even_bytes(sizes: Int, experts: int, room: int) -> tuple[int, ...]:
    """Bytes of as many slots for each layer as `room` holds, one more for the first ones where they fit.

    sizes: int64[L], of an expert of each layer. No layer has more than `experts` slots.
    """
    each, left = divmod(room, int(sizes.sum()))
    slots = np.minimum(each + (np.cumsum(sizes) <= left), experts)
    if not slots.all():
        raise InputError(
            f"a cache of {room:,} bytes cannot be divided among {len(sizes)} layers: scope layer needs "
            f"{int(sizes.sum()):,} or more, scope global makes do with less"
        )
    return tuple((slots * sizes).tolist())


def optimal(misses: Int, slots: int) -> tuple[int, ...]:
    """The division of `slots`, L <= slots <= L*E, of the least misses in sum; ties give earlier layers more.

    misses: int64[L, E + 1] of each layer by its slots (column 0 is not used), which need not fall evenly, or at all.
    Bellman's recursion over the layers, the last first: O(L * E * slots).
    """
    L, E = misses.shape[0], misses.shape[1] - 1
    impossible = np.iinfo(np.int64).max // 2
    least = np.full((L + 1, slots + 1), impossible)  # [l, s]: misses of layers l.. with s slots
    least[L, 0] = 0
    for layer in range(L - 1, -1, -1):
        for own in range(1, min(E, slots) + 1):
            sums = misses[layer, own] + least[layer + 1, : slots + 1 - own]
            np.minimum(least[layer, own:], sums, out=least[layer, own:])
    division = []
    for layer in range(L):
        choices = range(min(E, slots), 0, -1)
        best = least[layer, slots]
        own = next(n for n in choices if misses[layer, n] + least[layer + 1, slots - n] == best)
        division.append(own)
        slots -= own
    return tuple(division)


def lru_curves(requests: Iterable[RequestSteps], shape: Shape) -> Int:
    """Misses of each layer by its slots under LRU: int64[L, E + 1], no slots first.

    For fewer slots than a layer's largest event it is an estimate (`policies.core.stack_distances`).
    """
    held, sizes = [NO_INTS], [NO_INTS]
    for request in requests:
        held.append(request.experts)
        sizes.append(np.diff(request.offsets))
    layers, experts = np.divmod(np.concatenate(held).astype(np.int32), shape.experts)
    of_events = np.concatenate(sizes)
    curves = [
        lru_misses(experts[layers == layer], shape.experts, np.cumsum(of_events[layer :: shape.layers]))
        for layer in range(shape.layers)
    ]
    return np.stack(curves)


def require_profile(profile: str, shape: Shape) -> None:
    """Raise InputError where there is no trace, or another model's."""
    meta = open_folder(profile).meta
    if (meta.layers, meta.experts) != (shape.layers, shape.experts):
        raise InputError(
            f"the profile {profile} is of {meta.layers} layers of {meta.experts} experts, "
            f"not {shape.layers} of {shape.experts}"
        )


def read_profile(profile: str, shape: Shape) -> Trace:
    """Return the trace of a profile. Raise InputError for another model's."""
    require_profile(profile, shape)
    return Trace.read(profile)


def _curves_of(profile: str, shape: Shape) -> Int:
    """Return the miss curves of the decoded tokens of a trace's requests; of the prefill where one has none."""
    trace = read_profile(profile, shape)
    trace.require_sequences()
    return lru_curves(map(_decoded, map(trace.steps, range(len(trace.requests)))), shape)


def _decoded(request: RequestSteps) -> RequestSteps:
    """Return what a request routes in its decoded tokens; of one that has none, in its prefill."""
    prefills = int((request.phase == PREFILL).sum())
    if prefills == len(request.phase):
        return request
    offsets = request.offsets[prefills * ((len(request.offsets) - 1) // len(request.phase)) :]
    return replace(request, experts=request.experts[offsets[0] :], offsets=offsets - offsets[0])
