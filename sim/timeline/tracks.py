"""What each track of a timeline shows: compute stream, link, host and disk, batch slots, slots, and what waits."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.core.policy import Float, Int
from policies.core.residency import NO_EXPERT, PolicyResidency
from sim.loop.device import Completion, Kind, Transfer
from sim.loop.host import needed
from sim.loop.log import PREDICTOR, STALLS
from sim.loop.observer import LoopObserver
from sim.loop.run import Run
from sim.loop.schedule import Step
from sim.timeline.file import ComputeTrack, Timeline, Track

Args = dict[str, object]


@dataclass(frozen=True)
class Scene:
    """What all tracks of a run draw from."""

    timeline: Timeline
    process: int  # of compute and link
    run: Run
    residency: PolicyResidency
    now: Callable[[], int]  # the device's clock since the run began
    origin: int  # of that clock, as the loop shows times

    @property
    def sized(self) -> bool:
        """Whether experts differ in size, so that several may leave for one transfer (rule 19)."""
        return self.run.gpu.link.layer_bytes is not None

    def name(self, expert: int) -> str:
        """Return `L3 e17`: layer 3, expert 17 in it. (Perfetto gives names that differ in numbers only one colour.)"""
        layer, number = divmod(expert, self.run.shape.experts)
        return f"L{layer} e{number}"

    def args(self, expert: int) -> Args:
        """Return what every slice about an expert shows of it."""
        layer, number = divmod(expert, self.run.shape.experts)
        return {"expert": expert, "layer": layer, "expert_in_layer": number}


class ComputeTracks(LoopObserver):
    """The parts of the compute stream, named by what was submitted."""

    link: "LinkTracks"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self.track = ComputeTrack(scene.timeline, scene.process)
        self._submitted: deque[int] = deque()  # when each part under way was
        self._tokens: dict[int, int] = {}  # of each expert of the current event
        self._late: set[int] = set()  # of these
        self._hits: set[int] = set()
        self._layer = -1

    def begin(self, now: int) -> None:
        self._layer = -1
        self.track.begin(now)

    def event_routed(self, tokens: dict[int, int], hits: list[int], late: list[int]) -> None:
        self._tokens, self._hits, self._late = tokens, set(hits), set(late)

    def submitted(self, kind: Kind, experts: Sequence[int] = (NO_EXPERT,)) -> None:
        self._submitted.extend([self._scene.now()] * len(experts))

    def ended(self, completion: Completion) -> None:
        """Show the oldest part; before its expert has arrived it could not begin."""
        kind, expert = completion
        if kind >= Kind.READ:
            return
        now, scene = self._scene.now(), self._scene
        began = max(self._submitted.popleft(), self.link.arrived_at.get(expert, 0))
        if kind is Kind.PREDICTOR:
            return  # shown as a stall
        if kind is Kind.EXPERT:
            outcome = "hit" if expert in self._hits else "late" if expert in self._late else "miss"
            args = {**scene.args(expert), "tokens": self._tokens[expert], "lookup": outcome}
            self.track.until(began, now, f"{outcome} {scene.name(expert)}", args)
            return
        if kind is Kind.ROUTER:
            self._layer += 1
            self.track.layer(self._layer, began)
        name = "dense" if kind is Kind.ROUTER else kind.name.lower()
        if kind is not Kind.COMBINE or now > max(began, self.track.ended):
            self.track.until(began, now, name, {})

    def stalled(self, cause: int, began: int, ended: int, on_link: int) -> None:
        args: Args = {}
        if cause != PREDICTOR and on_link != NO_EXPERT:
            args = {"on_link": self._scene.name(on_link), "expert": on_link}
        self.track.stalled(STALLS[cause], began - self._scene.origin, ended - self._scene.origin, args)


class LinkTracks(LoopObserver):
    """The pieces on the link; a paused prefetch has a track of its own."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._track = scene.timeline.track(scene.process, "link")
        self._pauses = scene.timeline.track(scene.process, "paused prefetch")
        self._flying: deque[tuple[Transfer, int, int, int, list[int]]] = deque()  # transfer, bytes, since when, victims
        self._ended = 0
        self.arrived_at: dict[int, int] = {}
        """By expert: when its latest piece ended."""
        self._victims: list[int] = []  # of the transfer whose first piece comes next
        self._priorities: dict[int, float | None] = {}  # by expert: of its latest transfer, when that started
        self._running = NO_EXPERT  # the transfer chosen last
        self._pause: tuple[int, int] | None = None  # the paused expert, and since when

    def turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        if expert < 0:
            return
        if self._pause and self._pause[0] == expert:
            self._show_pause()
            self._pause = None
        else:
            is_prefetch = self._scene.residency.is_prefetch(expert)
            self._priorities[expert] = self._scene.residency.priority(expert) if is_prefetch else None
        self._start(expert, victim)

    def interrupted(self, expert: int, victim: int) -> None:
        if expert >= 0:
            self._pause = self._running, self._scene.now()
            self._start(expert, victim)

    def _start(self, expert: int, victim: int) -> None:
        self._running = expert
        self._victims = [victim] if victim >= 0 and not self._scene.sized else []

    def left(self, experts: list[int]) -> None:
        self._victims = experts

    def copying(self, transfer: Transfer, first: int, upto: int) -> None:
        self._flying.append((transfer, first, upto, self._scene.now(), self._victims))
        self._victims = []

    def copied(self) -> None:
        self._show(self._flying[0])
        transfer = self._flying.popleft()[0]
        self._ended = self.arrived_at[transfer.expert] = self._scene.now()

    def cutting(self) -> None:
        self.show_unfinished()
        self._flying.clear()
        self._pause = None

    def show_unfinished(self) -> None:
        if self._flying:
            self._show(self._flying[0], unfinished=True)
        self._show_pause()

    def _show(self, piece: tuple[Transfer, int, int, int, list[int]], unfinished: bool | None = None) -> None:
        transfer, first, upto, since, victims = piece
        scene, expert = self._scene, transfer.expert
        priority = None if transfer.demand else self._priorities[expert]
        kind = "demand" if transfer.demand else "prefetch" if priority is not None else "copy"  # rule 21
        kind = "late" if not transfer.demand and scene.residency.awaited(expert) else kind
        args = {
            **scene.args(expert),
            "transfer": kind,
            "slot": transfer.slot,
            "bytes": upto - first,
            "bytes_so_far": upto,
            "bytes_of_expert": transfer.size,
            "victim": ", ".join(map(scene.name, victims)) or None,
            "priority": priority,
            "unfinished": unfinished,
        }
        scene.timeline.slice(self._track, f"{kind} {scene.name(expert)}", max(since, self._ended), scene.now(), args)

    def _show_pause(self) -> None:
        if self._pause:
            (expert, since), scene = self._pause, self._scene
            scene.timeline.slice(self._pauses, f"paused {scene.name(expert)}", since, scene.now(), scene.args(expert))


class Spans(LoopObserver):
    """Tracks on which one slice at a time is open."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._open: dict[Track, tuple[str, int, Args]] = {}  # name, since when, and what of it

    def _begin(self, track: Track | None, name: str, began: int, args: Args) -> None:
        assert track
        self._open[track] = name, began, args

    def _end(self, track: Track, ended: int, **more: object) -> None:
        name, began, args = self._open.pop(track)
        self._scene.timeline.slice(track, name, began, ended, {**args, **more})

    def show_unfinished(self) -> None:
        for track, (name, began, args) in self._open.items():
            self._scene.timeline.slice(track, name, began, self._scene.now(), {**args, "unfinished": True})


class HostTracks(Spans):
    """What the host computes (rule 13) and what the disk reads (rule 17), in runs that do: one piece of work each."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._host = scene.timeline.track(scene.process, "host") if needed(scene.run) else None
        self._disk = scene.timeline.track(scene.process, "disk") if scene.run.host else None

    def host_began(self, kind: Kind, expert: int, tokens: int) -> None:
        name, args, now = "hop", Args(), self._scene.now()
        if kind is Kind.HOST:
            name = f"host {self._scene.name(expert)}"
            args = {**self._scene.args(expert), "tokens": tokens, "lookup": "miss"}
        self._begin(self._host, name, now, args)

    def read_began(self, expert: int, demanded: bool) -> None:
        args = {**self._scene.args(expert), "read": "demand" if demanded else "prefetch"}
        self._begin(self._disk, f"read {self._scene.name(expert)}", self._scene.now(), args)

    def ended(self, completion: Completion) -> None:
        kind = completion.kind
        track = self._disk if kind is Kind.READ else self._host if kind in (Kind.HOP, Kind.HOST) else None
        if track:
            self._end(track, self._scene.now())

    def cutting(self) -> None:
        self.show_unfinished()
        self._open.clear()


class BatchSlotTracks(Spans):
    """A track for each batch slot (rule 18): its requests, from their admission to the end of their last head."""

    def __init__(self, scene: Scene, group: str, names: Sequence[str]) -> None:
        super().__init__(scene)
        self._names = names
        self._tracks: list[Track] = []
        if users := scene.run.users:
            process = scene.timeline.process(f"{group}: requests")
            self._tracks = [
                scene.timeline.track(process, f"batch_slot {batch_slot}") for batch_slot in range(users.max_batch)
            ]

    def begin(self, step: Step, began: int) -> None:
        for place, waited_ns in zip(step.begins, step.waited_ns, strict=False):
            args: Args = {"waited_us": waited_ns / 1_000}
            self._begin(self._tracks[place.batch_slot], self._names[place.request], began, args)

    def end(self, step: Step, ended: int) -> None:
        for place in step.ends if self._tracks else ():
            self._end(self._tracks[place.batch_slot], ended, steps=place.step + 1)


@dataclass(slots=True)
class Held:
    """An expert in its slot."""

    track: Track
    name: str
    args: Args  # of all its slices
    since: int  # when it started to load; once it is ready, when it became so
    unused: bool  # prefetched, and not looked up since
    ready: bool = False


class ResidencyTracks(LoopObserver):
    """A track for each slot, and counters of what waits for the link.

    A slot's slices show which expert has it, from the start of its transfer to its eviction, and when it is ready.
    """

    def __init__(self, scene: Scene, group: str, slots: bool) -> None:
        self._scene = scene
        self._queues = scene.timeline.process(f"{group}: queues")
        self._waiting: dict[str, int] = {}
        self._tracks: list[Track] = []
        if slots:
            process = scene.timeline.process(f"{group}: slots")
            self._tracks = [scene.timeline.track(process, f"slot {i}") for i in range(scene.residency.slots)]
        self._held: dict[int, Held] = {}
        self._arriving = self._landing = NO_EXPERT

    def show_unfinished(self) -> None:
        for held in self._held.values():
            self._show(held)

    def routed(self, experts: Int, hits: list[int]) -> None:
        for expert in experts.tolist() if self._tracks else ():
            held = self._held.get(expert)
            if held and held.unused:
                held.unused = False
                self._scene.timeline.instant(held.track, "first use", self._scene.now(), held.args)
        self._count()

    def proposed(self, experts: Int, priorities: Float) -> None:
        self._count()

    def turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        if expert >= 0:
            self._arriving = expert
            if self._tracks and expert not in self._held:
                self._take_slot(expert, NO_EXPERT if self._scene.sized else victim, prefetch)
        self._count()

    def interrupted(self, expert: int, victim: int) -> None:
        self.turned_to(expert, victim, False)

    def left(self, experts: list[int]) -> None:
        if not self._tracks:
            return
        for expert in experts:
            self._leave(expert, evicted_for=self._arriving)
        self._held[self._arriving].since = self._scene.now()  # it may take the slot of one of them

    def _take_slot(self, expert: int, victim: int, prefetch: bool) -> None:
        scene = self._scene
        if victim >= 0:
            self._leave(victim, evicted_for=expert)
        unused = scene.residency.is_prefetch(expert)
        args = {
            **scene.args(expert),
            "transfer": "prefetch" if unused else "copy" if prefetch else "demand",
            "priority": scene.residency.priority(expert) if unused else None,
        }
        track = self._tracks[scene.residency.slot(expert)]
        self._held[expert] = Held(track, scene.name(expert), args, scene.now(), unused)

    def ended(self, completion: Completion) -> None:
        """What is not admitted leaves once it has been computed (rule 21)."""
        expert = completion.expert
        if completion.kind is Kind.EXPERT and expert in self._held and self._scene.residency.is_staged(expert):
            self._leave(expert, bypassed=True)

    def arrived(self) -> None:
        """The expert that landed first, or that is on the link, is ready."""
        if self._landing != NO_EXPERT:
            expert, self._landing = self._landing, NO_EXPERT
        else:
            expert, self._arriving = self._arriving, NO_EXPERT
        held = self._held.get(expert)
        if held:
            self._show(held)
            held.since, held.ready = self._scene.now(), True
        self._count()

    def landed(self) -> None:
        """The link takes more behind the rest of this transfer."""
        self._landing, self._arriving = self._arriving, NO_EXPERT

    def request_ended(self, cold: bool) -> None:
        if cold:
            for expert in list(self._held):
                self._leave(expert, discarded=True)
            self._arriving = self._landing = NO_EXPERT
        self._count()

    def _leave(self, expert: int, **why: object) -> None:
        held = self._held.pop(expert)
        self._show(held, **why, wasted=held.unused or None)

    def _show(self, held: Held, **more: object) -> None:
        state = "ready" if held.ready else "loading"
        args = {**held.args, **more}
        self._scene.timeline.slice(held.track, f"{state} {held.name}", held.since, self._scene.now(), args)

    def _count(self) -> None:
        """Show how many wait, and how many are under way (a paused prefetch too), wherever that has changed."""
        names = ("queued demands", "queued prefetches", "transfers under way")
        counts = dict(zip(names, self._scene.residency.waiting(), strict=True))
        for name, waiting in counts.items():
            if self._waiting.get(name) != waiting:
                self._scene.timeline.counter(self._queues, name, self._scene.now(), {"n": waiting})
        self._waiting = counts
