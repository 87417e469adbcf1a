"""What the residency machine decides, on a timeline: a track for each slot, and counters of what waits for the link.

A slot's slices say which expert has it, from the start of its transfer to its eviction, loading told from ready. All of
it is heard from the machine, so that everything that drives one (the simulator, a replay on a device) is shown alike.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from policies.core import residency_compiled as core
from policies.core.policy import Int, Shape
from policies.core.residency import Residency
from sim.timeline.file import Timeline, Track


def after(owner: object, name: str, listener: Callable[..., None]) -> None:
    """From now on `listener(answer, *arguments)` is told of each call of the owner's method `name`, once it has run."""
    method = getattr(owner, name)

    def told(*arguments: Any) -> Any:
        answer = method(*arguments)
        listener(answer, *arguments)
        return answer

    setattr(owner, name, told)


def expert_name(expert: int, shape: Shape) -> str:
    """`L3 e17`: layer 3, expert 17 in it. (Perfetto gives names that differ in numbers only one colour.)"""
    return f"L{expert // shape.experts} e{expert % shape.experts}"


def expert_args(expert: int, shape: Shape) -> dict[str, object]:
    """What every slice about an expert tells of it."""
    return {"expert": expert, "layer": expert // shape.experts, "expert_in_layer": expert % shape.experts}


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
    """Slots and queues of one machine, as long as it is driven.

    now: the time in ns, asked whenever the machine has been called. slots: whether the slots have tracks.
    """

    def __init__(
        self, timeline: Timeline, machine: Residency, shape: Shape, now: Callable[[], int], group: str, slots: bool
    ) -> None:
        self._timeline = timeline
        self._machine = machine
        self._shape = shape
        self._now = now
        self._queues = timeline.process(f"{group}: queues")
        self._waiting: dict[str, int] = {}
        self._tracks: list[Track] = []
        if slots:
            process = timeline.process(f"{group}: slots")
            self._tracks = [timeline.track(process, f"slot {i}") for i in range(machine.m[core.ONE, core.SLOTS])]
        self._held: dict[int, Held] = {}
        self._arriving = self._landing = core.NO_EXPERT
        after(machine, "land", lambda _: self._land())
        after(machine, "route", lambda hits, experts, first, last: self._looked_up(experts[first:last]))
        after(machine, "propose", lambda _, *proposal: self._count())
        after(machine, "next_transfer", lambda started: self._turned_to(*started))
        after(machine, "interrupt", lambda demand: self._turned_to(demand[0], demand[1], False))
        after(machine, "arrived", lambda awaited: self._arrived())
        after(machine, "arrived_and_next", self._arrived_and_next)
        after(machine, "end_request", lambda _, cold: self._ended_request(cold))

    def show_unfinished(self) -> None:
        """The timeline is about to close: show who is in the slots up to now."""
        for held in self._held.values():
            self._show(held)

    def _looked_up(self, experts: Int) -> None:
        for expert in experts.tolist() if self._tracks else ():
            held = self._held.get(expert)
            if held and held.unused:
                held.unused = False
                self._timeline.instant(held.track, "first use", self._now(), held.args)
        self._count()

    def _turned_to(self, expert: int, victim: int, prefetch: bool) -> None:
        """The machine has answered what comes next: it may be a paused transfer, or nothing."""
        if expert >= 0:
            self._arriving = expert
            if self._tracks and expert not in self._held:
                self._take_slot(expert, victim, prefetch)
        self._count()

    def _take_slot(self, expert: int, victim: int, prefetch: bool) -> None:
        if victim >= 0:
            self._leave(victim, evicted_for=expert)
        track = self._tracks[self._machine.slot(expert)]
        args = {
            **expert_args(expert, self._shape),
            "transfer": "prefetch" if prefetch else "demand",
            "priority": float(self._machine.keep[core.PRIORITY, expert]) if prefetch else None,
        }
        self._held[expert] = Held(track, expert_name(expert, self._shape), args, self._now(), unused=prefetch)

    def _arrived(self) -> None:
        """Told twice of one arrival where the machine's `arrived_and_next` calls its `arrived`."""
        if self._landing != core.NO_EXPERT:
            expert, self._landing = self._landing, core.NO_EXPERT
        else:
            expert, self._arriving = self._arriving, core.NO_EXPERT
        held = self._held.get(expert)
        if held:
            self._show(held)
            held.since, held.ready = self._now(), True

    def _land(self) -> None:
        self._landing, self._arriving = self._arriving, core.NO_EXPERT

    def _arrived_and_next(self, answer: tuple[bool, int, int, bool]) -> None:
        self._arrived()
        self._turned_to(*answer[1:])

    def _ended_request(self, cold: bool) -> None:
        if cold:
            for expert in list(self._held):
                self._leave(expert, discarded=True)
            self._arriving = self._landing = core.NO_EXPERT
        self._count()

    def _leave(self, expert: int, **why: object) -> None:
        held = self._held.pop(expert)
        self._show(held, **why, wasted=held.unused or None)

    def _show(self, held: Held, **more: object) -> None:
        state = "ready" if held.ready else "loading"
        self._timeline.slice(held.track, f"{state} {held.name}", held.since, self._now(), {**held.args, **more})

    def _count(self) -> None:
        """Show how many wait, and how many are under way (a paused prefetch too), wherever that has changed."""
        m = self._machine.m
        one = m[core.ONE]
        counts = {
            "queued demands": int(one[core.LAST_DEMAND] - one[core.NEXT_DEMAND]),
            "queued prefetches": int((m[core.STATE, : self._shape.total] == core.QUEUED).sum()),
            "transfers under way": int((one[[core.LANDING, core.ACTIVE, core.PAUSED]] != core.NO_EXPERT).sum()),
        }
        for name, waiting in counts.items():
            if self._waiting.get(name) != waiting:
                self._timeline.counter(self._queues, name, self._now(), {"n": waiting})
        self._waiting = counts
