"""Runs on a device, from the first step to the last."""

from collections.abc import Callable

from sim.loop.device import Device
from sim.loop.driver import Driver
from sim.loop.log import RunLog, StepRow
from sim.loop.observer import LoopObserver
from sim.loop.run import Run
from sim.loop.session import Decider


def play(
    run: Run,
    device: Device,
    on_step: Callable[[StepRow], None] = lambda row: None,
    decider: Decider | None = None,
    observer: LoopObserver | None = None,
) -> RunLog:
    """Return the log. on_step: gets the row of each step that has ended; decider: if not the run's policies."""
    return Driver(run, device, decider, observer).run(on_step)
