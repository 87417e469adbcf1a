"""What a container or a service may use of this machine: the limits of its control groups, versions 1 and 2.

psutil reports those of the machine. Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of Linux.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

ROOT, GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""Version 1 states a number of this size where there is no limit."""


def memory_limit() -> int | None:
    """Return the lowest limit in bytes of the groups that this process is in."""
    found = [int(text) for text in _read("memory", "memory.max", "memory.limit_in_bytes") if text != "max"]
    return min((each for each in found if each < UNLIMITED), default=None)


def available_memory_bytes() -> int:
    """Return the bytes that may be allocated without swapping, limits of control groups included."""
    names = (("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes"), 2 * ("memory.stat",))
    available: list[int] = [psutil.virtual_memory().available]
    for limit, used, text in zip(*(_read("memory", *name) for name in names), strict=False):
        if limit != "max":
            stat = dict(line.split() for line in text.splitlines())
            cached = stat.get("total_inactive_file") or stat.get("inactive_file", 0)  # the first is version 1's
            available.append(int(limit) - int(used) + int(cached))
    return min(available)


def cpu_quota() -> float | None:
    """Return how many processors' time this process may use."""
    found = [text.split() for text in _read("cpu", "cpu.max", "cpu.cfs_quota_us")]
    shares = [int(each[0]) / (int(each[1]) if len(each) > 1 else 100_000) for each in found if each[0] != "max"]
    return min((share for share in shares if share > 0), default=None)


def _read(controller: str, second: str, first: str) -> Iterator[str]:
    """Yield what stands in a file of this process's groups and of all above them, by the version's name of it."""
    with suppress(OSError):
        for line in GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            top, name = (ROOT / controller, first) if controllers else (ROOT, second)
            group = top / path.lstrip("/")
            while group.is_relative_to(top):
                with suppress(OSError):
                    yield (group / name).read_text().strip()
                group = group.parent
