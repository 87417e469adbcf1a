"""The CPU device: one thread copies expert weights from the host store into slots, one multiplies with them.

Copies and matmuls release the interpreter's lock, so both run beside the driver. "GPU memory" is a pool of slots
allocated once; the link is memcpy. It exercises everything but the CUDA calls; its times are those of this machine.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Thread

import numpy as np
import torch

from replay.devices.store import HostStore
from replay.devices.waiting import WATCHDOG_S, stuck, timed
from replay.model.network import Network
from sim.loop.device import Completion, Device, Kind, Work, nothing_under_way

Item = tuple[Completion, Callable[[], None], Flag | None]
Outcomes = SimpleQueue[Completion | Exception]


TAIL_BYTES = 256 << 10
"""memcpy takes some 50 us for it, about what threads take to hand over."""


class CpuDevice(Device):
    """Threads and memcpy. With `verify`, each expert's bytes are compared with the store's when it computes."""

    tail_bytes = TAIL_BYTES
    watchdog_s = WATCHDOG_S

    def __init__(self, store: HostStore, network: Network, slots: int, verify: bool = False) -> None:
        self.store = store
        self._network = network
        self._verify = verify
        self.pool = np.empty((slots, store.stride), np.uint8)
        self.pool.fill(1)  # touch every page now
        self._weights = [network.weights(torch.from_numpy(slot)) for slot in self.pool]
        self._outcomes: Outcomes = SimpleQueue()
        self._link, self._compute = Stream("link", self._outcomes), Stream("compute", self._outcomes)
        self._copies: deque[Completion] = deque()  # under way
        self._computes: deque[Completion] = deque()
        self._landing: dict[int, Flag] = {}  # of each expert's latest copy: set when its last piece has ended
        self._stuck = False

    def now(self) -> int:
        """Wall clock."""
        return time.perf_counter_ns()

    @timed
    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        """memcpy on the link's thread."""
        target, source = self.pool[slot, first:last], self.store[expert][first:last]
        completion = Completion(Kind.COPY, expert)
        self._copies.append(completion)
        landed = Flag()
        if last == self.store.expert_bytes:
            self._landing[expert] = landed
        self._link.submit(completion, lambda: np.copyto(target, source), landed)

    @timed
    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        """The real shapes."""
        self._multiply(Completion(Kind.ROUTER), lambda: self._network.dense(layer, tokens, context))

    @timed
    def experts(self, works: Sequence[Work]) -> None:
        """One after another, each when it has landed."""
        for expert, slot, tokens in works:
            work = partial(self._expert, expert, slot, tokens, self._landing.get(expert))
            self._multiply(Completion(Kind.EXPERT, expert), work)

    @timed
    def combine(self, tokens: int) -> None:
        """Add up."""
        self._multiply(Completion(Kind.COMBINE), lambda: self._network.combine(tokens))

    @timed
    def head(self, tokens: int, requests: int = 1) -> None:
        """The vocabulary."""
        self._multiply(Completion(Kind.HEAD), lambda: self._network.head(tokens))

    @timed
    def next_completion(self) -> Completion:
        """Whichever thread is done first; what a thread raised is raised here."""
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
        """Return what a thread has done by now."""
        try:
            return self._ended(self._outcomes.get_nowait())
        except Empty:
            return None

    def _ended(self, outcome: Completion | Exception) -> Completion:
        if isinstance(outcome, Exception):
            raise outcome
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
        """End both threads, but for one that is stuck: nobody can end that, and it ends with the process."""
        self._link.close(wait=not self._stuck)
        self._compute.close(wait=not self._stuck)

    def _multiply(self, completion: Completion, work: Callable[[], None]) -> None:
        self._computes.append(completion)
        self._compute.submit(completion, work)

    def _expert(self, expert: int, slot: int, tokens: int, landed: Flag | None) -> None:
        """On the compute thread."""
        if landed:
            landed.wait()
        if self._verify:
            self._require(expert, slot)
        self._network.expert(self._weights[slot], tokens)
        if self._verify:
            self._require(expert, slot)

    def _require(self, expert: int, slot: int) -> None:
        if not self.store.holds(expert, self.pool[slot, : self.store.expert_bytes]):
            raise RuntimeError(f"slot {slot} computes as expert {expert}, but holds other bytes")


class Stream(Thread):
    """Work in the order of submission, one piece at a time."""

    def __init__(self, name: str, outcomes: Outcomes) -> None:
        super().__init__(name=name, daemon=True)
        self._work: SimpleQueue[Item | None] = SimpleQueue()
        self._outcomes = outcomes
        self.start()

    def submit(self, completion: Completion, work: Callable[[], None], flag: Flag | None = None) -> None:
        """Do `work`, then report `completion`, then set the flag, also where the work fails."""
        self._work.put((completion, work, flag))

    def close(self, wait: bool) -> None:
        """End once what was submitted is done."""
        self._work.put(None)
        if wait:
            self.join()

    def run(self) -> None:
        """The thread. OpenMP keeps a number of threads for each of ours, so what holds for the process is set anew."""
        torch.set_num_threads(torch.get_num_threads())
        with torch.inference_mode():
            while item := self._work.get():
                completion, work, flag = item
                try:
                    work()
                    self._outcomes.put(completion)
                except Exception as error:
                    self._outcomes.put(error)
                if flag:
                    flag.set()
