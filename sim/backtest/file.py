"""Files of the back-test: machines, models and rows as TOML, checked key by key. docs/backtest.md documents the format.

A row names its machine and its model, of the file's tables or of shipped profiles, or holds them itself. 0 stands for
what is not stated. InputError names file, row and key.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sim import profiles
from traces.errors import InputError, located, unknown
from traces.files import read_toml

UNITS = {
    "speed": {"tok/s": 1.0},
    "latency": {"s": 1.0, "ms": 1e-3},
    "hit rate": {"share": 1.0, "%": 0.01},
    "bytes read": {"B": 1.0, "MB": 1e6, "MiB": 2.0**20, "GB": 1e9, "GiB": 2.0**30},
}
"""Metrics, with their units in the metric's own: tokens/s, seconds a token, share of lookups, bytes a token."""

PROMPTS = ("counted", "played", "decoded")

MOST_TOKENS = 100_000
"""Of all requests of a setting: each is run in Python, and no published figure is of more."""

QUALITIES = ("A", "B", "C")
"""How well a row is specified: fully, with one or two assumptions, with more."""

WITHOUT = {
    "policy": (
        "cache",
        "slots_per_layer",
        "misses_from",
        "host_cache",
        "hit_rate",
        "like",
        "copy_back",
        "whole_layers",
        "free_copies",
    ),
    "trace": ("prompts", "requests"),
}
"""Keys of a setting that do nothing without another one."""

BESIDE = {
    "trace": ("hit_rate", "like", "tokens", "context", "whole_layers"),
    "hit_rate": ("like",),
    "slots_per_layer": ("cache",),
    "whole_layers": ("hit_rate", "like", "tokens"),
    "free_copies": ("copy_back",),
}
"""Keys of a setting that do nothing beside another one."""

BESIDE_IN_MODEL = {"file_gb": ("precision", "dense_precision")}
"""Keys of a model that do nothing beside another one: a file's size is more exact than its precision's name."""

_FILE_KEYS = ("defaults", "machines", "models", "rows")


@dataclass(frozen=True)
class Machine:
    """What is known of a machine, as its data sheets or its owner's measurements say it."""

    name: str
    title: str = ""
    profile: str = ""  # a hardware profile, for what is not stated here
    gpu: str = ""  # as in gpus.toml: "RTX 3090", for its data sheet and its link
    gpu_data_sheet_gb_per_s: float = 0.0
    gpu_read_gb_per_s: float = 0.0  # a large read, measured
    gpu_gb_per_s: float = 0.0  # what its kernels reach
    gpu_tflop_per_s: float = 0.0
    launch_us: float = 0.0
    ram: str = ""  # channels and kind, "2 x DDR5-6000", for the peak
    host_peak_gb_per_s: float = 0.0  # channels x MT/s x 8 bytes, of the sockets that a run uses
    host_stream_gb_per_s: float = 0.0  # STREAM Triad or the like, measured
    host_gb_per_s: float = 0.0  # what its expert kernels reach
    host_experts_of_stream: float = 0.0
    host_threads: int = 0
    host_gflop_per_s_per_thread: float = 0.0
    hop_us: float = field(default=-1.0, metadata=profiles.MAY_BE_ZERO)
    cpu_us_per_layer: float = field(default=-1.0, metadata=profiles.MAY_BE_ZERO)
    link: str = ""  # as in factors.toml: "PCIe 4.0 x16"
    link_gb_per_s: float = 0.0
    link_latency_us: float = field(default=-1.0, metadata=profiles.MAY_BE_ZERO)
    disk_gb_per_s: float = 0.0
    disk_latency_us: float = field(default=-1.0, metadata=profiles.MAY_BE_ZERO)
    us_per_layer: float = field(default=-1.0, metadata=profiles.MAY_BE_ZERO)  # of the framework; -1: as its system's
    us_per_expert: float = field(default=-1.0, metadata=profiles.MAY_BE_ZERO)
    us_per_token: float = field(default=-1.0, metadata=profiles.MAY_BE_ZERO)
    fit_parameter: str = ""  # the one that rows with fit = true fit
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)  # of the keys above


@dataclass(frozen=True)
class Model:
    """What is known of a model's sizes beyond its profile; without a profile, all of its shape."""

    name: str
    profile: str = ""  # a model profile; else the one of that name
    precision: str = ""  # of the experts
    dense_precision: str = ""  # of all else
    file_gb: float = 0.0  # of the whole file, over all its parameters
    layers: int = 0
    experts: int = 0
    top_k: int = 0
    expert_bytes: int = 0
    expert_mb: float = 0.0
    layer_expert_bytes: tuple[int, ...] = ()  # of each layer, where they differ
    dense_bytes: int = 0  # that a token reads of all layers, beside routed experts
    head_bytes: int = 0  # of the vocabulary matmul
    kv_bytes_per_token: float = 0.0  # of all layers
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Setting:
    """How it was run. Where misses are computed and what is cached: one of all_on, host_layers, host_share, policy."""

    all_on: str = ""  # "gpu" or "cpu": every expert is computed where it lies
    host_layers: int = field(default=-1, metadata=profiles.MAY_BE_ZERO)  # whose experts the CPU computes
    host_share: float = field(default=-1.0, metadata=profiles.MAY_BE_ZERO)  # of the layers, likewise
    policy: str = ""  # as `moe-sim run --policy` takes it
    cache: str = ""  # 25%, 64 or 8GiB of experts; 0: none
    slots_per_layer: int = field(default=0, metadata=profiles.MAY_BE_ZERO)  # in place of `cache`
    misses_from: str = ""  # "host" or "disk"
    host_cache: str = ""  # experts in host memory, over the disk
    hit_rate: float = field(default=-1.0, metadata=profiles.MAY_BE_ZERO)  # measured; the routing is made to reach it
    like: str = ""  # model of data/reuse.toml whose routing stands in; else the nearest one
    trace: str = ""  # path or name of the very routing
    prompts: str = "counted"  # of the trace, in hit rates; "run": only as what comes before; "decoded": as if so
    requests: int = 0  # of the trace, the first ones; 0: all
    tokens: int = 48  # decoded
    context: int = 0
    batch: int = 1
    copy_back: bool = False  # a victim is copied to host memory before another takes its place
    whole_layers: bool = False  # a layer is copied with all its experts
    blocking: bool = False  # no expert of a layer is computed before all have arrived
    free_copies: bool = False  # copies into the cache run beside and take no time


@dataclass(frozen=True)
class Row:
    """One published figure. machine and model are None only in rows that are not simulated, or have no clock."""

    file: str
    figure: str
    system: str
    metric: str
    unit: str
    source: str
    value: float = field(metadata=profiles.MAY_BE_ZERO)
    model: Model | None = None
    machine: Machine | None = None
    setting: Setting = field(default_factory=Setting)
    quality: str = "B"
    assumed: tuple[str, ...] = ()
    fit: bool = False
    unsimulated: str = ""
    group: str = ""  # of sources, as tables head it; the file's name by default

    @property
    def measured(self) -> float:
        """The value in the metric's own unit."""
        return self.value * UNITS[self.metric][self.unit]

    @property
    def where(self) -> str:
        """File and row, for errors."""
        return f"{self.file}: row {self.figure}"


def shipped() -> list[Path]:
    """Return the files of this package, in order."""
    return sorted(Path(__file__).parent.glob("*.toml"))


def read(path: Path, warn: Callable[[str], None] = lambda text: None) -> list[Row]:
    """Return the rows of a file, in its order; InputError for what cannot be used.

    warn: is called for each key of a row's own setting that does nothing there.
    """
    held = read_toml(path)
    with located(str(path)):
        for key in held:
            if key not in _FILE_KEYS:
                raise unknown("key", key, _FILE_KEYS)
        machines = _named(held.get("machines", {}), "machines", _machine)
        models = _named(held.get("models", {}), "models", _model)
        listed = held.get("rows", [])
        if not isinstance(listed, list) or not all(isinstance(row, dict) for row in listed) or not listed:
            raise InputError("rows: must be a list of tables, each headed [[rows]]")
        defaults = _table("defaults", held.get("defaults", {}))
        rows = [_row(path, place, defaults, row, machines, models) for place, row in enumerate(listed, 1)]
    return [_without_unused(row, stated.get("setting", {}), warn) for row, stated in zip(rows, listed, strict=True)]


def unique(rows: list[Row]) -> list[Row]:
    """Return the rows; InputError where two have one name."""
    seen: dict[str, Row] = {}
    for row in rows:
        if seen.setdefault(row.figure, row) is not row:
            raise InputError(f"{row.where}: figure {row.figure!r} is there twice, also in {seen[row.figure].file}")
    return rows


def _row(
    path: Path,
    place: int,
    defaults: Mapping[str, Any],
    held: Mapping[str, Any],
    machines: Mapping[str, Machine],
    models: Mapping[str, Model],
) -> Row:
    figure = held.get("figure")
    with located(f"row {figure if isinstance(figure, str) else place}"):
        merged = {**defaults, **held}
        if isinstance(held.get("setting"), dict) and isinstance(defaults.get("setting"), dict):
            merged["setting"] = {**defaults["setting"], **held["setting"]}
        readers: dict[Any, profiles.Reader] = {
            Machine | None: lambda key, value: _machine_of(key, value, machines),
            Model | None: lambda key, value: _model_of(key, value, models),
            Setting: lambda key, value: _part(key, value, Setting),
        }
        row = profiles.make(Row, merged, readers, file=str(path))
        _check(row)
    return row if row.group else _grouped(row, path.stem)


def _grouped(row: Row, group: str) -> Row:
    return Row(**{**{each.name: getattr(row, each.name) for each in fields(Row)}, "group": group})


def _check(row: Row) -> None:
    if row.metric not in UNITS:
        raise unknown("metric", row.metric, UNITS)
    if row.unit not in UNITS[row.metric]:
        raise unknown(f"unit of {row.metric}", row.unit, UNITS[row.metric])
    if row.quality not in QUALITIES:
        raise unknown("quality", row.quality, QUALITIES)
    if row.value < profiles.LEAST and row.metric != "hit rate":
        raise InputError(f"value = {row.value}: must be above 0 for a figure of {row.metric}")
    if row.metric == "hit rate" and row.measured > 1:
        raise InputError(f"value = {row.value}: a hit rate is a share of lookups, at most 1")
    if row.unsimulated:
        return
    if row.model is None:
        raise InputError("the key 'model' is missing")
    if row.machine is None and row.metric in ("speed", "latency"):
        raise InputError("the key 'machine' is missing")
    if row.model.expert_bytes and row.model.expert_mb:
        raise InputError("model: give one of expert_bytes, expert_mb, not expert_bytes and expert_mb")
    if row.machine and row.machine.host_gflop_per_s_per_thread and not row.machine.host_threads:
        raise InputError("machine: host_gflop_per_s_per_thread has no effect without host_threads")
    setting = row.setting
    ways = {
        "all_on": bool(setting.all_on),
        "host_layers": setting.host_layers >= 0,
        "host_share": setting.host_share >= 0,
        "policy": bool(setting.policy),
    }
    if sum(ways.values()) != 1:
        given = [name for name, there in ways.items() if there] or ["none"]
        raise InputError(f"setting: give one of {', '.join(ways)}, not {' and '.join(given)}")
    if setting.all_on not in ("", "gpu", "cpu"):
        raise unknown("all_on", setting.all_on, ("gpu", "cpu"))
    if setting.misses_from not in ("", "host", "disk"):
        raise unknown("misses_from", setting.misses_from, ("host", "disk"))
    if setting.prompts not in PROMPTS:
        raise unknown("prompts", setting.prompts, PROMPTS)
    if setting.hit_rate > 1 or setting.host_share > 1:
        raise InputError("setting: hit_rate and host_share are shares, at most 1")
    if setting.batch * setting.tokens > MOST_TOKENS:
        raise InputError(f"setting: batch x tokens are {setting.batch * setting.tokens}: at most {MOST_TOKENS} are run")
    if setting.policy and not (setting.cache or setting.slots_per_layer):
        raise InputError("setting: policy needs a cache, or slots_per_layer")
    if row.fit and not (row.machine and row.machine.fit_parameter):
        raise InputError("fit = true, but its machine names no fit_parameter")
    if row.metric in ("hit rate", "bytes read"):
        if row.fit:
            raise InputError(f"fit = true: only speeds and latencies fit a parameter, not a figure of {row.metric}")
        if not setting.policy:
            raise InputError(f"setting: a figure of {row.metric} is of a cache: give policy and cache")


def _without_unused(row: Row, stated: Mapping[str, Any], warn: Callable[[str], None]) -> Row:
    """Return the row without keys that do nothing in it; [defaults] may hold settings for other rows."""
    if row.unsimulated or not row.model:
        return row
    setting, model = _unused(row.setting, BESIDE, WITHOUT), _unused(row.model, BESIDE_IN_MODEL, {})
    said = [f"setting: {key} has no effect {why}" for key, why in setting.items() if key in stated]
    for text in said + [f"model: {key} has no effect {why}" for key, why in model.items()]:
        warn(f"{row.where}: {text} (ignored)")
    return replace(
        row,
        setting=replace(row.setting, **_defaults(row.setting, setting)),
        model=replace(row.model, **_defaults(row.model, model)),
    )


def _unused(
    part: Setting | Model, beside: Mapping[str, Sequence[str]], without: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the keys that do nothing in this part of a row, and why."""
    given = {each.name for each in fields(part) if getattr(part, each.name) != each.default}
    found = {key: f"beside {other}" for other, keys in beside.items() if other in given for key in keys}
    found |= {key: f"without {needed}" for needed, keys in without.items() if needed not in given for key in keys}
    return {key: why for key, why in found.items() if key in given}


def _defaults(part: Setting | Model, keys: Iterable[str]) -> dict[str, Any]:
    return {each.name: each.default for each in fields(part) if each.name in keys}


def _named(held: object, key: str, make: Callable[[str, str, object], Any]) -> dict[str, Any]:
    return {name: make(f"{key}.{name}", name, table) for name, table in _table(key, held).items()}


def _table(key: str, held: object) -> dict[str, Any]:
    if not isinstance(held, dict):
        raise InputError(f"{key}: must be a table")
    return held


def _machine(key: str, name: str, held: object) -> Machine:
    machine: Machine = _part(key, held, Machine, name=name)
    return machine


def _model(key: str, name: str, held: object) -> Model:
    model: Model = _part(key, held, Model, name=name)
    return model


def _part(key: str, held: object, cls: type[Any], **given: Any) -> Any:
    with located(key):
        return profiles.make(cls, _table(key, held), {Mapping[str, str]: _texts}, **given)


def _machine_of(key: str, value: object, machines: Mapping[str, Machine]) -> Machine:
    if isinstance(value, dict):
        return _machine(key, str(value.get("title", "its own")), value)
    if isinstance(value, str):
        if value in machines:
            return machines[value]
        if value in profiles.names("hardware") or value.endswith(".toml"):
            return Machine(name=value, profile=value)
        raise unknown(key, value, [*machines, *profiles.names("hardware")])
    raise InputError(f"{key} = {value!r}: must be a name or a table")


def _model_of(key: str, value: object, models: Mapping[str, Model]) -> Model:
    if isinstance(value, dict):
        return _model(key, str(value.get("profile", "its own")), value)
    if isinstance(value, str):
        return models.get(value) or Model(name=value)
    raise InputError(f"{key} = {value!r}: must be a name or a table")


def _texts(key: str, value: object) -> dict[str, str]:
    if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
        return value
    raise InputError(f"{key}: must be a table of texts")
