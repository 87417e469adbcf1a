"""`eamc-blend` scores and proposes what its docstrings say, in both modes, and its weights are what its script fits."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.fit_blend import fit_chance, fit_time, samples
from policies.blend import (
    AGAIN_HERE,
    AHEAD,
    BLIND,
    CHANCE,
    CHANCE_BLIND,
    CONSTANT,
    HERE,
    KINDS,
    LAYER,
    LAYER_BLIND,
    NEXT,
    PARAMETERS,
    SETTINGS,
    STEP,
    TIME,
    WEIGHTS,
    tokens,
    weigh_ahead,
)
from policies.blend.decisions import CACHED, SHIFT, SURE
from policies.blend.eamc_blend import BlendOptions, BlendPrefetcher, BlendRetention
from policies.blend.evidence import AGAIN_PASSES, POPULAR
from policies.blend.evidence import LAYER as FOLLOWS_AHEAD
from policies.blend.learning import WEIGHT
from policies.core import NO_INTS, START, Event, Shape, alone, parse
from sim.engines import count
from traces import DECODE, PREFILL, Lookahead, Trace
from traces.synthetic import synthetic

L, E, K = 3, 5, 2
FAST_RATE, SLOW_RATE, FOLLOW_RATE, AHEAD_RATE, PRIOR_TOKENS, EPS, PRIOR_PASSES, EPS_IDS = SETTINGS

Steps = list[list[list[int]]]


def events(steps: Steps, ids: Sequence[int] | None = None) -> list[Event]:
    """A request's events: for each step and layer the experts chosen, as numbers within the layer."""
    told = []
    for step, layers in enumerate(steps):
        token = NO_INTS if ids is None else np.array(ids[step : step + 1])
        for layer, chosen in enumerate(layers):
            experts = np.array(sorted(chosen), np.int64) + layer * E
            told.append(alone(DECODE, layer, step, experts, np.ones(len(experts), np.int64), token_ids=token))
    return told


def tell(policy: BlendRetention, steps: Steps, ids: Sequence[int] | None = None) -> None:
    policy.begin_request(0, 0)
    for event in events(steps, ids):
        policy.observe(event)


def log(x: float) -> float:
    """The logarithm as the evidence has it."""
    z = (math.sqrt(x) - 1) / (math.sqrt(x) + 1)
    return 4 * sum(z**n / n for n in range(1, 12, 2))


def longest_match(ids: Sequence[int], at: int) -> tuple[int, int]:
    """Where the longest of the sequences that end at `at` came before, the latest of these, and its length."""
    found = [
        (n, j)
        for j in range(at)
        for n in range(1, 9)
        if j - n + 1 >= 0 and ids[j - n + 1 : j + 1] == ids[at - n + 1 : at + 1]
    ]
    n, j = max(found, default=(0, 0))
    return j, n


def evidence(steps: Steps, layer: int, ids: Sequence[int] | None = None) -> list[list[float]]:
    """[E][KINDS] of the layer after its last pass in `steps`, from the definition, in plain Python."""
    passes = [set(step[layer]) for step in steps if len(step) > layer]
    averages = [[0.0] * E for _ in range(2)]
    follow, second = np.zeros((2, E, E))
    last = [0] * E
    for t, used in enumerate(passes):
        for r, rate in enumerate((FAST_RATE, SLOW_RATE)):
            averages[r] = [x + rate * ((e in used) - x) for e, x in enumerate(averages[r])]
        for table, back in ((follow, 1), (second, 2)):
            for before in passes[t - back] if t >= back else ():
                for e in range(E):
                    table[before, e] += FOLLOW_RATE * ((e in used) - table[before, e])
        for e in used:
            last[e] = t + 1
    n = len(passes[-1])
    counts = [sum(e in used for used in passes) for e in range(E)]
    popular = [(count + 0.01) * E / (sum(counts) + 0.01 * E) for count in counts]
    sums = [
        [sum(table[before, e] for before in passes[-back]) for e in range(E)] if len(passes) >= back else popular
        for table, back in ((follow, 1), (second, 2))
    ]
    of_ids, again = popular, popular
    if ids is not None:
        at = len(passes) - 1
        after = [passes[t + 1] for t in range(at) if ids[t] == ids[at]]
        of_ids = [
            (sum(e in used for used in after) * E / K + PRIOR_PASSES * x) / (len(after) + PRIOR_PASSES)
            for e, x in enumerate(popular)
        ]
        where, matched = longest_match(ids, at)
        weight = AGAIN_PASSES[matched]
        again = [
            (x + (weight * E / K if matched and e in passes[where + 1] else 0)) / (weight + 1)
            for e, x in enumerate(popular)
        ]
    found = []
    for e in range(E):
        lifts = [averages[r][e] * E / sum(averages[r]) for r in range(2)]
        lifts += [(counts[e] + PRIOR_TOKENS * n * popular[e] / E) * E / (sum(counts) + PRIOR_TOKENS * n)]
        lifts += [each[e] * E / sum(each) if sum(each) else 1.0 for each in sums]
        kinds = [*(log(lift + EPS) for lift in lifts), log(1 + len(passes) - last[e])]
        found.append([*kinds, log(of_ids[e] + EPS_IDS), log(again[e] + EPS_IDS)])
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
    return [log((x * E / sum(after) if sum(after) else 1.0) + EPS) for x in after]


def here(steps: Steps, layer: int, ids: list[int]) -> list[list[float]]:
    """[E][2] of a layer that has not routed in the last step: what its token's id had, and its last tokens before."""
    passes = [set(step[layer]) for step in steps if len(step) > layer]
    counts = [sum(e in used for used in passes) for e in range(E)]
    popular = [(count + 0.01) * E / (sum(counts) + 0.01 * E) for count in counts]
    at = len(passes)
    on = [used for used, token in zip(passes, ids, strict=False) if token == ids[at]]
    where, matched = longest_match(ids, at)
    weight = AGAIN_PASSES[matched]
    found = []
    for e in range(E):
        lift = (sum(e in used for used in on) * E / K + PRIOR_PASSES * popular[e]) / (len(on) + PRIOR_PASSES)
        again = (popular[e] + (weight * E / K if matched and e in passes[where] else 0)) / (weight + 1)
        found.append([log(lift + EPS_IDS), log(again + EPS_IDS)])
    return found


def random_steps(seed: int, n: int) -> Steps:
    rng = np.random.default_rng(seed)
    return [[rng.choice(E, K, replace=False).tolist() for _ in range(L)] for _ in range(n)]


def random_ids(seed: int, n: int) -> list[int]:
    """Few, so that they recur, and some that share no row."""
    return [(3, 5, 200_000)[i] for i in np.random.default_rng(seed).integers(0, 3, n)]


def weighed(model: int, kinds: Sequence[float]) -> float:
    """What a model makes of the evidence, in the order of its places."""
    return float(sum(w * x for w, x in zip(WEIGHTS[model], kinds, strict=False)) + WEIGHTS[model, CONSTANT])


def no_use(odds: float) -> float:
    """The chance of it, as the policy reckons."""
    return float(1 / (1 + max(0.0, 1 + odds / 256) ** 256))


EVEN = math.log(K / (E - K))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sighted", [False, True])
def test_keep_scores_are_those_of_the_definition(seed: int, sighted: bool) -> None:
    steps, ids = random_steps(seed, 12), random_ids(seed, 12) if sighted else None
    policy = BlendRetention(Shape(L, E), BlendOptions(distance=0.4))
    policy.state.learning.fits[:, 1:] *= 1e30  # the weights stay
    tell(policy, steps, ids)
    for layer in range(L):
        possible = 0.4 * (len(steps) + 1 + layer / L)
        for e, kinds in enumerate(evidence(steps, layer, ids)):
            odds = EVEN + (weighed(CHANCE, kinds) if sighted else weighed(CHANCE_BLIND, kinds[:BLIND]))
            g = max(math.log(2), weighed(TIME, kinds[:BLIND]))
            assert policy.keep[0, layer * E + e] == pytest.approx(-no_use(odds) * g - possible, rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("wrong", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("sighted", [False, True])
def test_what_pays_in_the_next_layers_is_proposed_at_its_worth(seed: int, wrong: float, sighted: bool) -> None:
    steps, ids = random_steps(seed, 12), random_ids(seed, 12) if sighted else None
    steps[-1] = steps[-1][:1]  # the other layers have not routed yet
    policy = BlendRetention(Shape(L, E), BlendOptions(wrong=wrong, depth=2))
    policy.state.learning.fits[:, 1:] *= 1e30  # the weights stay
    policy.state.trust[SURE] *= 1e30  # nor is what they say of absent experts corrected
    fetcher = BlendPrefetcher.beside(policy)
    fetcher.window(0.3)
    policy.begin_request(0, 0)
    for event in events(steps, ids):
        policy.observe(event)
        proposed, priorities = fetcher.propose(event)
    expected = {}
    for layer in (1, 2) if sighted else (1,):
        known = [step for step in steps if len(step) > layer]
        kinds = evidence(known, layer, ids)
        lifts = ahead(steps, layer) if layer == 1 else [0.0] * E
        told = here(steps, layer, ids) if ids else [[0.0, 0.0]] * E
        for e in range(E):
            odds = EVEN + weighed(LAYER if layer == 1 else STEP, [*kinds[e], lifts[e], *told[e]])
            if not sighted:
                odds = EVEN + weighed(LAYER_BLIND, [*kinds[e][:BLIND], 0.0, 0.0, lifts[e]])
            if odds >= (math.log(wrong / 0.3) if wrong else -math.inf):
                distance = 0.75 * (len(steps) + layer / L) + 0.3 * (layer - 1)
                g = max(math.log(2), weighed(TIME, kinds[e][:BLIND]))
                expected[layer * E + e] = -no_use(odds) * g - distance
    assert dict(zip(proposed.tolist(), priorities.tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)
    assert wrong < 1 or len(expected) < 2 * E


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_layer_that_a_token_skips_neither_follows_nor_is_followed(skipped: int) -> None:
    steps = random_steps(6, 30)
    for step in steps[::3]:
        step[skipped] = []
    policy = BlendRetention(Shape(L, E), BlendOptions())
    fetcher = BlendPrefetcher.beside(policy)
    policy.begin_request(0, 0)
    for event in events(steps):
        policy.observe(event)
        fetcher.propose(event)
    follow = np.zeros((E, E))
    for step in steps:
        for before in step[0]:
            for e in range(E):
                follow[before, e] += AHEAD_RATE * ((e in step[1]) - follow[before, e]) if step[1] else 0
    np.testing.assert_allclose(policy.state.known.after[FOLLOWS_AHEAD, 0], follow, rtol=1e-5)


def test_after_a_layer_that_the_token_skips_the_next_is_expected_to_use_what_is_popular() -> None:
    steps = random_steps(7, 12)
    policy = BlendRetention(Shape(L, E), BlendOptions())
    fetcher = BlendPrefetcher.beside(policy)
    policy.begin_request(0, 0)
    for event in events([*steps, [[]]]):
        policy.observe(event)
        fetcher.propose(event)
    found, popular = np.empty(E), policy.state.known.rows[POPULAR, E : 2 * E]
    weigh_ahead(policy.state.known, PARAMETERS, 0, 0, found)
    assert found == pytest.approx([log(x * E / popular.sum() + EPS) for x in popular])


def test_ids_count_as_much_as_they_foretell() -> None:
    """Ids that fix the next token's experts count more than at first; drawn anew they soon count nearly nothing."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 6, 400).tolist()
    chosen = [rng.choice(E, K, replace=False).tolist() for _ in range(6)]
    steps = [[chosen[ids[t - 1] if t else 0]] * L for t in range(400)]
    true, mixed = (BlendRetention(Shape(L, E), BlendOptions()) for _ in range(2))
    tell(true, steps, ids)
    tell(mixed, 6 * steps, rng.integers(0, 200, 6 * len(steps)).tolist())
    counts = WEIGHTS[CHANCE, NEXT]
    assert true.state.learning.fits[CHANCE, WEIGHT, NEXT] > counts
    assert abs(mixed.state.learning.fits[CHANCE, WEIGHT, NEXT]) < counts / 2
    wanted = np.isin(np.arange(E), chosen[ids[-1]])
    last = true.keep[0, -E:]
    assert last[wanted].min() > last[~wanted].max()


def test_when_a_step_starts_the_experts_of_its_token_are_proposed_from_the_first_layer_on() -> None:
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 6, 300)
    chosen = [[sorted(rng.choice(E, K, replace=False).tolist()) for _ in range(L)] for _ in range(6)]
    steps = [chosen[token] for token in ids]
    policy = BlendRetention(Shape(L, E), BlendOptions(depth=2, wrong=0.0))
    fetcher = BlendPrefetcher.beside(policy)
    tell(policy, steps, ids.tolist())
    for token in range(6):
        start = alone(DECODE, START, 300 + token, NO_INTS, NO_INTS, token_ids=np.array([token]))
        proposed, priorities = fetcher.propose(start)
        assert sorted(proposed.tolist()) == list(range(2 * E))
        for layer in range(2):
            worth = priorities[(proposed // E) == layer]
            best = proposed[(proposed // E) == layer][np.argsort(-worth)[:K]]
            assert sorted(best.tolist()) == [layer * E + e for e in chosen[token][layer]]
        for event in events([chosen[token]], [token]):
            policy.observe(event._replace(steps=np.array([300 + token])))


def foretold(withheld: bool) -> float:
    """Of the experts of steps of two tokens, each of its own experts, the share that is proposed before all others."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 6, 300)
    chosen = [[sorted(rng.choice(E, K, replace=False).tolist()) for _ in range(L)] for _ in range(6)]
    policy = BlendRetention(Shape(L, E), BlendOptions(depth=2, wrong=0.0))
    fetcher = BlendPrefetcher.beside(policy)
    tell(policy, [chosen[token] for token in ids], ids.tolist())
    found = wanted = 0
    for step, (first, drafted) in enumerate([(0, 1), (2, 3), (4, 5), (1, 4), (3, 0), (5, 2)], 300):
        taken = np.array([first, -1 if withheld else drafted])
        proposed, priorities = fetcher.propose(alone(DECODE, START, step, NO_INTS, NO_INTS, token_ids=taken))
        together = [sorted({*one, *other}) for one, other in zip(chosen[first], chosen[drafted], strict=True)]
        for layer, used in enumerate(together[:2]):
            here = proposed // E == layer
            best = proposed[here][np.argsort(-priorities[here])[: len(used)]]
            found += np.isin(best % E, used).sum()
            wanted += len(used)
        for event in events([together]):
            policy.observe(event._replace(steps=np.array([step]), token_ids=taken))
        assert policy.state.known.ids.step[0, : 3 - withheld].tolist() == [2 - withheld, *taken[: 2 - withheld]]
    return float(found / wanted)


def test_the_ids_of_drafted_tokens_foretell_their_experts_when_their_step_starts() -> None:
    assert foretold(withheld=False) > 0.95
    assert foretold(withheld=True) < 0.9


def test_ids_of_a_batch_of_which_some_draft_are_not_taken_for_those_of_others() -> None:
    policy = BlendRetention(Shape(L, E, batch_slots=2), BlendOptions())
    for step, (taken, rows) in enumerate([([4, 3], [4, 3]), ([4, 4, 3], [-1, -1])]):
        event = alone(DECODE, 0, 0, np.zeros(1, np.int64), np.array([2]), token_ids=np.array(taken))
        own = np.zeros(2, np.int64), np.ones(2, np.int64)
        both = event._replace(batch_slots=np.arange(2), steps=np.full(2, step), offsets=np.arange(3))
        policy.observe(both._replace(own_experts=own[0], own_counts=own[1]))
        assert policy.state.known.ids.request[:, tokens.ROW].tolist() == rows


def test_counts_of_ids_are_halved_before_they_overflow_and_histories_are_bounded() -> None:
    policy = BlendRetention(Shape(1, E), BlendOptions())
    steps = [[[0, 1 + t % 2]] for t in range(tokens.HISTORY + 300)]
    tell(policy, steps, [7] * len(steps))
    known = policy.state.known.ids
    for table in (tokens.HERE, tokens.AFTER):
        passes, chosen = int(known.passes[table, 7]), known.chosen[table, 7, 0].astype(int)
        assert 127 <= passes <= 255
        assert abs(chosen - [passes, passes / 2, passes / 2, 0, 0]).max() <= 2
    assert known.passes.sum() == known.passes[:, 7].sum()
    assert known.request[0, tokens.MATCHED] == tokens.LONGEST


@pytest.mark.parametrize("cached", [0.0, 1.0])
def test_guesses_at_absent_experts_that_do_not_come_true_are_no_longer_made(cached: float) -> None:
    steps = random_steps(8, 200)
    policy = BlendRetention(Shape(L, E), BlendOptions(wrong=0.5, head=1.0))
    policy.state.learning.fits[:, 1:] *= 1e30
    policy.state.learning.fits[:, WEIGHT, CONSTANT] += 4.0  # everything seems sure
    policy.keep[CACHED] = cached
    fetcher = BlendPrefetcher.beside(policy)
    policy.begin_request(0, 0)
    proposed = []
    for event in events(steps):
        policy.observe(event)
        proposed.append(len(fetcher.propose(event)[0]))
    assert proposed[0] == E
    if cached:
        assert not policy.state.trust[SHIFT].any()
    else:
        assert np.mean(proposed[-50 * L :]) < E / 5


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


def with_ids(trace: Trace) -> Trace:
    return replace(trace, token_id=np.random.default_rng(0).integers(0, 9, len(trace.experts)).astype(np.int32))


def test_the_script_fits_what_decides() -> None:
    found = samples(with_ids(synthetic(8, 600, 2, 8, 2, seed=0)))
    assert len(found.after) == len(found.until) > 0
    assert found.after.shape[1] == KINDS
    assert (found.until >= 1).all()
    kinds = [*range(BLIND)]
    later = found.until > 1
    columns = np.concatenate([found.after[later][:, kinds], np.ones((later.sum(), 1))], axis=1)
    left = np.log(found.until[later]) - columns @ fit_time(kinds, [found])
    assert abs(columns.T @ left).max() < 1e-6 * later.sum()

    kinds = [*range(KINDS), AHEAD, HERE, AGAIN_HERE]
    columns = np.concatenate([found.before[:, kinds], np.ones((len(found.used), 1))], axis=1)
    odds = fit_chance([found.before[:, kinds]], [found.used], [found.even])
    likely = 1 / (1 + np.exp(-(found.even + columns @ odds)))
    assert abs(columns.T @ (found.used - likely)).max() < 1e-6 * len(likely)  # the likelihood is at its summit
