"""The closed loop: policies decide as things happen on a device, whichever it is. Rules 1 to 5, 10, 11 and 14.

Work is submitted, completions are handled; all decisions are the residency machine's. The causality gate: the routing
of a layer is touched only after the completion of that layer's dense part. The compute stream keeps submission order,
so hits go in at once, and each other expert behind them as soon as its last piece is on its way: the device waits for
it, the host does not. Combine and the next layer's dense part follow likewise.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Protocol, TypeVar

import numpy as np

from policies.core.policy import Float, Int, Requests, Shape
from policies.core.residency import Residency
from policies.core.runner import Pair
from policies.core.spec import PolicySpec
from replay.devices.device import Completion, Device, Kind, Work
from replay.pump import Pump, Transfer
from sim.loop.log import STALLS, RunLog
from traces.steps import RequestSteps

PREDICTOR, DEMAND, LATE, BEHIND_PREFETCH = range(4)
"""Of STALLS. Waiting for a slot alone never occurs on one link: what has arrived is computed, and can then go."""

COLUMNS = (
    *("request", "phase", "tokens", "step_ns"),
    *(f"stall_{cause}_ns" for cause in STALLS),
    *("hits", "late", "misses", "demand_transfers", "prefetch_transfers", "prefetch_used", "prefetch_wasted"),
    *("link_busy_ns", "compute_busy_ns"),
)
"""Of one step: the rows of a run as they come, a row of `sim.loop.log.RunLog`."""

Row = list[int]
T = TypeVar("T")

NO_EXPERT = -1  # in the compute stream's queue: other work


@dataclass(frozen=True)
class Plan:
    """What is played."""

    requests: Requests
    shape: Shape
    slots: int
    policy: PolicySpec
    expert_bytes: int
    chunk_bytes: int | None = None  # None: the whole expert
    cold: bool = False
    experts_per_layer: float | None = None  # of `sim.profiles.timing`, on this device; a prefetch budget needs it


class Deciding(Protocol):
    """Who decides: a policy (`Pair`), or a script of what one decided (`replay.comparison.lockstep`)."""

    def residency(self, slots: int) -> Residency:
        """The machine over a cache of `slots` experts."""
        ...

    def begin_request(self, ordinal: int, request: RequestSteps) -> None:
        """The request is about to be played."""
        ...

    def begin_step(self, step: int, phase: int) -> None:
        """A step of it is about to be played."""
        ...

    def observe(self, layer: int, first: int, last: int) -> None:
        """Rule 3."""
        ...

    def propose(self) -> tuple[Int, Float] | None:
        """Rule 4."""
        ...

    def end_request(self) -> None:
        """Its last step has ended."""
        ...


def play(
    plan: Plan,
    device: Device,
    on_step: Callable[[Row], None] | None = None,
    watch: Callable[[Residency], None] | None = None,
    policy: Deciding | None = None,
    done: Sequence[Row] = (),
    clock: Device | None = None,
) -> RunLog:
    """Play the requests one after another on `device`.

    `on_step` gets the row of each step that has ended; `watch` the residency machine before anything is played;
    `policy` decides, if not the plan's. `done`: rows of the first requests, whole, which are not played again but
    decided once more on `clock`, a logical one (`Driver.resume`).
    """
    driver = Driver(plan, clock if clock and done else device, policy)
    if watch:
        watch(driver.machine)
    if clock and done:
        driver.resume(done, device)
    return driver.run(on_step or (lambda row: None), done)


class Driver:
    """One run: residency machine, pump, what is under way on the compute stream, and where the time went."""

    def __init__(self, plan: Plan, device: Device, policy: Deciding | None = None) -> None:
        """`policy`: who decides, if not the plan's policy."""
        self.plan = plan
        self.device = device
        self.policy: Deciding = policy or Pair(
            plan.policy, plan.shape, plan.requests, experts_per_layer=plan.experts_per_layer
        )
        self.machine = self.policy.residency(plan.slots)
        self.pump = Pump(self.machine, device, plan.expert_bytes, plan.chunk_bytes)
        self._proposal: tuple[Int, Float] | None = None
        self._tokens: dict[int, int] = {}  # of each expert of the current event that was not submitted yet
        self._computing: deque[int] = deque()  # submitted to the compute stream: experts and NO_EXPERT
        self._landing: set[int] = set()  # of these the experts whose last piece is flying
        self._predicting = False
        self._since = 0  # time up to here is accounted for
        self._stall_ns = [0] * len(STALLS)
        self._link_ns = self._compute_ns = 0

    def run(self, on_step: Callable[[Row], None], done: Sequence[Row] = ()) -> RunLog:
        """Play everything; the run ends with the last head. `done`: rows of its first requests, see `resume`."""
        rows = list(done)
        began_ns, inside_ns = perf_counter_ns(), self.device.inside_ns
        for ordinal in range(_requests(done), len(self.plan.requests)):
            for row in self.steps(ordinal):
                rows.append(row)
                on_step(row)
        self.device.outside_ns = perf_counter_ns() - began_ns - (self.device.inside_ns - inside_ns)
        return self._log(rows)

    def resume(self, done: Sequence[Row], device: Device) -> None:
        """Go on on `device` behind requests that were played there before: `done`, their rows, as they were measured.

        So far this drives a logical clock, on which they are decided anew: so the policy learns what it had learned,
        and slots hold what they held, but for decisions that time has changed. Then the device gets their experts.
        """
        for ordinal in range(_requests(done)):
            for _ in self.steps(ordinal):
                pass
        while self.pump.on_link:
            self._handle(self.device.next_completion())
        self.device = device
        self.pump.go_on(device)
        for expert in self.machine.resident().tolist():
            device.copy(expert, self.machine.slot(expert), 0, self.plan.expert_bytes)
            device.next_completion()

    def steps(self, ordinal: int) -> Iterator[Row]:
        """Play a request's steps, one by one; what happens to a row between two steps takes none of their time."""
        request = self.plan.requests[ordinal]
        cold = self.plan.cold and ordinal < len(self.plan.requests) - 1
        self.policy.begin_request(ordinal, request)
        steps = len(request.tokens)
        for step in range(steps):
            before = self._totals()
            began = self._since = self.device.now()
            self._step(request, step)
            step_ns = self._since - began
            if step == steps - 1:
                self._end_request(cold)
            spent = [now - then for now, then in zip(self._totals(), before, strict=True)]
            yield [request.request, int(request.phase[step]), int(request.tokens[step]), step_ns, *spent]

    def _end_request(self, cold: bool) -> None:
        """Rule 10. What `--cold` discards counts for the step that has just ended, but takes none of its time."""
        self.policy.end_request()
        if cold:
            self.pump.cut()
        self.machine.end_request(cold)

    # The compute stream

    def _step(self, request: RequestSteps, step: int) -> None:
        """One forward pass: L layers, then the head."""
        device = self.device
        tokens, context = int(request.tokens[step]), int(request.context[step])
        layers = self.plan.shape.layers
        offsets = request.offsets[step * layers : (step + 1) * layers + 1].tolist()
        self.policy.begin_step(step, int(request.phase[step]))
        for layer in range(layers):
            self._submitting(NO_EXPERT)
            device.dense(layer, tokens, context)
            self._until(Kind.ROUTER)
            self._routed(request, layer, offsets[layer], offsets[layer + 1])
            while self._tokens:
                self._handle(device.next_completion())
            self._submitting(NO_EXPERT)
            device.combine(tokens)
        self._submitting(NO_EXPERT)
        device.head(tokens)
        self._until(Kind.HEAD)

    def _routed(self, request: RequestSteps, layer: int, first: int, last: int) -> None:
        """Rules 1 to 4, then the link and the compute stream act (with a predictor's time, the link acts before)."""
        hits = self.machine.route(request.experts, first, last)
        experts, counts = request.experts[first:last].tolist(), request.counts[first:last].tolist()
        self._tokens = dict(zip(experts, counts, strict=True))
        self._ask(lambda: self.policy.observe(layer, first, last))
        if self.device.predictor_takes_time:
            self._send()
        self._proposal = self._ask(self.policy.propose)
        self._predicting = self.device.predict()
        if self._predicting:
            self._computing.append(NO_EXPERT)
        else:
            self._ask(self._proposal_arrives)

        self._compute(self.machine.hits(hits))
        self._pump()

    def _ask(self, policy: Callable[[], T]) -> T:
        """The policy's own time on the host counts as the predictor's."""
        self._charge()
        self._predicting = True
        answer = policy()
        self._charge()
        self._predicting = False
        return answer

    def _proposal_arrives(self) -> None:
        if self._proposal is not None:
            self.machine.propose(*self._proposal)

    def _compute(self, experts: list[int]) -> None:
        """Submit experts of the event, which are in their slots or landing."""
        if experts:
            works: list[Work] = [(expert, self.machine.slot(expert), self._tokens.pop(expert)) for expert in experts]
            self._submitting(*experts)
            self.device.experts(works)

    def _submitting(self, *experts: int) -> None:
        """Something is about to be submitted to the compute stream."""
        self._charge()
        self._computing.extend(experts)

    # Completions

    def _until(self, kind: Kind) -> None:
        """Handle completions up to the first of `kind`."""
        while True:
            completion = self.device.next_completion()
            self._handle(completion)
            if completion.kind is kind:
                return

    def _handle(self, completion: Completion) -> None:
        """One completion, with the transfers and computes that it lets start."""
        self._charge()
        if completion.kind is Kind.COPY:
            arrived = self.pump.piece_ended()
            if arrived is not None:
                self._landing.discard(arrived)
            self._pump()
            return
        self._computing.popleft()
        if completion.kind is Kind.EXPERT:
            self.machine.computed(completion.expert)
            self._pump()
        elif completion.kind is Kind.PREDICTOR:
            self._predicting = False
            self._proposal_arrives()
            self._pump()

    def _pump(self) -> None:
        """Let the link act; what lands of the event is computed behind what was submitted before."""
        self._send()
        if self._tokens:
            landing = [expert for expert in self.pump.landing() if expert in self._tokens]
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
        elapsed, self._since = now - self._since, now
        flying = self.pump.in_flight if link_is_busy else None
        if flying:
            self._link_ns += elapsed
        if self._predicting:
            self._stall_ns[PREDICTOR] += elapsed
        elif self._computing and self._computing[0] not in self._landing:
            self._compute_ns += elapsed
        elif flying and (self._computing or self._tokens):
            self._stall_ns[self._cause(flying[0][0])] += elapsed

    def _cause(self, transfer: Transfer) -> int:
        """Why the compute stream waits for an expert."""
        if transfer.demand:
            return DEMAND
        return LATE if self.machine.awaited(transfer.expert) else BEHIND_PREFETCH

    def _totals(self) -> list[int]:
        return [*self._stall_ns, *self.machine.counters(), self._link_ns, self._compute_ns]

    def _log(self, rows: list[Row]) -> RunLog:
        table = np.array(rows, np.int64).reshape(-1, len(COLUMNS))
        column = dict(zip(COLUMNS, table.T, strict=True))
        phase = column.pop("phase").astype(np.uint8)
        stalls = np.stack([column.pop(f"stall_{cause}_ns") for cause in STALLS], axis=1)
        return RunLog(
            **column,
            phase=phase,
            stall_ns=stalls,
            expert_bytes=self.plan.expert_bytes,
            evictions=np.array(self.pump.evictions, np.int64),
        )


def _requests(rows: Sequence[Row]) -> int:
    """How many these are of."""
    return len({row[0] for row in rows})
