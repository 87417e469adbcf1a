"""What others do with experts that do not fit, in the same harness: known schedules and data paths.

A fixed order of transfers stands in place of policies and residency: where an expert lies follows from the trace
alone. A data path is a device that moves bytes as others do.

    resident       all experts on the GPU: no transfer
    on-demand      nothing is kept beyond its event
    layer-stream   all experts of a layer, and those of the next layer behind them (accelerate, DeepSpeed)
    zero-copy      kernels read the experts from host memory (vLLM's offload by unified addresses)
    sync-per-copy  a policy's transfers, each followed by a synchronise (MoE-Infinity's public code)
    lru-swap       LRU, what a slot held copied back to the host first (mixtral-offloading)
    page cache     the file of experts is mapped, and the operating system decides what stays (llama.cpp)
"""

import mmap
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.checks.limits import page_cache_of
from policies.core.policy import Float, Int, Shape
from policies.core.residency import NO_EXPERT
from replay.calibration.pace import OnStep
from replay.choice import Choice
from replay.comparison.cell import FixedOrder, Side, run_on
from replay.devices.cpu import CpuDevice
from replay.devices.cuda import CudaDevice
from replay.devices.expert_file import ExpertFile
from replay.devices.gpu import Gpu
from replay.devices.stage import Stage
from replay.model.network import Network
from replay.warmup import undisturbed
from sim.loop.device import Device, Work
from sim.loop.log import COUNTERS

RESIDENT, ON_DEMAND, LAYER_STREAM, ZERO_COPY = "resident", "on-demand", "layer-stream", "zero-copy"
SYNC_PER_COPY, LRU_SWAP, PAGE_CACHE = "sync-per-copy", "lru-swap", "page cache"


class QueueResidency:
    """A residency (`policies.core.residency.Residency`) whose transfers come in the order of a queue.

    Subclasses give experts their slots. Slots change hands at a router alone, when all earlier layers were computed.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._slots: dict[int, int] = {}  # of every expert that has one
        self._ready: set[int] = set()
        self._queue: deque[int] = deque()
        self._in_flight: deque[int] = deque()
        self._wanted: set[int] = set()
        self._counts = [0] * len(COUNTERS)  # as every residency's; nothing counts as a prefetch

    def _assign(self, layer: int, event: list[int]) -> None:
        """Give the event's experts slots, and queue what the link is to bring, before they are looked up."""

    @property
    def slots(self) -> int:
        return len(set(self._slots.values()))

    def resident(self) -> Int:
        return np.array(sorted(self._slots), np.int64)

    def route(self, experts: Int) -> tuple[list[int], int]:
        event: list[int] = experts.tolist()
        if event:
            self._assign(event[0] // self._shape.experts, event)
        self._wanted = set(event)
        hits = [expert for expert in event if expert in self._ready]
        late = len(self._wanted.intersection(self._in_flight))
        for place, count in enumerate((len(hits), late, len(event) - len(hits) - late)):
            self._counts[place] += count
        return hits, len(self._queue)

    def slot(self, expert: int) -> int:
        return self._slots[expert]

    def next_transfer(self) -> tuple[int, int, bool]:
        if not self._queue:
            return NO_EXPERT, NO_EXPERT, False
        self._in_flight.append(self._queue.popleft())
        self._counts[COUNTERS.index("demand_transfers")] += 1
        return self._in_flight[-1], NO_EXPERT, False

    def arrived(self) -> bool:
        expert = self._in_flight.popleft()
        self._ready.add(expert)
        return expert in self._wanted

    def awaited(self, expert: int) -> bool:
        return expert in self._wanted

    def counters(self) -> list[int]:
        return list(self._counts)

    # A schedule has no victims, no proposals and no interruptions, and continues from request to request.

    def propose(self, experts: Int, priorities: Float) -> None: ...

    def victims(self) -> list[int]:
        return []

    def land(self) -> None: ...

    def interrupt(self) -> tuple[int, int]:
        return NO_EXPERT, NO_EXPERT

    def computed(self, expert: int) -> None: ...

    def end_request(self, cold: bool = False) -> None: ...


class Resident(QueueResidency):
    """Everything lies in its slot, or in the one that it shares where there are fewer."""

    def __init__(self, shape: Shape, slots: int) -> None:
        super().__init__(shape)
        self._slots = {expert: expert % slots for expert in range(shape.total)}
        self._ready = set(self._slots)


class OnDemand(QueueResidency):
    """Each event brings all its experts, over those of the event before. Slots: as many as the largest event has."""

    def _assign(self, layer: int, event: list[int]) -> None:
        self._ready.clear()
        self._slots = {expert: place for place, expert in enumerate(event)}
        self._queue.extend(event)


class LayerStream(QueueResidency):
    """Two buffers of a layer each: from one it is computed, into the other the next layer comes. Slots: 2 E."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._buffers: dict[int, int] = {}  # of the layers that are there or on their way

    def _assign(self, layer: int, event: list[int]) -> None:
        following = (layer + 1) % self._shape.layers
        for gone in set(self._buffers) - {layer, following}:
            del self._buffers[gone]
            self._ready.difference_update(self._experts(gone))
        self._load(layer, 1 - self._buffers.get(following, 1))
        self._load(following, 1 - self._buffers[layer])

    def arrived(self) -> bool:
        expert = self._in_flight[0]
        awaited = super().arrived()
        if expert // self._shape.experts not in self._buffers:  # the event that it was for has gone by
            self._ready.discard(expert)
        return awaited

    def _load(self, layer: int, buffer: int) -> None:
        if layer not in self._buffers:
            self._buffers[layer] = buffer
            for place, expert in enumerate(self._experts(layer)):
                self._slots[expert] = buffer * self._shape.experts + place
                self._queue.append(expert)

    def _experts(self, layer: int) -> range:
        return range(layer * self._shape.experts, (layer + 1) * self._shape.experts)


class SyncPerCopy(CudaDevice):
    """One copy at a time, and the host waits for it."""

    tail_bytes = 0

    def _copied(self) -> None:
        self._link.synchronize()


class SwapOut(CudaDevice):
    """What a slot holds goes back to the host's buffer before another expert comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._held: dict[int, int] = {}

    def _copying(self, expert: int, slot: int) -> None:
        victim, self._held[slot] = self._held.get(slot), expert
        if victim is not None:
            target, source = self._host[victim], self.pool[slot, : self.store.bytes_of(victim)]
            self._link.run(lambda: target.copy_(source, non_blocking=True))


class MappingGpu(Gpu):
    """The current GPU, whose kernels may read registered host memory over the link."""

    def mapped(self, memory: NDArray[np.uint8]) -> torch.Tensor:
        """Return it as a tensor of this GPU. Unified addressing: it has the same address on both sides."""
        return torch.as_tensor(_OnDevice(memory), device=self.device)


class _OnDevice:
    """Memory that says that it is a GPU's, which torch then asks the driver to confirm."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": memory.shape,
            "typestr": "|u1",
            "data": (memory.ctypes.data, False),
            "version": 2,
        }


class ZeroCopy(CudaDevice):
    """Experts are computed where they lie in registered host memory: a schedule's slots are the host's buffers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        gpu: Any = self.gpu
        self._mapped = [gpu.mapped(buffer) for buffer in self.store.padded]
        self._weights = [self._network.weights(buffer) for buffer in self._mapped]

    def _grouped(self, works: list[Work]) -> list[list[Work]]:
        return [[work] for work in works]  # buffers do not lie in one pool

    def _in_memory(self, slots: list[int]) -> tuple[torch.Tensor, list[int]]:
        return self._mapped[slots[0]][None], [0]


class Mapped(CpuDevice):
    """Experts are computed where the file is mapped: a schedule's slots are the file's experts, and nothing is read."""

    def __init__(self, store: ExpertFile, network: Network) -> None:
        self._file = store
        super().__init__(store, network, store.distinct)

    def _slots(self, slots: int) -> NDArray[np.uint8]:
        with self._file.path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return np.frombuffer(mapped, np.uint8, offset=self._file.begin).reshape(slots, self._file.stride)


DATA_PATHS: dict[str, type[CudaDevice]] = {ZERO_COPY: ZeroCopy, SYNC_PER_COPY: SyncPerCopy, LRU_SWAP: SwapOut}
UNDER_A_POLICY = (SYNC_PER_COPY, LRU_SWAP)


def run_baseline(choice: Choice, name: str, stage: Stage, on_step: OnStep | None = None) -> Side:
    """Run the choice's trace as that baseline does; under the choice's policy where it is a data path alone.

    InputError where memory does not hold what it takes, or cannot be limited.
    """
    run, shape, distinct = choice.run, choice.run.shape, stage.store.distinct
    if name == PAGE_CACHE:
        assert isinstance(stage.store, ExpertFile)
        device: Device = Mapped(stage.store, stage.network)
        try:
            with undisturbed(run), page_cache_of(choice.slots * stage.store.stride, stage.store.path):
                return run_on(choice, run.with_slots(distinct), device, FixedOrder(Resident(shape, distinct)), on_step)
        finally:
            device.close()
    schedules: dict[str, tuple[int, QueueResidency]] = {
        RESIDENT: (shape.total, Resident(shape, shape.total)),
        ON_DEMAND: (shape.experts, OnDemand(shape)),
        LAYER_STREAM: (2 * shape.experts, LayerStream(shape)),
        ZERO_COPY: (1, Resident(shape, distinct)),
    }
    slots, decider = choice.slots, None
    if name in schedules:
        slots, residency = schedules[name]
        decider = FixedOrder(residency)
    path = DATA_PATHS.get(name, CudaDevice)
    with stage.device(slots, choice.contexts, choice.target.verify, path) as device, undisturbed(run):
        if name == RESIDENT:
            fill(device, slots, run.gpu.link.expert_bytes)
        return run_on(choice, run.with_slots(slots), device, decider, on_step)


def fill(device: Device, slots: int, expert_bytes: int) -> None:
    """Copy an expert into every slot."""
    for slot in range(slots):
        device.copy(slot, slot, 0, expert_bytes)
        device.next_completion()
