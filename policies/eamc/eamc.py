"""`eamc`: the method of MoE-Infinity (arXiv 2401.14361), retention and prefetch, every choice of it an option.

After layer l routes, the running request is matched against past EAMs (policies/eamc/matching.py); the sum of those
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

from typing import NamedTuple

import numpy as np

from policies.core import scores
from policies.core.compiled import compiled
from policies.core.policy import Event, Float, Int, Kernel, Prefetcher, RetentionPolicy, ScorePolicy, Shape
from policies.core.registry import prefetcher, retention
from policies.eamc import matching
from policies.eamc.collection import Collection
from policies.eamc.file import Part, SavedEamc
from policies.eamc.matching import NO_MATCH, Bucket
from policies.eamc.options import EamcOptions
from traces.errors import InputError, located


@compiled
def predict(bucket: Bucket, says: "Prediction", event: Event) -> None:
    """Fill ratios with those of the sum of what the event's requests match, ids with the experts above the threshold.

    Without a match all ratios are 0 and there are no candidates.
    """
    ratios, ids, starts, threshold = says.ratios, says.ids, says.starts, says.settings[THRESHOLD]
    starts[:] = 0
    ratios[:] = 0.0
    found = False
    for seat in event.seats:
        for entry in bucket.matched[seat]:
            if entry != NO_MATCH:
                found = True
                for expert in range(len(ratios)):
                    ratios[expert] += bucket.eams[entry, expert]
    if not found:
        return
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


@compiled
def propose(ratios: Float, ids: Int, starts: Int, layer: int, until: int, eps: float, priorities: Float) -> None:
    """Fill the priorities of the candidates in the layers after `layer` and before `until`, in their places."""
    L = len(starts) - 1
    for row in range(layer + 1, until):
        nearness = 1.0 - (row - layer) / L
        for i in range(starts[row], starts[row + 1]):
            priorities[i] = (ratios[ids[i]] + eps) * nearness


@compiled
def weigh(ratios: Float, eps: float, decay: Float, keep: Float) -> None:
    """keep [L*E] = (ratio + eps) * decay of the expert's layer [L]."""
    L = len(decay)
    E = len(ratios) // L
    for row in range(L):
        for expert in range(row * E, (row + 1) * E):
            keep[expert] = (ratios[expert] + eps) * decay[row]


SHOWN, SHOWN_SEAT, SPLIT, DEPTH, BY_RATIO, FOLLOWS_LAYER, SPARES_CANDIDATES, NUMBERS = range(8)
"""Places in `Prediction.numbers`: the phase and the seat whose match the ratios are of; flag: whether the phases have a
collection each; layers ahead that are prefetched; flags of retention: scores are ratios, their decay follows the layer,
candidates are spared."""

THRESHOLD, EPS = range(2)
"""Places in `Prediction.settings`."""

NONE = -1  # in place of a step, a phase or a seat


class Prediction(NamedTuple):
    """What the latest match says; one for both halves."""

    ratios: Float  # [L*E]
    ids: Int  # [L*E] candidates, ids[starts[l]:starts[l + 1]] those of layer l, ascending
    starts: Int  # [L+1]
    decay: Float  # [L, L] of the keep score, by current layer and by layer of the expert
    settings: Float  # [2]
    numbers: Int  # [NUMBERS]
    steps: Int  # [seats] each request's step that runs


class Matched(NamedTuple):
    """The running requests against the collections of their phases, and what that predicts."""

    prefill: Bucket
    decode: Bucket  # the same one, if the phases are not split
    says: Prediction


@compiled
def match(bucket: Bucket, says: Prediction, meets: int, event: Event) -> bool:
    """Match anew in the bucket of phase `meets` (0 if they are not split); whether the ratios have changed."""
    numbers, changed = says.numbers, False
    for r in range(len(event.seats)):
        begins = says.steps[event.seats[r]] != event.steps[r]
        says.steps[event.seats[r]] = event.steps[r]
        changed |= matching.observe(bucket, begins, event, r)
    shown = event.seats[0] if len(event.seats) == 1 else NONE
    if not changed and numbers[SHOWN] == meets and shown != NONE and numbers[SHOWN_SEAT] == shown:
        return False
    numbers[SHOWN], numbers[SHOWN_SEAT] = meets, shown
    predict(bucket, says, event)
    return True


@compiled
def match_phase(known: Matched, event: Event) -> bool:
    """`match` in the bucket of the event's phase."""
    meets = event.phase if known.says.numbers[SPLIT] else 0
    bucket = known.decode if meets else known.prefill
    return match(bucket, known.says, meets, event)


@compiled
def observe(known: Matched, event: Event) -> None:
    """Match anew."""
    match_phase(known, event)


@compiled
def observe_and_score(known: Matched, keep: Float, event: Event) -> None:
    """Match anew, and write the keep scores that this changes."""
    score(known.says, keep, match_phase(known, event), event.layer)


@compiled
def candidates(says: Prediction, layer: int) -> tuple[int, int, int]:
    """Where in `ids` the candidates begin and end that an event of `layer` proposes; the first layer too far ahead."""
    L = len(says.starts) - 1
    until = min(layer + 1 + says.numbers[DEPTH], L)
    return says.starts[layer + 1], says.starts[until], until


@compiled
def score(says: Prediction, keep: Float, changed: bool, layer: int) -> None:
    """After `observe`: write the keep scores that an event of `layer` changes; visits count where lookups do."""
    numbers = says.numbers
    if numbers[BY_RATIO]:
        if changed or numbers[FOLLOWS_LAYER]:
            weigh(says.ratios, says.settings[EPS], says.decay[layer], keep[0])
    elif numbers[SPARES_CANDIDATES]:
        begin, end, _ = candidates(says, layer)
        keep[0, :] = 0.0
        for i in range(begin, end):
            keep[0, says.ids[i]] = 1.0


@compiled
def fetch(known: Matched, event: Event, ids: Int, priorities: Float) -> int:
    """Fill ids and priorities with the candidates of the layers ahead; how many."""
    says, layer = known.says, event.layer
    begin, end, until = candidates(says, layer)
    propose(says.ratios, says.ids, says.starts, layer, until, says.settings[EPS], priorities)
    for i in range(begin, end):
        ids[i - begin], priorities[i - begin] = says.ids[i], priorities[i]
    return end - begin


def begin(shape: Shape, options: EamcOptions) -> Matched:
    """Return the state of a run."""
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
            ids=np.empty(shape.total, np.int64),
            starts=np.zeros(shape.layers + 1, np.int64),
            decay=_decay(options.decay, shape.layers),
            settings=np.array([options.threshold, options.eps], np.float64),
            numbers=np.zeros(NUMBERS, np.int64),
            steps=np.full(shape.seats, NONE),
        )
        self.matched = Matched(self.collections[0].bucket, self.collections[-1].bucket, self.says)
        numbers = self.says.numbers
        numbers[SHOWN] = numbers[SHOWN_SEAT] = NONE
        numbers[SPLIT] = options.split
        numbers[DEPTH] = options.depth or shape.layers
        numbers[BY_RATIO], numbers[FOLLOWS_LAYER] = options.keep == "ratio", options.decay == "next"
        numbers[SPARES_CANDIDATES] = options.keep == "most-visited"
        if options.collection:
            self._start_from(SavedEamc.read(options.collection))

    def of_phase(self, phase: int) -> Collection:
        """The collection that a step of `phase` meets."""
        return self.collections[phase if self.options.split else 0]

    def learn(self, seat: int = 0) -> None:
        """The request in `seat` has ended: its rEAMs join the collections."""
        for collection in self.collections:
            collection.learn(seat)
        self.says.steps[seat] = self.says.numbers[SHOWN] = NONE

    @property
    def memory_bytes(self) -> int:
        """Of collections, what is matched with them, and predictions."""
        own = self.says.ratios.nbytes + self.says.ids.nbytes + self.says.starts.nbytes
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
    kernel = Kernel(begin, observe_and_score)

    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        self.predictor = Predictor(shape, options)
        super().__init__(shape, options, self.predictor.matched)
        self.keep = np.zeros((scores.ROWS, shape.total))
        self.keep[scores.OPTION] = {"ratio": 0, "most-visited": -1, "least-visited": 1}[options.keep]
        score(self.predictor.says, self.keep, True, 0)

    def end_request(self, seat: int) -> None:
        """Learn the request."""
        self.predictor.learn(seat)


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
    kernel = Kernel(begin, observe, fetch)

    def __init__(self, shape: Shape, options: EamcOptions, predictor: Predictor | None = None) -> None:
        self.predictor = predictor or Predictor(shape, options)
        super().__init__(shape, options, self.predictor.matched)
        self.observes = predictor is None

    @classmethod
    def beside(cls, keeper: RetentionPolicy) -> "EamcPrefetcher":
        """Return the other half of a retention `eamc`: it reads what that one has matched."""
        assert isinstance(keeper, EamcRetention)
        return cls(keeper.shape, keeper.predictor.options, keeper.predictor)

    def end_request(self, seat: int) -> None:
        """Learn the request (a prefetcher on its own)."""
        if self.observes:
            self.predictor.learn(seat)
