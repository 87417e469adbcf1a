"""`eamc`: the method of MoE-Infinity as the paper prints it (arXiv 2401.14361v3), retention and prefetch.

After layer l routes, the iEAM of the current step is matched against past rEAMs; the matched matrix, normalised by
row, is the activation ratio of each expert. Retention is Algorithm 1: the least (ratio + eps) * (1 - layer / L) goes.
Prefetch takes every expert of a later layer i with a ratio above 0, at priority (ratio + eps) * (1 - (i - l) / L).
Where the print is silent the choice is ours: a collection per phase, capacity 120, one match, ties to the oldest.
"""

from dataclasses import dataclass

import numpy as np
from numba import njit

from policies.collection import NO_MATCH, Collection
from policies.contract import Event, Float, Int, Prefetcher, RetentionPolicy, ScorePolicy, Shape
from policies.registry import prefetcher, retention
from traces.errors import InputError
from traces.steps import DECODE, PREFILL

MOST_EAMS = 100_000


@dataclass(frozen=True)
class EamcOptions:
    """capacity: EAMs kept for each phase; eps: what an expert never seen is worth."""

    capacity: int = 120
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if not 1 <= self.capacity <= MOST_EAMS or not 0 <= self.eps < np.inf:
            raise InputError(
                f"eamc needs a capacity of 1 to {MOST_EAMS:,} EAMs and a finite eps of at least 0, "
                f"not {self.capacity} and {self.eps}"
            )


@njit(cache=True, nogil=True)
def _candidates(shares: Float, layer: int, E: int, eps: float, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the experts after `layer` whose ratio is above 0; how many."""
    L = len(shares) // E
    n = 0
    for i in range(layer + 1, L):
        nearness = 1.0 - (i - layer) / L
        for expert in range(i * E, (i + 1) * E):
            if shares[expert] > 0:
                ids[n] = expert
                priorities[n] = (shares[expert] + eps) * nearness
                n += 1
    return n


class Predictor:
    """The running request against the collections of its phases; one is shared by both halves of `eamc`."""

    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        self.shares: Float = np.zeros(shape.total)  # [L*E] activation ratios of the match, zero without one
        self._collections = {phase: Collection(shape, options.capacity) for phase in (PREFILL, DECODE)}
        self._iteration = -1, -1  # request and step of the iEAM
        self.matched = -1, NO_MATCH  # phase and entry that `shares` shows

    def observe(self, event: Event) -> bool:
        """Add the event to iEAM and rEAM and match anew; whether the ratios have changed."""
        collection = self._collections[event.phase]
        if self._iteration != (event.request, event.step):
            self._iteration = event.request, event.step
            collection.begin_iteration()
        match = event.phase, collection.observe(event)
        if match == self.matched:
            return False
        self.matched = match
        collection.shares(match[1], self.shares)
        return True

    def learn(self) -> None:
        """The request has ended: its rEAMs join the collections."""
        for collection in self._collections.values():
            collection.learn()
        self.matched = -1, NO_MATCH


@retention("eamc")
class EamcRetention(ScorePolicy):
    """MoE-Infinity's EAMC: keep what past requests like this one use, early layers first."""

    Options = EamcOptions

    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        super().__init__(shape, options)
        self.predictor = Predictor(shape, options)
        self._eps = options.eps
        self._earliness = np.repeat(1.0 - np.arange(shape.layers) / shape.layers, shape.experts)
        self.keep[0] = self._eps * self._earliness

    def observe(self, event: Event) -> None:
        """Algorithm 1: (ratio + eps) * (1 - layer / L)."""
        if self.predictor.observe(event):
            np.multiply(self.predictor.shares + self._eps, self._earliness, out=self.keep[0])

    def end_request(self) -> None:
        """Learn the request."""
        self.predictor.learn()


@prefetcher("eamc")
class EamcPrefetcher(Prefetcher):
    """MoE-Infinity's EAMC: fetch what past requests like this one used in the layers to come."""

    Options = EamcOptions

    def __init__(self, shape: Shape, options: EamcOptions, predictor: Predictor | None = None) -> None:
        super().__init__(shape, options)
        self.observes = predictor is None
        self._predictor = predictor or Predictor(shape, options)
        self._eps = options.eps
        self._ids = np.empty(shape.total, np.int64)
        self._priorities = np.empty(shape.total)

    @classmethod
    def beside(cls, keeper: RetentionPolicy) -> "EamcPrefetcher":
        """The other half of a retention `eamc`: it reads what that one has matched."""
        assert isinstance(keeper, EamcRetention)
        assert isinstance(keeper.options, EamcOptions)
        return cls(keeper.shape, keeper.options, keeper.predictor)

    def observe(self, event: Event) -> None:
        """Match anew (a prefetcher on its own)."""
        self._predictor.observe(event)

    def end_request(self) -> None:
        """Learn the request (a prefetcher on its own)."""
        if self.observes:
            self._predictor.learn()

    def propose(self, event: Event) -> tuple[Int, Float]:
        """Every expert of a later layer with a ratio above 0."""
        shape = self.shape
        n = _candidates(self._predictor.shares, event.layer, shape.experts, self._eps, self._ids, self._priorities)
        return self._ids[:n], self._priorities[:n]
