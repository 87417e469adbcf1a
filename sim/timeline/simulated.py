"""A simulated run put onto a timeline (`sim.timeline.observer`), whole or the part in a window."""

from collections.abc import Sequence
from contextlib import suppress

from sim.engines import simpy_engine
from sim.loop.log import Ended, RunLog, counting
from sim.loop.run import Run
from sim.timeline.file import Timeline
from sim.timeline.observer import TimelineObserver
from sim.timeline.window import WHOLE, Window


class WindowOver(Exception):  # noqa: N818  # no error: it ends a run that has been shown
    """The request in which the window ends has ended."""


def play(
    run: Run, ended: Ended, timeline: Timeline, names: Sequence[str], window: Window = WHOLE, slots: bool = True
) -> None:
    """Run a run on the SimPy engine and put it onto `timeline`; `ended` takes the log of each request when it ends.

    names: of the trace's requests. slots: whether each has a track. InputError for a time beyond a clock of 64 bits.
    """
    observer = TimelineObserver(timeline, run, "simulated", names, window, slots)

    def request_ended(log: RunLog) -> None:
        ended(log)
        if observer.is_over:
            observer.close()
            if window.stops:
                raise WindowOver

    with counting(run), suppress(WindowOver):
        simpy_engine.play(run, request_ended, observer)
    observer.close()
