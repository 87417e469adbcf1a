"""`eamc-blend` scores and proposes what its docstrings say, in both modes, and its weights are what its script fits."""

import math
from dataclasses import replace

import numpy as np
import pytest

from policies.blend.eamc_blend import AHEAD_WEIGHTS, WEIGHTS, BlendOptions, BlendPrefetcher, BlendRetention
from policies.blend.evidence import AHEAD, KINDS, SETTINGS
from policies.blend.fit import fit_ahead, fit_keep, samples
from policies.core.events import alone
from policies.core.policy import Event, Shape
from policies.core.spec import parse
from sim.engines.simpy_engine import simulate
from sim.engines.untimed import count
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.errors import InputError
from traces.steps import DECODE, PREFILL, Lookahead, RequestSteps, join
from traces.synthetic import synthetic

L, E, K = 3, 5, 2
FAST_RATE, SLOW_RATE, FOLLOW_RATE, AHEAD_RATE, PRIOR_TOKENS, EPS = SETTINGS

Steps = list[list[list[int]]]


def events(steps: Steps) -> list[Event]:
    """A request's events: for each step and layer the experts chosen, as numbers within the layer."""
    told = []
    for step, layers in enumerate(steps):
        for layer, chosen in enumerate(layers):
            ids = np.array(sorted(chosen), np.int64) + layer * E
            told.append(alone(DECODE, layer, step, ids, np.ones(len(ids), np.int64)))
    return told


def tell(policy: BlendRetention, steps: Steps) -> None:
    policy.begin_request(0, 0)
    for event in events(steps):
        policy.observe(event)


def evidence(steps: Steps, layer: int) -> list[list[float]]:
    """[E][KINDS] of the layer after its last pass in `steps`, from the definition, in plain Python."""
    passes = [set(step[layer]) for step in steps if len(step) > layer]
    averages = [[0.0] * E for _ in range(2)]
    follow = np.zeros((E, E))
    last = [0] * E
    for t, used in enumerate(passes):
        for r, rate in enumerate((FAST_RATE, SLOW_RATE)):
            averages[r] = [x + rate * ((e in used) - x) for e, x in enumerate(averages[r])]
        for before in passes[t - 1] if t else ():
            for e in range(E):
                follow[before, e] += FOLLOW_RATE * ((e in used) - follow[before, e])
        for e in used:
            last[e] = t + 1
    n = len(passes[-1])
    counts = [sum(e in used for used in passes) for e in range(E)]
    after = [sum(follow[before, e] for before in passes[-1]) for e in range(E)]
    found = []
    for e in range(E):
        popular = (counts[e] + 0.01) / (sum(counts) + 0.01 * E)
        lifts = [averages[r][e] * E / sum(averages[r]) for r in range(2)]
        lifts += [(counts[e] + PRIOR_TOKENS * n * popular) * E / (sum(counts) + PRIOR_TOKENS * n)]
        lifts += [after[e] * E / sum(after) if sum(after) else 1.0]
        found.append([*(math.log(lift + EPS) for lift in lifts), math.log(1 + len(passes) - last[e])])
    return found


def ahead(steps: Steps, layer: int) -> list[float]:
    """Log lifts [E] of the layer's experts after what the layer before used in the last step, from the definition."""
    follow = np.zeros((E, E))
    for step in steps:
        if len(step) > layer:
            for before in step[layer - 1]:
                for e in range(E):
                    follow[before, e] += AHEAD_RATE * ((e in step[layer]) - follow[before, e])
    after = [sum(follow[before, e] for before in steps[-1][layer - 1]) for e in range(E)]
    return [math.log((x * E / sum(after) if sum(after) else 1.0) + EPS) for x in after]


def random_steps(seed: int, n: int) -> Steps:
    rng = np.random.default_rng(seed)
    return [[rng.choice(E, K, replace=False).tolist() for _ in range(L)] for _ in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_keep_scores_are_those_of_the_definition(seed: int) -> None:
    steps = random_steps(seed, 12)
    policy = BlendRetention(Shape(L, E), BlendOptions(distance=0.4))
    tell(policy, steps)
    for layer in range(L):
        possible = 0.4 * (len(steps) + 1 + layer / L)
        for e, kinds in enumerate(evidence(steps, layer)):
            expected = sum(w * x for w, x in zip(WEIGHTS, kinds, strict=True)) - possible
            assert policy.keep[0, layer * E + e] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
def test_what_pays_in_the_next_layer_is_proposed_at_its_worth(seed: int, wrong: float) -> None:
    steps = random_steps(seed, 12)
    steps[-1] = steps[-1][:2]  # the last layer has not routed yet
    policy = BlendRetention(Shape(L, E), BlendOptions(wrong=wrong))
    fetcher = BlendPrefetcher.beside(policy)
    fetcher.window(0.3)
    policy.begin_request(0, 0)
    for event in events(steps):
        policy.observe(event)
        ids, priorities = fetcher.propose(event)
    lifts, kinds = ahead(steps, L - 1), evidence(steps, L - 1)
    expected = {}
    for e in range(E):
        odds = math.log(K / (E - K)) + AHEAD_WEIGHTS[AHEAD] * lifts[e] + AHEAD_WEIGHTS[-1]
        odds += sum(w * x for w, x in zip(AHEAD_WEIGHTS[:KINDS], kinds[e], strict=True))
        chance = 1 / (1 + math.exp(-odds))
        if chance >= wrong / (wrong + 0.3):
            distance = 0.3 * (len(steps) + (L - 1) / L)
            expected[(L - 1) * E + e] = math.log(E / K) - distance + math.log(chance)
    assert dict(zip(ids.tolist(), priorities.tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)
    assert len(expected) == E if wrong == 0 else len(expected) < E


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
        assert event.layer < L - 1 or len(ids) == 0
        proposed += len(ids)
    assert proposed


def test_a_gate_that_is_always_right_is_believed_and_one_that_is_always_wrong_is_not() -> None:
    steps = random_steps(3, 40)

    def proposed_of(picks: list[list[list[int]]]) -> float:
        """The share of picks that were proposed, in the last ten steps."""
        flat = [sorted(e + (layer + 1) * E for e in step[layer]) for step in picks for layer in range(L - 1)]
        offsets = [0]
        for step in range(len(picks)):
            offsets.append(offsets[-1])  # no pick is for the first layer
            for layer in range(L - 1):
                offsets.append(offsets[-1] + len(flat[step * (L - 1) + layer]))
        ids = np.array([e for event in flat for e in event], np.int64)
        lookahead = Lookahead(L, np.array(offsets, np.int64), ids, np.ones(len(ids), np.int64))
        policy = BlendRetention(Shape(L, E), BlendOptions())
        fetcher = BlendPrefetcher.beside(policy)
        fetcher.window(0.5)
        policy.begin_request(0, 0)
        told = hit = 0
        for event in events(steps):
            picked, counts = lookahead.after(int(event.steps[0]), event.layer)
            event = event._replace(ahead_experts=picked, ahead_counts=counts)
            policy.observe(event)
            mine = set(fetcher.propose(event)[0].tolist())
            if event.steps[0] >= 30 and event.layer < L - 1:
                told += len(picked)
                hit += len(mine & set(picked.tolist()))
        return hit / told

    right = [step[1:] for step in steps]
    wrong = [[[e for e in range(E) if e not in layer][:K] for layer in step[1:]] for step in steps]
    assert proposed_of(right) == 1
    assert proposed_of(wrong) < 0.2


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


@pytest.mark.parametrize("slots", [12, 16, 24])
def test_an_encoder_that_decode_does_not_run_makes_it_no_worse_than_lru(slots: int) -> None:
    rng = np.random.default_rng(0)
    trace = synthetic(12, 60, 4, 16, 2, seed=2)
    requests = []
    for i in range(12):
        decode = trace.steps(i)
        S = len(decode.tokens)
        keep = (decode.experts // 16) >= 2
        sizes = np.where(np.tile(np.arange(4) >= 2, S), np.diff(decode.offsets), 0)
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        decoded = replace(decode, experts=decode.experts[keep], counts=decode.counts[keep], offsets=offsets)
        encoded = np.sort(rng.choice(32, 12, replace=False)).astype(np.int64)
        ends = np.array([0, (encoded < 16).sum(), 12, 12, 12])
        one = np.array([20])
        prefill = RequestSteps(i, np.array([PREFILL], np.uint8), one, one, ends, encoded, rng.integers(1, 9, 12))
        requests.append(join([prefill, decoded]))
    missed = {name: int(count(requests, 4, 16, slots, parse(name)).misses.sum()) for name in ("lru", "eamc-blend")}
    assert missed["eamc-blend"] <= missed["lru"]


def test_a_prefill_proposes_nothing() -> None:
    policy = BlendRetention(Shape(1, E), BlendOptions())
    fetcher = BlendPrefetcher.beside(policy)
    policy.begin_request(0, 0)
    event = alone(PREFILL, 0, 0, np.arange(E), np.arange(1, E + 1))
    policy.observe(event)
    assert len(fetcher.propose(event)[0]) == 0


def test_told_one_by_one_a_layer_that_has_passed_is_scored_as_if_told_at_once() -> None:
    steps = random_steps(7, 9)
    whole, pieces = (BlendRetention(Shape(L, E), BlendOptions()) for _ in range(2))
    tell(whole, steps)
    pieces.foresee([], per_access=True)
    pieces.begin_request(0, 0)
    for step, layers in enumerate(steps):
        for layer, chosen in enumerate(layers):
            for e in sorted(chosen):
                ids = np.array([layer * E + e], np.int64)
                pieces.observe(alone(DECODE, layer, step, ids, np.ones(1, np.int64)))
    passed = (L - 1) * E
    np.testing.assert_allclose(pieces.keep[0, :passed], whole.keep[0, :passed], rtol=1e-6)


def test_what_may_still_be_used_in_the_event_is_not_scored_as_past() -> None:
    policy = BlendRetention(Shape(1, E), BlendOptions())
    policy.foresee([], per_access=True)
    policy.begin_request(0, 0)
    policy.observe(alone(DECODE, 0, 0, np.array([1]), np.ones(1, np.int64)))
    assert (policy.keep[0, :2] != 0).all()
    assert (policy.keep[0, 2:] == 0).all()


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


def test_its_prefetch_shortens_the_run_where_the_next_layer_follows_from_this_one() -> None:
    def requests(seed: int) -> list:
        """Tokens walk at random, but expert e of a layer is always followed by expert e of the next."""
        rng = np.random.default_rng(seed)
        trace = synthetic(6, 80, 6, 16, 1, seed=seed)
        trace.experts[:] = rng.integers(0, 16, size=(len(trace.experts), 1, 1))
        return [trace.steps(i) for i in range(6)]

    timing, link = FixedTiming(500, 100, 10, 10, 500), Link(10, 1, 1, 1_000)
    alone, fetching = (
        simulate(gpu_run(requests(4), Shape(6, 16), 24, parse(text), timing, link))
        for text in ("eamc-blend+none", "eamc-blend")
    )
    assert fetching.prefetch_used.sum() > 0.8 * fetching.prefetch_transfers.sum() > 0
    assert fetching.step_ns.sum() < 0.9 * alone.step_ns.sum()


def test_the_script_fits_what_decides() -> None:
    trace = synthetic(8, 600, 2, 8, 2, seed=0)
    found, wanted, before, used = samples(trace)
    assert len(found) == len(wanted) > 0
    assert (wanted >= 0).all()
    weights = fit_keep([found], [wanted])
    centred = found - found.mean(axis=0)
    assert abs(centred.T @ (wanted - wanted.mean() + centred @ weights)).max() < 1e-6 * len(wanted)

    odds = fit_ahead([before], [used])
    columns = np.concatenate([before, np.ones((len(before), 1))], axis=1)
    even = math.log(used.mean() / (1 - used.mean()))
    chance = 1 / (1 + np.exp(-(even + columns @ odds)))
    assert abs(columns.T @ (used - chance)).max() < 1e-6 * len(used)  # the likelihood is at its summit


def test_too_short_a_trace_cannot_be_fitted_on() -> None:
    with pytest.raises(InputError, match="too few decoded tokens"):
        samples(synthetic(2, 10, 2, 8, 2, seed=0))


@pytest.mark.parametrize("option", ["distance=-1", "wrong=-0.5", "wrong=nan", "distance=inf"])
def test_options_out_of_range_are_refused(option: str) -> None:
    with pytest.raises(InputError, match=f"needs {option.split('=')[0]} of at least 0"):
        parse(f"eamc-blend:{option}")
