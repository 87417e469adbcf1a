"""What the link to a CUDA GPU carries from pinned memory: measured through the driver, so that nothing is installed.

Source: NVIDIA's CUDA driver API, "Memory Management". The GPU is the one that CUDA numbers first.
"""

import ctypes
import time
from contextlib import suppress
from statistics import median
from typing import Any

BYTES = ctypes.c_size_t(256 << 20)
PASSES = 5
NAMES = ("libcuda.so.1", "nvcuda.dll")


def link_gb_per_s() -> float:
    """Return the rate of a large copy to the GPU, the median of a few; 0 without a CUDA GPU or memory for a copy."""
    for name in NAMES:
        with suppress(OSError):
            return _measured(ctypes.CDLL(name))
    return 0.0


def _measured(cuda: Any) -> float:
    def call(name: str, *arguments: Any) -> None:
        if status := getattr(cuda, name)(*arguments):
            raise OSError(f"{name} ended with status {status}")

    def copy() -> float:
        began = time.perf_counter()
        call("cuMemcpyHtoD_v2", gpu, host, BYTES)
        return BYTES.value / (time.perf_counter() - began) / 1e9

    device, context, host, gpu = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemHostAlloc", ctypes.byref(host), BYTES, 0)
    call("cuMemAlloc_v2", ctypes.byref(gpu), BYTES)
    ctypes.memset(host, 1, BYTES.value)
    copy()
    rate = median(copy() for _ in range(PASSES))
    call("cuMemFree_v2", gpu)
    call("cuMemFreeHost", host)
    call("cuDevicePrimaryCtxRelease_v2", device)
    return rate
