"""Tokens run in the real loop, less what their parts take alone: what the host adds, and how parts slow each other.

Tokens that miss nothing and tokens that miss everything show the host's part (`tokens_in_loop`, `with_host`). On a CPU
transfers, compute and loop share processors: tokens of which half of the experts miss show how much
(`half_missing_in_loop`, `slowed_by`), and `effective` adds it to the tables of a run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from policies.core.spec import PolicySpec
from replay.calibration.meter import Meter
from replay.calibration.pace import pausing
from replay.calibration.parts import factor_of
from replay.devices.waiting import Pace
from sim.engines.simpy_engine import simulate
from sim.loop.driver import Driver
from sim.loop.log import BEHIND_PREFETCH, DEMAND, LATE, RunLog
from sim.loop.run import Run
from sim.profiles.measured import TABLES, MeasuredModel
from traces.models.profile import MOST
from traces.steps import DECODE, RequestSteps

ITERATIONS = 3
EXPOSED = [DEMAND, LATE, BEHIND_PREFETCH]  # stalls in which the link moves bytes and nothing computes
FIRST_STEPS = 1  # run before the tokens that count


@dataclass(frozen=True)
class InLoop:
    """How many tokens are run in the real loop, in all passes: as many as take `ns`, but `least` and at most `most`."""

    least: int
    most: int
    ns: int

    def steps(self, about_ns: int, passes: int) -> int:
        """Return how many in each pass, if one takes about so long."""
        return -(-min(max(self.ns // max(about_ns, 1), self.least), self.most) // passes)


LOOP = InLoop(least=4, most=192, ns=400_000_000)
MIXED_LOOP = InLoop(least=6, most=40, ns=5_000_000_000)
SIMULATED = FIRST_STEPS + 4  # of the tokens that half miss: there each is as long as the one before
BOOKKEEPING = 4
"""The host adds at most so many times what the driver itself took. What a token without a miss takes beyond that is the
parts', which in the loop take longer than alone; of a token with misses it may be a machine that drifts."""


@dataclass(frozen=True)
class Token:
    """A decoded token in the real loop, in the mean."""

    step_ns: int
    most_host_ns: int  # what the host can have added to it


def tokens_in_loop(meter: Meter, run: Run, alone: MeasuredModel, top_k: int, context: int) -> tuple[Token, Token]:
    """Run tokens of two kinds: all that they need is there, and none of it is."""
    layers, (busy_layers, together) = run.shape.layers, _launched(run, top_k)

    def token(run: Run, about_ns: int, together: int, busy_layers: int, turns: bool) -> Token:
        """Run such tokens; the first one does not count. turns: each needs other experts than the one before."""
        steps = FIRST_STEPS + LOOP.steps(about_ns, meter.passes)
        request = same_again(run, together, busy_layers, context, steps)
        if turns:
            turn = np.repeat(np.arange(steps) % run.shape.experts, layers)
            request = replace(request, experts=request.experts + turn)
        driver = Driver(replace(run.under(PolicySpec.of("lru")), requests=[request], cold=False), meter.device)
        log = driver.run(lambda row: None)
        step_ns = meter.mean(log.step_ns[FIRST_STEPS:].tolist())
        counts = bool(meter.device.inside_ns)  # else it has a clock of its own
        return Token(step_ns, BOOKKEEPING * driver.outside_ns // len(log.step_ns) if counts else MOST)

    hit = token(run, parts_ns(alone, layers, busy_layers * together, context), together, busy_layers, turns=False)
    scarce = run.with_slots(min(run.gpu.slots, run.gpu.room(layers, 1)))  # so LRU never has what is needed
    about_ns = parts_ns(alone, layers, layers, context) + layers * alone.transfer_ns
    return hit, token(scarce, about_ns, 1, layers, turns=True)


def with_host(model: MeasuredModel, run: Run, top_k: int, context: int, hit: Token, missing: Token) -> MeasuredModel:
    """Return the model with what the host adds to tokens of both kinds, so that both come out as measured.

    Beyond the sum of its parts a layer takes the turnaround, and a launch for each expert; with a miss the last one's,
    as transfers hide the others. Parts that come to more than the step, or to far less, are scaled to what they are in
    it.
    """
    layers, (busy_layers, together) = run.shape.layers, _launched(run, top_k)
    launches = busy_layers * together
    alone_ns = parts_ns(model, layers, launches, context)
    beyond_ns = min(max(0, hit.step_ns - alone_ns), hit.most_host_ns)
    in_loop_ns, of_ns = hit.step_ns - beyond_ns, alone_ns
    if in_loop_ns != alone_ns:
        model = model.with_ns(lambda _, tokens, ns: ns * in_loop_ns // of_ns if tokens == 1 else ns)
    alone_ns = parts_ns(model, layers, layers, context) + moved_ns(model, layers)
    missing_ns = max(min(missing.step_ns - alone_ns, missing.most_host_ns), -missing.most_host_ns)
    if top_k == 1 and launches == layers:  # no second launch to compare with: hits alone give the time of a layer
        return replace(model, turnaround_ns=beyond_ns // layers)
    if launches <= layers:  # so few slots that hardly a token misses nothing
        return replace(model, turnaround_ns=max(0, missing_ns) // layers)
    launch_ns = (beyond_ns - missing_ns) // (launches - layers)
    launch_ns = min(max(launch_ns, -model.expert[0][1]), beyond_ns // launches)
    return replace(model, turnaround_ns=(beyond_ns - launches * launch_ns) // layers, launch_ns=launch_ns)


def _launched(run: Run, top_k: int) -> tuple[int, int]:
    """Return how many layers of a token without a miss have experts, and how many each."""
    together = min(top_k, run.gpu.experts)
    return min(run.shape.layers, run.gpu.experts // together), together


def parts_ns(model: MeasuredModel, layers: int, experts: int, context: int, tokens: int = 1) -> int:
    """Return what the parts of a step take together, with so many experts in all layers, each on all tokens."""
    timing = model.timing()
    dense = timing.dense_ns(0, tokens, context) + (layers - 1) * timing.dense_ns(1, tokens, context)
    return dense + experts * timing.expert_ns(tokens) + layers * timing.combine_ns(tokens) + timing.head_ns(tokens)


def moved_ns(model: MeasuredModel, layers: int) -> int:
    """Return what the transfers of an expert of each of the first layers take."""
    link = model.link()
    return sum(link.used_ns(link.bytes_of(layer)) for layer in range(layers))


def same_again(run: Run, together: int, busy_layers: int, context: int, steps: int) -> RequestSteps:
    """Return tokens that all choose the same: `together` experts in each of the first layers, none in the others."""
    layers, experts = run.shape.layers, run.shape.experts
    chosen = (np.arange(busy_layers)[:, None] * experts + np.arange(together)).ravel()
    each = np.where(np.arange(layers) < busy_layers, together, 0)
    return RequestSteps(
        request=0,
        phase=np.full(steps, DECODE, np.uint8),
        tokens=np.ones(steps, np.int64),
        context=np.full(steps, context, np.int64),
        offsets=np.concatenate([[0], np.cumsum(np.tile(each, steps))]).astype(np.int64),
        experts=np.tile(chosen, steps).astype(np.int64),
        counts=np.ones(steps * len(chosen), np.int64),
    )


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
    """Run tokens of which half of the experts miss; None of too few slots or experts. paces: gets those meanwhile."""
    layers, half = _mixed(run, top_k)
    if not (layers and half):
        return None
    about_ns = parts_ns(alone, run.shape.layers, layers * top_k, context) + layers * half * alone.transfer_ns
    mixed = _half_missing_run(run, top_k, context, FIRST_STEPS + MIXED_LOOP.steps(about_ns, meter.passes))
    return _busy(Driver(mixed, meter.device).run(pausing(meter.device, paces, lambda row: None)))


def at_most_as_beside(mixed: Busy, model: MeasuredModel, run: Run, top_k: int) -> MeasuredModel:
    """Return the model with transfers that alone take no longer than in such tokens, beside compute.

    If they took longer, they were timed while the machine was slow.
    """
    layers, half = _mixed(run, top_k)
    in_loop_ns = model.transfer_ns * mixed.link // (half * moved_ns(model, layers))
    transfer_ns = min(model.transfer_ns, max(1, in_loop_ns))
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
    return replace(model, compute_slowed=factor_of(of_compute), transfer_slowed=factor_of(of_link))


def _mixed(run: Run, top_k: int) -> tuple[int, int]:
    """Return how many layers of such a token have experts, and how many of these miss."""
    return min(run.shape.layers, run.gpu.experts // top_k), top_k // 2


def _half_missing_run(run: Run, top_k: int, context: int, steps: int) -> Run:
    """Return one request of such tokens, for LRU with just the room that they need."""
    layers, _ = _mixed(run, top_k)
    request = half_missing(run, top_k, layers, context, steps)
    return replace(
        run.under(PolicySpec.of("lru")).with_slots(run.gpu.room(layers, top_k)), requests=[request], cold=False
    )


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

    def longer(shares: dict[str, float]) -> Callable[[str, int, int], int]:
        return lambda key, tokens, ns: round(ns * (1 + (model.compute_slowed - 1) * shares[key])) if tokens == 1 else ns

    result = model
    for _ in range(ITERATIONS if (model.compute_slowed, model.transfer_slowed) != (1.0, 1.0) else 0):
        log = simulated(result)
        decoded = log.phase == DECODE
        busy = _busy(log, decoded, np.sum)
        lookups = sum(int(each[decoded].sum()) for each in (log.hits, log.late, log.misses))
        experts = min(lookups * result.timing().expert_ns(1), busy.compute)
        shares = dict.fromkeys(TABLES, max(0, busy.together - experts) / max(1, busy.compute - experts))
        shares["expert"] = min(1.0, busy.together / experts) if experts else 0.0
        of_link = busy.together / busy.link if busy.link else 0.0
        transfer = round(model.transfer_ns * (1 + (model.transfer_slowed - 1) * of_link))
        result = model.with_ns(longer(shares), transfer_ns=transfer)
    return result
