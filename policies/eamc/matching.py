"""Running requests against stored EAMs: similarities kept up to date by touching only what an event changes.

`dots[l, c]` = Q_l . S_l, a whole number, for each row l of the running matrix Q and each stored S. `flat` divides its
sum by the norms of Q and S over the same rows (of the whole of S for `all`); `rows` adds the cosines of the rows, 0
where either is all zero. policies/README.md (How a match is kept up to date) has the theory. Ties go to the oldest
entry: equal are similarities within TIE of the greatest, relatively, as between an EAM and its double.
"""

from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import Event, Float, Int

TIE = 1e-12
NO_MATCH = -1

ITERATION, REQUEST = range(2)
"""Axis Q of `Bucket`: the iEAM of the current step and the rEAM so far."""

MATCHED, SIZE, ROWS, BEFORE, AHEAD, NUMBERS = 0, 2, 3, 4, 5, 6
"""Places in `Bucket.numbers`: two flags, which of the matrices are matched; entries stored; flags: whether by rows,
whether the rows up to the current one count, and those after it."""


class Bucket(NamedTuple):
    """A collection of up to C past EAMs, in places of no order, and the running requests against it."""

    eams: Int  # [C, L*E] tokens of every expert in every entry
    columns: Int  # [L*E, C] the same, as a match reads them
    inverse: Float  # [L, C] 1 / norm of what a match at each layer counts, 0 for a norm of 0
    born: Int  # [C] when each was learned, ascending
    uses: Int  # [C] events at which each was among the matched
    eam: Int  # [batch_slots, Q, L*E] tokens
    dots: Int  # [batch_slots, Q, L, C]
    squares: Int  # [batch_slots, Q, L] squared norms of the rows
    past: Float  # [batch_slots, Q, C] sums over the rows before the current one
    future: Float  # [batch_slots, L, C] sums over the rows of the rEAM after each, as they stood when the step began
    scratch: Float  # [2, C] sums over the counted rows; similarities
    matched: Int  # [batch_slots, M] the nearest entries, the nearest first; NO_MATCH where fewer are stored
    layer: Int  # [batch_slots] of the latest event
    numbers: Int  # [NUMBERS]


@compiled
def observe(bucket: Bucket, begins: bool, event: Event, r: int) -> bool:
    """The event adds what its request number r chose; whether other entries match that request now.

    `begins`: it is the first event of its step, whose iEAM begins with it.
    """
    numbers, similarity = bucket.numbers, bucket.scratch[1]
    batch_slot, layer, size = event.batch_slots[r], event.layer, numbers[SIZE]
    if begins:
        _begin_step(bucket, size, batch_slot)
    similarity[:size] = 0.0
    for q in range(2):
        if numbers[MATCHED + q]:
            for passed in range(bucket.layer[batch_slot], layer):
                _add_row(bucket, size, batch_slot, q, passed, bucket.past[batch_slot, q])
            _grow(bucket, size, q, event, r)
            _compare(bucket, size, batch_slot, q, layer, similarity)
    request_eam = bucket.eam[batch_slot, REQUEST]
    for i in range(event.offsets[r], event.offsets[r + 1]):
        request_eam[event.own_experts[i]] += event.own_counts[i]
    bucket.layer[batch_slot] = layer
    return _nearest(similarity, bucket.born, size, bucket.uses, bucket.matched[batch_slot])


@compiled
def _begin_step(bucket: Bucket, size: int, batch_slot: int) -> None:
    """A new iEAM, all zero; nothing has passed; what the rEAM holds of every later layer stands until the step ends."""
    bucket.past[batch_slot] = 0.0
    bucket.layer[batch_slot] = 0
    if bucket.numbers[MATCHED + ITERATION]:
        bucket.eam[batch_slot, ITERATION] = 0
        bucket.dots[batch_slot, ITERATION] = 0
        bucket.squares[batch_slot, ITERATION] = 0
    if bucket.numbers[MATCHED + REQUEST] and bucket.numbers[AHEAD]:
        future = bucket.future[batch_slot]
        for row in range(len(future) - 1, 0, -1):
            for c in range(size):
                future[row - 1, c] = future[row, c]
            _add_row(bucket, size, batch_slot, REQUEST, row, future[row - 1])


@compiled
def _grow(bucket: Bucket, size: int, q: int, event: Event, r: int) -> None:
    """The products of matrix q with every entry after an event."""
    batch_slot, layer, columns = event.batch_slots[r], event.layer, bucket.columns
    eam, dots, squares = bucket.eam[batch_slot, q], bucket.dots[batch_slot, q, layer], bucket.squares[batch_slot, q]
    for i in range(event.offsets[r], event.offsets[r + 1]):
        expert, count = event.own_experts[i], event.own_counts[i]
        squares[layer] += count * (2 * eam[expert] + count)
        column = columns[expert]
        if count == 1:  # a decoded token's: added in vectors, as products are not
            for c in range(size):
                dots[c] += column[c]
        else:
            for c in range(size):
                dots[c] += count * column[c]
        if q == ITERATION:
            eam[expert] += count


@compiled
def _inverse_root(square: int) -> float:
    return 1.0 / np.sqrt(square) if square else 0.0


@compiled
def _add_row(bucket: Bucket, size: int, batch_slot: int, q: int, row: int, sums: Float) -> None:
    """sums[c] grows by what row `row` of matrix q contributes."""
    dots = bucket.dots[batch_slot, q, row]
    if bucket.numbers[ROWS]:
        unit, inverse = _inverse_root(bucket.squares[batch_slot, q, row]), bucket.inverse[row]
        for c in range(size):
            sums[c] += dots[c] * inverse[c] * unit
    else:
        for c in range(size):
            sums[c] += dots[c]


@compiled
def _compare(bucket: Bucket, size: int, batch_slot: int, q: int, layer: int, similarity: Float) -> None:
    """similarity[c] grows by that of matrix q with entry c, but for a factor that all entries share."""
    sums, squares, square = bucket.scratch[0], bucket.squares[batch_slot, q], 0
    sums[:size] = 0.0
    if bucket.numbers[BEFORE]:
        past = bucket.past[batch_slot, q]
        for c in range(size):
            sums[c] = past[c]
        _add_row(bucket, size, batch_slot, q, layer, sums)
        square += squares[: layer + 1].sum()
    if bucket.numbers[AHEAD] and q == REQUEST:
        future = bucket.future[batch_slot, layer]
        for c in range(size):
            sums[c] += future[c]
        square += squares[layer + 1 :].sum()
    if bucket.numbers[ROWS]:
        for c in range(size):
            similarity[c] += sums[c]
    else:
        unit, inverse = _inverse_root(square), bucket.inverse[layer]
        for c in range(size):
            similarity[c] += sums[c] * inverse[c] * unit


@compiled
def _nearest(similarity: Float, born: Int, size: int, uses: Int, matched: Int) -> bool:
    """Fill `matched`, count its uses, and say whether it has changed; spends `similarity`, all at least 0."""
    changed = False
    for place in range(len(matched)):
        best = NO_MATCH
        if place < size:
            greatest = 0.0
            for c in range(size):
                greatest = max(greatest, similarity[c])
            least = greatest * (1 - TIE)
            for c in range(size):
                if similarity[c] >= least and (best == NO_MATCH or born[c] < born[best]):
                    best = c
            similarity[best] = -1.0
            uses[best] += 1
        changed |= matched[place] != best
        matched[place] = best
    return changed
