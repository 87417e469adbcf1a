"""What `eamc-blend` knows: evidence on when an expert will be used again, gathered as the run goes, and nothing else.

Each kind of evidence but SINCE and NEVER is a lift, how much more often than evenly an expert is used:

    FAST, SLOW, RECENT  moving averages of its use over the passes of its layer, at three rates
    REQUEST             its share of the request's tokens so far (the row of the rEAM), popularity as the prior
    FOLLOWERS           how often it followed, one token later in its layer, the experts used now
    SINCE               passes of its layer since its last use, and one
    NEVER               1 where it was not used yet
    AFTER               four: how often it was used 1, 2, 3 to 4, and 5 to 8 passes after the neighbours
    HERE                of a layer that has not routed yet: how often the neighbours used it there

Neighbours are those of `policies.blend.neighbours`. Of each but NEVER the logarithm is kept, nearly (`near_log`).

A prefill counts as its tokens' average, over as many passes: its accesses over the experts of a decoded token or,
before any was seen, the most tokens of one expert. It is no pass's neighbour, and nothing follows it. Evidence is as of
the end of the layer's last pass. An event costs O(E k) beside the neighbours.
"""

from typing import NamedTuple

import numpy as np

from policies.blend import neighbours
from policies.blend.neighbours import BACK, LATEST, NONE, SPANS, Neighbours
from policies.blend.series import near_log
from policies.core.compiled import compiled
from policies.core.policy import Float, Int, Shape, Single

# Rows of Evidence.rows: the evidence, with a place for the constant,
FAST, SLOW, RECENT, REQUEST, FOLLOWERS, SINCE, NEVER, AFTER = range(8)
HERE = AFTER + len(SPANS) - 1
CONSTANT = HERE + 1
KINDS = CONSTANT + 1
# and what it is made from: moving averages of use, tokens of the run, popularity as a lift, the pass of the last use
AVERAGES, RUN, POPULAR, LAST, ROWS = KINDS, KINDS + 3, KINDS + 4, KINDS + 5, KINDS + 6

PASSES, TOTALS = 0, 1
"""Rows of `Evidence.layers`: passes so far, and the sums of the moving averages and of the tokens of the run."""

RATES = (0.02, 0.002, 0.1)
"""Of the moving averages, per pass."""

FOLLOW_RATE = np.float32(0.02)
PRIOR_TOKENS = 4.0
"""The weight of popularity in a request's frequencies."""

EPS = np.float32(0.05)
ZERO, ONE = np.float32(0.0), np.float32(1.0)


class Evidence(NamedTuple):
    """What is known, all zero at first, but the constant."""

    rows: Single  # [L, ROWS, E]
    layers: Float  # [PASSES to TOTALS + 3, L]
    followers: Single  # [L, E, E + 1] of one expert, how often another came in the next pass; last, their sum
    request: Single  # [batch_slots, L, E + 1] tokens of each request so far; last, their sum
    sums: Single  # [E + 1] scratch
    passes: Neighbours


def nothing_known(shape: Shape) -> Evidence:
    L, E = shape.layers, shape.experts
    rows = np.zeros((L, ROWS, E), np.float32)
    rows[:, CONSTANT] = 1.0
    return Evidence(
        rows=rows,
        layers=np.zeros((TOTALS + 4, L)),
        followers=np.zeros((L, E, E + 1), np.float32),
        request=np.zeros((shape.batch_slots, L, E + 1), np.float32),
        sums=np.zeros(E + 1, np.float32),
        passes=neighbours.no_passes(shape),
    )


def begin_request(known: Evidence, batch_slot: int) -> None:
    known.request[batch_slot] = 0
    neighbours.begin_request(known.passes, batch_slot)


@compiled
def learn(known: Evidence, batch_slot: int, layer: int, experts: Int, counts: Int, decode: bool, top_k: int) -> None:
    """The request in `batch_slot` chose `experts` of `layer`, each for `counts` tokens."""
    total = most = 0
    for i in range(len(experts)):
        total += counts[i]
        most = max(most, counts[i])
    passes = 1.0 if decode else max(1.0, most, total / top_k if top_k else 0.0)
    _count(known, batch_slot, layer, experts, counts, passes, decode)
    if decode:
        _follow(known, batch_slot, layer, experts)
        neighbours.route(known.passes, batch_slot, layer, experts)


@compiled
def _count(
    known: Evidence, batch_slot: int, layer: int, experts: Int, counts: Int, passes: float, decode: bool
) -> None:
    """Use of these experts, in the moving averages and the frequencies."""
    rows, totals, request = known.rows[layer], known.layers[TOTALS:, layer], known.request[batch_slot, layer]
    E = rows.shape[1]
    known.layers[PASSES, layer] += passes
    for r in range(len(RATES)):
        kept, average = (1.0 - RATES[r]) ** passes, rows[AVERAGES + r]
        left = np.float32(kept)
        for e in range(E):
            average[e] *= left
        totals[r] *= kept
    for i in range(len(experts)):
        e, share = experts[i] % E, 1.0 if decode else min(1.0, counts[i] / passes)
        for r in range(len(RATES)):
            gain = (1.0 - (1.0 - RATES[r]) ** passes) * share
            rows[AVERAGES + r, e] += np.float32(gain)
            totals[r] += gain
        rows[RUN, e] += np.float32(share * passes)
        totals[len(RATES)] += share * passes
        request[e] += np.float32(share * passes)
        request[E] += np.float32(share * passes)
        rows[LAST, e] = np.float32(known.layers[PASSES, layer])


@compiled
def _follow(known: Evidence, batch_slot: int, layer: int, experts: Int) -> None:
    """These experts follow those of the request's pass before."""
    passes, E = known.passes, known.rows.shape[2]
    before = passes.links[BACK, passes.request[batch_slot, LATEST]]
    if before == NONE:
        return
    used = passes.used[layer, before]
    for i in range(1, used[0] + 1):
        row = known.followers[layer, used[i]]
        for e in range(E + 1):
            row[e] *= ONE - FOLLOW_RATE
        for expert in experts:
            row[expert % E] += FOLLOW_RATE
            row[E] += FOLLOW_RATE


@compiled
def weigh(known: Evidence, batch_slot: int, layer: int, experts: Int, decode: bool, top_k: int) -> None:
    """Bring the layer's evidence up to date with its latest pass, which used `experts`, for the request."""
    rows, totals, request, sums = (
        known.rows[layer],
        known.layers[TOTALS:, layer],
        known.request[batch_slot, layer],
        known.sums,
    )
    E, passes = rows.shape[1], np.float32(known.layers[PASSES, layer])
    popular, run, last, since, never = rows[POPULAR], rows[RUN], rows[LAST], rows[SINCE], rows[NEVER]
    even = np.float32(E / (totals[len(RATES)] + 0.01 * E))
    for e in range(E):
        popular[e] = (run[e] + np.float32(0.01)) * even
    for e in range(E):
        since[e] = passes - last[e]
    for e in range(E):
        never[e] = ONE if last[e] == ZERO else ZERO
    near_log(since, ONE, ONE)
    for r in range(len(RATES)):
        lifts, average = rows[FAST + r], rows[AVERAGES + r]
        for e in range(E):
            lifts[e] = average[e]
        _lift(lifts, totals[r])
    prior = PRIOR_TOKENS * max(len(experts) if decode else top_k, 1)
    lifts, weight = rows[REQUEST], np.float32(prior / E)
    for e in range(E):
        lifts[e] = request[e] + weight * popular[e]
    _lift(lifts, request[E] + prior)
    lifts = rows[FOLLOWERS]
    for e in range(E + 1):
        sums[e] = ZERO
    for i in range(len(experts) if decode else 0):
        row = known.followers[layer, experts[i] % E]
        for e in range(E + 1):
            sums[e] += row[e]
    for e in range(E):
        lifts[e] = sums[e]
    _lift(lifts, sums[E])
    if decode:
        neighbours.after(known.passes, batch_slot, layer, E / max(top_k, 1), popular, rows[AFTER:HERE])
    else:
        for span in range(AFTER, HERE):
            for e in range(E):
                rows[span, e] = popular[e]
            near_log(rows[span], ONE, EPS)


@compiled
def _lift(seen: Single, total: float) -> None:
    """In place: nearly the logarithms of the lifts of `seen`, which are 1 where nothing was seen at all."""
    if total > 0.0:
        near_log(seen, np.float32(len(seen) / total), EPS)
    else:
        near_log(seen, ZERO, ONE + EPS)


@compiled
def foresee(known: Evidence, batch_slot: int, layer: int, top_k: int) -> None:
    """Fill HERE of a layer that the request's pass has not reached."""
    rows = known.rows[layer]
    lift = rows.shape[1] / max(top_k, 1)
    neighbours.here(known.passes, batch_slot, layer, lift, rows[POPULAR], rows[HERE])
