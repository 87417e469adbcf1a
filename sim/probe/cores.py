"""Which processors this process may use, by kind: one of each core, the fast ones first.

A second thread of a core adds little to what is bound by memory, so llama.cpp's default is one a core. Kinds: on Linux
what the kernel says of hybrid processors (cpu_core and cpu_atom of Intel, cpu_capacity of Arm); elsewhere all are one.
"""

import os
import platform
import re
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import psutil

from sim.probe.limits import cpu_quota

CPUS = Path("/sys/devices/system/cpu")
HYBRID = {"cpu_core": "performance cores", "cpu_atom": "efficiency cores"}


@dataclass(frozen=True)
class CoreClass:
    """Cores of one kind: a processor of each."""

    name: str
    cpus: tuple[int, ...]


def core_classes() -> list[CoreClass]:
    """Return the kinds of cores, the fastest first. Where a quota is lower, there are as many as it allows."""
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    first = [cpu for cpu in usable if cpu == min(set(_siblings(cpu)) & set(usable), default=cpu)]
    if not hasattr(os, "sched_getaffinity"):
        first = usable[: psutil.cpu_count(logical=False) or len(usable)]
    kinds = dict[str, list[int]]()
    for cpu in first:
        kinds.setdefault(_kind(cpu), []).append(cpu)
    if len(kinds) == 1:
        kinds = {"cores": first}
    names = sorted(kinds, reverse=True)  # performance before efficiency, the larger capacity before the smaller
    allowed = ceil(cpu_quota() or len(first))
    classes = []
    for name in names:
        if taken := kinds[name][:allowed]:
            classes.append(CoreClass(name, tuple(taken)))
        allowed -= len(taken)
    return classes


def processor() -> str:
    """Return what the processor is called; empty where nothing says it."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor()


def _kind(cpu: int) -> str:
    for folder, name in HYBRID.items():
        with suppress(OSError):
            if cpu in _listed(Path(f"/sys/devices/{folder}/cpus").read_text()):
                return name
    with suppress(OSError):
        return f"cores of capacity {int((CPUS / f'cpu{cpu}/cpu_capacity').read_text()):4d}"
    return "cores"


def _siblings(cpu: int) -> list[int]:
    with suppress(OSError):
        return _listed((CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text())
    return [cpu]


def _listed(text: str) -> list[int]:
    """Return the numbers of `0-3,8`."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return [cpu for each in ends for cpu in range(int(each[0]), int(each[-1]) + 1)]
