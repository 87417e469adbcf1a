"""A limit of this process's memory by a control group of the memory controller, version 1 or 2.

What a process faults in, the page cache's included, is charged to the group that it is in: so the limit is set around
a run alone, and the page cache gets the bytes that a policy's slots would have.
"""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from replay.devices.expert_file import DirectFile
from replay.devices.store import anonymous
from sim.quantities import show_bytes
from traces.errors import InputError

SLACK_BYTES = 32 << 20
"""Beside the budget, for what the process itself allocates meanwhile."""

READ_BYTES = 16 << 20
"""Of a read, where a whole file is read."""

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextmanager
def page_cache_of(budget_bytes: int, files: Path) -> Iterator[None]:
    """Charge what this process takes from now on to a group of so many bytes; none of the files is in memory then.

    files: a file, or a folder of files. Raise InputError where it may not make a group: that takes root, and a memory
    controller.
    """
    version_2 = (V2 / "cgroup.controllers").exists()
    folder = (V2 if version_2 else V1) / f"moe-replay-{os.getpid()}"
    before = _group(version_2)
    _forget(files)
    limit = folder / ("memory.max" if version_2 else "memory.limit_in_bytes")
    try:
        try:
            folder.mkdir()
            limit.write_text(str(budget_bytes + SLACK_BYTES))
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError as error:
            raise InputError(f"cannot limit memory to {show_bytes(budget_bytes)}: {error}") from error
        yield
    finally:
        with suppress(OSError):
            (before / "cgroup.procs").write_text(str(os.getpid()))
        if not version_2:
            with suppress(OSError):
                (folder / "memory.force_empty").write_text("0")
        with suppress(OSError):
            folder.rmdir()


def _forget(files: Path) -> None:
    """Drop what the page cache holds of them."""
    for path in (each for each in (files.rglob("*") if files.is_dir() else [files]) if each.is_file()):
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _group(version_2: bool) -> Path:
    """Return the folder of the group that this process is in."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, path = line.split(":", 2)
        if (controllers == "") if version_2 else ("memory" in controllers.split(",")):
            return (V2 if version_2 else V1) / path.lstrip("/")
    return V2 if version_2 else V1


def read_through(path: Path) -> None:
    """Read a file whole, as lanes will: what lies below a virtual disk may have kept some of it, or none."""
    memory, at, got = anonymous(READ_BYTES), 0, 1
    with closing(DirectFile(path)) as file:
        while got and at < path.stat().st_size:
            at += (got := file.read_at(memory.data, at))
