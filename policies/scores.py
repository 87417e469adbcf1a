"""Keep scores that are mere bookkeeping of lookups and starts (rule 8 of the contract), compiled, chosen by number.

Numba cannot keep on disk a kernel that takes functions as arguments, hence this one dispatch table. `keep` is
float64[3, L*E]: row 0 the primary score, row 1 the secondary; serial numbers stay exact in a float64 up to 2**53.
"""

from numba import njit

from policies.contract import Float

NONE, LRU, FIFO, LFU = range(4)


@njit(cache=True, nogil=True)
def on_lookup(rule: int, keep: Float, expert: int, serial: int) -> None:
    """An event looks `expert` up, whatever its state."""
    if rule == LRU:
        keep[0, expert] = serial
    elif rule == LFU:
        keep[0, expert] += 1
        keep[1, expert] = serial


@njit(cache=True, nogil=True)
def on_insert(rule: int, keep: Float, expert: int, serial: int, start: int) -> None:
    """The transfer of `expert` starts: the `start`-th of the run, after event `serial`."""
    if rule == LRU:
        keep[0, expert] = serial
    elif rule == FIFO:
        keep[0, expert] = start


@njit(cache=True, nogil=True)
def on_evict(rule: int, keep: Float, expert: int) -> None:
    """`expert` leaves the cache."""
    if rule == LFU:
        keep[0, expert] = 0
