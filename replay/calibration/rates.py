"""The machine without a model: what its link, memories and units reach.

On a GPU from plain calls of torch, on a CPU from memcpy and matmuls, so that the same command runs anywhere. Each
figure is the median of a few series of calls, waited for once.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median

import numpy as np
import psutil
import torch

from replay.devices.cpu import nothing
from replay.devices.gpu import Gpu, pinned
from replay.devices.store import HostMemory

SERIES, SERIES_S, MOST_CALLS = 5, 0.02, 400
BUFFER_BYTES = 16 << 20  # of the host's memory that copies come from: it is filled in windows of this size
CPU_BUFFERS, GPU_BUFFERS = 4, 64
SMALL, LARGE, LARGEST = 64 << 10, 64 << 20, 256 << 20


@dataclass(frozen=True)
class Rates:
    """By the keys of a hardware profile. GB/s are bytes a ns."""

    link_bandwidth_gb_per_s: float  # of the largest copy
    link_latency_us: float
    memory_gib: float  # in all
    memory_bandwidth_gb_per_s: float  # read and written together
    compute_tflop_per_s: float
    launch_us: float
    host_compute_tflop_per_s: float
    host_memory_bandwidth_gb_per_s: float
    host_memory_gib: float


def rates(gpu: Gpu | None, buffers: int = GPU_BUFFERS, n: int = 8_192) -> Rates:
    """Measure this machine with that GPU, or as the CPU device uses it, in a few seconds.

    buffers: of host memory that a GPU copies from, pinned if they can be; n: its matrices are n x n. Of a CPU the link
    is memcpy, and the device's memory the host's.
    """
    device, wait = (gpu.device, gpu.synchronize) if gpu else (torch.device("cpu"), nothing)
    memory = HostMemory(buffers if gpu else CPU_BUFFERS, BUFFER_BYTES, seed=0)
    slab, little = memory.slabs[0], torch.zeros(16, device=device)
    source, target = torch.from_numpy(slab), torch.ones(len(slab), dtype=torch.uint8, device=device)

    def to_gpu(place: slice) -> None:
        target[place].copy_(source[place], non_blocking=True)

    def memcpy(place: slice) -> None:
        np.copyto(beside[place], slab[place])

    copy, beside = (to_gpu, slab) if gpu else (memcpy, target.numpy())

    def behind(number: int) -> None:
        copy(slice(0, LARGE))
        copy(slice(LARGE, LARGE + SMALL))

    def copied(source: torch.Tensor) -> float:
        """Return GB/s, read and written together."""
        target = torch.ones_like(source)
        return 2 * len(source) / seconds(lambda _: target.copy_(source), wait) / 1e9

    def multiplied(n: int, device: torch.device, dtype: torch.dtype) -> float:
        """Return TFLOP/s; those of the CPU with torch's threads."""
        a, b, c = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
        return 2 * n**3 / seconds(lambda _: torch.mm(a, b, out=c), wait) / 1e12

    size = min(LARGEST, len(slab))
    places = [slice(first, first + size) for first in range(0, len(slab) - size + 1, size)]
    with pinned(memory, gpu) if gpu else nullcontext():
        copies = size / seconds(lambda number: copy(places[number % len(places)]), wait) / 1e9
        if gpu:
            large = seconds(lambda _: copy(slice(0, LARGE)), wait)
            latency = max(0.0, seconds(behind, wait) - large)
        else:
            latency = seconds(lambda _: copy(slice(0, 64)))
    host_tflop = multiplied(1_024, torch.device("cpu"), torch.float32)
    host_gb_per_s, host_gib = copied(torch.ones(64 << 20, dtype=torch.uint8)), psutil.virtual_memory().total / 2**30
    return Rates(
        link_bandwidth_gb_per_s=copies,
        link_latency_us=latency * 1e6,
        memory_gib=gpu.total_bytes() / 2**30 if gpu else host_gib,
        memory_bandwidth_gb_per_s=max(copied(target) if gpu else host_gb_per_s, copies),
        compute_tflop_per_s=multiplied(n, device, torch.bfloat16) if gpu else host_tflop,
        launch_us=seconds(lambda _: little.add_(1), wait) * 1e6,
        host_compute_tflop_per_s=host_tflop,
        host_memory_bandwidth_gb_per_s=host_gb_per_s,
        host_memory_gib=host_gib,
    )


def seconds(call: Callable[[int], object], wait: Callable[[], object] = nothing) -> float:
    """Return the seconds of one call among others; it gets its number, and `wait` blocks until all have ended."""

    def series(calls: int) -> float:
        began = time.perf_counter()
        for number in range(calls):
            call(number)
        wait()
        return (time.perf_counter() - began) / calls

    series(1)
    calls = min(max(int(SERIES_S / max(series(2), 1e-9)), 1), MOST_CALLS)
    return median(series(calls) for _ in range(SERIES))
