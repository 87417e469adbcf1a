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

from replay.device_choice import BEST_EFFORT
from replay.devices.gpu import Gpu, Stream, Task, pinned
from replay.devices.store import HostMemory

SERIES, SERIES_S, MOST_CALLS = 5, 0.02, 400
BUFFER_BYTES = 16 << 20
"""Of the host's memory that copies come from: it is filled in windows of this size."""

CPU_BUFFERS, GPU_BUFFERS = 4, 64
SIZES = tuple(1 << power for power in range(16, 29, 2))
"""64 KiB to 256 MiB, in steps of four."""
SMALL, LARGE = 64 << 10, 64 << 20
TOGETHER = 8
"""Pieces of work that are timed beside others."""

Curve = list[list[float]]
"""[bytes, GB/s] by size."""


@dataclass(frozen=True)
class Rates:
    """GB/s are bytes a ns; nothing is computed from `curves` and `costs`, which are for people."""

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
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


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


def _by_size(total: int, copy: Callable[[slice], object], wait: Callable[[], object] = lambda: None) -> Curve:
    def rate(size: int) -> float:
        places = total // size  # copies go round a buffer
        return size / seconds(lambda number: copy(slice(number % places * size, (number % places + 1) * size)), wait)

    return [[float(size), rate(size) / 1e9] for size in SIZES if size <= total]


def _multiplied(n: int, device: torch.device | str, dtype: torch.dtype) -> Callable[[int], object]:
    a, b, c = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    return lambda _: torch.mm(a, b, out=c)


def _host() -> tuple[float, float]:
    """Return the matmul rate in TFLOP/s and the memory bandwidth in GB/s of the CPU, with torch's threads."""
    tflop = 2 * 1_024**3 / seconds(_multiplied(1_024, "cpu", torch.float32)) / 1e12
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

    def move(number: int) -> None:
        first = number % CPU_BUFFERS * BUFFER_BYTES
        copy(slice(first, first + BUFFER_BYTES))

    curve, little = _by_size(len(source), copy), torch.zeros(16)
    tflop, gb_per_s = _host()
    link_gb_per_s = curve[-1][1]
    multiply = _multiplied(512, "cpu", torch.float32)
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


def _beside(other: Callable[[int], object], call: Callable[[int], object]) -> float:
    """Return the seconds of a call while another thread keeps making the other."""
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
    """Measure this one; so many buffers of host memory are copied from, matrices are n x n.

    What is not said to be pinned or pageable is on the device.
    """
    compute, link, wait = gpu.compute_stream(), gpu.copy_stream(), gpu.synchronize
    memory = HostMemory(buffers, BUFFER_BYTES, seed=0)
    source = torch.from_numpy(memory.slabs[0])
    target = torch.ones(len(source), dtype=torch.uint8, device=gpu.device)
    words, out = target.view(torch.int32), torch.empty_like(target.view(torch.int32))

    def copy(place: slice) -> None:
        target[place].copy_(source[place], non_blocking=True)

    def behind(number: int) -> None:
        copy(slice(0, LARGE))
        copy(slice(LARGE, LARGE + SMALL))

    events = [gpu.event() for _ in range(MOST_CALLS)]
    costs = {  # of each call about events, on an idle stream, so that nothing is waited for
        "record_us": seconds(lambda number: link.record(events[number]), wait) * 1e6,
        "wait_us": seconds(lambda number: link.wait(events[number]), wait) * 1e6,
        "query_us": seconds(lambda number: events[number].query()) * 1e6,
    }
    curves = {"pageable_gb_per_s": _by_size(len(source), copy, wait)}
    began = time.perf_counter()
    with pinned(memory, BEST_EFFORT, gpu) as is_pinned:
        if is_pinned:
            costs["pinning_gb_per_s"] = memory.nbytes / (time.perf_counter() - began) / 1e9
            curves["pinned_gb_per_s"] = _by_size(len(source), copy, wait)
            with suppress(RuntimeError, TypeError, ValueError):  # where the driver maps no host memory
                mapped = gpu.mapped(memory.slabs[0]).view(torch.int32)
                costs["zero_copy_gb_per_s"] = (
                    len(target) / seconds(lambda _: torch.add(mapped, 1, out=words), wait) / 1e9
                )
            reading: Task = lambda: torch.add(words, 1, out=out)  # noqa: E731 - bound by the device's memory
            costs |= _together((link, lambda: copy(slice(0, LARGE))), (compute, reading), gpu)
        large = seconds(lambda _: copy(slice(0, LARGE)), wait)
        latency = max(0.0, seconds(behind, wait) - large)
    other, little = torch.ones_like(target), torch.zeros(16, device=gpu.device)
    tflop, gb_per_s = _host()
    return Rates(
        link_gb_per_s=curves["pinned_gb_per_s" if is_pinned else "pageable_gb_per_s"][-1][1],
        link_latency_us=latency * 1e6,
        memory_gib=memory_gib,
        memory_gb_per_s=2 * len(target) / seconds(lambda _: other.copy_(target), wait) / 1e9,
        compute_tflop_per_s=2 * n**3 / seconds(_multiplied(n, gpu.device, torch.bfloat16), wait) / 1e12,
        launch_us=seconds(lambda _: little.add_(1), wait) * 1e6,
        host_tflop_per_s=tflop,
        host_gb_per_s=gb_per_s,
        curves=curves,
        costs=costs,
    )


OnStream = tuple[Stream, Task]


def _together(copying: OnStream, computing: OnStream, gpu: Gpu) -> dict[str, float]:
    """Return how much longer a copy takes beside compute that is bound by memory, and the other way round."""
    alone = [_on_stream(work, gpu) for work in (copying, computing)]
    copies = _on_stream(copying, gpu, computing, 1 + int(3 * TOGETHER * alone[0] / alone[1]))
    computes = _on_stream(computing, gpu, copying, 1 + int(3 * TOGETHER * alone[1] / alone[0]))
    return {"copy_slowed_by_compute": copies / alone[0], "compute_slowed_by_copy": computes / alone[1]}


def _on_stream(work: OnStream, gpu: Gpu, beside: OnStream | None = None, others: int = 0) -> float:
    """Return the seconds of one piece of work on its stream, while `others`, submitted before, keep another busy."""
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
