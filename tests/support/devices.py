"""Devices for tests: one that checks every rule of the interface, and one whose streams end in any order."""

import random
from collections import deque
from collections.abc import Sequence
from typing import cast

from policies.core.policy import Requests, Shape
from policies.core.residency_compiled import places_of
from policies.core.spec import PolicySpec
from sim.loop.device import Completion, Device, Kind, Work
from sim.loop.run import Run, gpu_run
from sim.profiles.timing import FixedTiming, Link


class Watch:
    """What slots hold and what uses them, checked at every submission and completion."""

    def __init__(
        self,
        shape: Shape,
        slots: int,
        expert_bytes: int,
        tail_bytes: int = 0,
        layer_bytes: tuple[int, ...] | None = None,
    ) -> None:
        self.shape, self.slots = shape, slots
        self.layer_bytes = layer_bytes or (expert_bytes,) * shape.layers
        self.tail_bytes = tail_bytes
        self.moved = [0] * shape.layers  # bytes that were submitted
        self.content: dict[int, tuple[int, int]] = {}  # slot -> (expert, bytes that have arrived)
        self.submitted: dict[int, tuple[int, int]] = {}  # slot -> (expert, bytes that were submitted)
        self.copies: deque[tuple[int, int, int, int]] = deque()  # expert, slot, first byte, the one behind the last
        self.computing: deque[tuple[int, int]] = deque()  # expert, slot
        self.layer = -1  # the last one whose router has ended
        self.computed = 0

    @classmethod
    def of(cls, run: Run, tail_bytes: int = 0) -> "Watch":
        """Of a device with as many slots as the run needs."""
        link, total = run.gpu.link, run.shape.total
        sizes = link.sizes(run.shape.experts)
        slots = places_of(total, run.policy.divide(run.shape, run.gpu.slots, sizes), sizes).sum()
        return cls(run.shape, int(slots), link.expert_bytes, tail_bytes, link.layer_bytes)

    def size(self, expert: int) -> int:
        return self.layer_bytes[expert // self.shape.experts]

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        assert 0 <= slot < self.slots
        assert 0 <= first < last <= self.size(expert)
        self.moved[expert // self.shape.experts] += last - first
        assert slot not in [used for _, used in self.computing], "overwrites a slot that computes"
        if first:
            assert self.submitted[slot] == (expert, first), "continues where another transfer was"
        else:
            assert slot not in [target for _, target, _, _ in self.copies], "overwrites a slot that is loading"
            self.content[slot] = expert, 0
        self.submitted[slot] = expert, last
        assert self.tail_bytes or not self.copies
        self.copies.append((expert, slot, first, last))

    def expert(self, expert: int, slot: int) -> None:
        assert self.submitted[slot] == (expert, self.size(expert)), "computes what is not on its way"
        assert expert // self.shape.experts == self.layer, "computes a layer whose router has not ended"
        self.computing.append((expert, slot))

    def dense(self, layer: int) -> None:
        assert layer == (self.layer + 1) % self.shape.layers

    def ended(self, completion: Completion) -> None:
        if completion.kind is Kind.COPY:
            expert, slot, _, last = self.copies.popleft()
            assert expert == completion.expert
            self.content[slot] = expert, last
        elif completion.kind is Kind.EXPERT:
            expert, slot = self.computing.popleft()
            assert expert == completion.expert
            assert self.content[slot] == (expert, self.size(expert)), "computed what has not arrived"
            self.computed += 1
        elif completion.kind is Kind.ROUTER:
            self.layer = (self.layer + 1) % self.shape.layers

    def discarded(self) -> None:
        assert not self.computing
        self.copies.clear()


class Watching(Device):
    """In front of a real device: tells `watch` of every submission and completion."""

    watch: Watch

    @property
    def _real(self) -> Device:
        """The device behind this class, as its own methods see it."""
        return cast(Device, super())

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        self.watch.copy(expert, slot, first, last)
        self._real.copy(expert, slot, first, last)

    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        self.watch.dense(layer)
        self._real.dense(layer, tokens, context, requests)

    def experts(self, works: Sequence[Work]) -> None:
        for expert, slot, _ in works:
            self.watch.expert(expert, slot)
        self._real.experts(works)

    def next_completion(self) -> Completion:
        completion = self._real.next_completion()
        self.watch.ended(completion)
        return completion

    def discard_copies(self) -> None:
        """A device that waits for what flies reports it first."""
        self._real.discard_copies()
        self.watch.discarded()


class AnyOrder(Device):
    """Each completion is drawn from one of the two streams, unless compute waits for a copy; time passes at random."""

    def __init__(self, watch: Watch, seed: int) -> None:
        self.watch = watch
        self.tail_bytes = watch.tail_bytes
        self.predictor_takes_time, self.predicts = seed % 2 == 0, True
        self._random = random.Random(seed)
        self._link: deque[Completion] = deque()
        self._compute: deque[Completion] = deque()
        self.now_ns = 0
        self.behind_a_copy: list[int] = []  # pieces in flight when one ends
        self.computes_first = False  # where either stream could end something

    def now(self) -> int:
        self.now_ns += self._random.randint(0, 3)
        return self.now_ns

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        self.watch.copy(expert, slot, first, last)
        self._link.append(Completion(Kind.COPY, expert))

    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        self.watch.dense(layer)
        self._compute.append(Completion(Kind.ROUTER))

    def predict(self) -> bool:
        if self._random.random() < 0.5:
            return False
        self._compute.append(Completion(Kind.PREDICTOR))
        return True

    def experts(self, works: Sequence[Work]) -> None:
        for expert, slot, _ in works:
            self.watch.expert(expert, slot)
            self._compute.append(Completion(Kind.EXPERT, expert))

    def combine(self, layer: int, tokens: int, context: int) -> None:
        self._compute.append(Completion(Kind.COMBINE))

    def head(self, tokens: int, requests: int = 1) -> None:
        self._compute.append(Completion(Kind.HEAD))

    def next_completion(self) -> Completion:
        streams = [self._link] if self._link else []
        if self._compute and self._compute[0].expert not in [copy.expert for copy in self._link]:
            streams.append(self._compute)
        stream = streams[-1] if self.computes_first else self._random.choice(streams)
        completion = stream.popleft()
        if completion.kind is Kind.COPY:
            self.behind_a_copy.append(len(self._link))
        self.watch.ended(completion)
        return completion

    def poll(self) -> Completion | None:
        return self.next_completion() if (self._link or self._compute) and self._random.random() < 0.5 else None

    def discard_copies(self) -> None:
        self.watch.discarded()
        self._link.clear()

    def close(self) -> None:
        pass


def run_of(
    requests: Requests,
    shape: Shape,
    slots: int,
    policy: PolicySpec,
    expert_bytes: int,
    chunk_bytes: int | None = None,
    cold: bool = False,
    experts_per_layer: float | None = None,
) -> Run:
    """A run for devices that take their own times."""
    timing, link = FixedTiming(0, 0, 0, 0, 0), Link(0, 1, 1, expert_bytes, chunk_bytes)
    return gpu_run(requests, shape, slots, policy, timing, link, cold, experts_per_layer)
