"""Facts about the machine that a result was measured on."""

import platform
import subprocess
from pathlib import Path

import torch

from replay.devices.gpu import Gpu
from replay.devices.store import ExpertSource
from sim.results.metrics import Row


def facts(gpu: Gpu | None, store: ExpertSource) -> Row:
    """Return the columns of a replay's row that the machine decides."""
    return {
        "device_name": gpu.name if gpu else _processor(),
        "driver": driver() if gpu else None,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "host_experts": store.distinct,
    }


def machine_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else _processor()


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def driver() -> str | None:
    """Return the version of the GPU's driver; None if it is unknown."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None
