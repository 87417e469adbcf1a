"""A replay put onto a timeline: what the device's streams did, as the host saw it.

A wrapper around any device hears what is submitted and what ends. A part of a stream lasts from its submission, from
the end of the part before or, an expert, from its arrival, whichever is latest, to its completion as polled; on a clock
of its own (`virtual`) that is exact. Slots and queues are heard from the residency machine, as in a simulated run
(`sim.timeline.residency_tracks`).
"""

from collections import deque
from collections.abc import Sequence

from policies.core.policy import Shape
from policies.core.residency import Residency
from replay.devices.device import Completion, Device, Kind, Work
from sim.timeline.file import Args, Timeline, Track
from sim.timeline.residency_tracks import ResidencyTracks, expert_args, expert_name

GROUP = "measured"


class ObservedDevice(Device):
    """The same device, whose work is shown while `timeline` is open; times count from its making."""

    def __init__(self, device: Device, timeline: Timeline, shape: Shape, slots: bool) -> None:
        self._device = device
        self._timeline = timeline
        self._shape = shape
        self._slots = slots
        self.tail_bytes = device.tail_bytes
        self.predictor_takes_time = device.predictor_takes_time
        process = timeline.process(f"{GROUP}: compute and link")
        self._steps, self._compute = (
            timeline.track(process, "steps"),
            Stream(timeline, timeline.track(process, "compute")),
        )
        self._link = Stream(timeline, timeline.track(process, "link"))
        self._arrivals: dict[int, int] = {}  # when the latest piece of an expert ended
        self._step = 0  # number of the step under way
        self._began: int | None = None  # and when it began
        self._origin = device.now()
        timeline.open(0)

    def watch(self, machine: Residency) -> None:
        """Show slots and queues of the machine that drives this device."""
        self.residency = ResidencyTracks(self._timeline, machine, self._shape, self._elapsed, GROUP, self._slots)

    def finish(self) -> None:
        """Show what holds a slot now, and nothing more."""
        if self._timeline.is_open:
            self.residency.show_unfinished()
            self._timeline.close()

    def now(self) -> int:
        """The device's clock."""
        return self._device.now()

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        """A chunk."""
        args = {**expert_args(expert, self._shape), "slot": slot, "bytes": last - first, "bytes_so_far": last}
        self._link.submitted(self._elapsed(), expert_name(expert, self._shape), args)
        self._device.copy(expert, slot, first, last)

    def dense(self, layer: int, tokens: int, context: int) -> None:
        """The first one begins a step."""
        if self._began is None:
            self._began = self._elapsed()
        self._compute.submitted(self._elapsed(), "dense", {"layer": layer, "tokens": tokens, "context": context})
        self._device.dense(layer, tokens, context)

    def predict(self) -> bool:
        """Shown where the device makes up for it."""
        now, takes_time = self._elapsed(), self._device.predict()
        if takes_time:
            self._compute.submitted(now, "predictor", {})
        return takes_time

    def experts(self, works: Sequence[Work]) -> None:
        """Each on its own, also where the device computes them together."""
        now = self._elapsed()
        for expert, slot, tokens in works:
            args = {**expert_args(expert, self._shape), "slot": slot, "tokens": tokens}
            self._compute.submitted(now, expert_name(expert, self._shape), args)
        self._device.experts(works)

    def combine(self, tokens: int) -> None:
        """Of a layer."""
        self._compute.submitted(self._elapsed(), "combine", {"tokens": tokens})
        self._device.combine(tokens)

    def head(self, tokens: int) -> None:
        """Its end is the step's."""
        self._compute.submitted(self._elapsed(), "head", {"tokens": tokens})
        self._device.head(tokens)

    def next_completion(self) -> Completion:
        """The part that has ended is shown."""
        completion = self._device.next_completion()
        now = self._elapsed()
        if completion.kind is Kind.COPY:
            self._link.ended(now)
            self._arrivals[completion.expert] = now
        else:
            self._compute.ended(now, self._arrivals.get(completion.expert, 0))
        if completion.kind is Kind.HEAD and self._began is not None:
            self._timeline.slice(self._steps, f"step {self._step}", self._began, now, {})
            self._step, self._began = self._step + 1, None
        return completion

    def discard_copies(self) -> None:
        """What is under way is not shown."""
        self._device.discard_copies()
        self._link.discard()

    def close(self) -> None:
        """The device's own."""
        self._device.close()

    def _elapsed(self) -> int:
        return self._device.now() - self._origin


class Stream:
    """Parts in the order of submission, one at a time."""

    def __init__(self, timeline: Timeline, track: Track) -> None:
        self._timeline = timeline
        self._track = track
        self._parts: deque[tuple[int, str, Args]] = deque()
        self._ended = 0

    def submitted(self, now: int, name: str, args: Args) -> None:
        """It follows what was submitted before."""
        self._parts.append((now, name, args))

    def ended(self, now: int, able: int = 0) -> None:
        """The oldest part has ended; before `able` it could not begin."""
        submitted, name, args = self._parts.popleft()
        self._timeline.slice(self._track, name, max(submitted, self._ended, able), now, args)
        self._ended = now

    def discard(self) -> None:
        """Nothing is under way any more."""
        self._parts.clear()
