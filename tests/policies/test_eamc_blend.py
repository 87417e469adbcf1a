"""`eamc-blend` scores what its docstring says, in both modes, and its weights are what its script fits."""

import math

import numpy as np
import pytest

from policies.blend_fit import fit, samples
from policies.contract import Event, Shape
from policies.eamc_blend import EPS, FOLLOW_RATE, PRIOR_TOKENS, RATES, WEIGHTS, BlendOptions, EamcBlend
from policies.registry import parse
from sim.untimed import count
from traces.errors import InputError
from traces.steps import DECODE, PREFILL
from traces.synthetic import synthetic

L, E, K = 2, 5, 2


def told(policy: EamcBlend, steps: list[list[list[int]]], request: int = 0) -> None:
    """Tell of a request: for each step and layer the experts chosen, as numbers within the layer."""
    policy.begin_request(request)
    for step, layers in enumerate(steps):
        for layer, chosen in enumerate(layers):
            ids = np.array(sorted(chosen), np.int64) + layer * E
            policy.observe(Event(request, step, DECODE, layer, 0, ids, np.ones(len(ids), np.int64), 0, len(ids)))


def expected(steps: list[list[list[int]]], distance: float) -> np.ndarray:
    """The keep scores [L, E] after one request, from the definition, in plain Python."""
    keep = np.zeros((L, E))
    for layer in range(L):
        passes = [set(step[layer]) for step in steps]
        recent = [[0.0] * E for _ in RATES]
        follow = np.zeros((E, E))
        for t, used in enumerate(passes):
            for r, rate in enumerate(RATES):
                recent[r] = [x + rate * ((e in used) - x) for e, x in enumerate(recent[r])]
            for before in passes[t - 1] if t else ():
                for e in range(E):
                    follow[before, e] += FOLLOW_RATE * ((e in used) - follow[before, e])
        n = len(passes[-1])
        counts = [sum(e in used for used in passes) for e in range(E)]
        after = [sum(follow[before, e] for before in passes[-1]) for e in range(E)]
        for e in range(E):
            popular = (counts[e] + 0.01) / (sum(counts) + 0.01 * E)
            request = (counts[e] + PRIOR_TOKENS * n * popular) * E / (sum(counts) + PRIOR_TOKENS * n)
            lifts = [recent[r][e] * E / sum(recent[r]) for r in range(len(RATES))]
            lifts += [request, after[e] * E / sum(after) if sum(after) else 1.0]
            keep[layer, e] = sum(w * math.log(lift + EPS) for w, lift in zip(WEIGHTS, lifts, strict=True))
            keep[layer, e] -= distance * (len(steps) + 1 + layer / L)
    return keep


def random_steps(seed: int, n: int) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [[rng.choice(E, K, replace=False).tolist() for _ in range(L)] for _ in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_the_definition(seed: int) -> None:
    steps = random_steps(seed, 12)
    policy = EamcBlend(Shape(L, E), BlendOptions(distance=0.4))
    told(policy, steps)
    np.testing.assert_allclose(policy.keep[0].reshape(L, E), expected(steps, 0.4), rtol=1e-9)


def test_told_one_by_one_a_layer_that_has_passed_is_scored_as_if_told_at_once() -> None:
    steps = random_steps(7, 9)
    whole, pieces = (EamcBlend(Shape(L, E), BlendOptions()) for _ in range(2))
    told(whole, steps)
    pieces.foresee([], per_access=True)
    pieces.begin_request(0)
    for step, layers in enumerate(steps):
        for layer, chosen in enumerate(layers):
            for e in sorted(chosen):
                ids = np.array([layer * E + e], np.int64)
                pieces.observe(Event(0, step, DECODE, layer, 0, ids, np.ones(1, np.int64), 0, 1))
    np.testing.assert_allclose(pieces.keep[0, :E], whole.keep[0, :E], rtol=1e-12)


def test_what_may_still_be_used_in_the_event_is_not_scored_as_past() -> None:
    policy = EamcBlend(Shape(1, E), BlendOptions())
    policy.foresee([], per_access=True)
    policy.begin_request(0)
    policy.observe(Event(0, 0, DECODE, 0, 0, np.array([1]), np.ones(1, np.int64), 0, 1))
    assert (policy.keep[0, :2] != 0).all()
    assert (policy.keep[0, 2:] == 0).all()


def test_a_prefill_counts_as_its_tokens_average() -> None:
    def scores(counts: list[int]) -> list[float]:
        policy = EamcBlend(Shape(1, E), BlendOptions())
        policy.begin_request(0)
        ids = np.arange(E)
        policy.observe(Event(0, 0, PREFILL, 0, 0, ids, np.array(counts), 0, E))
        return list(np.argsort(-policy.keep[0], kind="stable"))

    assert scores([1, 9, 3, 2, 5]) == [1, 4, 2, 3, 0]


def test_it_beats_lru_where_what_follows_what_can_be_learned() -> None:
    trace = synthetic(30, 60, 4, 16, 2, seed=3)
    requests = [trace.steps(i) for i in range(30)]
    missed = {
        name: int(count(requests, 4, 16, 16, parse(name)).misses.sum()) for name in ("lru", "eamc-blend", "belady")
    }
    assert missed["belady"] < missed["eamc-blend"] < missed["lru"]


def test_the_script_fits_the_evidence_at_the_end_of_each_pass() -> None:
    trace = synthetic(8, 200, 2, 8, 2, seed=0)
    evidence, wanted = samples(trace)
    assert len(evidence) == len(wanted) > 0
    assert (wanted >= 0).all()
    weights = fit([trace])
    residual = wanted - wanted.mean() + (evidence - evidence.mean(axis=0)) @ weights
    assert abs((evidence - evidence.mean(axis=0)).T @ residual).max() < 1e-6 * len(wanted)


def test_a_distance_below_zero_is_refused() -> None:
    with pytest.raises(InputError, match="a finite distance of at least 0"):
        parse("eamc-blend:distance=-1")
