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
from policies.core import residency_compiled as core
from policies.core.policy import Int, Shape
from policies.core.residency import NO_EXPERT
from policies.core.script import OrderedResidency
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

RESIDENT, ON_DEMAND, LAYER_STREAM, ZERO_COPY = "resident", "on-demand", "layer-stream", "zero-copy"
SYNC_PER_COPY, LRU_SWAP, PAGE_CACHE = "sync-per-copy", "lru-swap", "page cache"


class QueueResidency(OrderedResidency):
    """A residency whose transfers come in the order of a queue; nothing counts as a prefetch.

    Subclasses give experts their slots. Slots change hands at a router alone, when all earlier layers were computed.
    """

    def __init__(self, shape: Shape, slots: int) -> None:
        super().__init__(shape, (slots,))
        self._shape = shape
        self._state, self._slot = self.m[core.STATE, : shape.total], self.m[core.SLOT]
        self._queue: deque[int] = deque()

    def _assign(self, layer: int, event: list[int]) -> None:
        """Give the event's experts slots, and queue what the link is to bring, before they are looked up."""

    def look_up(self, experts: Int) -> None:
        if len(experts):
            self._assign(int(experts[0]) // self._shape.experts, experts.tolist())

    def looked_up(self) -> int:
        return len(self._queue)

    def next_transfer(self) -> tuple[int, int, bool]:
        if not self._queue:
            return NO_EXPERT, NO_EXPERT, False
        expert = self._queue.popleft()
        self._state[expert], self.m[core.ONE, core.ACTIVE] = core.LOADING, expert
        self.m[core.ONE, core.N_DEMAND] += 1
        return expert, NO_EXPERT, False

    def end_request(self, cold: bool = False) -> None:
        """A schedule continues from request to request."""


class Resident(QueueResidency):
    """Everything lies in its slot, or in the one that it shares where there are fewer."""

    def __init__(self, shape: Shape, slots: int) -> None:
        super().__init__(shape, slots)
        self._slot[: shape.total] = np.arange(shape.total) % slots
        self._state[:] = core.READY


class OnDemand(QueueResidency):
    """Each event brings all its experts, over those of the event before. Slots: as many as the largest event has."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, shape.experts)

    def _assign(self, layer: int, event: list[int]) -> None:
        self._state[:] = core.ABSENT
        self._slot[event] = np.arange(len(event))
        self._queue.extend(event)


class LayerStream(QueueResidency):
    """Two buffers of a layer each: from one it is computed, into the other the next layer comes. Slots: 2 E."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape, 2 * shape.experts)
        self._buffers: dict[int, int] = {}  # of the layers that are there or on their way

    def _assign(self, layer: int, event: list[int]) -> None:
        following, E = (layer + 1) % self._shape.layers, self._shape.experts
        for gone in set(self._buffers) - {layer, following}:
            del self._buffers[gone]
        for other in set(range(self._shape.layers)) - set(self._buffers):  # what arrived after its event as well
            self._state[other * E : (other + 1) * E] = core.ABSENT
        self._load(layer, 1 - self._buffers.get(following, 1))
        self._load(following, 1 - self._buffers[layer])

    def _load(self, layer: int, buffer: int) -> None:
        if layer not in self._buffers:
            self._buffers[layer], E = buffer, self._shape.experts
            experts = range(layer * E, (layer + 1) * E)
            self._slot[experts] = buffer * E + np.arange(E)
            self._queue.extend(experts)


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
