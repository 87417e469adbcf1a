"""Lockstep: the simulator's decisions, executed on a device (`policies.core.script`).

What then differs between the two runs is time, never a decision.
"""

from policies.core.policy import NOTHING, Event, Float, Int
from policies.core.residency import Residency
from policies.core.script import Recorder, Script, ScriptedResidency
from sim.loop.observer import LoopObserver
from sim.loop.run import Run
from sim.loop.session import Decider


class LoopRecorder(Recorder, LoopObserver):
    """Writes down what a run of the loop decides."""


class FixedOrder(Decider):
    """Who decides where all was decided before: it hears of nothing and proposes nothing."""

    silent = True
    at_start = False

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def residency(self, slots: int, sizes: Int | None = None) -> Residency:
        """Return the one that was given."""
        return self._residency

    def begin_request(self, ordinal: int, seat: int = 0) -> None:
        """Ignored."""

    def observe(self, event: Event) -> None:
        """Ignored."""

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        """Propose nothing."""
        return None

    def end_request(self, seat: int = 0) -> None:
        """Ignored."""


class Lockstep(FixedOrder):
    """Who decides in a run in lockstep: the script, in place of the run's policy."""

    silent = False

    def __init__(self, run: Run, script: Script) -> None:
        self._run = run
        self._script = script
        self.at_start = run.policy.prefetch.cls.at_start

    def residency(self, slots: int, sizes: Int | None = None) -> Residency:
        """Return a residency that follows the script."""
        shape = self._run.shape
        return ScriptedResidency(shape, self._run.policy.divide(shape, slots), self._script)

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        """Propose nothing; but where the script's run heard proposals, their arrival is a moment."""
        return NOTHING if self._script.proposes else None
