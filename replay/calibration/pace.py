"""How fast a machine is during a run: about every SECONDS the run pauses, and a few experts are read and computed.

A shared machine drifts within seconds, between the calibrations. The same number of decode steps lies between any two
pauses, so the mean of their paces is that of the work. Nothing that the run itself moves or computes is used.
"""

from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Protocol, runtime_checkable

from replay.devices.waiting import Pace
from sim.loop.log import COLUMNS, StepRow
from traces.steps import DECODE

PHASE, STEP_NS = COLUMNS.index("phase"), COLUMNS.index("step_ns")

SECONDS = 0.5
"""Of decode steps before the first pause, at least; as many decode steps as they hold lie between all others."""

MOST = 3.0
"""A pace counts as at most so many times the median: a disk that stands still for a second in one pause of thirty would
else stand still, in the prediction, for half of the run."""

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


def mean_pace(paces: Sequence[Pace]) -> Pace | None:
    """Return the mean, those that are far beyond the median cut down; None of none."""
    return Pace(*map(fmean, by_kind(paces))) if paces else None


def by_kind(paces: Sequence[Pace]) -> list[list[float]]:
    """Return all reads, and all computes, those that are far beyond the median cut down."""
    return [[min(each, MOST * median(of)) for each in of] for of in zip(*paces, strict=True)]
