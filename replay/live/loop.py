"""The loop of a live model: the model runs by itself, and calls at each router, expert and sum.

Two kinds of threads act, one at a time, under one lock. The model's own thread decides, at once, when its
router has chosen. A lane that has ended a piece of a transfer starts what comes next. So the link does not wait for the
model, nor the model for another thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Condition

from policies.core.bent import Bending
from policies.core.events import Picked
from policies.core.policy import Int
from replay.devices.cpu import Outcome
from replay.live.device import LiveDevice
from sim.loop.device import Completion, Kind, Work
from sim.loop.driver import Driver
from sim.loop.log import StepRow
from sim.loop.run import Run
from sim.loop.schedule import LiveStep, Place, Step
from sim.loop.session import decider_of
from traces.errors import InputError
from traces.steps import PREFILL

AT_NO_LAYER = -1


class LiveLoop:
    """Steps of one request, or of a batch (rule 18): `begin`; `route`, `works`, `computed`, `combined` by layer; `end`.

    Cache and policy start again behind a pass that failed or was left before its end, a transfer that failed when no
    pass ran (`on_note` is called), and with a batch of more requests than any before, for which policies have no room.
    """

    def __init__(self, run: Run, device: LiveDevice, on_note: Callable[[str], None]) -> None:
        self._run, self._device, self._on_note = run, device, on_note
        self._changed = Condition()  # with the lock that all hold who act
        self._start()

    def _start(self) -> None:
        self.decider = decider_of(self._run)
        """The policies: what they have learned is theirs."""
        self._device.forget()
        self._driver = Driver(self._run, self._device, self.decider)
        self._device.listen(self._copied)
        self._ordinal, self._number, self._events = 0, -1, 0  # of the first request of the batch, and of its step
        self._step: Step | None = None  # the one that was begun last, if it has not ended
        self.layer = AT_NO_LAYER
        """Of the step that runs, the next one."""
        self._requests = 0  # of the batch that was begun last
        self._failure: Exception | None = None
        self._is_failure_known = False

    # The model's thread

    def begin(
        self, phase: int, rows: int, columns: int, context: int, is_new: bool, token_ids: Int, request: int
    ) -> None:
        """Begin a pass of `columns` tokens of each of `rows` requests, `request` being the first one's number.

        context: tokens in each KV cache when it ends; is_new: so are the requests; token_ids: [rows * columns], or
        none. Raise InputError where a copy of an earlier pass never ends.
        """
        if self._failure or self._step or rows > self._run.shape.batch_slots:
            self.stop()
            slots = max(rows, self._run.shape.batch_slots)
            self._run = replace(self._run, shape=replace(self._run.shape, batch_slots=slots))
            self._start()
        is_new |= self._number < 0
        if is_new:
            self._ordinal, self._number = self._ordinal + self._requests, -1
        self._requests = rows
        self._number += 1
        routing = LiveStep(phase, self._number, self._events, token_ids, rows)
        self._events += self._run.shape.layers
        first, number = self._ordinal, self._number
        own = columns, number, 0, phase == PREFILL
        places = tuple(Place(first + row, row, request + row, *own) for row in range(rows))
        begins = () if self._number else places
        step = Step(phase, rows * columns, rows * context, places, begins, (), True, False, routing)
        with self._changed:
            self._step, self._routing, self.layer = step, routing, 0
            self._driver.begin(step)
            self._driver.session.submitting(Kind.ROUTER)
            self._driver.session.start(routing)

    def bending(self, layer: int) -> tuple[Bending, Int]:
        """Return what bends the routing, and the states of all experts of a layer."""
        session, E = self._driver.session, self._run.shape.experts
        assert session.bending
        with self._changed:
            return session.bending, session.states[layer * E : (layer + 1) * E].copy()

    def route(self, tokens: Int, picks: Picked) -> None:
        """Take a router's choice. tokens: int64[rows, E] that chose each expert; picks: of the routers behind it."""
        with self._changed:
            self._require()
            session, layer = self._driver.session, self.layer
            self._routing.put(layer, tokens, picks)
            session.handle(Completion(Kind.ROUTER))
            session.route(self._routing, layer)

    def works(self) -> Sequence[Work]:
        """Wait for experts to compute next, in their slots or landing. Raise what a lane has raised, or InputError."""
        device = self._device
        with self._changed:
            if not self._changed.wait_for(lambda: self._failure or device.works, 2 * device.watchdog_s):
                raise device.stuck()
            self._require()
            return device.works.popleft()

    def computed(self, experts: Sequence[int], is_last: bool) -> None:
        """These experts have been computed; is_last: all of the event.

        Raise what a lane has raised: what has failed counts as landed, so one of them may hold anything.
        """
        with self._changed:
            self._require()
            session = self._driver.session
            for expert in experts:
                session.handle(Completion(Kind.EXPERT, expert))
            if is_last:
                session.submitting(Kind.COMBINE)

    def combined(self) -> None:
        """Note that their sum has been computed: what follows is the next layer's dense part, or the head."""
        with self._changed:
            session = self._driver.session
            session.handle(Completion(Kind.COMBINE))
            is_last = self.layer + 1 == self._run.shape.layers
            session.submitting(Kind.HEAD if is_last else Kind.ROUTER)
            self.layer += 1

    def end(self, ends_request: bool) -> StepRow | None:
        """End the forward pass; return its row. None where it was left before its end, or was ended before."""
        step, is_whole = self._step, self.layer == self._run.shape.layers
        self.layer = AT_NO_LAYER
        if step is None or not is_whole:
            return None
        if ends_request:
            step.ends, step.idle = step.places, True
        with self._changed:
            self._driver.session.handle(Completion(Kind.HEAD))
            row = self._driver.end(step)
        self._step = None
        return row

    def stop(self) -> None:
        """Start nothing more on the link; return when nothing is under way. Raise InputError where that never comes."""
        with self._changed:
            failure, is_known = self._failure, self._is_failure_known
            self._failure = failure or InputError("this live model was closed")
            self._is_failure_known = True
        if failure and not is_known and not self._step:  # of a pass that was left, the lanes may find half a state
            self._on_note(f"a transfer between two passes failed: {failure}; the next pass begins with an empty cache")
        self._device.settle()
        self._device.listen(None)

    def _require(self) -> None:
        """Raise what has failed since the step began."""
        if self._failure:
            self._is_failure_known = True
            raise self._failure

    # Lanes

    def _copied(self, outcome: Outcome) -> None:
        with self._changed:
            self._device.copied()
            if not self._failure:
                try:
                    if isinstance(outcome, Exception):
                        raise outcome
                    self._driver.session.handle(outcome)
                except Exception as error:
                    self._failure = error
            self._changed.notify()
