"""What devices on real hardware share: time in their calls, turns over experts, and the report of one that is stuck."""

from collections.abc import Callable, Iterable
from functools import wraps
from time import perf_counter_ns
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from sim.loop.device import Completion, Device
from traces.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound=Device)
WATCHDOG_S = 60.0
"""Seconds without any completion after which something is stuck: no expert's copy or compute takes so long."""

GOLDEN = 0.6180339887498949


def spread(turn: int, count: int) -> int:
    """Return one of `count` things, so that turns go all over them."""
    return int(turn * GOLDEN % 1.0 * count)


class Pace(NamedTuple):
    """What one expert takes now, among others like it."""

    read_ns: float
    compute_ns: float  # for one token


def timed(method: Callable[Concatenate[D, P], T]) -> Callable[Concatenate[D, P], T]:
    """Count the time in this call as the device's, not as the host's bookkeeping."""

    @wraps(method)
    def call(self: D, /, *args: P.args, **kwargs: P.kwargs) -> T:
        began = perf_counter_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.inside_ns[method.__name__] += perf_counter_ns() - began

    return call


def stuck(seconds: float, oldest: Iterable[Completion]) -> InputError:
    """Return the error for a device on which nothing ends; `oldest`: of each stream, what is under way."""
    named = [(each.kind.name.lower(), each.expert) for each in oldest]
    waiting = " and ".join(kind if expert < 0 else f"{kind} of expert {expert}" for kind, expert in named)
    return InputError(f"the device is stuck: nothing has ended for {seconds:g} s, under way since: {waiting}")
