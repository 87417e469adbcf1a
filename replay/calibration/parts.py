"""Each part of a step alone, transfers, and both together, timed through the device that replays; at which points."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

import numpy as np

from policies.core import residency_compiled as core
from policies.core.policy import NO_INTS, Shape
from policies.core.residency import BLOCKED, NO_EXPERT
from policies.core.script import OrderedResidency
from replay.calibration.meter import AT_LEAST, Meter, rising
from replay.calibration.pace import Paced
from replay.devices.waiting import Pace, spread
from sim.loop import machine_compiled as streams
from sim.loop.device import Completion, Device, Kind
from sim.loop.machine import Machine
from sim.loop.run import Run
from sim.profiles.measured import Curve, MeasuredModel, Surface
from sim.profiles.timing import Link

CYCLE_BYTES = 1 << 30
"""Repeats go round so many bytes of slots (and all layers), so that caches hold no more than in a run."""
TRANSFERS = 8  # of a series
PACES = 12  # series between which the pace is taken, at least in all passes
ROUNDS, EXPERTS, MOVES = 8, 16, 3
"""Of compute and transfers together: how often they are timed, and how many of each."""
LEAST, MOST = 1.0, 10.0  # of a slow-down: below is noise, and above something else continues
CONTEXTS = 6
LADDER = 4  # from one number of tokens to the next


def parts_alone(meter: Meter, run: Run, most_tokens: int, name: str, paces: list[Pace]) -> MeasuredModel:
    """Return what parts take alone: a model without host and without slow-down. Leaves whole experts in some slots.

    paces: gets those of a device that reports its own.
    """
    device = meter.device
    places = cycle_slots(run, top_k(run))
    transfer_ns, latency_ns = transfers(meter, run, places, paces)
    contexts = decoded_contexts(run)
    device.prepare(contexts)
    sizes = [1, *ladder(most_tokens)]
    late = (request.context[(request.tokens > 1) & (request.context > request.tokens)] for request in run.requests)
    behind = max((int(each.max(initial=0)) for each in late), default=0)  # the longest context with others before it
    decode, whole = [(1, context) for context in contexts], [(tokens, tokens) for tokens in sizes[1:]]
    longest = [(tokens, behind) for tokens in sizes[1:] if tokens < behind]
    first_dense, dense = _dense(meter, run.shape.layers, [decode, whole, longest])
    together = min(top_k(run), places)

    def experts(tokens: int, number: int) -> None:
        group = [(number * together + one) % places for one in range(together)]
        device.experts([(place, place, tokens) for place in group])

    return MeasuredModel(
        model=name,
        expert_bytes=run.gpu.link.expert_bytes,
        transfer_ns=transfer_ns,
        latency_ns=latency_ns,
        turnaround_ns=0,
        launch_ns=0,
        first_dense=first_dense,
        dense=dense,
        expert=_curve(meter, sizes, experts, together),
        # Of the experts: it takes their sum away.
        combine=_curve(meter, sizes, lambda tokens, _: device.combine(0, tokens, tokens)),
        head=_curve(meter, sizes, lambda tokens, _: device.head(tokens)),
        layer_bytes=run.gpu.link.layer_bytes or (),
    )


# Which points


def cycle_slots(run: Run, top_k: int) -> int:
    return min(run.gpu.experts, max(2 * top_k, -(-CYCLE_BYTES // run.gpu.link.expert_bytes)))


def top_k(run: Run) -> int:
    """Return how many experts a token chooses in a layer, as far as the first requests show."""
    most = 1
    for request in islice(run.requests, 8):
        so_far = np.concatenate([[0], np.cumsum(request.counts)])[request.offsets]
        chosen = np.diff(so_far).reshape(-1, run.shape.layers).max(axis=1, initial=0)
        most = max(most, int((chosen // np.maximum(request.tokens, 1)).max(initial=1)))
    return min(most, run.shape.experts)


def decoded_contexts(run: Run) -> list[int]:
    """Return up to CONTEXTS of the contexts at which the run decodes single tokens, from its shortest to its longest.

    Of its own ones, because what a device has prepared for a run then serves here too. Where it decodes none: 1.
    """
    decoded = [request.context[request.tokens == 1] for request in run.requests]
    contexts = np.unique(np.concatenate([NO_INTS, *decoded]))
    contexts = contexts if len(contexts) else np.ones(1, np.int64)
    wanted = np.linspace(contexts[0], contexts[-1], CONTEXTS)
    nearest = np.abs(contexts[:, None] - wanted).argmin(axis=0)
    return [int(context) for context in np.unique(contexts[nearest])]


def ladder(most_tokens: int) -> list[int]:
    """Return numbers of tokens above one, up to `most_tokens`."""
    sizes = [2]
    while sizes[-1] < most_tokens:
        sizes.append(min(sizes[-1] * LADDER, most_tokens))
    return sizes if most_tokens > 1 else []


# Each part alone


def _curve(meter: Meter, sizes: Sequence[int], submit: Callable[[int, int], object], each: int = 1) -> Curve:
    """Return the ns of one of `each` completions of `submit(tokens, number)`, by tokens.

    A single token stands for itself: a device may have other means for it.
    """
    took = [meter.of(partial(submit, tokens), tokens, each) // each for tokens in sizes]
    return tuple(zip(sizes, took[:1] + rising(took[1:]), strict=True))


def _dense(meter: Meter, layers: int, groups: list[list[tuple[int, int]]]) -> tuple[Surface, Surface]:
    """Time layer 0, between others so that no cache keeps it, and the others in the mean.

    groups: of (tokens, context), each in the order in which times rise.
    """
    dense = meter.device.dense

    def other(point: tuple[int, int], number: int) -> None:
        dense(1 + number % (layers - 1) if layers > 1 else 0, *point)

    def behind_the_first(point: tuple[int, int], number: int) -> None:
        dense(0, *point)
        other(point, number)

    others, firsts = [], []
    for points in groups:
        alone = rising([meter.of(partial(other, point), point[0], warm_up=layers) for point in points])
        both = rising([meter.of(partial(behind_the_first, point), point[0], each=2) for point in points])
        others += [(*point, ns) for point, ns in zip(points, alone, strict=True)]
        firsts += [(*point, max(0, two - ns)) for point, two, ns in zip(points, both, alone, strict=True)]
    return tuple(sorted(firsts)), tuple(sorted(others))


class Endless(OrderedResidency):
    """A residency for transfers alone, whose demands hardly end: an expert a turn, for the next slot."""

    def __init__(self, places: int, turns: range, experts: Sequence[int]) -> None:
        """experts: those all over which turns go; none: each slot gets its own, the one of its number."""
        self.shape = Shape(1, max(*experts, places - 1, 0) + 1)
        super().__init__(self.shape, (places,))
        self._places, self._experts = places, experts
        self._turns = deque(turns)

    def next_transfer(self) -> tuple[int, int, bool]:
        """Return the next expert, no victim, no prefetch; BLOCKED while its slot is loading."""
        if not self._turns:
            return NO_EXPERT, NO_EXPERT, False
        m, slot = self.m, self._turns[0] % self._places
        under_way = m[core.ONE, [core.LANDING, core.ACTIVE]]
        if slot in m[core.SLOT, under_way[under_way != NO_EXPERT]]:
            return BLOCKED, NO_EXPERT, False
        turn = self._turns.popleft()
        expert = self._experts[spread(turn, len(self._experts))] if self._experts else slot
        m[core.SLOT, expert], m[core.ONE, core.ACTIVE] = slot, expert
        return expert, NO_EXPERT, False


def transfers(meter: Meter, run: Run, places: int, paces: list[Pace] | None = None) -> tuple[int, int]:
    """Return the ns of a whole expert's transfer, and what of it is latency by that of half an expert; fills the slots.

    Of the largest experts, from all over the store: a few, again and again, may come faster. Where noise makes half of
    one no shorter, nothing counts as latency. paces: gets those of a device that reports its own, in between.
    """
    link, of_layer = run.gpu.link, run.shape.experts
    expert_bytes, part_bytes = link.expert_bytes, -(-link.expert_bytes // 2)
    experts = [each for each in range(run.shape.total) if link.bytes_of(each // of_layer) == expert_bytes]
    part = _transfer_ns(meter, part_bytes, experts, places)
    whole = _transfer_ns(meter, expert_bytes, experts, places, paces)
    for place in range(places):
        meter.device.copy(place, place, 0, link.bytes_of(place // of_layer))
        meter.device.next_completion()
    moving = (whole - part) * expert_bytes // max(1, expert_bytes - part_bytes)
    return max(whole, 1), max(whole - moving, 0) if moving > 0 else 0


def _transfer_ns(meter: Meter, size: int, experts: Sequence[int], places: int, paces: list[Pace] | None = None) -> int:
    """Time one transfer behind another: the link never rests, the first and its start-up are not counted."""
    device, first = meter.device, 0
    paced = device if paces is not None and isinstance(device, Paced) else None

    def pumped(transfers: int) -> list[int]:
        nonlocal first
        first += transfers
        return _pumped(device, size, places, range(first - transfers, first), experts)

    pumped(2)

    def series() -> int:
        ends = pumped(TRANSFERS + 1)
        if paced and paces is not None:
            paces.append(paced.pace())
        return (ends[-1] - ends[0]) // TRANSFERS

    return meter.repeated(series, TRANSFERS, -(-PACES // meter.passes) if paced else AT_LEAST)


def _pumped(device: Device, size: int, places: int, turns: range, experts: Sequence[int] = ()) -> list[int]:
    """Move an expert a turn through the machine; return when each had arrived."""
    residency = Endless(places, turns, experts)
    machine = Machine(residency, device, Link(0, 1, 1, size), residency.shape)
    machine.n.proposed = True
    ends: list[int] = []
    machine.ask(streams.PUMP)
    while machine.number("flying"):
        (ended, at), state = machine.take(), residency.m[core.STATE]
        if state[ended >> 4] == core.READY:
            ends.append(at)
            state[ended >> 4] = core.ABSENT
    return ends


# Compute and transfers together


def slowed(meter: Meter, run: Run, places: int, transfer_ns: int, expert_ns: int) -> tuple[float, float]:
    """Return by what factors an expert's compute for one token, and a transfer, take longer beside each other.

    places: slots that hold their own experts. Both are timed alone and together in turn.
    """
    half, device = places // 2, meter.device
    if half < 1:
        return LEAST, LEAST

    def timed(kind: Kind, computes: int, moves: int) -> int:
        """Submit both; return the ns until the last of that kind has ended.

        What has ended is looked at while the rest is being submitted, which may take longer than a transfer.
        """
        began = ended = device.now()
        left = {Kind.COPY: moves, Kind.EXPERT: computes}

        def note(completed: Completion) -> None:
            nonlocal ended
            left[completed.kind] -= 1
            if completed.kind is kind and not left[kind]:
                ended = device.now()

        for number in range(moves):
            place = half + number % (places - half)
            device.copy(place, place, 0, run.gpu.link.bytes_of(place // run.shape.experts))
        for number in range(computes):
            device.experts([(number % half, number % half, 1)])
            while (completed := device.poll()) is not None:
                note(completed)
        while any(left.values()):
            note(device.next_completion())
        return max(ended - began, 1)

    enough_moves = 2 + 2 * EXPERTS * expert_ns // transfer_ns
    enough_computes = 2 + 2 * MOVES * transfer_ns // max(expert_ns, 1)
    took = [0, 0, 0, 0]
    for _ in range(ROUNDS):
        took[0] += timed(Kind.EXPERT, EXPERTS, 0)
        took[1] += timed(Kind.EXPERT, EXPERTS, enough_moves)
        took[2] += timed(Kind.COPY, 0, MOVES)
        took[3] += timed(Kind.COPY, enough_computes, MOVES)
    return factor_of(took[1] / took[0]), factor_of(took[3] / took[2])


def factor_of(ratio: float) -> float:
    return round(min(max(ratio, LEAST), MOST), 4)
