"""The host store: every expert's weights in host memory, one contiguous 256-byte-aligned buffer each.

Anonymous memory in slabs of about 1 GiB, huge pages advised, first touched by several threads: what can be
registered with a driver at its true size. Contents are stamps: expert e holds the window of one long random sequence
that starts at e * 64 bytes, so any slot can be checked against its expert, and nothing is ever zero. Where host
memory is short of the model, experts e, e + N, e + 2N, ... share a buffer (`--host-dedup N`): the same bytes are moved,
but the host's caches see fewer of them, which every result states.
"""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from sim.quantities import show_bytes
from traces.errors import InputError

Bytes = NDArray[np.uint8]

ALIGNMENT = 256
SLAB_BYTES = 1 << 30
STAMP_BYTES = 64
RESERVE_BYTES = 512 << 20
"""Host memory left to everything else."""


class HostStore:
    """`distinct` buffers of `expert_bytes`, serving `total` experts. InputError where memory does not suffice.

    `beside_bytes` of the same memory are going to be taken for something else, named `beside`.
    """

    def __init__(
        self,
        total: int,
        expert_bytes: int,
        dtype: torch.dtype,
        seed: int,
        distinct: int | None = None,
        beside: str = "",
        beside_bytes: float = 0,
    ) -> None:
        self.distinct = total if distinct is None else distinct
        if not 1 <= self.distinct <= total:
            raise InputError(f"--host-dedup {distinct}: a model of {total} experts has 1 to {total} host buffers")
        self.expert_bytes = expert_bytes
        self.stride = -(-expert_bytes // ALIGNMENT) * ALIGNMENT
        needed = f"a host store of {self.distinct} of {total} experts"
        advice = "--host-dedup N shares N buffers between all experts"
        if beside_bytes:
            needed += f", beside {beside} of {show_bytes(beside_bytes)},"
            advice += ", a smaller --cache-size makes do with less"
        require_host_memory(self.nbytes + beside_bytes, needed, advice)
        per_slab = max(1, SLAB_BYTES // self.stride)
        self._per_slab = per_slab
        counts = [min(per_slab, self.distinct - first) for first in range(0, self.distinct, per_slab)]
        try:
            self.slabs = [_anonymous(count * self.stride) for count in counts]
        except (OSError, MemoryError) as error:
            raise InputError(
                f"no host memory for {show_bytes(self.distinct * self.stride)} of experts: {error}"
            ) from None
        self._fill(dtype, seed)

    def __getitem__(self, expert: int) -> Bytes:
        """The buffer that serves `expert`: uint8[expert_bytes]."""
        slab, place = divmod(expert % self.distinct, self._per_slab)
        return self.slabs[slab][place * self.stride : place * self.stride + self.expert_bytes]

    @property
    def nbytes(self) -> int:
        """Of all buffers."""
        return self.distinct * self.stride

    def holds(self, expert: int, content: Bytes) -> bool:
        """Whether `content` is `expert`, to the byte."""
        return np.array_equal(self[expert], content)

    def _fill(self, dtype: torch.dtype, seed: int) -> None:
        """Normal numbers of a size that keeps activations finite, in windows that differ by expert."""
        length = self.expert_bytes + self.distinct * STAMP_BYTES
        rng = np.random.default_rng(seed)
        numbers = rng.standard_normal(-(-length // dtype.itemsize), dtype=np.float32)
        numbers *= 0.02
        sequence = torch.from_numpy(numbers).to(dtype).view(torch.uint8).numpy()

        def write(expert: int) -> None:
            start = expert * STAMP_BYTES
            np.copyto(self[expert], sequence[start : start + self.expert_bytes])

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(threads.map(write, range(self.distinct)))


def _anonymous(size: int) -> Bytes:
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def require_host_memory(needed_bytes: float, what: str, advice: str) -> None:
    """InputError before the system runs out of memory, which would end the process without a word."""
    free = available_memory_bytes()
    if free is not None and needed_bytes > free - RESERVE_BYTES:
        raise InputError(
            f"{what} needs {show_bytes(needed_bytes)}, but {show_bytes(free)} of host memory are free: {advice}"
        )


def available_memory_bytes() -> int | None:
    """What may still be allocated here without swapping, limits of the control group included; None if unknown."""
    known = []
    try:
        system = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        known.append(int(system["MemAvailable"].split()[0]) * 1024)
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            used = int((group / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            known.append(int(limit) - used)
    except (OSError, ValueError, KeyError):
        pass
    return min(known, default=None)
