"""A run as it goes: its machine, and the policies that decide in it. Rules 3, 4, 13 and 14.

Whoever knows the next routing (driver, or a live model) calls `route(routing, layer)`; the session answers with work
for the device, and handles completions.
"""

from typing import Protocol

from policies.core import host_memory as memory
from policies.core import residency_compiled as core
from policies.core.bent import COUNTS, Bending
from policies.core.calling import Held, Proposal
from policies.core.dispatch import EVENT, Native
from policies.core.events import ROUTING, Events
from policies.core.limits import limiter
from policies.core.policy import NO_INTS, Event, Float, Int
from policies.core.residency import NO_EXPERT, PolicyResidency
from policies.core.runner import PolicyRunner
from sim.loop import host
from sim.loop import machine_compiled as streams
from sim.loop.device import Device, Kind, code_of
from sim.loop.machine import CALL, FIELD, Machine
from sim.loop.observer import LoopObserver
from sim.loop.run import Run
from sim.loop.schedule import Routing

CODES = {kind: code_of(kind) for kind in Kind}
WAITING, HOST_LEFT, IDLE, FOLLOWS = (FIELD[name] for name in ("waiting", "host_left", "idle", "follows"))


class Decider(Protocol):
    """Who decides: policies (`PolicyRunner`), a script of what they decided, or a fixed order of transfers."""

    @property
    def silent(self) -> bool:
        """Whether it neither hears of events nor proposes anything, so that it need not be asked."""

    def residency(self, room: int, sizes: Int | None = None) -> PolicyResidency:
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


class Session(Machine):
    """The machine of a run, and who decides in it."""

    def __init__(
        self, run: Run, device: Device, decider: Decider | None = None, observer: LoopObserver | None = None
    ) -> None:
        """`decider`: who decides, if not the run's policies."""
        self.decider: Decider = decider or decider_of(run)
        link = run.gpu.link
        residency = self.decider.residency(run.gpu.slots, link.sizes(run.shape.experts))
        memory = residency.host_memory(run.host.slots) if run.host else None
        super().__init__(residency, device, link, run.shape, observer, memory)
        self.bending = Bending(run.routing, run.shape) if run.routing else None
        self.states = residency.states
        self._run, self._layers, self._hears = run, run.shape.layers, not self.decider.silent
        self._admission = self.decider if run.policy.admits and isinstance(self.decider, PolicyRunner) else None
        self._placing = host.Placing(run, self) if host.needed(run) else None
        n = self.n
        n.has_host, n.admits, n.hears = self._placing is not None, self._admission is not None, self._hears
        n.predicts, n.at_once = device.predictor_takes_time, not device.predicts
        self._events: Events | None = None  # of the step at hand
        self._routing = Held(ROUTING)
        self._routing_at = self._routing.address
        self._policies: Policies | None = None  # where they are compiled, from the first event on
        if observer:
            observer.run_begins(residency, lambda: self.at)

    # What the outside calls

    def begin_step(self, learned: bool = False) -> int:
        """Account for time from now on; return the clock. learned: requests began or ended, of which policies know."""
        self.turn(self.number("doing"))
        if len(self.state.evictions) < 2 * self.number("evicted"):
            self.keep_evictions()
        if learned and self._policies:
            self._policies.refresh()
        return self.clock

    def start(self, routing: Routing) -> None:
        """A step has started, and computes (rule 21): ask a prefetcher that wants to be asked then (rules 4 and 16)."""
        if self._admission:
            self.residency.begin_step()
        if self.decider.at_start:
            self._write(self.decider.propose(routing.start()))
            if self._policies:
                self._policies.refresh()
        if self._admission or self.number("proposes") != NO_EXPERT:
            self.ask(streams.PUMP)

    def route(self, routing: Routing, layer: int, follows: int = 0) -> None:
        """Look up what `layer` chose, ask the policies, let link and compute stream start what they can.

        follows: the kind of work that is submitted behind the combine, as soon as all experts are.
        """
        events, device, number = routing.events, self.device, routing.number * self._layers + layer
        if routing.bend:  # rule 22
            routing.bend(layer, self.states)
        if self._placing:
            self._placing.place(layer, *routing.chosen(layer))
        if events is None:
            self._look_up(*routing.chosen(layer))
        else:
            if events is not self._events:
                self._take(events)
            self.numbers[FOLLOWS], self.at = follows, device.now()
            timed = self._policies is not None and not device.stands_still
            given = CALL(self._route, self._address, self._routing_at, self.at, ~number if timed else number)
            if given or self._checks:
                self._submit(given)
            if timed:
                self.ask(streams.BEGIN_EVENT)
                self.ask(streams.PROPOSE)
            elif not device.predicts and (self._policies or not self._hears):
                return
        if self._hears and not self._policies:
            self._decide(routing.event(layer))
        idle = self.numbers[IDLE] if self._policies else self.decider.idle
        self.ask(streams.SUBMIT, device.predicts and not idle and device.predict())

    def finish_event(self) -> None:
        """Handle completions until each expert of the event is submitted behind its last piece, or the host did it."""
        numbers = self.numbers
        while numbers[WAITING] or numbers[HOST_LEFT]:
            self.take()

    def wait_until(self, ns: int) -> None:
        """Handle completions until the clock shows `ns`."""
        self.device.wake_at(ns)
        self.until(Kind.WAKE)

    def until(self, kind: Kind) -> None:
        """Handle completions up to the first of `kind`."""
        code, take = CODES[kind], self.take
        while take()[-2] != code:
            pass

    def poll(self) -> None:
        """Handle what has ended by now, without waiting."""
        while (completion := self.device.poll()) is not None:
            self.handle(completion)

    def submitting(self, kind: Kind) -> None:
        """The compute stream is about to be given a dense part (ends as ROUTER), a combine or a head."""
        self.ask(streams.SUBMITTING, kind)

    def end_request(self, cold: bool) -> None:
        """No request remains active (rule 10)."""
        if cold:
            if self._observer:
                self._observer.cutting()
            self.device.discard_copies()
            self.device.discard_reads()
            self.ask(streams.CUT)
        self.residency.end_request(cold)
        if self._observer:
            self._observer.request_ended(cold)

    def move_to(self, device: Device) -> None:
        """Continue on another device, which gets the experts that hold a slot here; forget who was evicted so far."""
        while self.n.flying:
            self.take()
        self.device, self.n.predicts, self.n.at_once = device, device.predictor_takes_time, not device.predicts
        self.n.tail_bytes, self.n.hops = device.tail_bytes, device.hop_takes_time
        self.evicted()

    def held(self) -> list[tuple[int, int]]:
        """Return slot and expert of everything that holds a slot, in ascending ids of the experts."""
        return [(self.residency.slot(expert), expert) for expert in self.residency.resident().tolist()]

    def totals(self) -> list[int]:
        """Return stalls by cause, the residency's counters, reads, what was bent, and busy times: all so far."""
        self.turn(self.number("doing"))
        link, in_host, disk = self.busy_ns()
        reads = self.state.h[memory.ONE, memory.COUNTERS].tolist()
        bent = self.bending.counts.tolist() if self.bending else [0] * len(COUNTS)
        counters = self.residency.counters()
        return [*self.state.stall.tolist(), *counters, *reads, *bent, link, self.number("compute_ns"), in_host, disk]

    # Asking the policies

    def _take(self, events: Events) -> None:
        """Have compiled code know the routing of more steps."""
        self._events = events
        self._routing.hold(events.routing)
        decider, run = self.decider, self._run
        if self._policies is None and self._hears and isinstance(decider, PolicyRunner) and run.policy.compiled:
            self._policies = Policies(decider, self, run.gpu.experts_per_layer)

    def _look_up(self, experts: Int, tokens: dict[int, int]) -> None:
        """Look up an event of a model that runs now."""
        x, n = self.state.x, self.n
        x[streams.EVENT, : len(experts)] = experts
        x[streams.TOKENS, experts] = list(tokens.values())
        x[streams.TOKENS, x[streams.HOST_EVENT, : n.host_experts]] = 0
        n.event = len(experts)
        self.ask(streams.LOOK_UP)

    def _decide(self, event: Event) -> None:
        """Rules 3 and 4. The policies' own time on the host counts as the predictor's."""
        self.turn(streams.PREDICTING)
        self.decider.observe(event)
        named = self._admission.admit(event) if self._admission else NO_INTS
        self.state.ids[: len(named)] = named
        self.ask(streams.BEGIN_EVENT, len(named))
        self.turn(streams.PREDICTING)
        self._write(self.decider.propose(event))

    def _write(self, proposal: tuple[Int, Float] | None) -> None:
        """Write down a proposal, which the machine takes when it arrives."""
        if proposal is not None:
            self.n.proposes = count = len(proposal[0])
            self.state.ids[:count], self.state.priorities[:count] = proposal


class Policies:
    """Compiled policies, as the machine calls them."""

    def __init__(self, runner: PolicyRunner, machine: Machine, experts_per_layer: float | None) -> None:
        state, n, shape = machine.state, machine.n, runner.shape
        self._scores, self._halves = state.m, [Native(half) for half in (runner.retention, runner.prefetcher)]
        keeper, fetcher = self._halves
        if fetcher.propose and (limited := limiter(runner.prefetcher.options, shape, experts_per_layer)):
            fetcher.within(limited.bounds, state.x[streams.STATES], shape)
            n.limited = 1
        self._event, self._proposal = Held(EVENT), Held(Proposal(state.ids, state.priorities))
        n.event_at_hand, n.proposal = self._event.address, self._proposal.address
        n.keeps, n.keeper, n.listens, n.fetcher = keeper.observe, keeper.state, fetcher.observe, fetcher.state
        n.fetches, n.proposer, n.may_be_idle, n.decides = fetcher.propose, fetcher.proposer, runner.may_be_idle, 1
        self.refresh()

    def refresh(self) -> None:
        """Take note of what policies have learned, which may have changed all scores."""
        self._scores[core.ONE, core.SCORES_ARE] = core.NEW
        for half in self._halves:
            half.refresh()
