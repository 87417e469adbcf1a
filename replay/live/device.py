"""The device of a live model: lanes bring experts into slots, and the thread that runs the model is the compute stream.

The driver, on a thread of its own, submits work as to any device. The model's thread takes it, in order, wherever its
forward pass comes to experts: it reports the router, computes the experts it is given, combines, and continues with the
next layer's dense part when it is told to.
"""

from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from replay.devices.cpu import LinkThreads, Outcome, Stream
from replay.devices.store import ExpertSource
from replay.devices.waiting import stuck, timed
from sim.loop.device import Completion, Kind, Work

Order = Kind | Sequence[Work] | Exception
"""What the model's thread is to do: a dense part (ROUTER), experts, COMBINE, HEAD; or to fail."""


class AbortedError(Exception):
    """The forward pass was left before its end."""


class LiveDevice(LinkThreads):
    """Both sides of it: the driver submits, the model's thread calls `order` and `ended`."""

    _orders: SimpleQueue[Order]

    def __init__(self, store: ExpertSource, slots: int, lanes: int = 1) -> None:
        super().__init__(store, slots, lanes)
        self._orders = SimpleQueue()
        self._failed = False

    def read_with(self, lanes: int) -> None:
        """Read with so many lanes from now on; nothing is under way."""
        for lane in self._lanes:
            lane.close(wait=True)
        self._lanes = [Stream(f"lane {lane}") for lane in range(lanes)]

    # The driver's side

    @timed
    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        """Let the model continue to its next router."""
        self._submit([Completion(Kind.ROUTER)], Kind.ROUTER)

    @timed
    def experts(self, works: Sequence[Work]) -> None:
        """One after another, each when it has landed; whatever is given together may be computed together."""
        self._submit([Completion(Kind.EXPERT, expert) for expert, _, _ in works], works)

    @timed
    def combine(self, tokens: int) -> None:
        """Add up."""
        self._submit([Completion(Kind.COMBINE)], Kind.COMBINE)

    @timed
    def head(self, tokens: int, requests: int = 1) -> None:
        """Whatever the model does until its next forward pass."""
        self._submit([Completion(Kind.HEAD)], Kind.HEAD)

    def fail(self, error: Exception) -> None:
        """Let the model's thread raise `error` where it waits; return when the copies under way have ended.

        Raise InputError where one of them never ends: then the device cannot be used again.
        """
        self._failed = True
        self._orders.put(error)
        while self._copies:
            try:
                outcome = self._outcomes.get(timeout=self.watchdog_s)
            except Empty:
                self._stuck = True
                raise stuck(self.watchdog_s, [self._copies[0]]) from error
            if _is_copy(outcome):
                self._copies.popleft()

    def recover(self) -> None:
        """Forget what was submitted before a failure; called while the model's thread begins a step."""
        if not self._failed:
            return
        self._failed = False
        for queue in (self._orders, self._outcomes):
            while True:
                try:
                    queue.get_nowait()
                except Empty:
                    break
        self._computes = deque()
        self._landing.clear()

    def _submit(self, completions: Sequence[Completion], order: Order) -> None:
        self._computes.extend(completions)
        self._orders.put(order)

    def _may_wait(self) -> bool:
        """A model, and whoever calls it, may take as long as they like; a copy may not."""
        return not self._copies

    def _ended(self, outcome: Outcome) -> Completion:
        if isinstance(outcome, Exception) and _is_copy(outcome):
            self._copies.popleft()
        return super()._ended(outcome)

    # The model's side

    def order(self) -> Order:
        """Wait for what is to be done next. Raise what the driver has failed with."""
        order = self._orders.get()
        if isinstance(order, Exception):
            raise order
        return order

    def ended(self, completion: Completion) -> None:
        """Report that a piece of work has ended."""
        self._outcomes.put(completion)

    def landed(self, expert: int) -> bool:
        """Wait for an expert's last piece; return whether that was still under way."""
        landing = self._landing.get(expert)
        if landing is None or landing.is_set():
            return False
        if not landing.wait(2 * self.watchdog_s):
            raise stuck(2 * self.watchdog_s, [Completion(Kind.COPY, expert)])
        return True

    def abort(self) -> None:
        """Let the driver drop the step that was begun."""
        self._outcomes.put(AbortedError())


def _is_copy(outcome: Outcome) -> bool:
    """Whether it is the end of a copy, good or bad."""
    return not isinstance(outcome, AbortedError) and (isinstance(outcome, Exception) or outcome.kind is Kind.COPY)
