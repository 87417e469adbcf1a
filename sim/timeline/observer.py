"""A run of the loop put onto a timeline, on whatever device: steps, layers and stalls of the compute stream, every
transfer on the link, what host and disk do, which request had which seat, which expert which slot, and what waits.

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
from sim.loop.host import needed
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
        self._sized = run.gpu.link.layer_bytes is not None
        self._now = now
        self._flying: deque[tuple[Transfer, int, int, int, list[int]]] = deque()  # transfer, bytes, since when, victims
        self._ended = 0
        self._arrived: dict[int, int] = {}
        self._victims: list[int] = []  # of the transfer whose first piece comes next
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
        self._running = expert
        self._take_from(victim)

    def _take_from(self, victim: int) -> None:
        self._victims = [victim] if victim >= 0 and not self._sized else []

    def left(self, experts: list[int]) -> None:
        """The transfer that starts takes the room of all these (rule 19)."""
        self._victims = experts

    def interrupted(self, expert: int, victim: int) -> None:
        """A demand pauses what was running."""
        if expert >= 0:
            self._pause = self._running, self._now()
            self._running = expert
            self._take_from(victim)

    def submitted(self, transfer: Transfer, first: int, upto: int) -> None:
        """A piece follows those under way."""
        self._flying.append((transfer, first, upto, self._now(), self._victims))
        self._victims = []

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

    def _show(self, piece: tuple[Transfer, int, int, int, list[int]], unfinished: bool | None = None) -> None:
        transfer, first, upto, since, victims = piece
        expert = transfer.expert
        kind = "demand" if transfer.demand else "late" if self._residency.awaited(expert) else "prefetch"
        args = {
            **expert_args(expert, self._shape),
            "transfer": kind,
            "slot": transfer.slot,
            "bytes": upto - first,
            "bytes_so_far": upto,
            "bytes_of_expert": transfer.size,
            "victim": ", ".join(expert_name(victim, self._shape) for victim in victims) or None,
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


class HostTracks:
    """What the host computes (rule 13) and what the disk reads (rule 17), in runs that do: one piece of work each."""

    def __init__(self, timeline: Timeline, process: Process, run: Run, now: Callable[[], int]) -> None:
        self._timeline = timeline
        self._shape = run.shape
        self._now = now
        self._host = timeline.track(process, "host") if needed(run) else None
        self._disk = timeline.track(process, "disk") if run.host else None
        self._doing: dict[Track, tuple[str, int, dict[str, object]]] = {}  # by track: name, since when, and what of it

    def computes(self, kind: Kind, expert: int, tokens: int) -> None:
        """The hop begins, or the compute of an expert."""
        if kind is Kind.HOP:
            self._begin(self._host, "hop", {})
        else:
            args = {**expert_args(expert, self._shape), "tokens": tokens, "lookup": "miss"}
            self._begin(self._host, f"host {expert_name(expert, self._shape)}", args)

    def reads(self, expert: int, demanded: bool) -> None:
        """A read begins."""
        args = {**expert_args(expert, self._shape), "read": "demand" if demanded else "prefetch"}
        self._begin(self._disk, f"read {expert_name(expert, self._shape)}", args)

    def _begin(self, track: Track | None, name: str, args: dict[str, object]) -> None:
        assert track
        self._doing[track] = name, self._now(), args

    def ended(self, kind: Kind) -> None:
        """The work under way has ended; nothing of them has where an idle run has woken up."""
        track = self._disk if kind is Kind.READ else self._host if kind in (Kind.HOP, Kind.HOST) else None
        if track:
            name, began, args = self._doing.pop(track)
            self._timeline.slice(track, name, began, self._now(), args)

    def cut(self) -> None:
        """Everything under way is discarded."""
        self.show_unfinished()
        self._doing.clear()

    def show_unfinished(self) -> None:
        """Show what is under way, up to now."""
        for track, (name, began, args) in self._doing.items():
            self._timeline.slice(track, name, began, self._now(), {**args, "unfinished": True})


class SeatTracks:
    """A track for each seat of a batch (rule 18): its requests, from their admission to the end of their last head."""

    def __init__(self, timeline: Timeline, group: str, run: Run, names: Sequence[str]) -> None:
        self._timeline = timeline
        self._names = names
        self._tracks: list[Track] = []
        if run.users:
            process = timeline.process(f"{group}: requests")
            self._tracks = [timeline.track(process, f"seat {seat}") for seat in range(run.users.max_batch)]
        self._active: dict[int, tuple[str, int, dict[str, object]]] = {}  # by seat: name, since when, and what of it

    def begin(self, step: Step, began: int) -> None:
        """Requests may be admitted for a step."""
        for place, waited_ns in zip(step.begins, step.waited_ns, strict=False):
            self._active[place.seat] = self._names[place.request], began, {"waited_us": waited_ns / 1_000}

    def end(self, step: Step, ended: int) -> None:
        """Some may have had their last one."""
        for place in step.ends if self._tracks else ():
            name, began, args = self._active.pop(place.seat)
            self._timeline.slice(self._tracks[place.seat], name, began, ended, {**args, "steps": place.step + 1})

    def show_unfinished(self, now: int) -> None:
        """The timeline is about to close: show who runs, up to now."""
        for seat, (name, began, args) in self._active.items():
            self._timeline.slice(self._tracks[seat], name, began, now, {**args, "unfinished": True})


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
        sized: bool,
    ) -> None:
        """sized: whether victims are heard by `left`, since several leave for one transfer (rule 19)."""
        self._sized = sized
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
                self._take_slot(expert, NO_EXPERT if self._sized else victim, prefetch)
        self.count()

    def left(self, experts: list[int]) -> None:
        """The link's transfer takes the room of all these (rule 19)."""
        for expert in experts if self._tracks else ():
            self._leave(expert, evicted_for=self._arriving)

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
