"""What the ids of tokens tell: which experts the passes on a token of this id used, and the passes after it; and what
this request used when its last tokens came before.

A token's id is known when its step starts (rule 16). A step of drafted tokens (rule 20) is one pass on each of its ids;
the first one, which is decoded for certain, is the token at hand. Ids share ROWS rows of counts, by their remainder:
with a vocabulary of 200,000 most rows belong to one frequent id. Counts are bytes and are halved, all of a row at once,
before they overflow: memory is bounded, and old uses fade. Of a request the latest HISTORY decoded tokens are kept.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.core.compiled import compiled
from policies.core.policy import Float, Int, Shape

Counts = NDArray[np.uint8]

ROWS, MOST = 4096, 255

HISTORY = 1024
BUCKETS = 1024
CHAIN = 32
"""Earlier places of a token that are looked at, the latest first."""

TOGETHER = 64
"""Different ids of a step that count."""

LONGEST = 8
"""Tokens of a match that count."""

HERE, AFTER = range(2)
"""Tables: of the passes on a token, and of the passes that came next in the same request."""

NONE = -1

# Places in `Tokens.request`: of the token at hand its row, or NONE, where the latest of the longest matches with it
# ends, and how many tokens that has, 0 without one; the same of the token before; decoded tokens so far.
ROW, MATCH, MATCHED, BEFORE, LENGTH, PLACES = 0, 1, 2, 3, 6, 7

BITS = 63


class Tokens(NamedTuple):
    """Counts of the run, and the history of each request."""

    chosen: Counts  # [2, ROWS, L, E] by table: passes that used the expert
    passes: Counts  # [2, ROWS]
    request: Int  # [batch_slots, PLACES]
    ids: Int  # [batch_slots, HISTORY] by place, which is the position's remainder; -1: not known
    before: Int  # [batch_slots, HISTORY] an earlier position of the same bucket, or NONE
    latest: Int  # [batch_slots, BUCKETS] the latest position of each, by the id's remainder
    routed: Int  # [batch_slots, HISTORY, L, words] experts used there, as bits
    step: Int  # [batch_slots, 1 + TOGETHER] of the step at hand how many different rows its ids have, and these


def no_tokens(shape: Shape) -> Tokens:
    L, E, batch_slots = shape.layers, shape.experts, shape.batch_slots
    return Tokens(
        chosen=np.zeros((2, ROWS, L, E), np.uint8),
        passes=np.zeros((2, ROWS), np.uint8),
        request=np.full((batch_slots, PLACES), NONE),
        ids=np.full((batch_slots, HISTORY), NONE),
        before=np.full((batch_slots, HISTORY), NONE),
        latest=np.full((batch_slots, BUCKETS), NONE),
        routed=np.zeros((batch_slots, HISTORY, L, -(-E // BITS)), np.int64),
        step=np.zeros((batch_slots, 1 + TOGETHER), np.int64),
    )


def begin_request(tokens: Tokens, batch_slot: int) -> None:
    tokens.request[batch_slot] = NONE
    tokens.request[batch_slot, [MATCHED, BEFORE + MATCHED, LENGTH]] = 0
    tokens.latest[batch_slot] = NONE
    tokens.step[batch_slot] = 0


@compiled
def _count(tokens: Tokens, table: int, row: int) -> None:
    """One pass more; its experts follow layer by layer."""
    passes, chosen = tokens.passes[table], tokens.chosen[table, row]
    if passes[row] == MOST:
        passes[row] = MOST // 2
        for layer in range(chosen.shape[0]):
            for e in range(chosen.shape[1]):
                chosen[layer, e] = chosen[layer, e] // 2
    passes[row] += 1


@compiled
def begin_step(tokens: Tokens, batch_slot: int, taken: Int, decode: bool) -> None:
    """A step takes in tokens of these ids, drafted ones behind the first, or is a prefill that ends with the one.

    -1: an id is not known.
    """
    mine, token = tokens.request[batch_slot], taken[0] if len(taken) else NONE
    _note_rows(tokens.step[batch_slot], taken)
    for place in (ROW, MATCH, MATCHED):
        mine[BEFORE + place] = mine[place]
    mine[ROW] = token % ROWS if token >= 0 else NONE
    mine[MATCHED] = 0
    if not decode:
        return
    if mine[BEFORE + ROW] >= 0:
        _count(tokens, AFTER, mine[BEFORE + ROW])
    for place in range(tokens.step[batch_slot, 0]):
        _count(tokens, HERE, tokens.step[batch_slot, 1 + place])
    at, ids, before = mine[LENGTH], tokens.ids[batch_slot], tokens.before[batch_slot]
    mine[LENGTH] += 1
    ids[at % HISTORY] = token
    before[at % HISTORY] = NONE
    routed = tokens.routed[batch_slot, at % HISTORY]
    for layer in range(routed.shape[0]):
        for word in range(routed.shape[1]):
            routed[layer, word] = 0
    if token >= 0:
        found = tokens.latest[batch_slot, token % BUCKETS]
        before[at % HISTORY] = found
        tokens.latest[batch_slot, token % BUCKETS] = at
        _match(ids, before, at, found, mine)


@compiled
def _note_rows(step: Int, taken: Int) -> None:
    """Fill `step` with the rows of these ids, each once."""
    step[0] = 0
    for token in taken:
        row, is_new = token % ROWS, token >= 0 and step[0] < TOGETHER
        for place in range(step[0]):
            is_new = is_new and step[1 + place] != row
        if is_new:
            step[0] += 1
            step[step[0]] = row


@compiled
def _match(ids: Int, before: Int, at: int, found: int, mine: Int) -> None:
    """Find where the longest of the sequences that end at `at` came before, from position `found` on backwards."""
    for _ in range(CHAIN):
        if found < 0 or at - found >= HISTORY:
            return
        n = 0
        while (
            n < LONGEST
            and found - n >= 0
            and at - found + n < HISTORY
            and ids[(found - n) % HISTORY] >= 0
            and ids[(found - n) % HISTORY] == ids[(at - n) % HISTORY]
        ):
            n += 1
        if n > mine[MATCHED]:
            mine[MATCH], mine[MATCHED] = found, n
            if n == LONGEST:
                return
        found = before[found % HISTORY]


@compiled
def _add_one(counts: Counts, e: int) -> None:
    if counts[e] < MOST:
        counts[e] += 1


@compiled
def use(tokens: Tokens, batch_slot: int, layer: int, e: int) -> None:
    """The step at hand used expert number `e` of the layer."""
    mine, step = tokens.request[batch_slot], tokens.step[batch_slot]
    for place in range(step[0]):
        _add_one(tokens.chosen[HERE, step[1 + place], layer], e)
    if mine[BEFORE + ROW] >= 0:
        _add_one(tokens.chosen[AFTER, mine[BEFORE + ROW], layer], e)
    if mine[LENGTH] > 0:
        tokens.routed[batch_slot, (mine[LENGTH] - 1) % HISTORY, layer, e // BITS] |= 1 << (e % BITS)


@compiled
def add_used(tokens: Tokens, batch_slot: int, position: int, layer: int, value: float, out: Float) -> None:
    """Add `value` to out [E] for each expert of the layer that the request used at that position, one of the latest."""
    words = tokens.routed[batch_slot, position % HISTORY, layer]
    for word in range(len(words)):
        bits, base = words[word], word * BITS
        for i in range(min(BITS, len(out) - base)):
            out[base + i] += value if (bits >> i) & 1 else 0.0
