"""The one interface between the driver and whatever moves bytes and multiplies matrices.

A device has two streams. The compute stream runs what it is given in the order in which it is given; the link copies
chunks in the order in which they are given. The driver submits work and asks for the next completion, so a logical
clock, threads and CUDA streams polled by one thread all fit. Everything else is shared by all devices.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

from traces.errors import InputError


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


WATCHDOG_S = 60.0
"""Seconds without any completion after which something is stuck: no expert's copy or compute takes so long."""


class Device(ABC):
    """Two streams, submitted to without waiting; completions of each arrive in the order of submission."""

    watchdog_s: float = WATCHDOG_S
    chunks_in_flight: int = 1
    """How many chunks the driver may have submitted at once."""
    predictor_takes_time: bool = True
    """Whether rule 14 applies: demand transfers start before the prefetcher is asked."""

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
    def expert(self, expert: int, slot: int, tokens: int) -> None:
        """Compute: `tokens` tokens through `expert`, which is in `slot` and stays there until this ends."""

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


def stuck(seconds: float, oldest: Iterable[Completion]) -> InputError:
    """Nothing has ended for too long; `oldest` of each stream are under way."""
    named = [(each.kind.name.lower(), each.expert) for each in oldest]
    waiting = " and ".join(kind if expert < 0 else f"{kind} of expert {expert}" for kind, expert in named)
    return InputError(f"the device is stuck: nothing has ended for {seconds:g} s, under way since: {waiting}")


def nothing_under_way() -> RuntimeError:
    """The driver waits for what it never submitted: a defect, reported instead of a hang."""
    return RuntimeError("waiting for a completion while nothing is under way")
