"""What this machine takes for each part of a step and for a transfer, measured through the device that replays.

A pass times each kind of work alone (`parts`), then tokens in the real loop (`in_loop`). Of several passes the median
of each figure counts; the noise is how far repeats lie from their mean, in the mean over all figures. Nothing that the
run itself moves or computes is used: a prediction stays one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from math import hypot, sqrt
from statistics import fmean, mean, median, stdev
from time import monotonic
from typing import Any

from replay.calibration.in_loop import (
    Busy,
    Token,
    at_most_as_beside,
    half_missing_in_loop,
    slowed_by,
    tokens_in_loop,
    with_host,
)
from replay.calibration.meter import Meter
from replay.calibration.pace import Paced, by_kind, mean_pace
from replay.calibration.parts import cycle_slots, decoded_contexts, parts_alone, slowed, top_k
from replay.devices.waiting import Pace
from sim.loop.device import Device
from sim.loop.driver import Driver
from sim.loop.log import COLUMNS
from sim.loop.run import Run
from sim.loop.session import decider_of
from sim.profiles.measured import MeasuredModel
from traces.steps import DECODE

PASSES = 3  # over a machine that reports its pace, since it changes
FIRST_STEPS = 2  # of a policy's run that are not counted, besides the first tenth
POLICY_S = 2.0
SLOWEST = 0.01
"""Of a policy's steps, so many of the slowest are not counted: the machine was elsewhere, or compiled."""

PHASE, PREDICTOR_NS = COLUMNS.index("phase"), COLUMNS.index("stall_predictor_ns")
NOISE = 0.03
"""By what share mean paces of a run and of its calibrations differ, besides what their own repeats show, on a machine
that does not change its speed. Of two tables of a shared machine (`replay/results`), one hardly depends on it between
2 and 10%; the other, of an hour in which it changed more, is predicted the better the less it is."""

DIFFER = 0.05
"""Standard deviation of single paces, at least, as a share: a few that happen to be alike are not exact."""

LEAST = 0.1  # of a factor: so that the lower end of an interval stays a duration, however large the error


@dataclass(frozen=True)
class Pass:
    """What is timed in one pass over a model."""

    alone: MeasuredModel  # without host, without slow-down unless both are timed together
    hit: Token  # in the real loop, as the next ones
    missing: Token
    mixed: Busy | None  # None on a GPU, and where there are too few slots or experts
    noise: float  # by what share single repeats differ from the figures, in the mean
    pace: Pace | None = None  # of the device meanwhile, in the mean


@dataclass(frozen=True)
class Measurement:
    """A model as measured in all passes, the mean noise, and the pace of each pass."""

    model: MeasuredModel
    noise: float
    paces: tuple[Pace, ...] = ()


def measure_model(device: Device, run: Run, most_tokens: int, name: str) -> Measurement:
    """Measure everything but policies, for steps of up to `most_tokens`. Leaves whole experts in some slots."""
    passes = PASSES if isinstance(device, Paced) else 1
    return combined(run, [one_pass(device, run, most_tokens, name, passes) for _ in range(passes)])


def one_pass(device: Device, run: Run, most_tokens: int, name: str, passes: int = 1) -> Pass:
    """Time everything once; `passes` share the time that it takes."""
    meter, paces, together = Meter(device, passes), list[Pace](), top_k(run)
    alone, mixed = parts_alone(meter, run, most_tokens, name, paces), None
    if not isinstance(device, Paced):  # slots still hold their own experts
        both = slowed(meter, run, cycle_slots(run, together), alone.transfer_ns, alone.expert[0][1])
        alone = replace(alone, compute_slowed=both[0], transfer_slowed=both[1])
    context = decoded_contexts(run)[0]
    hit, missing = tokens_in_loop(meter, run, alone, together, context)
    if isinstance(device, Paced):
        mixed = half_missing_in_loop(meter, run, alone, together, context, paces)
    return Pass(alone, hit, missing, mixed, mean(meter.spreads), mean_pace(paces))


def combined(run: Run, passes: Sequence[Pass]) -> Measurement:
    """Return what follows from the medians of some passes over a run's model."""
    model, hit, missing, mixed = middle([(each.alone, each.hit, each.missing, each.mixed) for each in passes])
    context, together = decoded_contexts(run)[0], top_k(run)
    if mixed:
        model = at_most_as_beside(mixed, model, run, together)
    model = with_host(model, run, together, context, hit, missing)
    if mixed:
        model = slowed_by(mixed, model, run, together, context)
    paces = tuple(each.pace for each in passes if each.pace)
    return Measurement(model, mean(each.noise for each in passes), paces)


def middle(values: Sequence[Any]) -> Any:
    """Return the median of each number in structures that are alike; whole numbers stay whole, others are the first's.

    values: passes of the same thing, nested in any way; of two, what lies between them.
    """
    first = values[0]
    if is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in fields(first)]
        return replace(first, **{name: middle([getattr(each, name) for each in values]) for name in names})
    if isinstance(first, Mapping):
        return {key: middle([each[key] for each in values]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(middle(list(several)) for several in zip(*values, strict=True))
    if isinstance(first, int | float) and not isinstance(first, bool):
        return round(median(values)) if isinstance(first, int) else float(median(values))
    return first


def policy_ns(run: Run, device: Device) -> int:
    """Return the ns that an event of decode costs the policy on this host, in the mean: as the driver itself counts it.

    The run is run on `device`, since between two events a device lets the host's caches forget the policy, for POLICY_S
    or a few steps.
    """
    if decider_of(run).silent:
        return 0
    rows: list[tuple[int, int]] = []
    until = monotonic() + POLICY_S
    for row in Driver(run, device).steps():
        rows.append((row.numbers[PHASE], row.numbers[PREDICTOR_NS]))
        if monotonic() > until and len(rows) > 2 * FIRST_STEPS:
            break
    device.discard_copies()  # a prefetch may be under way
    return steady_ns(rows, run.shape.layers)


def steady_ns(rows: Sequence[tuple[int, int]], layers: int) -> int:
    """Return the ns of an event of decode in the mean, of rows of a run's steps: phase, and ns of all layers.

    The first tenth (compilation, empty collections) and the slowest are not counted.
    """
    if not rows:
        return 0
    steady = rows[min(len(rows) - 1, FIRST_STEPS + len(rows) // 10) :]
    took = sorted(ns for phase, ns in steady if phase == DECODE) or sorted(ns for _, ns in steady)
    counted = took[: len(took) - int(len(took) * SLOWEST)]
    return int(mean(counted) / layers)


@dataclass(frozen=True)
class Around:
    """The machine before, after and during a run, and as far as the errors of the last go."""

    before: MeasuredModel
    after: MeasuredModel
    during: MeasuredModel  # between both, at the pace of the run
    fastest: MeasuredModel
    slowest: MeasuredModel
    paces: tuple[tuple[Pace, ...], tuple[Pace, ...]] = ((), ())  # of each pass before and after

    @staticmethod
    def of(before: Measurement, after: Measurement, paces: Sequence[Pace]) -> "Around":
        """Return what lies between; where no pace is known, either calibration is an end of it."""
        models, passes = (before.model, after.model), (before.paces, after.paces)
        during = middle(models)
        if not (all(passes) and paces):
            return Around(*models, during, *models, passes)
        at, least, most = (Factors.of(*passes, paces, errors).scale(during) for errors in (0.0, -1.0, 1.0))
        return Around(*models, at, least, most, passes)


@dataclass(frozen=True)
class Factors:
    """How many times as long reads and computes take as they did at the calibrations."""

    reads: float = 1.0
    computes: float = 1.0

    @staticmethod
    def of(before: Sequence[Pace], after: Sequence[Pace], run: Sequence[Pace], errors: float = 0.0) -> "Factors":
        """Return those of a run's mean pace, and so many standard errors above it.

        before, after: a mean pace of each pass of the calibrations, whose medians count. Of what the ratio differs from
        1, noise (NOISE and the standard error) is taken off: the non-negative garrote of one number (Breiman 1995).
        """
        factors = []
        for now, *passes in zip(*map(by_kind, (run, before, after)), strict=True):
            ratio = 2 * fmean(now) / sum(map(median, passes))
            error = ratio * hypot(_error(now), _error([*passes[0], *passes[1]]))
            beyond, noise = ratio - 1, hypot(NOISE, error)
            kept = beyond * max(0.0, 1 - (noise / beyond) ** 2) if beyond else 0.0
            factors.append(max(1 + kept + errors * error, LEAST))
        return Factors(*factors)

    def scale(self, model: MeasuredModel) -> MeasuredModel:
        transfer, latency = round(model.transfer_ns * self.reads), round(model.latency_ns * self.reads)
        fields = {"transfer_ns": transfer, "latency_ns": min(latency, transfer)}
        launch_ns = max(model.launch_ns, -round(model.expert[0][-1] * self.computes))
        return model.with_ns(lambda _, tokens, ns: round(ns * self.computes), **fields, launch_ns=launch_ns)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, as a share of it: single ones differ by DIFFER at least."""
    spread = stdev(values) / fmean(values) if len(values) > 1 else 0.0
    return max(spread, DIFFER) / sqrt(len(values))
