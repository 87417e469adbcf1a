"""What the host adds to a decoded token: tokens run in the real loop, less what their parts take alone."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from policies.core.spec import PolicySpec
from replay.calibration.meter import Meter
from sim.loop.driver import Driver
from sim.loop.run import Run
from sim.profiles.measured import TABLES, MeasuredModel
from traces.models.profile import MOST
from traces.steps import DECODE, RequestSteps

FIRST_STEPS = 1
"""Run before the tokens that count."""


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
        counts = meter.device.inside_ns > 0  # else it has a clock of its own
        return Token(step_ns, BOOKKEEPING * driver.outside_ns // len(log.step_ns) if counts else MOST)

    hit = token(run, parts_ns(alone, layers, busy_layers * together, context), together, busy_layers, turns=False)
    scarce = run.with_slots(min(run.gpu.slots, layers))  # with a slot a layer, LRU never has what is needed
    about_ns = parts_ns(alone, layers, layers, context) + layers * alone.transfer_ns
    return hit, token(scarce, about_ns, 1, layers, turns=True)


def with_host(model: MeasuredModel, run: Run, top_k: int, context: int, hit: Token, missing: Token) -> MeasuredModel:
    """Return the model with what the host adds to tokens of both kinds.

    Beyond the sum of its parts a layer takes the turnaround, and a launch for each expert: `together` of them with no
    miss, and with a miss the last one's, since transfers hide the others. So both kinds come out as measured. Where
    the parts alone come to more than the step, or to so much less that it cannot be the host's, they are scaled to what
    they are in the loop, which is what a run does.
    """
    layers, (busy_layers, together) = run.shape.layers, _launched(run, top_k)
    launches = busy_layers * together
    alone_ns = parts_ns(model, layers, launches, context)
    beyond_ns = min(max(0, hit.step_ns - alone_ns), hit.most_host_ns)
    model = _scaled(model, hit.step_ns - beyond_ns, alone_ns)
    alone_ns = parts_ns(model, layers, layers, context) + layers * model.transfer_ns
    missing_ns = max(min(missing.step_ns - alone_ns, missing.most_host_ns), -missing.most_host_ns)
    if top_k == 1 and launches == layers:  # one expert of each layer, there or not: hits tell what a layer takes
        return replace(model, turnaround_ns=beyond_ns // layers)
    if launches <= layers:  # so few slots that hardly a token misses nothing
        return replace(model, turnaround_ns=max(0, missing_ns) // layers)
    launch_ns = (beyond_ns - missing_ns) // (launches - layers)
    launch_ns = min(max(launch_ns, -model.expert[0][1]), beyond_ns // launches)
    return replace(model, turnaround_ns=(beyond_ns - launches * launch_ns) // layers, launch_ns=launch_ns)


def _launched(run: Run, top_k: int) -> tuple[int, int]:
    """Return how many layers of a token without a miss have experts, and how many each."""
    together = min(top_k, run.gpu.slots)
    return min(run.shape.layers, run.gpu.slots // together), together


def parts_ns(model: MeasuredModel, layers: int, experts: int, context: int, tokens: int = 1) -> int:
    """Return what the parts of a step take together, with so many experts in all layers, each on all tokens."""
    timing = model.timing()
    dense = timing.dense_ns(0, tokens, context) + (layers - 1) * timing.dense_ns(1, tokens, context)
    return dense + experts * timing.expert_ns(tokens) + layers * timing.combine_ns(tokens) + timing.head_ns(tokens)


def _scaled(model: MeasuredModel, to: int, of: int) -> MeasuredModel:
    """Scale every part of a decoded token by the same share."""
    tables: dict[str, Any] = {
        key: tuple((*row[:-1], row[-1] * to // of) if row[0] == 1 else row for row in getattr(model, key))
        for key in TABLES
    }
    return replace(model, **tables) if to != of else model


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
