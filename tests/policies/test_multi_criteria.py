"""The weighted sum of recency, frequency and layer distance, against its formula in fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.events import Events
from policies.core.policy import ScorePolicy
from policies.core.runner import PolicyRunner
from policies.core.spec import parse
from tests.support.routings import requests_of, routings

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
