"""Lockstep: the simulator's decisions, executed on a device (`policies.core.script`).

What then differs between the two runs is time, never a decision.
"""

from policies.core.policy import NOTHING, Event, Float, Int
from policies.core.residency import Residency
from policies.core.script import Recorder, Script, ScriptedResidency
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.driver import LoopObserver, play
from sim.loop.log import RunLog
from sim.loop.run import Run


class LoopRecorder(Recorder, LoopObserver):
    """Writes down what a run of the loop decides."""


def script_of(run: Run) -> tuple[Script, RunLog]:
    """Return what the simulated run decides, and its log."""
    recorder = LoopRecorder()
    log = play(run, SimpyDevice(run.timing, run.gpu.link), observer=recorder)
    return recorder.script, log


class Lockstep:
    """Who decides in a run in lockstep: the script, in place of the run's policy (`sim.loop.session.Decider`)."""

    silent = False

    def __init__(self, run: Run, script: Script) -> None:
        self._run = run
        self._script = script

    def residency(self, slots: int) -> Residency:
        """Return a residency that follows the script."""
        shape = self._run.shape
        return ScriptedResidency(shape, self._run.gpu.policy.divide(shape, slots), self._script)

    def begin_request(self, ordinal: int, seat: int = 0) -> None:
        """Ignored."""

    def observe(self, event: Event) -> None:
        """Ignored."""

    def propose(self, event: Event) -> tuple[Int, Float] | None:
        """Propose nothing; but where the script's run heard proposals, their arrival is a moment."""
        return NOTHING if self._script.proposes else None

    def end_request(self, seat: int = 0) -> None:
        """Ignored."""
