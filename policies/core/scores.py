"""Keep scores that are mere bookkeeping of lookups and starts (rule 8), compiled, chosen by number.

Numba cannot keep on disk a kernel that takes functions as arguments, hence this one dispatch table. `keep` is
float64[3, L*E]: row 0 the primary score, row 1 the secondary; serial numbers stay exact in a float64 up to 2**53.
A rule with an option has more rows: its first numbers are the OPTION and, where it needs one, the rule's CLOCK.
"""

import numpy as np

from policies.core.compiled import compiled
from policies.core.policy import Float

NONE, LRU, FIFO, LFU, LFU_PERFECT, LFU_AGED, LRFU, VISITS = range(8)
NAMES_VICTIMS = 8  # there are no scores: the policy names its victims in Python

OPTION, CLOCK, ROWS = 3, 4, 5  # rows of `keep`; its third is the residency's
WITH_OPTION = LFU_AGED, LRFU, VISITS
"""Rules that need all ROWS; compiled code does not look whether they are there."""


@compiled
def on_lookup(rule: int, keep: Float, expert: int, serial: int) -> None:
    """An event looks `expert` up, whatever its state."""
    if rule == LRU:
        keep[0, expert] = serial
    elif rule in (LFU, LFU_PERFECT):
        keep[0, expert] += 1
        keep[1, expert] = serial
    elif rule == LFU_AGED:
        age = serial // keep[OPTION, 0]
        if age > keep[CLOCK, 0]:
            left = 0.5 ** (age - keep[CLOCK, 0])
            for other in range(keep.shape[1]):
                keep[0, other] *= left
            keep[CLOCK, 0] = age
        keep[0, expert] += 1
        keep[1, expert] = serial
    elif rule == LRFU:
        keep[0, expert] = np.logaddexp2(keep[0, expert], keep[OPTION, 0] * serial)
        keep[1, expert] = serial
    elif rule == VISITS:
        keep[1, expert] += keep[OPTION, 0]


@compiled
def on_host_lookup(rule: int, keep: Float, expert: int, serial: int) -> None:
    """The same of a miss that is computed on the host, which LFU and perfect LFU do not count (rule 8)."""
    if rule in (LFU, LFU_PERFECT):
        keep[1, expert] = serial
    elif rule != VISITS:
        on_lookup(rule, keep, expert, serial)


@compiled
def on_insert(rule: int, keep: Float, expert: int, serial: int, start: int) -> None:
    """The transfer of `expert` starts: the `start`-th of the run, after event `serial`."""
    if rule == LRU:
        keep[0, expert] = serial
    elif rule == FIFO:
        keep[0, expert] = start


@compiled
def on_evict(rule: int, keep: Float, expert: int) -> None:
    if rule == LFU:
        keep[0, expert] = 0
    elif rule == VISITS:
        keep[1, expert] = 0
