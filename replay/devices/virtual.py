"""The virtual device: a logical clock in place of hardware. It owns rule 15 for replay.

Both streams are serial, so at most two things can end next, a piece and the compute stream's first item: of one
instant, the piece comes first. Runs on it equal those of the simulator in every step and counter.
"""

from collections import deque
from collections.abc import Sequence

from replay.devices.device import Completion, Device, Kind, Work, nothing_under_way
from sim.profiles.timing import Link, Timing


class VirtualDevice(Device):
    """Durations from a `Timing` and a `Link`; nothing is moved and nothing computed."""

    def __init__(self, timing: Timing, link: Link) -> None:
        self._timing = timing
        self._link = link
        self._now = 0
        self._compute: deque[tuple[Completion, int]] = deque()  # with durations; only the first one runs
        self._compute_end: int | None = None  # None: nothing runs, the first one waits for the piece on the link
        self._copy: Completion | None = None
        self._copy_end = 0
        self.predictor_takes_time = timing.predictor_ns > 0

    def now(self) -> int:
        """Logical ns."""
        return self._now

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        """Rule 12: a chunk takes the difference of what its transfer has used."""
        assert self._copy is None
        self._copy = Completion(Kind.COPY, expert)
        self._copy_end = self._now + self._link.used_ns(last) - self._link.used_ns(first)

    def dense(self, layer: int, tokens: int, context: int) -> None:
        """Its duration from the timing."""
        self._submit(Completion(Kind.ROUTER), self._timing.dense_ns(layer, tokens, context))

    def predict(self) -> bool:
        """Rule 14: a constant time of the compute stream."""
        if self.predictor_takes_time:
            self._submit(Completion(Kind.PREDICTOR), self._timing.predictor_ns)
        return self.predictor_takes_time

    def experts(self, works: Sequence[Work]) -> None:
        """One after another, each with its duration from the timing."""
        for expert, _, tokens in works:
            self._submit(Completion(Kind.EXPERT, expert), self._timing.expert_ns(tokens))

    def combine(self, tokens: int) -> None:
        """Its duration from the timing."""
        self._submit(Completion(Kind.COMBINE), self._timing.combine_ns(tokens))

    def head(self, tokens: int) -> None:
        """Its duration from the timing."""
        self._submit(Completion(Kind.HEAD), self._timing.head_ns(tokens))

    def next_completion(self) -> Completion:
        """Advance the clock to the earlier of piece and compute."""
        if self._copy and (self._compute_end is None or self._copy_end <= self._compute_end):
            ended, self._copy, self._now = self._copy, None, self._copy_end
            if self._compute_end is None:
                self._begin()
            return ended
        if self._compute_end is None:
            raise nothing_under_way()
        ended, _ = self._compute.popleft()
        self._now, self._compute_end = self._compute_end, None
        self._begin()
        return ended

    def discard_copies(self) -> None:
        """Takes no time (rule 10)."""
        self._copy = None

    def close(self) -> None:
        """Nothing is held."""

    def _submit(self, work: Completion, duration: int) -> None:
        self._compute.append((work, duration))
        if len(self._compute) == 1:
            self._begin()

    def _begin(self) -> None:
        """The first of the queue starts now, unless it is an expert that is still on the link."""
        if self._compute:
            work, duration = self._compute[0]
            if work.kind is not Kind.EXPERT or self._copy != Completion(Kind.COPY, work.expert):
                self._compute_end = self._now + duration
