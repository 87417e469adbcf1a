"""The passes of the recent past whose routing is most like that of the pass at hand, and what was used after them.

A pass is one decoded token, or several drafted ones, of one request through all layers. The latest PASSES are kept, of
all requests together. A pass is alike by the share of this one's experts that it used too: WINDOW layers up to the
present one count NOW, and all layers of the passes before both count the rest. The NEAREST most alike are asked, each
with the weight exp(SHARPNESS x likeness): what their requests used SPANS passes later, in the same layer, and what they
used themselves in layers that the pass at hand has not reached.

`uses` holds the same as `used` by expert, so that the overlap of one layer with all passes is a sum of a few rows of
bytes. An event costs O(PASSES + NEAREST k), whatever the number of experts.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.blend.series import near_log
from policies.core.compiled import compiled
from policies.core.policy import Int, Shape, Single

PASSES = 1024
BLOCKS = 16  # of passes that are looked at together
NEAREST = 12
WINDOW = 8
NOW = np.float32(0.6)
SHARPNESS = np.float32(14.0)

SPANS = (0, 1, 2, 4, 8)
"""Passes after a neighbour, each span from one more than the one before."""

WIDTH = 31
"""Experts of a layer that are noted of a pass at most: more than a decoded token uses, all of a few drafted ones."""

PRIOR = np.float32(4.0 * np.exp(14.0 * 0.3))
"""The weight of popularity beside the neighbours: that of four of likeness .3."""

EPS = np.float32(0.05)

NONE = -1

# Places in `Neighbours.request`: of each request its latest pass, how many of its layers have routed, their experts,
# and those of the pass before.
LATEST, ROUTED, EXPERTS, BEFORE, PLACES = range(5)

ZERO, ONE = np.float32(0.0), np.float32(1.0)

LEAST = np.float32(0.01)
"""The chance of no use is at least so much."""


class Neighbours(NamedTuple):
    """Passes by their place, which is taken in turn; and the likeness of each to the pass of each request at hand."""

    used: NDArray[np.int16]  # [L, PASSES, 1 + WIDTH] how many experts, and these, numbered within their layer
    uses: NDArray[np.uint8]  # [L, E, PASSES] 1 where the pass used the expert
    links: Int  # [2, PASSES] the same request's pass before, and after, or NONE
    serial: Int  # [PASSES] number of the pass, from 1
    last: Int  # [1] the same of the latest
    request: Int  # [batch_slots, PLACES]
    overlaps: NDArray[np.uint8]  # [batch_slots, WINDOW, PASSES] experts in common in the latest layers
    sizes: Int  # [batch_slots, WINDOW] the pass's own experts there
    alike: NDArray[
        np.int32
    ]  # [batch_slots, 3, PASSES] experts in common: WINDOW layers, all; in all of the passes before
    likeness: Single  # [PASSES] scratch
    totals: Single  # [spans] scratch
    nearest: Int  # [batch_slots, NEAREST] places, the most alike first, or NONE
    weights: Single  # [batch_slots, NEAREST]


NEAR, WHOLE, PREVIOUS = range(3)
"""Rows of `Neighbours.alike`."""

BACK, ON = range(2)
"""Rows of `Neighbours.links`."""


def no_passes(shape: Shape) -> Neighbours:
    L, E, batch_slots = shape.layers, shape.experts, shape.batch_slots
    return Neighbours(
        used=np.zeros((L, PASSES, 1 + min(E, WIDTH)), np.int16),
        uses=np.zeros((L, E, PASSES), np.uint8),
        links=np.full((2, PASSES), NONE),
        serial=np.zeros(PASSES, np.int64),
        last=np.zeros(1, np.int64),
        request=np.tile(np.array([NONE, 0, 0, 0]), (batch_slots, 1)),
        overlaps=np.zeros((batch_slots, WINDOW, PASSES), np.uint8),
        sizes=np.zeros((batch_slots, WINDOW), np.int64),
        alike=np.zeros((batch_slots, 3, PASSES), np.int32),
        likeness=np.zeros(PASSES, np.float32),
        totals=np.zeros(len(SPANS) - 1, np.float32),
        nearest=np.full((batch_slots, NEAREST), NONE),
        weights=np.zeros((batch_slots, NEAREST), np.float32),
    )


@compiled
def begin_request(known: Neighbours, batch_slot: int) -> None:
    known.request[batch_slot] = 0
    known.request[batch_slot, LATEST] = NONE
    known.alike[batch_slot] = 0
    known.nearest[batch_slot] = NONE


@compiled
def begin_pass(known: Neighbours, batch_slot: int) -> None:
    """A pass of the request begins, in the place of the oldest."""
    request, alike, back, on = known.request[batch_slot], known.alike[batch_slot], known.links[BACK], known.links[ON]
    known.last[0] += 1
    place, before = (known.last[0] - 1) % PASSES, request[LATEST]
    for layer in range(known.used.shape[0]):
        used = known.used[layer, place]
        for i in range(1, used[0] + 1):
            known.uses[layer, used[i], place] = 0
        used[0] = 0
    if back[place] != NONE:
        on[back[place]] = NONE
    if on[place] != NONE:
        back[on[place]] = NONE
    if before == place:  # one pass of the request in all that is kept
        before = NONE
    back[place], on[place], known.serial[place] = before, NONE, known.last[0]
    if before != NONE:
        on[before] = place
    for j in range(PASSES):
        alike[PREVIOUS, j] = alike[WHOLE, back[j]] if back[j] != NONE else 0
    for j in range(PASSES):
        alike[NEAR, j] = alike[WHOLE, j] = 0
    request[LATEST], request[ROUTED], request[BEFORE], request[EXPERTS] = place, 0, request[EXPERTS], 0
    for row in range(WINDOW):
        known.sizes[batch_slot, row] = 0
        for j in range(PASSES):
            known.overlaps[batch_slot, row, j] = 0


@compiled
def route(known: Neighbours, batch_slot: int, layer: int, experts: Int) -> None:
    """The request's pass uses these experts of the layer: find the passes that are most like it."""
    request, E = known.request[batch_slot], known.uses.shape[1]
    place, row = request[LATEST], request[ROUTED] % WINDOW
    request[ROUTED] += 1
    request[EXPERTS] += len(experts)
    overlap, sizes, alike = known.overlaps[batch_slot, row], known.sizes[batch_slot], known.alike[batch_slot]
    near, whole, previous, likeness = alike[NEAR], alike[WHOLE], alike[PREVIOUS], known.likeness
    for j in range(PASSES):
        near[j] -= overlap[j]
    for j in range(PASSES):
        overlap[j] = 0
    for expert in experts:
        uses = known.uses[layer, expert % E]
        for j in range(PASSES):
            overlap[j] += uses[j]
    for j in range(PASSES):
        near[j] += overlap[j]
        whole[j] += overlap[j]
    sizes[row], window = len(experts), 0
    for other in range(WINDOW):
        window += sizes[other]
    now, before = NOW / np.float32(max(1, window)), (np.float32(1.0) - NOW) / np.float32(max(1, request[BEFORE]))
    for j in range(PASSES):
        likeness[j] = now * np.float32(near[j]) + before * np.float32(previous[j])
    likeness[place] = np.float32(-1.0)
    _choose(likeness, known.nearest[batch_slot], known.weights[batch_slot])
    used = known.used[layer, place]
    for expert in experts:
        if used[0] < len(used) - 1:
            used[0] += 1
            used[used[0]] = expert % E
            known.uses[layer, expert % E, place] = 1


@compiled
def _choose(likeness: Single, nearest: Int, weights: Single) -> None:
    """Fill `nearest` with the places of the greatest likeness, the first of equals, and `weights`.

    None of them is less alike than all that `nearest` holds from the layer before, which so bounds what is looked at.
    Floats above zero are ordered as their bits are, which are compared several at once.
    """
    bits, bound = likeness.view(np.int32), np.int32(np.iinfo(np.int32).max)
    for n in range(NEAREST):
        bound = min(bound, bits[nearest[n]] if nearest[n] != NONE else np.int32(0))
        nearest[n], weights[n] = NONE, ZERO
    bound, size = max(bound, np.int32(1)), len(bits) // BLOCKS  # a constant would unroll the loop, not make it vectors
    for first in range(0, len(bits), size):
        block, peak = bits[first : first + size], np.int32(0)
        for i in range(len(block)):
            peak = max(peak, block[i])
        for i in range(len(block) if peak >= bound else 0):
            if block[i] >= bound and likeness[first + i] > weights[NEAREST - 1]:
                n, value = NEAREST - 1, likeness[first + i]
                while n > 0 and weights[n - 1] < value:
                    nearest[n], weights[n] = nearest[n - 1], weights[n - 1]
                    n -= 1
                nearest[n], weights[n] = first + i, value
    for n in range(NEAREST):
        weights[n] = np.exp(SHARPNESS * weights[n])


@compiled
def _lifts(total: float, lift: float, popular: Single, out: Single) -> None:
    """In place: log odds over even ones of what neighbours of the weight `total` used, beside what is popular."""
    whole, even = np.float32(total) + PRIOR, np.float32(1.0 / lift)
    a, b = np.float32(lift) / whole, PRIOR / whole
    for e in range(len(out)):
        times = a * out[e] + b * popular[e]
        out[e] = np.true_divide(times * (ONE - even), max(ONE - times * even, LEAST))
    near_log(out, ONE, EPS)


@compiled
def after(known: Neighbours, batch_slot: int, layer: int, lift: float, popular: Single, out: Single) -> None:
    """Fill out [spans, E] with the evidence of what was used after the neighbours. lift: experts by those of a pass."""
    used, totals = known.used[layer], known.totals
    for span in range(len(SPANS) - 1):
        totals[span] = ZERO
        for e in range(out.shape[1]):
            out[span, e] = ZERO
    for n in range(NEAREST):
        place, weight, span = known.nearest[batch_slot, n], known.weights[batch_slot, n], 0
        for later in range(SPANS[-1]):
            if place == NONE:
                break
            place = known.links[ON, place]
            span += later == SPANS[span + 1]
            if place != NONE and used[place, 0]:
                totals[span] += weight
                for i in range(1, used[place, 0] + 1):
                    out[span, used[place, i]] += weight
    for span in range(len(SPANS) - 1):
        _lifts(float(totals[span]), lift, popular, out[span])


@compiled
def here(known: Neighbours, batch_slot: int, layer: int, lift: float, popular: Single, out: Single) -> None:
    """Fill out [E] with the evidence of what the neighbours used in a layer that the pass at hand has not reached."""
    used, total = known.used[layer], ZERO
    for e in range(len(out)):
        out[e] = ZERO
    for n in range(NEAREST):
        place, weight = known.nearest[batch_slot, n], known.weights[batch_slot, n]
        if place != NONE and used[place, 0]:
            total += weight
            for i in range(1, used[place, 0] + 1):
                out[used[place, i]] += weight
    _lifts(float(total), lift, popular, out)
