"""A run of the loop put onto a timeline, on whatever device: steps, layers, stalls, transfers, slots, what waits.

A part of a stream lasts from its submission, from the end of the part before or, an expert, from its arrival, whichever
is latest, to its completion as the loop handles it. On a clock of its own (SimPy) that is exact, and parts and stalls
fill a step without a gap.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from policies.core.residency import PolicyResidency
from sim.engines import simpy_engine
from sim.loop.log import Ended, RunLog, counting
from sim.loop.observer import LoopObserver
from sim.loop.run import Run
from sim.loop.schedule import Step
from sim.timeline.file import Timeline
from sim.timeline.tracks import ComputeTrack, HostTracks, LinkTrack, ResidencyTracks, Scene
from sim.timeline.window import WHOLE, Window
from traces.steps import DECODE


class WindowOver(Exception):  # noqa: N818  # no error: it ends a run that has been shown
    """The request in which the window ends has ended."""


def play(run: Run, ended: Ended, timeline: Timeline, names: Sequence[str], window: Window = WHOLE) -> None:
    """Run a run on the SimPy engine and put it onto `timeline`; `ended` takes the log of each request when it ends.

    names: of the trace's requests. InputError for a time beyond a clock of 64 bits.
    """
    observer = TimelineObserver(timeline, run, "simulated", names, window)

    def request_ended(log: RunLog) -> None:
        ended(log)
        if observer.is_over and window.stops:
            raise WindowOver

    with counting(run), suppress(WindowOver):
        simpy_engine.play(run, request_ended, observer)
    observer.close()


@dataclass(eq=False)
class TimelineObserver(LoopObserver):
    """Shows the part of a run that lies in the window. `names`: of the trace's requests."""

    timeline: Timeline
    run: Run
    group: str
    names: Sequence[str]
    window: Window
    _ended: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # steps, by whether they decode

    def run_begins(self, residency: PolicyResidency, now: Callable[[], int]) -> None:
        """Make the tracks, in the order in which they are shown; each event goes to those that draw it."""
        timeline, group, origin = self.timeline, self.group, now()
        self._process = timeline.process(f"{group}: compute and link")
        self._scene = scene = Scene(timeline, self._process, self.run, residency, lambda: now() - origin, origin)
        self._compute = ComputeTrack(scene)
        self._compute.link = LinkTrack(scene)
        self._unfinished = self._compute.link, HostTracks(scene), ResidencyTracks(scene, group)
        tracks = (self._compute, *self._unfinished)
        for event in {*dir(LoopObserver)} - {*dir(object), *vars(TimelineObserver)}:
            if draw := [getattr(each, event) for each in tracks if event in vars(type(each))]:
                setattr(self, event, draw[0] if len(draw) == 1 else partial(_each, draw))

    @property
    def _position(self) -> int:
        return self._ended[self.window.decodes]

    @property
    def is_over(self) -> bool:
        return self.window.last is not None and self._position >= self.window.last

    def close(self) -> None:
        if self.timeline.is_open:
            for tracks in self._unfinished:
                tracks.show_unfinished()
            self.timeline.close()

    def step_begins(self, step: Step, began: int) -> None:
        began -= self._scene.origin
        if self._position >= self.window.first and not self.is_over and not self.timeline.is_open:
            self.timeline.open(began)
        self._began, self._before = began, self._scene.residency.counters()
        self._compute.begin(began)

    def step_ended(self, step: Step, ended: int) -> None:
        counters = self._scene.residency.counters()
        hits, late, misses = (now - then for now, then in zip(counters[:3], self._before[:3], strict=True))
        lookups, decodes = {"hits": hits, "late": late, "misses": misses}, step.phase == DECODE
        args: dict[str, object] = {
            "request": ", ".join(self.names[place.request] for place in step.places),
            "phase": "decode" if decodes else "prefill",
            "step_of_request": ", ".join(str(place.step) for place in step.places),
            "tokens": step.tokens,
            "context": step.context,
            **lookups,
        }
        self._compute.end(f"decode {self._ended[True]}" if decodes else "prefill", args)
        self.timeline.counter(self._process, "lookups", self._began, lookups)
        self._ended[decodes] += 1
        if self.is_over:
            self.close()


def _each(calls: Sequence[Callable[..., None]], *values: Any) -> None:
    for call in calls:
        call(*values)
