"""A minute's measurement of this machine as a hardware profile, which sweeps, plans and the back-test take."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from timeit import repeat
from typing import Any

import numpy as np
import psutil
import tomli_w

from sim.catalogue.parts import Gpu, thread_gflop_per_s
from sim.prediction.machine import cpu_class
from sim.prediction.tables import FACTORS
from sim.probe import cuda, disk, stream
from sim.probe.cores import core_classes, processor
from sim.probe.detection import Facts
from sim.profiles.hardware_profile import gpu_of

READ = 4 << 20, 4
"""The size and number of reads whose rate is the disk's: those of experts of usual models."""

COPIED_BYTES = 256 << 20


@dataclass(frozen=True)
class Probe:
    """Rates in GB/s. link: of copies to a CUDA GPU; 0: there is none."""

    memory: list[stream.Rate]
    copy: float  # of a thread, from memory to memory
    disk: list[disk.Reads]
    link: float

    @property
    def triad(self) -> float:
        """Of the fastest cores together."""
        first = self.memory[0].cores
        return max(each.gb_per_s for each in self.memory if each.cores == first)

    @property
    def disk_gb_per_s(self) -> float:
        return next(each.gb_per_s for each in self.disk if (each.size, each.lanes) == READ)


def measured(folder: Path, say: Callable[[str], None]) -> Probe:
    """Measure memory, link and the disk of a folder. Raise InputError where that cannot be read."""
    say("memory")
    memory, copy = stream.by_threads(core_classes()), _copy()
    say("the link to the GPU")
    link = cuda.link_gb_per_s()
    say("the disk")
    return Probe(memory, copy, disk.reads(folder), link)


def profile(probe: Probe, facts: Facts, was_busy: bool) -> str:
    """Return the hardware profile as TOML. facts: what was detected, as options of the planner."""
    plan = {name: fact.value for name, fact in facts.items() if fact.value is not None}
    plan |= {"cpu_bandwidth": f"{probe.triad:.4g}GB/s measured", "disk": f"{probe.disk_gb_per_s:.4g}GB/s measured"}
    if probe.link:
        plan["link"] = f"{probe.link:.4g}GB/s"
    total = psutil.virtual_memory().total / 2**30
    sheet = gpu_of(plan["gpu"].split(",")[0]) if "gpu" in plan else Gpu(0.0)
    gpu = FACTORS.gpu[sheet.kind]
    thread = thread_gflop_per_s(plan.get("cpu", "")) or cpu_class(probe.triad).gflop_per_s_per_thread
    cores = plan["threads"] * thread / 1e3
    scalars: dict[str, Any] = {
        "title": ", ".join(filter(None, (plan.get("gpu", ""), processor()))) or "this machine",
        "link_bandwidth_gb_per_s": probe.link or probe.copy,
        "link_latency_us": FACTORS.link_latency_us,
        "memory_gib": sheet.memory_gib or total,
        "memory_bandwidth_gb_per_s": sheet.gb_per_s * gpu.read_of_data_sheet or max(probe.triad, probe.copy),
        "compute_tflop_per_s": sheet.tflop_per_s or cores,
        "launch_us": gpu.launch_us,
        "framework_us_per_layer": 0.0 if sheet.gb_per_s else FACTORS.cpu_us_per_layer,
        "host_us_per_layer": FACTORS.cpu_us_per_layer,
        "host_compute_tflop_per_s": cores,
        "host_memory_bandwidth_gb_per_s": probe.triad,
        "host_memory_gib": total,
        "disk_bandwidth_gb_per_s": probe.disk_gb_per_s,
        "disk_latency_us": FACTORS.disk_latency_us,
    }
    calibration = {
        "date": date.today().isoformat(),
        "busy": was_busy,
        "plan": plan,
        "memory": [asdict(each) for each in probe.memory],
        "disk": [asdict(each) for each in probe.disk],
    }
    head = (
        "# Written by moe-sim probe. Measured: memory (STREAM Triad), link (without a GPU a copy in memory), disk\n"
        "# (direct reads). The rest is of data sheets and of the back-test's general factors.\n"
    )
    return head + tomli_w.dumps({**scalars, "calibration": calibration})


def _copy() -> float:
    """Return GB/s of a copy in memory by one thread: bytes copied, read once and written once."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)
    return COPIED_BYTES / min(repeat(lambda: np.copyto(target, source), number=1)) / 1e9
