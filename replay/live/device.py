"""The devices of a live model: lanes bring experts into slots, and the model's own thread is the compute stream.

What the session submits to the compute stream is kept in `works` until that thread takes it. It computes dense parts,
sums and heads by itself, in the order in which its forward pass comes to them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from threading import local
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replay.devices.cpu import LinkThreads, Outcome, Stream, nothing
from replay.devices.gpu import Gpu, pinned
from replay.devices.lanes import TRIED
from replay.devices.store import ExpertSource, HostMemory, HostStore, anonymous, require_memory, stride_of
from replay.devices.waiting import stuck
from replay.live.layout import ExpertLayer, places_of
from replay.live.memory import peak_bytes
from sim.loop.device import Completion, Kind, Work
from traces.errors import InputError


class LiveDevice(LinkThreads):
    """A link from a disk to host memory, and what the model's thread is to compute."""

    name = "disk"
    gpu: Gpu | None = None

    def __init__(self, store: ExpertSource, slots: int, lanes: int = 1) -> None:
        super().__init__(store, slots, lanes)
        self.works: deque[Sequence[Work]] = deque()
        """Submitted and not taken; whatever was given together may be computed together."""

    def read_with(self, lanes: int) -> None:
        """Read with so many lanes from now on; nothing is under way."""
        for lane in self._lanes:
            lane.close(wait=True)
        self._lanes = [Stream(f"lane {lane}") for lane in range(lanes)]

    def listen(self, on_ended: Callable[[Outcome], None] | None) -> None:
        """Call `on_ended` with the end of each copy, before its expert counts as landed, on the thread of its lane.

        None: wait to be asked. Called while nothing is under way.
        """
        self._on_ended = on_ended or self._outcomes.put

    @property
    def slots(self) -> Tensor:
        return torch.as_tensor(self.pool)  # of a GPU it is one

    def finish(self) -> None:
        """Wait until what this thread has submitted is computed: only then may a slot be written again."""

    def peak_bytes(self) -> int:
        """Return the most that was ever taken of the memory which slots are in."""
        return peak_bytes()

    def dense(self, *_: int, **__: int) -> None:
        """The model's own thread computes it, as sums and heads."""

    combine = head = dense

    def experts(self, works: Sequence[Work]) -> None:
        """Whatever is landing is waited for, and so taken by itself."""
        landing = [work for work in works if (flag := self._landing.get(work[0])) and not flag.is_set()]
        here = [work for work in works if work not in landing]
        self.works.extend(group for group in (here, landing) if group)

    def settle(self) -> None:
        """Return when nothing is under way, whatever has become of it. Raise InputError where that never comes."""
        if self._stuck:
            raise self.stuck()
        try:
            self._took(self._lanes, [[nothing] * len(self._lanes)], Kind.COPY)
        except InputError:
            raise self.stuck() from None
        self._copies.clear()
        while not self._outcomes.empty():
            self._outcomes.get()

    def copied(self) -> None:
        self._copies.popleft()

    def await_landing(self, expert: int) -> bool:
        """Wait for an expert's last piece; return whether that was still under way."""
        landing = self._landing.get(expert)
        if landing is None or landing.is_set():
            return False
        if not landing.wait(2 * self.watchdog_s):
            raise self.stuck()
        return True

    def forget(self) -> None:
        self.works.clear()
        self._landing.clear()

    def stuck(self) -> Exception:
        """Return what is to be raised where something never ends: this device cannot be used again."""
        self._stuck = True
        return stuck(2 * self.watchdog_s, [self._copies[0] if self._copies else Completion(Kind.EXPERT)])


class HostExperts(ExpertSource):
    """An `ExpertSource` of slots in a GPU's memory. Rows lie in an expert as `Row.begin` says."""

    def __init__(self, host: HostStore, gpu: Gpu) -> None:
        self._host, self._link = host, gpu.copy_stream()
        self.expert_bytes, self.stride, self.distinct = host.expert_bytes, host.stride, host.distinct

    def read(self, expert: int, first: int, last: int, slot: Any) -> None:
        """Copy these bytes to the same place in a slot, a tensor uint8[stride]; return when they have arrived."""
        bytes_ = torch.from_numpy(self._host[expert][first:last])
        self._link.run(lambda: slot[first:last].copy_(bytes_, non_blocking=True))
        self._link.synchronize()


class LiveGpu(LiveDevice):
    """A link from host memory to a GPU's. One lane waits for one copy after another."""

    name = "cuda"
    gpu: Gpu

    def __init__(self, store: HostExperts, slots: int, gpu: Gpu) -> None:
        self.gpu = gpu
        super().__init__(store, slots)

    def _slots(self, slots: int) -> Any:
        return torch.zeros(slots, self.store.stride, dtype=torch.uint8, device=self.gpu.device)

    def finish(self) -> None:
        self.gpu.current_stream().synchronize()

    def stuck(self) -> Exception:
        """Return what is to be raised; what the GPU may still read is not given back."""
        self.gpu.is_stuck = True
        return super().stuck()

    def peak_bytes(self) -> int:
        return self.gpu.peak_bytes()


@contextmanager
def host_experts(
    source: ExpertSource,
    layers: Sequence[ExpertLayer],
    gpu: Gpu,
    progress: Callable[[int], AbstractContextManager[Callable[[int], None]]],
) -> Iterator[HostExperts]:
    """Read all experts into host memory, pinned where the driver allows it. Raise InputError where it has no room."""
    total, stride = source.distinct, stride_of(source.expert_bytes)
    require_memory(total * stride, f"{total} experts in host memory", "use --device disk")
    memory = HostMemory(total, stride, seed=None)
    host, own, places = HostStore(memory, total, source.expert_bytes), local(), places_of(source, layers)

    def fetch(expert: int) -> None:
        if not hasattr(own, "slot"):
            own.slot = anonymous(source.stride)
        source.read(expert, 0, source.expert_bytes, own.slot)
        for row, place in zip(layers[expert // layers[0].experts].stored, places(expert), strict=True):
            np.copyto(host[expert][row.begin : row.begin + row.nbytes], own.slot[place : place + row.nbytes])

    with progress(total) as advance, ThreadPoolExecutor(max(TRIED)) as threads:
        for _ in threads.map(fetch, range(total)):
            advance(1)
    with pinned(memory, gpu):
        yield HostExperts(host, gpu)
