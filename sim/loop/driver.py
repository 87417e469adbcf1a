"""The control flow of forward passes: steps of a schedule, through a session, on a device. Rules 10, 11, 14 and 16.

The causality gate: the routing of a layer is touched only after the completion of that layer's dense part. Combine and
the next layer's dense part are submitted behind the experts, without waiting for them.
"""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns

from sim.loop.device import Device, Kind
from sim.loop.log import RunLog, Share, StepRow
from sim.loop.run import Run
from sim.loop.schedule import OneAtATime, Step
from sim.loop.session import Decider, Session, SessionObserver


class LoopObserver(SessionObserver):
    """Hears also of steps; every method does nothing by default."""

    def step_begins(self, step: Step, began: int) -> None:
        """A step is about to be run."""

    def step_ended(self, step: Step, ended: int) -> None:
        """Its head has ended."""


def play(
    run: Run,
    device: Device,
    on_step: Callable[[StepRow], None] | None = None,
    decider: Decider | None = None,
    observer: LoopObserver | None = None,
) -> RunLog:
    """Play a run on `device` and return its log.

    `on_step` gets the row of each step that has ended; `decider` decides, if not the run's policies.
    """
    return Driver(run, device, decider, observer).run(on_step or (lambda row: None))


class Driver:
    """One run on a device."""

    def __init__(
        self, run: Run, device: Device, decider: Decider | None = None, observer: LoopObserver | None = None
    ) -> None:
        """`decider`: who decides, if not the run's policies."""
        self._run = run
        self.layers = run.shape.layers
        self.session = Session(run, device, decider, observer)
        self._schedule = OneAtATime(run.requests, run.shape.layers)
        self._observer = observer
        self.nobody_active = True
        """Whether the step that ended last was the last one of all its requests."""
        self._step_ended_at: dict[int, int] = {}  # by seat: when the request's latest step ended
        self.outside_ns = 0
        """Time that the latest run spent outside of the device: bookkeeping, and the policies' own work."""

    def run(self, on_step: Callable[[StepRow], None], done: Sequence[StepRow] = ()) -> RunLog:
        """Play everything and return the log; the run ends with the last head. `done`: see `resume`."""
        rows, device = list(done), self.session.device
        began_ns, inside_ns = perf_counter_ns(), device.inside_ns
        for row in self.steps(_requests(done)):
            rows.append(row)
            on_step(row)
        self.outside_ns = perf_counter_ns() - began_ns - (device.inside_ns - inside_ns)
        return RunLog.of_rows(rows, self._run.gpu.link.expert_bytes, self.session.pump.evictions)

    def resume(self, done: Sequence[StepRow], device: Device) -> None:
        """Continue on `device` behind requests that were played there before: `done`, their rows, as measured.

        So far this drives a logical clock, on which they are decided again: so the policy learns what it had learned,
        and slots hold what they held, but for decisions that time has changed. Then the device gets their experts.
        """
        for _ in self.steps(last=_requests(done)):
            pass
        session = self.session
        session.move_to(device)
        for slot, expert in session.held():
            device.copy(expert, slot, 0, self._run.gpu.link.expert_bytes)
            device.next_completion()

    def steps(self, first: int = 0, last: int | None = None) -> Iterator[StepRow]:
        """Play the steps of the requests from `first` up to, not including, `last`; yield the row of each.

        What happens to a row between two steps takes none of their time.
        """
        session, decider, cold = self.session, self.session.decider, self._run.cold
        for step in self._schedule.steps(first):
            if last is not None and step.places[0].ordinal >= last:
                return
            for place in step.begins:
                decider.begin_request(place.ordinal, place.seat)
            before, began = session.totals(), session.begin_step()
            self._play(step)
            ended = session.clock
            for place in step.ends:
                decider.end_request(place.seat)
            self.nobody_active = len(step.ends) == len(step.places)
            if self.nobody_active:
                # What `--cold` discards counts for the step that has just ended, but takes none of its time.
                session.end_request(cold and step.more)
            spent = [now - then for now, then in zip(session.totals(), before, strict=True)]
            yield StepRow([step.phase, step.tokens, ended - began, *spent], self._shares(step, began, ended))

    def _play(self, step: Step) -> None:
        """One forward pass: L layers, then the head."""
        session, observer = self.session, self._observer
        device, tokens, context = session.device, step.tokens, step.context
        if observer:
            observer.step_begins(step, session.clock)
        for layer in range(self.layers):
            session.submitting(Kind.ROUTER)
            device.dense(layer, tokens, context)
            session.until(Kind.ROUTER)
            session.route(step, layer)
            session.finish_event()
            session.submitting(Kind.COMBINE)
            device.combine(tokens)
        session.submitting(Kind.HEAD)
        device.head(tokens)
        session.until(Kind.HEAD)
        if observer:
            observer.step_ended(step, session.clock)

    def _shares(self, step: Step, began: int, ended: int) -> list[Share]:
        """What the step was for each of its requests; a request's first step lasts from its beginning."""
        begun = {place.seat for place in step.begins}
        found = []
        for place in step.places:
            since = began if place.seat in begun else self._step_ended_at[place.seat]
            found.append(Share(place.request, place.tokens, ended - since))
            self._step_ended_at[place.seat] = ended
        return found


def _requests(rows: Sequence[StepRow]) -> int:
    """How many requests these are of."""
    return len({share.request for row in rows for share in row.shares})
