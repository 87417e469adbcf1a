"""A machine: GPU memory and compute, the host link, the host and its disk, as one TOML profile.

Rates are what a good kernel or copy reaches, not what the datasheet prints; each profile says where its
values come from. GB and TFLOP are decimal (1 GB/s is one byte a nanosecond), GiB are binary.

A profile that `moe-replay calibrate` wrote also holds what was measured there: of the machine, for people to read, and
of each model that it was measured with, which then counts instead of the rates (`sim.profiles.measured`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sim import profiles
from sim.profiles import measured
from sim.profiles.measured import MeasuredModel
from sim.profiles.model_profile import ModelProfile
from sim.quantities import SLOWEST_GB_PER_S
from traces.errors import InputError


def _facts(key: str, value: object) -> dict[str, Any]:
    """Anything, as a table."""
    if isinstance(value, dict):
        return value
    raise InputError(f"{key}: must be a table, headed [calibration]")


@dataclass(frozen=True)
class Hardware:
    """One GPU, one link."""

    name: str
    title: str
    link_bandwidth_gb_per_s: float
    link_latency_us: float = field(metadata=profiles.MAY_BE_ZERO)  # of one transfer, whatever its size
    memory_gib: float
    memory_bandwidth_gb_per_s: float
    compute_tflop_per_s: float  # bf16, dense
    launch_us: float = field(metadata=profiles.MAY_BE_ZERO)  # of one kernel
    framework_us_per_layer: float = field(metadata=profiles.MAY_BE_ZERO)
    host_compute_tflop_per_s: float
    host_memory_bandwidth_gb_per_s: float
    disk_bandwidth_gb_per_s: float
    disk_latency_us: float = field(metadata=profiles.MAY_BE_ZERO)
    host_memory_gib: float = field(default=0.0, metadata=profiles.MAY_BE_ZERO)  # 0: not stated
    host_expert_share: float = 0.73  # of host memory's bandwidth, at which its cores read the experts that they compute
    host_hop_us: float = field(default=30.0, metadata=profiles.MAY_BE_ZERO)  # activations there and back, once an event
    framework_us_per_expert: float = field(default=0.0, metadata=profiles.MAY_BE_ZERO)  # computed on the GPU
    framework_us_per_token: float = field(default=0.0, metadata=profiles.MAY_BE_ZERO)  # once a step
    calibration: Mapping[str, Any] = field(default_factory=dict, hash=False)
    measured: tuple[MeasuredModel, ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        for key in ("link_bandwidth_gb_per_s", "disk_bandwidth_gb_per_s"):
            if getattr(self, key) < SLOWEST_GB_PER_S:
                raise InputError(f"{key} is below {SLOWEST_GB_PER_S}: no link and no disk is so slow")

    @property
    def host_expert_bandwidth_gb_per_s(self) -> float:
        """At which the host reads the experts that it computes."""
        return self.host_memory_bandwidth_gb_per_s * self.host_expert_share

    def measured_with(self, profile: ModelProfile) -> MeasuredModel | None:
        """What was measured with that model here, if it was, with experts of that size, all of one."""
        if profile.differing_bytes:
            return None
        asked = profile.name, profile.expert_bytes
        return next((each for each in self.measured if (each.model, each.expert_bytes) == asked), None)


def hardware(text: str) -> Hardware:
    """The shipped profile of that name, or the TOML file at that path; InputError where it cannot be used."""
    path = profiles.find("hardware", "hardware", text)
    machine = profiles.read(Hardware, path, {Mapping[str, Any]: _facts, tuple[MeasuredModel, ...]: measured.read})
    if machine.link_bandwidth_gb_per_s > machine.memory_bandwidth_gb_per_s:
        raise InputError(f"{path}: link_bandwidth_gb_per_s is above memory_bandwidth_gb_per_s")
    if machine.host_expert_share > 1:
        raise InputError(f"{path}: host_expert_share {machine.host_expert_share} is a share, at most 1")
    return machine
