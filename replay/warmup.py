"""What must not happen in the middle of a measured run: garbage is not collected, nothing is compiled or loaded."""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from replay.devices.device import Device
from replay.devices.virtual import VirtualDevice
from replay.driver import Driver, Plan
from sim.profiles.timing import FixedTiming, Link

DECISIONS_S = 1.0
"""Of playing on a logical clock: by then policies have learned and proposed, and all that they call is compiled."""
FIRST_STEPS = 3
"""Of a run on the device: by then kernels are loaded, and memory that is kept for them is taken."""


@contextmanager
def undisturbed(plan: Plan | None = None) -> Iterator[None]:
    """No garbage collection; `plan`: what is about to be played, whose decisions are gone through once before."""
    if plan:
        decide(plan)
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def decide(plan: Plan) -> None:
    """Play the plan's first requests on a logical clock."""
    driver = Driver(plan, VirtualDevice(FixedTiming(10, 1, 0, 1, 1), Link(0, 1, 1, plan.expert_bytes)))
    ends = time.monotonic() + DECISIONS_S
    for ordinal in range(len(plan.requests)):
        for _ in driver.steps(ordinal):
            if time.monotonic() > ends:
                break
        else:
            continue
        break
    driver.machine.land()  # devices alone call these two; the machine is thrown away
    driver.machine.interrupt()


def begin(plan: Plan, device: Device) -> None:
    """Play the plan's first steps on the device. What it leaves in slots is of no consequence."""
    driver = Driver(plan, device)
    for _ in islice(driver.steps(0), FIRST_STEPS):
        pass
    driver.pump.cut()
