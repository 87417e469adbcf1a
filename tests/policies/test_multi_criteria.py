"""The weighted sum of recency, frequency and layer distance, against its formula in fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.core.policy import Shape
from policies.core.runner import Pair
from policies.core.spec import parse
from tests.policies.test_prefetchers import requests_of, routings
from traces.errors import InputError

WEIGHTS = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(routings(), WEIGHTS, WEIGHTS, WEIGHTS.filter(bool))
def test_the_keep_score_is_the_formula(run, recency, frequency, distance):
    shape, routing = run
    L, E = shape.layers, shape.experts
    requests = requests_of(routing, E)
    spec = parse(f"multi-criteria:recency={recency}:frequency={frequency}:distance={distance}")
    pair = Pair(spec, shape, requests)
    for ordinal, tokens in enumerate(routing):
        pair.begin_request(ordinal, requests[ordinal])
        uses = {expert: [] for expert in range(shape.total)}
        for step, token in enumerate(tokens, start=1):
            pair.begin_step(step - 1, 1)
            for layer, chosen in enumerate(token):
                at = (step - 1) * L + layer
                pair.observe(layer, *requests[ordinal].offsets[at : at + 2].tolist())
                for e in chosen:
                    uses[layer * E + e].append(step)
                for expert, steps in uses.items():
                    events_to_go = (expert // E - layer - 1) % L
                    expected = (
                        Fraction(recency) * Fraction(max(steps, default=0), step)
                        + Fraction(frequency) * Fraction(len(steps), step)
                        + Fraction(distance) * (1 - Fraction(events_to_go, L))
                    )
                    assert pair.retention.keep[0, expert] == pytest.approx(float(expected))
        pair.end_request()


def test_the_layer_that_comes_next_is_kept_before_the_one_that_has_just_run():
    shape = Shape(3, 2)
    requests = requests_of([[[[0], [0], [0]]]], 2)
    pair = Pair(parse("multi-criteria:recency=0:frequency=0:distance=1"), shape, requests)
    pair.begin_request(0, requests[0])
    pair.begin_step(0, 1)
    pair.observe(0, 0, 1)
    assert pair.retention.keep[0].tolist() == pytest.approx([1 / 3, 1 / 3, 1, 1, 2 / 3, 2 / 3])


@pytest.mark.parametrize("typed", ["recency=-1", "distance=2", "recency=0:frequency=0:distance=0", "frequency=nan"])
def test_weights_that_weigh_nothing_are_one_line(typed):
    with pytest.raises(InputError, match="multi-criteria needs weights of 0 to 1"):
        parse(f"multi-criteria:{typed}")
