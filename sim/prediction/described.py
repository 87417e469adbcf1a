"""What a prediction is made for: a machine, a model, and a setting of both, as far as they are known.

0 (or -1, of what may be 0) stands for what is not stated. docs/backtest.md documents the fields, which are keys of its
files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from msgspec import Meta

from sim.catalogue.parts import LINKS, Gpu
from traces.errors import InputError
from traces.typed import Natural, Positive

UNITS = {
    "speed": {"tok/s": 1.0},
    "latency": {"s": 1.0, "ms": 1e-3},
    "hit rate": {"share": 1.0, "%": 0.01},
    "bytes read": {"B": 1.0, "MB": 1e6, "MiB": 2.0**20, "GB": 1e9, "GiB": 2.0**30},
}
"""Metrics, with their units in the metric's own: tokens/s, seconds a token, share of lookups, bytes a token."""

TIMED = ("speed", "latency")

Number = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class Assumed:
    """A fact that is not stated.

    what: the fact with its value; option: what states it; low, high: fields of a machine or a setting as they may be.
    """

    what: str
    option: str
    low: Mapping[str, Any]
    high: Mapping[str, Any]

    @staticmethod
    def times(what: str, option: str, field: str, value: float, between: tuple[float, float]) -> "Assumed":
        low, high = ({field: value * factor} for factor in between)
        return Assumed(what, option, low, high)


@dataclass(frozen=True)
class Machine:
    """What is known of a machine, as its data sheets or its owner's measurements state it."""

    name: str
    title: str = ""
    profile: str = ""  # a hardware profile, for what is not stated here
    gpu: str = ""  # as in gpus.toml: "RTX 3090", for its data sheet and its link
    gpus: tuple[Gpu, ...] = ()  # with their memories, in the order in which layers are split over them
    host_memory: Natural = 0  # bytes
    unified: bool = False  # GPU and CPU share host_memory, of which the GPU may use a part
    gpu_data_sheet_gb_per_s: Number = 0.0
    gpu_read_gb_per_s: Number = 0.0  # a large read, measured
    gpu_gb_per_s: Number = 0.0  # what its kernels reach
    gpu_tflop_per_s: Number = 0.0
    launch_us: Number = 0.0
    ram: str = ""  # channels and kind, "2 x DDR5-6000", for the peak
    host_peak_gb_per_s: Number = 0.0  # channels x MT/s x 8 bytes, of the sockets that a run uses
    host_stream_gb_per_s: Number = 0.0  # STREAM Triad or the like, measured
    host_gb_per_s: Number = 0.0  # what its expert kernels reach
    host_experts_of_stream: Number = 0.0
    host_threads: Natural = 0
    host_layout: Literal["", "hybrid", "numa"] = ""  # threads on cores of two kinds, or memory of several nodes
    host_and_link_gb_per_s: Number = 0.0  # CPU and link at once, measured
    cpu: str = ""  # its name, for what a thread multiplies (cpus.toml); else the one in the title
    host_gflop_per_s_per_thread: Number = 0.0
    hop_us: Number = -1.0
    cpu_us_per_layer: Number = -1.0
    link: str = ""  # as in factors.toml: "PCIe 4.0 x16"
    link_gb_per_s: Number = 0.0
    link_latency_us: Number = -1.0
    disk_peak_gb_per_s: Number = 0.0  # of its data sheet
    disk_gb_per_s: Number = 0.0  # large reads, measured
    disk_latency_us: Number = -1.0
    read_ahead_kib: Natural = 0  # that the system reads of a mapped file at a missing page; 0: as is usual
    page_fault_us: Number = 0.0  # until such a read has come, its bytes aside; 0: as is usual
    us_per_layer: Number = -1.0  # of the framework; -1: as its system's
    us_per_expert: Number = -1.0
    us_per_token: Number = -1.0
    fit_parameter: str = ""  # the one that rows with fit = true fit
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # of the keys above
    assumed: tuple[Assumed, ...] = field(default=(), hash=False)

    @property
    def gpu_memory(self) -> int:
        """Bytes of all GPUs."""
        return sum(int(gpu.memory_gib * 2**30) for gpu in self.gpus)

    @property
    def link_copies(self) -> float:
        """GB/s of copies over the link, as stated, else of the link of that name."""
        return self.link_gb_per_s or (LINKS[self.link].gb_per_s if self.link else 0.0)

    @property
    def disk_reads(self) -> float:
        """GB/s of the disk, measured, else of its data sheet."""
        return self.disk_gb_per_s or self.disk_peak_gb_per_s

    @property
    def host_reads(self) -> float:
        """GB/s of host memory, measured, else its peak."""
        return self.host_stream_gb_per_s or self.host_peak_gb_per_s


@dataclass(frozen=True)
class Model:
    """What is known of a model's sizes beyond its profile; without a profile, all of its shape."""

    name: str
    profile: str = ""  # a model profile; else the one of that name
    precision: str = ""  # of the experts; beside `file_gb` only how fast it is multiplied
    dense_precision: str = ""  # of all else
    file_gb: Number = 0.0  # of the whole file, over all its parameters
    layers: Natural = 0
    experts: Natural = 0
    top_k: Natural = 0
    expert_bytes: Natural = 0
    expert_mb: Number = 0.0
    layer_expert_bytes: tuple[Positive, ...] = ()  # of each layer, where they differ
    dense_bytes: Natural = 0  # that a token reads of all layers, beside routed experts
    head_bytes: Natural = 0  # of the vocabulary matmul
    kv_bytes_per_token: Number = 0.0  # of all layers
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Setting:
    """How it was run. Where misses are computed and what is cached: one of all_on, host_layers,
    host_share, cpu_layers, policy."""

    all_on: Literal["", "gpu", "cpu"] = ""  # every expert is computed there
    host_layers: Natural = -1  # whose experts the CPU computes
    host_share: Share = -1.0  # of the layers, likewise
    cpu_layers: Natural = -1  # that the CPU computes whole, attention included (`-ngl` keeps the others on the GPU)
    policy: str = ""  # as `moe-sim run --policy` takes it
    cache: str = ""  # 25%, 64 or 8GiB of experts; 0: none
    slots_per_layer: Natural = 0  # in place of `cache`
    misses_from: Literal["", "host", "disk"] = ""
    host_cache: str = ""  # experts in host memory, over the disk
    hit_rate: Share = -1.0  # measured; the routing is made to reach it
    like: str = ""  # model of data/reuse.toml whose routing stands in; else the nearest one
    misses: Number = 1.0  # times those of the stand-in
    trace: str = ""  # path or name of the very routing
    prompts: Literal["counted", "played", "decoded"] = "counted"  # of the trace, see docs/backtest.md
    requests: Natural = 0  # of the trace, the first ones; 0: all
    tokens: Positive = 48  # decoded
    context: Natural = 0
    batch: Positive = 1
    copy_back: bool = False  # a victim is copied to host memory before another takes its place
    whole_layers: bool = False  # a layer is copied with all its experts
    blocking: bool = False  # no expert of a layer is computed before all have arrived
    mmap: bool = False  # the disk is read through the page cache
    free_copies: bool = False  # copies into the cache run beside and take no time

    @property
    def place(self) -> str:
        """Return which key states where experts are. Raise InputError unless one does."""
        places = "all_on", "host_layers", "host_share", "cpu_layers", "policy"
        stated = [key for key in places if getattr(self, key) not in ("", -1)]
        if len(stated) != 1:
            raise InputError(f"setting: give one of {', '.join(places)}, not {' and '.join(stated) or 'none'}")
        return stated[0]


@dataclass(frozen=True)
class Row:
    """One published figure. machine and model are None only in rows that are not simulated, or have no clock."""

    file: str
    figure: str
    system: str
    metric: Literal["speed", "latency", "hit rate", "bytes read"]
    unit: str
    source: str
    value: Number
    model: Model | None = None
    machine: Machine | None = None
    setting: Setting = field(default_factory=Setting)
    quality: Literal["A", "B", "C"] = "B"  # specified fully, with one or two assumptions, with more
    assumed: tuple[str, ...] = ()
    fit: bool = False
    unsimulated: str = ""
    engine: str = ""  # the system whose overheads count; else the one that the system's name begins with
    group: str = ""  # of sources, as tables head it; the file's name by default

    @property
    def timed(self) -> bool:
        return self.metric in TIMED

    @property
    def measured(self) -> float:
        return self.value * UNITS[self.metric][self.unit]

    @property
    def where(self) -> str:
        return f"{self.file}: row {self.figure}"
