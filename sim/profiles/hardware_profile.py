"""A machine: GPU memory and compute, the host link, the host and its disk, as one TOML profile.

Rates are what a good kernel or copy reaches, not what the datasheet prints. GB and TFLOP are decimal (1 GB/s is one
byte a nanosecond), GiB are binary. One that `moe-replay calibrate` wrote also holds what was measured there, of the
machine for people to read, and of each model, which then counts instead of the rates (`sim.profiles.measured`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import platformdirs
from msgspec import Meta

from policies.core.systems import Overheads
from sim.catalogue.parts import DISKS, FOLDER, GPUS, HOSTS, LINKS, Gpu, gpu_name, plain, ram_gb_per_s
from sim.profiles.measured import MeasuredModel
from sim.quantities import SLOWEST_GB_PER_S
from traces.errors import InputError, unknown
from traces.models.profile import MOST, ModelProfile, NotNegative, Positive
from traces.shipped import Shipped

Bandwidth = Annotated[float, Meta(ge=SLOWEST_GB_PER_S, le=MOST)]


OWN = platformdirs.user_config_path("moe-expert-cache") / "hardware"
"""Profiles of the user's, by their names as the shipped ones."""

MACHINES = Shipped(FOLDER / "machines", "hardware", OWN)

READ_OF_DATA_SHEET, MULTIPLIED_OF_DATA_SHEET = 0.9, 0.7
"""What good kernels reach of a data sheet's bandwidth and compute: estimates, those of the shipped profiles."""

UNIFIED = 0.75
"""Of unified memory, what a GPU may use: what macOS grants by default on machines of more than 36 GB."""

WHOLE = 2
"""Bytes of a parameter that is not quantised."""

THIS_MACHINE = "this-machine"


@dataclass(frozen=True)
class Hardware:
    """One GPU, one link."""

    name: str
    title: str
    link_bandwidth_gb_per_s: Bandwidth
    link_latency_us: NotNegative  # of one transfer, whatever its size
    memory_gib: Positive
    memory_bandwidth_gb_per_s: Positive
    compute_tflop_per_s: Positive  # bf16, dense
    launch_us: NotNegative  # of one kernel
    framework_us_per_layer: NotNegative
    host_compute_tflop_per_s: Positive
    host_memory_bandwidth_gb_per_s: Positive
    disk_bandwidth_gb_per_s: Bandwidth
    disk_latency_us: NotNegative
    host_memory_gib: NotNegative = 0.0  # 0: not stated
    read_ahead_kib: Positive = 128.0  # that are read of a mapped file at a missing page: Linux's default
    page_fault_us: NotNegative = 120.0
    """Until such a read has come, its bytes aside: chosen. 150 fit a laptop of the back-test, 280 a run on a virtual
    disk (docs/planner.md); speeds that owners of fast disks report ask for less, and were not verified."""
    host_expert_share: Annotated[float, Meta(gt=0, le=1)] = 0.73
    """Of host memory's bandwidth, at which its cores read the experts that they compute."""
    host_hop_us: NotNegative = 30.0  # activations there and back, once an event
    host_us_per_layer: NotNegative = 20.0  # the framework's, of a layer that the host computes whole
    host_and_link: Positive = 1.05  # what both read of host memory at once, of what the faster one reads alone
    framework_us_per_expert: NotNegative = 0.0  # computed on the GPU
    framework_us_per_token: NotNegative = 0.0  # once a step
    calibration: Mapping[str, Any] = field(default_factory=dict, hash=False)
    measured: tuple[MeasuredModel, ...] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        if len({(each.model, each.expert_bytes, each.layer_bytes) for each in self.measured}) < len(self.measured):
            raise InputError("measured: a model with experts of the same sizes stands there twice")

    @property
    def host_expert_bandwidth_gb_per_s(self) -> float:
        return self.host_memory_bandwidth_gb_per_s * self.host_expert_share

    @property
    def host_beside_link_gb_per_s(self) -> float:
        """Return what the host reads of its memory while copies cross the link."""
        faster = max(self.host_memory_bandwidth_gb_per_s, self.link_bandwidth_gb_per_s)
        left = faster * self.host_and_link - self.link_bandwidth_gb_per_s
        return min(self.host_expert_bandwidth_gb_per_s, max(left, SLOWEST_GB_PER_S))

    def under(self, overheads: Overheads) -> "Hardware":
        """Return the machine as a framework reaches it, by its rates alone: what was measured is of no framework."""
        return replace(
            self,
            link_bandwidth_gb_per_s=self.link_bandwidth_gb_per_s * overheads.link,
            link_latency_us=self.link_latency_us + overheads.us_per_miss,
            disk_bandwidth_gb_per_s=self.disk_bandwidth_gb_per_s * overheads.disk,
            host_compute_tflop_per_s=self.host_compute_tflop_per_s * overheads.host_kernels,
            host_expert_share=self.host_expert_share * overheads.host_kernels,
            host_hop_us=self.host_hop_us if overheads.hop_us is None else overheads.hop_us,
            framework_us_per_layer=self.framework_us_per_layer + overheads.us_per_layer,
            framework_us_per_expert=self.framework_us_per_expert + overheads.us_per_expert,
            framework_us_per_token=self.framework_us_per_token + overheads.us_per_token,
            measured=(),
        )

    def dequantising(self, model: ModelProfile) -> "Hardware":
        """Return the machine where each expert of a quantised model is written in 16 bits and read again first."""
        if model.expert_bytes_per_parameter >= WHOLE or not self.memory_bandwidth_gb_per_s:
            return self
        moved_us = 2 * WHOLE * model.expert_parameters / self.memory_bandwidth_gb_per_s / 1e3
        return replace(self, framework_us_per_expert=self.framework_us_per_expert + moved_us)

    def on_host(self) -> "Hardware":
        """Return a machine whose GPU is the host's cores, for what they compute of whole layers: no launches."""
        return replace(
            self,
            memory_bandwidth_gb_per_s=self.host_expert_bandwidth_gb_per_s,
            compute_tflop_per_s=self.host_compute_tflop_per_s,
            launch_us=0.0,
            framework_us_per_layer=self.host_us_per_layer,
            framework_us_per_expert=0.0,
            measured=(),
        )

    def from_disk(self) -> "Hardware":
        """Return the machine with its disk in place of its link: experts are never in host memory."""
        return replace(
            self,
            link_bandwidth_gb_per_s=self.disk_bandwidth_gb_per_s,
            link_latency_us=self.disk_latency_us,
            measured=(),
        )

    def mapped(self, model: ModelProfile) -> "Hardware":
        """Return the machine whose disk is read through mmap, one window of read-ahead after another."""
        window = self.read_ahead_kib * 1024
        ns = self.page_fault_us * 1e3 + window / self.disk_bandwidth_gb_per_s
        return replace(self, disk_bandwidth_gb_per_s=window / ns / self.mapped_more(model))

    def mapped_more(self, model: ModelProfile) -> float:
        """Return how many times an expert's bytes are read through mmap, and kept: with a window around each matrix."""
        return 1 + self.read_ahead_kib * 1024 * model.expert_matrices / model.expert_bytes

    def measured_with(self, profile: ModelProfile) -> MeasuredModel | None:
        """Return what was measured with that model here, if it was, with experts of those sizes."""
        wanted = profile.name, profile.expert_bytes, profile.differing_bytes
        known = {(each.model, each.expert_bytes, each.layer_bytes): each for each in self.measured}
        return known.get(wanted)


def profile_name(text: str) -> str:
    """Return the name of the profile, or of the GPU of the catalogue, that is spelled so, else the text."""
    if text in MACHINES.names() or text.endswith(".toml"):
        return text
    named = (name for name in MACHINES.names() if plain(text) in (plain(name), plain(_title(name))))
    return next(named, "") or gpu_name(text) or text


def absolute(text: str, base: Path = Path()) -> str:
    """Return the name of a profile or of a GPU as the catalogue has it, and the absolute path of a file."""
    name = profile_name(text)
    return name if name in GPUS else MACHINES.absolute(name, base)


def gpu_of(text: str) -> Gpu:
    """Return the data sheet of a GPU, by its name or that of its machine. Raise InputError for an unknown one."""
    name = profile_name(text)
    titles = [name, _title(name)] if name in MACHINES.names() else []
    known = next(filter(None, map(gpu_name, [text, *titles])), "")
    if not known:
        raise unknown("gpu", text, GPUS)
    return GPUS[known]


def _title(name: str) -> str:
    return MACHINES.read(Hardware, MACHINES.find(name)).title


def hardware(text: str) -> Hardware:
    """Return a machine: the profile of that name or title, the TOML file at that path, or a usual one with that GPU.

    Raise InputError for any other text.
    """
    name = profile_name(text)
    if name in GPUS:
        return _around(name, GPUS[name])
    machine = MACHINES.read(Hardware, path := MACHINES.find(name))
    if machine.link_bandwidth_gb_per_s > machine.memory_bandwidth_gb_per_s:  # as units taken for one another make it
        raise InputError(f"{path}: link_bandwidth_gb_per_s is above memory_bandwidth_gb_per_s")
    return machine


def _around(name: str, gpu: Gpu) -> Hardware:
    """Return a usual machine with a GPU, of which kernels reach what the shipped profiles state."""
    host, link = HOSTS["server" if gpu.kind == "hbm" else "desktop"], LINKS.get(gpu.link)
    memory = gpu.memory_gib or host.memory_gib * UNIFIED
    assumed = f"in a usual machine with {host.memory_gib:g} GiB"
    return Hardware(
        name=name,
        title=f"{name} (data sheet), {assumed}",
        link_bandwidth_gb_per_s=link.gb_per_s if link else gpu.gb_per_s * READ_OF_DATA_SHEET,
        link_latency_us=8.0,
        memory_gib=memory,
        memory_bandwidth_gb_per_s=gpu.gb_per_s * READ_OF_DATA_SHEET,
        compute_tflop_per_s=gpu.tflop_per_s * MULTIPLIED_OF_DATA_SHEET,
        launch_us=2.5,
        framework_us_per_layer=20.0,
        host_compute_tflop_per_s=host.compute_tflop_per_s,
        host_memory_bandwidth_gb_per_s=host.gb_per_s
        or (ram_gb_per_s(link.ram) * host.of_peak if link else gpu.gb_per_s * READ_OF_DATA_SHEET),
        host_memory_gib=host.memory_gib,
        disk_bandwidth_gb_per_s=DISKS[host.disk],
        disk_latency_us=100.0,
    )
