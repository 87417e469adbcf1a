"""Whether the machine is quiet: what other programs take of its processors while this one waits."""

import psutil

from traces.errors import InputError

WATCHED_S = 1.0
QUIET = 0.25
"""Of a processor: more, and a measurement would be of the others as well."""


def load() -> float:
    """Return how many processors are busy in the mean of a second in which this process sleeps."""
    return float(sum(psutil.cpu_percent(WATCHED_S, percpu=True))) / 100


def require_quiet(busy: float) -> None:
    """Raise InputError where others use so many processors."""
    if busy > QUIET:
        raise InputError(
            f"the machine is busy: other programs use {busy:.1f} of its {psutil.cpu_count()} processors; end them and "
            "start again, or measure all the same with --even-if-busy"
        )
