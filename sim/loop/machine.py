"""A machine (`sim.loop.machine_compiled`) on a device: what has ended goes in, what it lets start is submitted."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from struct import Struct
from typing import Any

import numpy as np

from policies.core import host_memory as memory
from policies.core import residency_compiled as core
from policies.core.calling import Asked, CFunction, Held, call, checked
from policies.core.compiled import compiled, from_python
from policies.core.events import ROUTING
from policies.core.host_memory import HostMemory
from policies.core.policy import Options, ScorePolicy, Shape
from policies.core.residency import NO_EXPERT, PolicyResidency
from policies.core.script import OrderedResidency
from sim.loop import machine_compiled as streams
from sim.loop.device import Completion, Device, Kind, Transfer, code_of
from sim.loop.log import STALLS
from sim.loop.observer import LoopObserver
from sim.profiles.timing import Link

COPY, EXPERT, NOT_YET = streams.COPY, streams.EXPERT, streams.NOT_YET

AT_ONCE = 1 << 12
"""Completions that are handled in one call, at most."""

FIELD = {name: place for place, name in enumerate(streams.FIELDS)}
GIVEN, BUSY_SINCE, ANSWERS = FIELD["given"], FIELD["busy_since"], FIELD["answers"]


@compiled
def called(function: int, state: int, a: int, b: int, c: int) -> int:
    """Call a compiled function by its address, which costs Python less than any other way."""
    return call(function, state, a, b, c)


CALL = from_python(called)


@cache
def _packed(count: int) -> Callable[..., None]:
    """Return what writes so many whole numbers into memory, which takes half as long as by way of an array."""
    return Struct(f"{count}q").pack_into


class Machine:
    """The streams of one run between its completions. host: its memory, if there is a disk below it."""

    def __init__(
        self,
        residency: PolicyResidency,
        device: Device,
        link: Link,
        shape: Shape,
        observer: LoopObserver | None = None,
        host: HostMemory | None = None,
    ) -> None:
        self.residency, self.device = residency, device
        numbers = np.zeros(1, streams.NUMBERS)
        self.n: Any = numbers[0]
        self.numbers = numbers.view(np.int64).data.cast("B").cast("q")
        self.state = _state(residency, self.n, shape, host)
        self.state.x[streams.BYTES] = np.repeat([link.bytes_of(layer) for layer in range(shape.layers)], shape.experts)
        n = self.n
        n.since, n.doing = device.now(), streams.WAITING
        n.active = n.paused = n.proposes = NO_EXPERT
        n.host_doing = n.reading = streams.NOTHING
        n.chunk_bytes, n.tail_bytes = link.chunk_bytes or 0, device.tail_bytes
        n.layers, n.one_scale, n.scripted = shape.layers, residency.one_scale, residency.scripted
        n.has_disk, n.hops = host is not None, device.hop_takes_time
        self._checks = [residency.check] if residency.asks else []
        if observer:
            asked = Asked(partial(_tell, self, observer, {}), residency.failed)
            n.observer = asked.address
            self._checks.append(asked.check)
        if isinstance(residency, OrderedResidency):
            residency.event = self.state.x[streams.EVENT]
        self.at = 0
        """The time of what the machine does."""
        self._observer = observer
        self._gone: tuple[list[int], list[int]] = [], []
        self._given, self._works = self.state.given, self.state.works
        self._ended = self.state.ended.data.cast("B")
        self._held = Held(self.state)
        self._act, self._route = _functions()
        self._address = self._held.address

    def ask(self, question: int, number: int = 0) -> None:
        """Have the machine do something, and submit what it lets start."""
        self.at = now = self.device.now()
        given = CALL(self._act, self._address, question, now, number)
        if given or self._checks:
            self._submit(given)

    def turn(self, doing: int) -> None:
        """Account for the compute stream's time up to now, and note what it does."""
        self.ask(streams.TURN, doing)

    @property
    def clock(self) -> int:
        """Time up to which everything is accounted for."""
        return self.number("since")

    def take(self) -> Sequence[int]:
        """Wait for what ends next, and handle it. Return what it was (`Device.completions`)."""
        ended = self.device.completions(self.numbers[ANSWERS])
        self.at = ended[-1]
        if len(ended) == 2:
            given = CALL(self._act, self._address, streams.ENDED_NOW, ended[1], ended[0])
        else:
            _packed(len(ended))(self._ended, 0, *ended)
            given = CALL(self._act, self._address, streams.ENDED_THEN, ended[-1], len(ended))
        if given or self._checks:
            self._submit(given)
        return ended

    def number(self, name: str) -> int:
        """Return one of the machine's `Numbers`."""
        return self.numbers[FIELD[name]]

    def handle(self, completion: Completion) -> None:
        """Handle one completion, with the transfers and computes that it lets start."""
        self.ask(streams.ENDED_NOW, code_of(*completion))

    def evicted(self) -> tuple[list[int], list[int]]:
        """Return who left GPU memory and host memory since this was last asked, in order."""
        self.keep_evictions()
        gone, self._gone = self._gone, ([], [])
        return gone

    def keep_evictions(self) -> int:
        """Have room for those of another step; return how many left GPU memory since `evicted` was last asked."""
        left, self.n.evicted = self.state.evictions[: self.n.evicted], 0
        self._gone[0].extend(left[left >= 0].tolist())
        self._gone[1].extend((~left[left < 0]).tolist())
        return len(self._gone[0])

    def busy_ns(self) -> tuple[int, int, int]:
        """Return for how long link, host and disk have been busy so far; the link's latency is included."""
        n, now = self.number, self.device.now()
        link = n("busy_ns") + (now - n("busy_since") if n("flying") else 0)
        host = n("host_busy_ns") + (now - n("host_began") if n("host_doing") >= 0 else 0)
        return link, host, n("disk_busy_ns") + (now - n("read_began") if n("reading") >= 0 else 0)

    def _submit(self, given: int) -> None:
        """Submit what the machine has written down. Raise the error of a policy."""
        if given < 0:
            self.n.error = 0
            checked(given)
        elif given:
            device, self.numbers[GIVEN] = self.device, 0
            for kind, expert, second, third, last in self._given[:given].tolist():
                if kind == EXPERT:
                    device.experts(self._works[expert:second].tolist())
                elif kind == COPY:
                    device.copy(expert, second, third, last)
                    if self.numbers[BUSY_SINCE] == NOT_YET:
                        self.numbers[BUSY_SINCE] = device.now()
                elif kind == streams.READ:
                    device.read(expert)
                elif kind == streams.HOSTED:
                    device.host(expert, second)
                else:
                    device.hop()
        for check in self._checks:
            check()


def _state(residency: PolicyResidency, n: Any, shape: Shape, host: HostMemory | None) -> streams.Machine:
    """Return a machine at rest."""
    total, E = shape.total, shape.experts
    return streams.Machine(
        m=residency.m,
        keep=residency.keep,
        proposals=residency.proposals,
        h=host.h if host else np.zeros((memory.ROWS, memory.WIDTH), np.int64),
        n=n,
        x=np.zeros((streams.ROWS, total), np.int64),
        stall=np.zeros(len(STALLS), np.int64),
        pieces=np.zeros((streams.PIECES, 5), np.int64),
        queue=np.zeros(E + 16, np.int64),
        given=np.zeros((8 * AT_ONCE, 5), np.int64),
        works=np.zeros((E, 3), np.int64),
        ended=np.zeros(2 * AT_ONCE, np.int64),
        evictions=np.zeros(max(1 << 16, 8 * (shape.layers + 2) * (total + E) + 4 * total), np.int64),
        told=np.zeros(4, np.int64),
        ids=np.zeros(total, np.int64),
        priorities=np.zeros(total),
    )


@cache
def _functions() -> tuple[int, int]:
    """Return the addresses of what Python calls of a machine: `act`, `route`."""
    one = PolicyResidency(Shape(1, 1), (1,), ScorePolicy(Shape(1, 1), Options()))
    state = _state(one, np.zeros(1, streams.NUMBERS)[0], Shape(1, 1), None)
    made = CFunction(streams.act, state, None, None, None), CFunction(streams.route, state, ROUTING, None, None)
    KEPT.extend(made)
    return made[0].address, made[1].address


KEPT = list[CFunction]()
"""Functions live as long as these."""


def _tell(machine: "Machine", observer: LoopObserver, flying: dict[int, Transfer], what: int, a: int) -> None:
    """Tell an observer what the machine has written down (`machine_compiled.tell`)."""
    state, n, (_, b, c, d) = machine.state, machine.number, machine.state.told.tolist()
    event, hits = state.x[streams.EVENT, : n("event")], state.m[core.HITS, :a].tolist()
    if what == streams.ROUTED:
        observer.routed(event.copy(), hits)
    elif what == streams.EVENT_ROUTED:
        tokens = {expert: count for expert in event.tolist() if (count := int(state.x[streams.TOKENS, expert]))}
        late = [expert for expert in tokens if expert not in hits and state.m[core.SLOT, expert] >= 0]
        observer.event_routed(tokens, hits, late)
    elif what == streams.TOOK_PROPOSAL:
        observer.proposed(state.ids[:a].copy(), state.priorities[:a].copy())
    elif what == streams.LEFT:
        observer.left(state.m[core.VICTIMS, : state.m[core.ONE, core.EVICTED]].tolist())
    elif what == streams.SUBMITTED:
        last = n("queue_first") + n("queued")
        observer.submitted(Kind(a), state.queue[np.arange(last - b, last) % len(state.queue)].tolist())
    elif what == streams.COPYING:
        if b == 0:
            slot, size = int(state.m[core.SLOT, a]), int(state.x[streams.BYTES, a])
            flying[a] = Transfer(a, slot, bool(d), size)
        flying[a].sent = c
        observer.copying(flying[a], b, c)
    elif what == streams.ENDED:
        observer.ended(Completion(Kind(a), b))
    elif what == streams.HOST_BEGAN:
        observer.host_began(Kind(a), b, c)
    else:
        name, count = PLAIN[what]
        getattr(observer, name)(*(a, b, c, d)[:count])


PLAIN = {
    streams.TURNED_TO: ("turned_to", 3),
    streams.INTERRUPTED: ("interrupted", 2),
    streams.LANDED: ("landed", 0),
    streams.ARRIVED: ("arrived", 0),
    streams.STALLED: ("stalled", 4),
    streams.COPIED: ("copied", 0),
    streams.READ_BEGAN: ("read_began", 2),
}
"""What is told as it is: the observer's method, and how many numbers it gets."""
