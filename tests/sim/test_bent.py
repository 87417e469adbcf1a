"""Bent routing (rule 22): both engines against the oracle `tests.reference`, and what results say of it."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import registry
from sim import simulate, sweep
from sim.engines.cases import ENGINES
from sim.results.compare import differences, swept_run
from tests import reference
from tests.support.reference_bent import bend
from tests.support.reference_cases import Case, draw_admission_case, draw_case, draw_tiers_case, play
from traces.errors import InputError
from traces.schema import Picks
from traces.synthetic import synthetic
from traces.trace import Trace

SEEDS = 150

registry.tables()


Draw = Callable[[Callable[[int, int], int]], Case]
DRAWN: tuple[Draw, ...] = (draw_case, draw_tiers_case, draw_admission_case)


def drawn(integer: Callable[[int, int], int], draw: Draw, **rule: Any) -> Case:
    """A case that a rule bends; Belady, which knows another routing, is not run then."""
    case = draw(integer)
    return bend({**case, "evict": "lru" if case["evict"] == "belady" else case["evict"]}, integer, **rule)


def engines(case: Case) -> tuple[str, ...]:
    return tuple(ENGINES) if case["prefetch"] != "scripted" else ("simpy",)


@pytest.mark.parametrize("draw", DRAWN)
def test_the_engines_equal_the_reference_on_seeded_random_cases(draw: Draw) -> None:
    changed = 0
    for seed in range(SEEDS):
        case = drawn(random.Random(seed).randint, draw)
        expected = reference.run_case(case)
        changed += expected["bent"][2] > 0
        for engine in engines(case):
            assert play(case, engine) == expected, f"{engine}: seed {seed}"
    assert changed > SEEDS / 4


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_the_engines_equal_the_reference_on_cases_that_hypothesis_shrinks(data: st.DataObject) -> None:
    case = drawn(lambda low, high: data.draw(st.integers(low, high)), draw_admission_case)
    expected = reference.run_case(case)
    for engine in engines(case):
        assert play(case, engine) == expected, json.dumps(case)


@pytest.mark.parametrize("rule", ["drop", "substitute"])
def test_a_threshold_or_bonus_of_0_changes_nothing(rule: str) -> None:
    for seed in range(60):
        case = drawn(random.Random(seed).randint, DRAWN[seed % 3], rule=rule, by=0)
        for engine in engines(case):
            bent, whole = play(case, engine), play({**case, "bent": None}, engine)
            assert bent.pop("bent")[2:] == [0, 0]
            assert bent == whole, f"{engine}: seed {seed}"


def scored(candidates: int = 8) -> Trace:
    """Return a trace with all that rules need: weights, scores, and the lookahead of the next layer."""
    trace = synthetic(requests=3, tokens=30, prompt_tokens=6, layers=4, experts=16, top_k=4, seed=1)
    rng, ids = np.random.default_rng(0), trace.experts.astype(np.int64)
    others = np.array([[np.setdiff1d(np.arange(16), layer)[: candidates - 4] for layer in token] for token in ids])
    scores = -np.sort(rng.exponential(2, (*ids.shape[:2], candidates)), axis=-1)
    weights = np.exp(scores[..., :4])
    sizes: Any = {"expert_bytes": 1 << 20, "hidden_size": 256, "expert_intermediate_size": 256}
    meta = replace(trace.meta, candidates=candidates, lookahead=Picks((1,), 4), **sizes)
    return replace(
        trace,
        meta=meta,
        weights=weights.astype(np.float16),
        candidates=meta.stored(np.concatenate([ids, others], -1)),
        scores=scores.astype(np.float32),
        lookahead=meta.stored(rng.permuted(ids, axis=0))[:, :, None],
        lookahead_scores=np.ones((*ids.shape[:2], 1, 4), np.float16),
    )


RULES = ("drop:below=0.2", "substitute:bonus=0.2", "commit")


@pytest.mark.parametrize("routing", RULES)
@pytest.mark.parametrize("untimed", [True, False])
def test_results_say_what_was_changed_and_lost(routing: str, untimed: bool) -> None:
    options: Any = {
        "untimed": untimed,
        **({} if untimed else {"draft": 2, "acceptance": 0.5}),
    }
    trace = scored()
    bent, whole = (simulate(trace, "lru", "30%", routing=rule, **options) for rule in (routing, None))
    assert bent["routing"] == routing
    assert 0 < bent["lost_weight"] < bent["changed_choices"] < 1
    assert whole["routing"] is None
    assert whole["lost_weight"] == whole["changed_choices"] == 0
    assert routing in repr(bent)
    assert sweep(trace, "lru,fifo", "30%", routing=routing, **options).verdict[0].startswith(f"Not lossless: {routing}")
    with pytest.raises(InputError, match="lossy routing"):
        bent.compare(whole)


@pytest.mark.parametrize("routing", ["drop:below=0", "substitute:bonus=0"])
def test_a_rule_that_can_change_nothing_gives_the_lossless_row(routing: str) -> None:
    bent, whole = (simulate(scored(), "eamc", "30%", untimed=True, routing=rule) for rule in (routing, None))
    assert {**bent.row, "cell": None} == {**whole.row, "cell": None}


def test_runs_under_one_rule_are_compared_although_they_look_up_other_numbers_of_experts() -> None:
    one, other = (
        simulate(scored(), policy, "30%", untimed=True, routing="drop:below=0.5") for policy in ("lru", "fifo")
    )
    assert one["lookups"] != other["lookups"]
    baseline, cell = (swept_run(each.row, each.requests) for each in (one, other))
    assert differences(baseline, cell, resamples=10)


@pytest.mark.parametrize(
    ("routing", "gone", "text"),
    [
        ("drop", "weights", "--weights"),
        ("substitute", "scores", "--scores"),
        ("commit:layers=2", "token_id", "--lookahead 2"),
        ("drop:below=much", "token_id", "0.75/k"),
        ("bend", "token_id", "known: commit, drop, substitute"),
    ],
)
def test_what_a_rule_cannot_do_without_is_named(routing: str, gone: str, text: str) -> None:
    without: Any = {gone: None}
    with pytest.raises(InputError, match=text):
        simulate(replace(scored(), **without), untimed=True, routing=routing)


def test_no_policy_runs_that_knows_another_routing() -> None:
    with pytest.raises(InputError, match="belady knows the routing of the trace"):
        simulate(scored(), "belady", untimed=True, routing="drop")
