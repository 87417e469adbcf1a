"""The machine without a model: what its link, memories and units reach.

On a GPU from plain calls of torch, on a CPU from memcpy and matmuls, so that the same command runs anywhere. Each
figure is the median of a few series of calls, waited for once.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np
import psutil
import torch

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


def rates(gpu: Gpu | None) -> Rates:
    """Measure this machine with that GPU, or as the CPU device uses it, in a few seconds."""
    try:
        return of_gpu(gpu, gpu.total_bytes() / 2**30, GPU_BUFFERS, 8_192) if gpu else of_cpu()
    finally:
        if gpu:
            gpu.release()


def seconds(call: Callable[[int], object], wait: Callable[[], object] = lambda: None) -> float:
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


def _copied_gb_per_s(total: int, copy: Callable[[slice], object], wait: Callable[[], object] = lambda: None) -> float:
    """Return the rate of the largest copies, which go round a buffer of so many bytes."""
    size = min(LARGEST, total)
    places = [slice(first, first + size) for first in range(0, total - size + 1, size)]
    return size / seconds(lambda number: copy(places[number % len(places)]), wait) / 1e9


def _multiplied(n: int, device: torch.device | str, dtype: torch.dtype) -> Callable[[int], object]:
    a, b, c = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    return lambda _: torch.mm(a, b, out=c)


def _host() -> tuple[float, float]:
    """Return the matmul rate in TFLOP/s and the memory bandwidth in GB/s of the CPU, with torch's threads."""
    tflop = 2 * 1_024**3 / seconds(_multiplied(1_024, "cpu", torch.float32)) / 1e12
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.ones_like(source)
    return tflop, 2 * len(source) / seconds(lambda _: target.copy_(source)) / 1e9


def of_cpu() -> Rates:
    """The link is memcpy, the device's memory the host's."""
    source = HostMemory(CPU_BUFFERS, BUFFER_BYTES, seed=0).slabs[0]
    target, little = np.ones_like(source), torch.zeros(16)

    def copy(place: slice) -> None:
        np.copyto(target[place], source[place])

    copies, gib = _copied_gb_per_s(len(source), copy), psutil.virtual_memory().total / 2**30
    tflop, gb_per_s = _host()
    return Rates(
        link_bandwidth_gb_per_s=copies,
        link_latency_us=seconds(lambda _: copy(slice(0, 64))) * 1e6,
        memory_gib=gib,
        memory_bandwidth_gb_per_s=max(gb_per_s, copies),
        compute_tflop_per_s=tflop,
        launch_us=seconds(lambda _: little.add_(1)) * 1e6,
        host_compute_tflop_per_s=tflop,
        host_memory_bandwidth_gb_per_s=gb_per_s,
        host_memory_gib=gib,
    )


def of_gpu(gpu: Gpu, memory_gib: float, buffers: int, n: int) -> Rates:
    """Measure this one; so many buffers of host memory are copied from, pinned if they can be; matrices are n x n."""
    wait, memory = gpu.synchronize, HostMemory(buffers, BUFFER_BYTES, seed=0)
    source = torch.from_numpy(memory.slabs[0])
    target = torch.ones(len(source), dtype=torch.uint8, device=gpu.device)

    def copy(place: slice) -> None:
        target[place].copy_(source[place], non_blocking=True)

    def behind(number: int) -> None:
        copy(slice(0, LARGE))
        copy(slice(LARGE, LARGE + SMALL))

    with pinned(memory, gpu):
        copies = _copied_gb_per_s(len(source), copy, wait)
        large = seconds(lambda _: copy(slice(0, LARGE)), wait)
        latency = max(0.0, seconds(behind, wait) - large)
    other, little = torch.ones_like(target), torch.zeros(16, device=gpu.device)
    tflop, gb_per_s = _host()
    within = 2 * len(target) / seconds(lambda _: other.copy_(target), wait) / 1e9
    return Rates(
        link_bandwidth_gb_per_s=copies,
        link_latency_us=latency * 1e6,
        memory_gib=memory_gib,
        memory_bandwidth_gb_per_s=max(within, copies),
        compute_tflop_per_s=2 * n**3 / seconds(_multiplied(n, gpu.device, torch.bfloat16), wait) / 1e12,
        launch_us=seconds(lambda _: little.add_(1), wait) * 1e6,
        host_compute_tflop_per_s=tflop,
        host_memory_bandwidth_gb_per_s=gb_per_s,
        host_memory_gib=psutil.virtual_memory().total / 2**30,
    )
