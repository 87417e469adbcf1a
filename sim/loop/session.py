"""A run as it goes: policies, residency, pump and compute stream between two completions. Rules 1 to 5, 11, 13 and 14.

Whoever knows the next routing (driver, or a live model) calls `route(step, layer)`; the session answers with work for
the device, and handles completions. Hits of an event go in at once, and each other expert behind them as soon as its
last piece is on its way: the device waits for it (rule 9 needs no more: an event may be larger than the cache).
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from policies.core.bent import COUNTS, Bending
from policies.core.policy import NO_INTS, Event, Float, Int
from policies.core.residency import ObservedResidency, PolicyResidency, Residency
from policies.core.runner import PolicyRunner
from sim.loop import host
from sim.loop.device import Completion, Device, Kind, Work
from sim.loop.host import Host
from sim.loop.log import BEHIND_PREFETCH, DEMAND, DISK, HOST, LATE, PREDICTOR, SLOT, STALLS
from sim.loop.observer import LoopObserver
from sim.loop.pump import Pump
from sim.loop.run import Run
from sim.loop.schedule import Routing

NO_EXPERT = -1  # in the compute stream's queue: other work

COPY, EXPERT, PREDICTOR_ENDED, ROUTER = Kind.COPY, Kind.EXPERT, Kind.PREDICTOR, Kind.ROUTER

NO_CAUSE = -1

COMPUTING, PREDICTING, WAITING = range(3)
"""What the compute stream does. WAITING: for an expert, or for the host, which has submitted nothing."""


class Decider(Protocol):
    """Who decides: policies (`PolicyRunner`), a script of what they decided, or a fixed order of transfers."""

    @property
    def silent(self) -> bool:
        """Whether it neither hears of events nor proposes anything, so that it need not be asked."""

    def residency(self, room: int, sizes: Int | None = None) -> Residency:
        """Return the residency of a cache of so many slots, or bytes where experts differ in size."""

    def begin_request(self, ordinal: int, batch_slot: int = 0) -> None:
        """A request begins, at a place in the batch."""

    def observe(self, event: Event) -> None:
        """Hear of an event (rule 3)."""

    @property
    def idle(self) -> bool:
        """Whether nothing was done of the latest event, so that it is free (rule 14)."""

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        """Answer what to fetch early (rule 4); None: nothing is ever proposed."""

    @property
    def at_start(self) -> bool:
        """Whether `propose` is asked when a step starts as well."""

    def end_request(self, batch_slot: int = 0) -> None:
        """The last step of a request has ended."""


def decider_of(run: Run) -> PolicyRunner:
    """Return the policies of a run, fresh."""
    gpu = run.gpu
    runner = PolicyRunner(run.policy, run.shape, run.requests, experts_per_layer=gpu.experts_per_layer)
    runner.retention.charged(gpu.transfers_per_event, gpu.experts)
    return runner


class Session:
    """Residency, pump, what the compute stream was given, and where the time went."""

    def __init__(
        self, run: Run, device: Device, decider: Decider | None = None, observer: LoopObserver | None = None
    ) -> None:
        """`decider`: who decides, if not the run's policies."""
        self.device = device
        self.decider: Decider = decider or decider_of(run)
        link, experts = run.gpu.link, run.shape.experts
        residency = self.decider.residency(run.gpu.slots, link.sizes(experts))
        self.bending = Bending(run.routing, run.shape) if run.routing else None
        self.residency: Residency = ObservedResidency(residency, observer) if observer else residency
        self._silent, self._predicts = self.decider.silent, device.predictor_takes_time
        self._asks_at_start = self.decider.at_start
        self._slot, self._computed = self.residency.slot, self.residency.computed  # bound once
        self._observer = observer
        if observer:
            observer.run_begins(residency, lambda: self.device.now())
        self._host: Host | None = None
        self._admission: tuple[PolicyRunner, PolicyResidency] | None = None  # who decides what is admitted (rule 21)
        self.states = NO_INTS
        if run.routing:
            assert isinstance(residency, PolicyResidency), "only policies say which experts are present"
            self.states = residency.states
        if host.needed(run):
            assert isinstance(residency, PolicyResidency), "only policies decide what the host does"
            self._host = Host(run, residency, device, observer)
            if run.policy.admits:
                assert isinstance(self.decider, PolicyRunner), "only policies admit"
                self._admission = self.decider, residency
        self.pump = Pump(self.residency, device, link, experts, observer, self._host)
        self._tokens: dict[int, int] = {}  # of each expert of the current event that was not submitted yet
        self._proposal: tuple[Int, Float] | None = None
        self._computing: deque[int] = deque()  # submitted to the compute stream: experts and NO_EXPERT
        self._landing: set[int] = set()  # of these the experts whose last piece is flying
        self._doing = WAITING  # what the compute stream does
        self._since = device.now()  # up to there its time is accounted for
        self._stall_ns = [0] * len(STALLS)
        self._compute_ns = 0

    # What the outside calls

    def start(self, step: Routing) -> None:
        """A step has started, and computes (rule 21): ask a prefetcher that wants to be asked then (rules 4 and 16)."""
        if self._admission:
            self._admission[1].begin_step()
        proposal = self.decider.propose(step.start()) if self._asks_at_start else None
        if proposal is not None:
            self.residency.propose(*proposal)
            self.pump.proposed = True
        if proposal is not None or self._admission:
            self._pump()
            if self._host:
                self._host.act()

    def route(self, step: Routing, layer: int) -> None:
        """Look up what `layer` chose, ask the policies, let link and compute stream start what they can."""
        if step.bend:  # rule 22
            step.bend(layer, self.states)
        chosen, tokens = step.chosen(layer)
        pump, host = self.pump, self._host
        if host:
            host.place(layer, chosen, tokens, pump.link_ready(tokens))
        hits, demands = self.residency.route(chosen)
        self._tokens = tokens
        pump.demands, pump.computing = demands, len(hits)
        if host and not self._admission:
            host.begin_event(chosen)
        if self._observer:
            late = [e for e in tokens if e not in hits and self._slot(e) >= 0]
            self._observer.event_routed(tokens.copy(), hits, late)
        if not self._silent:
            self._ask(step.event(layer), chosen)
        elif self._predicts or self._admission:
            self._admit(chosen)
            if self._predicts:
                self._start_all()
        if not self.decider.idle and self.device.predict():
            self.submitting(PREDICTOR_ENDED)
            self._turn(PREDICTING)
        elif self._proposal is not None:
            self._turn(PREDICTING)
            self._proposal_arrives()
            self._turn(WAITING)
        if hits:
            self._compute(hits)
        if tokens and pump.in_flight:
            self._compute_landing(pump.landing())
        if pump.demands or pump.proposed:
            self._pump()
        if host:
            host.act()

    def finish_event(self) -> None:
        """Handle completions until each expert of the event is submitted behind its last piece, or the host did it."""
        while self._tokens or (self._host and self._host.tokens):
            self.handle(self.device.next_completion())

    def wait_until(self, ns: int) -> None:
        """Handle completions until the clock shows `ns`."""
        self.device.wake_at(ns)
        self.until(Kind.WAKE)

    def until(self, kind: Kind) -> None:
        """Handle completions up to the first of `kind`."""
        next_completion, handle = self.device.next_completion, self.handle
        ended = None
        while ended is not kind:
            completion = next_completion()
            handle(completion)
            ended = completion[0]

    def poll(self) -> None:
        """Handle what has ended by now, without waiting."""
        while (completion := self.device.poll()) is not None:
            self.handle(completion)

    def submitting(self, kind: Kind) -> None:
        """The compute stream is about to be given a dense part (ends as ROUTER), a combine or a head."""
        if not self._computing:
            self._turn(COMPUTING)
        self._computing.append(NO_EXPERT)
        if self._observer:
            self._observer.submitted(kind)

    def handle(self, completion: Completion) -> None:
        """Handle one completion, with the transfers and computes that it lets start."""
        kind, expert = completion
        if kind is COPY:
            self._piece_ended()
            return
        if kind > ROUTER:  # of no stream that every run has
            self._host_ended(completion)
            return
        if self._observer:
            self._observer.ended(completion)
        computing, landing = self._computing, self._landing
        computing.popleft()
        if not computing or (landing and computing[0] in landing):
            self._turn(WAITING)
        if kind is EXPERT:
            self._computed(expert)
            self.pump.computing -= 1
            if self.pump.blocked or self._host or (self.pump.demands and not self.pump.computing):
                self._pump()
                if self._host:
                    self._host.act()
        elif kind is PREDICTOR_ENDED:
            if self._doing == PREDICTING:
                self._turn(COMPUTING)
            if self._proposal is not None:
                self._proposal_arrives()
            self._pump()
            if self._host:
                self._host.act()

    def _host_ended(self, completion: Completion) -> None:
        """A read, the hop or an expert's compute on the host has ended, or the wait of an idle run."""
        self._turn(self._doing)
        if self._observer:
            self._observer.ended(completion)
        if self._host and completion.kind is not Kind.WAKE:
            self._host.ended(*completion)
            self._pump()
            self._host.act()

    def end_request(self, cold: bool) -> None:
        """No request remains active (rule 10)."""
        if cold:
            if self._observer:
                self._observer.cutting()
            self.pump.cut()
            if self._host:
                self._host.cut()
        self.residency.end_request(cold)

    def move_to(self, device: Device) -> None:
        """Continue on another device, which gets the experts that hold a slot here."""
        while self.pump.on_link:
            self.handle(self.device.next_completion())
        self.device, self._predicts = device, device.predictor_takes_time
        self.pump.move_to(device)

    def held(self) -> list[tuple[int, int]]:
        """Return slot and expert of everything that holds a slot, in ascending ids of the experts."""
        return [(self.residency.slot(expert), expert) for expert in self.residency.resident().tolist()]

    def begin_step(self) -> int:
        """Account for time from now on; return the clock."""
        self._turn(self._doing)
        return self._since

    @property
    def clock(self) -> int:
        """Time up to which everything is accounted for."""
        return self._since

    def totals(self) -> list[int]:
        """Return stalls by cause, the residency's counters, reads, what was bent, and busy times: all so far."""
        self._turn(self._doing)
        reads, busy = (self._host.reads(), self._host.busy_ns()) if self._host else ((0, 0), (0, 0))
        bent = self.bending.counts.tolist() if self.bending else [0] * len(COUNTS)
        return [
            *self._stall_ns,
            *self.residency.counters(),
            *reads,
            *bent,
            self.pump.busy_ns(),
            self._compute_ns,
            *busy,
        ]

    def evicted(self) -> tuple[list[int], list[int]]:
        """Return who left GPU memory and host memory since this was last asked, in order."""
        gone = self.pump.evictions, self._host.evictions if self._host else []
        self.pump.evictions = []
        if self._host:
            self._host.evictions = []
        return gone

    # Asking the policies

    def _ask(self, event: Event, chosen: Int) -> None:
        """Rules 3 and 4. The policies' own time on the host counts as the predictor's."""
        self._turn(PREDICTING)
        self.decider.observe(event)
        self._admit(chosen, event)
        if self._predicts:
            self._turn(WAITING)
            self._start_all()
            self._turn(PREDICTING)
        self._proposal = self.decider.propose(event)
        self._turn(WAITING)

    def _admit(self, chosen: Int, event: Event | None = None) -> None:
        """Rule 21. What is copied waits for the link as proposals do; only now is it known what the host computes."""
        if self._admission:
            assert self._host
            runner, residency = self._admission
            self.pump.demands = residency.admit(chosen, runner.admit(event))
            self.pump.proposed = True
            self._host.take(self._tokens)
            self._host.begin_event(chosen)

    def _proposal_arrives(self) -> None:
        assert self._proposal is not None
        self.residency.propose(*self._proposal)
        self.pump.proposed = True

    # The two streams

    def _compute(self, experts: list[int]) -> None:
        """Submit experts of the event, which are in their slots or landing."""
        tokens, slot, computing = self._tokens, self._slot, self._computing
        works: list[Work] = [(expert, slot(expert), tokens.pop(expert)) for expert in experts]
        if not computing:
            self._turn(WAITING if experts[0] in self._landing else COMPUTING)
        computing.extend(experts)
        if self._observer:
            self._observer.submitted(EXPERT, experts)
        self.device.experts(works)

    def _piece_ended(self) -> None:
        """The oldest piece on the link has ended."""
        if self._doing != COMPUTING:
            self._turn(self._doing)
        arrived = self.pump.piece_ended()
        if arrived is not None and arrived in self._landing:
            self._landing.discard(arrived)
            self.pump.computing += 1
            if self._doing == WAITING and self._computing[0] == arrived:
                self._turn(COMPUTING)
        if self.pump.busy_with_more():
            self._pump()
        if self._host:
            self._host.act()

    def _pump(self) -> None:
        """Let the link act; what lands of the event is computed behind what was submitted before."""
        landing = self._send()
        if landing and self._tokens:
            self._compute_landing(landing)

    def _compute_landing(self, experts: Iterable[int]) -> None:
        """Submit those that the event waits for; their last pieces are flying."""
        awaited = [expert for expert in experts if expert in self._tokens]
        if awaited:
            self._landing.update(awaited)
            self._compute(awaited)

    def _start_all(self) -> None:
        """Let all streams but compute start what they can, before the predictor runs (rule 14)."""
        self._send()
        if self._host:
            self._host.act()

    def _send(self) -> list[int]:
        """Let the link act. Up to now it was idle, if it was, and nothing waited for it."""
        if not self.pump.in_flight and self._doing == WAITING:
            self._turn(WAITING)
        return self.pump.act()

    # Where the time went

    def _turn(self, doing: int) -> None:
        """Attribute the compute stream's time since the last turn to what it did; from now on it does `doing`.

        Time in which nothing is submitted and nothing awaited is the host's own: it is in no column, only in step_ns.
        """
        now = self.device.now()
        began, did = self._since, self._doing
        self._since, self._doing = now, doing
        if now == began:
            return
        if did == COMPUTING:
            self._compute_ns += now - began
            return
        cause = PREDICTOR if did == PREDICTING else self._cause()
        if cause < 0:
            return
        self._stall_ns[cause] += now - began
        if self._observer:
            on_link = self.pump.on_link
            self._observer.stalled(cause, began, now, on_link.expert if on_link else NO_EXPERT)

    def _cause(self) -> int:
        """What the compute stream has been waiting for, of `STALLS`; below 0: for nothing of an event."""
        host, on_link = self._host, self.pump.on_link
        if not (self._computing or self._tokens or (host and host.tokens)):
            return NO_CAUSE
        if on_link is not None:
            if on_link.demand:
                return DEMAND
            if self.residency.awaited(on_link.expert):
                return LATE
            if host is None or self.pump.demand_waits():
                return BEHIND_PREFETCH
        elif host is None:
            return NO_CAUSE
        if host.awaits_disk(self._tokens):
            return DISK
        return HOST if host.busy else SLOT
