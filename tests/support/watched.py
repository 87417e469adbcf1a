"""Devices on real memory and streams that check every submission and completion."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from replay.devices.cpu import CpuDevice
from replay.devices.cuda import CudaDevice
from tests.support.devices import Watch, Watching


class WatchedCpu(Watching, CpuDevice):
    """`cpu`, and `disk`."""

    store: Any  # a HostStore, or an ExpertFile


class WatchedCuda(Watching, CudaDevice):
    """`cuda`."""


Watched = TypeVar("Watched", WatchedCpu, WatchedCuda)


@contextmanager
def watched(device: Watched, watch: Watch) -> Iterator[Watched]:
    """Yield a device that tells `watch`, and close it; what it has computed must be finite."""
    device.watch, device.tail_bytes = watch, watch.tail_bytes
    try:
        yield device
        assert device._network.finite()
    finally:
        device.close()
