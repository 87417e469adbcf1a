"""Host memory registered with the CUDA driver where it is, at its true size.

Not torch's pinned allocator, which rounds up to powers of two. Once registered, copies from it run beside the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from replay.device_choice import REQUIRE
from sim.quantities import show_bytes
from traces.errors import InputError

if TYPE_CHECKING:
    from replay.devices.gpu import Gpu
    from replay.devices.store import HostMemory


@contextmanager
def pinned(memory: "HostMemory", pin: str, gpu: "Gpu") -> Iterator[bool]:
    """Register all slabs, and give them back however this ends, unless the GPU is stuck; yields whether they are.

    Where the driver refuses one: InputError, or with best effort none is registered and copies are slower.
    """
    registered = 0
    try:
        for slab in memory.slabs:
            refused = gpu.register(slab)
            if refused and pin == REQUIRE:
                raise InputError(
                    f"the driver refused to pin host memory (CUDA error {refused}) after {registered} of "
                    f"{len(memory.slabs)} slabs, {show_bytes(memory.nbytes)} in all: raise the limit of locked memory, "
                    "share buffers with --host-dedup, or continue without with --pin best-effort"
                )
            if refused:
                break
            registered += 1
        if registered < len(memory.slabs):
            registered = _unregister(memory, registered, gpu)
        yield registered > 0
    finally:
        _unregister(memory, registered, gpu)


def _unregister(memory: "HostMemory", registered: int, gpu: "Gpu") -> int:
    if not gpu.is_stuck:
        for slab in memory.slabs[:registered]:
            gpu.unregister(slab)
    return 0
