"""How much transfers and compute slow each other down, and what that adds to a run.

On a GPU they share its memory's bandwidth, and are timed together (`slowed`). On a CPU they also share the processors
with the loop and its interpreter, so tokens of which half of the experts miss are run in the real loop
(`half_missing_in_loop`), and what follows from them is computed (`slowed_by`).

Parts are timed alone, and the simulator has constant durations only. So the slow-down is added to the tables of a run:
the run is simulated, its log says which share of the compute overlaps with transfers, durations grow by that share of
the slow-down, and this is repeated ITERATIONS times. Most of the overlap is the compute of experts that hit while
others of the same event are transferred; the rest is the compute of dense parts during prefetches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from policies.core.spec import PolicySpec
from replay.calibration.host_time import FIRST_STEPS, InLoop, parts_ns, same_again
from replay.calibration.meter import Meter
from replay.calibration.pace import pausing
from replay.devices.waiting import Pace
from sim.engines.simpy_engine import simulate
from sim.loop.device import Completion, Kind
from sim.loop.driver import Driver
from sim.loop.log import BEHIND_PREFETCH, DEMAND, LATE, RunLog
from sim.loop.run import Run
from sim.profiles.measured import TABLES, MeasuredModel
from traces.steps import DECODE, RequestSteps

ROUNDS, ITERATIONS = 8, 3
EXPERTS, TRANSFERS = 16, 3
"""Of a round: what is timed."""

LEAST, MOST = 1.0, 10.0
"""Of a slow-down: below is noise, and above something else continues."""

EXPOSED = [DEMAND, LATE, BEHIND_PREFETCH]
"""Stalls in which the link moves bytes and nothing computes."""

LOOP = InLoop(least=6, most=40, ns=5_000_000_000)
SIMULATED = FIRST_STEPS + 4
"""Of its tokens that are simulated: there each is as long as the one before."""


def slowed(meter: Meter, expert_bytes: int, places: int, transfer_ns: int, expert_ns: int) -> tuple[float, float]:
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
            device.copy(place, place, 0, expert_bytes)
        for number in range(computes):
            device.experts([(number % half, number % half, 1)])
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


@dataclass(frozen=True)
class Busy:
    """For how long link and compute are busy in a run, in ns."""

    compute: int
    link: int
    exposed: int  # of the link's, nothing computes

    @property
    def together(self) -> int:
        return min(max(0, self.link - self.exposed), self.compute)


def _busy(log: RunLog, steps: Any = slice(FIRST_STEPS, None), of: Callable[[Any], float] = np.mean) -> Busy:
    """Return the means, or the sums, of these steps of a log; of all tokens but the first."""
    each = (log.compute_busy_ns[steps], log.link_busy_ns[steps], log.stall_ns[steps][:, EXPOSED].sum(axis=1))
    return Busy(*(round(of(ns)) for ns in each))


def half_missing_in_loop(
    meter: Meter, run: Run, alone: MeasuredModel, top_k: int, context: int, paces: list[Pace]
) -> Busy | None:
    """Run tokens of which half of the experts miss; None where there are too few slots or experts.

    paces: gets those of the machine meanwhile.
    """
    layers, half = _mixed(run, top_k)
    if not (layers and half):
        return None
    about_ns = parts_ns(alone, run.shape.layers, layers * top_k, context) + layers * half * alone.transfer_ns
    mixed = _half_missing_run(run, top_k, context, FIRST_STEPS + LOOP.steps(about_ns, meter.passes))
    return _busy(Driver(mixed, meter.device).run(pausing(meter.device, paces, lambda row: None)))


def at_most_as_beside(mixed: Busy, model: MeasuredModel, run: Run, top_k: int) -> MeasuredModel:
    """Return the model with transfers that alone take no longer than in such tokens, beside compute.

    If they took longer, they were timed while the machine was slow.
    """
    layers, half = _mixed(run, top_k)
    transfer_ns = min(model.transfer_ns, max(1, mixed.link // (layers * half)))
    return replace(model, transfer_ns=transfer_ns, latency_ns=model.latency_ns * transfer_ns // model.transfer_ns)


def slowed_by(mixed: Busy, model: MeasuredModel, run: Run, top_k: int, context: int) -> MeasuredModel:
    """Return the model with its slow-down: what link and compute are busy beyond what is simulated without."""
    layers, _ = _mixed(run, top_k)
    tokens, link = _half_missing_run(run, top_k, context, SIMULATED), model.link(run.gpu.link.chunk_bytes)
    alone = _busy(simulate(tokens.on(model.timing(), link, None)))
    together, computes = mixed.together, layers * top_k
    experts, launched = computes * model.expert[0][1], computes * model.timing().expert_ns(1)
    more = mixed.compute - alone.compute
    if not (together and experts and alone.link):
        return model
    of_compute = 1 + more * (launched + more) / (experts * together)
    of_link = 1 + (mixed.link - alone.link) / alone.link * mixed.link / together
    return replace(model, compute_slowed=_factor(of_compute), transfer_slowed=_factor(of_link))


def _mixed(run: Run, top_k: int) -> tuple[int, int]:
    """Return how many layers of such a token have experts, and how many of these miss."""
    return min(run.shape.layers, run.gpu.slots // top_k), top_k // 2


def _half_missing_run(run: Run, top_k: int, context: int, steps: int) -> Run:
    """Return one request of such tokens, for LRU with just the slots that they need."""
    layers, _ = _mixed(run, top_k)
    request = half_missing(run, top_k, layers, context, steps)
    return replace(run.under(PolicySpec.of("lru")).with_slots(layers * top_k), requests=[request], cold=False)


def half_missing(run: Run, top_k: int, busy_layers: int, context: int, steps: int) -> RequestSteps:
    """Return tokens of which, with top_k slots for each of the first layers, LRU always has half of the experts.

    Each chooses the same first half, and another second half than the token before.
    """
    request = same_again(run, top_k, busy_layers, context, steps)
    kept = top_k - top_k // 2
    others = run.shape.experts - kept
    token, place = np.divmod(np.arange(len(request.experts)), busy_layers * top_k)
    within, layer = place % top_k, place // top_k
    turned = kept + (token * (top_k // 2) + within - kept) % others
    chosen = layer * run.shape.experts + np.where(within < kept, within, turned)
    return replace(request, experts=np.sort(chosen.reshape(-1, top_k), axis=1).ravel())  # ids of a layer ascend


def effective(model: MeasuredModel, simulated: Callable[[MeasuredModel], RunLog]) -> MeasuredModel:
    """Return the model's tables with what contention adds to decoded tokens of a run, which `simulated` simulates."""
    result = model
    if (model.compute_slowed, model.transfer_slowed) != (LEAST, LEAST):
        for _ in range(ITERATIONS):
            result = _slower(model, result, simulated(result))
    return result


def _slower(model: MeasuredModel, simulated: MeasuredModel, log: RunLog) -> MeasuredModel:
    """Return `model`, slowed by what overlapped in the log of a run on `simulated`."""
    decoded = log.phase == DECODE
    busy = _busy(log, decoded, np.sum)
    lookups = sum(int(each[decoded].sum()) for each in (log.hits, log.late, log.misses))
    experts = min(lookups * simulated.timing().expert_ns(1), busy.compute)
    of_experts = min(1.0, busy.together / experts) if experts else 0.0
    of_others = max(0, busy.together - experts) / max(1, busy.compute - experts)
    of_link = busy.together / busy.link if busy.link else 0.0

    def longer(rows: tuple[tuple[int, ...], ...], share: float) -> tuple[tuple[int, ...], ...]:
        factor = 1 + (model.compute_slowed - 1) * share
        return tuple((*row[:-1], round(row[-1] * factor)) if row[0] == 1 else row for row in rows)

    tables: dict[str, Any] = {
        key: longer(getattr(model, key), of_experts if key == "expert" else of_others) for key in TABLES
    }
    transfer = round(model.transfer_ns * (1 + (model.transfer_slowed - 1) * of_link))
    return replace(model, **tables, transfer_ns=transfer)


def _factor(ratio: float) -> float:
    return round(min(max(ratio, LEAST), MOST), 4)
