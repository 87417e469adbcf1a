"""What a policy is: events go in, decisions come out; it knows no clock and no device.

Retention (what to keep) and prefetch (what to fetch early) are separate axes that compose. Most eviction policies
are scores over layers x experts, the shape of an EAM: the evictable expert with the least score goes, and what ties
falls to the lower id. Rules 3, 4, 8 and 10 of docs/contract.md say when each method is called; an event holds nothing
that a policy must not know yet (rule 16).

A step may hold several requests, each in a batch slot. A policy keeps by batch slot what it learns about one request:
the experts used so far, the latest token's choice, the past request that it resembles. `begin_request` clears it, and
`end_request` is the time to learn from it. All requests share the rest: counts of use, recency, what has been learned,
and the keep scores, one for an expert however many requests want it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from operator import ge, gt, le, lt
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.compiled import from_python
from traces.errors import InputError
from traces.steps import RequestSteps

Int = NDArray[np.int64]
Float = NDArray[np.float64]
Single = NDArray[np.float32]
Requests = Sequence[RequestSteps]

NO_INTS: Int = np.empty(0, np.int64)
NO_FLOATS: Float = np.empty(0)

ABSENT, DEMANDED, LOADING, READY = range(4)
"""States of an expert."""

START = -1
"""The layer of an event that only tells that a step starts, and the ids of the tokens that it takes in (rule 16)."""

NOTHING: tuple[Int, Float] = (NO_INTS, NO_FLOATS)
"""The empty proposal: it too replaces what was queued before (rule 4)."""


@dataclass(frozen=True)
class Shape:
    """A model as policies see it: L MoE layers of E experts; expert `e` of layer `l` has the id `l * E + e`.

    layers: MoE layers, L. experts: of each layer, E. batch_slots: requests that the batch of this run holds at most,
    which says nothing of the model. top_k: experts that a token chooses in a layer.
    """

    layers: int
    experts: int
    batch_slots: int = field(default=1, compare=False)
    top_k: int = field(default=1, compare=False)

    @property
    def total(self) -> int:
        """Experts of all layers, L * E."""
        return self.layers * self.experts


class Event(NamedTuple):
    """What a policy hears after a router: the distinct experts that one layer chose, for all requests of the step.

    It holds arrays of its own and nothing of what comes later. Of all requests together are `experts` and `counts`;
    a request's own are `own_experts` and `own_counts` from offsets[r] to offsets[r + 1], where r is its
    place in `batch_slots`. With one request these are the same arrays. Compiled functions take an Event as it is.

    serial: number of the event over the whole run, from 1.
    phase: 0, the step is a prefill (all tokens of a prompt at once), or 1, decode (one token of each request).
    layer: index of the MoE layer, from 0 (dense layers do not count); START, -1, where a step starts.
    experts: int64[n], distinct ids of the experts chosen, ascending: layer * E + expert.
    counts: int64[n], tokens of the step that chose each.
    batch_slots: int64[R], the place that each request holds in the batch; [0] with one request at a time.
    steps: int64[R], index of the step within each request, from 0; the prefill is a step.
    offsets: int64[R + 1], where each request's part of own_experts and own_counts begins and ends.
    own_experts: int64[m], ids by request, ascending within each.
    own_counts: int64[m], tokens of that request that chose each.
    picked_offsets: int64[D + 1], bounds of each distance, 1 to D layers ahead, in the next three; empty if unknown.
    picked_experts: int64[p], ids that the routers of the next layers pick for this layer's input, at each distance
        ascending: of each token the best ones, and further ones.
    picked_counts: int64[p], tokens that would choose each; 0: a further one.
    picked_scores: float64[p], probabilities by the router, added up over the tokens that pick it.
    weights: float64[n], router weights of `experts`, added up over their tokens; empty if unknown.
    token_ids: int64[T], ids of the tokens that the step takes in, a request after another: all of a prefill or of a
        chunk, else one, and drafted ones behind it (rule 20); -1 where withheld, empty where none is known.
    """

    serial: int
    phase: int
    layer: int
    experts: Int
    counts: Int
    batch_slots: Int
    steps: Int
    offsets: Int
    own_experts: Int
    own_counts: Int
    token_ids: Int
    picked_offsets: Int = NO_INTS
    picked_experts: Int = NO_INTS
    picked_counts: Int = NO_INTS
    picked_scores: Float = NO_FLOATS
    weights: Float = NO_FLOATS

    def ahead(self, distance: int) -> tuple[Int, Float]:
        """Return ids and scores of what the router so many layers ahead picks for this layer's input."""
        if not 0 < distance < len(self.picked_offsets):
            return NOTHING
        part = slice(*self.picked_offsets[distance - 1 : distance + 1])
        return self.picked_experts[part], self.picked_scores[part]

    def by_request(self) -> Iterator[tuple[int, int, Int, Int]]:
        """Each request's (batch_slot, step, experts, counts)."""
        ends = self.offsets.tolist()
        for r, (batch_slot, step) in enumerate(zip(self.batch_slots.tolist(), self.steps.tolist(), strict=True)):
            own = slice(ends[r], ends[r + 1])
            yield batch_slot, step, self.own_experts[own], self.own_counts[own]


_BOUNDS = {"least": ("of at least", ge), "above": ("above", gt), "most": ("at most", le), "below": ("below", lt)}


def bounded(default: Any, **bounds: float) -> Any:
    """Return the field of an option with bounds: `least` and `most` are allowed values, `above` and `below` are not."""
    return field(default=default, metadata=bounds)


@dataclass(frozen=True)
class Options:
    """Options of a policy that has none; one that has some declares a frozen dataclass of its own.

    If that derives from this one, it may state bounds (`bounded`) and the policy that has them, for errors to name.
    """

    policy: ClassVar[str] = "a prefetcher"

    def __init_subclass__(cls, policy: str = "") -> None:
        cls.policy = policy or cls.policy

    def __post_init__(self) -> None:
        for option in (option for cls in type(self).__mro__ if is_dataclass(cls) for option in fields(cls)):
            value, bounds = getattr(self, option.name), option.metadata
            if not all(_BOUNDS[kind][1](value, bound) for kind, bound in bounds.items()):
                range_ = " and ".join(f"{_BOUNDS[kind][0]} {bound:,}" for kind, bound in bounds.items())
                raise InputError(f"{self.policy} needs {option.name} {range_}, not {value}")


KEEP_ROWS = 2
"""Of the keep scores of every policy: the score, and what breaks its ties."""


CHANGED, DID_NOTHING, UNCHANGED, CHANGED_HERE, LEAVES = 0, 1, 2, 4, 8
"""What a compiled function of an eviction policy may return: it may have changed any scores, as with None; of an event,
that it did nothing, as with True; and it changed none, or none but those of the event's layer or of the expert that it
was called for. These two may stand with the one before them: DID_NOTHING | CHANGED_HERE. LEAVES: see `Compiled.learn`.
"""


class Compiled(NamedTuple):
    """The functions of a policy that compiled engines run; all but `start` and those of requests are compiled.

    A policy has a state of its own, a NamedTuple of arrays that `start` makes, or no more than its keep scores. Arrays
    of the state have the same types whatever shape and options are; `start` makes it for the default options of any
    shape, one of a single expert included. Halves of one name that share what they learn have the same `start`.

    The last four are bookkeeping in the keep scores of an eviction policy, at lookups and transfers (rule 8). Those of
    lookups are called whatever the expert's state is; `on_host_lookup` of a miss that is computed on the host, where it
    differs. `more_rows`: of `keep`, behind the first two (KEEP_ROWS), which are as `ScorePolicy` says. `in_order`:
    nothing else writes scores, the second are all equal, and one that changes becomes the greatest of all: residents
    are kept in a list. Scores change in the functions of the eviction policy alone, and between requests; one that
    changes few of them and says so (UNCHANGED, CHANGED_HERE) saves a search among all.

    A policy whose scores and proposals depend on the cache as well may learn once for caches of several sizes that are
    run together: `learn` is called for all, then `follow`, in place of `observe`, and `propose` for each, whose state
    is `beside` that of the first. A cache for which it would learn otherwise LEAVES, and is run alone.
    """

    start: Callable[[Shape, Any], Any] | None = None  # the state when a run begins
    observe: Callable[..., Any] | None = None  # (state, event); of an eviction policy (state, keep, event)
    propose: Callable[..., int] | None = None  # (state, event, ids, priorities): fill both; how many
    begin_request: Callable[[Any, int], None] | None = None  # (state, batch_slot), not compiled
    end_request: Callable[[Any, int], None] | None = None  # (state, batch_slot), not compiled
    on_lookup: Callable[[Float, int, int], int | None] | None = None  # (keep, expert, serial of the event)
    on_host_lookup: Callable[[Float, int, int], int | None] | None = None  # None: as on_lookup
    on_insert: Callable[[Float, int, int, int], int | None] | None = None  # (keep, expert, serial, transfer)
    on_evict: Callable[[Float, int], int | None] | None = None  # (keep, expert)
    more_rows: int = 0
    in_order: bool = False
    learn: Callable[[Any, Event], int] | None = None  # (state, event): what it changed
    follow: Callable[..., int] | None = None  # (state, keep, event, what was changed)
    beside: Callable[[Any, Shape], Any] | None = None  # (state, shape), not compiled: another cache's


def _place(cls: type, attribute: str) -> int:
    """Return which of the classes that `cls` is made of defines an attribute, in the order of resolution."""
    return next((place for place, each in enumerate(cls.__mro__) if attribute in vars(each)), len(cls.__mro__))


class Listener:
    """What retention and prefetch have in common: they hear of requests and of events.

    One that is compiled declares so in `compiled`, and has its `state`.
    """

    name: ClassVar[str]
    oracle: ClassVar[bool] = False
    Options: ClassVar[type] = Options
    observes: bool = False  # whether `observe` is called; a class with its own has True unless it says so
    starts_from: ClassVar[str] = ""  # the option that names a file that `save` wrote; none: it saves nothing
    compiled: ClassVar[Compiled | None] = None
    state: Any
    _observe: Callable[..., Any] | None = None
    _propose: Callable[..., int] | None = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "name" not in vars(cls):
            cls.name = cls.__name__
        if cls.compiled and "compiled" in vars(cls) and "observes" not in vars(cls):
            cls.observes = cls.compiled.observe is not None
        for method, switch in ("observe", "observes"), ("propose", "proposes"):
            if _place(cls, method) < _place(cls, switch):
                setattr(cls, switch, True)

    def __init__(self, shape: Shape, options: object, state: object = None) -> None:
        """`state`: what another half has begun."""
        self.shape = shape
        self.options = options
        self._state_is_shared = state is not None
        declared = type(self).compiled  # an attribute of that name may be a user's own
        if declared and declared.start:
            self.state = declared.start(shape, options) if state is None else state
            if declared.observe:
                self._observe = from_python(declared.observe)
            if declared.propose:
                self._propose = from_python(declared.propose)

    @classmethod
    def declared(cls, options: Any) -> Compiled | None:
        """Return what it declares as compiled, with these options: less where they make a hook useless."""
        return cls.compiled

    @classmethod
    def require(cls, options: Any, shape: Shape) -> None:
        """Raise InputError for a file that an option names and that is no good for this model. Before a run, once."""

    def foresee(self, requests: Requests) -> None:
        """Oracles alone: the routing of the whole run, before it starts."""

    def charged(self, transfers: float, slots: int) -> None:
        """Before the run, from an engine that knows: the transfers that take as long as an event is charged for the
        policy, and the slots of the cache."""

    def begin_request(self, request: int, batch_slot: int) -> None:
        """A request takes `batch_slot`, a place in the batch that is free; `request` is its ordinal in the run."""
        declared = type(self).compiled
        if declared and declared.begin_request and not self._state_is_shared:
            declared.begin_request(self.state, batch_slot)

    def observe(self, event: Event) -> bool | None:
        """Rule 3: the router of an event is known. Return True where nothing was done, so that it is free (rule 14)."""

    def end_request(self, batch_slot: int) -> None:
        """The last step of the request in `batch_slot` has ended: the time to learn from it."""
        declared = type(self).compiled
        if declared and declared.end_request and not self._state_is_shared:
            declared.end_request(self.state, batch_slot)

    def save(self, file: BinaryIO, source: str) -> None:
        """Write what was learned so far, from `source`. Only where `starts_from` is set."""
        raise NotImplementedError


class Policy(Listener, ABC):
    """What to keep: names the victim when a transfer needs a slot and none is free."""

    def on_hit(self, expert: int, serial: int) -> None:
        """A lookup found `expert` READY or under way; `serial` is the number of the event."""

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        """The transfer of `expert` starts; `serial`: the latest event, `start`: the number of the transfer."""

    def on_evict(self, expert: int) -> None:
        """`expert` leaves the cache, by eviction or at the end of a cold request."""

    def on_need(self, expert: int) -> None:
        """The transfer of `expert` needs a slot and none is free: `victim` is asked next."""

    def admit(self, event: Event) -> Int:
        """Return the experts of the event that are worth a slot, should they have missed: ids (admission `own`)."""
        raise NotImplementedError

    @abstractmethod
    def victim(self, evictable: Int) -> int:
        """The expert to evict. evictable: [n], n >= 1, ascending ids of READY experts that nothing pins."""


class ScorePolicy(Policy):
    """An eviction policy as keep scores: the least (primary, secondary, id) among the evictable goes.

    keep: float64[2, L*E]: primary and secondary score of every expert, resident or not. What it declares as `compiled`
    keeps the scores up to date, or it writes them in `observe`.
    """

    def __init__(self, shape: Shape, options: object, state: object = None) -> None:
        super().__init__(shape, options, state)
        declared = type(self).compiled
        self.keep = np.zeros((KEEP_ROWS + (declared.more_rows if declared else 0), shape.total))

    def observe(self, event: Event) -> bool | None:
        """Rule 3, of one that is compiled; others override this."""
        return self._observe(self.state, self.keep, event) if self._observe else None

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        """Raise TypeError for a policy that another one calls, where that cannot keep its scores up to date."""
        declared = type(self).compiled
        if declared and (declared.on_lookup or declared.on_insert):
            raise TypeError(f"{self.name} keeps its scores in compiled code, in a cache of its own: derive from it")

    def victim(self, evictable: Int) -> int:
        """The definition; the residency does the same over its slots, compiled."""
        order = np.lexsort((evictable, self.keep[1, evictable], self.keep[0, evictable]))
        return int(evictable[order[0]])


class Prefetcher(Listener):
    """What to fetch early."""

    proposes: ClassVar[bool] = True  # False: `propose` is never called, and nothing is ever fetched early
    at_start: ClassVar[bool] = False  # True: `propose` is asked as well when a step starts, of layer START
    needs_lookahead: ClassVar[bool] = False  # True: engines refuse a trace without that column
    one_scale_with: ClassVar[str] = ""  # an eviction policy whose keep scores compare with the priorities (rule 6)

    def __init__(self, shape: Shape, options: object, state: object = None) -> None:
        super().__init__(shape, options, state)
        if type(self).compiled:
            self.observes = self.observes and not self._state_is_shared
            self._ids, self._priorities = np.empty(shape.total, np.int64), np.empty(shape.total)

    @classmethod
    def beside(cls, keeper: Policy) -> "Prefetcher":
        """Return the prefetcher of the same name and options as `keeper`: it shares a state of the same start."""
        shared = (keeper.state,) if cls.shares_state_with(type(keeper)) else ()
        return cls(keeper.shape, keeper.options, *shared)

    @classmethod
    def shares_state_with(cls, keeper: type[Listener]) -> bool:
        """Whether it learns with an eviction policy of the same name and options: both are compiled, of one start."""
        ours, theirs = cls.compiled, keeper.compiled
        return bool(ours and theirs and ours.start and ours.start is theirs.start)

    def window(self, experts_per_layer: float) -> None:
        """Before the run, from an engine that knows: experts the link carries while one layer of a token computes."""

    def observe(self, event: Event) -> bool | None:
        """Rule 3, of one that is compiled; others override this."""
        return self._observe(self.state, event) if self._observe else None

    def propose(self, event: Event) -> tuple[Int, Float]:
        """Rule 4: (experts [n], priorities [n]), asked after every event; distinct ids, higher priority first.

        Where `at_start`, also when a step starts, with an event of layer START that tells of its tokens alone.
        """
        if self._propose is None:
            return NOTHING
        n = self._propose(self.state, event, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
