"""Experts of a live model in host memory, from where they are copied into slots in a GPU's memory."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from threading import local
from typing import Any

import numpy as np
import torch

from replay.device_choice import BEST_EFFORT
from replay.devices.gpu import Gpu
from replay.devices.lanes import TRIED
from replay.devices.pinning import pinned
from replay.devices.store import ExpertSource, HostMemory, HostStore, anonymous, require_host_memory, stride_of
from replay.live.layout import ExpertLayer, places_of


class HostExperts:
    """An `ExpertSource` of slots in a GPU's memory. Rows lie in an expert as `Row.begin` says."""

    def __init__(self, host: HostStore, gpu: Gpu) -> None:
        self._host, self._link = host, gpu.copy_stream()
        self.expert_bytes, self.stride, self.distinct = host.expert_bytes, host.stride, host.distinct

    def read(self, expert: int, first: int, last: int, slot: Any) -> None:
        """Copy these bytes to the same place in a slot, a tensor uint8[stride]; return when they have arrived."""
        bytes_ = torch.from_numpy(self._host[expert][first:last])
        self._link.run(lambda: slot[first:last].copy_(bytes_, non_blocking=True))
        self._link.synchronize()


@contextmanager
def host_experts(
    source: ExpertSource,
    layers: Sequence[ExpertLayer],
    gpu: Gpu,
    progress: Callable[[int], AbstractContextManager[Callable[[int], None]]],
) -> Iterator[HostExperts]:
    """Read all experts of a source on a disk into host memory, pinned where the driver allows it.

    progress: is shown meanwhile. Raise InputError where host memory does not suffice.
    """
    total, stride = source.distinct, stride_of(source.expert_bytes)
    require_host_memory(total * stride, f"{total} experts in host memory", "use --device disk")
    memory = HostMemory(total, stride, seed=None)
    host, own, places = HostStore(memory, total, source.expert_bytes), local(), places_of(source, layers)

    def fetch(expert: int) -> None:
        if not hasattr(own, "slot"):
            own.slot = anonymous(source.stride)
        source.read(expert, 0, source.expert_bytes, own.slot)
        for row, place in zip(layers[expert // layers[0].experts].rows, places(expert), strict=True):
            np.copyto(host[expert][row.begin : row.begin + row.nbytes], own.slot[place : place + row.nbytes])

    with progress(total) as advance, ThreadPoolExecutor(max(TRIED)) as threads:
        for _ in threads.map(fetch, range(total)):
            advance(1)
    with pinned(memory, BEST_EFFORT, gpu):
        yield HostExperts(host, gpu)
