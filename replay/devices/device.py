"""The one interface between the driver and whatever moves bytes and multiplies matrices.

A device has two streams. The compute stream runs what it is given in the order in which it is given; the link copies
pieces in the order in which they are given. An expert's compute may be submitted while its last piece is flying: the
device holds it, and all that is submitted behind it, back until that piece has ended. The driver submits work and asks
for the next completion, so a logical clock, threads and CUDA streams polled by one thread all fit. Everything else is
shared by all devices.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import wraps
from time import perf_counter_ns
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from traces.errors import InputError

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D", bound="Device")


class Kind(IntEnum):
    """What has ended."""

    COPY = 0
    PREDICTOR = 1
    EXPERT = 2
    COMBINE = 3
    HEAD = 4
    ROUTER = 5  # the dense part of a layer: only now may its routing be used


class Completion(NamedTuple):
    """One piece of work has ended; `expert` where the work was an expert's compute or one of its chunks."""

    kind: Kind
    expert: int = -1


Work = tuple[int, int, int]
"""An expert's compute: expert, the slot that holds it, tokens."""

WATCHDOG_S = 60.0
"""Seconds without any completion after which something is stuck: no expert's copy or compute takes so long."""


class Device(ABC):
    """Two streams, submitted to without waiting; completions of each arrive in the order of submission.

    What ended before something else began is reported before it: a copy before the compute that waited for it.
    """

    watchdog_s: float = WATCHDOG_S
    tail_bytes: int = 0
    """The next piece is submitted when at most this much is flying: what the host takes to answer, in bytes."""
    inside_ns: int = 0
    """Time that the host has spent in calls of this device, waiting included; 0 on a clock of its own."""
    outside_ns: int = 0
    """Time that the loop of the latest run has spent outside of them: bookkeeping, and the policy's own work."""
    predictor_takes_time: bool = True
    """Whether rule 14 applies: demand transfers start before the prefetcher is asked."""

    def prepare(self, contexts: Iterable[int]) -> None:  # noqa: B027  most have nothing to prepare
        """Before a run: tokens are going to be decoded at these context lengths."""

    @abstractmethod
    def now(self) -> int:
        """The device's clock, in ns."""

    @abstractmethod
    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        """Link: bytes `first` to `last` of `expert` into `slot`."""

    @abstractmethod
    def dense(self, layer: int, tokens: int, context: int) -> None:
        """Compute: everything before the router of MoE layer `layer`, and the router; ends as ROUTER."""

    def predict(self) -> bool:
        """Compute: the predictor's time, if this device makes up for it; False where it passes by itself."""
        return False

    @abstractmethod
    def experts(self, works: Sequence[Work]) -> None:
        """Compute: each expert on its tokens; one completion for each, in this order.

        An expert is in its slot, or its last piece is flying, and stays there until its completion.
        """

    @abstractmethod
    def combine(self, tokens: int) -> None:
        """Compute: the weighted sum of the experts' outputs."""

    @abstractmethod
    def head(self, tokens: int) -> None:
        """Compute: what follows the last MoE layer."""

    @abstractmethod
    def next_completion(self) -> Completion:
        """Wait for the next completion.

        RuntimeError where nothing is under way, InputError where nothing ends within `watchdog_s`.
        """

    @abstractmethod
    def discard_copies(self) -> None:
        """`--cold`, while nothing computes: forget the copies under way; none of them writes hereafter."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


def timed(method: Callable[Concatenate[D, P], T]) -> Callable[Concatenate[D, P], T]:
    """Count the time in this call as the device's, not as the host's bookkeeping."""

    @wraps(method)
    def call(self: D, /, *args: P.args, **kwargs: P.kwargs) -> T:
        began = perf_counter_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.inside_ns += perf_counter_ns() - began

    return call


def stuck(seconds: float, oldest: Iterable[Completion]) -> InputError:
    """Nothing has ended for too long; `oldest` of each stream are under way."""
    named = [(each.kind.name.lower(), each.expert) for each in oldest]
    waiting = " and ".join(kind if expert < 0 else f"{kind} of expert {expert}" for kind, expert in named)
    return InputError(f"the device is stuck: nothing has ended for {seconds:g} s, under way since: {waiting}")


def nothing_under_way() -> RuntimeError:
    """The driver waits for what it never submitted: a defect, reported instead of a hang."""
    return RuntimeError("waiting for a completion while nothing is under way")
