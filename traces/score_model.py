"""Synthetic routing: each expert has a score for each token, and the k highest are chosen.

A score of variance 1 is the expert's popularity in its layer, normal terms that other tokens share (of the request's
cluster, of a run of requests, of the request, of the token's kind, of passages of several lengths, which end at
random), and noise. `traces.fit` finds popularities and shares of the variance for a real trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from traces.schema import TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace, in_turn, listed

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

PASSAGES = np.array([4 / 3, 16 / 3, 64 / 3, 256 / 3, 1024 / 3])  # mean lengths of passages, in tokens
RUN_GOES_ON = 0.6  # probability that a request is of the run of the request before
OPENING_SHARE = 0.99  # of the variance of a score, what the common first tokens of requests share
ROWS = 256  # tokens whose scores are held at a time

CLUSTER, RUN, REQUEST, KIND, PASSAGE = 0, 1, 2, 3, 4
"""Places in `ScoreModel.share`; the passages are the last."""


@dataclass(frozen=True)
class Lengths:
    """Requests whose lengths and clusters stand for those of a synthetic trace: [R] each."""

    prompt_tokens: NDArray[np.int64]  # -1: unknown
    prefill_rows: NDArray[np.int64]
    decode_rows: NDArray[np.int64]
    cluster: NDArray[np.int64]  # numbers from 0
    names: tuple[str, ...]  # of the clusters

    @property
    def stay(self) -> float:
        """The share of the requests that follow one of their own cluster."""
        return float((self.cluster[1:] == self.cluster[:-1]).mean()) if len(self.cluster) > 1 else 1.0

    def of_length(self, prompt: int | None, decode: int | None) -> "Lengths":
        """Return them with so many tokens in each request (None: as they are), without those left empty."""
        changed = self
        if prompt is not None:
            same = np.full_like(self.prefill_rows, prompt)
            changed = replace(changed, prompt_tokens=same, prefill_rows=same)
        if decode is not None:
            changed = replace(changed, decode_rows=np.full_like(self.decode_rows, decode))
        kept = changed.prefill_rows + changed.decode_rows > 0
        arrays = ("prompt_tokens", "prefill_rows", "decode_rows", "cluster")
        return replace(changed, **{name: getattr(changed, name)[kept] for name in arrays})

    def draw(self, requests: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """Return the numbers of `requests` of them: mostly one from the cluster of the one before, as often as here."""
        stay = self.stay
        repeat = sum((np.bincount(self.cluster) / len(self.cluster)) ** 2)
        jump = 1 - max(0.0, (stay - repeat) / (1 - repeat)) if repeat < 1 else 0.0  # a jump may end where it began
        drawn = np.empty(requests, np.int64)
        for i in range(requests):
            if i == 0 or rng.random() < jump:
                drawn[i] = rng.integers(len(self.cluster))
            else:
                drawn[i] = rng.choice(np.flatnonzero(self.cluster == self.cluster[drawn[i - 1]]))
        return drawn


@dataclass(frozen=True)
class ScoreModel:
    """Parameters of synthetic routing. The first axis of arrays is the phase, PREFILL or DECODE."""

    top_k: int
    mean: Floats  # [2, L, E] popularity: the mean scores of a layer's experts, descending
    share: Floats  # [2, L, terms] of the variance of a score, below 1 together; see CLUSTER to PASSAGE
    kinds: Floats  # [kinds] how often each kind of token occurs, 1 together
    opening: Floats  # [tokens] probability that a request's first, second, ... token is the common one
    lengths: Lengths

    def scaled(self, layers: int, experts: int, top_k: int) -> "ScoreModel":
        """Return the parameters for another shape: a layer behaves as the one at the same relative depth."""
        depth = ((np.arange(layers) + 0.5) / layers * self.mean.shape[1]).astype(np.int64)
        old, new = ((np.arange(n) + 0.5) / n for n in (self.mean.shape[2], experts))
        mean = np.array([[np.interp(new, old, of_layer) for of_layer in phase[depth]] for phase in self.mean])
        return replace(self, top_k=top_k, mean=mean, share=self.share[:, depth])

    def generate(self, meta: TraceMeta, requests: int, seed: int) -> Trace:
        """Return a trace of so many requests of the model of `meta`; more requests begin with those of fewer."""
        rng = np.random.default_rng(seed)
        L, E = self.mean.shape[1:]
        order = np.argsort(rng.random((L, E)), axis=1)
        clusters = self._centred(np.bincount(self.lengths.cluster) / len(self.lengths.cluster), rng)
        kinds = self._centred(self.kinds, rng)
        opening = rng.standard_normal((len(self.opening), L, E), np.float32)
        drawn = self.lengths.draw(requests, rng)
        run = np.cumsum(np.random.default_rng([seed, 1]).random(requests) >= RUN_GOES_ON)
        prefill, decode = self.lengths.prefill_rows[drawn], self.lengths.decode_rows[drawn]
        ids = np.empty((int((prefill + decode).sum()), L, self.top_k), meta.id_type)
        offsets = np.concatenate([[0], np.cumsum(prefill + decode)]).astype(np.int64)
        for r, source in enumerate(drawn):
            own = np.random.default_rng([seed, r, 0])
            fixed = self._amplitude(CLUSTER) * clusters[self.lengths.cluster[source]]
            fixed += self._amplitude(RUN) * np.random.default_rng([seed, run[r], 1]).standard_normal((L, E), np.float32)
            fixed += self._amplitude(REQUEST) * own.standard_normal((L, E), np.float32)
            for first, ranks in self._tokens(fixed, kinds, opening, int(prefill[r]), int(decode[r]), own):
                rows = slice(offsets[r] + first, offsets[r] + first + len(ranks))
                ids[rows] = np.sort(np.take_along_axis(order[None], ranks, axis=2), axis=2)
        prompt = self.lengths.prompt_tokens[drawn]
        columns, before = in_turn(np.diff(offsets), prefill), np.where(prefill > 0, 0, np.maximum(prompt, 0))
        columns["position"] += np.repeat(before, np.diff(offsets)).astype(np.uint32)
        names = [self.lengths.names[cluster] for cluster in self.lengths.cluster[drawn]]
        prompts, outputs = [None if p < 0 else int(p) for p in prompt], np.where(decode > 0, decode + 1, 0)
        listing = listed([str(r) for r in range(requests)], "synthetic", names, prompts, outputs, "synthetic")
        return Trace(name="synthetic", meta=meta, requests=listing, experts=ids, **columns)

    def _tokens(
        self, fixed: Singles, kinds: Singles, opening: Singles, prefill: int, decode: int, rng: np.random.Generator
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yield (first token, int64[tokens, L, k] ranks of the experts chosen) of a request, piece by piece.

        fixed: float32[2, L, E], what all its tokens of a phase share; kinds: float32[kinds, L, E]; opening:
        float32[tokens, L, E].
        """
        L, E = self.mean.shape[1:]
        mean = self.mean.astype(np.float32)
        noise = np.sqrt(1 - self.share.sum(axis=2, keepdims=True)).astype(np.float32)
        cumulated = np.cumsum(self.kinds)[:-1]
        common = np.flatnonzero(rng.random(len(self.opening)) < self.opening)
        passages = [rng.standard_normal((1, L, E), np.float32) for _ in PASSAGES]
        for phase, start, end in ((PREFILL, 0, prefill), (DECODE, prefill, prefill + decode)):
            for first in range(start, end, ROWS):
                n = min(ROWS, end - first)
                alone = rng.standard_normal((n, L, E), np.float32)
                score = mean[phase] + fixed[phase] + noise[phase] * alone
                score += self._amplitude(KIND)[phase] * kinds[np.searchsorted(cumulated, rng.random(n), side="right")]
                for i, length in enumerate(PASSAGES):
                    here = np.cumsum(rng.random(n) < 1 / length)
                    drawn = rng.standard_normal((int(here[-1]), L, E), np.float32)
                    terms = np.concatenate([passages[i], drawn])
                    score += self._amplitude(PASSAGE + i)[phase] * terms[here]
                    passages[i] = terms[-1:]
                here = common[(common >= first) & (common < first + n)]
                own = np.sqrt(1 - OPENING_SHARE) * alone[here - first]
                score[here - first] = mean[phase] + np.sqrt(OPENING_SHARE) * opening[here] + own
                yield first, np.argpartition(-score, self.top_k - 1, axis=2)[..., : self.top_k]

    def _amplitude(self, term: int) -> Singles:
        """Return float32[2, L, 1], the standard deviation of a term of the score."""
        return np.sqrt(self.share[..., term, None]).astype(np.float32)

    def _centred(self, weights: Floats, rng: np.random.Generator) -> Singles:
        """Return float32[weights, L, E] of variance 1 whose mean, weighted, is 0, so that popularity stays."""
        terms = rng.standard_normal((len(weights), *self.mean.shape[1:]), np.float32)
        terms -= np.tensordot(weights, terms, 1).astype(np.float32)
        spread = np.sqrt(np.tensordot(weights, terms**2, 1).mean())
        return terms if len(weights) == 1 else (terms / spread).astype(np.float32)


quantile = np.vectorize(NormalDist().inv_cdf, otypes=[np.float64])
"""The inverse of the standard normal distribution function, for each element."""
