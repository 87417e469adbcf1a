"""`eamc`: the method of MoE-Infinity (arXiv 2401.14361), retention and prefetch, every choice of it an option.

After layer l routes, the running request is matched against past EAMs (policies/matching.py); the sum of those
matched, normalised by row, is the activation ratio of each expert. With the defaults, which are v3's where it is
explicit and ours where the print is silent:

Retention is Algorithm 1: the least (ratio + eps) * decay goes, ties to the lower id. decay of layer i is `first`
1 - i / L (early layers are worth more, since later ones have time to be prefetched), `none` 1, or `next`
1 - ((i - l - 1) mod L) / L: from 1 for the layer that comes next down to 1 / L for the current one, a whole step away.
Instead of the least ratio the `most-visited` expert may go (the first public release: prefetch candidates only if
nothing else is to be had), or the `least-visited` (later releases); visits are lookups since its transfer, the one
that missed included, whose transfer it was.

Prefetch takes every expert of a later layer i, of the next `depth` ones, with a ratio above `threshold`, at priority
(ratio + eps) * (1 - (i - l) / L).

What has no ratio: nothing is known before a request has ended, so while the collection is empty nothing is proposed
and all ratios are 0, as is a row that is all zero in what was matched; a partly filled collection is matched as it is.
After the last layer nothing is proposed, and a match over the rows after it compares nothing: then, as for whatever
is equally near, the oldest EAM is matched. An event without experts is matched like any other. A prefill is one step,
whose counts are tokens; it meets the EAMs of prefills, or of all if they are not `split`. A request without any
expert in a phase teaches that collection nothing.
"""

import numpy as np
from numba import njit

from policies import scores
from policies.collection import Collection
from policies.contract import NOTHING, Event, Float, Int, Prefetcher, RetentionPolicy, ScorePolicy, Shape
from policies.eamc_file import Part, SavedEamc
from policies.eamc_options import EamcOptions
from policies.matching import NO_MATCH
from policies.registry import prefetcher, retention
from traces.errors import InputError, located


@njit(cache=True, nogil=True)
def predict(eams: Int, matched: Int, threshold: float, ratios: Float, ids: Int, starts: Int) -> None:
    """ratios [L*E]: those of the matched EAMs' sum; ids: the experts above `threshold`, row l from starts[l] on.

    Without a match all ratios are 0 and there are no candidates. starts: [L+1].
    """
    starts[:] = 0
    ratios[:] = 0.0
    if matched[0] == NO_MATCH:
        return
    for entry in matched:
        if entry != NO_MATCH:
            for expert in range(len(ratios)):
                ratios[expert] += eams[entry, expert]
    L = len(starts) - 1
    E, n = len(ratios) // L, 0
    for row in range(L):
        total = 0.0
        for expert in range(row * E, (row + 1) * E):
            total += ratios[expert]
        if total > 0.0:
            for expert in range(row * E, (row + 1) * E):
                ratios[expert] /= total
        for expert in range(row * E, (row + 1) * E):  # without a branch, which would often be guessed wrong
            ids[n] = expert
            n += ratios[expert] > threshold
        starts[row + 1] = n


@njit(cache=True, nogil=True)
def propose(ratios: Float, ids: Int, starts: Int, layer: int, until: int, eps: float, priorities: Float) -> None:
    """Fill the priorities of the candidates in the layers after `layer` and before `until`, in their places."""
    L = len(starts) - 1
    for row in range(layer + 1, until):
        nearness = 1.0 - (row - layer) / L
        for i in range(starts[row], starts[row + 1]):
            priorities[i] = (ratios[ids[i]] + eps) * nearness


@njit(cache=True, nogil=True)
def weigh(ratios: Float, eps: float, decay: Float, keep: Float) -> None:
    """keep [L*E] = (ratio + eps) * decay of the expert's layer [L]."""
    L = len(decay)
    E = len(ratios) // L
    for row in range(L):
        for expert in range(row * E, (row + 1) * E):
            keep[expert] = (ratios[expert] + eps) * decay[row]


class Predictor:
    """The running request against the collections of its phases; one is shared by both halves of `eamc`.

    ratios: [L*E] of the latest match; `ids[starts[l]:starts[l + 1]]` are the candidates of layer l, ascending.
    InputError for a collection from a file that does not fit.
    """

    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        self.shape = shape
        self.options = options
        self.ratios: Float = np.zeros(shape.total)
        self.ids: Int = np.empty(shape.total, np.int64)
        self.starts: Int = np.zeros(shape.layers + 1, np.int64)
        self.collections = tuple(Collection(shape, options) for _ in range(1 + options.split))
        self._shown: Collection | None = None  # whose match the ratios are of
        self._step = -1, -1
        if options.collection:
            self._start_from(SavedEamc.read(options.collection))

    def of_phase(self, phase: int) -> Collection:
        """The collection that a step of `phase` meets."""
        return self.collections[phase if self.options.split else 0]

    def observe(self, event: Event) -> bool:
        """Match anew; whether the ratios have changed."""
        collection = self.of_phase(event.phase)
        step = event.request, event.step
        begins, self._step = step != self._step, step
        if not collection.observe(event, begins) and collection is self._shown:
            return False
        self._shown = collection
        matched = collection.bucket.matched
        predict(collection.eams, matched, self.options.threshold, self.ratios, self.ids, self.starts)
        return True

    def until(self, layer: int) -> int:
        """The first layer after `layer` that is too far ahead to be prefetched."""
        return min(layer + 1 + (self.options.depth or self.shape.layers), self.shape.layers)

    def candidates(self, layer: int) -> slice:
        """Where in `ids` the candidates stand that an event of `layer` proposes."""
        return slice(self.starts[layer + 1], self.starts[self.until(layer)])

    def learn(self) -> None:
        """The request has ended: its rEAMs join the collections."""
        for collection in self.collections:
            collection.learn()
        self._shown = None

    @property
    def memory_bytes(self) -> int:
        """Of collections, what is matched with them, and predictions."""
        own = self.ratios.nbytes + self.ids.nbytes + self.starts.nbytes
        return own + sum(collection.memory_bytes for collection in self.collections)

    def saved(self, trace: str) -> SavedEamc:
        """What has been learned, of requests of `trace`."""
        L, E = self.shape.layers, self.shape.experts
        parts = []
        for held in self.collections:
            order = held.oldest_first
            waiting = np.array(held.waiting, np.int64).reshape(-1, L, E)
            parts.append(Part(held.eams[order].reshape(-1, L, E), held.bucket.uses[order], waiting))
        return SavedEamc(self.shape, self.options, trace, tuple(parts))

    def _start_from(self, saved: SavedEamc) -> None:
        """Its EAMs in the order in which they were learned; those that wait for K-means are learned now."""
        ours, theirs, options = self.shape, saved.shape, self.options
        with located(f"eamc:collection={options.collection}"):
            if theirs != ours:
                shapes = f"{theirs.layers} x {theirs.experts} experts, not of {ours.layers} x {ours.experts}"
                raise InputError(f"it holds EAMs of {shapes}: build one from a trace of this model")
            if saved.options.split != options.split:
                theirs_is = "a collection for each phase" if saved.options.split else "one collection for both phases"
                raise InputError(f"it holds {theirs_is}: say split={str(saved.options.split).lower()}")
            most = max(len(part.eams) for part in saved.parts)
            if most > options.capacity:
                raise InputError(f"it holds {most} EAMs, more than capacity={options.capacity}: say capacity={most}")
        for held, part in zip(self.collections, saved.parts, strict=True):
            for eam, uses in zip(part.eams, part.uses.tolist(), strict=True):
                held.add(eam.ravel(), uses)
            for eam in part.waiting:
                held.add(eam.ravel())


@retention("eamc")
class EamcRetention(ScorePolicy):
    """MoE-Infinity's EAMC: keep what past requests like this one use, early layers first."""

    Options = EamcOptions
    rule = scores.VISITS

    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        super().__init__(shape, options)
        self.predictor = Predictor(shape, options)
        self.keep = np.zeros((scores.ROWS, shape.total))
        self.keep[scores.OPTION] = {"ratio": 0, "most-visited": -1, "least-visited": 1}[options.keep]
        self._decay = _decay(options.decay, shape.layers)
        self._by_ratio, self._follows_layer = options.keep == "ratio", options.decay == "next"
        self._spares_candidates = options.keep == "most-visited"
        if self._by_ratio:
            weigh(self.predictor.ratios, options.eps, self._decay[0], self.keep[0])

    def observe(self, event: Event) -> None:
        """Match anew, and score what that changes; visits are counted where lookups are."""
        predictor = self.predictor
        changed = predictor.observe(event)
        if self._by_ratio and (changed or self._follows_layer):
            weigh(predictor.ratios, predictor.options.eps, self._decay[event.layer], self.keep[0])
        elif self._spares_candidates:
            self.keep[0] = 0.0
            self.keep[0, predictor.ids[predictor.candidates(event.layer)]] = 1.0

    def end_request(self) -> None:
        """Learn the request."""
        self.predictor.learn()


def _decay(name: str, L: int) -> Float:
    """Factors [L, L] by current layer and by layer of the expert."""
    layer = np.arange(L)
    if name == "next":
        decay: Float = 1.0 - ((layer - layer[:, None] - 1) % L) / L
        return decay
    return np.tile(1.0 - layer / L if name == "first" else np.ones(L), (L, 1))


@prefetcher("eamc")
class EamcPrefetcher(Prefetcher):
    """MoE-Infinity's EAMC: fetch what past requests like this one used in the layers to come."""

    Options = EamcOptions

    def __init__(self, shape: Shape, options: EamcOptions, predictor: Predictor | None = None) -> None:
        super().__init__(shape, options)
        self.observes = predictor is None
        self.predictor = predictor or Predictor(shape, options)
        self._priorities = np.empty(shape.total)

    @classmethod
    def beside(cls, keeper: RetentionPolicy) -> "EamcPrefetcher":
        """The other half of a retention `eamc`: it reads what that one has matched."""
        assert isinstance(keeper, EamcRetention)
        return cls(keeper.shape, keeper.predictor.options, keeper.predictor)

    def observe(self, event: Event) -> None:
        """Match anew (a prefetcher on its own)."""
        self.predictor.observe(event)

    def end_request(self) -> None:
        """Learn the request (a prefetcher on its own)."""
        if self.observes:
            self.predictor.learn()

    def propose(self, event: Event) -> tuple[Int, Float]:
        """The candidates of the layers ahead."""
        known = self.predictor
        here = known.candidates(event.layer)
        if here.stop == here.start:
            return NOTHING
        until = known.until(event.layer)
        propose(known.ratios, known.ids, known.starts, event.layer, until, known.options.eps, self._priorities)
        return known.ids[here], self._priorities[here]
