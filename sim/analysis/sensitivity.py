"""What would help most: a cell run again with one parameter at a time a step lower and a step higher.

The parameters are what a simulated run reads: the machine's link, memory, compute and overheads, the cache in slots
(in bytes where experts differ in size), the size of an expert (of which cache and host memory hold as many as before),
the policy's own cost, the chunk, and every numeric option of the policy but its seed. All else stays as it is, the
predictor's cost too where an option changes. The effect is the change of mean TPOT (TTFT where nothing is decoded); its
elasticity is d ln metric / d ln parameter, by the difference between the two values that were run, the point itself
standing in for one that could not be.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from policies.core.spec import PolicySpec
from sim.loaded import TimedRun
from sim.results import files, plot
from sim.results.metrics import RESULTS, SHARE, TEXT, Row, cell_text, users_text
from sim.sweeps.grid import rows
from sim.sweeps.winner import metric
from sim.sweeps.workers import Advance, Local
from traces.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")

NAMES = ("sensitivity.parquet", "sensitivity.png")
"""The files that `save` writes."""

MAKER = "moe-sim sensitivity"

DRAWN_AT_MOST = 20
"""Parameters in the plot: those below are too small to be seen."""

ROWS = pa.schema(
    [
        ("parameter", TEXT),  # null: the point itself
        ("unit", TEXT),
        *[(name, SHARE) for name in ("value", "change", "elasticity")],  # change: of the metric, from the point's
        *[field for field in RESULTS if field.name != "cell"],
    ]
)
"""Columns of sensitivity.parquet, a row per cell run: which parameter was moved to where, and the cell."""

MACHINE = {
    "link_bandwidth_gb_per_s": ("link bandwidth", "GB/s"),
    "link_latency_us": ("link latency", "us"),
    "memory_bandwidth_gb_per_s": ("memory bandwidth", "GB/s"),
    "compute_tflop_per_s": ("compute", "TFLOP/s"),
    "launch_us": ("kernel launch", "us"),
    "framework_us_per_layer": ("framework", "us/layer"),
    "framework_us_per_expert": ("framework by expert", "us"),
    "framework_us_per_token": ("framework by step", "us"),
}
"""Fields of a hardware profile that durations depend on (`sim.profiles.timing`): their names, their units."""

HOST = {
    "host_compute_tflop_per_s": ("host compute", "TFLOP/s"),
    "host_memory_bandwidth_gb_per_s": ("host memory bandwidth", "GB/s"),
    "host_expert_share": ("host bandwidth share", ""),
    "host_hop_us": ("host hop", "us"),
}
"""More of them where a placement lets the host compute."""

DISK = {"disk_bandwidth_gb_per_s": ("disk bandwidth", "GB/s"), "disk_latency_us": ("disk latency", "us")}
"""More of them where host memory lies over a disk."""


@dataclass(frozen=True)
class Point:
    """A cell that can be run."""

    loaded: TimedRun
    policy: PolicySpec
    slots: int  # bytes, where experts differ in size

    @property
    def predictor_us(self) -> float:
        """Charged an event."""
        return self.loaded.timing(self.policy).predictor_ns / 1_000

    def check(self) -> None:
        """Raise InputError if the policy rejects the setting."""
        self.loaded.require(self.policy, self.slots)


@dataclass(frozen=True)
class Parameter:
    """A number that a cell depends on: its value at a point, and the point where it has another."""

    name: str
    unit: str
    value: Callable[[Point], float]
    at: Callable[[Point, Any], Point]  # InputError for a value that the policy refuses
    whole: bool = False

    def moved(self, point: Point, factor: float) -> float:
        """Return the value times `factor`, to six digits; whole numbers are rounded, and at least 1 off."""
        value = self.value(point)
        if not self.whole:
            return float(f"{value * factor:.6g}")
        rounded = round(value * factor)
        return value + math.copysign(1, value * (factor - 1)) if rounded == value else rounded


@dataclass(frozen=True)
class Variant:
    """A point where one parameter has another value."""

    parameter: Parameter
    value: float
    point: Point


@dataclass(frozen=True)
class Effect:
    """What a parameter does: its value and the metric (in ms) here, and where it is lower and higher."""

    parameter: Parameter
    here: tuple[float, float]
    down: tuple[float, float] | None  # None: there is no lower value, or the policy refuses it
    up: tuple[float, float] | None

    @property
    def changes(self) -> tuple[float | None, float | None]:
        """Of the metric down and up, as shares of what it is here."""
        down, up = (None if side is None else side[1] / self.here[1] - 1 for side in (self.down, self.up))
        return down, up

    @property
    def largest(self) -> float:
        return max(abs(change) for change in self.changes if change is not None)

    @property
    def elasticity(self) -> float:
        """d ln metric / d ln parameter, by central difference; one-sided where a side is missing."""
        (low, at_low), (high, at_high) = self.down or self.here, self.up or self.here
        return math.log(at_high / at_low) / math.log(high / low)


@dataclass(frozen=True)
class Sensitivity:
    """The effects of all parameters around a point."""

    metric: str  # column of results
    row: Row  # of the point
    effects: list[Effect]  # the largest first
    variants: list[tuple[Variant, Row]]  # as run

    @property
    def effective(self) -> list[Effect]:
        return [effect for effect in self.effects if effect.largest]

    @property
    def idle(self) -> list[Effect]:
        return [effect for effect in self.effects if not effect.largest]

    def rows(self) -> list[Row]:
        elasticity = {effect.parameter.name: effect.elasticity for effect in self.effects}
        varied = [
            {
                "parameter": variant.parameter.name,
                "unit": variant.parameter.unit,
                "value": variant.value,
                "change": row[self.metric] / self.row[self.metric] - 1,
                "elasticity": elasticity[variant.parameter.name],
                **row,
            }
            for variant, row in self.variants
        ]
        return [{name: row.get(name) for name in ROWS.names} for row in [self.row, *varied]]


def parameters(point: Point) -> list[Parameter]:

    def field(name: str, unit: str, path: str, whole: bool = False) -> Parameter:
        def at(here: Point, value: float) -> Point:
            return _changed(here, path, int(value) if whole else value)

        return Parameter(name, unit, attrgetter(path), at, whole)

    def option(name: str, default: Any) -> Parameter:
        def value(here: Point) -> float:
            return next(float(each.value) for each in here.policy.declared() if each.name == name)

        def at(here: Point, other: float) -> Point:
            return replace(here, policy=here.policy.with_options({name: type(default)(other)}))

        return Parameter(name, "", value, at, whole=isinstance(default, int))

    loaded, uses_host = point.loaded, point.policy.uses_host
    fields = MACHINE | (HOST if uses_host else {}) | (DISK if loaded.experiment.host_memory else {})
    return [
        *(field(name, unit, f"loaded.hardware.{key}") for key, (name, unit) in fields.items()),
        Parameter("cache size", "slots" if loaded.sizes is None else "B", attrgetter("slots"), _with_slots, True),
        Parameter("expert size", "MB", lambda at: at.loaded.profile.expert_bytes / 1e6, _with_expert_size),
        Parameter("predictor", "us", attrgetter("predictor_us"), _with_predictor),
        *([field("chunk", "B", "loaded.experiment.chunk_bytes", True)] if loaded.experiment.chunk_bytes else []),
        *(option(each.name, each.value) for each in point.policy.declared() if each.numeric),
    ]


def point_of(loaded: TimedRun, policy: PolicySpec, slots: int) -> Point:
    """Return that cell, with the policy overhead as a number. Raise InputError if the policy rejects the setting.

    By the machine's rates, also where the model was measured on it: rates can be moved, tables cannot.
    """
    point = Point(loaded, policy, slots)
    point.check()
    return _changed(_with_predictor(point, point.predictor_us), "loaded.hardware.measured", ())


def plan(point: Point, step: float) -> tuple[list[Variant], list[str]]:
    """Return what to run beside the point, and why values are left out; step: a share, above 0 and below 1."""
    variants, left_out = [], []
    for parameter in parameters(point):
        value = parameter.value(point)
        if not (value and math.isfinite(value)):
            left_out.append(f"{parameter.name} is {value:g}, which no factor changes")
            continue
        for factor in (1 - step, 1 + step):
            moved = parameter.moved(point, factor)
            if not moved:
                left_out.append(f"{parameter.name} at 0, which may stand for all")
                continue
            try:
                other = parameter.at(point, moved)
                other.check()
            except InputError as error:
                left_out.append(f"{parameter.name} at {moved:g}: {error}")
                continue
            reached = parameter.value(other)
            if not reached:
                left_out.append(f"{parameter.name} at {moved:g}: it is rounded to 0")
            elif reached != value:
                variants.append(Variant(parameter, reached, other))
    return variants, left_out


def sensitivity(
    point: Point, variants: Sequence[Variant], workers: int = 1, advance: Advance | None = None
) -> Sensitivity:
    """Run the point and the variants of its plan; `advance` gets the number of requests run."""
    cells = [(each.loaded, each.policy, each.slots) for each in (point, *(variant.point for variant in variants))]
    here, *moves = rows(cells, Local(workers), advance or (lambda requests: None))
    judged_by = metric([here])
    moved: dict[str, dict[bool, tuple[float, float]]] = {}
    for variant, row in zip(variants, moves, strict=True):
        higher = variant.value > variant.parameter.value(point)
        moved.setdefault(variant.parameter.name, {})[higher] = variant.value, row[judged_by]
    effects = [
        Effect(each, (each.value(point), here[judged_by]), moved[name].get(False), moved[name].get(True))
        for name, each in {variant.parameter.name: variant.parameter for variant in variants}.items()
    ]
    effects.sort(key=lambda effect: -effect.largest)
    return Sensitivity(judged_by, here, effects, list(zip(variants, moves, strict=True)))


def figure(result: Sensitivity) -> "Figure":
    """Draw a tornado: the change of the metric, in %, for each parameter that has an effect, the largest on top."""
    shown, row = result.effective[:DRAWN_AT_MOST], result.row
    title = f"{row['model']} on {row['hardware']}, {row['trace']}, {cell_text(row)} of the experts"
    title += f"\n{users}" if (users := users_text(row)) else ""
    label = f"change of {plot.DRAWN[result.metric][1].removesuffix(' (ms)')} (%)"
    drawing, axes = plot.single((7, 1.6 + 0.34 * max(len(shown), 2)), title, label, grid="x")
    for side, name, colour in ((0, "lower", plot.COLOURS[1]), (1, "higher", plot.COLOURS[0])):
        changes = [100 * (effect.changes[side] or 0.0) for effect in shown]
        axes.barh(range(len(shown)), changes, height=0.62, color=colour, alpha=0.85, label=f"parameter {name}")
    axes.axvline(0, color=plot.BOUND_COLOUR, linewidth=0.8)
    axes.set_yticks(range(len(shown)), [effect.parameter.name for effect in shown])
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    drawing.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=8)
    return drawing


def save(result: Sensitivity, folder: Path) -> list[Path]:
    table, picture = NAMES
    return files.save(folder, MAKER, {table: (result.rows(), ROWS)}, {picture: lambda: figure(result)})


def _changed(part: T, path: str, value: object) -> T:
    """Return the same with another value in the field to which these fields lead: `loaded.hardware.launch_us`."""
    name, _, rest = path.partition(".")
    return replace(part, **{name: _changed(getattr(part, name), rest, value) if rest else value})  # type: ignore[type-var]


def _with_slots(point: Point, slots: float) -> Point:
    """At least 1, at most all; where experts differ in size, capacity for at least the largest."""
    sizes = point.loaded.sizes
    least, most = (1, point.loaded.all_experts) if sizes is None else (int(sizes.max()), int(sizes.sum()))
    return replace(point, slots=min(max(least, int(slots)), most))


def _with_expert_size(point: Point, megabytes: float) -> Point:
    """The largest of so many MB; cache and host memory hold as many experts as before.

    Where layers differ, all and the bytes of cache and host memory change by the same factor.
    """
    profile, host = point.loaded.profile, point.loaded.experiment.host_memory
    factor = megabytes * 1e6 / profile.expert_bytes
    sizes = tuple(round(size * factor) for size in profile.layer_expert_bytes)
    parameter = megabytes * 1e6 / profile.expert_parameters
    sized = replace(profile, expert_bytes_per_parameter=parameter, layer_expert_bytes=sizes)
    here = _changed(point, "loaded.profile", sized)
    alike = here.loaded.sizes is None

    def resized(slots: int) -> int:
        return point.loaded.experts_in(slots) if alike else -(-slots * sum(sizes) // sum(profile.layer_expert_bytes))

    if host:
        size = resized(point.loaded.slots(host))
        here = _changed(here, "loaded.experiment.host_memory", str(size) if alike else f"{size}B")
    return _with_slots(here, resized(point.slots))


def _with_predictor(point: Point, us: float) -> Point:
    return _changed(point, "loaded.experiment.predictor_us", us)
