"""The study of task shifts against closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.adaptation import requests_needed, shifts, table
from traces.synthetic import synthetic

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 8, 2, 25


@pytest.mark.parametrize(
    ("points", "needed"),
    [([0, 0, 0], 0), ([-9, 0, 0], 1), ([-4, 2, 0], 0), ([0, 0, -9], 0), ([-9, -9, -9], None), ([-9, 0, -3], None)],
)
def test_requests_needed_are_those_before_the_first_whole_window_within_one_point(points, needed):
    assert requests_needed(np.array(points) / 100, 2) == needed


def test_lru_needs_at_most_a_request_and_a_policy_that_never_forgets_the_warm_up_again():
    """Two tasks without an expert in common, in a cache of one token's experts.

    LRU misses the first token after the shift alone, which is within a point over five requests. Perfect LFU has W T
    uses of each old expert: of the new ones all miss, until in the token that gives them as many uses the old ones are
    the longer unused.
    """
    warmup, after = 3, 8
    trace = synthetic(24, TOKENS, LAYERS, EXPERTS, TOP_K, seed=0)
    tasks = np.arange(24) % 2
    chosen = np.repeat(4 * tasks, TOKENS)[:, None, None] + np.arange(TOP_K)
    experts = np.broadcast_to(chosen, trace.experts.shape).astype(trace.experts.dtype)
    labelled = replace(trace, experts=experts, requests=trace.requests.assign(task=np.where(tasks, "b", "a")))
    rows = shifts(labelled, ("lru", "lfu-perfect"), str(LAYERS * TOP_K), warmup, after)
    assert rows[["from", "to", "policy"]].to_numpy().tolist() == [
        [old, new, policy] for old, new in ("ab", "ba") for policy in ("lru", "lfu-perfect")
    ]
    lru, perfect = (rows[rows["policy"] == policy]["differences"] for policy in ("lru", "lfu-perfect"))
    assert all(each == pytest.approx([-1 / TOKENS] + [0] * (after - 1)) for each in lru)
    assert all(each == pytest.approx([-1.0] * warmup + [0.0] * (after - warmup)) for each in perfect)
    assert table(rows).splitlines()[2:] == ["| lru | 0 | 0 | 0 | -4.0 |", "| lfu-perfect | 3 | 3 | 3 | -100.0 |"]
    assert table(rows.assign(differences=[each - 1 for each in rows["differences"]])).splitlines()[2] == (
        "| lru | 4 | at least 4 | over 3 | -104.0 |"
    )
