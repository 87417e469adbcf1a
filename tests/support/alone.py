"""Events made by hand, of a request that is played alone."""

import numpy as np

from policies.core.policy import NO_INTS, Event, Int


def alone(
    phase: int,
    layer: int,
    step: int,
    experts: Int,
    counts: Int,
    serial: int = 0,
    ahead: tuple[Int, Int] = (NO_INTS, NO_INTS),
) -> Event:
    """Return an event of the only request, in step number `step`."""
    one = np.array([0, step, 0, len(experts)])
    return Event(serial, phase, layer, experts, counts, one[:1], one[1:2], one[2:], experts, counts, *ahead)
