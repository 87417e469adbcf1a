"""What must not happen in the middle of a measured run: garbage is not collected, nothing is compiled or loaded."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sim.engines.simpy_engine import SimpyDevice
from sim.loop.driver import Driver
from sim.loop.run import Run
from sim.loop.session import Decider
from sim.profiles.timing import FixedTiming, Link

DECISIONS_S = 1.0
"""Of running on a logical clock: by then policies have learned and proposed, and all that they call is compiled."""


@contextmanager
def undisturbed(run: Run | None = None, decider: Decider | None = None) -> Iterator[None]:
    """No garbage collection; `run`: what is about to be run, whose decisions are gone through once before.

    decider: who decides, if not the run's policies.
    """
    if run:
        decide(run, decider)
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def decide(run: Run, decider: Decider | None = None) -> None:
    """Run the run's first requests on a logical clock."""
    device = SimpyDevice(FixedTiming(10, 1, 0, 1, 1), Link(0, 1, 1, run.gpu.link.expert_bytes))
    driver = Driver(run, device, decider)
    ends = time.monotonic() + DECISIONS_S
    for _ in driver.steps():
        if time.monotonic() > ends:
            break
