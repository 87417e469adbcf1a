"""Facts about the machine that a result was measured on."""

import platform
import subprocess
from pathlib import Path

import torch

from replay.store import HostStore
from sim.results import Row


def facts(device: str, store: HostStore) -> Row:
    """Columns of a replay's row that the machine decides."""
    cuda = device == "cuda"
    return {
        "device_name": torch.cuda.get_device_name() if cuda else _processor(),
        "driver": _driver() if cuda else None,
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "host_pinned": cuda,
        "host_experts": store.distinct,
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return answer[0] if answer else None
