"""What this machine takes for each part of a step and for a transfer, measured through the device that replays.

Each kind of work is timed alone (`meter`), transfers go through the pump itself. Then the real loop runs tokens that
miss nothing and tokens that miss everything (`host_time`): what those take beyond the sum of their parts is the host's,
a turnaround for each layer (from the end of a router to the start of what is submitted in answer) and a launch for each
expert. So the tables give both as they were measured.

How far the repeats of a figure lie from their mean, in the mean over all figures, is the noise.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from statistics import mean, median
from time import monotonic
from typing import Any

import numpy as np

from policies.core.policy import NO_INTS
from policies.core.residency import BLOCKED, NO_EXPERT
from replay.calibration.contention import slowed, slowed_in_loop
from replay.calibration.host_time import with_host
from replay.calibration.meter import AT_LEAST, Meter, rising
from replay.calibration.pace import Factors, Pace, Paced
from replay.devices.store import spread
from sim.loop.device import Device
from sim.loop.driver import Driver
from sim.loop.log import COLUMNS
from sim.loop.pump import Pump, Transfers
from sim.loop.run import Run
from sim.loop.session import decider_of
from sim.profiles.measured import Curve, MeasuredModel, MeasuredTiming, Surface
from sim.profiles.timing import Link
from traces.steps import DECODE

CYCLE_BYTES = 1 << 30
"""Repeats go round so many bytes of slots (and all layers), so that caches hold no more than in a run."""
TRANSFERS = 8
"""Of a series."""
PACES = 8
"""Series between which the pace is taken, at least."""
CONTEXTS = 6
LADDER = 4
"""From one number of tokens to the next."""

FIRST_STEPS = 2
"""Of a policy's run that are not counted, besides the first tenth."""
POLICY_S = 2.0
SLOWEST = 0.01
"""Of a policy's steps, so many of the slowest are not counted: the machine was elsewhere, or compiled."""


@dataclass(frozen=True)
class Measurement:
    """What was found of a model, and by what share single repeats differ from it in the mean."""

    model: MeasuredModel
    noise: float
    paces: tuple[Pace, ...] = ()  # of the device meanwhile


@dataclass(frozen=True)
class Around:
    """A machine as measured before a run and after it and, where the device reports its pace, during the run."""

    before: MeasuredModel
    after: MeasuredModel
    during: MeasuredModel  # between both, at the pace of the run
    fastest: MeasuredModel  # as far as its errors go
    slowest: MeasuredModel

    @staticmethod
    def of(before: Measurement, after: Measurement, paces: Sequence[Pace]) -> "Around":
        """Where no pace is known, what lies between, and what either calibration found."""
        calibrated = (*before.paces, *after.paces)
        middle, models = between([before.model, after.model]), (before.model, after.model)
        if not (calibrated and paces):
            return Around(*models, middle, *models)
        scaled = (Factors.of(calibrated, paces, errors).scale(middle) for errors in (0.0, -1.0, 1.0))
        return Around(*models, *scaled)


def measure(device: Device, run: Run, most_tokens: int) -> tuple[MeasuredTiming, Link]:
    """Durations on `device` for steps of up to `most_tokens` tokens, the run's policy included, and the link."""
    return under_policy(measure_model(device, run, most_tokens, "this machine").model, run, device)


def under_policy(model: MeasuredModel, run: Run, device: Device) -> tuple[MeasuredTiming, Link]:
    """Return the durations of a machine, the run's policy included, and its link."""
    return model.timing(policy_ns(run, device)), model.link(run.gpu.link.chunk_bytes)


def measure_model(device: Device, run: Run, most_tokens: int, name: str) -> Measurement:
    """Measure everything but policies. Leaves whole experts in some slots."""
    meter = Meter(device)
    places = min(run.gpu.slots, max(2 * top_k(run), -(-CYCLE_BYTES // run.gpu.link.expert_bytes)))
    paces: list[Pace] = []
    transfer_ns, latency_ns = transfers(meter, run.gpu.link.expert_bytes, run.shape.total, places, paces)
    contexts = decoded_contexts(run)
    device.prepare(contexts)
    sizes, behind = [1, *ladder(most_tokens)], _behind(run)
    decode, whole = [(1, context) for context in contexts], [(tokens, tokens) for tokens in sizes[1:]]
    late = [(tokens, behind) for tokens in sizes[1:] if tokens < behind]
    first_dense, dense = _dense(meter, run.shape.layers, [decode, whole, late])
    together = min(top_k(run), places)

    def experts(tokens: int, number: int) -> None:
        """Launched at once, going round the slots."""
        group = [(number * together + one) % places for one in range(together)]
        device.experts([(place, place, tokens) for place in group])

    model = MeasuredModel(
        model=name,
        expert_bytes=run.gpu.link.expert_bytes,
        transfer_ns=transfer_ns,
        latency_ns=latency_ns,
        turnaround_ns=0,
        launch_ns=0,
        first_dense=first_dense,
        dense=dense,
        expert=_curve(meter, sizes, experts, together),
        combine=_curve(
            meter, sizes, lambda tokens, _: device.combine(tokens)
        ),  # of the experts: it takes their sum away
        head=_curve(meter, sizes, lambda tokens, _: device.head(tokens)),
    )
    beside = (1.0, 1.0)
    if not isinstance(device, Paced):  # slots still hold their own experts
        beside = slowed(meter, run.gpu.link.expert_bytes, places, transfer_ns, model.expert[0][1])
    model = with_host(meter, run, model, top_k(run), contexts[0])
    if isinstance(device, Paced):
        beside = slowed_in_loop(meter, run, model, top_k(run), contexts[0], paces)
    model = replace(model, compute_slowed=beside[0], transfer_slowed=beside[1])
    return Measurement(model, mean(meter.spreads), tuple(paces))


def between(models: Sequence[MeasuredModel]) -> MeasuredModel:
    """The medians of a model's passes; of two, what lies between them."""
    values = middle([asdict(each) for each in models])
    return MeasuredModel(**values)


def middle(values: Sequence[Any]) -> Any:
    """The median of each number in structures that are alike; whole numbers stay whole, other things are the first's.

    values: passes of the same thing, nested in any way.
    """
    first = values[0]
    if isinstance(first, Mapping):
        return {key: middle([each[key] for each in values]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(middle(list(several)) for several in zip(*values, strict=True))
    if isinstance(first, int | float) and not isinstance(first, bool):
        return round(median(values)) if isinstance(first, int) else float(median(values))
    return first


# Which points


def top_k(run: Run) -> int:
    """Experts that a token chooses in a layer, as far as the first requests show."""
    most = 1
    for request in islice(run.requests, 8):
        so_far = np.concatenate([[0], np.cumsum(request.counts)])[request.offsets]
        chosen = np.diff(so_far).reshape(-1, run.shape.layers).max(axis=1, initial=0)
        most = max(most, int((chosen // np.maximum(request.tokens, 1)).max(initial=1)))
    return min(most, run.shape.experts)


def decoded_contexts(run: Run) -> list[int]:
    """Up to CONTEXTS of the contexts at which the run decodes single tokens, from its shortest to its longest.

    Of its own ones, because what a device has prepared for a run then serves here too. Where it decodes none: 1.
    """
    decoded = [request.context[request.tokens == 1] for request in run.requests]
    contexts = np.unique(np.concatenate([NO_INTS, *decoded]))
    contexts = contexts if len(contexts) else np.ones(1, np.int64)
    wanted = np.linspace(contexts[0], contexts[-1], CONTEXTS)
    nearest = np.abs(contexts[:, None] - wanted).argmin(axis=0)
    return [int(context) for context in np.unique(contexts[nearest])]


def ladder(most_tokens: int) -> list[int]:
    """Numbers of tokens above one, up to `most_tokens`."""
    sizes = [2]
    while sizes[-1] < most_tokens:
        sizes.append(min(sizes[-1] * LADDER, most_tokens))
    return sizes if most_tokens > 1 else []


def _behind(run: Run) -> int:
    """The longest context of a step of several tokens that has others before it; 0: there is none."""
    late = (request.context[(request.tokens > 1) & (request.context > request.tokens)] for request in run.requests)
    return max((int(contexts.max(initial=0)) for contexts in late), default=0)


# Each part alone


def _curve(meter: Meter, sizes: Sequence[int], submit: Callable[[int, int], object], each: int = 1) -> Curve:
    """One of `each` completions of `submit(tokens, number)`, by tokens.

    A single token stands for itself: a device may have other means for it.
    """
    took = [meter.of(partial(submit, tokens), tokens, each) // each for tokens in sizes]
    return tuple(zip(sizes, took[:1] + rising(took[1:]), strict=True))


def _dense(meter: Meter, layers: int, groups: list[list[tuple[int, int]]]) -> tuple[Surface, Surface]:
    """Of layer 0, timed between others so that no cache keeps it, and of the others in the mean.

    groups: of (tokens, context), each in the order in which times rise.
    """
    dense = meter.device.dense

    def other(number: int) -> int:
        return 1 + number % (layers - 1) if layers > 1 else 0

    def alone(point: tuple[int, int], number: int) -> None:
        dense(other(number), *point)

    def behind_the_first(point: tuple[int, int], number: int) -> None:
        dense(0, *point)
        dense(other(number), *point)

    others, firsts = [], []
    for points in groups:
        here = rising([meter.of(partial(alone, point), point[0], warm_up=layers) for point in points])
        both = rising([meter.of(partial(behind_the_first, point), point[0], each=2) for point in points])
        others += [(*point, ns) for point, ns in zip(points, here, strict=True)]
        firsts += [(*point, max(0, two - ns)) for point, two, ns in zip(points, both, here, strict=True)]
    return tuple(sorted(firsts)), tuple(sorted(others))


class Endless(Transfers):
    """What the pump asks of a residency, from one whose demands hardly end: an expert a turn, for the next slot."""

    def __init__(self, places: int, turns: range, experts: int) -> None:
        """experts: of the store, all over which turns go; 0: each slot gets its own, the one of its number."""
        self._places, self._experts = places, experts
        self._turns = deque(turns)
        self._loading: deque[int] = deque()  # slots
        self._slots: dict[int, int] = {}

    def next_transfer(self) -> tuple[int, int, bool]:
        """Return the next expert, no victim, no prefetch; BLOCKED while its slot is loading."""
        if not self._turns:
            return NO_EXPERT, NO_EXPERT, False
        slot = self._turns[0] % self._places
        if slot in self._loading:
            return BLOCKED, NO_EXPERT, False
        turn = self._turns.popleft()
        self._loading.append(slot)
        expert = spread(turn, self._experts) if self._experts else slot
        self._slots[expert] = slot
        return expert, NO_EXPERT, False

    def slot(self, expert: int) -> int:
        """Return the one of its turn."""
        return self._slots[expert]

    def interrupt(self) -> tuple[int, int]:
        """Return nothing: demands are not interrupted."""
        return NO_EXPERT, NO_EXPERT

    def land(self) -> None:
        """Ignored."""

    def arrived(self) -> bool:
        """In the order in which they were taken."""
        self._loading.popleft()
        return False


def transfers(
    meter: Meter, expert_bytes: int, experts: int, places: int, paces: list[Pace] | None = None
) -> tuple[int, int]:
    """A whole expert's time, and what of it is latency by the time of half an expert; fills the slots.

    Of experts from all over the store, as a run asks for them: a few of them, again and again, may come faster.
    paces: gets those of a device that reports its own, which is asked between the transfers.
    """
    part_bytes = -(-expert_bytes // 2)
    part = _transfer_ns(meter, part_bytes, experts, places)
    whole = _transfer_ns(meter, expert_bytes, experts, places, paces)
    _pumped(meter.device, expert_bytes, places, range(places))
    moving = (whole - part) * expert_bytes // max(1, expert_bytes - part_bytes)
    return max(whole, 1), max(whole, 1) - min(max(moving, 1), max(whole, 1))


def _transfer_ns(meter: Meter, size: int, experts: int, places: int, paces: list[Pace] | None = None) -> int:
    """Of one transfer behind another: the link never rests, the first and its start-up are not counted."""
    device, first = meter.device, 0
    asked = device if paces is not None and isinstance(device, Paced) else None

    def pumped(transfers: int) -> list[int]:
        nonlocal first
        first += transfers
        return _pumped(device, size, places, range(first - transfers, first), experts)

    pumped(2)

    def series() -> int:
        ends = pumped(TRANSFERS + 1)
        if asked and paces is not None:
            paces.append(asked.pace())
        return (ends[-1] - ends[0]) // TRANSFERS

    return meter.repeated(series, TRANSFERS, PACES if asked else AT_LEAST)


def _pumped(device: Device, size: int, places: int, turns: range, experts: int = 0) -> list[int]:
    """Move an expert a turn through the pump; when each had arrived."""
    pump = Pump(Endless(places, turns, experts), device, Link(0, 1, 1, size), places)
    pump.proposed = True
    ends: list[int] = []
    pump.act()
    while pump.on_link:
        device.next_completion()
        arrived = pump.piece_ended()
        if arrived is not None:
            ends.append(device.now())
        pump.act()
    return ends


# Policies


PHASE, PREDICTOR_NS = COLUMNS.index("phase"), COLUMNS.index("stall_predictor_ns")


def policy_ns(run: Run, device: Device) -> int:
    """Return the ns that an event of decode costs the policy on this host, in the mean: as the driver itself counts it.

    The run is run from its beginning on `device` for POLICY_S, or a few steps: between two events a device lets the
    host's caches forget the policy, so that it takes up to twice what it takes in a loop. The first tenth (compilation,
    empty collections) is not counted.
    """
    if decider_of(run).silent:
        return 0
    rows: list[tuple[int, int]] = []
    until = monotonic() + POLICY_S
    for row in Driver(run, device).steps():
        rows.append((row.numbers[PHASE], row.numbers[PREDICTOR_NS]))
        if monotonic() > until and len(rows) > 2 * FIRST_STEPS:
            break
    device.discard_copies()  # a prefetch may be under way
    steady = rows[min(len(rows) - 1, FIRST_STEPS + len(rows) // 10) :]
    took = sorted(ns for kind, ns in steady if kind == DECODE) or sorted(ns for _, ns in steady)
    counted = took[: len(took) - int(len(took) * SLOWEST)]
    return int(mean(counted) / run.shape.layers)
