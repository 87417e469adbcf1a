"""What `eamc-blend` knows: evidence on when an expert will be used again, gathered as the run goes, and nothing else.

Each kind of evidence but one is a lift, how much more often than evenly an expert is used; logarithms are kept:

    FAST, SLOW  moving averages of its use over the passes of its layer, at two rates
    REQUEST     its share of the request's tokens so far (the row of the rEAM), popularity blended in as the prior
    FOLLOWERS   how often it followed, one token later in its layer, the experts used now
    SINCE       passes of its layer since its last use, and one
    AHEAD       how often it followed, in the same pass, the experts that the layer before has just used

A pass is one token through a layer. A prefill counts as its tokens' average, over as many passes: its accesses over the
experts of a decoded token or, before any was seen, the most tokens of one expert (untimed, where experts are told one
by one, of the first). Neither a prefill nor another request teaches what follows what. Evidence is as of the end of the
layer's last pass, AHEAD alone knows more. All functions are compiled, over plain arrays; an event costs O(E * k).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.compiled import compiled
from policies.core.policy import Float, Int, Shape

# Rows of Evidence.rows: the evidence, as logarithms,
FAST, SLOW, REQUEST, FOLLOWERS, SINCE = range(5)
KINDS = 5
AHEAD = 5  # has no row: it is weighed when it is asked for
# and what it is made from: moving averages of use (two rows), tokens of the run, the layer's pass in which the expert
# was used last; and by layer the passes so far
AVERAGES, RUN_TOKENS, LAST, PASSES = 5, 7, 8, 9
ROWS = 10

# Settings: rates of the moving averages of use, per pass (two), and of what follows, per use, in the layer and in the
# next; the weight of popularity in a request's frequencies, in tokens; what is added to lifts before the logarithm.
# Functions take them as the beginning of one array `p` of parameters.
FOLLOW_RATE, AHEAD_RATE, PRIOR_TOKENS, EPS = 2, 3, 4, 5
SETTINGS = (0.03, 0.003, 0.02, 0.05, 4.0, 0.2)

Chances = NDArray[np.float32]


class Evidence(NamedTuple):
    """What is known, all zero at first. E experts in each of L layers, numbered within their layer in `used`."""

    rows: Float  # [ROWS, L*E]
    after: Chances  # [2, L, E, E] of one expert, how often another came: in the layer's next pass; in the next layer
    tokens: Float  # [seats, L*E] of each request so far
    used: Int  # [seats, 2, L, E + 1] by request in the layer's pass before and in this one; last, how many


def nothing_known(shape: Shape) -> Evidence:
    """The start of a run."""
    L, E, seats = shape.layers, shape.experts, shape.seats
    after, used = np.zeros((2, L, E, E), np.float32), np.zeros((seats, 2, L, E + 1), np.int64)
    return Evidence(np.zeros((ROWS, L * E)), after, np.zeros((seats, L * E)), used)


def begin_request(known: Evidence, seat: int) -> None:
    """Reset the request's own counts."""
    known.tokens[seat] = 0
    known.used[seat] = 0


@compiled
def _fade(row: Chances, rate: float) -> None:
    kept = np.float32(1.0 - rate)
    for e in range(len(row)):
        row[e] *= kept


@compiled
def open_pass(known: Evidence, p: Float, seat: int, layer: int, passes: float, learns: bool) -> None:
    """A pass of `layer` begins, or `passes` of them: averages decay, and what was used is now what was used before."""
    E = known.after.shape[3]
    known.rows[PASSES, layer] += passes
    for r in range(2):
        kept = (1.0 - p[r]) ** passes
        for expert in range(layer * E, (layer + 1) * E):
            known.rows[AVERAGES + r, expert] *= kept
    before, now = known.used[seat, 0, layer], known.used[seat, 1, layer]
    for i in range(now[E]):
        before[i] = now[i]
        if learns:
            _fade(known.after[0, layer, now[i]], p[FOLLOW_RATE])
    before[E] = now[E] if learns else 0
    now[E] = 0


@compiled
def use(known: Evidence, p: Float, seat: int, layer: int, e: int, share: float, passes: float, decode: bool) -> None:
    """Expert number `e` of the layer was used by the share `share` of the tokens of the pass that is open."""
    E = known.after.shape[3]
    expert = layer * E + e
    for r in range(2):
        known.rows[AVERAGES + r, expert] += (1.0 - (1.0 - p[r]) ** passes) * share
    known.tokens[seat, expert] += share * passes
    known.rows[RUN_TOKENS, expert] += share * passes
    known.rows[LAST, expert] = known.rows[PASSES, layer]
    before, now = known.used[seat, 0, layer], known.used[seat, 1, layer]
    for i in range(before[E]):
        known.after[0, layer, before[i], e] += np.float32(p[FOLLOW_RATE])
    if decode:
        now[now[E]] = e
        now[E] += 1


@compiled
def learn_ahead(known: Evidence, p: Float, seat: int, layer: int) -> None:
    """Of a decoded token: what `layer` used has followed what the layer before it used."""
    E = known.after.shape[3]
    before, now = known.used[seat, 1, layer - 1], known.used[seat, 1, layer]
    for i in range(before[E]):
        row = known.after[1, layer - 1, before[i]]
        _fade(row, p[AHEAD_RATE])
        for j in range(now[E]):
            row[now[j]] += np.float32(p[AHEAD_RATE])


@compiled
def _log_lifts(seen: Float, eps: float) -> None:
    """In place: the logarithms of the lifts of `seen`, which are 1 where nothing was seen at all."""
    total = 0.0
    for e in range(len(seen)):
        total += seen[e]
    for e in range(len(seen)):
        seen[e] = np.log((seen[e] * len(seen) / total if total > 0 else 1.0) + eps)


@compiled
def _sum_after(after: Chances, used: Int, out: Float) -> None:
    """out[e]: how often e came after the experts in `used`, summed over these."""
    out[:] = 0.0
    for i in range(used[len(used) - 1]):
        row = after[used[i]]
        for e in range(len(out)):
            out[e] += row[e]


@compiled
def weigh(known: Evidence, p: Float, seat: int, layer: int) -> None:
    """Bring the layer's evidence up to date with the pass that is open, for the request in `seat`."""
    E = known.after.shape[3]
    first = layer * E
    rows, used = known.rows[:, first : first + E], known.used[seat, 1, layer]
    run = 0.0
    for e in range(E):
        rows[FAST, e] = rows[AVERAGES, e]
        rows[SLOW, e] = rows[AVERAGES + 1, e]
        rows[SINCE, e] = np.log(1.0 + known.rows[PASSES, layer] - rows[LAST, e])
        run += rows[RUN_TOKENS, e]
    prior = p[PRIOR_TOKENS] * max(used[E], 1)
    for e in range(E):
        popular = (rows[RUN_TOKENS, e] + 0.01) / (run + 0.01 * E)
        rows[REQUEST, e] = known.tokens[seat, first + e] + prior * popular
    _sum_after(known.after[0, layer], used, rows[FOLLOWERS])
    for kind in (FAST, SLOW, REQUEST, FOLLOWERS):
        _log_lifts(rows[kind], p[EPS])


@compiled
def weigh_ahead(known: Evidence, p: Float, seat: int, layer: int, out: Float) -> None:
    """Fill `out` [E] with the evidence AHEAD on the layer after `layer`, which has just routed."""
    _sum_after(known.after[1, layer], known.used[seat, 1, layer], out)
    _log_lifts(out, p[EPS])


@compiled
def learn(
    known: Evidence,
    p: Float,
    seat: int,
    layer: int,
    experts: Int,
    counts: Int,
    decode: bool,
    opens: bool,
    top_k: int,
) -> None:
    """The request in `seat` chose `experts` of `layer`, each for `counts` tokens; a pass begins if `opens`."""
    E = known.after.shape[3]
    total = most = 0
    for i in range(len(experts)):
        total += counts[i]
        most = max(most, counts[i])
    passes = 1.0 if decode else max(1.0, most, total / top_k if top_k else 0.0)
    if opens:
        open_pass(known, p, seat, layer, passes, decode)
    for i in range(len(experts)):
        share = 1.0 if decode else min(1.0, counts[i] / passes)
        use(known, p, seat, layer, experts[i] - layer * E, share, passes, decode)
    weigh(known, p, seat, layer)
