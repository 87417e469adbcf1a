"""Devices that compute on the CPU: `cpu`, whose link is memcpy, and `disk`, whose link reads a file of experts.

One thread multiplies, one or more lanes bring expert weights from the store into slots; a piece of a transfer is cut
into a part for each lane, and ends when all parts have. Matmuls, copies and reads release the interpreter's lock, so
all run beside the driver. The slots ("GPU memory") are allocated once.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Lock, Thread
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray

from replay.devices.expert_file import ExpertFile
from replay.devices.lanes import parts
from replay.devices.store import ExpertSource, HostStore, anonymous
from replay.devices.waiting import WATCHDOG_S, Pace, spread, stuck, timed
from replay.model.dense import Weights
from replay.model.network import Network, Operands
from sim.loop.device import Completion, Device, Kind, Work, nothing_under_way
from traces.errors import InputError

Outcome = Completion | Exception
Outcomes = SimpleQueue[Outcome]


TAIL_BYTES = 256 << 10
"""memcpy takes some 50 us for it, about what threads take to hand over; a disk takes longer."""


PACED, PACED_BYTES, MOST_PACED = 8, 200_000_000, 64
"""Experts that a pause reads, at least and at most, and their bytes between."""
SPARE_BYTES = 256 << 20
"""Of slots that pauses read into, or one."""


class LinkThreads(Device):
    """The link: lanes that bring experts from a store into slots. Who computes is another matter."""

    tail_bytes = TAIL_BYTES
    watchdog_s = WATCHDOG_S

    def __init__(self, store: ExpertSource, slots: int, lanes: int = 1) -> None:
        self.store = store
        self.pool = self._slots(slots)
        self._outcomes: Outcomes = SimpleQueue()
        self._on_ended: Callable[[Outcome], None] = self._outcomes.put  # of copies
        self._lanes = [Stream(f"lane {lane}") for lane in range(lanes)]
        self._copies: deque[Completion] = deque()  # under way
        self._computes: deque[Completion] = deque()
        self._landing: dict[int, Flag] = {}  # of each expert's latest copy: set when its last piece has ended
        self._paused_ns = 0
        self._stuck = False

    def _slots(self, slots: int) -> NDArray[np.uint8]:
        pool = anonymous(slots * self.store.stride).reshape(slots, self.store.stride)
        pool.fill(1)  # touch every page now
        return pool

    def now(self) -> int:
        """Return the wall clock without pauses, in ns."""
        return time.perf_counter_ns() - self._paused_ns

    def _took(self, streams: Sequence["Stream"], works: Sequence[Sequence[Callable[[], None]]], kind: Kind) -> int:
        """Give each stream its part of each piece of work; return the ns until all has ended. Raise what one raises."""
        began = time.perf_counter_ns()
        self._wait(self._begun(streams, works, kind), kind)
        return time.perf_counter_ns() - began

    @staticmethod
    def _begun(streams: Sequence["Stream"], works: Sequence[Sequence[Callable[[], None]]], kind: Kind) -> Outcomes:
        """Give each stream its part of each piece of work; return the queue that gets the end of all."""
        outcomes = Outcomes()
        report = Report(Completion(kind), outcomes.put, len(works) * len(streams))
        for work in works:
            for stream, part in zip(streams, work, strict=True):
                stream.submit(part, report)
        return outcomes

    def _wait(self, outcomes: Outcomes, kind: Kind) -> None:
        try:
            self._raised(outcomes.get(timeout=self.watchdog_s))
        except Empty:
            self._stuck = True
            raise stuck(self.watchdog_s, [Completion(kind)]) from None

    @timed
    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        completion = Completion(Kind.COPY, expert)
        self._copies.append(completion)
        report = Report(completion, self._on_ended, len(self._lanes))
        if last == self.store.bytes_of(expert):
            self._landing[expert] = report.ended
        for lane, part in zip(self._lanes, parts(first, last, len(self._lanes)), strict=True):
            lane.submit(partial(self.store.read, expert, *part, self.pool[slot]), report)

    @timed
    def next_completion(self) -> Completion:
        """Wait for the thread that is done first. Raise what a thread has raised."""
        if not (self._copies or self._computes):
            raise nothing_under_way()
        try:
            return self._ended(self._outcomes.get(timeout=self.watchdog_s))
        except Empty:
            self._stuck = True
            oldest = [pending[0] for pending in (self._copies, self._computes) if pending]
            raise stuck(self.watchdog_s, oldest) from None

    @timed
    def poll(self) -> Completion | None:
        try:
            return self._ended(self._outcomes.get_nowait())
        except Empty:
            return None

    @staticmethod
    def _raised(outcome: Outcome) -> Completion:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _ended(self, outcome: Outcome) -> Completion:
        outcome = self._raised(outcome)
        if outcome.kind is Kind.COPY:
            self._copies.popleft()
        else:
            self._computes.popleft()
        return outcome

    def discard_copies(self) -> None:
        """Let the chunks under way end, and forget them."""
        while self._copies:
            self.next_completion()

    def close(self) -> None:
        """End all threads, but for one that is stuck: it cannot be ended, and ends with the process."""
        for lane in self._lanes:
            lane.close(wait=not self._stuck)


class CpuDevice(LinkThreads):
    """Threads. With `verify`, each expert's bytes are compared with the store's when it computes."""

    def __init__(
        self, store: HostStore | ExpertFile, network: Network, slots: int, verify: bool = False, lanes: int = 1
    ) -> None:
        super().__init__(store, slots, lanes)
        self._holds = store.holds
        self._network = network
        self._verify = verify
        self._weights = Operands(network, torch.from_numpy(self.pool))
        self._compute = Stream("compute")
        self._spare = self.pool[:0]  # slots that pauses read into, and compute
        self._spare_weights: Iterator[Weights] = iter(())
        self._paced = 0  # experts read in pauses

    @timed
    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        self._multiply(Completion(Kind.ROUTER), lambda: self._network.dense(layer, tokens, context))

    @timed
    def experts(self, works: Sequence[Work]) -> None:
        for expert, slot, tokens in works:
            work = partial(self._expert, expert, slot, tokens, self._landing.get(expert))
            self._multiply(Completion(Kind.EXPERT, expert), work)

    @timed
    def combine(self, layer: int, tokens: int, context: int) -> None:
        runs = self._network.profile.runs(layer, tokens, context)
        self._multiply(Completion(Kind.COMBINE), lambda: self._network.combine(tokens) if runs else None)

    @timed
    def head(self, tokens: int, requests: int = 1) -> None:
        self._multiply(Completion(Kind.HEAD), lambda: self._network.head(tokens))

    @timed
    def pace(self) -> Pace:
        """Stop the clock once all has ended; read some experts into slots of their own, and compute earlier ones.

        Both at once, as in a run: a machine that others keep busy is slower at both than at either.
        """
        streams, began = [*self._lanes, self._compute], time.perf_counter_ns()
        self._took(streams, [[nothing] * len(streams)], Kind.COPY)
        try:
            if not len(self._spare):
                slots = min(max(1, SPARE_BYTES // self.store.stride), MOST_PACED)
                self._spare = self._slots(slots)
                spare = Operands(self._network, torch.from_numpy(self._spare))
                self._spare_weights = (spare[slot] for slot in cycle(range(slots)))
                self._took(self._lanes, self._reads(slots)[0], Kind.COPY)
                self._pace()  # the first one is slower
            return self._pace()
        finally:
            self._paused_ns += time.perf_counter_ns() - began

    def _pace(self) -> Pace:
        count = min(max(PACED, PACED_BYTES // self.store.stride), MOST_PACED)
        all_read, compute_ns = Flag(), list[float]()

        def compute() -> None:
            """Compute one after another until all is read, and PACED at least."""
            began, computed = time.perf_counter_ns(), 0
            while computed < PACED or not all_read.is_set():
                self._network.expert(next(self._spare_weights), 1)
                computed += 1
            compute_ns.append((time.perf_counter_ns() - began) / computed)
            self._network.forget()

        reads, experts = self._reads(count)
        computing = self._begun([self._compute], [[compute]], Kind.EXPERT)
        try:
            read_ns = self._took(self._lanes, reads, Kind.COPY)
        finally:
            all_read.set()
        self._wait(computing, Kind.EXPERT)
        return Pace(read_ns / experts, compute_ns[0])

    def _reads(self, count: int) -> tuple[list[list[Callable[[], None]]], float]:
        """Return reads of so many experts into the slots of pauses, and how many of the largest they come to."""
        store, spare, works, read_bytes = self.store, self._spare, list[list[Callable[[], None]]](), 0
        for turn in range(self._paced, self._paced + count):
            expert, slot = spread(turn, store.distinct), spare[turn % len(spare)]
            size = store.bytes_of(expert)
            works.append([partial(store.read, expert, *part, slot) for part in parts(0, size, len(self._lanes))])
            read_bytes += size
        self._paced += count
        return works, read_bytes / store.expert_bytes

    def close(self) -> None:
        super().close()
        self._compute.close(wait=not self._stuck)

    def _multiply(self, completion: Completion, work: Callable[[], None]) -> None:
        self._computes.append(completion)
        self._compute.submit(work, Report(completion, self._outcomes.put))

    def _expert(self, expert: int, slot: int, tokens: int, landed: Flag | None) -> None:
        if landed:
            landed.wait()
        if self._verify:
            self._require(expert, slot)
        self._network.expert(self._weights[slot], tokens)
        if self._verify:
            self._require(expert, slot)

    def _require(self, expert: int, slot: int) -> None:
        if not self._holds(expert, self.pool[slot, : self.store.bytes_of(expert)]):
            raise InputError(f"slot {slot} computes as expert {expert}, but holds other bytes: damaged, or replaced")


def nothing() -> None:
    pass


class Report:
    """Reports once all parts of a piece of work have ended: its completion, or what a part raised."""

    def __init__(self, completion: Completion, on_ended: Callable[[Outcome], None], parts: int = 1) -> None:
        self.ended = Flag()
        self._completion, self._on_ended, self._left = completion, on_ended, parts
        self._error: Exception | None = None
        self._lock = Lock()

    def part_ended(self, error: Exception | None = None) -> None:
        """Count a part as ended, on its thread, before that begins another: pieces end in order of submission."""
        with self._lock:
            self._error = self._error or error
            self._left -= 1
            if self._left:
                return
        self._on_ended(self._error or self._completion)
        self.ended.set()


Submitted = tuple[Callable[[], None], Report] | None
"""Work, and what hears of its end; None ends the thread."""


class Stream:
    """Work in the order of submission, one piece at a time, on a thread that ends with this object at the latest."""

    def __init__(self, name: str) -> None:
        self._work = SimpleQueue[Submitted]()
        self._thread = Thread(target=_run_all, args=(self._work,), name=name, daemon=True)
        self._thread.start()
        self._end = finalize(self, self._work.put, None)

    def submit(self, work: Callable[[], None], report: Report) -> None:
        self._work.put((work, report))

    def close(self, wait: bool) -> None:
        self._end()
        if wait:
            self._thread.join()


def _run_all(works: SimpleQueue[Submitted]) -> None:
    """Run a stream's thread. OpenMP keeps a number of threads for each of ours, so that of the process is set again."""
    torch.set_num_threads(torch.get_num_threads())
    with torch.inference_mode():
        while _run_next(works.get()):
            pass  # nothing of the last work is kept, which would keep the device


def _run_next(submitted: Submitted) -> bool:
    if submitted is None:
        return False
    work, report = submitted
    try:
        work()
        report.part_ended()
    except Exception as error:
        report.part_ended(error)
    return True
