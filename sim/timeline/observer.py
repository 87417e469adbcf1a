"""A run of the loop put onto a timeline, on whatever device: steps, layers and stalls of the compute stream, every
transfer on the link, what host and disk do, which request had which seat, which expert which slot, and what waits.

A part of a stream lasts from its submission, from the end of the part before or, an expert, from its arrival, whichever
is latest, to its completion as the loop hears of it. On a clock of its own (SimPy) that is exact, and parts and stalls
fill a step without a gap.
"""

from collections.abc import Callable, Sequence

from policies.core.policy import Float, Int
from policies.core.residency import NO_EXPERT, PolicyResidency, Residency
from sim.loop.device import Completion, Kind
from sim.loop.driver import LoopObserver
from sim.loop.log import PREDICTOR, STALLS
from sim.loop.pump import Transfer
from sim.loop.run import Run
from sim.loop.schedule import Step
from sim.timeline.file import ComputeTrack, Timeline
from sim.timeline.tracks import ComputeStream, HostTracks, LinkTracks, ResidencyTracks, SeatTracks, expert_name
from sim.timeline.window import Window
from traces.steps import DECODE


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
        """Make the tracks."""
        assert isinstance(residency, PolicyResidency)
        timeline, shape = self._timeline, self._run.shape
        self._origin = now()
        self._now: Callable[[], int] = lambda: now() - self._origin
        self._process = timeline.process(f"{self._group}: compute and link")
        self._stream = ComputeStream(ComputeTrack(timeline, self._process), shape)
        self._link = LinkTracks(timeline, self._process, residency, self._run, self._now)
        self._host = HostTracks(timeline, self._process, self._run, self._now)
        self._seats = SeatTracks(timeline, self._group, self._run, self._names)
        sized = self._run.gpu.link.layer_bytes is not None
        self._residency = ResidencyTracks(timeline, residency, shape, self._now, self._group, self._with_slots, sized)
        self._counters = residency.counters

    @property
    def is_over(self) -> bool:
        """Whether the window has ended."""
        return self._window.last is not None and self._position() >= self._window.last

    def close(self) -> None:
        """Show what is under way up to now, and nothing more."""
        if self._timeline.is_open:
            self._link.show_unfinished()
            self._host.show_unfinished()
            self._seats.show_unfinished(self._now())
            self._residency.show_unfinished()
            self._timeline.close()

    def _position(self) -> int:
        return self._decoded if self._window.of == "decode steps" else self._requests

    # Steps

    def step_begins(self, step: Step, began: int) -> None:
        """Open the timeline where the window begins."""
        began -= self._origin
        if self._position() >= self._window.first and not self.is_over and not self._timeline.is_open:
            self._timeline.open(began)
        self._began, self._before = began, self._counters()
        self._stream.begin(began)
        self._seats.begin(step, began)

    def step_ended(self, step: Step, ended: int) -> None:
        """Show the step as a whole."""
        hits, late, misses = (now - then for now, then in zip(self._counters()[:3], self._before[:3], strict=True))
        lookups, decodes = {"hits": hits, "late": late, "misses": misses}, step.phase == DECODE
        args = {
            "request": ", ".join(self._names[place.request] for place in step.places),
            "phase": "decode" if decodes else "prefill",
            "step_of_request": ", ".join(str(place.step) for place in step.places),
            "tokens": step.tokens,
            "context": step.context,
            **lookups,
        }
        self._stream.track.end(f"decode {self._decoded}" if decodes else "prefill", args)
        self._timeline.counter(self._process, "lookups", self._began, lookups)
        self._seats.end(step, ended - self._origin)
        self._decoded += decodes
        self._requests += len(step.ends)
        if self.is_over and self._window.of == "decode steps":
            self.close()

    # The compute stream

    def event_routed(self, tokens: dict[int, int], hits: list[int], late: list[int]) -> None:
        """A router has ended."""
        self._stream.routed(tokens, set(hits), set(late))

    def submitted(self, kind: Kind, experts: Sequence[int] = (NO_EXPERT,)) -> None:
        """Parts begin here at the earliest."""
        self._stream.submitted(self._now(), len(experts))

    def ended(self, completion: Completion) -> None:
        """A part has ended, or work of host or disk."""
        if completion.kind >= Kind.READ:
            self._host.ended(completion.kind)
            return
        self._stream.ended(completion, self._now(), self._link.arrived_at(completion.expert))

    def stalled(self, cause: int, began: int, ended: int, on_link: int) -> None:
        """The stream has waited."""
        args: dict[str, object] = {}
        if cause != PREDICTOR and on_link != NO_EXPERT:
            args = {"on_link": expert_name(on_link, self._run.shape), "expert": on_link}
        self._stream.track.stalled(STALLS[cause], began - self._origin, ended - self._origin, args)

    # Host and disk

    def host_began(self, kind: Kind, expert: int, tokens: int) -> None:
        """The hop, or the host's compute of an expert, begins."""
        self._host.computes(kind, expert, tokens)

    def read_began(self, expert: int, demanded: bool) -> None:
        """A read begins."""
        self._host.reads(expert, demanded)

    # The link and the residency

    def copying(self, transfer: Transfer, first: int, upto: int) -> None:
        """A piece is submitted."""
        self._link.submitted(transfer, first, upto)

    def copied(self) -> None:
        """A piece has ended."""
        self._link.ended()

    def turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        """A transfer starts or resumes, or there is none."""
        self._link.turned_to(expert, victim)
        self._residency.turned_to(expert, victim, prefetch)

    def interrupted(self, expert: int, victim: int) -> None:
        """A demand pauses a prefetch, or not."""
        self._link.interrupted(expert, victim)
        self._residency.turned_to(expert, victim, False)

    def left(self, experts: list[int]) -> None:
        """All these left for the transfer that starts."""
        self._link.left(experts)
        self._residency.left(experts)

    def routed(self, experts: Int, hits: list[int]) -> None:
        """An event was looked up."""
        self._residency.routed(experts)

    def proposed(self, experts: Int, priorities: Float) -> None:
        """The queue of prefetches has changed."""
        self._residency.count()

    def landed(self) -> None:
        """The rest of a transfer is sent."""
        self._residency.landed()

    def arrived(self) -> None:
        """A transfer has ended."""
        self._residency.arrived()

    def cutting(self) -> None:
        """`--cold` discards what is under way."""
        self._link.cut()
        self._host.cut()

    def request_ended(self, cold: bool) -> None:
        """No request remains active."""
        self._residency.ended(cold)
