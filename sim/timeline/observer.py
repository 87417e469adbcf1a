"""A run of the loop put onto a timeline, on whatever device: steps, layers, stalls, transfers, slots, what waits.

A part of a stream lasts from its submission, from the end of the part before or, an expert, from its arrival, whichever
is latest, to its completion as the loop handles it. On a clock of its own (SimPy) that is exact, and parts and stalls
fill a step without a gap.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from policies.core.residency import PolicyResidency, Residency
from sim.loop.observer import LoopObserver
from sim.loop.run import Run
from sim.loop.schedule import Step
from sim.timeline.file import Timeline
from sim.timeline.tracks import BatchSlotTracks, ComputeTracks, HostTracks, LinkTracks, ResidencyTracks, Scene
from sim.timeline.window import Window
from traces.steps import DECODE

OF_TRACKS = (
    *("event_routed", "submitted", "ended", "stalled", "copying", "copied", "host_began", "read_began", "cutting"),
    *("routed", "proposed", "turned_to", "interrupted", "left", "landed", "arrived", "request_ended"),
)
"""Events of a `LoopObserver` that tracks draw by themselves."""


class TimelineObserver(LoopObserver):
    """Shows the part of a run that lies in the window. `names`: of the trace's requests; `slots`: a track for each."""

    def __init__(
        self, timeline: Timeline, run: Run, group: str, names: Sequence[str], window: Window, slots: bool = True
    ) -> None:
        self._timeline = timeline
        self._run = run
        self._group = group
        self._names = names
        self._window = window
        self._with_slots = slots
        self._requests = self._decoded = 0  # requests and decode steps that have ended

    def run_begins(self, residency: Residency, now: Callable[[], int]) -> None:
        """Make the tracks, in the order in which they are shown; each event goes to those that draw it."""
        assert isinstance(residency, PolicyResidency)
        timeline, group, origin = self._timeline, self._group, now()
        self._process = timeline.process(f"{group}: compute and link")
        self._scene = scene = Scene(timeline, self._process, self._run, residency, lambda: now() - origin, origin)
        self._compute = ComputeTracks(scene)
        self._link = self._compute.link = LinkTracks(scene)
        self._host = HostTracks(scene)
        self._batch_slots = BatchSlotTracks(scene, group, self._names)
        self._residency = ResidencyTracks(scene, group, self._with_slots)
        tracks = (self._compute, self._link, self._host, self._residency)
        for event in OF_TRACKS:
            draw = [getattr(each, event) for each in tracks if event in vars(type(each))]
            setattr(self, event, draw[0] if len(draw) == 1 else partial(_each, draw))

    @property
    def is_over(self) -> bool:
        return self._window.last is not None and self._position() >= self._window.last

    def close(self) -> None:
        if self._timeline.is_open:
            for tracks in (self._link, self._host, self._batch_slots, self._residency):
                tracks.show_unfinished()
            self._timeline.close()

    def _position(self) -> int:
        return self._decoded if self._window.of == "decode steps" else self._requests

    def step_begins(self, step: Step, began: int) -> None:
        began -= self._scene.origin
        if self._position() >= self._window.first and not self.is_over and not self._timeline.is_open:
            self._timeline.open(began)
        self._began, self._before = began, self._scene.residency.counters()
        self._compute.begin(began)
        self._batch_slots.begin(step, began)

    def step_ended(self, step: Step, ended: int) -> None:
        counters = self._scene.residency.counters()
        hits, late, misses = (now - then for now, then in zip(counters[:3], self._before[:3], strict=True))
        lookups, decodes = {"hits": hits, "late": late, "misses": misses}, step.phase == DECODE
        args = {
            "request": ", ".join(self._names[place.request] for place in step.places),
            "phase": "decode" if decodes else "prefill",
            "step_of_request": ", ".join(str(place.step) for place in step.places),
            "tokens": step.tokens,
            "context": step.context,
            **lookups,
        }
        self._compute.track.end(f"decode {self._decoded}" if decodes else "prefill", args)
        self._timeline.counter(self._process, "lookups", self._began, lookups)
        self._batch_slots.end(step, ended - self._scene.origin)
        self._decoded += decodes
        self._requests += len(step.ends)
        if self.is_over and self._window.of == "decode steps":
            self.close()


def _each(calls: Sequence[Callable[..., None]], *values: Any) -> None:
    for call in calls:
        call(*values)
