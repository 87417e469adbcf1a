"""Read files of the back-test: machines, models and rows as TOML. docs/backtest.md documents the format.

A row names its machine and its model, of the file's tables or of shipped profiles, or states them itself. 0 (or -1, of
what may be 0) stands for what is not stated. InputError names file, row and key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from sim.profiles.hardware_profile import MACHINES
from traces.errors import InputError, located, refuse, unknown
from traces.files import read_toml
from traces.typed import typed

T = TypeVar("T")

UNITS = {
    "speed": {"tok/s": 1.0},
    "latency": {"s": 1.0, "ms": 1e-3},
    "hit rate": {"share": 1.0, "%": 0.01},
    "bytes read": {"B": 1.0, "MB": 1e6, "MiB": 2.0**20, "GB": 1e9, "GiB": 2.0**30},
}
"""Metrics, with their units in the metric's own: tokens/s, seconds a token, share of lookups, bytes a token."""

TIMED = ("speed", "latency")

Number = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]


@dataclass(frozen=True)
class Machine:
    """What is known of a machine, as its data sheets or its owner's measurements state it."""

    name: str
    title: str = ""
    profile: str = ""  # a hardware profile, for what is not stated here
    gpu: str = ""  # as in gpus.toml: "RTX 3090", for its data sheet and its link
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
    host_threads: Count = 0
    host_layout: Literal["", "hybrid", "numa"] = ""  # threads on cores of two kinds, or memory of several nodes
    host_and_link_gb_per_s: Number = 0.0  # CPU and link at once, measured
    cpu: str = ""  # its name, for what a thread multiplies (cpus.toml); else the one in the title
    host_gflop_per_s_per_thread: Number = 0.0
    hop_us: Number = -1.0
    cpu_us_per_layer: Number = -1.0
    link: str = ""  # as in factors.toml: "PCIe 4.0 x16"
    link_gb_per_s: Number = 0.0
    link_latency_us: Number = -1.0
    disk_gb_per_s: Number = 0.0
    disk_latency_us: Number = -1.0
    us_per_layer: Number = -1.0  # of the framework; -1: as its system's
    us_per_expert: Number = -1.0
    us_per_token: Number = -1.0
    fit_parameter: str = ""  # the one that rows with fit = true fit
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # of the keys above


@dataclass(frozen=True)
class Model:
    """What is known of a model's sizes beyond its profile; without a profile, all of its shape."""

    name: str
    profile: str = ""  # a model profile; else the one of that name
    precision: str = ""  # of the experts; beside `file_gb` only how fast it is multiplied
    dense_precision: str = ""  # of all else
    file_gb: Number = 0.0  # of the whole file, over all its parameters
    layers: Count = 0
    experts: Count = 0
    top_k: Count = 0
    expert_bytes: Count = 0
    expert_mb: Number = 0.0
    layer_expert_bytes: tuple[Positive, ...] = ()  # of each layer, where they differ
    dense_bytes: Count = 0  # that a token reads of all layers, beside routed experts
    head_bytes: Count = 0  # of the vocabulary matmul
    kv_bytes_per_token: Number = 0.0  # of all layers
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Setting:
    """How it was run. Where misses are computed and what is cached: one of all_on, host_layers,
    host_share, cpu_layers, policy."""

    all_on: Literal["", "gpu", "cpu"] = ""  # every expert is computed there
    host_layers: Count = -1  # whose experts the CPU computes
    host_share: Share = -1.0  # of the layers, likewise
    cpu_layers: Count = -1  # that the CPU computes whole, attention included (`-ngl` keeps the others on the GPU)
    policy: str = ""  # as `moe-sim run --policy` takes it
    cache: str = ""  # 25%, 64 or 8GiB of experts; 0: none
    slots_per_layer: Count = 0  # in place of `cache`
    misses_from: Literal["", "host", "disk"] = ""
    host_cache: str = ""  # experts in host memory, over the disk
    hit_rate: Share = -1.0  # measured; the routing is made to reach it
    like: str = ""  # model of data/reuse.toml whose routing stands in; else the nearest one
    trace: str = ""  # path or name of the very routing
    prompts: Literal["counted", "played", "decoded"] = "counted"  # of the trace, see docs/backtest.md
    requests: Count = 0  # of the trace, the first ones; 0: all
    tokens: Positive = 48  # decoded
    context: Count = 0
    batch: Positive = 1
    copy_back: bool = False  # a victim is copied to host memory before another takes its place
    whole_layers: bool = False  # a layer is copied with all its experts
    blocking: bool = False  # no expert of a layer is computed before all have arrived
    mmap: bool = False  # the disk is read through the page cache
    free_copies: bool = False  # copies into the cache run beside and take no time

    @property
    def place(self) -> str:
        """Return which key states where experts are. Raise InputError unless one does."""
        values = {
            "all_on": bool(self.all_on),
            "host_layers": self.host_layers >= 0,
            "host_share": self.host_share >= 0,
            "cpu_layers": self.cpu_layers >= 0,
            "policy": bool(self.policy),
        }
        stated = [key for key, is_stated in values.items() if is_stated]
        if len(stated) != 1:
            raise InputError(f"setting: give one of {', '.join(values)}, not {' and '.join(stated) or 'none'}")
        return stated[0]


UNUSED: dict[Any, tuple[tuple[str, str, tuple[str, ...]], ...]] = {
    Setting: (
        ("beside", "trace", ("hit_rate", "like", "tokens", "context", "whole_layers")),
        ("beside", "hit_rate", ("like",)),
        ("beside", "slots_per_layer", ("cache",)),
        ("beside", "whole_layers", ("hit_rate", "like", "tokens")),
        ("beside", "free_copies", ("copy_back",)),
        ("without", "policy", ("cache", "slots_per_layer", "misses_from", "host_cache", "hit_rate", "like")),
        ("without", "policy", ("copy_back", "whole_layers", "free_copies")),
        ("without", "trace", ("prompts", "requests")),
    ),
    Model: (
        ("beside", "file_gb", ("dense_precision",)),
        ("beside", "expert_bytes", ("expert_mb",)),
    ),
    Machine: (("without", "host_threads", ("host_gflop_per_s_per_thread",)),),
}
"""Keys that do nothing beside or without another one."""


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
    engine: str = ""  # of systems.toml, whose overheads count; else the one that the system's name begins with
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


@dataclass(frozen=True)
class _Tables:
    rows: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    defaults: dict[str, Any] = field(default_factory=dict)
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: dict[str, dict[str, Any]] = field(default_factory=dict)


def shipped() -> list[Path]:
    return sorted(Path(__file__).parent.glob("*.toml"))


def read(path: Path, warn: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Return the rows of a file, in order. warn: called for each key without effect. Raise InputError."""
    tables = typed(_Tables, read_toml(path), str(path))
    machines, models = (
        {name: _part(cls, f"{path}: {key}.{name}", {**facts, "name": name}, warn) for name, facts in table.items()}
        for cls, key, table in ((Machine, "machines", tables.machines), (Model, "models", tables.models))
    )
    rows = []
    for place, stated in enumerate(tables.rows, 1):
        values = {"group": path.stem, **tables.defaults, **stated, "file": str(path)}
        where = f"{path}: row {values.get('figure', place)}"
        model, machine, setting = (values.get(key) for key in ("model", "machine", "setting"))
        if isinstance(model, dict):
            values["model"] = _part(Model, f"{where}: model", {"name": model.get("profile", "its own"), **model}, warn)
        elif isinstance(model, str):
            values["model"] = models.get(model) or Model(model)
        if isinstance(machine, dict):
            named = {"name": machine.get("title", "its own"), **machine}
            values["machine"] = _part(Machine, f"{where}: machine", named, warn)
        elif machine in machines:
            values["machine"] = machines[machine]
        elif isinstance(machine, str):
            if machine not in MACHINES.names() and not machine.endswith(".toml"):
                raise unknown("machine", machine, [*machines, *MACHINES.names()], where)
            values["machine"] = Machine(name=machine, profile=machine)
        if isinstance(setting, dict):
            own, shared = stated.get("setting", {}), tables.defaults.get("setting", {})
            values["setting"] = _part(Setting, f"{where}: setting", own, warn, shared)
        rows.append(typed(Row, values, where))
        with located(where):
            _check(rows[-1])
    return rows


def unique(rows: list[Row]) -> list[Row]:
    """Return the rows. Raise InputError where two have one name."""
    seen: dict[str, Row] = {}
    for row in rows:
        if seen.setdefault(row.figure, row) is not row:
            raise InputError(f"{row.where}: figure {row.figure!r} is there twice, also in {seen[row.figure].file}")
    return rows


def _part(
    cls: type[T],
    where: str,
    stated: Mapping[str, Any],
    warn: Callable[[str], None],
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> T:
    """Return a part of a row without the keys that do nothing in it, of which the stated ones are warned of."""
    values = {**defaults, **stated}
    unused = {
        key: f"{relation} {one}"
        for relation, one, keys in UNUSED.get(cls, ())
        if (one in values) == (relation == "beside")
        for key in keys
    }
    for key, why in unused.items():
        if values.pop(key, None) is not None and key in stated:
            warn(f"{where}: {key} has no effect {why} (ignored)")
    return typed(cls, values, where)


def _check(row: Row) -> None:
    """Raise InputError for a row that would be run as something else than it states."""
    if row.unit not in UNITS[row.metric]:
        raise unknown(f"unit of {row.metric}", row.unit, UNITS[row.metric])
    if row.unsimulated:
        return
    fitted, is_cache = row.machine and row.machine.fit_parameter, row.setting.place == "policy"
    refuse(
        (
            row.model is None or (row.machine is None and row.timed),
            f"a figure of {row.metric} needs a model, of a speed or latency a machine too",
        ),
        (not (is_cache or row.timed), f"setting: a figure of {row.metric} is of a cache: give policy and cache"),
        (row.fit and not (row.timed and fitted), "fit = true needs a speed or latency and the machine's fit_parameter"),
    )
