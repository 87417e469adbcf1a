"""The control flow of forward passes: steps of a schedule, through a session, on a device. Rules 10, 11, 14 and 16.

The causality gate: the routing of a layer is touched only after the completion of that layer's dense part. Combine and
the next layer's dense part are submitted behind the experts, without waiting for them.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns

from sim.loop.device import Device, Kind
from sim.loop.log import RunLog, Share, StepRow
from sim.loop.observer import LoopObserver
from sim.loop.run import Run
from sim.loop.schedule import Batches, OneAtATime, Step
from sim.loop.session import Decider, Session


class Driver:
    """One run on a device."""

    def __init__(
        self, run: Run, device: Device, decider: Decider | None = None, observer: LoopObserver | None = None
    ) -> None:
        self._run = run
        self.layers = run.shape.layers
        self.session = Session(run, device, decider, observer)
        bending = self.session.bending
        self._schedule: OneAtATime | Batches = OneAtATime(run.requests, run.shape, bending)
        if run.users:
            self._schedule = Batches(run.requests, run.shape, run.users, self.session, bending)
        self._observer = observer
        self.nobody_active = True
        """Whether the step that ended last was the last one of all its requests."""
        self._step_ended_at: dict[int, int] = {}  # by batch slot: when its latest step ended, or it was admitted
        self._waited: dict[int, int] = {}  # by batch slot, of those whose first step is still to come
        self._has_ended = False  # a request, with the step before
        self._began = 0  # when the step that is run did
        self._before = self.session.totals()  # when the step before had ended
        self.outside_ns = 0
        """Time that the latest run spent outside of the device: bookkeeping, and policy overhead."""
        self.inside_ns: Counter[str] = Counter()
        """Time that it spent in calls of the device, by call."""

    def run(self, on_step: Callable[[StepRow], None], done: Sequence[StepRow] = ()) -> RunLog:
        """Run everything and return the log; the run ends with the last head. `done`: see `resume`."""
        rows, device = list(done), self.session.device
        began_ns, inside_ns = perf_counter_ns(), device.inside_ns.copy()
        for row in self.steps(_requests(done)):
            rows.append(row)
            on_step(row)
        self.inside_ns = device.inside_ns - inside_ns
        self.outside_ns = perf_counter_ns() - began_ns - self.inside_ns.total()
        return self.log(rows)

    def log(self, rows: Sequence[StepRow]) -> RunLog:
        """Return the log of these rows, with who was evicted since this was last asked."""
        link = self._run.gpu.link
        return RunLog.of_rows(rows, link.expert_bytes, *self.session.evicted(), sized=bool(link.layer_bytes))

    def resume(self, done: Sequence[StepRow], device: Device) -> None:
        """Continue on `device` behind requests that were run there before: `done`, their rows, as measured.

        So far this drives a logical clock, on which they are decided again: so the policy learns what it had learned,
        and slots hold what they held, but for decisions that time has changed. Then the device gets their experts.
        """
        for _ in self.steps(last=_requests(done)):
            pass
        session, link, experts = self.session, self._run.gpu.link, self._run.shape.experts
        session.move_to(device)
        for slot, expert in session.held():
            device.copy(expert, slot, 0, link.bytes_of(expert // experts))
            device.next_completion()

    def steps(self, first: int = 0, last: int | None = None) -> Iterator[StepRow]:
        """Run the steps of the requests from `first` up to, not including, `last`; yield the row of each.

        What happens to a row between two steps takes none of their time: requests do not wait for it.
        """
        session = self.session
        self._before = session.totals()
        for step in self._schedule.steps(first):
            if last is not None and step.places[0].ordinal >= last:
                return
            self.begin(step)
            self._play(step)
            row = self.end(step)
            given = session.device.now()
            yield row
            if waited_ns := session.device.now() - given:
                for batch_slot in self._step_ended_at:
                    self._step_ended_at[batch_slot] += waited_ns

    def begin(self, step: Step) -> None:
        decider = self.session.decider
        for place in step.begins:
            decider.begin_request(place.ordinal, place.batch_slot)
        self._began = self.session.begin_step(bool(step.begins) or self._has_ended)
        for place in step.begins:
            self._step_ended_at[place.batch_slot] = self._began

    def end(self, step: Step) -> StepRow:
        session, ended = self.session, self.session.clock
        for place in step.ends:
            session.decider.end_request(place.batch_slot)
        self.nobody_active, self._has_ended = step.idle, bool(step.ends)
        if self.nobody_active:
            # What `--cold` discards counts for the step that has just ended, but takes none of its time.
            session.end_request(self._run.cold and step.more)
        totals = session.totals()
        spent = [now - then for now, then in zip(totals, self._before, strict=True)]
        self._before = totals
        return StepRow([step.phase, step.tokens, ended - self._began, *spent], self._shares(step, ended), ended)

    def _play(self, step: Step) -> None:
        """One forward pass: L layers, then the head."""
        session, observer = self.session, self._observer
        device, tokens, context, requests = session.device, step.tokens, step.context, len(step.places)
        if observer:
            observer.step_begins(step, session.clock)
        if step.draft_ns:
            device.draft(step.draft_ns)
        routing, until, router, last = step.routing, session.until, Kind.ROUTER, self.layers - 1
        session.submitting(router)
        device.dense(0, tokens, context, requests)
        session.start(routing)
        for layer in range(last):
            until(router)
            session.route(routing, layer, router)
            session.finish_event()
            device.combine(layer, tokens, context)
            device.dense(layer + 1, tokens, context, requests)
        until(router)
        session.route(routing, last, Kind.HEAD)
        session.finish_event()
        device.combine(last, tokens, context)
        device.head(tokens, requests)
        until(Kind.HEAD)
        if observer:
            observer.step_ended(step, session.clock)

    def _shares(self, step: Step, ended: int) -> list[Share]:
        """What the step was for each of its requests; a request's first step lasts from its admission."""
        for place, waited in zip(step.begins, step.waited_ns, strict=False):
            self._waited[place.batch_slot] = waited
        found = []
        for place in step.places:
            since = self._step_ended_at[place.batch_slot]
            waited = self._waited.pop(place.batch_slot, 0)
            found.append(Share(place.request, place.tokens, ended - since, waited, place.rejected, place.prefills))
            self._step_ended_at[place.batch_slot] = ended
        return found


def _requests(rows: Sequence[StepRow]) -> int:
    return len({share.request for row in rows for share in row.shares})
