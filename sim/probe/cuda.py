"""What the link to a CUDA GPU carries from pinned memory: measured through the driver, so that nothing is installed.

Source: NVIDIA's CUDA driver API, "Memory Management". The GPU is the one that CUDA numbers first.
"""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

BYTES = 256 << 20
PASSES = 5
NAMES = ("libcuda.so.1", "nvcuda.dll")


@contextmanager
def copies() -> Iterator["Copies | None"]:
    """Yield what copies to the GPU; None where there is no CUDA GPU, or no memory for a copy."""
    opened = None
    for name in NAMES:
        with suppress(OSError):
            opened = Copies(ctypes.CDLL(name))
            break
    try:
        yield opened
    finally:
        if opened:
            opened.close()


class Copies:
    """A buffer of pinned memory and one of the GPU's."""

    def __init__(self, cuda: Any) -> None:
        self._cuda, self._device, self._context = cuda, ctypes.c_int(), ctypes.c_void_p()
        self._host, self._gpu = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuMemHostAlloc", ctypes.byref(self._host), ctypes.c_size_t(BYTES), 0)
        self._call("cuMemAlloc_v2", ctypes.byref(self._gpu), ctypes.c_size_t(BYTES))
        ctypes.memset(self._host, 1, BYTES)

    def gb_per_s(self) -> float:
        """Return the rate of a large copy to the GPU: the median of a few."""
        self.copy()
        return median(BYTES / self.copy() / 1e9 for _ in range(PASSES))

    def copy(self) -> float:
        """Return the seconds of a copy; from any thread."""
        self._call("cuCtxSetCurrent", self._context)
        began = time.perf_counter()
        self._call("cuMemcpyHtoD_v2", self._gpu, self._host, ctypes.c_size_t(BYTES))
        return time.perf_counter() - began

    def close(self) -> None:
        self._call("cuMemFree_v2", self._gpu)
        self._call("cuMemFreeHost", self._host)
        self._call("cuDevicePrimaryCtxRelease_v2", self._device)

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._cuda, name)(*arguments):
            raise OSError(f"{name} ended with status {status}")
