"""Measuring a device: on the virtual one the answer is known."""

import pytest

from policies.contract import Shape
from policies.registry import parse
from replay.driver import Plan
from replay.measure import interpolate, measure, never_less, policy_ns
from replay.virtual import VirtualDevice
from sim.cells import Requests
from sim.timing import FixedTiming, Link
from traces.synthetic import synthetic


def test_measuring_the_virtual_device_gives_back_its_profile() -> None:
    timing, link = FixedTiming(11, 5, 2, 3, 7), Link(40, 3, 1, expert_bytes=400, chunk_bytes=100)
    requests = Requests(synthetic(2, 5, layers=3, experts=8, top_k=2, seed=1))
    plan = Plan(requests, Shape(3, 8), 4, parse("lru"), link.expert_bytes, link.chunk_bytes)
    found, found_link = measure(VirtualDevice(timing, link), plan, most_tokens=9)
    assert found.predictor_ns == 0
    for tokens in range(1, 10):
        assert found.expert_ns(tokens) == timing.expert_ns(tokens)
        assert found.combine_ns(tokens) == 3
    assert [found.dense_ns(layer, 2, 50) for layer in range(3)] == [11, 11, 11]
    assert found.head_ns(1) == 7
    assert [found_link.used_ns(sent) for sent in (0, 100, 400)] == [0, 340, 1240]


def test_durations_between_two_token_counts_are_interpolated() -> None:
    table = ((1, 100), (4, 160), (10, 400))
    assert [interpolate(table, tokens) for tokens in (1, 2, 4, 7, 10)] == [100, 120, 160, 280, 400]


def test_a_disturbed_measurement_is_replaced_by_that_of_more_tokens() -> None:
    assert never_less([7_000, 12, 15, 9_000, 20]) == [12, 12, 15, 20, 20]


@pytest.mark.parametrize("policy", ["eamc", "lru+popular:n=2", "belady+oracle1", "lfu+eamc"])
def test_a_policy_that_looks_at_events_takes_time(policy: str) -> None:
    requests = Requests(synthetic(3, 80, layers=3, experts=8, top_k=2, seed=1, prompt_tokens=4))
    assert policy_ns(Plan(requests, Shape(3, 8), 4, parse(policy), 10)) > 0
