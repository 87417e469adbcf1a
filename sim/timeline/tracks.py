"""What each track of a timeline shows: compute stream, link, host and disk, slots, and what waits for the link."""

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
from sim.timeline.file import Timeline, Track

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
        layer, number = divmod(expert, self.run.shape.experts)
        return {"expert": expert, "layer": layer, "expert_in_layer": number}


class ComputeTrack(LoopObserver):
    """The compute stream: steps, in them layers, in these parts, named by what was submitted, and stalls."""

    link: "LinkTrack"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._track = scene.timeline.track(scene.process, "compute")
        self._submitted: deque[int] = deque()  # when each part under way was
        self._tokens: dict[int, int] = {}  # of each expert of the current event
        self._late: set[int] = set()  # of these
        self._hits: set[int] = set()

    def begin(self, now: int) -> None:
        self._began = self._ended = now  # of the step, and of its latest part
        self._layers: list[int] = []  # when each began
        self._parts: list[tuple[str, int, int, Args]] = []

    def event_routed(self, tokens: dict[int, int], hits: list[int], late: list[int]) -> None:
        self._tokens, self._hits, self._late = tokens, set(hits), set(late)

    def submitted(self, kind: Kind, experts: Sequence[int] = (NO_EXPERT,)) -> None:
        self._submitted.extend([self._scene.now()] * len(experts))

    def ended(self, completion: Completion) -> None:
        """Add the oldest part; before its expert has arrived, and the part before has ended, it could not begin."""
        kind, expert = completion
        if kind >= Kind.READ:
            return
        now, scene = self._scene.now(), self._scene
        began = max(self._submitted.popleft(), self.link.arrived_at.get(expert, 0), self._ended)
        name, args = "dense" if kind is Kind.ROUTER else kind.name.lower(), Args()
        if kind is Kind.EXPERT:
            outcome = "hit" if expert in self._hits else "late" if expert in self._late else "miss"
            name = f"{outcome} {scene.name(expert)}"
            args = {**scene.args(expert), "tokens": self._tokens[expert], "lookup": outcome}
        if kind is Kind.ROUTER:
            self._layers.append(began)
        if kind is not Kind.PREDICTOR and (kind is not Kind.COMBINE or now > began):  # the first is shown as a stall
            self._add(name, began, now, args)

    def stalled(self, cause: int, began: int, ended: int, on_link: int) -> None:
        """Add a wait: one slice while the cause, and what is on the link, stay the same and nothing is between."""
        args: Args = {}
        if cause != PREDICTOR and on_link != NO_EXPERT:
            args = {"on_link": self._scene.name(on_link), "expert": on_link}
        name, origin = f"stall: {STALLS[cause]}", self._scene.origin
        began, ended = began - origin, ended - origin
        if self._parts and (self._parts[-1][0], *self._parts[-1][2:]) == (name, began, args):
            began = self._parts.pop()[1]
        self._add(name, began, ended, args)

    def _add(self, name: str, began: int, ended: int, args: Args) -> None:
        self._parts.append((name, began, ended, args))
        self._ended = ended

    def end(self, name: str, args: Args) -> None:
        """The step has ended with the latest part, the head: write it, the outer slices first."""
        timeline, track = self._scene.timeline, self._track
        timeline.slice(track, name, self._began, self._ended, args)
        head_began = self._parts[-1][1]
        for number, (began, ended) in enumerate(zip(self._layers, [*self._layers[1:], head_began], strict=True)):
            timeline.slice(track, f"layer {number}", began, ended, {"layer": number})
        for part in self._parts:
            timeline.slice(track, *part)


class LinkTrack(LoopObserver):
    """The pieces on the link."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._track = scene.timeline.track(scene.process, "link")
        self._flying: deque[tuple[Transfer, int, int, int, list[int]]] = deque()  # transfer, bytes, since when, victims
        self._ended = 0
        self.arrived_at: dict[int, int] = {}
        """By expert: when its latest piece ended."""
        self._victims: list[int] = []  # of the transfer whose first piece comes next
        self._priorities: dict[int, float | None] = {}  # by expert under way: as it was when its transfer started

    def turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        if expert >= 0:
            residency = self._scene.residency
            self._priorities.setdefault(expert, residency.priority(expert) if residency.is_prefetch(expert) else None)
            self._victims = [victim] if victim >= 0 and not self._scene.sized else []

    def interrupted(self, expert: int, victim: int) -> None:
        self.turned_to(expert, victim, False)

    def left(self, experts: list[int]) -> None:
        self._victims = experts

    def copying(self, transfer: Transfer, first: int, upto: int) -> None:
        self._flying.append((transfer, first, upto, self._scene.now(), self._victims))
        self._victims = []

    def copied(self) -> None:
        self._show(self._flying[0])
        transfer, _, upto, *_ = self._flying.popleft()
        if upto == transfer.size:
            del self._priorities[transfer.expert]
        self._ended = self.arrived_at[transfer.expert] = self._scene.now()

    def cutting(self) -> None:
        self.show_unfinished()
        self._flying.clear()
        self._priorities.clear()

    def show_unfinished(self) -> None:
        if self._flying:
            self._show(self._flying[0], unfinished=True)

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


@dataclass(frozen=True)
class Span:
    """A slice that has begun."""

    track: Track
    name: str
    since: int
    args: Args


class Spans(LoopObserver):
    """Slices that are open until something ends, by what they are of."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._open: dict[int, Span] = {}

    def _begin(self, key: int, track: Track, name: str, args: Args) -> None:
        self._open[key] = Span(track, name, self._scene.now(), args)

    def _end(self, key: int, **more: object) -> Span:
        span = self._open.pop(key)
        self._show(span, **more)
        return span

    def _show(self, span: Span, **more: object) -> None:
        args = {**span.args, **more}
        self._scene.timeline.slice(span.track, span.name, span.since, self._scene.now(), args)

    def show_unfinished(self) -> None:
        for span in self._open.values():
            self._show(span, unfinished=True)


class HostTracks(Spans):
    """What the host computes (rule 13) and what the disk reads (rule 17), in runs that do: one piece of work each."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        timeline, process = scene.timeline, scene.process
        self._tracks = [timeline.track(process, "host")] if needed(scene.run) else []
        self._tracks += [timeline.track(process, "disk")] if scene.run.host else []

    def host_began(self, kind: Kind, expert: int, tokens: int) -> None:
        name, args = "hop", Args()
        if kind is Kind.HOST:
            name = f"host {self._scene.name(expert)}"
            args = {**self._scene.args(expert), "tokens": tokens, "lookup": "miss"}
        self._begin(Kind.HOST, self._tracks[0], name, args)

    def read_began(self, expert: int, demanded: bool) -> None:
        args = {**self._scene.args(expert), "read": "demand" if demanded else "prefetch"}
        self._begin(Kind.READ, self._tracks[-1], f"read {self._scene.name(expert)}", args)

    def ended(self, completion: Completion) -> None:
        if completion.kind in (Kind.READ, Kind.HOP, Kind.HOST):
            self._end(Kind.READ if completion.kind is Kind.READ else Kind.HOST)

    def cutting(self) -> None:
        self.show_unfinished()
        self._open.clear()


class ResidencyTracks(Spans):
    """A track for each slot, and counters of what waits for the link.

    A slot's slices show which expert has it, from the start of its transfer to its eviction, and when it is ready.
    """

    def __init__(self, scene: Scene, group: str) -> None:
        super().__init__(scene)
        self._queues = scene.timeline.process(f"{group}: queues")
        self._waiting: dict[str, int] = {}
        process = scene.timeline.process(f"{group}: slots")
        self._tracks = [scene.timeline.track(process, f"slot {i}") for i in range(scene.residency.slots)]
        self._unused: set[int] = set()  # prefetched, and not looked up since
        self._arriving = self._landing = NO_EXPERT

    def routed(self, experts: Int, hits: list[int]) -> None:
        self._unused.difference_update(experts.tolist())
        self._count()

    def proposed(self, experts: Int, priorities: Float) -> None:
        self._count()

    def turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        if expert >= 0:
            self._arriving = expert
            if expert not in self._open:
                self._take_slot(expert, NO_EXPERT if self._scene.sized else victim, prefetch)
        self._count()

    def interrupted(self, expert: int, victim: int) -> None:
        self.turned_to(expert, victim, False)

    def left(self, experts: list[int]) -> None:
        for expert in experts:
            self._leave(expert, evicted_for=self._arriving)
        arriving = self._open[self._arriving]  # it may take the slot of one of them
        self._begin(self._arriving, arriving.track, arriving.name, arriving.args)

    def _take_slot(self, expert: int, victim: int, prefetch: bool) -> None:
        scene = self._scene
        if victim >= 0:
            self._leave(victim, evicted_for=expert)
        unused = scene.residency.is_prefetch(expert)
        if unused:
            self._unused.add(expert)
        args = {
            **scene.args(expert),
            "transfer": "prefetch" if unused else "copy" if prefetch else "demand",
            "priority": scene.residency.priority(expert) if unused else None,
        }
        self._begin(expert, self._tracks[scene.residency.slot(expert)], f"loading {scene.name(expert)}", args)

    def ended(self, completion: Completion) -> None:
        """What is not admitted leaves once it has been computed (rule 21)."""
        expert = completion.expert
        if completion.kind is Kind.EXPERT and expert in self._open and self._scene.residency.is_staged(expert):
            self._leave(expert, bypassed=True)

    def arrived(self) -> None:
        """The expert that landed first, or that is on the link, is ready."""
        if self._landing != NO_EXPERT:
            expert, self._landing = self._landing, NO_EXPERT
        else:
            expert, self._arriving = self._arriving, NO_EXPERT
        if expert in self._open:
            loaded = self._end(expert)
            self._begin(expert, loaded.track, f"ready {self._scene.name(expert)}", loaded.args)
        self._count()

    def landed(self) -> None:
        """The link takes more behind the rest of this transfer."""
        self._landing, self._arriving = self._arriving, NO_EXPERT

    def request_ended(self, cold: bool) -> None:
        if cold:
            for expert in list(self._open):
                self._leave(expert, discarded=True)
            self._arriving = self._landing = NO_EXPERT
        self._count()

    def _leave(self, expert: int, **why: object) -> None:
        self._end(expert, **why, wasted=expert in self._unused or None)
        self._unused.discard(expert)

    def _count(self) -> None:
        """Show how many wait, and how many are under way (a paused prefetch too), wherever that has changed."""
        names = ("queued demands", "queued prefetches", "transfers under way")
        counts = dict(zip(names, self._scene.residency.waiting(), strict=True))
        for name, waiting in counts.items():
            if self._waiting.get(name) != waiting:
                self._scene.timeline.counter(self._queues, name, self._scene.now(), {"n": waiting})
        self._waiting = counts
