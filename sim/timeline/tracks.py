"""What each track of a timeline shows: the compute stream, the link, host and disk, seats, slots, and what waits."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.core.policy import Int, Shape
from policies.core.residency import NO_EXPERT, PolicyResidency
from sim.loop.device import Completion, Kind
from sim.loop.host import needed
from sim.loop.pump import Transfer
from sim.loop.run import Run
from sim.loop.schedule import Step
from sim.timeline.file import ComputeTrack, Process, Timeline, Track


def expert_name(expert: int, shape: Shape) -> str:
    """Return `L3 e17`: layer 3, expert 17 in it. (Perfetto gives names that differ in numbers only one colour.)"""
    return f"L{expert // shape.experts} e{expert % shape.experts}"


def expert_args(expert: int, shape: Shape) -> dict[str, object]:
    """Return what every slice about an expert says of it."""
    return {"expert": expert, "layer": expert // shape.experts, "expert_in_layer": expert % shape.experts}


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

    A slot's slices say which expert has it, from the start of its transfer to its eviction, and when it is ready.
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
