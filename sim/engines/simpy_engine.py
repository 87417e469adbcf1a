"""The SimPy engine: the loop on a simulated machine of GPU memory, host link, compute, host and disk. Rules 11, 12, 15.

What happens at one nanosecond happens in the order of rule 15: link, disk, compute, host, routers, arrivals. Every
decision is the loop's (`sim.loop`); this file is only time.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from heapq import heappop, heappush

import simpy

from sim.loop.device import ALL, ROUTERS, Completion, Device, Kind, Work, code_of, nothing_under_way
from sim.loop.driver import Driver
from sim.loop.log import Ended, RunLog, StepRow, whole
from sim.loop.observer import LoopObserver
from sim.loop.run import Run
from sim.profiles.timing import Link, Timing

LINK, DISK, COMPUTE, HOST, ROUTER, WAKE = range(2, 8)
"""Rule 15: ranks of ends within one nanosecond. SimPy's own priorities are 0 and 1."""

COPY, EXPERT = Kind.COPY.value, Kind.EXPERT.value
ROUTER_ENDED, COMBINED = code_of(Kind.ROUTER), code_of(Kind.COMBINE)
PREDICTED, HEAD_ENDED = code_of(Kind.PREDICTOR), code_of(Kind.HEAD)
ALIKE = 2**62  # experts of a layer, so that all are of layer 0
UNANSWERED = COPY, EXPERT, Kind.COMBINE.value
MOST_ROWS = 10_000  # of a part of a log, where somebody is always active


class Nanoseconds(simpy.Environment):
    """An environment whose clock is whole nanoseconds, since every delay is."""

    _now: int


class End(simpy.Event):
    """The end of work, which does not fail and carries no value. It may happen again after it has happened."""

    callbacks: list[Callable[["End"], None]]  # of one that is to happen
    rank = code = 0

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self._ok, self._value = True, None


class SimpyDevice(Device):
    """A machine with one GPU and one host link, whose times are those of `timing`, `link` and `disk`.

    experts: of a layer; None: they are alike in all layers. When work will end is known once it is submitted: it waits
    for the work before it in its stream and, an expert's compute, for the expert's last piece. SimPy hears of the ends
    that the loop answers. Others, of the compute stream alone, are reported with the next of these, unless each is
    wanted at its time: then SimPy hears of the next one as well.
    """

    stands_still = True

    def __init__(self, timing: Timing, link: Link, experts: int | None = None, disk: Link | None = None) -> None:
        self.env = Nanoseconds(initial_time=0)
        self._timing, self._disk = timing, disk
        self._experts = experts or ALIKE
        self._expert_ns, self._used_ns, self._head_ns = (
            cache(timing.expert_ns),
            cache(link.used_ns),
            cache(timing.head_ns),
        )
        self.predicts = self.predictor_takes_time = timing.predictor_ns > 0
        self.hop_takes_time = timing.hop_ns > 0
        self._computing: list[int] = []  # under way: what, and when it ends, in turn
        self._copies: deque[End] = deque()
        self._reading: End | None = None
        self._free_at = self._link_free_at = 0  # compute stream and link
        self._arrives_at: dict[int, int] = {}  # by expert: its latest piece, if that is under way
        self._ended: list[int] = []  # not reported: what, and when it ended, in turn
        self._spare: list[End] = []
        self._answers = ALL
        self._next: End | None = None  # of the compute that comes next, where SimPy hears of it for that
        self._draft_ns = 0  # before the dense part that comes next

    @classmethod
    def of(cls, run: Run) -> "SimpyDevice":
        """Return the machine on which a run is simulated."""
        return cls(run.timing, run.gpu.link, run.shape.experts, run.host.link if run.host else None)

    def now(self) -> int:
        return self.env._now

    def _at(self, ends: int, rank: int, code: int, happened: Callable[[End], None]) -> End:
        """Have SimPy hear of work's end; of those of one instant the one of the lower rank comes first."""
        end, env = self._spare.pop() if self._spare else End(self.env), self.env
        end.rank, end.code, end.callbacks = rank, code, [happened]
        # As env.schedule, which costs as much again; priorities above NORMAL, as SimPy's heap allows.
        heappush(env._queue, (ends, rank, next(env._eid), end))  # type: ignore[misc]
        return end

    # The link

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        """Rule 12: a chunk takes the difference of what its transfer has used."""
        now, free_at = self.env._now, self._link_free_at
        ends = (free_at if free_at > now else now) + self._used_ns(last) - self._used_ns(first)
        self._link_free_at = self._arrives_at[expert] = ends
        self._copies.append(self._at(ends, LINK, expert << 4 | COPY, self._copied))

    def discard_copies(self) -> None:
        """Takes no time (rule 10)."""
        for copy in self._copies:
            copy.callbacks = []
        self._copies.clear()
        self._arrives_at.clear()
        self._link_free_at = 0

    # The compute stream

    def _compute(self, ns: int, code: int) -> int:
        """Begin when all before has ended; return when that will have ended."""
        now, free_at = self.env._now, self._free_at
        self._free_at = ends = (free_at if free_at > now else now) + ns
        self._computing += code, ends
        return ends

    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        """Rule 11: the router comes last within its nanosecond."""
        ns, self._draft_ns = self._draft_ns + self._timing.dense_ns(layer, tokens, context, requests), 0
        self._at(self._compute(ns, ROUTER_ENDED), ROUTER, ROUTER_ENDED, self._computed)

    def predict(self) -> bool:
        """Rule 14: a constant time of the compute stream."""
        if self.predicts:
            self._at(self._compute(self._timing.predictor_ns, PREDICTED), COMPUTE, PREDICTED, self._computed)
        return self.predicts

    def experts(self, works: Sequence[Work]) -> None:
        """An expert whose last piece is on the link holds back all that is behind it. All are of one layer."""
        at, now, arrives_at, computing = self._free_at, self.env._now, self._arrives_at, self._computing
        at, known, ns = at if at > now else now, -1, 0
        for expert, _, tokens in works:
            if expert in arrives_at:
                at = max(at, arrives_at[expert])
            if tokens != known:
                known, ns = tokens, self._expert_ns(tokens, expert // self._experts)
            at += ns
            computing += expert << 4 | EXPERT, at
        self._free_at = at

    def combine(self, layer: int, tokens: int, context: int) -> None:
        self._compute(self._timing.combine_ns(tokens, layer, context), COMBINED)

    def head(self, tokens: int, requests: int = 1) -> None:
        self._at(self._compute(self._head_ns(tokens, requests), HEAD_ENDED), COMPUTE, HEAD_ENDED, self._computed)

    def draft(self, ns: int) -> None:
        """Rule 20."""
        self._draft_ns = ns

    # Host, disk, and the clock of an idle run

    def hop(self) -> None:
        """Rule 13."""
        self._at(self.env._now + self._timing.hop_ns, HOST, code_of(Kind.HOP), self._happened)

    def host(self, expert: int, tokens: int) -> None:
        """Rule 13."""
        ends = self.env._now + self._timing.host_ns(tokens, expert // self._experts)
        self._at(ends, HOST, code_of(Kind.HOST, expert), self._happened)

    def read(self, expert: int) -> None:
        """Rule 17."""
        assert self._disk
        ends = self.env._now + self._disk.used_ns(self._disk.bytes_of(expert // self._experts))
        self._reading = self._at(ends, DISK, code_of(Kind.READ, expert), self._read)

    def discard_reads(self) -> None:
        """Takes no time (rule 10)."""
        if self._reading:
            self._reading.callbacks = []
            self._reading = None

    def wake_at(self, ns: int) -> None:
        """Rule 18."""
        self._at(ns, WAKE, code_of(Kind.WAKE), self._happened)

    # Completions

    def _computed(self, event: End) -> None:
        """A compute has ended, with those before it."""
        computing, code = self._computing, event.code
        if code & 15 in UNANSWERED:
            self._end(2 * (event is self._next))  # else it was reported before
        elif self._answers == ALL:
            if computing[0] != code:
                self._at(self.env._now, event.rank, code, self._computed)  # behind one that ends at the same time
            self._end(2)
        else:  # one of a kind is under way
            self._end(len(computing) if computing[-2] == code else computing.index(code) + 2)
        self._spare.append(event)

    def _copied(self, event: End) -> None:
        self._copies.popleft()
        if self._arrives_at[event.code >> 4] == self.env._now:
            del self._arrives_at[event.code >> 4]
        self._happened(event)

    def _read(self, event: End) -> None:
        self._reading = None
        self._happened(event)

    def _happened(self, event: End) -> None:
        """Work of another stream has ended, and computes before it."""
        now, computing = self.env._now, self._computing
        until, count = now + (event.rank > COMPUTE), len(computing)
        while count and (computing[count - 1] >= until or computing[count - 2] == ROUTER_ENDED):
            count -= 2
        if event.rank == LINK and self._answers == ROUTERS and computing:
            computing[count:count] = event.code, now
        else:
            self._end(count)
            self._ended += event.code, now
        self._spare.append(event)

    def _end(self, count: int) -> None:
        """Report the first computes; count: of numbers."""
        if count == len(self._computing):
            self._ended, self._computing, self._next = self._computing, [], None
        elif count:
            self._ended, self._computing, self._next = self._computing[:count], self._computing[count:], None

    def completions(self, answers: int) -> Sequence[int]:
        """Let simulated time pass until something has ended."""
        self._answers, env, queue = answers, self.env, self.env._queue
        while not self._ended:  # env.step(), without a call for each event
            if answers == ALL or not queue:
                self._hear()
                if not queue:
                    raise nothing_under_way()
            env._now, _, _, event = heappop(queue)  # type: ignore[assignment]  # whole, as all delays
            for callback in event.callbacks:
                callback(event)
        ended, self._ended = self._ended, []
        return ended

    def _hear(self) -> None:
        """Have SimPy hear of the compute that comes next."""
        computing = self._computing
        if self._next is None and computing and computing[0] & 15 in UNANSWERED:
            self._next = self._at(computing[1], COMPUTE, computing[0], self._computed)

    def next_completion(self) -> Completion:
        code = SimpyDevice.completions(self, ALL)[0]
        return Completion(Kind(code & 15), code >> 4)

    def poll(self) -> Completion | None:
        """Return what ends at this instant; the clock stands still."""
        self._answers = ALL
        self._hear()
        while not self._ended and self.env.peek() <= self.env._now:
            self.env.step()
        return self.next_completion() if self._ended else None

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
