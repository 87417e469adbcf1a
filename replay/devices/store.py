"""The host store: every expert's weights in host memory, one contiguous 256-byte-aligned buffer each.

Memory is anonymous, in slabs of about 1 GiB, huge pages advised, first touched by several threads, and filled with
stamps, so that any slot can be checked against its expert. Where memory is short of a model, its experts e, e + N, ...
share a buffer (`--host-dedup N`): the host's caches see fewer of them, which every result states.
"""

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sim.probe.limits import available_memory_bytes
from sim.quantities import show_bytes
from traces.errors import InputError

Bytes = NDArray[np.uint8]

ALIGNMENT = 256
SLAB_BYTES = 1 << 30
STAMP_BYTES = 64
RESERVE_BYTES = 512 << 20  # host memory left to everything else


class ExpertSource(Protocol):
    """Where a link takes experts from."""

    expert_bytes: int  # of one; of the largest where they differ
    stride: int  # bytes of a slot: those of an expert, and what its alignment adds
    distinct: int  # buffers; fewer than experts where these share them

    def bytes_of(self, expert: int) -> int:
        """Return how many bytes of this expert are moved: by default as many as of any other."""
        return self.expert_bytes

    def read(self, expert: int, first: int, last: int, slot: Bytes) -> None:
        """Write an expert's bytes `first` to `last` to their place in its slot, uint8[stride]. Raise InputError."""


class Stamps:
    """Contents of `buffers` random experts of `stride` bytes: bfloat16 numbers, finite as float32 too.

    Windows of one sequence of normal numbers that begin STAMP_BYTES after each other: all differ, none is zero.
    """

    def __init__(self, buffers: int, stride: int, seed: int) -> None:
        numbers = np.random.default_rng(seed).standard_normal((stride + buffers * STAMP_BYTES) // 2 + 1, np.float32)
        bits = (numbers * 0.02).view(np.uint32)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # of halves the even one
        self._sequence = nearest.astype(np.uint16).view(np.uint8)

    def write(self, buffer: int, target: Bytes, /) -> None:
        np.copyto(target, self._sequence[buffer * STAMP_BYTES :][: len(target)])


class HostMemory:
    """`buffers` of `stride` bytes, none across two slabs, filled with bfloat16 numbers; seed None: they are not."""

    def __init__(self, buffers: int, stride: int, seed: int | None) -> None:
        per_slab = max(1, SLAB_BYTES // stride)
        sizes = [min(per_slab, buffers - first) * stride for first in range(0, buffers, per_slab)]
        self.slabs = [anonymous(size) for size in sizes]
        self.nbytes = sum(sizes)
        if seed is not None:
            places = self.cut(stride)
            stamps = Stamps(len(places), stride, seed)
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                list(threads.map(stamps.write, range(len(places)), places))

    def cut(self, stride: int) -> list[Bytes]:
        """Return every buffer of `stride` bytes, none across two slabs."""
        return [slab[at : at + stride] for slab in self.slabs for at in range(0, len(slab) - stride + 1, stride)]


class HostStore:
    """`total` experts of `expert_bytes` over some memory, in `distinct` buffers; None: as many as fit.

    sizes: bytes of each, where they differ; `expert_bytes` is the largest then, and every buffer holds that.
    """

    def __init__(
        self,
        memory: HostMemory,
        total: int,
        expert_bytes: int,
        distinct: int | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.memory = memory
        self.expert_bytes = expert_bytes
        self.stride = stride_of(expert_bytes)
        buffers = memory.cut(self.stride)
        self.distinct = min(total, len(buffers)) if distinct is None else distinct
        self.padded = buffers[: self.distinct]
        """Each buffer with what lies between it and the next one: uint8[stride]."""
        self._experts = [
            self.padded[expert % self.distinct][:size] for expert, size in enumerate(sizes or [expert_bytes] * total)
        ]

    @classmethod
    def of(
        cls, total: int, expert_bytes: int, seed: int, distinct: int | None = None, sizes: Sequence[int] | None = None
    ) -> "HostStore":
        """Return a store for one model, with memory of its own. Raise InputError for more buffers than experts."""
        buffers = total if distinct is None else distinct
        if not 1 <= buffers <= total:
            raise InputError(f"--host-dedup {distinct}: must be 1 to {total}, the number of experts of the model")
        return cls(HostMemory(buffers, stride_of(expert_bytes), seed), total, expert_bytes, buffers, sizes)

    def __getitem__(self, expert: int) -> Bytes:
        """Return the bytes of `expert`, in the buffer that serves it: uint8[bytes_of(expert)]."""
        return self._experts[expert]

    def __len__(self) -> int:
        return len(self._experts)

    def bytes_of(self, expert: int) -> int:
        return len(self._experts[expert])

    def read(self, expert: int, first: int, last: int, slot: Bytes) -> None:
        np.copyto(slot[first:last], self[expert][first:last])

    def holds(self, expert: int, content: Bytes) -> bool:
        """Return whether `content`, uint8[bytes_of(expert)], is `expert`."""
        return np.array_equal(self[expert], content)


def stride_of(expert_bytes: int) -> int:
    return -(-expert_bytes // ALIGNMENT) * ALIGNMENT


def anonymous(size: int) -> Bytes:
    """Return memory that begins at a page, in huge pages where there are some: uint8[size]. Raise MemoryError."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, size, **private)  # shared memory, the default, has no huge pages
    except OSError as error:
        raise MemoryError(f"{show_bytes(size)} cannot be allocated: {error.strerror}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def require_memory(
    needed_bytes: float, what: str, advice: str, reserve_bytes: int = RESERVE_BYTES, gpu_free: int | None = None
) -> None:
    """Raise InputError before the system runs out of memory, which would end the process without a word.

    gpu_free: bytes that are free on the GPU, where they are taken there and nothing is reserved.
    """
    kind, reserved = ("host", reserve_bytes) if gpu_free is None else ("GPU", 0)
    free = available_memory_bytes() if gpu_free is None else gpu_free
    if needed_bytes > free - reserved:
        beside = f" beside {show_bytes(reserved)} for all else" if reserved else ""
        needed = f"{what} needs {show_bytes(needed_bytes)}{beside}"
        raise InputError(f"{needed}, but {show_bytes(free)} of {kind} memory are free: {advice}")
