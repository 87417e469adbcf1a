"""`eamc`: the method of MoE-Infinity (arXiv 2401.14361), retention and prefetch, every choice of it an option.

After layer l routes, the running request is matched against past EAMs (policies/eamc/matching.py); the sum of those
matched, normalised by row, is the activation ratio of each expert. With the defaults, which are v3's where it is
explicit and ours where the print is silent:

Retention is Algorithm 1: the least (ratio + eps) * decay goes, ties to the lower id. decay of layer i is `first`
1 - i / L (early layers are worth more, since later ones have time to be prefetched), `none` 1, or `next`
1 - ((i - l - 1) mod L) / L: from 1 for the layer that comes next down to 1 / L for the current one, a whole step away.
Instead of the least ratio the `most-visited` expert may go (the first public release: prefetch candidates only if
there is no other), or the `least-visited` (later releases); visits are lookups since its transfer, the one
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

from typing import BinaryIO, NamedTuple

import numpy as np

from policies.core.compiled import compiled
from policies.core.limits import layers_ahead
from policies.core.policy import (
    CHANGED,
    CHANGED_HERE,
    KEEP_ROWS,
    UNCHANGED,
    Compiled,
    Event,
    Float,
    Int,
    Listener,
    Policy,
    Prefetcher,
    ScorePolicy,
    Shape,
)
from policies.core.registry import prefetcher, retention
from policies.eamc import matching
from policies.eamc.collection import Collection, EamcOptions
from policies.eamc.file import Part, SavedEamc
from policies.eamc.matching import NO_MATCH, Bucket
from traces.errors import InputError


@compiled
def predict(bucket: Bucket, says: "Prediction", event: Event) -> None:
    """Fill ratios with those of the sum of what the event's requests match, ids with the experts above the threshold.

    Without a match all ratios are 0 and there are no candidates.
    """
    sums, starts = says.sums, says.starts
    starts[:] = 0
    sums[:] = 0
    found = False
    for batch_slot in event.batch_slots:
        for entry in bucket.matched[batch_slot]:
            if entry != NO_MATCH:
                found = True
                eam = bucket.eams[entry]
                for expert in range(len(eam)):
                    sums[expert] += eam[expert]
    if not found:
        says.ratios[:] = 0.0
        return
    L = len(starts) - 1
    E, n = len(sums) // L, 0
    for row in range(L):
        n = _predict_row(says, sums[row * E : (row + 1) * E], row * E, n)
        starts[row + 1] = n


@compiled
def _predict_row(says: "Prediction", sums: Int, first: int, n: int) -> int:
    """The same for the experts of one row, from `first` on, behind n candidates of the rows before; how many then."""
    ratios, total = says.ratios[first : first + len(sums)], 0
    for e in range(len(sums)):
        total += sums[e]
    for e in range(len(sums)):
        ratios[e] = np.true_divide(sums[e], max(total, 1))
    for e in range(len(sums)):  # without a branch, which would often be guessed wrong
        says.ids[n], says.worth[n] = first + e, ratios[e] + says.eps
        n += ratios[e] > says.threshold
    return n


NONE = -1  # in place of a step, a phase or a batch slot


class Prediction(NamedTuple):
    """What the latest match says; one for both halves."""

    ratios: Float  # [L*E]
    sums: Int  # [L*E] the tokens that they are the shares of
    ids: Int  # [L*E] candidates, ids[starts[l]:starts[l + 1]] those of layer l, ascending
    worth: Float  # [L*E] of each of these its ratio + eps
    starts: Int  # [L+1]
    decay: Float  # [L, L] of the keep score, by current layer and by layer of the expert
    shown: Int  # [2] the phase and the batch slot whose match the ratios are of
    steps: Int  # [batch_slots] each request's step that runs
    threshold: float
    eps: float
    split: bool  # the phases have a collection each
    depth: int  # layers ahead that are prefetched
    by_ratio: bool  # keep scores are ratios
    follows_layer: bool  # their decay depends on the current layer
    spares_candidates: bool  # keep scores are 1 for candidates, 0 for all others


class Matched(NamedTuple):
    """The running requests against the collections of their phases, and what that predicts."""

    prefill: Bucket
    decode: Bucket  # the same one, if the phases are not split
    says: Prediction


@compiled
def observe(known: Matched, event: Event) -> bool:
    """Match again in the bucket of the event's phase; whether the ratios have changed."""
    says, changed = known.says, False
    meets = event.phase if says.split else 0
    bucket = known.decode if meets else known.prefill
    for r in range(len(event.batch_slots)):
        begins = says.steps[event.batch_slots[r]] != event.steps[r]
        says.steps[event.batch_slots[r]] = event.steps[r]
        changed |= matching.observe(bucket, begins, event, r)
    batch_slot = event.batch_slots[0] if len(event.batch_slots) == 1 else NONE
    if not changed and batch_slot != NONE and says.shown[0] == meets and says.shown[1] == batch_slot:
        return False
    says.shown[0], says.shown[1] = meets, batch_slot
    predict(bucket, says, event)
    return True


@compiled
def observe_and_score(known: Matched, keep: Float, event: Event) -> int:
    """Match again, and write the keep scores that this changes."""
    return score(known.says, keep, observe(known, event), event.layer)


@compiled
def score(says: Prediction, keep: Float, changed: bool, layer: int) -> int:
    """After `observe`: write the keep scores that an event of `layer` changes; visits count where lookups do."""
    L = len(says.decay)
    E = len(says.ratios) // L
    if says.by_ratio and (changed or says.follows_layer):
        for row in range(L):
            ratios, scores, decay = says.ratios[row * E :], keep[0, row * E :], says.decay[layer, row]
            for e in range(E):
                scores[e] = (ratios[e] + says.eps) * decay
        return CHANGED
    if says.spares_candidates:
        keep[0, :] = 0.0
        for i in range(says.starts[layer + 1], says.starts[min(layer + 1 + says.depth, L)]):
            keep[0, says.ids[i]] = 1.0
        return CHANGED
    return UNCHANGED


@compiled
def fetch(known: Matched, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the candidates of the layers ahead; how many."""
    says, layer, n = known.says, event.layer, 0
    L = len(says.decay)
    for row in range(layer + 1, min(layer + 1 + says.depth, L)):
        nearness, first = 1.0 - (row - layer) / L, says.starts[row]
        length = says.starts[row + 1] - first
        theirs, worth, ids_here, here = says.ids[first:], says.worth[first:], ids[n:], priorities[n:]
        for i in range(length):
            ids_here[i], here[i] = theirs[i], worth[i] * nearness
        n += length
    return n


def begin(shape: Shape, options: EamcOptions) -> Matched:
    return Predictor(shape, options).matched


class Predictor:
    """What `eamc` has learned, and the running request against it (`matched`); one is shared by both halves.

    InputError for a collection from a file that does not fit.
    """

    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        self.shape = shape
        self.options = options
        self.collections = tuple(Collection(shape, options) for _ in range(1 + options.split))
        self.says = Prediction(
            ratios=np.zeros(shape.total),
            sums=np.zeros(shape.total, np.int64),
            ids=np.empty(shape.total, np.int64),
            worth=np.empty(shape.total),
            starts=np.zeros(shape.layers + 1, np.int64),
            decay=_decay(options.decay, shape.layers),
            shown=np.full(2, NONE),
            steps=np.full(shape.batch_slots, NONE),
            threshold=float(options.threshold),
            eps=float(options.eps),
            split=options.split,
            depth=layers_ahead(options.depth, shape),
            by_ratio=options.keep == "ratio",
            follows_layer=options.decay == "next",
            spares_candidates=options.keep == "most-visited",
        )
        self.matched = Matched(self.collections[0].bucket, self.collections[-1].bucket, self.says)
        if options.collection:
            self._start_from(saved_for(options, shape))

    def of_phase(self, phase: int) -> Collection:
        """The collection that a step of `phase` meets."""
        return self.collections[phase if self.options.split else 0]

    def learn(self, batch_slot: int = 0) -> None:
        """The request in `batch_slot` has ended: its rEAMs join the collections."""
        for collection in self.collections:
            collection.learn(batch_slot)
        self.says.steps[batch_slot] = self.says.shown[0] = NONE

    @property
    def memory_bytes(self) -> int:
        """Of collections, what is matched with them, and predictions."""
        says = self.says
        own = sum(array.nbytes for array in (says.ratios, says.sums, says.ids, says.worth, says.starts))
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
        for held, part in zip(self.collections, saved.parts, strict=True):
            for eam, uses in zip(part.eams, part.uses.tolist(), strict=True):
                held.add(eam.ravel(), uses)
            for eam in part.waiting:
                held.add(eam.ravel())


def saved_for(options: EamcOptions, shape: Shape) -> SavedEamc:
    """Return the collection that the options name. Raise InputError where it does not fit them, or the model."""
    file = options.collection
    saved = SavedEamc.read(file)
    if saved.shape != shape:
        shapes = f"{saved.shape.layers} x {saved.shape.experts} experts, not of {shape.layers} x {shape.experts}"
        raise InputError(f"{file} holds EAMs of {shapes}: build one from a trace of this model")
    most = max(len(part.eams) for part in saved.parts)
    if most > options.capacity:
        raise InputError(f"{file} holds {most} EAMs, more than capacity={options.capacity}: say capacity={most}")
    return saved


class _StartsFromAFile(Listener):
    """What both halves have in common."""

    Options = EamcOptions
    starts_from = "collection"
    predictor: Predictor

    @classmethod
    def require(cls, options: EamcOptions, shape: Shape) -> None:
        if options.collection:
            saved_for(options, shape)

    def save(self, file: BinaryIO, source: str) -> None:
        self.predictor.saved(source).write(file)


VISIT = KEEP_ROWS
"""Rows of `keep`: what a visit is worth in the second score."""


@compiled
def count_visit(keep: Float, expert: int, serial: int) -> int:
    keep[1, expert] += keep[VISIT, 0]
    return CHANGED_HERE


@compiled
def uncounted(keep: Float, expert: int, serial: int) -> int:
    """A lookup that the host computes is no visit."""
    return UNCHANGED


@compiled
def forget_visits(keep: Float, expert: int) -> int:
    keep[1, expert] = 0
    return CHANGED_HERE


@retention("eamc")
class EamcRetention(_StartsFromAFile, ScorePolicy):
    """MoE-Infinity's EAMC: keep what past requests like this one use, early layers first."""

    compiled = Compiled(
        begin, observe_and_score, on_lookup=count_visit, on_host_lookup=uncounted, on_evict=forget_visits, more_rows=1
    )

    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        self.predictor = Predictor(shape, options)
        super().__init__(shape, options, self.predictor.matched)
        self.keep[VISIT] = {"ratio": 0, "most-visited": -1, "least-visited": 1}[options.keep]
        score(self.predictor.says, self.keep, True, 0)

    @classmethod
    def declared(cls, options: EamcOptions) -> Compiled | None:
        """Visits are counted where they score."""
        return Compiled(begin, observe_and_score) if options.keep == "ratio" else cls.compiled

    def end_request(self, batch_slot: int) -> None:
        self.predictor.learn(batch_slot)


def _decay(name: str, L: int) -> Float:
    """Factors [L, L] by current layer and by layer of the expert."""
    layer = np.arange(L)
    if name == "next":
        decay: Float = 1.0 - ((layer - layer[:, None] - 1) % L) / L
        return decay
    return np.tile(1.0 - layer / L if name == "first" else np.ones(L), (L, 1))


@prefetcher("eamc")
class EamcPrefetcher(_StartsFromAFile, Prefetcher):
    """MoE-Infinity's EAMC: fetch what past requests like this one used in the layers to come."""

    compiled = Compiled(begin, observe, fetch)

    def __init__(self, shape: Shape, options: EamcOptions, predictor: Predictor | None = None) -> None:
        self.predictor = predictor or Predictor(shape, options)
        super().__init__(shape, options, self.predictor.matched)
        self.observes = predictor is None

    @classmethod
    def beside(cls, keeper: Policy) -> "EamcPrefetcher":
        """Return the other half of a retention `eamc`: it reads what that one has matched."""
        assert isinstance(keeper, EamcRetention)
        return cls(keeper.shape, keeper.predictor.options, keeper.predictor)

    def end_request(self, batch_slot: int) -> None:
        """Learn the request (a prefetcher on its own)."""
        if self.observes:
            self.predictor.learn(batch_slot)
