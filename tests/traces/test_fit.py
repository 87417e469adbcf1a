"""A synthetic trace behaves as the trace that it was fitted to, and has the shape that it was asked for."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import Int, lru_misses
from sim.analysis import Accesses, belady_misses
from tests.support.same import assert_same
from tests.support.strategies import traces
from traces import DECODE, PREFILL, InputError, Trace, TraceMeta, demo_trace, statistics, write_trace
from traces.fit import LAGS, fit, measure, overlap_table, popularity
from traces.importers import import_dump
from traces.score_model import CLUSTER, KIND, PASSAGE, PASSAGES, REQUEST, RUN, RUN_GOES_ON, Lengths, ScoreModel
from traces.synthetic import synthetic

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def shape(layers: int, experts: int, top_k: int) -> TraceMeta:
    names = tuple(f"layers.{layer}" for layer in range(layers))
    return TraceMeta("synthetic", layers, experts, top_k, names, mode="synthetic")


def lengths(requests: int, prefill: int, decode: int, clusters: int = 2) -> Lengths:
    return Lengths(
        prompt_tokens=np.full(requests, prefill),
        prefill_rows=np.full(requests, prefill),
        decode_rows=np.full(requests, decode),
        cluster=np.arange(requests) % clusters,
        names=tuple(f"cluster-{number}" for number in range(clusters)),
    )


def model(L: int, E: int, k: int, of: Lengths, **shares: float) -> ScoreModel:
    """Flat popularity, and the shares of the variance that are named."""
    share = np.zeros((2, L, PASSAGE + len(PASSAGES)))
    for name, value in shares.items():
        share[..., {"cluster": CLUSTER, "request": REQUEST, "run": RUN, "kind": KIND, "passage": PASSAGE + 1}[name]] = (
            value
        )
    return ScoreModel(k, np.zeros((2, L, E)), share, np.full(4, 0.25), np.zeros(0), of)


def hit_rates(trace: Trace) -> dict[str, np.ndarray]:
    """LRU's and Belady's, one cache for all layers, at 25% and 50% of the experts; prefill token by token."""
    trace = trace if trace.phases == "decode" else trace.as_decode()
    accesses = Accesses.of(map(trace.steps, range(len(trace.requests))), trace.layers, trace.num_experts)
    slots = np.array([accesses.total // 4, accesses.total // 2])
    found: dict[str, Callable[..., Int]] = {"lru": lru_misses, "belady": belady_misses}
    N = len(accesses.experts)
    return {name: 1 - misses(accesses.experts, accesses.total)[slots] / N for name, misses in found.items()}


@settings(max_examples=30, deadline=None)
@given(
    shape_=st.sampled_from([(1, 1, 1), (2, 3, 3), (3, 8, 2), (2, 300, 4), (5, 64, 6)]),
    of=st.sampled_from([lengths(3, 4, 5), lengths(2, 0, 300), lengths(4, 3, 0, 1), lengths(1, 0, 1, 1)]),
    requests=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_each_token_has_k_experts_ascending_and_the_trace_is_valid(
    shape_: tuple[int, int, int], of: Lengths, requests: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    L, E, k = shape_
    meta = shape(L, E, k)
    trace = model(2, 4, 1, of, request=0.3, passage=0.3).scaled(L, E, k).generate(meta, requests, seed)
    assert trace.experts.shape == (len(trace.phase), L, k)
    assert (np.diff(trace.experts.astype(np.int64), axis=2) > 0).all()
    assert trace.experts.max() < E
    folder = tmp_path_factory.mktemp("trace") / "made"
    write_trace(trace, folder)
    assert_same(trace, Trace.read(folder))
    again = model(2, 4, 1, of, request=0.3, passage=0.3).scaled(L, E, k).generate(meta, requests, seed)
    np.testing.assert_array_equal(trace.experts, again.experts)


@settings(max_examples=15, deadline=None)
@given(traces(), st.integers(1, 4))
def test_whatever_a_trace_holds_is_fitted_to_or_refused(real: Trace, requests: int) -> None:
    try:
        fitted = fit(real)
    except InputError:
        phases = [phase for phase in (PREFILL, DECODE) if (real.phase == phase).any()]
        assert len(real.experts) < 2 or not all(real.eams(phase).any(axis=2).any(axis=0).all() for phase in phases)
        return
    assert (fitted.share >= 0).all()
    assert (fitted.share.sum(axis=2) < 1).all()
    made = fitted.generate(real.meta, requests, seed=0)
    assert made.experts.size == 0 or (np.diff(made.experts.astype(np.int64), axis=2) > 0).all()
    assert made.experts.size == 0 or made.experts.max() < real.num_experts


def test_scores_that_share_nothing_choose_at_random() -> None:
    trace = model(4, 16, 4, lengths(40, 0, 200)).generate(shape(4, 16, 4), 40, seed=0)
    stats = statistics(trace)["decode"]
    assert stats.reuse.share == pytest.approx(0.25, abs=0.01)
    assert stats.similarity.within_task == pytest.approx(stats.similarity.across_tasks, abs=0.01)


def test_what_a_cluster_shares_makes_its_requests_similar_and_reuse_as_large_as_their_overlap() -> None:
    trace = model(4, 16, 4, lengths(40, 0, 200), cluster=0.5).generate(shape(4, 16, 4), 40, seed=0)
    cluster = np.array([int(task[-1]) for task in trace.requests["task"]])
    found = measure(trace, DECODE, cluster)
    wanted = overlap_table(np.zeros((4, 16)), 4)[:, 5]
    np.testing.assert_allclose(found.in_cluster.mean(), wanted.mean(), atol=0.02)
    np.testing.assert_allclose(found.at_lag[:, :6].mean(), wanted.mean(), atol=0.02)
    stats = statistics(trace)["decode"].similarity
    assert stats.within_task is not None
    assert stats.across_tasks is not None
    assert stats.within_task > stats.across_tasks + 0.1


def test_neighbouring_requests_share_a_run_and_distant_ones_nothing() -> None:
    trace = model(4, 16, 4, lengths(300, 0, 20), run=0.8).generate(shape(4, 16, 4), 300, seed=0)
    found = measure(trace, DECODE, np.arange(300)).neighbours.mean()
    same = overlap_table(np.zeros((4, 16)), 4)[:, 8].mean()
    assert found == pytest.approx(0.25 + RUN_GOES_ON * (same - 0.25), abs=0.03)
    apart = trace.eams(DECODE).astype(float)
    assert (apart[:-50] * apart[50:]).sum() / (250 * 4 * 20**2 * 4) == pytest.approx(0.25, abs=0.01)


def test_passages_make_near_tokens_agree_and_far_ones_not() -> None:
    trace = model(4, 16, 4, lengths(40, 0, 200), passage=0.8).generate(shape(4, 16, 4), 40, seed=0)
    by_lag = measure(trace, DECODE, np.zeros(40, np.int64)).at_lag.mean(axis=0)
    assert by_lag[0] > 0.5
    assert by_lag[LAGS == 64] == pytest.approx(0.25, abs=0.02)
    assert (np.diff(by_lag[:5]) < 0).all()


def test_popularity_gives_the_shares_of_tokens_that_it_was_fitted_to() -> None:
    chosen = np.array([[0.9, 0.6, 0.3, 0.1, 0.1], [0.4] * 5])
    mean = popularity(chosen, 2)
    noise = np.random.default_rng(1).standard_normal((20_000, 1, 5))
    best = np.argsort(-(mean + noise), axis=2)[..., :2]
    found = np.array([[np.mean((best[:, layer] == e).any(axis=1)) for e in range(5)] for layer in range(2)])
    np.testing.assert_allclose(found, chosen, atol=0.02)


def test_a_trace_of_both_phases_has_the_reuse_of_each() -> None:
    real = Trace.read(demo_trace())
    made = fit(real).generate(real.meta, 64, seed=5)
    for phase in ("prefill", "decode"):
        a, b = (statistics(trace)[phase] for trace in (real, made))
        assert b.reuse.share == pytest.approx(a.reuse.share, abs=0.02)
        assert b.popular == pytest.approx(a.popular, abs=0.03)
        assert b.activated == pytest.approx(a.activated, abs=0.06)


def test_working_sets_are_the_distinct_experts_of_the_last_tokens() -> None:
    trace = synthetic(3, 40, 2, 8, 2, seed=1, prompt_tokens=3)
    for place, window in ((0, 1), (2, 4), (4, 16)):
        held, hits, lookups, tokens = 0, 0, 0, 0
        for a, b in zip(trace.offsets, trace.offsets[1:], strict=False):
            rows = trace.experts[a:b][trace.phase[a:b] == DECODE]
            for now in range(len(rows)):
                for layer in range(2):
                    before = set(rows[max(0, now - window) : now, layer].ravel())
                    hits += len(before & set(rows[now, layer]))
                    held += len(set(rows[max(0, now - window + 1) : now + 1, layer].ravel()))
                    lookups += 2
                tokens += 1
        found = statistics(trace)["decode"].working_sets
        assert found is not None
        assert found[place].tokens == window
        assert found[place].hits == pytest.approx(hits / lookups)
        assert found[place].experts == pytest.approx(held / tokens / 16)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.exists(), reason="needs the real traces in ../shared/traces")
@pytest.mark.parametrize("dump", ["gpt-oss-20b-decode", "deepseek-v2-lite-prefill"])
def test_caches_hit_a_synthetic_trace_as_often_as_the_real_one(dump: str) -> None:
    real, _ = import_dump(SHARED / f"{dump}.npz", SHARED / f"{dump}.json")
    made = fit(real).generate(real.meta, len(real.requests), seed=1)
    wanted, found = hit_rates(real), hit_rates(made)
    for policy in ("lru", "belady"):
        np.testing.assert_allclose(found[policy], wanted[policy], atol=0.03)
    phase = "decode" if real.phases == "decode" else "prefill"
    a, b = (statistics(trace)[phase] for trace in (real, made))
    assert b.activated == pytest.approx(a.activated, abs=0.05)
    assert b.reuse.share == pytest.approx(a.reuse.share, abs=0.01)
    assert b.popular == pytest.approx(a.popular, abs=0.03)
