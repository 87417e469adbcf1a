"""`eamc-blend` knows, scores and proposes what its docstrings say, and its weights are what its script fits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.fit_blend import fit, fitted
from policies.blend.decisions import CACHED, NEXT_ODDS, PASS_ODDS, SHIFT, SURE
from policies.blend.eamc_blend import BlendOptions, BlendPrefetcher, BlendRetention
from policies.blend.evidence import CONSTANT, EPS, FOLLOW_RATE, HERE, PRIOR_TOKENS, RATES
from policies.blend.learning import ENDS, PASS, WEIGHTS
from policies.blend.neighbours import LEAST, NEAREST, NOW, PASSES, PRIOR, SHARPNESS, SPANS, WINDOW
from policies.core.events import Events, alone
from policies.core.policy import Event, Prefetcher, Shape
from policies.core.spec import parse
from sim.engines.untimed import count
from traces import DECODE, PREFILL, Trace
from traces.board import FOLDER
from traces.synthetic import synthetic

L, E, K = 3, 5, 2

Steps = list[list[list[int]]]


def events(steps: Steps, experts: int = E) -> list[Event]:
    """A request's events: for each step and layer the experts chosen, as numbers within the layer."""
    made = []
    for step, layers in enumerate(steps):
        for layer, chosen in enumerate(layers):
            ids = np.array(sorted(chosen), np.int64) + layer * experts
            made.append(alone(DECODE, layer, step, ids, np.ones(len(ids), np.int64)))
    return made


def run(policy: BlendRetention, steps: Steps, fetcher: Prefetcher | None = None) -> dict[int, float]:
    """Run a request through a policy; what is proposed last."""
    proposed = {}
    policy.begin_request(0, 0)
    for event in events(steps, policy.shape.experts):
        policy.observe(event)
        if fetcher:
            ids, priorities = fetcher.propose(event)
            proposed = dict(zip(ids.tolist(), priorities.tolist(), strict=True))
    return proposed


def stay(policy: BlendRetention) -> None:
    """Weights and biases stay as they are."""
    policy.state.learning.fits[:, 1:] *= 1e30
    policy.state.learning.biases[1] = 1e30


def log(x: float | np.float32) -> float:
    """The logarithm as the evidence has it."""
    z = (math.sqrt(float(x)) - 1) / (math.sqrt(float(x)) + 1)
    return 4 * sum(z**n / n for n in range(1, 12, 2))


def chance(odds: float) -> float:
    """The chance, as the policy reckons."""
    return float(1 / (1 + max(0.0, 1 - odds / 256) ** 256))


def neighbours(steps: Steps) -> list[tuple[int, float]]:
    """Passes that are most like the last one, as far as that has run, and their weights; from the definition."""
    used = [[set(chosen) for chosen in step] for step in steps]
    now, before, layers = used[-1], used[-2] if len(used) > 1 else [], len(used[-1])
    near = range(max(0, layers - WINDOW), layers)
    found = []
    for s in range(max(0, len(used) - PASSES), len(used) - 1):
        alike = NOW / np.float32(sum(len(now[q]) for q in near))
        alike *= np.float32(sum(len(now[q] & used[s][q]) for q in near))
        if s > max(0, len(used) - PASSES):
            rest = np.float32(sum(len(one & other) for one, other in zip(before, used[s - 1], strict=True)))
            alike += (np.float32(1) - NOW) / np.float32(sum(map(len, before))) * rest
        found.append((-alike, s % PASSES, s))
    return [(s, math.exp(-SHARPNESS * x)) for x, _, s in sorted(found)[:NEAREST] if x < 0]


def popularity(passes: Sequence[set[int]], experts: int) -> list[float]:
    counts = [sum(e in used for used in passes) for e in range(experts)]
    return [(n + 0.01) * experts / (sum(counts) + 0.01 * experts) for n in counts]


def beside(weights: list[tuple[set[int], float]], popular: list[float]) -> list[float]:
    """Log odds, over even ones, of what neighbours used, beside what is popular."""
    total, n, logs = sum(weight for _, weight in weights), len(popular), []
    for e in range(n):
        times = (sum(w for used, w in weights if e in used) * n / K + PRIOR * popular[e]) / (total + PRIOR)
        logs.append(log(times * (1 - K / n) / max(1 - times * K / n, LEAST) + EPS))
    return logs


def evidence(steps: Steps, layer: int) -> NDArray[np.float64]:
    """[kinds, E] of a layer that the last of the steps has just run, from the definition, in plain Python."""
    passes = [set(step[layer]) for step in steps if len(step) > layer]
    averages, follow, last = [[0.0] * E for _ in RATES], np.zeros((E, E)), [0] * E
    for t, used in enumerate(passes):
        for r, rate in enumerate(RATES):
            averages[r] = [x + rate * ((e in used) - x) for e, x in enumerate(averages[r])]
        for before in passes[t - 1] if t else ():
            follow[before] += FOLLOW_RATE * (np.isin(np.arange(E), list(used)) - follow[before])
        for e in used:
            last[e] = t + 1
    popular = popularity(passes, E)
    counts = [sum(e in used for used in passes) for e in range(E)]
    after, nearest = sum(follow[e] for e in passes[-1]), neighbours([*steps[:-1], steps[-1][: layer + 1]])
    rows = [[log(x * E / sum(average) + EPS) for x in average] for average in averages]
    prior = PRIOR_TOKENS * K
    rows.append(
        [log((n + prior * x / E) * E / (sum(counts) + prior) + EPS) for n, x in zip(counts, popular, strict=True)]
    )
    rows.append([log((x * E / sum(after) if sum(after) else 1.0) + EPS) for x in after])
    rows.append([log(1 + len(passes) - n) for n in last])
    rows.append([float(not n) for n in last])
    for first, end in pairwise(SPANS):
        then = [
            (passes[s + later], weight)
            for s, weight in nearest
            for later in range(first + 1, end + 1)
            if s + later < len(passes)
        ]
        rows.append(beside(then, popular))
    return np.array(rows)


def random_steps(seed: int, n: int, layers: int = L, experts: int = E) -> Steps:
    rng = np.random.default_rng(seed)
    return [[rng.choice(experts, K, replace=False).tolist() for _ in range(layers)] for _ in range(n)]


EVEN = math.log(K / (E - K))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n", [1, 2, 3, 25])
def test_the_evidence_is_that_of_the_definition(seed: int, n: int) -> None:
    steps = random_steps(seed, n)
    policy = BlendRetention(Shape(L, E), BlendOptions())
    run(policy, steps)
    for layer in range(L):
        rows = policy.state.known.rows[layer]
        np.testing.assert_allclose(rows[:HERE], evidence(steps, layer), atol=2e-4)
        assert (rows[CONSTANT] == 1).all()


@pytest.mark.parametrize("layers", [1, WINDOW + 3])
def test_of_more_passes_than_are_kept_the_latest_are_neighbours(layers: int) -> None:
    steps = random_steps(7, PASSES + 50, layers, 8)
    policy = BlendRetention(Shape(layers, 8), BlendOptions())
    run(policy, steps)
    passes = policy.state.known.passes
    expected = neighbours(steps)
    assert passes.nearest[0].tolist() == [s % PASSES for s, _ in expected]
    assert passes.weights[0] == pytest.approx([weight for _, weight in expected], rel=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_keep_scores_are_those_of_the_definition(seed: int) -> None:
    """The largest, over spans, of the chance of use until its end by the passes that are waited until then."""
    steps = random_steps(seed, 12)
    policy = BlendRetention(Shape(L, E), BlendOptions(distance=0.4))
    stay(policy)
    run(policy, steps)
    for layer in range(L):
        odds = EVEN + WEIGHTS[:PASS, :HERE] @ evidence(steps, layer) + WEIGHTS[:PASS, [CONSTANT]]
        for e in range(E):
            left, waited, rates = 1.0, 0.0, []
            for span, (first, last) in enumerate(pairwise(ENDS)):
                used = left * chance(odds[span, e])
                waited += (last - first) * left - used * (last - first - 1) / 2
                left -= used
                rates.append((1 - left) / waited)
            expected = log(64 * max(rates)) - math.log(64) - 0.4 * (len(steps) + 1 + layer / L)
            assert policy.keep[0, layer * E + e] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
def test_what_pays_in_the_next_layers_is_proposed_at_its_worth(seed: int, wrong: float) -> None:
    steps = random_steps(seed, 12)
    policy = BlendRetention(Shape(L, E), BlendOptions(wrong=wrong, depth=2))
    stay(policy)
    policy.state.cache.trust[SURE] *= 1e30  # nor is what they say of absent experts corrected
    fetcher = BlendPrefetcher.beside(policy)
    fetcher.window(0.3)
    begun = [*steps[:-1], steps[-1][:1]]  # the other layers have not routed yet
    proposed = run(policy, begun, fetcher)
    expected = {}
    for layer in (1, 2):
        passes = [set(step[layer]) for step in steps[:-1]]
        here = beside([(passes[s], weight) for s, weight in neighbours(begun)], popularity(passes, E))
        odds = EVEN + WEIGHTS[PASS, :HERE] @ evidence(steps[:-1], layer) + WEIGHTS[PASS, CONSTANT]
        for e, one in enumerate(odds + WEIGHTS[PASS, HERE] * np.array(here)):
            if one >= (math.log(wrong / 0.3) if wrong else -math.inf):
                expected[layer * E + e] = math.log(chance(one)) - 0.75 * (len(steps) + layer / L) - 0.3 * (layer - 1)
    assert proposed == pytest.approx(expected, abs=2e-3)
    assert wrong < 1 or len(expected) < 2 * E


def test_a_layer_that_neighbours_skipped_says_what_is_popular() -> None:
    steps = [*random_steps(6, 30), [[0, 1]]]
    for step in steps[8:29]:
        step[1] = []
    policy = BlendRetention(Shape(L, E), BlendOptions())
    run(policy, steps, BlendPrefetcher.beside(policy))
    ran = {s: set(step[1]) for s, step in enumerate(steps[:30]) if step[1]}
    then = [(ran[s], weight) for s, weight in neighbours(steps) if s in ran]
    assert 0 < len(then) < NEAREST
    here = policy.state.known.rows[1, HERE]
    assert here == pytest.approx(beside(then, popularity([*ran.values()], E)), abs=2e-4)


def test_a_request_begins_without_a_pass_before() -> None:
    """What the request before it used last is no evidence on its first tokens."""
    steps, other = random_steps(1, 6), random_steps(2, 6)
    policy = BlendRetention(Shape(L, E), BlendOptions())
    run(policy, steps)
    before = policy.state.known.followers.copy()
    run(policy, other[:1])
    assert np.array_equal(policy.state.known.followers, before)
    passes = policy.state.known.passes
    assert passes.links[:, passes.request[0, 0]].tolist() == [-1, -1]


@pytest.mark.parametrize("cached", [0.0, 1.0])
def test_guesses_at_absent_experts_that_do_not_come_true_are_no_longer_made(cached: float) -> None:
    steps = random_steps(8, 200)
    policy = BlendRetention(Shape(L, E), BlendOptions(wrong=0.5, head=1.0))
    stay(policy)
    policy.state.learning.weights[:, CONSTANT] += 4.0  # everything seems sure
    policy.keep[CACHED] = cached
    fetcher = BlendPrefetcher.beside(policy)
    policy.begin_request(0, 0)
    proposed = []
    for event in events(steps):
        policy.observe(event)
        proposed.append(len(fetcher.propose(event)[0]))
    assert proposed[0] == 2 * E
    if cached:
        assert not policy.state.cache.trust[SHIFT].any()
    else:
        assert np.mean(proposed[-50 * L :]) < np.mean(proposed[:L]) / 4


def test_on_its_own_it_proposes_the_same() -> None:
    steps = random_steps(2, 20)
    policy = BlendRetention(Shape(L, E), BlendOptions(wrong=0.1))
    beside, alone = BlendPrefetcher.beside(policy), BlendPrefetcher(Shape(L, E), BlendOptions(wrong=0.1))
    for listener in (policy, alone):
        listener.begin_request(0, 0)
    proposed = 0
    for event in events(steps):
        policy.observe(event)
        alone.observe(event)
        ids, priorities = alone.propose(event)
        expected = beside.propose(event)
        np.testing.assert_array_equal(ids, expected[0])
        np.testing.assert_array_equal(priorities, expected[1])
        proposed += len(ids)
    assert proposed


def test_routers_that_are_right_are_believed_and_neither_wrong_ones_nor_what_the_nearer_one_does_not_pick() -> None:
    steps = random_steps(3, 40)
    others = [[[e for e in range(E) if e not in layer][:K] for layer in step] for step in steps]
    both = [[sorted(a + b) for a, b in zip(*step, strict=True)] for step in zip(steps, others, strict=True)]

    def proposed(picks: list[list[list[list[int]]]], counted: list[list[list[int]]], distance: int) -> float:
        """Return the share of `counted` that was proposed for the layer so far ahead, in the last ten steps."""
        policy = BlendRetention(Shape(L, E), BlendOptions())
        fetcher = BlendPrefetcher.beside(policy)
        fetcher.window(0.5)
        policy.begin_request(0, 0)
        count = right = 0
        for event in events(steps):
            ids, s = [np.zeros(0, np.int64)], int(event.steps[0])
            for ahead, of_steps in enumerate(picks, start=1):
                upcoming = event.layer + ahead
                ids.append(
                    np.array([e + upcoming * E for e in of_steps[s][upcoming]] if upcoming < L else [], np.int64)
                )
            offsets, experts = np.cumsum([len(each) for each in ids]), np.concatenate(ids)
            named: Any = {"picked_counts": np.ones_like(experts), "picked_scores": np.ones(len(experts))}
            event = event._replace(picked_offsets=offsets, picked_experts=experts, **named)
            policy.observe(event)
            mine = set(fetcher.propose(event)[0].tolist())
            if s >= 30 and (upcoming := event.layer + distance) < L:
                count += len(counted[s][upcoming])
                right += len(mine & {e + upcoming * E for e in counted[s][upcoming]})
        return right / count

    for distance in 1, 2:
        assert proposed([steps] * distance, steps, distance) == 1
        assert proposed([others] * distance, others, distance) < 0.2
    assert proposed([steps, both], others, 1) < 0.2


def test_a_layer_that_decode_does_not_run_is_set_aside_until_it_runs_again() -> None:
    """An encoder's: its experts are worth less than all others, and are not fetched."""
    policy = BlendRetention(Shape(L, E), BlendOptions(wrong=0.0))
    fetcher = BlendPrefetcher.beside(policy)
    policy.begin_request(0, 0)

    def play(step: int, phase: int, layers: range) -> set[int]:
        """One step through these layers; the layers of what is proposed."""
        proposed: set[int] = set()
        for layer in range(L):
            ids = np.arange(K if layer in layers else 0, dtype=np.int64) + layer * E
            event = alone(phase, layer, step, ids, np.ones(len(ids), np.int64))
            policy.observe(event)
            proposed |= set((fetcher.propose(event)[0] // E).tolist())
        return proposed

    play(0, PREFILL, range(1, 2))
    for step in range(1, 4):
        proposed = play(step, DECODE, range(2, 3))
    keep = policy.keep[0].reshape(L, E)
    assert keep[1].max() < keep[2].min() - 1e6
    assert proposed == {2}
    play(4, PREFILL, range(1, 2))
    assert keep[1].min() > keep[2].min() - 100


def test_a_prefill_proposes_nothing() -> None:
    policy = BlendRetention(Shape(1, E), BlendOptions())
    fetcher = BlendPrefetcher.beside(policy)
    policy.begin_request(0, 0)
    event = alone(PREFILL, 0, 0, np.arange(E), np.arange(1, E + 1))
    policy.observe(event)
    assert len(fetcher.propose(event)[0]) == 0


def test_a_prefill_counts_as_its_tokens_average() -> None:
    def scores(counts: list[int]) -> list[float]:
        policy = BlendRetention(Shape(1, E), BlendOptions())
        policy.begin_request(0, 0)
        ids = np.arange(E)
        policy.observe(alone(PREFILL, 0, 0, ids, np.array(counts)))
        return list(np.argsort(-policy.keep[0], kind="stable"))

    assert scores([1, 9, 3, 2, 5]) == [1, 4, 2, 3, 0]


def test_it_beats_lru_where_what_follows_what_can_be_learned() -> None:
    trace = synthetic(30, 60, 4, 16, 2, seed=3)
    requests = [trace.steps(i) for i in range(30)]
    missed = {
        name: int(count(requests, 4, 16, 16, parse(name)).misses.sum()) for name in ("lru", "eamc-blend", "belady")
    }
    assert missed["belady"] < missed["eamc-blend"] < missed["lru"]


@pytest.mark.parametrize("name", ["kimi-linear-48b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_of_what_is_called_so_likely_so_much_is_used(name: str) -> None:
    """On the board's traces, of which the weights have not seen the first two models: in this pass, and in the next."""
    whole = Trace.read(FOLDER / name)
    trace = whole.head(min(3, len(whole.requests)))
    layers, experts = trace.layers, trace.num_experts
    policy = BlendRetention(Shape(layers, experts), BlendOptions(wrong=0.01))
    fetcher, odds, came = BlendPrefetcher.beside(policy), list[NDArray[np.float32]](), list[NDArray[np.bool_]]()
    for i in range(len(trace.requests)):
        steps = Events.of(trace.steps(i), layers)
        policy.begin_request(i, 0)
        for step in range(len(trace.steps(i).phase)):
            for layer in range(layers):
                event = steps.event(step, layer)
                if i + step > 1 and layer:
                    odds.append(policy.state.predicted[:, layer].copy())
                    came.append(np.isin(np.arange(experts) + layer * experts, event.experts))
                policy.observe(event)
                fetcher.propose(event)
    for kind in (PASS_ODDS, NEXT_ODDS):
        chances, used = 1 / (1 + np.exp(-np.array(odds)[:, kind])), np.array(came)
        for least, most in pairwise((0.0, 0.05, 0.2, 0.4, 0.6, 0.8, 1.0)):
            those = (chances >= least) & (chances < most)
            assert those.sum() > 500
            assert used[those].mean() == pytest.approx(chances[those].mean(), abs=0.12)


def test_the_script_takes_the_mean_of_what_traces_teach() -> None:
    """Of one where each pass uses what the last one did not, that this is so."""
    trace = synthetic(2, 200, 2, 4, 2, seed=0)
    swapped = np.tile([[0, 1], [2, 3]], (200, 1))[:, None].astype(trace.experts.dtype)
    swapping = replace(trace, experts=np.broadcast_to(swapped, trace.experts.shape).copy())
    one, other = fitted(trace), fitted(swapping)
    assert np.allclose(fit([trace, swapping]), (one + other) / 2)
    policy = BlendRetention(Shape(2, 4), BlendOptions())
    policy.state.learning.weights[:] = other
    stay(policy)
    run(policy, [[[0, 1]] * 2, [[2, 3]] * 2] * 4)
    odds = policy.state.predicted[NEXT_ODDS]
    assert odds[:, :2].min() > 2 > -2 > odds[:, 2:].max()
