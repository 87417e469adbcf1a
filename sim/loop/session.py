"""A run as it goes: policies, residency, pump and compute stream between two completions. Rules 1 to 5, 11 and 14.

Whoever knows the next routing calls `route(event)`: the driver (`sim.loop.driver`), which plays a schedule, or a live
model, which computes its dense parts itself. The session answers with work for the device, and handles completions.
All decisions are the residency's and the policies'. The compute stream keeps the order of submission, so the hits of an
event go in at once, and each other expert behind them as soon as its last piece is on its way: the device waits for it,
the host does not (rule 9 needs no more: an event may be larger than the cache).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from policies.core.policy import Event, Float, Int
from policies.core.residency import ObservedResidency, Residency, ResidencyObserver
from policies.core.runner import PolicyRunner
from sim.loop.device import Completion, Device, Kind, Work
from sim.loop.log import BEHIND_PREFETCH, DEMAND, LATE, PREDICTOR, STALLS
from sim.loop.pump import Pump, PumpObserver
from sim.loop.run import Run

NO_EXPERT = -1  # in the compute stream's queue: other work


class Decider(Protocol):
    """Who decides: policies (`PolicyRunner`), a script of what they decided, or a fixed order of transfers."""

    @property
    def silent(self) -> bool:
        """Whether it neither hears of events nor proposes anything, so that nobody needs to ask."""
        ...

    def residency(self, slots: int) -> Residency:
        """Return the residency of a cache of `slots` experts."""
        ...

    def begin_request(self, ordinal: int, seat: int = 0) -> None:
        """A request begins, at a place in the batch."""
        ...

    def observe(self, event: Event) -> None:
        """Hear of an event (rule 3)."""
        ...

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        """Answer what to fetch early (rule 4); None: nothing is ever proposed."""
        ...

    def end_request(self, seat: int = 0) -> None:
        """The last step of a request has ended."""
        ...


def decider_of(run: Run) -> PolicyRunner:
    """Return the policies of a run, fresh."""
    return PolicyRunner(run.gpu.policy, run.shape, run.requests, experts_per_layer=run.gpu.experts_per_layer)


class SessionObserver(ResidencyObserver, PumpObserver):
    """Hears also of events, of the compute stream and of stalls; every method does nothing by default."""

    def run_begins(self, residency: Residency, now: Callable[[], int]) -> None:
        """Nothing has been run yet; `now` asks for the device's time."""

    def event_routed(self, event: Event, late: list[int]) -> None:
        """An event was looked up; `late` are its experts that are on their way."""

    def submitted(self, kind: Kind, experts: Sequence[int] = (NO_EXPERT,)) -> None:
        """The compute stream is given work."""

    def ended(self, completion: Completion) -> None:
        """Work of the compute stream has ended."""

    def stalled(self, cause: int, began: int, ended: int, on_link: int) -> None:
        """The compute stream waited, for one of `STALLS`, while a piece of `on_link` was on the link (or NO_EXPERT)."""

    def cutting(self) -> None:
        """`--cold` is about to discard what is under way."""


class Session:
    """Residency, pump, what the compute stream was given, and where the time went."""

    def __init__(
        self, run: Run, device: Device, decider: Decider | None = None, observer: SessionObserver | None = None
    ) -> None:
        """`decider`: who decides, if not the run's policies."""
        self.device = device
        self.decider: Decider = decider or decider_of(run)
        residency = self.decider.residency(run.gpu.slots)
        self.residency: Residency = ObservedResidency(residency, observer) if observer else residency
        self._observer = observer
        if observer:
            observer.run_begins(residency, lambda: self.device.now())
        link = run.gpu.link
        self.pump = Pump(self.residency, device, link.expert_bytes, link.chunk_bytes, observer)
        self._proposal: tuple[Int, Float] | None = None
        self._tokens: dict[int, int] = {}  # of each expert of the current event that was not submitted yet
        self._computing: deque[int] = deque()  # submitted to the compute stream: experts and NO_EXPERT
        self._landing: set[int] = set()  # of these the experts whose last piece is flying
        self._predicting = False
        self._since = device.now()  # time up to here is accounted for
        self._stall_ns = [0] * len(STALLS)
        self._link_ns = self._compute_ns = 0

    # What the outside calls

    def route(self, event: Event) -> None:
        """Look the event up, ask the policies, let link and compute stream start what they can."""
        decider = self.decider
        hits = self.residency.route(event.experts)
        self._tokens = tokens = dict(zip(event.experts.tolist(), event.counts.tolist(), strict=True))
        if len(hits) < len(tokens):
            self.pump.queued()
        if self._observer:
            self._observer.event_routed(event, [e for e in tokens if e not in hits and self.residency.slot(e) >= 0])
        if decider.silent:
            if self.device.predictor_takes_time:
                self._send()
        else:
            self._charge()
            self._ask_to_observe(event)
        self._predicting = self.device.predict()
        if self._predicting:
            self.submitting(Kind.PREDICTOR)
        elif self._proposal is not None:
            self._predicting = True
            self._proposal_arrives()
            self._charge()
            self._predicting = False
        if hits:
            self._compute(hits)
        self._pump()

    def finish_event(self) -> None:
        """Handle completions until every expert of the event has been submitted behind its last piece."""
        while self._tokens:
            self.handle(self.device.next_completion())

    def finish_compute(self) -> None:
        """Handle completions until the compute stream has ended all that it was given."""
        while self._tokens or self._computing:
            self.handle(self.device.next_completion())

    def until(self, kind: Kind) -> None:
        """Handle completions up to the first of `kind`."""
        while True:
            completion = self.device.next_completion()
            self.handle(completion)
            if completion.kind is kind:
                return

    def poll(self) -> None:
        """Handle what has ended by now, without waiting."""
        while (completion := self.device.poll()) is not None:
            self.handle(completion)

    def submitting(self, kind: Kind) -> None:
        """The compute stream is about to be given a dense part (ends as ROUTER), a combine or a head."""
        self._charge()
        self._computing.append(NO_EXPERT)
        if self._observer:
            self._observer.submitted(kind)

    def handle(self, completion: Completion) -> None:
        """Handle one completion, with the transfers and computes that it lets start."""
        self._charge()
        kind = completion.kind
        if kind is Kind.COPY:
            arrived = self.pump.piece_ended()
            if arrived is not None:
                self._landing.discard(arrived)
            self._pump()
            return
        self._computing.popleft()
        if self._observer:
            self._observer.ended(completion)
        if kind is Kind.EXPERT:
            self.residency.computed(completion.expert)
            self._pump()
        elif kind is Kind.PREDICTOR:
            self._predicting = False
            if self._proposal is not None:
                self._proposal_arrives()
            self._pump()

    def end_request(self, cold: bool) -> None:
        """No request remains active (rule 10)."""
        if cold:
            if self._observer:
                self._observer.cutting()
            self.pump.cut()
        self.residency.end_request(cold)

    def move_to(self, device: Device) -> None:
        """Continue on another device, which gets the experts that hold a slot here."""
        while self.pump.on_link:
            self.handle(self.device.next_completion())
        self.device = device
        self.pump.move_to(device)

    def held(self) -> list[tuple[int, int]]:
        """Return slot and expert of everything that holds a slot, in ascending ids of the experts."""
        return [(self.residency.slot(expert), expert) for expert in self.residency.resident().tolist()]

    def begin_step(self) -> int:
        """Account for time from now on; return the clock."""
        self._since = self.device.now()
        return self._since

    @property
    def clock(self) -> int:
        """Time up to which everything is accounted for: that of the completion handled last."""
        return self._since

    def totals(self) -> list[int]:
        """Return stalls by cause, the residency's counters, busy time of link and compute stream: all so far."""
        return [*self._stall_ns, *self.residency.counters(), self._link_ns, self._compute_ns]

    # Asking the policies

    def _ask_to_observe(self, event: Event) -> None:
        """Rules 3 and 4. The policies' own time on the host counts as the predictor's."""
        self._predicting = True
        self.decider.observe(event)
        self._charge()
        self._predicting = False
        if self.device.predictor_takes_time:
            self._send()
            self._charge()
        self._predicting = True
        self._proposal = self.decider.propose(event)
        self._charge()
        self._predicting = False

    def _proposal_arrives(self) -> None:
        assert self._proposal is not None
        self.residency.propose(*self._proposal)
        self.pump.queued()

    # The two streams

    def _compute(self, experts: list[int]) -> None:
        """Submit experts of the event, which are in their slots or landing."""
        tokens, slot = self._tokens, self.residency.slot
        works: list[Work] = [(expert, slot(expert), tokens.pop(expert)) for expert in experts]
        self._charge()
        self._computing.extend(experts)
        if self._observer:
            self._observer.submitted(Kind.EXPERT, experts)
        self.device.experts(works)

    def _pump(self) -> None:
        """Let the link act; what lands of the event is computed behind what was submitted before."""
        if self.pump.is_idle:
            return
        self._send()
        if self._tokens:
            landing = [expert for expert in self.pump.landing() if expert in self._tokens]
            if landing:
                self._landing.update(landing)
                self._compute(landing)

    def _send(self) -> None:
        """Submit pieces. A link that was idle is busy from the time at which the first one is submitted."""
        if self.pump.in_flight:
            self.pump.act()
        elif self.pump.send():
            self._charge(link_is_busy=False)
            self.pump.act()

    # Where the time went

    def _charge(self, link_is_busy: bool = True) -> None:
        """Before anything changes: the time since the last change belongs to what was under way.

        Time in which nothing is submitted and nothing awaited is the host's own: it is in no column, only in step_ns.
        """
        now = self.device.now()
        elapsed = now - self._since
        if not elapsed:
            return
        began, self._since = self._since, now
        flying = self.pump.in_flight[0][0] if link_is_busy and self.pump.in_flight else None
        if flying:
            self._link_ns += elapsed
        if self._predicting:
            cause = PREDICTOR
        elif self._computing and self._computing[0] not in self._landing:
            self._compute_ns += elapsed
            return
        elif flying and (self._computing or self._tokens):
            if flying.demand:
                cause = DEMAND
            else:
                cause = LATE if self.residency.awaited(flying.expert) else BEHIND_PREFETCH
        else:
            return
        self._stall_ns[cause] += elapsed
        if self._observer:
            self._observer.stalled(cause, began, now, flying.expert if flying else NO_EXPERT)
