"""What `eamc-blend` knows: evidence on when an expert will be used again, gathered as the run goes, and nothing else.

Each kind of evidence but SINCE is a lift, how much more often than evenly an expert is used. Of the layer's next pass:

    FAST, SLOW  moving averages of its use over the passes of its layer, at two rates
    REQUEST     its share of the request's tokens so far (the row of the rEAM), popularity blended in as the prior
    FOLLOWERS   how often it followed, one token later in its layer, the experts used now
    SECOND      how often it followed, two tokens later, the experts used by the token before
    SINCE       passes of its layer since its last use, and one
    NEXT        how often it was used in passes after a token of the id at hand, popularity blended in
    AGAIN       whether it was used after the request's last tokens when these came before, the more the longer they are

And of a pass that has begun, in a layer that has not routed:

    AHEAD       how often it followed, in the same pass, the experts that the layer before has just used
    HERE        how often it was used in passes on a token of this id
    AGAIN_HERE  whether it was used when the last tokens came before

Of each the logarithm is kept, nearly (`near_log`).

A pass is one token through a layer. A prefill counts as its tokens' average, over as many passes: its accesses over the
experts of a decoded token or, before any was seen, the most tokens of one expert (untimed, where experts are reported
one by one, of the first). Neither a prefill nor another request teaches what follows what. Evidence is as of the end
of the layer's last pass; the last three know more. All functions are compiled, over plain arrays; an event costs
O(E * k).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.blend import tokens
from policies.blend.tokens import BEFORE, LENGTH, MATCH, MATCHED, ROW, Tokens, no_tokens
from policies.core.compiled import compiled
from policies.core.policy import Float, Int, Shape

# Rows of Evidence.rows: the evidence,
FAST, SLOW, REQUEST, FOLLOWERS, SECOND, SINCE, NEXT, AGAIN = range(8)
KINDS = 8
BLIND = 6  # of these without ids of tokens
AHEAD, HERE, AGAIN_HERE = range(KINDS, KINDS + 3)  # have no rows: they are weighed when they are asked for
# and what it is made from: moving averages of use (two rows), tokens of the run, the layer's pass in which the expert
# was used last, its popularity as a lift; and by layer the passes so far
AVERAGES, RUN_TOKENS, LAST, POPULAR, PASSES, ROWS = 8, 10, 11, 12, 13, 14

# Settings: rates of the moving averages of use, per pass (two), and of what follows, per use, in the layer and in the
# next; the weight of popularity in a request's frequencies, in tokens; what is added to lifts before the logarithm;
# the same two of what ids tell.
# Functions take them as the beginning of one array `p` of parameters.
FOLLOW_RATE, AHEAD_RATE, PRIOR_TOKENS, EPS, PRIOR_PASSES, EPS_IDS = 2, 3, 4, 5, 6, 7
SETTINGS = (0.02, 0.002, 0.02, 0.05, 4.0, 0.02, 4.0, 0.02)

AGAIN_PASSES = (0.0, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0, 8.0, 12.0)
"""Passes that a match counts for, by its length, beside one of popularity."""

PASS, LAYER, TWO = range(3)
"""Of Evidence.after: in the layer's next pass; in the next layer; in the pass after the next."""

Chances = NDArray[np.float32]


class Evidence(NamedTuple):
    """What is known, all zero at first. E experts in each of L layers, numbered within their layer in `used`."""

    rows: Float  # [ROWS, L*E]
    after: Chances  # [3, L, E, E] of one expert, how often another came
    tokens: Float  # [batch_slots, L*E] of each request so far
    used: Int  # [batch_slots, 3, L, E + 1] two passes of the layer before, one, and in this one; last, how many
    latest: Int  # [batch_slots, L] by request how many tokens it had decoded by the layer's latest pass
    ids: Tokens


def nothing_known(shape: Shape) -> Evidence:
    L, E, batch_slots = shape.layers, shape.experts, shape.batch_slots
    after, used = np.zeros((3, L, E, E), np.float32), np.zeros((batch_slots, 3, L, E + 1), np.int64)
    latest = np.zeros((batch_slots, L), np.int64)
    return Evidence(np.zeros((ROWS, L * E)), after, np.zeros((batch_slots, L * E)), used, latest, no_tokens(shape))


def begin_request(known: Evidence, batch_slot: int) -> None:
    known.tokens[batch_slot] = 0
    known.used[batch_slot] = 0
    known.latest[batch_slot] = 0
    tokens.begin_request(known.ids, batch_slot)


@compiled
def _fade(row: Chances, rate: float) -> None:
    kept = np.float32(1.0 - rate)
    for e in range(len(row)):
        row[e] *= kept


@compiled
def open_pass(
    known: Evidence, p: Float, batch_slot: int, layer: int, passes: float, left: tuple[float, float], learns: bool
) -> None:
    """A pass of `layer` begins, or `passes` of them, and what was used is now what was used before.

    left: what is left of each of the averages.
    """
    E = known.after.shape[3]
    known.rows[PASSES, layer] += passes
    for r in range(2):
        kept, average = left[r], known.rows[AVERAGES + r, layer * E : (layer + 1) * E]
        for e in range(E):
            average[e] *= kept
    second, before, now = (
        known.used[batch_slot, 0, layer],
        known.used[batch_slot, 1, layer],
        known.used[batch_slot, 2, layer],
    )
    for i in range(before[E]):
        second[i] = before[i]
        if learns:
            _fade(known.after[TWO, layer, before[i]], p[FOLLOW_RATE])
    second[E] = before[E] if learns else 0
    for i in range(now[E]):
        before[i] = now[i]
        if learns:
            _fade(known.after[PASS, layer, now[i]], p[FOLLOW_RATE])
    before[E] = now[E] if learns else 0
    now[E] = 0
    if learns:
        known.latest[batch_slot, layer] = known.ids.request[batch_slot, LENGTH]


@compiled
def use(
    known: Evidence,
    p: Float,
    batch_slot: int,
    layer: int,
    e: int,
    share: float,
    passes: float,
    left: tuple[float, float],
    decode: bool,
) -> None:
    """Expert number `e` of the layer was used by the share `share` of the tokens of the pass that is open."""
    E = known.after.shape[3]
    expert = layer * E + e
    for r in range(2):
        known.rows[AVERAGES + r, expert] += (1.0 - left[r]) * share
    known.tokens[batch_slot, expert] += share * passes
    known.rows[RUN_TOKENS, expert] += share * passes
    known.rows[LAST, expert] = known.rows[PASSES, layer]
    second, before, now = (
        known.used[batch_slot, 0, layer],
        known.used[batch_slot, 1, layer],
        known.used[batch_slot, 2, layer],
    )
    for i in range(second[E]):
        known.after[TWO, layer, second[i], e] += np.float32(p[FOLLOW_RATE])
    for i in range(before[E]):
        known.after[PASS, layer, before[i], e] += np.float32(p[FOLLOW_RATE])
    if decode:
        tokens.use(known.ids, batch_slot, layer, e)
        now[now[E]] = e
        now[E] += 1


@compiled
def learn_ahead(known: Evidence, p: Float, batch_slot: int, layer: int) -> None:
    """Of a decoded token: what `layer` used has followed what the layer before it used, if it ran both."""
    E, token = known.after.shape[3], known.ids.request[batch_slot, LENGTH]
    if known.latest[batch_slot, layer - 1] != token or known.latest[batch_slot, layer] != token:
        return
    before, now = known.used[batch_slot, 2, layer - 1], known.used[batch_slot, 2, layer]
    for i in range(before[E]):
        row = known.after[LAYER, layer - 1, before[i]]
        _fade(row, p[AHEAD_RATE])
        for j in range(now[E]):
            row[now[j]] += np.float32(p[AHEAD_RATE])


@compiled
def near_log(x: Float, factor: float, eps: float) -> None:
    """In place: the logarithm of factor x + eps, to a hundredth from 0.02 to 50 and less beyond.

    It is the begin of the series of 4 artanh z at z = (root - 1) / (root + 1): plain arithmetic, which is done for
    several numbers at once, as logarithms are not.
    """
    for e in range(len(x)):
        root = np.sqrt(x[e] * factor + eps)
        z = np.true_divide(root - 1.0, root + 1.0)  # "/" would look for zero, one number at a time
        s = z * z
        x[e] = 4.0 * z * (1.0 + s * (1.0 / 3.0 + s * (0.2 + s * (1.0 / 7.0 + s * (1.0 / 9.0 + s * (1.0 / 11.0))))))


@compiled
def near_chance(odds: float) -> float:
    """1 / (1 + exp(-odds)), nearly, for the same reason: with (1 - odds / 256)^256, and 1 from 256 upwards."""
    y = max(0.0, 1.0 - odds * (1.0 / 256.0))
    y *= y
    y *= y
    y *= y
    y *= y
    y *= y
    y *= y
    y *= y
    y *= y
    return float(np.true_divide(1.0, 1.0 + y))


@compiled
def _lifts(seen: Float, eps: float) -> None:
    """In place: nearly the logarithms of the lifts of `seen`, which are 1 where nothing was seen at all."""
    total = 0.0
    for e in range(len(seen)):
        total += seen[e]
    if total > 0.0:
        near_log(seen, len(seen) / total, eps)
    else:
        near_log(seen, 0.0, 1.0 + eps)


@compiled
def _sum_after(after: Chances, used: Int, n: int, popular: Float, out: Float) -> None:
    """out[e]: how often e came after the first n experts in `used`, summed over these; after none, what is popular."""
    if n == 0:
        for e in range(len(out)):
            out[e] = popular[e]
        return
    out[:] = 0.0
    for i in range(n):
        row = after[used[i]]
        for e in range(len(out)):
            out[e] += row[e]


@compiled
def _of_ids(
    known: Evidence,
    p: Float,
    batch_slot: int,
    layer: int,
    top_k: int,
    table: int,
    before: int,
    unseen: int,
    out: Float,
    again: Float,
) -> None:
    """Fill both [E] with what a token's id tells of the pass on it, or of the one after it, by `table`.

    A pass on several drafted tokens gets the mean of what each id says.

    before: 0 for the token itself, BEFORE for the one before it. unseen: passes that are counted and have not routed.
    """
    E, ids, mine = known.after.shape[3], known.ids, known.ids.request[batch_slot]
    several, k = ids.step[batch_slot, 0] if table == tokens.HERE else 1, max(top_k, 1)
    popular, share = known.rows[POPULAR, layer * E : (layer + 1) * E], 1.0 / max(1, several)
    for e in range(E):
        out[e] = 0.0
    for place in range(max(1, several)):
        row = ids.step[batch_slot, 1 + place] if table == tokens.HERE and several else mine[before + ROW]
        passes = max(0, ids.passes[table, row] - unseen) if row >= 0 else 0
        whole = passes + p[PRIOR_PASSES]
        prior, each = share * (p[PRIOR_PASSES] / whole), share * (E / k / whole)
        for e in range(E):
            out[e] += prior * popular[e]
        if passes:
            chosen = ids.chosen[table, row, layer]
            for e in range(E):
                out[e] += each * chosen[e]
    counted, followed = AGAIN_PASSES[mine[before + MATCHED]], mine[before + MATCH] + (table == tokens.AFTER)
    alone = 1.0 / (counted + 1.0)
    for e in range(E):
        again[e] = popular[e] * alone
    if counted:
        tokens.add_used(ids, batch_slot, followed, layer, counted * E / k / (counted + 1.0), again)
    near_log(out, 1.0, p[EPS_IDS])
    near_log(again, 1.0, p[EPS_IDS])


@compiled
def weigh(known: Evidence, p: Float, batch_slot: int, layer: int, top_k: int, behind: bool) -> None:
    """Bring the layer's evidence up to date with its latest pass, for the request in `batch_slot`.

    behind: a step has begun since, and so the token of that pass is the one before.
    """
    E = known.after.shape[3]
    first, last, rows = layer * E, (layer + 1) * E, known.rows
    fast, slow, since = rows[FAST, first:last], rows[SLOW, first:last], rows[SINCE, first:last]
    request, popular, seen = rows[REQUEST, first:last], rows[POPULAR, first:last], rows[RUN_TOKENS, first:last]
    followers, second = rows[FOLLOWERS, first:last], rows[SECOND, first:last]
    average, slower, latest = rows[AVERAGES, first:last], rows[AVERAGES + 1, first:last], rows[LAST, first:last]
    before, used, own = (
        known.used[batch_slot, 1, layer],
        known.used[batch_slot, 2, layer],
        known.tokens[batch_slot, first:last],
    )
    passes, run = rows[PASSES, layer], 0.0
    for e in range(E):
        run += seen[e]
    prior, even = p[PRIOR_TOKENS] * max(used[E], 1) / E, E / (run + 0.01 * E)
    for e in range(E):  # few arrays a loop: then several numbers are worked on at once
        fast[e], slow[e] = average[e], slower[e]
    for e in range(E):
        since[e] = passes - latest[e]
    for e in range(E):
        popular[e] = (seen[e] + 0.01) * even
    for e in range(E):
        request[e] = own[e] + prior * popular[e]
    _sum_after(known.after[PASS, layer], used, used[E], popular, followers)
    _sum_after(known.after[TWO, layer], before, before[E], popular, second)
    for lifts in (fast, slow, request, followers, second):
        _lifts(lifts, p[EPS])
    near_log(since, 1.0, 1.0)
    token, unseen = (BEFORE, 1) if behind else (0, 0)
    of_next, again = rows[NEXT, first:last], rows[AGAIN, first:last]
    _of_ids(known, p, batch_slot, layer, top_k, tokens.AFTER, token, unseen, of_next, again)


@compiled
def weigh_ahead(known: Evidence, p: Float, batch_slot: int, layer: int, out: Float) -> None:
    """Fill `out` [E] with the evidence AHEAD on the layer after `layer`, which the token at hand has run or skipped."""
    E, used = len(out), known.used[batch_slot, 2, layer]
    popular = known.rows[POPULAR, (layer + 1) * E : (layer + 2) * E]
    n = used[E] if known.latest[batch_slot, layer] == known.ids.request[batch_slot, LENGTH] else 0
    _sum_after(known.after[LAYER, layer], used, n, popular, out)
    _lifts(out, p[EPS])


@compiled
def weigh_here(known: Evidence, p: Float, batch_slot: int, layer: int, top_k: int, here: Float, again: Float) -> None:
    """Fill both [E] with the evidence HERE and AGAIN_HERE on `layer`, which has not routed in the step at hand."""
    _of_ids(known, p, batch_slot, layer, top_k, tokens.HERE, 0, 1, here, again)


@compiled
def learn(
    known: Evidence,
    p: Float,
    batch_slot: int,
    layer: int,
    experts: Int,
    counts: Int,
    decode: bool,
    top_k: int,
) -> None:
    """The request in `batch_slot` chose `experts` of `layer`, each for `counts` tokens.

    Who asks for evidence then has it weighed first.
    """
    E = known.after.shape[3]
    total = most = 0
    for i in range(len(experts)):
        total += counts[i]
        most = max(most, counts[i])
    passes = 1.0 if decode else max(1.0, most, total / top_k if top_k else 0.0)
    left = (1.0 - p[0]) ** passes, (1.0 - p[1]) ** passes
    open_pass(known, p, batch_slot, layer, passes, left, decode)
    for i in range(len(experts)):
        share = 1.0 if decode else min(1.0, counts[i] / passes)
        use(known, p, batch_slot, layer, experts[i] - layer * E, share, passes, left, decode)
