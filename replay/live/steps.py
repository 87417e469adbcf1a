"""The schedule of a live model: a step for each of its forward passes, as they begin."""

from collections.abc import Iterator
from queue import SimpleQueue
from threading import Event as Flag

from policies.core.policy import Int
from sim.loop.schedule import LiveStep, Place, Step
from traces.steps import DECODE, PREFILL


class LiveSteps:
    """A `Schedule` that waits for whoever calls `begin`. A pass with nothing in its KV cache begins a request."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._queue: SimpleQueue[Step | None] = SimpleQueue()
        self.waiting = Flag()
        """Set while nobody has begun a step."""
        self.forget()

    def forget(self) -> None:
        """Count requests and steps from the beginning."""
        self._ordinal, self._number, self._events = -1, 0, 0

    def begin(self, tokens: int, context: int, is_new: bool, token_ids: Int) -> tuple[Step, LiveStep]:
        """A forward pass begins. Return its step, and where its routing is reported. token_ids: [tokens], or none."""
        if is_new or self._ordinal < 0:
            self._ordinal, self._number = self._ordinal + 1, -1
        self._number += 1
        phase = PREFILL if is_new or tokens > 1 else DECODE
        routing = LiveStep(phase, self._number, self._events, token_ids)
        self._events += self._layers
        places = (Place(self._ordinal, 0, self._ordinal, tokens, self._number),)
        begins = () if self._number else places
        asked = routing.chosen, routing.event, routing.start
        step = Step(phase, tokens, context, places, begins, (), True, False, *asked)
        self.waiting.clear()
        self._queue.put(step)
        return step, routing

    def close(self) -> None:
        """There are no more steps."""
        self.waiting.clear()
        self._queue.put(None)

    def steps(self, first: int = 0) -> Iterator[Step]:
        """Yield each step as it begins; `ends` and `idle` are known when its head has ended."""
        assert first == 0, "a live model is not resumed"
        while True:
            self.waiting.set()
            step = self._queue.get()
            if step is None:
                return
            yield step
