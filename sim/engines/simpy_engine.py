"""The SimPy engine: the loop on a simulated machine of GPU memory, host link, compute, host and disk. Rules 11, 12, 15.

The streams are SimPy processes that do one piece of work after another. Slots of GPU memory are filled by the link; the
compute stream waits for an expert that is still arriving. What happens at one nanosecond happens in the order of rule
15: link, disk, compute, host, routers, arrivals. Every decision is the loop's (`sim.loop`); this file is only time.
"""

from collections import deque
from collections.abc import Generator, Sequence
from functools import cache, lru_cache
from heapq import heappop, heappush
from typing import Any

import simpy

from sim.loop.device import Completion, Device, Kind, Work, nothing_under_way
from sim.loop.driver import Driver
from sim.loop.log import Ended, RunLog, StepRow, whole
from sim.loop.observer import LoopObserver
from sim.loop.run import Run
from sim.profiles.timing import Link, Timing

LINK, DISK, COMPUTE, HOST, ROUTER, WAKE = range(2, 8)
"""Rule 15: ranks of ends within one nanosecond. SimPy's own wake-ups have the ranks 0 and 1 and come before these."""

EXPERT = Kind.EXPERT
ROUTER_ENDED, COMBINED = Completion(Kind.ROUTER), Completion(Kind.COMBINE)
NO_EXPERT = -1
ALIKE = 2**62  # experts of a layer, so that all are of layer 0
MOST_ROWS = 10_000  # of a part of a log, where somebody is always active

Wait = Generator[simpy.Event, Any, None]


class Nanoseconds(simpy.Environment):
    """An environment whose clock is whole nanoseconds from 0."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    @property
    def now(self) -> int:
        return self._now  # type: ignore[return-value]  # whole, since every delay is


class Signal(simpy.Event):
    """An event that a stream waits for again and again, one wait at a time. It does not fail and carries no value."""

    def __init__(self, env: Nanoseconds) -> None:
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None

    def after(self, delay: int, rank: int) -> "Signal":
        """Happen `delay` ns from now; among the events of that instant the one of the lower `rank` comes first."""
        env = self.env
        self.callbacks = []
        # As env.schedule, which costs as much again; priorities above NORMAL, as SimPy's heap allows.
        heappush(env._queue, (env._now + delay, rank, next(env._eid), self))  # type: ignore[misc]
        return self


Job = tuple[Completion, int, int]
"""One piece of work of a stream: how it is reported, its duration, and its rank."""


class Queue:
    """The work of one serial stream, and the event that its process waits for while there is none."""

    def __init__(self, env: Nanoseconds) -> None:
        self.jobs: deque[Job] = deque()
        self._filled = Signal(env)
        self._idle = False

    def put(self, job: Job) -> None:
        self.jobs.append(job)
        if self._idle:
            self.wake()

    def wake(self) -> None:
        if self._idle:
            self._idle = False
            self._filled.env.schedule(self._filled)

    def filled(self) -> Signal:
        self._idle = True
        self._filled.callbacks = []
        return self._filled


class SimpyDevice(Device):
    """A machine with one GPU and one host link, whose times are those of `timing`, `link` and `disk`.

    experts: of a layer; None: they are alike in all layers.
    """

    def __init__(self, timing: Timing, link: Link, experts: int | None = None, disk: Link | None = None) -> None:
        self.env = Nanoseconds()
        self._timing, self._disk = timing, disk
        self._experts = of_a_layer = experts or ALIKE
        self._ended: deque[Completion] = deque()
        self._copies, self._computes = Queue(self.env), Queue(self.env)
        self._arriving = NO_EXPERT  # whose piece is on the link
        self._arrival = Signal(self.env)  # the end of that piece
        self._expert_job = cache(
            lambda expert, tokens: (Completion(EXPERT, expert), timing.expert_ns(tokens, expert // of_a_layer), COMPUTE)
        )
        self._piece_job = cache(
            lambda expert, first, last: (Completion(Kind.COPY, expert), link.used_ns(last) - link.used_ns(first), LINK)
        )
        self._head_ns = lru_cache(timing.head_ns)
        self.predictor_takes_time = timing.predictor_ns > 0
        self._link_process = self.env.process(self._link())
        self.env.process(self._compute())
        self._reading: Signal | None = None  # the end of the read under way
        self._draft_ns = 0  # before the dense part that comes next

    @classmethod
    def of(cls, run: Run) -> "SimpyDevice":
        """Return the machine on which a run is simulated."""
        return cls(run.timing, run.gpu.link, run.shape.experts, run.host.link if run.host else None)

    def _link(self) -> Wait:
        """The host link: one piece after another. An interrupt discards the piece on it."""
        jobs, ended = self._copies.jobs, self._ended.append
        while True:
            try:
                while not jobs:
                    yield self._copies.filled()
                completion, duration, rank = jobs.popleft()
                self._arriving = completion[1]
                yield self._arrival.after(duration, rank)
            except simpy.Interrupt:
                self._arrival = Signal(self.env)  # the old one happens later, and nobody waits for it
                continue
            self._arriving = NO_EXPERT
            ended(completion)

    def _compute(self) -> Wait:
        """The compute stream. An expert whose last piece is on the link holds back all that is behind it."""
        jobs, ended, end = self._computes.jobs, self._ended.append, Signal(self.env)
        while True:
            while not jobs:
                yield self._computes.filled()
            completion, duration, rank = jobs.popleft()
            if completion[1] == self._arriving != NO_EXPERT:
                yield self._arrival
            yield end.after(duration, rank)
            ended(completion)

    def now(self) -> int:
        return self.env._now  # type: ignore[return-value]  # as `Nanoseconds.now`, on the hot path

    # The link

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        """Rule 12: a chunk takes the difference of what its transfer has used."""
        self._copies.put(self._piece_job(expert, first, last))

    def discard_copies(self) -> None:
        """Takes no time (rule 10)."""
        self._copies.jobs.clear()
        if self._arriving != NO_EXPERT:
            self._link_process.interrupt()
            self._arriving = NO_EXPERT

    # The compute stream

    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        """Rule 11: the router comes last within its nanosecond."""
        ns = self._draft_ns + self._timing.dense_ns(layer, tokens, context, requests)
        self._draft_ns = 0
        self._computes.put((ROUTER_ENDED, ns, ROUTER))

    def predict(self) -> bool:
        """Rule 14: a constant time of the compute stream."""
        if self.predictor_takes_time:
            self._computes.put((Completion(Kind.PREDICTOR), self._timing.predictor_ns, COMPUTE))
        return self.predictor_takes_time

    def experts(self, works: Sequence[Work]) -> None:
        job, append = self._expert_job, self._computes.jobs.append
        for expert, _, tokens in works:
            append(job(expert, tokens))
        self._computes.wake()

    def combine(self, layer: int, tokens: int, context: int) -> None:
        self._computes.put((COMBINED, self._timing.combine_ns(tokens, layer, context), COMPUTE))

    def head(self, tokens: int, requests: int = 1) -> None:
        self._computes.put((Completion(Kind.HEAD), self._head_ns(tokens, requests), COMPUTE))

    def draft(self, ns: int) -> None:
        """Rule 20."""
        self._draft_ns = ns

    # Host, disk, and the clock of an idle run: each does one piece of work, so an event is all that it takes

    def hop(self) -> bool:
        """Rule 13."""
        if self._timing.hop_ns:
            self._at(self._timing.hop_ns, HOST, Completion(Kind.HOP))
        return self._timing.hop_ns > 0

    def host(self, expert: int, tokens: int) -> None:
        """Rule 13."""
        self._at(self._timing.host_ns(tokens, expert // self._experts), HOST, Completion(Kind.HOST, expert))

    def read(self, expert: int) -> None:
        """Rule 17."""
        assert self._disk
        read_ns = self._disk.used_ns(self._disk.bytes_of(expert // self._experts))
        self._reading = self._at(read_ns, DISK, Completion(Kind.READ, expert))

    def discard_reads(self) -> None:
        """Takes no time (rule 10)."""
        if self._reading is not None and self._reading.callbacks:
            self._reading.callbacks.clear()

    def wake_at(self, ns: int) -> None:
        """Rule 18."""
        self._at(ns - self.now(), WAKE, Completion(Kind.WAKE))

    def _at(self, delay: int, rank: int, completion: Completion) -> Signal:
        """Report a completion so many ns from now."""
        event = Signal(self.env).after(delay, rank)
        event.callbacks.append(lambda _: self._ended.append(completion))
        return event

    # Completions

    def next_completion(self) -> Completion:
        """Let simulated time pass until something has ended."""
        ended, env = self._ended, self.env
        queue = env._queue
        while not ended:  # env.step(), without a call for each event
            if not queue:
                raise nothing_under_way()
            env._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # as in SimPy
            for callback in callbacks:
                callback(event)
            if not event._ok and not hasattr(event, "_defused"):
                raise event._value
        return ended.popleft()

    def poll(self) -> Completion | None:
        """Return what ends at this instant; the clock stands still."""
        while not self._ended and self.env.peek() <= self.env.now:
            self.env.step()
        return self._ended.popleft() if self._ended else None

    def close(self) -> None:
        """Nothing is held."""


def play(run: Run, ended: Ended, observer: LoopObserver | None = None) -> None:
    """Run everything on a simulated machine; `ended` takes the log of each request when it ends."""
    driver = Driver(run, SimpyDevice.of(run), observer=observer)
    rows: list[StepRow] = []
    for row in driver.steps():
        rows.append(row)
        if driver.nobody_active or len(rows) == MOST_ROWS:
            ended(driver.log(rows))
            rows.clear()
    if rows:
        ended(driver.log(rows))


def simulate(run: Run) -> RunLog:
    return whole(play, run)
