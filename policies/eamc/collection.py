"""The expert activation matrix collection (EAMC) of MoE-Infinity (arXiv 2401.14361v3): which past EAMs are kept.

Of a full collection a new EAM replaces the `nearest` stored one, by the same cosine as a match over all layers (v3);
the `least-used`, among the matched at the fewest events (the public code); the oldest (`fifo`); or, with `k-means`
(v1), none until `capacity` EAMs wait, unmatched: then all are grouped, and one stays of each of `capacity` groups.
Ties go to the oldest. An EAM that is all zero teaches nothing.
"""

import math
from dataclasses import dataclass

import numpy as np

from policies.core.policy import Float, Int, Options, Shape, bounded
from policies.eamc import matching
from policies.eamc.matching import ITERATION, NO_MATCH, REQUEST, SIZE, TIE, Bucket
from traces.errors import refuse, unknown

CHOICES = {
    "source": ("iteration", "request", "both"),
    "layers": ("all", "past", "future"),
    "cosine": ("flat", "rows"),
    "replacement": ("nearest", "least-used", "fifo", "k-means"),
    "decay": ("first", "none", "next"),
    "keep": ("ratio", "most-visited", "least-visited"),
}


@dataclass(frozen=True)
class EamcOptions(Options, policy="eamc"):
    """The defaults are the paper's where it is explicit (PAPER.md, *Defaults of eamc here*); InputError if unusable."""

    capacity: int = bounded(120, least=1, most=100_000)  # EAMs kept, for each phase if they are split
    eps: float = bounded(1e-8, least=0, below=math.inf)  # what an expert never seen is worth
    source: str = "iteration"  # matched: the iEAM of the current step, the rEAM so far, or both (the mean similarity)
    split: bool = True  # a collection for each phase, or one of prefill and decode counts together
    layers: str = "all"  # rows that count: all of the stored EAM, those up to the current layer, those after it
    cosine: str = "flat"  # of the flattened rows, or the mean over the rows of their cosines
    matches: int = 1  # nearest EAMs that are summed
    replacement: str = "nearest"  # what a full collection gives up: see above
    threshold: float = bounded(0.0, least=-1, below=1)  # what a candidate's ratio is above; -1: all are
    depth: int = bounded(0, least=0)  # layers ahead that are prefetched; 0: all later ones
    decay: str = "first"  # of the keep score: from the first layer on, none, or with the distance to the next use
    keep: str = "ratio"  # what goes: the least ratio (Algorithm 1), or the most or least visited
    collection: str = ""  # file of `moe-sim eamc build` to start from; none: empty

    def __post_init__(self) -> None:
        super().__post_init__()
        for option, known in CHOICES.items():
            if getattr(self, option) not in known:
                raise unknown(f"{option} of eamc", getattr(self, option), known)
        some, ahead = 1 <= self.matches <= self.capacity, self.layers == "future" and self.source != "request"
        weighs = self.keep != "ratio" and self.decay != "first"
        refuse(
            (not some, f"eamc needs matches of 1 to its capacity, {self.capacity}, not {self.matches}"),
            (
                ahead,
                "eamc matches layers=future with source=request only: the iEAM has no rows after the current layer",
            ),
            (weighs, f"eamc:keep={self.keep} has no use for decay={self.decay}, which weighs ratios"),
        )


class Collection:
    """An EAMC of at most `capacity` EAMs, and the running requests against it (`bucket`, see matching.py)."""

    def __init__(self, shape: Shape, options: EamcOptions) -> None:
        L, total, C, batch_slots = shape.layers, shape.total, options.capacity, shape.batch_slots
        self.shape = shape
        self.options = options
        self.waiting: list[Int] = []  # of k-means, in order: [L*E] each
        self.bucket = Bucket(
            eams=np.zeros((C, total), np.int64),
            columns=np.zeros((total, C), np.int64),
            inverse=np.zeros((L, C)),
            born=np.zeros(C, np.int64),
            uses=np.zeros(C, np.int64),
            eam=np.zeros((batch_slots, 2, total), np.int64),
            dots=np.zeros((batch_slots, 2, L, C), np.int64),
            squares=np.zeros((batch_slots, 2, L), np.int64),
            past=np.zeros((batch_slots, 2, C)),
            future=np.zeros((batch_slots, L, C)),
            scratch=np.zeros((2, C)),
            matched=np.full((batch_slots, options.matches), NO_MATCH),
            layer=np.zeros(batch_slots, np.int64),
            numbers=np.zeros(matching.NUMBERS, np.int64),
        )
        numbers = self.bucket.numbers
        numbers[matching.MATCHED + ITERATION] = options.source != "request"
        numbers[matching.MATCHED + REQUEST] = options.source != "iteration"
        numbers[matching.ROWS] = options.cosine == "rows"
        numbers[matching.BEFORE] = options.layers != "future"
        numbers[matching.AHEAD] = options.layers != "past"
        self._learned = 0

    @property
    def eams(self) -> Int:
        """What is stored, in places of no order: [C, L*E]."""
        return self.bucket.eams

    @property
    def size(self) -> int:
        return int(self.bucket.numbers[SIZE])

    @property
    def oldest_first(self) -> Int:
        """Places [size] of the entries in the order in which they were learned."""
        return np.argsort(self.bucket.born[: self.size])

    @property
    def memory_bytes(self) -> int:
        return sum(array.nbytes for array in (*self.bucket, *self.waiting))

    def learn(self, batch_slot: int = 0) -> None:
        """The request in `batch_slot` has ended: its rEAM is added, and a new one begins."""
        bucket = self.bucket
        bucket.matched[batch_slot] = NO_MATCH
        if bucket.eam[batch_slot, REQUEST].any():
            self.add(bucket.eam[batch_slot, REQUEST])
            bucket.eam[batch_slot, REQUEST] = 0
            bucket.dots[batch_slot, REQUEST] = 0
            bucket.squares[batch_slot, REQUEST] = 0

    def add(self, eam: Int, uses: int = 0) -> None:
        """Store an EAM [L*E], not all zero, in the place that the rule of replacement gives it."""
        if self.size < self.options.capacity:
            self.bucket.numbers[SIZE] += 1
            self._place(self.size - 1, eam, uses)
        elif self.options.replacement == "k-means":
            self.waiting.append(eam.copy())
            if len(self.waiting) == self.options.capacity:
                self._group()
        else:
            self._place(self._replaced_by(eam), eam, uses)

    def _replaced_by(self, eam: Int) -> int:
        age = self.bucket.born
        if self.options.replacement == "least-used":
            return int(np.lexsort((age, self.bucket.uses))[0])
        if self.options.replacement == "fifo":
            return int(np.argmin(age))
        near = similarities(self.eams, eam, self.shape.layers if self.options.cosine == "rows" else 1)
        tied = np.flatnonzero(near >= near.max() * (1 - TIE))
        return int(tied[np.argmin(age[tied])])

    def _place(self, entry: int, eam: Int, uses: int) -> None:
        bucket = self.bucket
        self.eams[entry] = bucket.columns[:, entry] = eam
        norms = np.sqrt(self._counted_squares(eam))
        bucket.inverse[:, entry] = np.divide(1.0, norms, out=np.zeros(len(norms)), where=norms > 0)
        for batch_slot in range(self.shape.batch_slots):  # others that run now resemble another EAM at this entry
            rows = self.shape.layers, self.shape.experts
            products = bucket.eam[batch_slot].reshape(2, *rows) * eam.reshape(rows)
            bucket.dots[batch_slot, :, :, entry] = products.sum(axis=2)
        self._learned += 1
        bucket.born[entry], bucket.uses[entry] = self._learned, uses

    def _counted_squares(self, eam: Int) -> Int:
        """Squared norms [L] of what a match at each layer counts of a stored EAM."""
        rows: Int = np.square(eam).reshape(self.shape.layers, -1).sum(axis=1)
        if self.options.cosine == "rows":
            return rows
        upto: Int = np.cumsum(rows)
        counted: dict[str, Int] = {"all": np.full_like(rows, rows.sum()), "past": upto, "future": rows.sum() - upto}
        return counted[self.options.layers]

    def _group(self) -> None:
        """K-means over the stored and the waiting: one of each group stays, in the order in which they came."""
        order = self.oldest_first
        eams, uses = np.vstack([self.eams[order], *self.waiting]), self.bucket.uses[order].tolist()
        stay = representatives(eams.reshape(len(eams), self.shape.layers, -1), self.options.capacity)
        self.waiting.clear()
        self.bucket.numbers[SIZE] = 0
        for i in stay.tolist():
            self.add(eams[i], uses[i] if i < len(uses) else 0)


def similarities(eams: Int, eam: Int, rows: int) -> Float:
    """Cosines [n] of EAMs [n, L*E] with one: the mean over `rows` rows (1: flattened), 0 of a row of zeros."""
    ours, theirs = eams.reshape(len(eams), rows, -1), eam.reshape(rows, -1)
    dots = np.einsum("nrx,rx->nr", ours, theirs)
    norms = np.sqrt(np.einsum("nrx,nrx->nr", ours, ours)) * np.sqrt(np.einsum("rx,rx->r", theirs, theirs))
    cosines: Float = np.divide(dots, norms, out=np.zeros(dots.shape), where=norms > 0).mean(axis=1)
    return cosines


# K-means over EAMs as MoE-Infinity's first version builds its collection (arXiv 2401.14361v1): who stands for whom. The
# distance is D = 1 - mean over layers of the cosine of the rows, so EAMs count with their rows scaled to norm 1 and a
# centre is the sum of its members with its rows scaled likewise, which is the matrix nearest to them all (spherical
# K-means); a row of zeros has the cosine 0 with anything. The start is stated, hence the outcome too.

ROUNDS = 100


def representatives(eams: Int, groups: int) -> Int:
    """Ascending places of the EAMs that stand for `groups` groups: of each group the member nearest its centre.

    eams: [n, L, E]; the centres start at the first `groups` of them and move until no EAM changes its group, at most
    ROUNDS times. Equal distances (within TIE) go to the first group, and to the first member. A group that all have
    left, as where two EAMs were alike, belongs to none: then there are fewer.
    """
    n = len(eams)
    units = scaled(eams.astype(np.float64)).reshape(n, -1)
    centres = units[:groups].copy()
    group = np.full(n, -1)
    for _ in range(ROUNDS):
        near = units @ centres.T
        before, group = group, _first_greatest(near)
        if np.array_equal(before, group):
            break
        for g in np.unique(group):
            centres[g] = scaled(units[group == g].reshape(-1, *eams.shape[1:]).sum(axis=0)).ravel()
    chosen = [(members := np.flatnonzero(group == g))[_first_greatest(near[members, g])] for g in np.unique(group)]
    return np.sort(np.array(chosen, np.int64))


def scaled(matrices: Float) -> Float:
    """Every row [..., E] divided by its norm; zeros stay."""
    norms = np.linalg.norm(matrices, axis=-1, keepdims=True)
    scaled: Float = np.divide(matrices, norms, out=np.zeros_like(matrices), where=norms > 0)
    return scaled


def _first_greatest(values: Float) -> Int:
    """The first place along the last axis that ties with the greatest."""
    places: Int = np.argmax(values >= values.max(axis=-1, keepdims=True) * (1 - TIE), axis=-1)
    return places
