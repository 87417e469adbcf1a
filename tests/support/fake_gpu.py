"""A GPU that is not there: streams that run their work later, in any order which their events allow.

Work is done when somebody looks (an event's query, a synchronise), on a stream drawn at random among those whose first
item is not waiting: a wait that is missing shows as wrong bytes. What was asked of the driver is counted.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch

from replay.devices.gpu import Event, Gpu, Stream, Task


class FakeEvent:
    """Ended as long as it was not recorded; a later record does not move waits that are already in a stream."""

    def __init__(self, gpu: "FakeGpu") -> None:
        self._gpu = gpu
        self.mark = [True]

    def query(self) -> bool:
        self._gpu.counts["query"] += 1
        if not self.mark[0]:
            self._gpu.progress()
        return self.mark[0]


class FakeStream(Stream):
    def __init__(self, gpu: "FakeGpu") -> None:
        self._gpu = gpu
        self.runs = 0
        self.items: deque[tuple[Task | None, list[bool]]] = deque()  # work, or a mark to wait for

    def run(self, task: Task) -> None:
        self.runs += 1
        self._gpu.counts["run"] += 1
        self.items.append((task, [True]))

    def record(self, event: FakeEvent) -> None:
        self._gpu.counts["record"] += 1
        mark = event.mark = [False]
        self.items.append((lambda: mark.__setitem__(0, True), [True]))

    def wait(self, event: FakeEvent) -> None:
        self._gpu.counts["wait"] += 1
        self.items.append((None, event.mark))

    def synchronize(self) -> None:
        self._gpu.counts["synchronize"] += 1
        while self.items:
            self._gpu.progress()


class FakeGpu(Gpu):
    """On the CPU. `refuse`: the slab at which pinning fails; `halt`: nothing ends any more after so many tasks."""

    device = torch.device("cpu")
    name = "a GPU that is not there"

    def __init__(self, seed: int, refuse: int | None = None, halt: int | None = None) -> None:
        self._random = random.Random(seed)
        self._streams: list[FakeStream] = []
        self._refuse, self._halt = refuse, halt
        self.counts: Counter[str] = Counter()
        self.registered: list[int] = []

    def compute_stream(self) -> Stream:
        return self._stream()

    def copy_stream(self) -> Stream:
        return self._stream()

    def current_stream(self) -> Stream:
        return self._stream()

    def total_bytes(self) -> int:
        return 2 << 30

    def peak_bytes(self) -> int:
        return 1 << 20

    def release(self) -> None:
        self.counts["release"] += 1

    def _stream(self) -> FakeStream:
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def event(self) -> Event:
        self.counts["event"] += 1
        return FakeEvent(self)

    def capture(self, tasks: list[Task]) -> list[Task]:
        self.counts["capture"] += len(tasks)

        def graph(task: Callable[[], object]) -> Task:
            task()
            return lambda: (self.counts.update(["replay"]), task())

        return [graph(task) for task in tasks]

    def register(self, memory: Any) -> int:
        if self._refuse == len(self.registered):
            return 2
        self.registered.append(memory.ctypes.data)
        return 0

    def unregister(self, memory: Any) -> None:
        self.registered.remove(memory.ctypes.data)

    def mapped(self, memory: Any) -> torch.Tensor:
        return torch.from_numpy(memory)

    def free_bytes(self) -> int:
        return 1 << 30

    def synchronize(self) -> None:
        self.counts["synchronize"] += 1
        while any(stream.items for stream in self._streams):
            self.progress()

    def progress(self) -> None:
        """One item of a stream that can continue."""
        able = [stream for stream in self._streams if stream.items and stream.items[0][1][0]]
        if not able or self._halt == 0:
            return
        task, _ = self._random.choice(able).items.popleft()
        if task:
            if self._halt:
                self._halt -= 1
            task()
