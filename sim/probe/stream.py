"""STREAM Triad (McCalpin): what memory reaches, a[i] = b[i] + s * c[i] over arrays that no cache holds.

Three numbers of 8 bytes an element count, as STREAM counts; each thread has its own part, which it alone has touched,
on a processor of its own.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
from numpy.typing import NDArray

from policies.core.compiled import compiled
from sim.probe.cores import CoreClass

ARRAY_BYTES = 256 << 20
"""Of each of the three arrays, at most: several times what caches hold."""
PASSES = 6

Floats = NDArray[np.float64]


@compiled
def _triad(a: Floats, b: Floats, c: Floats, s: float) -> None:
    for i in range(len(a)):
        a[i] = b[i] + s * c[i]


@dataclass(frozen=True)
class Rate:
    """GB/s that so many cores of a kind reach together."""

    cores: str
    threads: int
    gb_per_s: float


def triad(cpus: Sequence[int], passes: int = PASSES, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return GB/s of a thread on each of these processors together, of the best pass; clock: as time.thread_time."""
    size = min(ARRAY_BYTES, psutil.virtual_memory().available // 12) // 8 // len(cpus)
    barrier, spans = threading.Barrier(len(cpus)), np.zeros((len(cpus), passes, 2))

    def run(place: int) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {cpus[place]})  # of this thread
        a, b, c = np.zeros(size), np.full(size, 1.0), np.full(size, 2.0)
        _triad(a, b, c, 3.0)
        for number in range(passes):
            barrier.wait()
            spans[place, number, 0] = clock()
            _triad(a, b, c, 3.0)
            spans[place, number, 1] = clock()

    _triad(np.ones(8), np.ones(8), np.ones(8), 3.0)  # compiled before it is timed
    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(cpus))]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    took = spans[:, :, 1].max(axis=0) - spans[:, :, 0].min(axis=0)
    return float(3 * 8 * size * len(cpus) / took.min() / 1e9)


def by_threads(classes: Sequence[CoreClass]) -> list[Rate]:
    """Return the rates of 1, 2, 4, ... and all cores of each kind, and of all kinds together."""
    rates = []
    for each in classes:
        counts = {len(each.cpus)} | {1 << power for power in range(12) if 1 << power < len(each.cpus)}
        rates += [Rate(each.name, count, triad(each.cpus[:count])) for count in sorted(counts)]
    if len(classes) > 1:
        cpus = [cpu for each in classes for cpu in each.cpus]
        rates.append(Rate("all cores", len(cpus), triad(cpus)))
    return rates
