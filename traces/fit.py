"""Fit the parameters of `traces.score_model` to a trace.

Everything is measured as overlap: the share of a token's experts that another token has too, by layer. Overlaps of
tokens that are near, of one request, of one cluster or unrelated are each turned into the correlation of scores that
gives them. Synthetic traces then correct what this leaves (`ROUNDS`).
"""

from dataclasses import astuple, dataclass, replace

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.score_model import (
    CLUSTER,
    KIND,
    PASSAGE,
    PASSAGES,
    REQUEST,
    RUN,
    RUN_GOES_ON,
    Lengths,
    ScoreModel,
    quantile,
)
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

LAGS = 2 ** np.arange(10)  # distances, in tokens, at which the overlap of tokens is measured
PAIRS = 8_000  # pairs of tokens measured for each distance, at most
FEWEST = 50  # pairs of tokens for a distance to be measured
REQUESTS = 2_000  # requests that are fitted to, at most; more are thinned out evenly
KINDS = 500  # kinds of tokens
OPENING = 64  # first tokens of requests that may be common, at most
ROUNDS = 4  # synthetic traces that are made and measured to correct the parameters
PILOT_TOKENS = 40_000  # of such a trace, about
SAMPLES = 1_000  # tokens drawn to learn what popularity and correlation give; of popularity more, where experts are few
GRID = np.linspace(0, 1, 11)  # correlations
MOST = 0.98  # of the variance of a score that is not noise

Floats = NDArray[np.float64]
Int = NDArray[np.int64]


@dataclass(frozen=True)
class Measured:
    """What one phase of a trace shows."""

    chosen: Floats  # [L, E] share of the tokens that chose an expert, descending in each layer
    at_lag: Floats  # [L, lags] overlap of two tokens of a request; NaN where too few are that far apart
    in_cluster: Floats  # [L] overlap of tokens of two requests of a cluster; NaN if no cluster has two
    neighbours: Floats  # [L] overlap of tokens of two requests that follow each other; NaN if there is one


def fit(trace: Trace) -> ScoreModel:
    """Return parameters of synthetic routing that behaves as `trace`, which is `thinned`. Raise InputError."""
    phases = [phase for phase in (PREFILL, DECODE) if (trace.phase == phase).any()]
    if len(trace.experts) < 2:
        raise InputError(f"{trace.name} holds no sequences of tokens: no synthetic trace can be fitted to it")
    if not all(trace.eams(phase).any(axis=(0, 2)).all() for phase in phases):
        raise InputError(f"{trace.name} has layers without routing in a phase: nothing can be fitted to it")
    cluster, prompt = _k_means(trace), trace.requests["prompt_tokens"].fillna(-1).to_numpy(np.int64)
    names = tuple(f"cluster-{number}" for number in range(int(cluster.max()) + 1))
    lengths = Lengths(prompt, trace.prompts, np.diff(trace.offsets) - trace.prompts, cluster, names)
    real = [measure(trace, phase, lengths.cluster) for phase in phases]
    mean = [popularity(each.chosen, trace.top_k) for each in real]
    tables = [overlap_table(each, trace.top_k) for each in mean]
    targets = [_Correlations.of(each, table) for each, table in zip(real, tables, strict=True)]
    repeat, overlap = _kinds(trace)
    kind = np.mean([correlation(table, overlap[:, None])[:, 0] for table in tables], axis=0)
    wanted = list(targets)
    model = ScoreModel(
        top_k=trace.top_k,
        mean=_by_phase(phases, mean),
        share=_by_phase(phases, [each.shares(kind, lengths.stay) for each in wanted]),
        kinds=_zipf(repeat),
        opening=_opening(trace),
        lengths=lengths,
    )
    requests = min(1 + PILOT_TOKENS * len(trace.requests) // len(trace.experts), 2 * len(trace.requests))
    for round_ in range(ROUNDS):
        pilot = model.generate(trace.meta, requests, seed=round_)
        cluster = np.array([lengths.names.index(task) for task in pilot.requests["task"]])
        for i, phase in enumerate(phases):
            if not (pilot.phase == phase).any():
                continue
            made = measure(pilot, phase, cluster)
            wanted[i] = wanted[i].corrected(targets[i], _Correlations.of(made, tables[i]))
            mean[i] = mean[i] + (_scores(real[i].chosen) - _scores(made.chosen))
        share = _by_phase(phases, [each.shares(kind, lengths.stay) for each in wanted])
        model = replace(model, mean=_by_phase(phases, mean), share=share)
    return model


def thinned(trace: Trace) -> Trace:
    """Return the trace with REQUESTS of its requests, evenly, if it has more."""
    if len(trace.requests) <= REQUESTS:
        return trace
    return trace.select(np.linspace(0, len(trace.requests) - 1, REQUESTS).astype(np.int64))


def measure(trace: Trace, phase: int, cluster: Int) -> Measured:
    """Measure one phase. cluster: int64[requests], the number of each request's cluster."""
    L, k = trace.layers, trace.top_k
    eams = trace.eams(phase)
    chosen = -np.sort(-eams.sum(axis=0), axis=1) * k
    at_lag = np.full((L, len(LAGS)), np.nan)
    for i, lag in enumerate(LAGS):
        second = _pairs(trace, phase, int(lag))
        if len(second) >= FEWEST:
            at_lag[:, i] = _overlaps(trace, second - lag, second).mean(axis=0)
    common, pairs = np.zeros(L), 0
    for number in np.unique(cluster):
        own = eams[cluster == number]
        common += (own.sum(axis=0) ** 2).sum(axis=1) - (own**2).sum(axis=(0, 2))
        of = own[:, 0].sum(axis=1)
        pairs += int(of.sum() ** 2 - (of**2).sum())
    tokens = eams[:, 0].sum(axis=1)
    follow = int((tokens[1:] * tokens[:-1]).sum())
    return Measured(
        chosen=chosen / np.maximum(chosen.sum(axis=1, keepdims=True), 1) * k,
        at_lag=at_lag,
        in_cluster=common * k / pairs if pairs else np.full(L, np.nan),
        neighbours=(eams[1:] * eams[:-1]).sum(axis=(0, 2)) * k / follow if follow else np.full(L, np.nan),
    )


def popularity(chosen: Floats, k: int) -> Floats:
    """Return mean scores [L, E] with which the k highest of scores of variance 1 are the share `chosen` [L, E]."""
    E = chosen.shape[1]
    noise = np.random.default_rng(0).standard_normal((max(SAMPLES, 100_000 // E), 1, E), np.float32)
    mean = _scores(chosen)
    for _ in range(10):
        mean += 0.7 * (_scores(chosen) - _scores(_chosen(mean + noise, k).mean(axis=0)))
    return mean


def overlap_table(mean: Floats, k: int) -> Floats:
    """Return the overlap [L, GRID] of tokens of mean scores [L, E] by their scores' correlation, by drawing tokens."""
    rng = np.random.default_rng(0)
    one, other = (rng.standard_normal((SAMPLES, *mean.shape), np.float32) for _ in range(2))
    first = _chosen(mean + one, k)
    both = [first & _chosen(mean + r * one + np.sqrt(1 - r**2) * other, k) for r in GRID]
    overlap = np.array([each.sum(axis=(0, 2)) for each in both]).T / (SAMPLES * k)
    return np.asarray(np.maximum.accumulate(overlap, axis=1))


def correlation(table: Floats, overlap: Floats) -> Floats:
    """Return the correlations [L, n] that give the overlaps [L, n]; NaN for NaN."""
    return np.array([np.interp(each, own, GRID) for each, own in zip(overlap, table, strict=True)])


@dataclass(frozen=True)
class _Correlations:
    """Correlations of scores that give a phase's overlaps, laid out as there."""

    at_lag: Floats
    in_cluster: Floats
    neighbours: Floats

    @staticmethod
    def of(measured: Measured, table: Floats) -> "_Correlations":
        pairs = correlation(table, np.stack([measured.in_cluster, measured.neighbours], axis=1))
        return _Correlations(correlation(table, measured.at_lag), pairs[:, 0], pairs[:, 1])

    def corrected(self, target: "_Correlations", made: "_Correlations") -> "_Correlations":
        """Return what to request, after requesting this made `made` instead of `target`."""
        each = zip(astuple(self), astuple(target), astuple(made), strict=True)
        return _Correlations(*(np.clip(np.where(np.isnan(m), own, own + t - m), 0, MOST) for own, t, m in each))

    def shares(self, kind: Floats, stay: float) -> Floats:
        """Return the terms' shares of the variance [L, terms]; kind: [L]; stay: share of requests after their own."""
        measured = ~np.isnan(self.at_lag[0])
        share = np.zeros((len(kind), PASSAGE + len(PASSAGES)))
        common, run = np.nan_to_num(self.in_cluster), np.zeros(len(kind))
        if measured.any():
            decay = (1 - 1 / PASSAGES) ** LAGS[measured, None]
            terms = _nonnegative(np.column_stack([np.ones(len(decay)), decay]), self.at_lag[:, measured])
            common = np.minimum(common, terms[:, 0])
            run = (np.nan_to_num(self.neighbours) - stay * common) / RUN_GOES_ON
            run = np.clip(run, 0, terms[:, 0] - common)
            share[:, REQUEST] = terms[:, 0] - common - run
            share[:, PASSAGE:] = terms[:, 1:]
        share[:, CLUSTER], share[:, RUN] = common, run
        share *= np.minimum(1, MOST / np.maximum(share.sum(axis=1, keepdims=True), MOST))
        share[:, KIND] = np.clip(np.minimum(kind, MOST - share.sum(axis=1)), 0, None)
        return share


def _by_phase(phases: list[int], values: list[Floats]) -> Floats:
    """Return the values of PREFILL and of DECODE, stacked; a phase that is not there is as the other one."""
    return np.stack([values[phases.index(phase) if phase in phases else 0] for phase in (PREFILL, DECODE)])


def _scores(chosen: Floats) -> Floats:
    """Return the mean scores with which a threshold of 0 lets the share `chosen` pass."""
    return np.asarray(quantile(np.clip(chosen, 2e-4, 1 - 2e-4)))


def _chosen(score: Floats, k: int) -> NDArray[np.bool_]:
    """Return bool[..., E], True at the k highest scores of each row."""
    E = score.shape[-1]
    return np.asarray(score >= np.partition(score, E - k, axis=-1)[..., E - k, None])


def _pairs(trace: Trace, phase: int, lag: int) -> Int:
    """Return rows whose row `lag` before is of the same request and phase, PAIRS of them at most."""
    request = np.repeat(np.arange(len(trace.requests)), np.diff(trace.offsets))
    here = trace.phase == phase
    second = np.flatnonzero((request[lag:] == request[:-lag]) & here[lag:] & here[:-lag]) + lag
    return second[:: 1 + len(second) // PAIRS]


def _overlaps(trace: Trace, first: Int, second: Int) -> Floats:
    """Return the overlap of rows `first` with rows `second`, [pairs, L]."""
    one, other = trace.experts[first], trace.experts[second]
    same = (one[..., None] == other[..., None, :]) & (one != trace.sentinel)[..., None]
    return np.asarray(same.sum(axis=(2, 3)) / trace.top_k)


def _kinds(trace: Trace) -> tuple[float, Floats]:
    """Return how often two tokens of different requests are of the same kind, and the overlap [L] of such tokens.

    If a share q of pairs overlaps highly, the skewness of the mean overlap is (1 - 2q) / sqrt(q (1 - q)).
    """
    rng = np.random.default_rng(0)
    first, second = rng.integers(len(trace.experts), size=(2, PAIRS))
    request = np.searchsorted(trace.offsets, np.stack([first, second]), side="right")
    apart = request[0] != request[1] if request[0].min() < request[0].max() else first != second
    overlap = _overlaps(trace, first[apart], second[apart])
    mean = overlap.mean(axis=1)
    spread = mean.std()
    if spread < 1e-9:
        return 1 / KINDS, overlap.mean(axis=0)
    skew = ((mean - mean.mean()) ** 3).mean() / spread**3
    repeat = min(max(0.5 * (1 - skew / np.sqrt(skew**2 + 4)), 1.5 / KINDS), 0.5)
    return repeat, overlap[mean >= np.quantile(mean, 1 - repeat)].mean(axis=0)


def _opening(trace: Trace) -> Floats:
    """Return how likely requests' first tokens are the common ones: two have one in common with its square."""
    rng, probabilities = np.random.default_rng(0), []
    rows = np.arange(len(trace.experts))
    unrelated = _overlaps(trace, rng.choice(rows, PAIRS), rng.choice(rows, PAIRS)).mean()
    for place in range(OPENING):
        longer = trace.offsets[:-1][np.diff(trace.offsets) > place] + place
        if len(longer) < 2:  # nothing to compare with
            break
        longer = rng.permutation(longer)
        overlap = _overlaps(trace, longer, np.roll(longer, 1)).mean()
        probability = np.sqrt(max(0.0, (overlap - unrelated) / max(1 - unrelated, 1e-9)))
        if probability < 0.5:
            break
        probabilities.append(probability)
    return np.array(probabilities)


def _zipf(repeat: float) -> Floats:
    """Return probabilities of KINDS kinds, falling by a power law, with which two tokens are of one kind so often."""
    low, high = 0.0, 5.0
    for _ in range(50):
        power = (low + high) / 2
        weights = np.arange(1, KINDS + 1) ** -power
        weights /= weights.sum()
        low, high = (power, high) if (weights**2).sum() < repeat else (low, power)
    return np.asarray(weights)


def _nonnegative(basis: Floats, values: Floats) -> Floats:
    """Return x [L, terms], none below 0, for which x @ basis.T is nearest to `values` [L, n] (Lee and Seung 2001)."""
    x = np.full((len(values), basis.shape[1]), 0.1)
    wanted = np.clip(values, 0, None) @ basis
    for _ in range(2_000):
        x *= wanted / np.maximum(x @ (basis.T @ basis), 1e-12)
    return x


def _k_means(trace: Trace) -> Int:
    """Return a cluster for each request, of sqrt(R / 2) by the cosine of EAMs, numbered without gaps."""
    eams = (trace.eams(PREFILL) + trace.eams(DECODE)).reshape(len(trace.requests), -1).astype(np.float32)
    eams /= np.maximum(np.linalg.norm(eams, axis=1, keepdims=True), 1e-9)
    count = max(1, round(np.sqrt(len(eams) / 2)))
    centres = eams[np.random.default_rng(0).choice(len(eams), count, replace=False)]
    for _ in range(20):
        nearest = np.argmax(eams @ centres.T, axis=1)
        for number in np.unique(nearest):
            centre = eams[nearest == number].sum(axis=0)
            centres[number] = centre / max(float(np.linalg.norm(centre)), 1e-9)
    return np.unique(nearest, return_inverse=True)[1]
