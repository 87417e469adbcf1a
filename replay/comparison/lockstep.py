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
    """A decider of what was decided before: it ignores all events and proposes nothing."""

    silent = True
    at_start = False

    def __init__(self, residency: Residency) -> None:
        self._residency = residency

    def residency(self, slots: int, sizes: Int | None = None) -> Residency:
        return self._residency

    def begin_request(self, ordinal: int, batch_slot: int = 0) -> None: ...

    def observe(self, event: Event) -> None: ...

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        return None

    def end_request(self, batch_slot: int = 0) -> None: ...


class Lockstep(FixedOrder):
    """The decider of a run in lockstep: the script, in place of the run's policy."""

    silent = False

    def __init__(self, run: Run, script: Script) -> None:
        self._run = run
        self._script = script
        self.at_start = run.policy.prefetch.cls.at_start

    def residency(self, slots: int, sizes: Int | None = None) -> Residency:
        shape = self._run.shape
        return ScriptedResidency(shape, self._run.policy.divide(shape, slots), self._script)

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        return NOTHING if self._script.proposes else None  # where the script's run had proposals, they take time
