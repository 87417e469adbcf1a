"""A run of the loop put onto a timeline, on whatever device: steps, layers and stalls of the compute stream, every
transfer on the link, which expert was in which slot, and what waits.

A part of a stream lasts from its submission, from the end of the part before or, an expert, from its arrival, whichever
is latest, to its completion as the loop hears of it. On a clock of its own (SimPy) that is exact, and parts and stalls
fill a step without a gap.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.core.policy import Float, Int, Shape
from policies.core.residency import NO_EXPERT, PolicyResidency, Residency
from sim.loop.device import Completion, Kind
from sim.loop.driver import LoopObserver
from sim.loop.log import PREDICTOR, STALLS
from sim.loop.pump import Transfer
from sim.loop.run import Run
from sim.loop.schedule import Step
from sim.timeline.file import ComputeTrack, Process, Timeline, Track
from sim.timeline.window import Window
from traces.steps import DECODE


def expert_name(expert: int, shape: Shape) -> str:
    """Return `L3 e17`: layer 3, expert 17 in it. (Perfetto gives names that differ in numbers only one colour.)"""
    return f"L{expert // shape.experts} e{expert % shape.experts}"


def expert_args(expert: int, shape: Shape) -> dict[str, object]:
    """Return what every slice about an expert says of it."""
    return {"expert": expert, "layer": expert // shape.experts, "expert_in_layer": expert % shape.experts}


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
        self._residency = ResidencyTracks(timeline, residency, shape, self._now, self._group, self._with_slots)
        self._counters = residency.counters

    @property
    def is_over(self) -> bool:
        """Whether the window has ended."""
        return self._window.last is not None and self._position() >= self._window.last

    def close(self) -> None:
        """Show what is under way up to now, and nothing more."""
        if self._timeline.is_open:
            self._link.show_unfinished()
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
        """A part has ended."""
        self._stream.ended(completion, self._now(), self._link.arrived_at(completion.expert))

    def stalled(self, cause: int, began: int, ended: int, on_link: int) -> None:
        """The stream has waited."""
        args: dict[str, object] = {}
        if cause != PREDICTOR and on_link != NO_EXPERT:
            args = {"on_link": expert_name(on_link, self._run.shape), "expert": on_link}
        self._stream.track.stalled(STALLS[cause], began - self._origin, ended - self._origin, args)

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

    def request_ended(self, cold: bool) -> None:
        """No request remains active."""
        self._residency.ended(cold)


class ComputeStream:
    """The parts of the compute stream, named by what was submitted."""

    def __init__(self, track: ComputeTrack, shape: Shape) -> None:
        self.track = track
        self._shape = shape
        self._submitted: deque[int] = deque()  # when each part under way was
        self._tokens: dict[int, int] = {}  # of each expert of the current event
        self._late: set[int] = set()  # of these
        self._hits: set[int] = set()
        self._layer = -1

    def begin(self, now: int) -> None:
        """A step begins."""
        self._layer = -1
        self.track.begin(now)

    def routed(self, tokens: dict[int, int], hits: set[int], late: set[int]) -> None:
        """An event was looked up; what is neither hit nor late is a miss."""
        self._tokens, self._hits, self._late = tokens, hits, late

    def submitted(self, now: int, parts: int) -> None:
        """So many parts are given to the stream."""
        self._submitted.extend([now] * parts)

    def ended(self, completion: Completion, now: int, arrived: int) -> None:
        """The oldest part has ended; before `arrived` it could not begin."""
        kind, expert = completion
        began = max(self._submitted.popleft(), arrived)
        if kind is Kind.PREDICTOR:
            return  # shown as a stall
        if kind is Kind.EXPERT:
            outcome = "hit" if expert in self._hits else "late" if expert in self._late else "miss"
            args = {**expert_args(expert, self._shape), "tokens": self._tokens[expert], "lookup": outcome}
            self.track.until(began, now, f"{outcome} {expert_name(expert, self._shape)}", args)
            return
        if kind is Kind.ROUTER:
            self._layer += 1
            self.track.layer(self._layer, began)
        name = "dense" if kind is Kind.ROUTER else kind.name.lower()
        if kind is not Kind.COMBINE or now > max(began, self.track.ended):
            self.track.until(began, now, name, {})


class LinkTracks:
    """The pieces on the link; a paused prefetch has a track of its own."""

    def __init__(
        self, timeline: Timeline, process: Process, residency: PolicyResidency, run: Run, now: Callable[[], int]
    ) -> None:
        self._timeline = timeline
        self._track = timeline.track(process, "link")
        self._pauses = timeline.track(process, "paused prefetch")
        self._residency = residency
        self._shape = run.shape
        self._whole = run.gpu.link.expert_bytes
        self._now = now
        self._flying: deque[tuple[Transfer, int, int, int, int]] = deque()  # transfer, bytes, since when, victim
        self._ended = 0
        self._arrived: dict[int, int] = {}
        self._victim = NO_EXPERT  # of the transfer whose first piece comes next
        self._running = NO_EXPERT  # the transfer chosen last
        self._pause: tuple[int, int] | None = None  # the paused expert, and since when

    def arrived_at(self, expert: int) -> int:
        """Return when the latest piece of an expert ended."""
        return self._arrived.get(expert, 0)

    def turned_to(self, expert: int, victim: int) -> None:
        """A transfer starts, or the paused one resumes."""
        if expert < 0:
            return
        if self._pause and self._pause[0] == expert:
            self._show_pause()
            self._pause = None
        self._running, self._victim = expert, victim

    def interrupted(self, expert: int, victim: int) -> None:
        """A demand pauses what was running."""
        if expert >= 0:
            self._pause = self._running, self._now()
            self._running, self._victim = expert, victim

    def submitted(self, transfer: Transfer, first: int, upto: int) -> None:
        """A piece follows those under way."""
        self._flying.append((transfer, first, upto, self._now(), self._victim))
        self._victim = NO_EXPERT

    def ended(self) -> None:
        """The oldest piece has ended."""
        self._show(self._flying[0])
        transfer = self._flying.popleft()[0]
        self._ended = self._arrived[transfer.expert] = self._now()

    def cut(self) -> None:
        """Everything under way is discarded."""
        self.show_unfinished()
        self._flying.clear()
        self._pause = None

    def show_unfinished(self) -> None:
        """Show what is under way, up to now."""
        if self._flying:
            self._show(self._flying[0], unfinished=True)
        self._show_pause()

    def _show(self, piece: tuple[Transfer, int, int, int, int], unfinished: bool | None = None) -> None:
        transfer, first, upto, since, victim = piece
        expert = transfer.expert
        kind = "demand" if transfer.demand else "late" if self._residency.awaited(expert) else "prefetch"
        args = {
            **expert_args(expert, self._shape),
            "transfer": kind,
            "slot": transfer.slot,
            "bytes": upto - first,
            "bytes_so_far": upto,
            "bytes_of_expert": self._whole,
            "victim": expert_name(victim, self._shape) if victim >= 0 else None,
            "priority": None if transfer.demand else self._residency.priority(expert),
            "unfinished": unfinished,
        }
        began = max(since, self._ended)
        self._timeline.slice(self._track, f"{kind} {expert_name(expert, self._shape)}", began, self._now(), args)

    def _show_pause(self) -> None:
        if self._pause:
            expert, since = self._pause
            name = f"paused {expert_name(expert, self._shape)}"
            self._timeline.slice(self._pauses, name, since, self._now(), expert_args(expert, self._shape))


@dataclass(slots=True)
class Held:
    """An expert in its slot."""

    track: Track
    name: str
    args: dict[str, object]  # of all its slices
    since: int  # when it started to load; once it is ready, when it became so
    unused: bool  # prefetched, and not looked up since
    ready: bool = False


class ResidencyTracks:
    """A track for each slot, and counters of what waits for the link.

    A slot's slices say which expert has it, from the start of its transfer to its eviction, loading told from ready.
    """

    def __init__(
        self,
        timeline: Timeline,
        residency: PolicyResidency,
        shape: Shape,
        now: Callable[[], int],
        group: str,
        slots: bool,
    ) -> None:
        self._timeline = timeline
        self._residency = residency
        self._shape = shape
        self._now = now
        self._queues = timeline.process(f"{group}: queues")
        self._waiting: dict[str, int] = {}
        self._tracks: list[Track] = []
        if slots:
            process = timeline.process(f"{group}: slots")
            self._tracks = [timeline.track(process, f"slot {i}") for i in range(residency.slots)]
        self._held: dict[int, Held] = {}
        self._arriving = self._landing = NO_EXPERT

    def show_unfinished(self) -> None:
        """The timeline is about to close: show who is in the slots up to now."""
        for held in self._held.values():
            self._show(held)

    def routed(self, experts: Int) -> None:
        """Some prefetched experts are looked up for the first time."""
        for expert in experts.tolist() if self._tracks else ():
            held = self._held.get(expert)
            if held and held.unused:
                held.unused = False
                self._timeline.instant(held.track, "first use", self._now(), held.args)
        self.count()

    def turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        """The link takes a transfer, perhaps a paused one, or none."""
        if expert >= 0:
            self._arriving = expert
            if self._tracks and expert not in self._held:
                self._take_slot(expert, victim, prefetch)
        self.count()

    def _take_slot(self, expert: int, victim: int, prefetch: bool) -> None:
        if victim >= 0:
            self._leave(victim, evicted_for=expert)
        track = self._tracks[self._residency.slot(expert)]
        args = {
            **expert_args(expert, self._shape),
            "transfer": "prefetch" if prefetch else "demand",
            "priority": self._residency.priority(expert) if prefetch else None,
        }
        self._held[expert] = Held(track, expert_name(expert, self._shape), args, self._now(), unused=prefetch)

    def arrived(self) -> None:
        """The expert that landed first, or that is on the link, is ready."""
        if self._landing != NO_EXPERT:
            expert, self._landing = self._landing, NO_EXPERT
        else:
            expert, self._arriving = self._arriving, NO_EXPERT
        held = self._held.get(expert)
        if held:
            self._show(held)
            held.since, held.ready = self._now(), True
        self.count()

    def landed(self) -> None:
        """The link takes more behind the rest of this transfer."""
        self._landing, self._arriving = self._arriving, NO_EXPERT

    def ended(self, cold: bool) -> None:
        """No request remains active."""
        if cold:
            for expert in list(self._held):
                self._leave(expert, discarded=True)
            self._arriving = self._landing = NO_EXPERT
        self.count()

    def _leave(self, expert: int, **why: object) -> None:
        held = self._held.pop(expert)
        self._show(held, **why, wasted=held.unused or None)

    def _show(self, held: Held, **more: object) -> None:
        state = "ready" if held.ready else "loading"
        self._timeline.slice(held.track, f"{state} {held.name}", held.since, self._now(), {**held.args, **more})

    def count(self) -> None:
        """Show how many wait, and how many are under way (a paused prefetch too), wherever that has changed."""
        names = ("queued demands", "queued prefetches", "transfers under way")
        counts = dict(zip(names, self._residency.waiting(), strict=True))
        for name, waiting in counts.items():
            if self._waiting.get(name) != waiting:
                self._timeline.counter(self._queues, name, self._now(), {"n": waiting})
        self._waiting = counts
