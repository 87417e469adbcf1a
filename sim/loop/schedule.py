"""Which requests take part in which step. The loop runs the steps of a schedule and knows no requests beyond a step's.

`OneAtATime` runs the requests of a trace one after another. `Batches` runs several users' at a time (rule 18): it
decides at each step boundary, from the time, whom it admits.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np

from policies.core.bent import Bending
from policies.core.events import NOTHING_PICKED, Events, Picked, routing_of_batch
from policies.core.policy import NO_INTS, START, Event, Int, Requests, Shape
from sim.loop.run import Users
from traces.steps import PREFILL, RequestSteps


class Place(NamedTuple):
    """A request that takes part in a step."""

    ordinal: int  # in the order of the run, which policies hear
    batch_slot: int  # its place in the batch
    request: int  # index in the trace
    tokens: int
    step: int  # its number in the request
    rejected: int = 0  # of the tokens
    prefills: bool = False


class Clock(Protocol):
    """What `Batches` asks of a session."""

    def begin_step(self) -> int:
        """Return the time."""

    def wait_until(self, ns: int) -> None:
        """Let time pass up to `ns`."""


class Routing(Protocol):
    """What the routers of one step choose: all that a session asks of it, a layer at a time."""

    @property
    def events(self) -> Events | None:
        """Those of a trace, of which this is a step."""

    @property
    def number(self) -> int:
        """Return which of these steps it is."""

    def chosen(self, layer: int) -> tuple[Int, dict[int, int]]:
        """Return the experts that the router of `layer` chose, int64[n] ascending, and the tokens of each.

        It is called only after that router has ended (rule 16).
        """

    def event(self, layer: int) -> Event:
        """Return the same as policies hear it."""

    def start(self) -> Event:
        """Return what policies may know when the step starts."""

    @property
    def bend(self) -> Callable[[int, Int], None] | None:
        """What bends the choice of a layer by the states of all experts (rule 22), if anything does."""


class RecordedStep:
    """A step of a trace, number `number` of some events."""

    def __init__(self, events: Events, number: int) -> None:
        self.events, self.number = events, number
        self.bend = partial(events.bend, number) if events.routing.bent.kind else None

    def chosen(self, layer: int) -> tuple[Int, dict[int, int]]:
        return self.events.chosen(self.number, layer)

    def event(self, layer: int) -> Event:
        return self.events.event(self.number, layer)

    def start(self) -> Event:
        return self.events.start(self.number)


class LiveStep:
    """A step of a model that runs now, of one or more requests: `put` what a router has chosen, then have it routed.

    phase: PREFILL or DECODE; number: of the step in its requests; events: how many the run had before this step;
    token_ids: [T] of the tokens that it takes in, a request after another, or none; requests: R, in batch slots 0 to R.
    """

    bend = events = None
    number = 0

    def __init__(self, phase: int, number: int, events: int, token_ids: Int = NO_INTS, requests: int = 1) -> None:
        self._phase = phase
        self._step = number
        self._events = events
        self._token_ids = np.ascontiguousarray(token_ids, np.int64)
        self._requests = requests
        self._layer = -1
        self._put(np.zeros((requests, 1), np.int64), 0)
        self._picks = NOTHING_PICKED

    def put(self, layer: int, tokens: Int, picks: Picked = NOTHING_PICKED) -> None:
        """The router of `layer` has ended; tokens: int64[R, E] of each request, those that chose each expert.

        picks: what the next routers pick for the same input.
        """
        self._events += 1
        self._layer, self._picks = layer, picks
        self._put(tokens, layer * tokens.shape[1])

    def _put(self, tokens: Int, first: int) -> None:
        together, (request, expert) = tokens.sum(0), tokens.nonzero()
        chosen = together.nonzero()[0]
        self._experts, self._counts = chosen + first, together[chosen]
        offsets = np.searchsorted(request, np.arange(self._requests + 1))
        self._by_request = offsets, expert + first, tokens[request, expert]

    def chosen(self, layer: int) -> tuple[Int, dict[int, int]]:
        assert layer == self._layer, "put what the router has chosen before it is routed"
        return self._experts, dict(zip(self._experts.tolist(), self._counts.tolist(), strict=True))

    def event(self, layer: int) -> Event:
        offsets, own_experts, own_counts = (each.copy() for each in self._by_request)
        offsets_by_distance, ids, of_each, scores = NOTHING_PICKED if layer == START else self._picks
        return Event(
            serial=self._events,
            phase=self._phase,
            layer=layer,
            experts=self._experts.copy(),
            counts=self._counts.copy(),
            batch_slots=np.arange(self._requests),
            steps=np.full(self._requests, self._step),
            offsets=offsets,
            own_experts=own_experts,
            own_counts=own_counts,
            token_ids=self._token_ids.copy(),
            picked_offsets=offsets_by_distance,
            picked_experts=ids,
            picked_counts=of_each,
            picked_scores=scores,
        )

    def start(self) -> Event:
        return self.event(START)


@dataclass(slots=True)
class Step:
    """One forward pass of one or more requests.

    begins: places of the requests that were admitted for it, or with it; ends: of those whose last step it is. `more`:
    whether any request runs, waits or is still to arrive when it has ended; `idle`: whether none runs then.
    """

    phase: int
    tokens: int
    context: int  # tokens in the KV caches of all its requests
    places: tuple[Place, ...]
    begins: tuple[Place, ...]
    ends: tuple[Place, ...]
    more: bool
    idle: bool
    routing: Routing
    waited_ns: tuple[int, ...] = ()  # by `begins`; empty: nobody waited
    draft_ns: int = 0  # before it


class OneAtATime:
    """The requests of a trace, one after another."""

    def __init__(self, requests: Requests, shape: Shape, bending: Bending | None = None) -> None:
        self._requests, self._bending = requests, bending
        self._layers = shape.layers

    def steps(self, first: int = 0) -> Iterator[Step]:
        """Yield each request's prefill and then its decoded tokens, from the request with ordinal `first` on."""
        ordinals = range(len(self._requests))
        last = next((ordinal for ordinal in reversed(ordinals) if len(self._requests[ordinal].phase)), -1)
        before = sum(len(self._requests[ordinal].phase) for ordinal in range(first)) * self._layers
        for ordinal in range(first, last + 1):
            request = self._requests[ordinal]
            events = Events.of(request, self._layers, before, self._bending)
            before += events.count
            yield from _steps_of(ordinal, request, events, more=ordinal < last)


def _steps_of(ordinal: int, request: RequestSteps, events: Events, more: bool) -> Iterator[Step]:
    last = len(request.tokens) - 1
    each = zip(request.phase.tolist(), request.tokens.tolist(), request.context.tolist(), strict=True)
    for number, (phase, tokens, context) in enumerate(each):
        active = Active(ordinal, request, 0, number)
        places = (active.place,)
        begins, ends = places if number == 0 else (), places if number == last else ()
        together = phase, tokens, context, places, begins, ends, more or number < last, number == last
        yield Step(*together, RecordedStep(events, number), draft_ns=active.draft_ns)


@dataclass(slots=True)
class Active:
    """A request that runs, and its step that comes next."""

    ordinal: int
    request: RequestSteps
    batch_slot: int
    step: int = 0

    @property
    def place(self) -> Place:
        """In the step that comes next."""
        request, step = self.request, self.step
        rejected = 0 if request.rejected is None else int(request.rejected[step])
        own = int(request.tokens[step]), step, rejected, self.prefills
        return Place(self.ordinal, self.batch_slot, request.request, *own)

    @property
    def draft_ns(self) -> int:
        """What drafting for that step takes."""
        return 0 if self.request.draft_ns is None else int(self.request.draft_ns[self.step])

    @property
    def prefills(self) -> bool:
        """Whether that step is its prefill, or a chunk of it."""
        return bool(self.request.phase[self.step] == PREFILL)

    @property
    def ends(self) -> bool:
        return self.step == len(self.request.phase) - 1


class Admission:
    """Rule 18: who waits, who is admitted when a step has ended, and who leaves. Both engines ask it."""

    def __init__(self, requests: Requests, users: Users) -> None:
        arrivals = users.arrival_ns
        self._requests, self._arrivals = requests, arrivals
        order = sorted(range(len(requests)), key=arrivals.__getitem__) if arrivals else range(len(requests))
        self._waiting = deque(order)
        self._batch_slots = users.max_batch
        self.active: dict[int, Active] = {}
        """By batch slot, ascending."""
        self._first = self._next()

    def _next(self) -> tuple[int, RequestSteps] | None:
        """Return the next of the requests that wait, and has any steps; the others take no part."""
        while self._waiting:
            ordinal = self._waiting.popleft()
            request = self._requests[ordinal]
            if len(request.phase):
                return ordinal, request
        return None

    @property
    def more(self) -> bool:
        """Whether any request runs, waits or is still to arrive."""
        return bool(self.active or self._first)

    @property
    def next_arrival(self) -> int | None:
        """When the first of those that wait can be admitted, if there is a batch slot; None: none can be."""
        if not self._first or len(self.active) == self._batch_slots:
            return None
        return self._arrivals[self._first[0]] if self._arrivals else 0

    def admit(self, now: int) -> tuple[list[Active], list[int]]:
        """Admit whom rule 18 admits at a step boundary. Return them in their order, and how long each waited."""
        admitted: list[Active] = []
        waited: list[int] = []
        while (arrival := self.next_arrival) is not None and arrival <= now:
            assert self._first
            batch_slot = next(batch_slot for batch_slot in range(self._batch_slots) if batch_slot not in self.active)
            admitted.append(Active(*self._first, batch_slot))
            self._first = self._next()
            waited.append(now - arrival if self._arrivals else 0)
            self.active[batch_slot] = admitted[-1]
            if admitted[-1].prefills:
                break
        self.active = dict(sorted(self.active.items()))
        return admitted, waited

    def taking_part(self, admitted: Sequence[Active]) -> list[Active]:
        """Return who takes part in the step that comes next: a prefill's first chunk alone, or everybody."""
        prefills = [each for each in admitted if each.prefills]
        return prefills or list(self.active.values())

    def ended(self, parts: Sequence[Active], steps: int = 1) -> list[Active]:
        """So many steps of these have ended. Return who left."""
        left = []
        for each in parts:
            each.step += steps
            if each.step == len(each.request.phase):
                left.append(self.active.pop(each.batch_slot))
        return left


class Batches:
    """The requests of a trace by users who run at a time (rule 18)."""

    def __init__(
        self, requests: Requests, shape: Shape, users: Users, clock: Clock, bending: Bending | None = None
    ) -> None:
        self._admission = Admission(requests, users)
        self._shape, self._bending = shape, bending
        self._clock = clock

    def steps(self, first: int = 0) -> Iterator[Step]:
        """Yield each admitted request's prefill alone, and one decoded token of all that run."""
        assert first == 0, "a run of several users is not resumed"
        admission, layers, before = self._admission, self._shape.layers, 0
        while admission.more:
            admitted, waited = admission.admit(self._clock.begin_step())
            if not admission.active:
                arrival = admission.next_arrival
                assert arrival is not None
                self._clock.wait_until(arrival)
                continue
            parts = admission.taking_part(admitted)
            places = tuple(each.place for each in parts)
            begins = tuple(each.place for each in admitted)
            ends = tuple(each.place for each in parts if each.ends)
            batch = [(each.batch_slot, each.step, each.request) for each in parts]
            events = Events(routing_of_batch(batch, 1, self._shape, self._bending), layers, before)
            context = sum(int(each.request.context[each.step]) for each in parts)
            phase, draft_ns = int(events.routing.phase[0]), max(each.draft_ns for each in parts)
            admission.ended(parts)
            idle = not admission.active
            before += layers
            tokens = sum(place.tokens for place in places)
            together = phase, tokens, context, places, begins, ends, admission.more, idle
            yield Step(*together, RecordedStep(events, 0), waited_ns=tuple(waited), draft_ns=draft_ns)
