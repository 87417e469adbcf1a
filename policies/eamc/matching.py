"""The running request against stored EAMs: similarities kept up to date by touching only what an event changes.

Theory. A matrix Q of the running request (the iEAM of its step, or its rEAM so far) meets C stored matrices S row by
row: `dots[l, c]` = Q_l . S_l is a whole number, to which an event of layer l adds its experts' columns of counts.
Which rows count in a match depends on the current layer alone, so three sums suffice: over the rows before it
(`past`, which grows from layer to layer within a step), the current row, and the rows after it (`future`, which the
step has not touched yet: summed once when it begins, from the last row backwards). What is summed is

    flat   Q_l . S_l; the sum is divided by the norms of Q and S over the same rows (of the whole of S for `all`)
    rows   the cosine of Q_l and S_l, 0 where either is all zero; their sum orders entries as their mean does

`inverse[l, c]` is the 1 / norm of S that a match at layer l needs, so an event costs O(k C + C), and a step O(L C)
once. Whole numbers are exact, `dots` below 2**63 and their sums below 2**53.

Ties go to the oldest entry: equal are similarities within TIE of the greatest, relatively, since so near only
rounding differs, as between an EAM and its double. Functions are loops over arrays that compiled engines can call.
"""

from typing import NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import Float, Int

TIE = 1e-12
NO_MATCH = -1

ITERATION, REQUEST = range(2)
"""Axis Q of `Bucket`: the iEAM of the current step and the rEAM so far."""

MATCHED, SIZE, LAYER, ROWS, BEFORE, AHEAD, NUMBERS = 0, 2, 3, 4, 5, 6, 7
"""Places in `Bucket.numbers`: two flags, which of the matrices are matched; entries stored; layer of the latest event;
flags: whether by rows, whether the rows up to the current one count, and those after it."""


class Bucket(NamedTuple):
    """A collection of up to C past EAMs, in places of no order, and the running request against it."""

    eams: Int  # [C, L*E] tokens of every expert in every entry
    columns: Int  # [L*E, C] the same, as a match reads them
    inverse: Float  # [L, C] 1 / norm of what a match at each layer counts, 0 for a norm of 0
    born: Int  # [C] when each was learned, ascending
    uses: Int  # [C] events at which each was among the matched
    eam: Int  # [Q, L*E] tokens
    dots: Int  # [Q, L, C]
    squares: Int  # [Q, L] squared norms of the rows
    past: Float  # [Q, C] sums over the rows before the current one
    future: Float  # [L, C] sums over the rows of the rEAM after each, as they stood when the step began
    scratch: Float  # [2, C] sums over the counted rows; similarities
    matched: Int  # [M] the nearest entries, the nearest first; NO_MATCH where fewer are stored
    numbers: Int  # [NUMBERS]


@compiled
def observe(bucket: Bucket, begins: bool, layer: int, experts: Int, counts: Int, first: int, last: int) -> bool:
    """An event of `layer` adds counts[first:last] tokens at experts[first:last]; whether other entries match now.

    `begins`: it is the first event of its step, whose iEAM begins with it.
    """
    numbers, similarity = bucket.numbers, bucket.scratch[1]
    size = numbers[SIZE]
    if begins:
        _begin_step(bucket, size)
    similarity[:size] = 0.0
    for q in range(2):
        if numbers[MATCHED + q]:
            for passed in range(numbers[LAYER], layer):
                _add_row(bucket, size, q, passed, bucket.past[q])
            _grow(bucket, size, q, layer, experts, counts, first, last)
            _compare(bucket, size, q, layer, similarity)
    request_eam = bucket.eam[REQUEST]
    for i in range(first, last):
        request_eam[experts[i]] += counts[i]
    numbers[LAYER] = layer
    return _nearest(similarity, bucket.born, size, bucket.uses, bucket.matched)


@compiled
def _begin_step(bucket: Bucket, size: int) -> None:
    """A new iEAM, all zero; nothing has passed; what the rEAM holds of every later layer stands until the step ends."""
    bucket.past[:] = 0.0
    bucket.numbers[LAYER] = 0
    if bucket.numbers[MATCHED + ITERATION]:
        bucket.eam[ITERATION] = 0
        bucket.dots[ITERATION] = 0
        bucket.squares[ITERATION] = 0
    if bucket.numbers[MATCHED + REQUEST] and bucket.numbers[AHEAD]:
        future = bucket.future
        for row in range(len(future) - 1, 0, -1):
            for c in range(size):
                future[row - 1, c] = future[row, c]
            _add_row(bucket, size, REQUEST, row, future[row - 1])


@compiled
def _grow(bucket: Bucket, size: int, q: int, layer: int, experts: Int, counts: Int, first: int, last: int) -> None:
    """The products of matrix q with every entry after an event."""
    eam, dots, columns = bucket.eam[q], bucket.dots[q, layer], bucket.columns
    for i in range(first, last):
        expert, count = experts[i], counts[i]
        bucket.squares[q, layer] += count * (2 * eam[expert] + count)
        for c in range(size):
            dots[c] += count * columns[expert, c]
        if q == ITERATION:
            eam[expert] += count


@compiled
def _inverse_root(square: int) -> float:
    return 1.0 / np.sqrt(square) if square else 0.0


@compiled
def _add_row(bucket: Bucket, size: int, q: int, row: int, sums: Float) -> None:
    """sums[c] grows by what row `row` of matrix q contributes."""
    dots = bucket.dots[q, row]
    if bucket.numbers[ROWS]:
        unit, inverse = _inverse_root(bucket.squares[q, row]), bucket.inverse[row]
        for c in range(size):
            sums[c] += dots[c] * inverse[c] * unit
    else:
        for c in range(size):
            sums[c] += dots[c]


@compiled
def _compare(bucket: Bucket, size: int, q: int, layer: int, similarity: Float) -> None:
    """similarity[c] grows by that of matrix q with entry c, but for a factor that all entries share."""
    sums, squares, square = bucket.scratch[0], bucket.squares[q], 0
    sums[:size] = 0.0
    if bucket.numbers[BEFORE]:
        past = bucket.past[q]
        for c in range(size):
            sums[c] = past[c]
        _add_row(bucket, size, q, layer, sums)
        square += squares[: layer + 1].sum()
    if bucket.numbers[AHEAD] and q == REQUEST:
        future = bucket.future[layer]
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
