"""A machine as measured before a run and after it and, where the device reports its pace, during the run.

The calibrations take the pace in the same way as the run's pauses (`replay.calibration.pace`), and what they measured
is scaled by how the two compare, as far as that is more than noise. Nothing that the run itself moves or computes is
used: a prediction stays one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot, sqrt
from statistics import fmean, median, stdev
from typing import Any

from replay.calibration.measure import Measurement, middle
from replay.calibration.pace import by_kind
from replay.devices.waiting import Pace
from sim.profiles.measured import TABLES, MeasuredModel

NOISE = 0.03
"""By what share mean paces of a run and of its calibrations differ, besides what their own repeats show, on a machine
that does not change its speed. Of two tables of a shared machine (`replay/results`), one hardly depends on it between
2 and 10%; the other, of an hour in which it changed more, is predicted the better the less it is."""

DIFFER = 0.05
"""Standard deviation of single paces, at least, as a share: a few that happen to be alike are not exact."""

LEAST = 0.1
"""Of a factor: so that the lower end of an interval stays a duration, however large the error."""


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

        before, after: a mean pace of each pass of the calibrations, whose medians count as those of other figures do.
        Of what the ratio differs from 1, noise is taken off: all of it up to the noise, and the less the more they
        differ (the non-negative garrote of one number, Breiman 1995). The noise is NOISE and the standard error.
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
        """Return the model of a machine that is so much slower."""
        tables: dict[str, Any] = {
            name: tuple((*row[:-1], round(row[-1] * self.computes)) for row in getattr(model, name)) for name in TABLES
        }
        transfer, latency = round(model.transfer_ns * self.reads), round(model.latency_ns * self.reads)
        launch = max(model.launch_ns, -tables["expert"][0][-1])
        return replace(model, transfer_ns=transfer, latency_ns=min(latency, transfer), launch_ns=launch, **tables)


def _error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, as a share of it: single ones differ by DIFFER at least."""
    spread = stdev(values) / fmean(values) if len(values) > 1 else 0.0
    return max(spread, DIFFER) / sqrt(len(values))
