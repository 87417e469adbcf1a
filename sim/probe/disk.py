"""What a disk reaches in reads of the sizes of experts, past the system's page cache (O_DIRECT, F_NOCACHE)."""

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import numpy as np
import psutil

from traces.errors import InputError

FILE_BYTES = 2 << 30
SIZES = (256 << 10, 1 << 20, 4 << 20, 16 << 20)
LANES = (1, 4)
READING_S = 1.5


@dataclass(frozen=True)
class Reads:
    """GB/s of reads of so many bytes at random places, so many at a time."""

    size: int
    lanes: int
    gb_per_s: float


def reads(folder: Path) -> list[Reads]:
    """Return the rates of a file that is written into a folder and removed. Raise InputError where that cannot be."""
    size = min(FILE_BYTES, psutil.disk_usage(str(folder)).free // 4) // max(SIZES) * max(SIZES)
    if size < 4 * max(SIZES):
        raise InputError(f"{folder} has no room for a file to read: name another --folder")
    with NamedTemporaryFile(dir=folder, prefix="moe-sim-probe-") as file:
        block = np.random.default_rng(0).integers(0, 256, max(SIZES), np.uint8)
        for number in range(size // len(block)):
            block[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)  # no two alike
            file.write(block.data)
        file.flush()
        os.fsync(file.fileno())
        opened, past_cache = open_direct(Path(file.name))
        try:
            if not past_cache:
                raise InputError(f"the page cache of {folder} cannot be passed: name another --folder")
            return [Reads(each, lanes, _rate(opened, size, each, lanes)) for each in SIZES for lanes in LANES]
        finally:
            os.close(opened)


def kind_of(folder: Path) -> str:
    """Return what kind of disk a folder lies on: NVMe, SSD, hard disk, virtual; empty where nothing says it."""
    with suppress(OSError, AttributeError):
        block = _block(folder)
        if block.name.startswith(("vd", "xvd", "loop", "dm-", "md")):
            return "virtual disk"
        if (block / "queue" / "rotational").read_text().strip() == "1":
            return "hard disk"
        return "NVMe disk" if block.name.startswith("nvme") else "SSD"
    return ""


def read_ahead_kib(folder: Path) -> int | None:
    """Return how much the system reads of a mapped file at a missing page; None where nothing says it."""
    with suppress(OSError, AttributeError, ValueError):
        return int((_block(folder) / "queue" / "read_ahead_kb").read_text()) or None
    return None


def _block(folder: Path) -> Path:
    """Return the device that a folder lies on. Raise OSError where there is none."""
    device = os.stat(folder).st_dev
    place = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve(strict=True)
    return place if (place / "queue").is_dir() else place.parent


def _rate(file: int, size: int, each: int, lanes: int) -> float:
    places = np.random.default_rng(each + lanes).permutation(size // each)
    until = time.perf_counter() + READING_S

    def read(lane: int) -> int:
        buffer, done = mmap.mmap(-1, each), 0  # of whole pages, as direct reads need
        for place in places[lane::lanes].tolist():
            done += os.preadv(file, [buffer], place * each)
            if time.perf_counter() > until:
                break
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(lanes) as pool:
        total = sum(pool.map(read, range(lanes)))
    return total / (time.perf_counter() - began) / 1e9


def open_direct(path: Path) -> tuple[int, bool]:
    """Return a file opened for reading, and whether its reads come from the disk, past the system's page cache."""
    with suppress(AttributeError, OSError):  # some systems, and some file systems, know it not
        return os.open(path, os.O_RDONLY | os.O_DIRECT), True
    file = os.open(path, os.O_RDONLY)
    with suppress(ImportError, AttributeError, OSError):  # as macOS does
        import fcntl

        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)  # type: ignore[attr-defined]
        return file, True
    return file, False
