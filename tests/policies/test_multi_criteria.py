"""The weighted sum of recency, frequency and layer distance, against its formula in fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core import Events, PolicyRunner, ScorePolicy, Shape, parse
from tests.support.routings import requests_of, routings
from traces import InputError

WEIGHTS = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(routings(), WEIGHTS, WEIGHTS, WEIGHTS.filter(bool))
def test_the_keep_score_is_the_formula(run, recency, frequency, distance):
    shape, routing = run
    L, E = shape.layers, shape.experts
    requests = requests_of(routing, E)
    spec = parse(f"multi-criteria:recency={recency}:frequency={frequency}:distance={distance}")
    runner = PolicyRunner(spec, shape, requests)
    assert isinstance(runner.retention, ScorePolicy)
    for ordinal, tokens in enumerate(routing):
        events = Events.of(requests[ordinal], L)
        runner.begin_request(ordinal)
        uses = {expert: list[int]() for expert in range(shape.total)}
        for step, token in enumerate(tokens, start=1):
            for layer, chosen in enumerate(token):
                runner.observe(events.event(step - 1, layer))
                for e in chosen:
                    uses[layer * E + e].append(step)
                for expert, steps in uses.items():
                    events_to_go = (expert // E - layer - 1) % L
                    expected = (
                        Fraction(recency) * Fraction(max(steps, default=0), step)
                        + Fraction(frequency) * Fraction(len(steps), step)
                        + Fraction(distance) * (1 - Fraction(events_to_go, L))
                    )
                    assert runner.retention.keep[0, expert] == pytest.approx(float(expected))
        runner.end_request()


def test_the_layer_that_comes_next_is_kept_before_the_one_that_has_just_run():
    shape = Shape(3, 2)
    requests = requests_of([[[[0], [0], [0]]]], 2)
    runner = PolicyRunner(parse("multi-criteria:recency=0:frequency=0:distance=1"), shape, requests)
    assert isinstance(runner.retention, ScorePolicy)
    runner.begin_request(0)
    runner.observe(Events.of(requests[0], 3).event(0, 0))
    assert runner.retention.keep[0].tolist() == pytest.approx([1 / 3, 1 / 3, 1, 1, 2 / 3, 2 / 3])


def test_weights_that_weigh_nothing_are_refused():
    with pytest.raises(InputError):
        parse("multi-criteria:recency=0:frequency=0:distance=0")
