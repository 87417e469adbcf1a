"""The expert activation matrix collection (EAMC) of MoE-Infinity (arXiv 2401.14361v3): past rEAMs, matched by cosine.

It has a fixed capacity; when full, the incoming rEAM replaces the stored one at the smallest cosine distance to it.
Dot products with the running iEAM are whole numbers, kept up to date by touching only the experts that an event adds.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from numba import njit

from policies.contract import Event, Float, Int, Shape

NO_MATCH = -1
TIE = 1e-12  # cosines this near, relatively, are equal: what differs is rounding, as between an EAM and its double


@njit(cache=True, nogil=True)
def _nearest(dots: Int, norms: Float, ages: Int, size: int) -> int:
    """The entry of the greatest cosine, dots / norms; ties to the oldest."""
    best, greatest = NO_MATCH, -1.0
    for c in range(size):
        cosine = dots[c] / norms[c]
        if best == NO_MATCH or cosine > greatest * (1 + TIE):
            best, greatest = c, cosine
        elif cosine >= greatest * (1 - TIE) and ages[c] < ages[best]:
            best = c
    return best


@njit(cache=True, nogil=True)
def _observe(
    dots: Int,
    stored: Int,
    norms: Float,
    ages: Int,
    size: int,
    request_eam: Int,
    experts: Int,
    counts: Int,
    first: int,
    last: int,
) -> int:
    """Add an event to the rEAM and to every dot product of the iEAM; the nearest entry."""
    for i in range(first, last):
        request_eam[experts[i]] += counts[i]
        for c in range(size):
            dots[c] += counts[i] * stored[experts[i], c]
    return _nearest(dots, norms, ages, size)


@njit(cache=True, nogil=True)
def _row_shares(matrix: Int, experts: int, shares: Float) -> None:
    """shares[l*E + e] = matrix[l*E + e] / sum of row l; an empty row stays zero. Both [L*E]."""
    for base in range(0, len(matrix), experts):
        total = 0
        for i in range(base, base + experts):
            total += matrix[i]
        for i in range(base, base + experts):
            shares[i] = matrix[i] / total if total else 0.0


class Collection:
    """An EAMC of at most `capacity` EAMs, and the running request against it: its iEAM's dot products, its rEAM."""

    def __init__(self, shape: Shape, capacity: int) -> None:
        self.shape = shape
        self.capacity = capacity
        self.size = 0
        self.request_eam: Int = np.zeros(shape.total, np.int64)  # [L*E]
        self._stored = np.zeros((shape.total, capacity), np.int64)  # [L*E, capacity]
        self._norms = np.zeros(capacity, np.float64)
        self._ages = np.zeros(capacity, np.int64)
        self._learned = 0
        self._dots = np.zeros(capacity, np.int64)
        self._observe: Callable[..., int] = partial(_observe, self._dots, self._stored, self._norms, self._ages)

    def begin_iteration(self) -> None:
        """A new iEAM: all zero."""
        self._dots[:] = 0

    def observe(self, event: Event) -> int:
        """iEAM and rEAM grow by the event's tokens at its experts.

        Returns the entry nearest to the iEAM by the cosine of the flattened matrices, NO_MATCH if none is stored.
        """
        return self._observe(
            self.size, self.request_eam, event.request_experts, event.request_counts, event.first, event.last
        )

    def shares(self, entry: int, out: Float) -> None:
        """Write entry's row-normalised activation ratios into `out` [L*E]; zeros for NO_MATCH."""
        if entry == NO_MATCH:
            out[:] = 0
        else:
            _row_shares(self._stored[:, entry], self.shape.experts, out)

    def learn(self) -> None:
        """The request has ended: store its rEAM and begin a new one; an all-zero one teaches nothing."""
        eam = self.request_eam
        if not eam.any():
            return
        if self.size < self.capacity:
            entry = self.size
            self.size += 1
        else:
            entry = int(_nearest(eam @ self._stored, self._norms, self._ages, self.size))
        self._stored[:, entry] = eam
        self._norms[entry] = np.sqrt(np.dot(eam, eam))
        self._learned += 1
        self._ages[entry] = self._learned
        eam[:] = 0
