"""Statistics are held against slow, obvious versions of their definitions."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.support.ahead import with_lookahead
from traces import DECODE, statistics
from traces.stats import summary
from traces.synthetic import synthetic

TRACE = synthetic(12, 20, 3, 16, 2, seed=3, prompt_tokens=5)


def test_sparsity_is_the_share_of_experts_that_a_request_uses() -> None:
    rows = [
        TRACE.experts[a:b][TRACE.phase[a:b] == DECODE] for a, b in zip(TRACE.offsets, TRACE.offsets[1:], strict=False)
    ]
    used = [[np.bincount(r[:, layer].ravel(), minlength=16) for layer in range(3)] for r in rows]
    stats = statistics(TRACE)["decode"]
    assert stats.activated == pytest.approx(np.mean(np.array(used) > 0))
    assert stats.repeated == pytest.approx(np.mean(np.array(used) > 1))


def test_reuse_is_the_share_of_a_tokens_experts_that_the_token_before_chose() -> None:
    shares = [
        len(set(TRACE.experts[t, layer]) & set(TRACE.experts[t - 1, layer])) / 2
        for r in range(12)
        for t in range(TRACE.offsets[r] + 6, TRACE.offsets[r + 1])
        for layer in range(3)
    ]
    reuse = statistics(TRACE)["decode"].reuse
    assert reuse.share == pytest.approx(np.mean(shares))
    assert reuse.chance == 2 / 16


def test_the_first_token_of_a_decoder_has_none_before_it_whose_experts_it_could_choose() -> None:
    decoder = TRACE.experts.copy()
    first = TRACE.offsets[:-1] + 4  # the last of a prompt
    decoder[:, 2] = TRACE.sentinel
    decoder[first] = TRACE.sentinel
    alone = statistics(replace(TRACE, experts=decoder))["prefill"].reuse
    decoder[first, 2] = TRACE.experts[first, 2]
    assert statistics(replace(TRACE, experts=decoder))["prefill"].reuse == alone


def test_requests_of_one_task_have_more_similar_eams() -> None:
    similarity = statistics(TRACE)["decode"].similarity
    assert similarity.within_task is not None
    assert similarity.across_tasks is not None
    assert similarity.within_task > similarity.across_tasks
    assert similarity.nearest_same_task is not None
    assert similarity.chance is not None
    assert similarity.nearest_same_task > similarity.chance


def test_requests_without_a_label_are_of_no_task() -> None:
    labelled = statistics(TRACE.head(8))["decode"].similarity
    unlabelled = TRACE.requests.index >= 8
    requests = TRACE.requests.assign(
        task=TRACE.requests["task"].mask(unlabelled, ""), dataset=TRACE.requests["dataset"].mask(unlabelled, "")
    )
    found = statistics(replace(TRACE, requests=requests))["decode"].similarity
    for name in ("within_task", "across_tasks", "nearest_same_task", "chance"):
        assert getattr(found, name) == pytest.approx(getattr(labelled, name))
    assert found.all_pairs == pytest.approx(statistics(TRACE)["decode"].similarity.all_pairs)


def test_similarity_is_not_told_where_there_is_nothing_to_compare() -> None:
    similarity = statistics(synthetic(1, 4, 2, 8, 2, seed=0))["decode"].similarity
    assert similarity.all_pairs is None
    assert similarity.nearest_same_task is None


def test_what_a_trace_does_not_show_is_null_in_json() -> None:
    facts = json.loads(json.dumps(summary([synthetic(2, 1, 2, 8, 2, seed=0)]), allow_nan=False))
    assert facts["decode"]["reuse"]["share"] is None
    unrouted = replace(TRACE, experts=np.full_like(TRACE.experts, TRACE.sentinel))
    facts = json.loads(json.dumps(summary([unrouted]), allow_nan=False))
    assert facts["decode"]["tokens"] == 240
    assert facts["decode"]["activated"] is None
    assert facts["decode"]["repeated"] is None
    assert facts["decode"]["similarity"]["compared"] == 0


def test_picks_ahead_of_time_are_as_good_as_the_experts_chosen_say() -> None:
    made = synthetic(1, 4, 3, 8, 2, seed=0)
    best = made.experts.copy()
    best[:2, :, 0] = [[next(e for e in range(8) if e not in ids) for ids in row] for row in made.experts[:2].tolist()]
    picked = summary([with_lookahead(made, best, (1, 2))])["foresight"]
    found = {(each["distance"], each["score"]): (each["recall"], each["precision"]) for each in picked}
    right = (best[:, :, :, None] == made.experts[:, :, None]).any(-1)
    for distance in (1, 2):
        here = right[:, distance:]
        assert found[distance, None] == (here.mean(), here.mean())
        assert found[distance, 0.5] == (here[..., 0].sum() / here.size, here[..., 0].mean())
        assert found[distance, 0.9] == (0, None)
    assert summary([made])["foresight"] == []


def test_a_summary_holds_each_phase_and_is_json() -> None:
    facts = json.loads(json.dumps(summary([TRACE])))
    assert facts["phase"] == "both"
    assert facts["prefill"]["tokens"] == 60
    assert facts["decode"]["tokens"] == 240
    assert "prefill" not in summary([synthetic(2, 4, 2, 8, 2, seed=0)])
