"""The machine without a model: what its links, memories and units reach, and what it costs to ask them.

On a GPU from plain calls of torch, on a CPU from memcpy and matmuls, so that the same command runs anywhere. Each
figure is the median of a few series of calls, waited for once.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median
from threading import Event, Thread

import numpy as np
import torch

from replay.devices.gpu import Gpu, Stream, Task
from replay.devices.pinning import BEST_EFFORT, pinned
from replay.devices.store import HostMemory
from traces.errors import InputError

SERIES, SERIES_S, MOST_CALLS = 5, 0.02, 400
BUFFER_BYTES = 16 << 20
"""Of the host's memory that copies come from: it is filled in windows of this size."""

CPU_BUFFERS, GPU_BUFFERS = 4, 64
SIZES = tuple(1 << power for power in range(16, 29, 2))
"""64 KiB to 256 MiB, in steps of four."""
SMALL, LARGE = 64 << 10, 64 << 20
MATRIX = 8_192
TOGETHER = 8
"""Pieces of work that are timed beside others."""

Curve = list[list[float]]
"""[bytes, GB/s] by size."""


@dataclass(frozen=True)
class Rates:
    """GB/s are bytes a ns; `curves` and `costs` are told, nothing is computed from them."""

    link_gb_per_s: float  # of the largest copy
    link_latency_us: float
    memory_gib: float  # in all
    memory_gb_per_s: float  # read and written together
    compute_tflop_per_s: float
    launch_us: float
    host_tflop_per_s: float
    host_gb_per_s: float
    curves: dict[str, Curve] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)


def host_gib() -> float:
    """Host memory in all, GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def rates(gpu: Gpu | None) -> Rates:
    """Of this machine with that GPU, or as the CPU device uses it; a few seconds. InputError where memory is short."""
    try:
        return of_gpu(gpu, gpu.total_bytes() / 2**30, GPU_BUFFERS, MATRIX) if gpu else of_cpu()
    except (torch.OutOfMemoryError, MemoryError):
        raise InputError("no memory is left to measure the machine with: end what else is running") from None
    finally:
        if gpu:
            gpu.release()


def seconds(call: Callable[[int], object], wait: Callable[[], object] = lambda: None) -> float:
    """Of one call among others; it gets its number, and `wait` blocks until all have ended."""

    def series(calls: int) -> float:
        began = time.perf_counter()
        for number in range(calls):
            call(number)
        wait()
        return (time.perf_counter() - began) / calls

    series(1)
    calls = min(max(int(SERIES_S / max(series(2), 1e-9)), 1), MOST_CALLS)
    return median(series(calls) for _ in range(SERIES))


def _round(places: int, size: int) -> Callable[[int], slice]:
    """Where the copy with that number lies, going round a buffer."""
    return lambda number: slice(number % places * size, number % places * size + size)


def _by_size(total: int, copy: Callable[[slice], object], wait: Callable[[], object]) -> Curve:
    found = []
    for size in (size for size in SIZES if size <= total):
        place = _round(total // size, size)
        took = seconds(lambda number, place=place: copy(place(number)), wait)  # type: ignore[misc]
        found.append([float(size), size / took / 1e9])
    return found


def _host(dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    """Matmul rate in TFLOP/s and memory bandwidth in GB/s of the CPU, with torch's threads."""
    n = 1_024
    a, b, c = (torch.randn(n, n).to(dtype) for _ in range(3))
    tflop = 2 * n**3 / seconds(lambda _: torch.mm(a, b, out=c)) / 1e12
    source = torch.ones(64 << 20, dtype=torch.uint8)
    target = torch.ones_like(source)
    return tflop, 2 * len(source) / seconds(lambda _: target.copy_(source)) / 1e9


# A CPU


def of_cpu() -> Rates:
    """The link is memcpy, the device's memory the host's."""
    memory = HostMemory(CPU_BUFFERS, BUFFER_BYTES, seed=0)
    source = memory.slabs[0]
    target = np.ones_like(source)

    def copy(place: slice) -> None:
        np.copyto(target[place], source[place])

    curve = _by_size(len(source), copy, lambda: None)
    little = torch.zeros(16)
    tflop, gb_per_s = _host()
    link_gb_per_s = curve[-1][1]
    whole = _round(CPU_BUFFERS, BUFFER_BYTES)
    n = 512
    a, b, c = (torch.randn(n, n) for _ in range(3))

    def multiply(number: int) -> None:
        torch.mm(a, b, out=c)

    def move(number: int) -> None:
        copy(whole(number))

    return Rates(
        link_gb_per_s=link_gb_per_s,
        link_latency_us=seconds(lambda _: copy(slice(0, 64))) * 1e6,
        memory_gib=host_gib(),
        memory_gb_per_s=max(gb_per_s, link_gb_per_s),
        compute_tflop_per_s=tflop,
        launch_us=seconds(lambda _: little.add_(1)) * 1e6,
        host_tflop_per_s=tflop,
        host_gb_per_s=gb_per_s,
        curves={"pageable_gb_per_s": curve},
        costs={
            "copy_slowed_by_compute": _beside(multiply, move) / seconds(move),
            "compute_slowed_by_copy": _beside(move, multiply) / seconds(multiply),
        },
    )


def _beside(other: Callable[[int], None], call: Callable[[int], None]) -> float:
    """Seconds of a call while another thread keeps making the other."""
    ended = Event()

    def keep_on() -> None:
        number = 0
        while not ended.is_set():
            other(number)
            number += 1

    thread = Thread(target=keep_on, daemon=True)
    thread.start()
    try:
        return seconds(call)
    finally:
        ended.set()
        thread.join()


# A GPU


def of_gpu(gpu: Gpu, memory_gib: float, buffers: int, n: int) -> Rates:
    """Of this one; so many buffers of host memory are copied from, matrices are n x n.

    What is not said to be pinned or pageable is on the device.
    """
    compute, link = gpu.compute_stream(), gpu.copy_stream()
    memory = HostMemory(buffers, BUFFER_BYTES, seed=0)
    source = torch.from_numpy(memory.slabs[0])
    target = torch.ones(len(source), dtype=torch.uint8, device=gpu.device)

    def copy(place: slice) -> None:
        target[place].copy_(source[place], non_blocking=True)

    def behind(number: int) -> None:
        copy(slice(0, LARGE))
        copy(slice(LARGE, LARGE + SMALL))

    curves, costs = {"pageable_gb_per_s": _by_size(len(source), copy, gpu.synchronize)}, _asking(gpu)
    began = time.perf_counter()
    with pinned(memory, BEST_EFFORT, gpu) as is_pinned:
        if is_pinned:
            costs["pinning_gb_per_s"] = memory.nbytes / (time.perf_counter() - began) / 1e9
            curves["pinned_gb_per_s"] = _by_size(len(source), copy, gpu.synchronize)
            with suppress(RuntimeError, TypeError, ValueError):  # where the driver maps no host memory
                costs["zero_copy_gb_per_s"] = _zero_copy(gpu.mapped(memory.slabs[0]), target, gpu)
            costs |= _together((link, lambda: copy(slice(0, LARGE))), (compute, _reading(target)), gpu)
        large = seconds(lambda _: copy(slice(0, LARGE)), gpu.synchronize)
        latency = max(0.0, seconds(behind, gpu.synchronize) - large)
    reached = curves["pinned_gb_per_s" if is_pinned else "pageable_gb_per_s"][-1][1]
    other = torch.ones_like(target)
    little = torch.zeros(16, device=gpu.device)
    a, b, c = (torch.randn(n, n, device=gpu.device, dtype=torch.bfloat16) for _ in range(3))
    tflop, gb_per_s = _host()
    return Rates(
        link_gb_per_s=reached,
        link_latency_us=latency * 1e6,
        memory_gib=memory_gib,
        memory_gb_per_s=2 * len(target) / seconds(lambda _: other.copy_(target), gpu.synchronize) / 1e9,
        compute_tflop_per_s=2 * n**3 / seconds(lambda _: torch.mm(a, b, out=c), gpu.synchronize) / 1e12,
        launch_us=seconds(lambda _: little.add_(1), gpu.synchronize) * 1e6,
        host_tflop_per_s=tflop,
        host_gb_per_s=gb_per_s,
        curves=curves,
        costs=costs,
    )


def _asking(gpu: Gpu) -> dict[str, float]:
    """What the host pays for each call about events, in us: on an idle stream, so that nothing is waited for."""
    stream = gpu.copy_stream()
    events = [gpu.event() for _ in range(MOST_CALLS)]
    return {
        "record_us": seconds(lambda number: stream.record(events[number]), gpu.synchronize) * 1e6,
        "wait_us": seconds(lambda number: stream.wait(events[number]), gpu.synchronize) * 1e6,
        "query_us": seconds(lambda number: events[number].query()) * 1e6,
    }


def _reading(memory: torch.Tensor) -> Task:
    """A kernel that is bound by the device's memory."""
    values = memory.view(torch.int32)
    out = torch.empty_like(values)
    return lambda: torch.add(values, 1, out=out)


def _zero_copy(mapped: torch.Tensor, target: torch.Tensor, gpu: Gpu) -> float:
    """GB/s at which a kernel reads host memory."""
    values, out = mapped.view(torch.int32), target.view(torch.int32)
    return len(target) / seconds(lambda _: torch.add(values, 1, out=out), gpu.synchronize) / 1e9


OnStream = tuple[Stream, Task]


def _together(copying: OnStream, computing: OnStream, gpu: Gpu) -> dict[str, float]:
    """How much longer a copy takes beside compute that is bound by memory, and the other way round."""
    alone = [_on_stream(work, gpu) for work in (copying, computing)]
    copies = _on_stream(copying, gpu, computing, 1 + int(3 * TOGETHER * alone[0] / alone[1]))
    computes = _on_stream(computing, gpu, copying, 1 + int(3 * TOGETHER * alone[1] / alone[0]))
    return {"copy_slowed_by_compute": copies / alone[0], "compute_slowed_by_copy": computes / alone[1]}


def _on_stream(work: OnStream, gpu: Gpu, beside: OnStream | None = None, others: int = 0) -> float:
    """Seconds of one piece of work on its stream, while `others`, submitted before, keep another stream busy."""
    (stream, task), event, took = work, gpu.event(), []
    for _ in range(SERIES):
        gpu.synchronize()
        if beside:
            for _ in range(others):
                beside[0].run(beside[1])
        began = time.perf_counter()
        for _ in range(TOGETHER):
            stream.run(task)
        stream.record(event)
        while not event.query():
            pass
        took.append((time.perf_counter() - began) / TOGETHER)
    gpu.synchronize()
    return max(median(took), 1e-9)
