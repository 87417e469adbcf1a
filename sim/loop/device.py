"""What the loop runs on: a device, a few serial streams behind one small interface; all else is shared by all devices.

Compute stream and link take work in the order in which it is given; host and disk (rules 13, 17) one piece at a time.
An expert's compute may be submitted while its last piece is flying: the device holds it, and all behind it, back until
that piece has ended. The loop submits work without waiting and asks for the next completion.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
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
    READ = 6  # from the disk into host memory
    HOP = 7  # the activations' way to the host and back
    HOST = 8  # an expert's compute on the host
    WAKE = 9  # an idle run is to look for arrivals


ROUTERS, COPIES, ALL = range(3)
"""What the loop answers when it ends: routers and heads (and whatever is no copy and no part of an event); copies as
well; or all."""


class Completion(NamedTuple):
    """One piece of work has ended; `expert` where the work was an expert's compute or one of its pieces."""

    kind: Kind
    expert: int = -1


def code_of(kind: int, expert: int = -1) -> int:
    """Return a completion as one number."""
    return expert << 4 | kind


Work = tuple[int, int, int]
"""An expert's compute: expert, the slot that holds it, tokens."""


@dataclass(slots=True)
class Transfer:
    """An expert on its way into a slot."""

    expert: int
    slot: int
    demand: bool  # started as one
    size: int  # bytes
    sent: int = 0  # of these, submitted


class Device(ABC):
    """Two streams, submitted to without waiting; completions of each arrive in the order of submission.

    What ended before something else began is reported before it: a copy before the compute that waited for it.
    """

    tail_bytes: int = 0
    """Behind a prefetch, the next piece is submitted when at most this much of it is flying: what the host takes to
    answer, in bytes. 0: one piece is in flight."""
    predictor_takes_time: bool = True
    """Whether rule 14 applies: demand transfers start before the prefetcher is asked."""
    stands_still: bool = False
    """Whether its clock stands still while the host decides."""
    predicts: bool = False
    """Whether `predict` may take the predictor's time."""
    hop_takes_time: bool = True
    """Whether the activations' way to the host does."""

    @cached_property
    def inside_ns(self) -> Counter[str]:
        """Return the host's time in calls of this device, by call, waiting included; none on a clock of its own."""
        return Counter()

    def prepare(self, contexts: Iterable[int]) -> None:  # noqa: B027  most have nothing to prepare
        """Prepare for decoding tokens at these context lengths."""

    @abstractmethod
    def now(self) -> int:
        """Return the device's clock, in ns."""

    # The link

    @abstractmethod
    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        """Copy bytes `first` to `last` of `expert` into `slot`."""

    @abstractmethod
    def discard_copies(self) -> None:
        """Forget the copies under way; none of them writes hereafter. Called while nothing computes (`--cold`)."""

    # The compute stream

    @abstractmethod
    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        """Compute everything before the router of MoE layer `layer`, and the router; ends as ROUTER."""

    def predict(self) -> bool:
        """Take the predictor's time; return False where none is taken. Called if `predicts`."""
        return False

    @abstractmethod
    def experts(self, works: Sequence[Work]) -> None:
        """Compute each expert on its tokens; one completion for each, in this order.

        An expert is in its slot, or its last piece is flying, and stays there until its completion.
        """

    @abstractmethod
    def combine(self, layer: int, tokens: int, context: int) -> None:
        """Compute the weighted sum of the outputs of the experts of MoE layer `layer`; ends as COMBINE."""

    @abstractmethod
    def head(self, tokens: int, requests: int = 1) -> None:
        """Compute what follows the last MoE layer."""

    # Drafts, host, disk, the clock of an idle run (rules 13, 17, 18, 20): a device without them refuses what needs them

    def draft(self, ns: int) -> None:
        """Draft tokens for so long, before the dense part that is submitted next; ends with it."""
        raise _lacks("draft that takes time")

    def hop(self) -> None:
        """Take the activations to the host and back; ends as HOP."""
        raise _lacks("experts computed on the host")

    def host(self, expert: int, tokens: int) -> None:
        """Compute `expert` on the host, which does nothing else now; ends as HOST."""
        raise _lacks("experts computed on the host")

    def read(self, expert: int) -> None:
        """Read `expert` from the disk, which does nothing else now; ends as READ."""
        raise _lacks("a disk below host memory")

    def discard_reads(self) -> None:  # noqa: B027  most have no disk
        """Forget the read under way (`--cold`)."""

    def wake_at(self, ns: int) -> None:
        """End as WAKE when the clock shows `ns`."""
        raise _lacks("arrivals of requests")

    # Completions

    @abstractmethod
    def next_completion(self) -> Completion:
        """Wait for the next completion.

        RuntimeError where nothing is under way, InputError where nothing ends for too long.
        """

    def completions(self, answers: int) -> Sequence[int]:
        """Wait for the next end that is answered; return what has ended up to then, that last.

        `code_of` each and its time, in turn. answers: ROUTERS, COPIES or ALL; others may be reported late.
        """
        return code_of(*self.next_completion()), self.now()

    @abstractmethod
    def poll(self) -> Completion | None:
        """Return the next completion if it has happened by now, without waiting."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


def _lacks(what: str) -> InputError:
    return InputError(f"this device has no {what}: simulate it (moe-sim), or choose another policy")


def nothing_under_way() -> RuntimeError:
    """The loop waits for what it never submitted: a defect, reported instead of a hang."""
    return RuntimeError("waiting for a completion while nothing is under way")
