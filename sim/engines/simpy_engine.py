"""The SimPy engine: the loop on a simulated machine of GPU memory, host link and compute. Rules 11, 12 and 15.

Link and compute stream are SimPy processes that do one piece of work after another. Slots of GPU memory are filled by
the link; the compute stream waits for an expert that is still arriving. What happens at one nanosecond happens in the
order of rule 15: link, then compute, then routers. Every decision is the loop's (`sim.loop`); this file is only time.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import simpy

from sim.loop.device import Completion, Device, Kind, Work, nothing_under_way
from sim.loop.driver import Driver, LoopObserver
from sim.loop.log import Ended, Run, RunLog, StepRow, whole
from sim.profiles.timing import Link, Timing

LINK, COMPUTE, ROUTER = range(2, 5)
"""Rule 15: ranks of ends within one nanosecond. SimPy's own wake-ups have the ranks 0 and 1 and come before these."""

Wait = Generator[simpy.Event, Any, None]


class Nanoseconds(simpy.Environment):
    """An environment whose clock is whole nanoseconds from 0."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    @property
    def now(self) -> int:
        """Nanoseconds since the start of the run."""
        return self._now  # type: ignore[return-value]  # whole, since every delay is


class At(simpy.Event):
    """An event `delay` ns from now; among those of its instant the one of the lower `rank` comes first."""

    def __init__(self, env: Nanoseconds, delay: int, rank: int) -> None:
        self.env = env
        self.callbacks = []
        self._ok = True
        self._value = None
        env.schedule(self, rank, delay)  # type: ignore[arg-type]  # priorities above NORMAL, as SimPy's heap allows


class Job(NamedTuple):
    """One piece of work of a stream."""

    completion: Completion
    duration: int
    rank: int


class Stream:
    """A serial stream: does the jobs that it is given in their order, one at a time."""

    def __init__(self, env: Nanoseconds, ended: Callable[[Completion], None]) -> None:
        self.env = env
        self.end: At | None = None
        """Of the job under way; None: idle, or waiting for an expert."""
        self.job: Job | None = None
        self._jobs: deque[Job] = deque()
        self._ended = ended
        self._idle: simpy.Event | None = None
        self._process = env.process(self._run())

    def submit(self, jobs: Iterable[Job]) -> None:
        """Do these behind all others."""
        self._jobs.extend(jobs)
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None

    def discard(self) -> None:
        """Forget the job under way and those behind it."""
        self._jobs.clear()
        if self.end is not None:
            self._process.interrupt()
            self.end = self.job = None

    def ready(self, job: Job) -> simpy.Event | None:
        """What the job waits for before it starts; None: nothing."""
        return None

    def _run(self) -> Wait:
        env, jobs, ended = self.env, self._jobs, self._ended
        while True:
            try:
                while not jobs:
                    self._idle = env.event()
                    yield self._idle
                job = jobs.popleft()
                if (awaited := self.ready(job)) is not None:
                    yield awaited
                self.job = job
                self.end = At(env, job.duration, job.rank)
                yield self.end
            except simpy.Interrupt:
                continue
            self.end = self.job = None
            ended(job.completion)


class ComputeStream(Stream):
    """Computes; an expert whose last piece is on the link is waited for, and holds back all that is behind it."""

    def __init__(self, env: Nanoseconds, ended: Callable[[Completion], None], link: Stream) -> None:
        super().__init__(env, ended)
        self._link = link

    def ready(self, job: Job) -> simpy.Event | None:
        """The end of the piece on the link, if it is the job's expert that arrives with it."""
        if job.completion.kind is Kind.EXPERT:
            copying = self._link.job
            if copying is not None and copying.completion.expert == job.completion.expert:
                return self._link.end
        return None


class SimpyDevice(Device):
    """A machine with one GPU and one host link, whose times are those of `timing` and `link`."""

    def __init__(self, timing: Timing, link: Link) -> None:
        self.env = Nanoseconds()
        self._timing = timing
        self._ended: deque[Completion] = deque()
        self._link = Stream(self.env, self._ended.append)
        self._compute = ComputeStream(self.env, self._ended.append, self._link)
        self._expert_ns = lru_cache(timing.expert_ns)
        self._combine_ns = lru_cache(timing.combine_ns)
        self._head_ns = lru_cache(timing.head_ns)
        self._used_ns = lru_cache(link.used_ns)
        self.predictor_takes_time = timing.predictor_ns > 0

    def now(self) -> int:
        """Return the simulated time in ns."""
        return self.env._now  # type: ignore[return-value]  # as `Nanoseconds.now`, on the hot path

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        """Rule 12: a chunk takes the difference of what its transfer has used."""
        duration = self._used_ns(last) - self._used_ns(first)
        self._link.submit((Job(Completion(Kind.COPY, expert), duration, LINK),))

    def discard_copies(self) -> None:
        """Takes no time (rule 10)."""
        self._link.discard()

    def dense(self, layer: int, tokens: int, context: int) -> None:
        """Rule 11: the router comes last within its nanosecond."""
        self._submit(Kind.ROUTER, self._timing.dense_ns(layer, tokens, context), ROUTER)

    def predict(self) -> bool:
        """Rule 14: a constant time of the compute stream."""
        if self.predictor_takes_time:
            self._submit(Kind.PREDICTOR, self._timing.predictor_ns)
        return self.predictor_takes_time

    def experts(self, works: Sequence[Work]) -> None:
        """One after another."""
        expert_ns = self._expert_ns
        self._compute.submit(
            [Job(Completion(Kind.EXPERT, expert), expert_ns(tokens), COMPUTE) for expert, _, tokens in works]
        )

    def combine(self, tokens: int) -> None:
        """Once an event."""
        self._submit(Kind.COMBINE, self._combine_ns(tokens))

    def head(self, tokens: int) -> None:
        """Once a step."""
        self._submit(Kind.HEAD, self._head_ns(tokens))

    def next_completion(self) -> Completion:
        """Let simulated time pass until something has ended."""
        ended, env = self._ended, self.env
        try:
            while not ended:
                env.step()
        except simpy.core.EmptySchedule:
            raise nothing_under_way() from None
        return ended.popleft()

    def poll(self) -> Completion | None:
        """Return what ends at this instant; the clock stands still."""
        while not self._ended and self.env.peek() <= self.env.now:
            self.env.step()
        return self._ended.popleft() if self._ended else None

    def close(self) -> None:
        """Nothing is held."""

    def _submit(self, kind: Kind, duration: int, rank: int = COMPUTE) -> None:
        self._compute.submit((Job(Completion(kind), duration, rank),))


def play(run: Run, ended: Ended, observer: LoopObserver | None = None) -> None:
    """Run everything on a simulated machine; `ended` takes the log of each request when it ends."""
    device = SimpyDevice(run.timing, run.gpu.link)
    driver = Driver(run, device, observer=observer)
    rows: list[StepRow] = []
    evictions = driver.session.pump.evictions
    for row in driver.steps():
        rows.append(row)
        if driver.nobody_active:
            ended(RunLog.of_rows(rows, run.gpu.link.expert_bytes, evictions))
            rows.clear()
            evictions.clear()


def simulate(run: Run) -> RunLog:
    """Run everything and keep its log whole."""
    return whole(play, run)
