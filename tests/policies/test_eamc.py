"""`eamc` with all its options against its definition, written out with whole matrices and no shortcuts."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.events import alone
from policies.core.policy import Shape
from policies.core.spec import parse
from policies.eamc.build import predictor_of
from policies.eamc.collection import EamcOptions
from policies.eamc.eamc import EamcRetention
from sim.engines.untimed import count
from tests.support.slow_eamc import SlowEamc, compare, events, policy_of
from traces import DECODE, PREFILL
from traces.steps import RequestSteps
from traces.synthetic import synthetic

VALUES: dict[str, list[Any]] = {
    "source": ["request", "both"],
    "split": [False],
    "layers": ["past"],
    "cosine": ["rows"],
    "matches": [3],
    "replacement": ["least-used", "fifo", "k-means"],
    "threshold": [-1.0, 0.2],
    "depth": [1, 2],
    "decay": ["none", "next"],
    "keep": ["most-visited", "least-visited"],
    "capacity": [2],
    "eps": [0.5],
}
"""Other than the defaults, one at a time."""

MATCHES = [
    {"source": source, "layers": layers, "cosine": cosine}
    for source in ("iteration", "request", "both")
    for layers in ("all", "past", "future")
    for cosine in ("flat", "rows")
    if layers != "future" or source == "request"
]


def requests_of(requests: int, tokens: int, layers: int, experts: int, top_k: int, seed: int) -> list[RequestSteps]:
    trace = synthetic(requests, tokens, layers, experts, top_k, seed, prompt_tokens=5)
    return [trace.steps(i) for i in range(len(trace.requests))]


@st.composite
def histories(draw):
    """A shape, and requests of steps of events, with token counts; events without experts among them."""
    shape = Shape(draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    chosen = st.dictionaries(st.integers(0, shape.experts - 1), st.integers(1, 9), max_size=shape.experts)
    step = st.tuples(st.sampled_from([PREFILL, DECODE]), st.lists(chosen, min_size=shape.layers, max_size=shape.layers))
    requests = draw(st.lists(st.lists(step, min_size=1, max_size=3), min_size=1, max_size=8))
    return shape, [_request(shape, i, steps) for i, steps in enumerate(requests)]


def _request(shape: Shape, number: int, steps: list) -> RequestSteps:
    chosen = [sorted(layer.items()) for _, layers in steps for layer in layers]
    flat = [(e + i % shape.layers * shape.experts, n) for i, event in enumerate(chosen) for e, n in event]
    return RequestSteps(
        request=number,
        phase=np.array([phase for phase, _ in steps], np.uint8),
        tokens=np.full(len(steps), 9),
        context=np.arange(1, len(steps) + 1),
        offsets=np.cumsum([0, *map(len, chosen)]),
        experts=np.array([expert for expert, _ in flat], np.int64),
        counts=np.array([n for _, n in flat], np.int64),
    )


@st.composite
def options(draw) -> EamcOptions:
    source = draw(st.sampled_from(["iteration", "request", "both"]))
    keep = draw(st.sampled_from(["ratio", "ratio", "most-visited", "least-visited"]))
    capacity = draw(st.integers(1, 4))
    return EamcOptions(
        source=source,
        layers=draw(st.sampled_from(["all", "past", "future"] if source == "request" else ["all", "past"])),
        cosine=draw(st.sampled_from(["flat", "rows"])),
        split=draw(st.booleans()),
        capacity=capacity,
        matches=draw(st.integers(1, capacity)),
        replacement=draw(st.sampled_from(["nearest", "least-used", "fifo", "k-means"])),
        threshold=draw(st.sampled_from([0.0, -1.0, 0.1, 0.25])),
        depth=draw(st.integers(0, 3)),
        keep=keep,
        decay=draw(st.sampled_from(["first", "none", "next"])) if keep == "ratio" else "first",
        eps=draw(st.sampled_from([1e-8, 0.0, 0.5])),
    )


@given(histories(), options())
def test_scores_and_proposals_are_those_of_the_definition_with_all_options(history, chosen):
    shape, requests = history
    compare(shape, chosen, requests)


@pytest.mark.parametrize("chosen", MATCHES, ids=lambda chosen: "-".join(chosen.values()))
@pytest.mark.parametrize("split", [True, False])
def test_every_match_is_that_of_the_definition_on_a_trace_of_topics(chosen, split):
    requests = requests_of(14, 4, 4, 8, 2, 5)
    assert compare(Shape(4, 8), EamcOptions(capacity=5, matches=2, split=split, **chosen), requests) > 1000


def decisions(chosen: EamcOptions, requests: list[RequestSteps], shape: Shape) -> list[object]:
    keeper, prefetcher = parse(policy_of(chosen)).build(shape)
    assert isinstance(keeper, EamcRetention)
    seen: list[object] = []
    for _, heard in events(requests, shape.layers):
        for event in heard:
            keeper.observe(event)
            ids, priorities = prefetcher.propose(event)
            seen.append((keeper.keep[0].tolist(), ids.tolist(), priorities.tolist()))
        keeper.end_request(0)
    return seen


@pytest.mark.parametrize(
    "changed",
    [{name: value} for name, values in VALUES.items() for value in values]
    + [{"source": "request", "layers": "future"}],
    ids=str,
)
def test_every_option_changes_decisions_as_the_definition_does(changed):
    requests = requests_of(14, 4, 4, 8, 2, 6)
    chosen, shape = EamcOptions(**{"capacity": 6, **changed}), Shape(4, 8)
    proposed = compare(shape, chosen, requests)
    assert proposed > 100
    assert decisions(chosen, requests, shape) != decisions(EamcOptions(capacity=6), requests, shape)


def test_every_choice_that_there_is_was_tried():
    tried = {name: {getattr(EamcOptions(), name), *values} for name, values in VALUES.items()}
    assert tried.keys() | {"collection"} == {field.name for field in dataclasses.fields(EamcOptions)}


@pytest.mark.parametrize("chosen", ["most-visited", "least-visited"])
@pytest.mark.parametrize("slots", [3, 9])
def test_visits_are_counted_from_the_transfer_on_and_candidates_are_skipped_first(chosen, slots):
    """A cache run by hand; visits are all since the transfer, the missing lookup included."""
    shape, requests = Shape(3, 6), requests_of(10, 12, 3, 6, 2, 7)
    options = EamcOptions(keep=chosen, capacity=3, threshold=-1.0, depth=1)
    slow, visits, evicted, spared = SlowEamc(shape, options), dict[int, int](), list[int](), 0
    sign = -1 if chosen == "most-visited" else 1
    for _, heard in events(requests, 3):
        for event in heard:
            slow.observe(event)
            pinned = [e for e in event.experts.tolist() if e in visits]
            missed = [e for e in event.experts.tolist() if e not in visits]
            for expert in pinned:
                visits[expert] += 1
            for expert in missed:
                if len(visits) == slots:
                    if len(pinned) == slots:
                        pinned.pop(0)
                    others = [e for e in visits if e not in pinned]
                    candidates = slow.proposal(event.layer) if chosen == "most-visited" else {}
                    order = sorted(others, key=lambda e: (e in candidates, sign * visits[e], e))
                    spared += order[0] != min(others, key=lambda e: (sign * visits[e], e))
                    evicted.append(order[0])
                    del visits[order[0]]
                visits[expert] = 1
                pinned.append(expert)
        slow.end_request(0)
    log = count(requests, 3, 6, slots, parse(policy_of(options)))
    assert log.evictions.tolist() == evicted
    assert len(set(evicted)) > 6
    assert (spared > 0) == (chosen == "most-visited")


@given(histories(), options())
def test_a_prefetcher_on_its_own_proposes_as_the_pair_does(history, chosen):
    shape, requests = history
    keeper, beside = parse(policy_of(chosen)).build(shape)
    _, alone = parse(f"lru+{policy_of(chosen)}").build(shape)
    assert alone.observes
    assert not beside.observes, "the pair matches once, not twice"
    for _, heard in events(requests, shape.layers):
        for event in heard:
            keeper.observe(event)
            alone.observe(event)
            for ours, theirs in zip(alone.propose(event), beside.propose(event), strict=True):
                assert ours.tolist() == theirs.tolist()
        for listener in (keeper, alone, beside):
            listener.end_request(0)


# Degenerate cases


class Told:
    """One eamc, told of events by hand: `at(layer, {expert: tokens})` within the layer; `end` ends the request."""

    def __init__(self, policy: str, shape: Shape) -> None:
        self.shape, self.request, self.step = shape, 0, 0
        keeper, self.prefetcher = parse(policy).build(shape)
        assert isinstance(keeper, EamcRetention)
        self.keeper = keeper

    def at(self, layer: int, chosen: dict[int, int], phase: int = DECODE) -> Any:
        """What is proposed after it."""
        experts = np.array(sorted(chosen), np.int64)
        counts = np.array([chosen[e] for e in sorted(chosen)], np.int64)
        ids = experts + layer * self.shape.experts
        event = alone(phase, layer, self.step, ids, counts)
        self.keeper.observe(event)
        return self.prefetcher.propose(event)[0].tolist()

    def end(self) -> None:
        self.keeper.end_request(0)
        self.prefetcher.end_request(0)
        self.request += 1

    def learn(self, *rows: dict[int, int], phase: int = DECODE) -> None:
        for layer, chosen in enumerate(rows):
            self.at(layer, chosen, phase)
        self.end()

    def sizes(self) -> list[int]:
        return [collection.size for collection in self.keeper.predictor.collections]


def test_after_the_last_layer_nothing_is_proposed_and_a_match_of_what_lies_ahead_falls_to_the_oldest():
    told = Told("eamc:source=request:layers=future:threshold=-1", Shape(2, 2))
    told.learn({0: 1}, {0: 1})
    told.learn({1: 1}, {1: 1})
    told.at(0, {1: 1})
    assert told.at(1, {1: 1}) == []
    assert told.keeper.predictor.says.ratios.tolist() == [1, 0, 1, 0], "nothing is compared"
    told.step += 1
    assert told.at(0, {1: 1}) == [2, 3]
    assert told.keeper.predictor.says.ratios.tolist() == [0, 1, 0, 1], "layer 1 of the step before is ahead of layer 0"


def test_counts_beyond_32_bits_are_exact():
    told = Told("eamc:cosine=rows", Shape(2, 2))
    many = 2**31 + 1
    told.learn({0: many, 1: 1}, {0: many}, phase=PREFILL)
    told.learn({0: 1, 1: many}, {1: many}, phase=PREFILL)
    assert told.at(0, {1: many}, phase=PREFILL) == [3]


def test_an_eam_and_its_multiple_are_equally_near_and_the_older_is_matched():
    told = Told("eamc", Shape(2, 3))
    for times in (3, 1, 7):
        told.learn({0: times, 1: times, 2: 2 * times}, {0: times})
    told.at(0, {0: 1, 2: 1})
    assert told.keeper.predictor.of_phase(DECODE).bucket.matched.tolist() == [[0]]


def test_k_means_does_not_match_what_still_waits():
    told = Told("eamc:capacity=2:replacement=k-means", Shape(2, 3))
    for expert in (0, 1, 2):
        told.learn({expert: 1}, {expert: 1})
    assert told.sizes() == [0, 2]
    assert told.at(0, {2: 1}) == [3], "as near to either stored one: the oldest"
    told.end()


def test_the_policy_reports_the_memory_of_its_collections_and_of_what_is_matched():
    sizes = {}
    for policy in ("eamc:capacity=10", "eamc:capacity=20", "eamc:capacity=20:split=false"):
        sizes[policy] = predictor_of(policy, Shape(26, 64)).memory_bytes
    counted_twice = 2 * 8 * 26 * 64
    assert sizes["eamc:capacity=20"] - sizes["eamc:capacity=10"] > 2 * 10 * counted_twice
    assert sizes["eamc:capacity=20:split=false"] < 0.55 * sizes["eamc:capacity=20"]
