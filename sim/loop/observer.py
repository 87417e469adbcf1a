"""What happens in a run, in its order: one method for each kind of event, each of which does nothing by default.

The residency's own events are `policies.core.residency.ResidencyObserver`'s.
"""

from collections.abc import Callable, Sequence

from policies.core.residency import NO_EXPERT, PolicyResidency, ResidencyObserver
from sim.loop.device import Completion, Kind, Transfer
from sim.loop.schedule import Step


class LoopObserver(ResidencyObserver):
    """Is called at each event of a run."""

    def run_begins(self, residency: PolicyResidency, now: Callable[[], int]) -> None:
        """Nothing has been run yet; `now` returns the device's time."""

    def step_begins(self, step: Step, began: int) -> None:
        """A step is about to be run."""

    def step_ended(self, step: Step, ended: int) -> None:
        """Its head has ended."""

    def event_routed(self, tokens: dict[int, int], hits: list[int], late: list[int]) -> None:
        """An event was looked up: the tokens of each of its experts, which are there, and which are on their way."""

    def submitted(self, kind: Kind, experts: Sequence[int] = (NO_EXPERT,)) -> None:
        """Work is submitted to the compute stream."""

    def ended(self, completion: Completion) -> None:
        """Work of the compute stream has ended, or of host or disk."""

    def stalled(self, cause: int, began: int, ended: int, on_link: int) -> None:
        """The compute stream waited, for one of `STALLS`, while a piece of `on_link` was on the link (or NO_EXPERT)."""

    def copying(self, transfer: Transfer, first: int, upto: int) -> None:
        """A piece is submitted to the link."""

    def copied(self) -> None:
        """The oldest piece in flight has ended."""

    def host_began(self, kind: Kind, expert: int, tokens: int) -> None:
        """The activations are on their way (HOP), or the host computes `expert` on its tokens (HOST)."""

    def read_began(self, expert: int, demanded: bool) -> None:
        """The disk reads `expert`, for a miss or a prefetch."""

    def cutting(self) -> None:
        """`--cold` is about to discard what is under way."""
