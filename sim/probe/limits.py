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

MEMORY = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""By version: a group's limit, what it uses, and what of that the system gives back."""


def memory_limit() -> int | None:
    """Return the lowest limit in bytes of the groups that this process is in."""
    return min((limit for limit, _ in _memory()), default=None)


def available_memory_bytes() -> int:
    """Return the bytes that may be allocated without swapping."""
    free: int = psutil.virtual_memory().available
    return min([free, *(limit - used for limit, used in _memory())])


def cpu_quota() -> float | None:
    """Return how many processors' time this process may use."""
    shares = []
    for version, group in _groups("cpu"):
        with suppress(OSError, ValueError):
            stated = (group / ("cpu.max" if version == 2 else "cpu.cfs_quota_us")).read_text().split()
            shares.append(int(stated[0]) / (int(stated[1]) if len(stated) > 1 else 100_000))
    return min((share for share in shares if share > 0), default=None)


def _memory() -> Iterator[tuple[int, int]]:
    """Yield the limit of each group that has one, and what it uses for good."""
    for version, group in _groups("memory"):
        limit, usage, reclaimable = MEMORY[version]
        with suppress(OSError, ValueError):  # "max" is no limit
            if (most := int((group / limit).read_text())) < UNLIMITED:
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                yield most, int((group / usage).read_text()) - int(stat.get(reclaimable, 0))


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """Yield this process's groups and all above them, with the version of each."""
    with suppress(OSError):
        for line in GROUPS.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            version, top = (1, ROOT / controller) if controllers else (2, ROOT)
            group = top / path.lstrip("/")
            while group.is_relative_to(top):
                yield version, group
                group = group.parent
