"""SRP and SCH against their definitions, spelled out, and against numbers that their paper prints."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.analysis.locality import locality, sch, srp
from traces import Trace
from traces.importers import import_dump
from traces.synthetic import synthetic

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def made(chosen: list[list[int]], experts: int) -> Trace:
    """One request of one layer, a token for each entry, all with as many experts."""
    array = np.array(chosen, np.uint8)[:, None, :]
    trace = synthetic(1, len(chosen), 1, experts, array.shape[2], seed=0)
    return replace(trace, experts=array)


def routed(top_k: int, experts: int, most: int = 8) -> st.SearchStrategy[list[list[int]]]:
    token = st.permutations(range(experts)).map(lambda order: list(order[:top_k]))
    return st.lists(token, min_size=1, max_size=most)


def best_f1(chosen: list[list[int]], m: int, experts: int) -> float:
    """Over every router that decides once for each segment and expert (equation 3)."""
    f = [
        sum(expert in token for token in chosen[p : p + m])
        for p in range(len(chosen) - m + 1)
        for expert in range(experts)
    ]
    return max(
        2 * sum(r * n for r, n in zip(router, f, strict=True)) / (m * sum(router) + sum(f))
        for router in product((0, 1), repeat=len(f))
    )


@settings(deadline=None)
@given(routed(1, 3, most=4), st.integers(1, 4))
def test_srp_is_the_best_f1_of_all_segment_routers(chosen, m):
    found, _ = srp(made(chosen, 3), m)
    assert found == (None if m > len(chosen) else pytest.approx(best_f1(chosen, m, 3)))


def test_srp_is_one_where_routing_never_changes_and_the_router_needs_no_more_experts():
    assert srp(made([[0, 2]] * 9, 4), 4) == (1.0, 1.0)


def test_srp_of_alternating_experts_needs_both_all_the_time():
    """Segments of 2 hold each of both once: activating both has precision 1/2 and recall 1."""
    found, ratio = srp(made([[0], [1]] * 6, 3), 2)
    assert found == pytest.approx(2 / 3)
    assert ratio == 2


def segment_cache(chosen: list[list[int]], m: int, slots: int) -> float:
    """A cache of one size, as the docstring of `sch` has it, with no list over all sizes."""
    held: set[int] = set()
    last: dict[int, int] = {}
    hits = clock = 0
    for t, token in enumerate(chosen):
        coming = [expert for later in chosen[t : t + m] for expert in later]
        before = set(held)
        for expert in sorted(token):
            if expert in last:
                hits += expert in before
            else:
                hits += len(last) < slots
            coming.remove(expert)
            clock += 1
            last[expert] = clock
            if expert not in held:
                if len(held) == slots:
                    held.remove(min(held, key=lambda other: (coming.count(other), last[other])))
                held.add(expert)
    return hits / sum(map(len, chosen))


@settings(deadline=None)
@given(st.integers(1, 3).flatmap(lambda k: routed(k, 6, most=14)), st.integers(1, 6))
def test_sch_is_the_hit_rate_of_a_cache_of_each_size_that_counts_ahead(chosen, m):
    rates = sch(made(chosen, 6), m, 6)
    assert rates.tolist() == pytest.approx([0, *(segment_cache(chosen, m, slots) for slots in range(1, 7))])


@given(routed(2, 6, most=20), st.integers(1, 6), st.integers(1, 5))
def test_sch_of_small_caches_needs_no_room_for_all(chosen, m, slots):
    trace = made(chosen, 6)
    assert sch(trace, m, slots).tolist() == pytest.approx(sch(trace, m, 6)[: slots + 1].tolist())


def test_metrics_of_a_trace_too_short_for_a_segment_are_none():
    few = locality(made([[0], [1]], 3), (2, 3))
    assert few[0].srp is not None
    assert (few[1].srp, few[1].size_ratio) == (None, None)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the real traces in ../shared/traces")
@pytest.mark.parametrize(("name", "printed"), [("deepseek-v2-lite-prefill", 0.3792), ("mixtral-8x7b", 0.4936)])
def test_srp_of_real_models_is_near_what_the_paper_prints(name, printed):
    """Table 1, m = 16, other texts than ours: within two points; the other models of the table are 0.19 to 0.78."""
    meta = SHARED / f"{name}.json"
    trace, _ = import_dump(SHARED / f"{name}.npz", meta if meta.exists() else None)
    found, _ = srp(trace.head(min(60, len(trace.requests))), 16)
    assert found == pytest.approx(printed, abs=0.02)
