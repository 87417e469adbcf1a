"""What each prefetcher proposes after which event, on routings small enough to do by hand."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.events import Events
from policies.core.policy import ScorePolicy, Shape
from policies.core.ranking import best
from policies.core.runner import PolicyRunner
from policies.core.spec import parse
from sim.engines.cases import run_case
from tests.support import routings
from tests.support.reference_cases import stored_cases
from traces.synthetic import synthetic

# A routing is a list of requests of steps of layers of experts (ids within the layer); a prefill step is a dict
# per layer, tokens by expert.


def proposals(name, shape, routing):
    """After each event: the proposal as {(layer, expert): priority}, by request, step and layer."""
    found = routings.proposals(routings.requests_of(routing, shape.experts), shape, f"lru+{name}")
    return {at: {divmod(i, shape.experts): priority for i, priority in each.items()} for at, each in found.items()}


TWO_TOKENS = [[[[0], [1], [2]], [[1], [2], [0]]]]  # one request, two tokens, three layers


def test_fewest_reads_ranks_what_comes_by_the_use_after_that_and_copies_nothing_for_a_single_one():
    found = proposals("fewest-reads:lead=2", Shape(2, 2), [[[[0], [1]], [[0], [1]]]])
    never = -float(np.iinfo(np.int64).max // 2)
    assert found[0, 0, 0] == {(1, 1): -4, (0, 0): never}
    assert found[0, 1, 0] == {(1, 1): never}
    once = [[[[expert, 1]]] for expert in (0, 0, 1, 0, 0)]
    for prefetch, evicted in ("fewest-reads:lead=4", False), ("oracle:horizon=4", True):
        case = {"evict": "belady", "prefetch": prefetch, "placement": "host", "slots": 1, "requests": [once]}
        assert bool(run_case({**stored_cases()[0], "L": 1, "E": 2, "cold": False, **case})["evictions"]) == evicted


def test_all_proposes_the_next_layers_in_order_and_nothing_after_the_last():
    found = proposals("all:depth=2", Shape(3, 2), [[[[0], [0], [0]]]])
    assert found[0, 0, 0] == {(1, 0): -1, (1, 1): -1, (2, 0): -2, (2, 1): -2}
    assert found[0, 0, 1] == {(2, 0): -1, (2, 1): -1}
    assert found[0, 0, 2] == {}
    assert proposals("all", Shape(3, 2), [[[[0], [0], [0]]]])[0, 0, 0] == {(1, 0): -1, (1, 1): -1}
    assert proposals("all:depth=0", Shape(3, 2), [[[[0], [0], [0]]]]) == found, "without limit"


@pytest.mark.parametrize("name", ["all", "previous", "markov", "popular", "expert-map", "eamc", "eamc-blend"])
def test_a_depth_beyond_all_layers_reaches_all_layers(name):
    routing = [[[[0], [1], [2]], [[1], [2], [0]]]] * 3
    found = proposals(f"{name}:depth={2**63 - 1}", Shape(3, 3), routing)
    assert found == proposals(f"{name}:depth=3", Shape(3, 3), routing)
    assert any(found.values())


def test_previous_proposes_what_the_token_before_used_and_goes_on_to_the_coming_token():
    found = proposals("previous", Shape(3, 3), TWO_TOKENS)
    assert found[0, 0, 0] == found[0, 0, 1] == {}, "no token before the first"
    assert found[0, 0, 2] == {(0, 0): -1}, "the coming token's first layer"
    assert found[0, 1, 0] == {(1, 1): -1}
    assert found[0, 1, 1] == {(2, 2): -1}
    assert found[0, 1, 2] == {(0, 1): -1}
    deep = proposals("previous:depth=9", Shape(3, 3), TWO_TOKENS)
    assert deep[0, 1, 0] == {(1, 1): -1, (2, 2): -2}, "at most all layers but the current one"
    assert deep[0, 1, 1] == {(2, 2): -1, (0, 1): -2}
    assert proposals("previous:depth=0", Shape(3, 3), TWO_TOKENS) == deep, "without limit"


def test_previous_forgets_at_the_end_of_a_request_and_does_not_remember_prefill():
    prefill = [{0: 3, 1: 2}, {0: 5}]
    found = proposals("previous", Shape(2, 2), [[prefill, [[1], [0]]], [[[0], [1]]]])
    assert [len(found[0, 0, layer]) for layer in (0, 1)] == [0, 0]
    assert found[0, 1, 0] == {}
    assert found[0, 1, 1] == {(0, 1): -1}
    assert found[1, 0, 0] == {}


def test_markov_proposes_by_the_mean_share_of_what_followed():
    tokens = [[[0], [1]], [[0], [2]], [[0], [1]], [[1], [2]], [[0, 1], [0]]]
    found = proposals("markov:n=3", Shape(2, 3), [tokens])
    assert found[0, 0, 0] == {}, "nothing has followed yet"
    assert found[0, 1, 0] == {(1, 1): 1.0}
    assert found[0, 2, 0] == {(1, 1): 0.5, (1, 2): 0.5}
    assert found[0, 4, 0] == pytest.approx({(1, 2): (1 / 3 + 1) / 2, (1, 1): (2 / 3) / 2})
    assert list(found[0, 2, 0]) == [(1, 1), (1, 2)], "ties to the lower id"
    assert all(found[0, step, 1] == {} for step in range(5)), "steps do not chain"


def test_markov_proposes_n_of_at_least_the_threshold():
    tokens = [[[0], [1]], [[0], [2]], [[0], [1]], [[0], [1]]]
    assert proposals("markov:n=1", Shape(2, 3), [tokens])[0, 3, 0] == pytest.approx({(1, 1): 2 / 3})
    assert proposals("markov:threshold=0.5", Shape(2, 3), [tokens])[0, 2, 0] == {(1, 1): 0.5, (1, 2): 0.5}
    assert proposals("markov:threshold=0.6", Shape(2, 3), [tokens])[0, 2, 0] == {}
    assert proposals("markov:n=0", Shape(2, 3), [tokens])[0, 3, 0] == {}


def test_the_oracle_sees_as_many_events_as_its_horizon_and_no_further_than_the_request():
    routing = [*TWO_TOKENS, [[[2], [2], [2]]]]
    found = proposals("oracle", Shape(3, 3), routing)
    assert found[0, 0, 0] == {(1, 1): -1}
    assert found[0, 0, 2] == {(0, 1): -1}, "the next token"
    assert found[0, 1, 2] == {}, "not the next request"
    far = proposals("oracle:horizon=100", Shape(3, 3), routing)
    assert far[0, 0, 0] == {(1, 1): -1, (2, 2): -2, (0, 1): -3, (1, 2): -4, (2, 0): -5}
    assert far[1, 0, 0] == {(1, 2): -1, (2, 2): -2}


def test_the_oracle_proposes_an_expert_once_for_its_first_use():
    found = proposals("oracle:horizon=4", Shape(1, 2), [[[[0]], [[1]], [[0, 1]], [[0]]]])
    assert found[0, 0, 0] == {(0, 1): -1, (0, 0): -2}


def test_within_a_token_the_oracle_is_oracle1():
    shape = Shape(3, 3)
    one, other = (proposals(name, shape, TWO_TOKENS) for name in ("oracle1", "oracle"))
    for at in one:
        assert set(one[at]) == (set(other[at]) if at[2] < 2 else set())


def test_a_lookahead_without_errors_knows_the_next_layers_of_the_step():
    found = proposals("lookahead:distance=2", Shape(3, 3), TWO_TOKENS)
    assert found[0, 0, 0] == {(1, 1): -1, (2, 2): -2}
    assert found[0, 0, 1] == {(2, 2): -1}
    assert found[0, 0, 2] == {}, "steps do not chain"


@pytest.mark.parametrize(("recall", "precision"), [(0.8, 0.0), (0.5, 0.9), (0.9, 0.6), (0.0, 0.0)])
def test_a_lookahead_has_the_recall_and_precision_that_are_stated(recall, precision):
    trace = synthetic(requests=2, tokens=500, layers=4, experts=16, top_k=3, seed=1)
    requests = [trace.steps(i) for i in range(2)]
    policy = f"lru+lookahead:recall={recall}:precision={precision}:distance=3"
    found = routings.proposals(requests, Shape(4, 16), policy)
    right = guessed = chosen = 0
    for (request, step, layer), guesses in found.items():
        if layer == 3:
            continue
        offsets = requests[request].offsets[step * 4 + layer + 1 :]
        own = requests[request].experts[offsets[0] : offsets[1]].tolist()
        named = {expert for expert, priority in guesses.items() if priority == -1}
        right, guessed, chosen = right + len(named & set(own)), guessed + len(named), chosen + len(own)
    assert right / chosen == pytest.approx(recall, abs=0.02)
    assert right / guessed == pytest.approx(precision or recall, abs=0.02)


def test_an_expert_map_of_many_tokens_is_proposed_up_to_the_mass_that_similarity_leaves_open():
    prefill = [{0: 6, 1: 8}, {0: 1, 1: 6, 2: 3}]
    found = proposals("expert-map", Shape(2, 3), [[prefill, [[1], [0]], [[0], [0]], [[2], [0]]]])
    assert found[0, 1, 0] == {(1, 1): 0.6}, "cosine 0.8: mass 0.2 is open, one expert as the token has one"
    assert found[0, 2, 0] == {(1, 1): 0.6}, "cosine 0.6: mass 0.4 is open"
    assert found[0, 3, 0] == {}
    flat = [{0: 1, 1: 7}, {0: 3, 1: 4, 2: 3}]  # cosine 1 / sqrt(50): mass 0.86 is open
    assert proposals("expert-map", Shape(2, 3), [[flat, [[0], [0]]]])[0, 1, 0] == {
        (1, 1): 0.4,
        (1, 0): 0.3,
        (1, 2): 0.3,
    }


def test_an_expert_map_and_its_multiple_are_equally_near_and_the_one_stored_first_is_matched():
    prefill = [{0: 3, 1: 3}, {1: 3}]
    found = proposals("expert-map", Shape(2, 3), [[[[0, 1], [0]]], [prefill], [[[0, 1], [2]]]])
    assert found[2, 0, 0] == {(1, 0): 1.0}, "6 / sqrt(18) is greater than 2 / sqrt(2) only as it is rounded"


@given(routings.routings(), st.integers(1, 4), st.integers(1, 3))
def test_the_expert_map_is_the_definition_with_whole_vectors(run, capacity, distance):
    shape, routing = run
    found = proposals(f"expert-map:capacity={capacity}:depth={distance}", shape, routing)
    stored: list[list[set[int]]] = []

    def shared(one, other, layers):
        return sum(len(set(a) & set(b)) for a, b in zip(one[:layers], other[:layers], strict=True))

    def nearest(token, layers):
        return max(range(len(stored)), key=lambda c: (shared(token, stored[c], layers), -c))

    for request, tokens in enumerate(routing):
        for step, token in enumerate(tokens):
            for layer in range(shape.layers):
                expected: dict[tuple[int, int], float] = {}
                if stored and shared(token, stored[nearest(token, layer + 1)], layer + 1):
                    match = stored[nearest(token, layer + 1)]
                    for i in range(layer + 1, min(layer + 1 + distance, shape.layers)):
                        expected |= {(i, e): float(Fraction(1, 2 * (i - layer))) for e in match[i]}
                assert found[request, step, layer] == expected
            if len(stored) < capacity:
                stored.append(token)
            else:
                stored[nearest(token, shape.layers)] = token


@given(routings.routings(), st.integers(1, 4))
def test_as_retention_the_expert_map_keeps_by_share_in_the_match_times_lookups(run, capacity):
    shape, routing = run
    requests = routings.requests_of(routing, shape.experts)
    runner = PolicyRunner(parse(f"expert-map:capacity={capacity}"), shape, requests)
    assert isinstance(runner.retention, ScorePolicy)
    stored, lookups = list[list[int]](), np.zeros(shape.total)

    def shared(one, other):
        return len(set(one) & set(other))  # all maps of a step so far have the same norm: as many as it has experts

    for ordinal, request in enumerate(requests):
        events = Events.of(request, shape.layers)
        runner.begin_request(ordinal)
        for step in range(len(request.phase)):
            own = []
            for layer in range(shape.layers):
                event = events.event(step, layer)
                runner.observe(event)
                own += event.experts.tolist()
                lookups[event.experts] += 1
                upto = (layer + 1) * shape.experts
                scores = [shared(own, [e for e in each if e < upto]) for each in stored]
                share = np.zeros(shape.total)
                if scores and max(scores):
                    share[stored[scores.index(max(scores))]] = 1 / 2
                assert runner.retention.keep[:2].tolist() == [(share * lookups).tolist(), lookups.tolist()]
            if len(stored) < capacity:
                stored.append(own)
            else:
                scores = [shared(own, each) for each in stored]
                stored[scores.index(max(scores))] = own
        runner.end_request()


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=8), st.integers(1, 5), st.sampled_from([0.0, 0.25]))
def test_the_best_few_are_sorted_by_score_then_id(scores, most, above):
    ids, priorities = np.empty(most, np.int64), np.empty(most)
    n = best(np.array(scores), 100, above, ids, priorities)
    expected = sorted((-s, 100 + i) for i, s in enumerate(scores) if s > above)[:most]
    assert [(-p, i) for p, i in zip(priorities[:n].tolist(), ids[:n].tolist(), strict=True)] == expected
