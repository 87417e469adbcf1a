"""What the simulator says of a replayed cell, on this machine as measured and on the hardware profile.

What a real device is compared with is the simulator on this machine as measured just before and just after, not on the
profile named by `--hardware`, which describes another one; that prediction stands beside it. How far both calibrations
disagree is the interval of the prediction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replay.calibration.contention import effective
from replay.choice import Choice, Described
from sim.engines import engine
from sim.experiment import AUTO
from sim.loop.log import RunLog
from sim.profiles.measured import MeasuredModel
from sim.profiles.timing import Link, Timing
from sim.results.metrics import Cell, Row, summarise

PREDICTED = ("tpot_mean_ms", "tpot_p99_ms", "ttft_mean_ms", "hit_rate")
"""Figures of the simulator that stand in a replay's row."""


@dataclass(frozen=True)
class Prediction:
    """What the simulator says of the same cell."""

    machine: str
    row: Row
    interval_ms: tuple[float, float] | None = None  # of its TPOT mean, by either of two calibrations


def under_contention(choice: Choice, model: MeasuredModel, predictor_ns: int) -> Described:
    """Return the machine of that model as this run's decoded tokens experience it, contention included."""
    chunk_bytes = choice.loaded.experiment.chunk_bytes

    def simulate(on: MeasuredModel) -> RunLog:
        return engine.simulate(AUTO, choice.on(on.timing(predictor_ns), on.link(chunk_bytes)))

    slowed = effective(model, simulate)
    return slowed.timing(predictor_ns), slowed.link(chunk_bytes)


def predict(choice: Choice, cell: Cell, calibrations: Sequence[MeasuredModel]) -> list[Prediction]:
    """Return what the simulator says on this machine as measured, and on the hardware profile.

    calibrations: as fast as the machine may have been, as it was measured, and as slow; none on a logical clock.
    """
    loaded = choice.loaded

    def predicted(timing: Timing, link: Link, machine: str) -> Row:
        there = replace(cell, hardware=machine, predictor_us=timing.predictor_ns / 1_000)
        log = engine.simulate(AUTO, choice.on(timing, link))
        return summarise(log, there, loaded.trace.requests)[0]

    profile = loaded.hardware.name
    predictions = [Prediction(profile, predicted(loaded.timing(choice.policy), loaded.link, profile))]
    if calibrations:
        here = "this machine as measured"
        predictor_ns = round((cell.predictor_us or 0.0) * 1_000)
        machines = (under_contention(choice, each, predictor_ns) for each in calibrations)
        fastest, during, slowest = (predicted(*machine, here) for machine in machines)
        interval = None
        if during["tpot_mean_ms"] is not None:
            low, high = sorted((fastest["tpot_mean_ms"], slowest["tpot_mean_ms"]))
            interval = low, high
        predictions.insert(0, Prediction(here, during, interval))
    return predictions
