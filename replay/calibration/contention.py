"""How much transfers and compute slow each other down, and what a run feels of it.

On a GPU they share its memory's bandwidth, and are timed together (`slowed`). On a CPU they also share the processors
with the loop and its interpreter, so tokens of which half of the experts miss are run in the real loop
(`slowed_in_loop`).

Parts are timed alone, and the simulator has constant durations only. So the slow-down is added to the tables of a run:
the run is simulated, its log says which share of the compute overlaps with transfers, durations grow by that share of
the slow-down, and this is repeated SETTLING times. Most of the overlap is the compute of experts that hit while others
of the same event are transferred; the rest is the compute of dense parts during prefetches.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from policies.core.spec import parse
from replay.calibration.host_time import half_missing, parts_ns
from replay.calibration.meter import Meter
from replay.calibration.pace import Pace, pausing
from sim.engines.simpy_engine import simulate
from sim.loop.device import Completion, Kind
from sim.loop.driver import Driver
from sim.loop.log import BEHIND_PREFETCH, DEMAND, LATE, RunLog
from sim.loop.run import Run
from sim.profiles.measured import TABLES, MeasuredModel
from traces.steps import DECODE

ROUNDS, SETTLING = 8, 3
EXPERTS, TRANSFERS = 16, 3
"""Of a round: what is timed."""

LEAST, MOST = 1.0, 10.0
"""Of a slow-down: below is noise, and above something else continues."""

EXPOSED = (DEMAND, LATE, BEHIND_PREFETCH)
"""Stalls in which the link moves bytes and nothing computes."""

FIRST_STEPS = 2
"""Of the tokens that are run, which miss more."""
LOOP_STEPS, LOOP_AT_LEAST, LOOP_NS = 40, 6, 3_000_000_000
"""Tokens that are run: as many as take LOOP_NS, but not fewer, nor more."""

Play = Callable[[MeasuredModel], RunLog]


def slowed(meter: Meter, expert_bytes: int, places: int, transfer_ns: int, expert_ns: int) -> tuple[float, float]:
    """Return by what factors an expert's compute for one token, and a transfer, take longer beside each other.

    places: slots that hold their own experts. Both are timed alone and together in turn.
    """
    half = places // 2
    if half < 1:
        return LEAST, LEAST
    device = meter.device

    def compute(number: int) -> None:
        device.experts([(number % half, number % half, 1)])

    def move(number: int) -> None:
        place = half + number % (places - half)
        device.copy(place, place, 0, expert_bytes)

    def timed(kind: Kind, computes: int, moves: int) -> int:
        """Submit both; ns until the last of that kind has ended, each of them.

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
            move(number)
        for number in range(computes):
            compute(number)
            while (completed := device.poll()) is not None:
                note(completed)
        while any(left.values()):
            note(device.next_completion())
        return max(ended - began, 1)

    enough_moves = 2 + 2 * EXPERTS * expert_ns // transfer_ns
    enough_computes = 2 + 2 * TRANSFERS * transfer_ns // max(expert_ns, 1)
    took = [0, 0, 0, 0]
    for _ in range(ROUNDS):
        took[0] += timed(Kind.EXPERT, EXPERTS, 0)
        took[1] += timed(Kind.EXPERT, EXPERTS, enough_moves)
        took[2] += timed(Kind.COPY, 0, TRANSFERS)
        took[3] += timed(Kind.COPY, enough_computes, TRANSFERS)
    return _factor(took[1] / took[0]), _factor(took[3] / took[2])


def slowed_in_loop(
    meter: Meter, run: Run, model: MeasuredModel, top_k: int, context: int, paces: list[Pace]
) -> tuple[float, float]:
    """Return the same factors, of tokens of which half of the experts miss.

    What they take on `model` is simulated. What link and compute are busy beyond that is the slow-down of the time in
    which both were. paces: gets those of the machine meanwhile.
    """
    layers, half = min(run.shape.layers, run.gpu.slots // top_k), top_k // 2
    if not (layers and half):
        return LEAST, LEAST
    alone_ns = parts_ns(model, run.shape.layers, layers * top_k, context) + layers * half * model.transfer_ns
    steps = FIRST_STEPS + min(max(LOOP_NS // alone_ns, LOOP_AT_LEAST), LOOP_STEPS)
    request = half_missing(run, top_k, layers, context, steps)
    mixed = replace(run.under(parse("lru")).with_slots(layers * top_k), requests=[request], cold=False)
    measured = Driver(mixed, meter.device).run(pausing(meter.device, paces, lambda row: None))
    log = simulate(mixed.on(model.timing(), model.link(run.gpu.link.chunk_bytes), None))

    def busy_ns(log: RunLog) -> tuple[int, int]:
        return int(log.compute_busy_ns[FIRST_STEPS:].sum()), int(log.link_busy_ns[FIRST_STEPS:].sum())

    compute, moving = busy_ns(measured)
    compute_alone, moving_alone = busy_ns(log)
    exposed = int(measured.stall_ns[FIRST_STEPS:, list(EXPOSED)].sum())
    together = min(max(0, moving - exposed), compute)
    computes = (steps - FIRST_STEPS) * layers * top_k
    experts, launched = computes * model.expert[0][1], computes * model.timing().expert_ns(1)
    more = compute - compute_alone
    if not (together and experts and moving_alone):
        return LEAST, LEAST
    of_compute = 1 + more * (launched + more) / (experts * together)
    of_link = 1 + (moving - moving_alone) / moving_alone * moving / together
    return _factor(of_compute), _factor(of_link)


def felt(model: MeasuredModel, play: Play) -> MeasuredModel:
    """Return the model's tables as the decoded tokens of a run feel them; `play` simulates the run on a model."""
    found = model
    if (model.compute_slowed, model.transfer_slowed) == (LEAST, LEAST):
        return model
    for _ in range(SETTLING):
        found = _slower(model, found, play(found))
    return found


def _slower(model: MeasuredModel, played: MeasuredModel, log: RunLog) -> MeasuredModel:
    """`model`, slowed by what overlapped in the log of a run on `played`."""
    decoded = log.phase == DECODE
    link, compute = int(log.link_busy_ns[decoded].sum()), int(log.compute_busy_ns[decoded].sum())
    exposed = int(log.stall_ns[decoded][:, list(EXPOSED)].sum())
    together = min(max(0, link - exposed), compute)
    lookups = sum(int(each[decoded].sum()) for each in (log.hits, log.late, log.misses))
    experts = min(lookups * played.timing().expert_ns(1), compute)
    of_experts = min(1.0, together / experts) if experts else 0.0
    of_others = max(0, together - experts) / max(1, compute - experts)
    of_link = together / link if link else 0.0

    def longer(rows: tuple[tuple[int, ...], ...], share: float) -> tuple[tuple[int, ...], ...]:
        factor = 1 + (model.compute_slowed - 1) * share
        return tuple((*row[:-1], round(row[-1] * factor)) if row[0] == 1 else row for row in rows)

    tables: dict[str, Any] = {
        key: longer(getattr(model, key), of_experts if key == "expert" else of_others) for key in TABLES
    }
    transfer = round(model.transfer_ns * (1 + (model.transfer_slowed - 1) * of_link))
    return replace(model, **tables, transfer_ns=transfer)


def _factor(found: float) -> float:
    return round(min(max(found, LEAST), MOST), 4)
