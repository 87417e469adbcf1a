"""The loop of a live model: the model runs by itself, and calls at each router, expert and sum.

Two kinds of threads act, one at a time, under one lock. The model's own thread decides, at once, when its
router has chosen. A lane that has ended a piece of a transfer starts what comes next. So the link does not wait for the
model, nor the model for another thread.
"""

from collections.abc import Callable, Sequence
from threading import Condition

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
from traces.steps import DECODE, PREFILL

AT_NO_LAYER = -1


class LiveLoop:
    """Steps of the only request: `begin`; `route`, `works`, `computed` and `combined` for each layer; `end`.

    A pass that fails, or is left before its end, leaves nothing behind: with the next one, cache and policy start
    again. So they do after a transfer that failed when no pass ran, which no pass can raise: `on_note` is called.
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
        self._ordinal, self._number, self._events = -1, 0, 0
        self._step: Step | None = None  # the one that was begun last, if it has not ended
        self.layer = AT_NO_LAYER
        """Of the step that runs, the next one."""
        self._failure: Exception | None = None
        self._is_failure_known = False

    # The model's thread

    def begin(self, tokens: int, context: int, is_new: bool, token_ids: Int) -> None:
        """A forward pass begins. is_new: so does a request; token_ids: [tokens], or none.

        Raise InputError where a copy of an earlier pass never ends.
        """
        if self._failure or self._step:
            self.stop()
            self._start()
        if is_new or self._ordinal < 0:
            self._ordinal, self._number = self._ordinal + 1, -1
        self._number += 1
        phase = PREFILL if is_new or tokens > 1 else DECODE
        routing = LiveStep(phase, self._number, self._events, token_ids)
        self._events += self._run.shape.layers
        places = (Place(self._ordinal, 0, self._ordinal, tokens, self._number),)
        begins = () if self._number else places
        callbacks = routing.chosen, routing.event, routing.start
        step = Step(phase, tokens, context, places, begins, (), True, False, *callbacks)
        with self._changed:
            self._step, self._routing, self.layer = step, routing, 0
            self._driver.begin(step)
            self._driver.session.submitting(Kind.ROUTER)
            self._driver.session.start(step)

    def route(self, experts: Int, counts: Int) -> None:
        """Take the choice of the next layer's router. experts: distinct ids over all layers, ascending."""
        with self._changed:
            self._require()
            session, layer = self._driver.session, self.layer
            self._routing.put(layer, experts, counts)
            session.handle(Completion(Kind.ROUTER))
            session.route(self._current, layer)

    def works(self) -> Sequence[Work]:
        """Wait for experts that are to be computed next: each is in its slot, or landing.

        Raise what a lane has raised, or InputError where nothing ends for too long.
        """
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

    @property
    def _current(self) -> Step:
        assert self._step is not None
        return self._step

    def _require(self) -> None:
        """Raise what has failed since the step began."""
        if self._failure:
            self._is_failure_known = True
            raise self._failure

    # Lanes

    def _copied(self, outcome: Outcome) -> None:
        """Handle the end, or the failure, of a piece of a transfer."""
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
