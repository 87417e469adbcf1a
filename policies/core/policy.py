"""What a policy is: events go in, decisions come out; it knows no clock and no device.

Retention (what to keep) and prefetch (what to fetch early) are separate axes that compose. Most retention policies
are scores over layers x experts, the shape of an EAM: the evictable expert with the least score goes, and what ties
falls to the lower id. Rules 3, 4, 8 and 10 of the contract say when each method is called.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from traces.steps import Lookahead, RequestSteps

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Single = NDArray[np.float32]
Requests = Sequence[RequestSteps]

NO_INTS: Int = np.empty(0, np.int64)

NOTHING: tuple[Int, Float] = (NO_INTS, np.empty(0, np.float64))
"""The empty proposal: it too replaces what was queued before (rule 4)."""


@dataclass(frozen=True)
class Shape:
    """A model as policies see it: L MoE layers of E experts; expert `e` of layer `l` has the id `l * E + e`."""

    layers: int
    experts: int

    @property
    def total(self) -> int:
        """Experts of all layers, L * E."""
        return self.layers * self.experts


@dataclass(slots=True)
class Event:
    """One (step, layer), after its router: the distinct experts it chose, ids ascending.

    The engine reuses one instance; a policy that wants to remember an event copies what it needs. Compiled code
    takes the request's arrays and the range, which spares the slices.
    """

    request: int = 0  # ordinal in the order of play
    step: int = 0  # index within the request
    phase: int = 0  # traces.steps.PREFILL or DECODE
    layer: int = 0
    serial: int = 0  # number of the event over the whole run, from 1
    request_experts: Int = field(default_factory=lambda: NO_INTS)  # [A] all accesses of the request
    request_counts: Int = field(default_factory=lambda: NO_INTS)  # [A] tokens of the step that chose each
    first: int = 0  # the event's accesses are first to last - 1
    last: int = 0
    lookahead: Lookahead | None = None  # of the request, where the trace has it; policies read `ahead`

    @property
    def experts(self) -> Int:
        """Ids [n]."""
        return self.request_experts[self.first : self.last]

    @property
    def counts(self) -> Int:
        """Tokens [n] that chose each."""
        return self.request_counts[self.first : self.last]

    @property
    def ahead(self) -> tuple[Int, Int]:
        """Ids [n] that the next layer's router picks for what entered this layer, and tokens [n] of each.

        Nothing after the last layer, nor of a trace that has no such column.
        """
        return self.lookahead.after(self.step, self.layer) if self.lookahead else (NO_INTS, NO_INTS)


@dataclass(frozen=True)
class Options:
    """Options of a policy that has none; one that has some declares a frozen dataclass of its own."""


class Listener:
    """What retention and prefetch have in common: they hear of requests and of events."""

    name: ClassVar[str]
    oracle: ClassVar[bool] = False
    Options: ClassVar[type] = Options
    observes: bool = True  # False: `observe` is never called, and no Event is made for it

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __init__(self, shape: Shape, options: object) -> None:
        self.shape = shape
        self.options = options

    def foresee(self, requests: Requests, per_access: bool) -> None:
        """Oracles alone: the routing of the whole run, before it starts.

        With `per_access` every access is an event of its own (the untimed mode).
        """

    def begin_request(self, request: int) -> None:
        """A request starts; `request` is its ordinal in the order of play."""

    def observe(self, event: Event) -> None:
        """Rule 3: the router of an event is known."""

    def end_request(self) -> None:
        """The last step of the request has ended: the time to learn from it."""


class RetentionPolicy(Listener, ABC):
    """What to keep: names the victim when a transfer needs a slot and none is free."""

    def on_hit(self, expert: int, serial: int) -> None:
        """A lookup found `expert` READY or under way; `serial` is the number of the event."""

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        """The transfer of `expert` starts; `serial`: the latest event, `start`: the number of the transfer."""

    def on_evict(self, expert: int) -> None:
        """`expert` leaves the cache, by eviction or at the end of a cold request."""

    @abstractmethod
    def victim(self, evictable: Int) -> int:
        """The expert to evict. evictable: [n], n >= 1, ascending ids of READY experts that nothing pins."""


class ScorePolicy(RetentionPolicy):
    """A retention policy as keep scores: the least (primary, secondary, id) among the evictable goes.

    keep: float64[3, L*E]: primary and secondary score of every expert, resident or not (the third row is the
    residency machine's: priorities of queued prefetches). `rule` names the compiled bookkeeping of
    `policies.core.scores` that keeps the scores up to date; a policy without one writes them in `observe`. `listed`
    says
    that the rule alone writes scores, the second all equal, and that one that changes becomes the greatest of all: the
    residency machine then keeps residents in a list. A class says so of itself; those that inherit from it do not.
    """

    rule: ClassVar[int] = 0
    listed: ClassVar[bool] = False

    def __init__(self, shape: Shape, options: object) -> None:
        super().__init__(shape, options)
        self.keep = np.zeros((3, shape.total), np.float64)

    def victim(self, evictable: Int) -> int:
        """The definition; the residency machine does the same over its slots, compiled."""
        order = np.lexsort((evictable, self.keep[1, evictable], self.keep[0, evictable]))
        return int(evictable[order[0]])


class Prefetcher(Listener):
    """What to fetch early."""

    proposes: ClassVar[bool] = True  # False: `propose` is never called, and nothing is ever fetched early
    needs_lookahead: ClassVar[bool] = False  # True: engines refuse a trace without that column
    one_scale_with: ClassVar[str] = ""  # a retention policy whose keep scores compare with the priorities (rule 6)

    @classmethod
    def beside(cls, keeper: RetentionPolicy) -> "Prefetcher":
        """The prefetcher of the same name and options as `keeper`; one that shares its knowledge overrides this."""
        return cls(keeper.shape, keeper.options)

    def window(self, experts_per_layer: float) -> None:
        """Before the run, from an engine that knows: experts the link carries while one layer of a token computes."""

    def propose(self, event: Event) -> tuple[Int, Float]:
        """Rule 4: (experts [n], priorities [n]), asked after every event; distinct ids, higher priority first."""
        return NOTHING
