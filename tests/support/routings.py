"""Routings small enough to do by hand.

A routing is a list of requests of steps of layers of experts (ids within the layer); a prefill step is a dict of
tokens by expert for each layer.
"""

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from policies.core.events import Events
from policies.core.policy import Shape
from policies.core.runner import PolicyRunner
from policies.core.spec import parse
from traces import DECODE, PREFILL
from traces.steps import RequestSteps


def requests_of(routing, E):
    made = []
    for ordinal, steps in enumerate(routing):
        events = [
            (layer, dict.fromkeys(e, 1) if not isinstance(e, dict) else e) for s in steps for layer, e in enumerate(s)
        ]
        prefill = [isinstance(step[0], dict) for step in steps]
        made.append(
            RequestSteps(
                request=ordinal,
                phase=np.where(prefill, PREFILL, DECODE).astype(np.uint8),
                tokens=np.ones(len(steps), np.int64),
                context=np.ones(len(steps), np.int64),
                offsets=np.cumsum([0] + [len(chosen) for _, chosen in events]),
                experts=np.array([layer * E + e for layer, chosen in events for e in sorted(chosen)], np.int64),
                counts=np.array([chosen[e] for _, chosen in events for e in sorted(chosen)], np.int64),
            )
        )
    return made


@st.composite
def routings(draw):
    """Requests of decoded tokens of two experts a layer."""
    shape = Shape(draw(st.integers(2, 4)), draw(st.integers(2, 5)))
    layer = st.sets(st.integers(0, shape.experts - 1), min_size=2, max_size=2).map(sorted)
    token = st.lists(layer, min_size=shape.layers, max_size=shape.layers)
    return shape, draw(st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=3))


def proposals(
    requests: Sequence[RequestSteps], shape: Shape, policy: str
) -> dict[tuple[int, int, int], dict[int, float]]:
    """Return what a policy proposes after each event, by (request, step, layer): {id: priority}, in its order."""
    runner = PolicyRunner(parse(policy), shape, requests)
    found = {}
    for ordinal, request in enumerate(requests):
        events = Events.of(request, shape.layers)
        runner.begin_request(ordinal)
        for step in range(len(request.phase)):
            for layer in range(shape.layers):
                event = events.event(step, layer)
                runner.observe(event)
                proposal = runner.propose(event)
                assert proposal
                ids, priorities = proposal
                assert len(set(ids.tolist())) == len(ids)
                found[ordinal, step, layer] = dict(zip(ids.tolist(), priorities.tolist(), strict=True))
        runner.end_request()
    return found
