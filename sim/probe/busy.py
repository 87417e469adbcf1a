"""Whether the machine is quiet: what other programs take of its processors while this one waits."""

import time

import psutil

from traces.errors import InputError

WATCHED_S = 1.0
QUIET = 0.25
"""Of a processor: more, and a measurement would be of the others as well."""


def load() -> float:
    """Return how many processors are busy in the mean of a second in which this process sleeps."""
    return float(sum(psutil.cpu_percent(WATCHED_S, percpu=True))) / 100


class Others:
    """What other programs take of the processors from here on."""

    def __init__(self) -> None:
        self._before, self._since = _seconds(), time.monotonic()

    def seen(self) -> tuple[float, str]:
        """Return how many processors they took in the mean, and which took most; empty where none took any."""
        took = {key: seconds - self._before.get(key, 0.0) for key, seconds in _seconds().items()}
        largest = max(took, key=lambda key: took[key], default=None)
        passed = max(time.monotonic() - self._since, 1e-3)
        return sum(took.values()) / passed, largest[1] if largest and took[largest] > 0 else ""


def _seconds() -> dict[tuple[int, str], float]:
    """Return what each program but this one and those that it started has computed, in seconds of a processor."""
    own = psutil.Process()
    family = {own.pid, *(child.pid for child in own.children(recursive=True))}
    known = psutil.process_iter(["pid", "name", "cpu_times"])
    return {
        (each.info["pid"], each.info["name"] or ""): each.info["cpu_times"].user + each.info["cpu_times"].system
        for each in known
        if each.info["pid"] not in family and each.info["cpu_times"]
    }


def require_quiet(busy: float) -> None:
    """Raise InputError where others use so many processors."""
    if busy > QUIET:
        raise InputError(
            f"the machine is busy: other programs use {busy:.1f} of its {psutil.cpu_count()} processors; end them and "
            "start again, or measure all the same with --even-if-busy"
        )
