"""How fast a machine is during a run: the run pauses, a few experts are read and computed, and it continues.

A shared machine drifts within seconds, a calibration before a run and one behind it miss what happens between. So about
every SECONDS the run's clock stops at the end of a step, once nothing is under way, and the device reports its pace.
The same number of decode steps lies between any two pauses: so the mean of their paces is that of the work, slow
periods having as many pauses a step as others. The calibrations take the pace in the same way, and what they measured
is scaled by how the two compare, as far as that is more than noise. Nothing that the run itself moves or computes is
used: a prediction stays one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt
from statistics import fmean, median, stdev
from typing import Any, Protocol, runtime_checkable

from replay.devices.waiting import Pace
from sim.loop.log import COLUMNS, StepRow
from sim.profiles.measured import TABLES, MeasuredModel
from traces.steps import DECODE

PHASE, STEP_NS = COLUMNS.index("phase"), COLUMNS.index("step_ns")

SECONDS = 0.5
"""Of decode steps before the first pause, at least; as many decode steps as they hold lie between all others."""

MOST = 3.0
"""A pace counts as at most so many times the median: a disk that stands still for a second in one pause of thirty would
else stand still, in the prediction, for half of the run."""

NOISE = 0.03
"""By what share mean paces of a run and of its calibrations differ, besides what their own repeats show, on a machine
that does not change its speed. Of two tables of a shared machine (`replay/results`), one hardly depends on it between
2 and 10%; the other, of an hour in which it changed more, is predicted the better the less it is."""

DIFFER = 0.05
"""Standard deviation of single paces, at least, as a share: a few that happen to be alike are not exact."""

LEAST = 0.1
"""Of a factor: so that the lower end of an interval stays a duration, however large the error."""

OnStep = Callable[[StepRow], None]


@runtime_checkable
class Paced(Protocol):
    """A device that can report its pace at the end of a step."""

    def pace(self) -> Pace:
        """Stop the clock, and measure."""


def pausing(device: object, paces: list[Pace], on_step: OnStep) -> OnStep:
    """Return `on_step` with pauses, whose paces are added to `paces`; as it is for a device without."""
    if not isinstance(device, Paced):
        return on_step
    paced, decoded_ns, steps, every = device, 0, 0, 0

    def ended(row: StepRow) -> None:
        nonlocal decoded_ns, steps, every
        on_step(row)
        if row.numbers[PHASE] != DECODE:
            return
        steps += 1
        decoded_ns += row.numbers[STEP_NS]
        if not every and decoded_ns >= SECONDS * 1e9:
            every = steps
        if every and steps >= every:
            paces.append(paced.pace())
            steps = 0

    return ended


@dataclass(frozen=True)
class Factors:
    """How many times as long reads and computes take as they did at the calibrations."""

    reads: float = 1.0
    computes: float = 1.0

    @staticmethod
    def of(before: Sequence[Pace], after: Sequence[Pace], run: Sequence[Pace], errors: float = 0.0) -> "Factors":
        """Return those of a run's mean pace, and so many standard errors above it; 1 where a pace is not known.

        before, after: a mean pace of each pass of the calibrations, whose medians count as those of other figures do.
        Of what the ratio differs from 1, noise is taken off: all of it up to the noise, and the less the more they
        differ (the non-negative garrote of one number, Breiman 1995). The noise is NOISE and the standard error.
        """
        if not (before and after and run):
            return Factors()
        found = []
        for now, *passes in zip(*map(_by_kind, (run, before, after)), strict=True):
            ratio = 2 * fmean(now) / sum(map(median, passes))
            error = ratio * hypot(_error(now), _error([*passes[0], *passes[1]]))
            beyond, noise = ratio - 1, hypot(NOISE, error)
            kept = beyond * max(0.0, 1 - (noise / beyond) ** 2) if beyond else 0.0
            found.append(max(1 + kept + errors * error, LEAST))
        return Factors(*found)

    def scale(self, model: MeasuredModel) -> MeasuredModel:
        """Return the model of a machine that is so much slower."""
        tables: dict[str, Any] = {
            name: tuple((*row[:-1], round(row[-1] * self.computes)) for row in getattr(model, name)) for name in TABLES
        }
        transfer, latency = round(model.transfer_ns * self.reads), round(model.latency_ns * self.reads)
        launch = max(model.launch_ns, -tables["expert"][0][-1])
        return replace(model, transfer_ns=transfer, latency_ns=min(latency, transfer), launch_ns=launch, **tables)


def mean_pace(paces: Sequence[Pace]) -> Pace | None:
    """Return the mean, those that are far beyond the median cut down; None of none."""
    return Pace(*map(fmean, _by_kind(paces))) if paces else None


def _by_kind(paces: Sequence[Pace]) -> tuple[list[float], list[float]]:
    """Return all reads, and all computes, those that are far beyond the median cut down."""
    reads, computes = ([min(each, MOST * median(of)) for each in of] for of in zip(*paces, strict=True))
    return reads, computes


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, as a share of it: single ones differ by DIFFER at least."""
    spread = stdev(values) / fmean(values) if len(values) > 1 else 0.0
    return max(spread, DIFFER) / sqrt(len(values))
