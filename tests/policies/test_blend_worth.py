"""When `eamc-blend` works and when it does as LRU does, by what it saves and what it is charged."""

import numpy as np
import pytest

from policies.blend import worth
from policies.core.events import Events
from policies.core.policy import Event, ScorePolicy, Shape
from policies.core.spec import PolicySpec, parse
from sim.engines import compiled_engine, simpy_engine
from sim.loop.log import PREDICTOR
from sim.loop.requests import Requests
from sim.loop.run import Run, gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.logs import assert_logs_equal
from traces.synthetic import synthetic

SHAPE, SLOTS = Shape(4, 16), 30
REQUESTS = list(Requests(synthetic(requests=2, tokens=120, layers=4, experts=16, top_k=3, seed=5, prompt_tokens=4)))


def run(policy: str | PolicySpec, overhead_ns: int, cold: bool = False) -> Run:
    timing, link = FixedTiming(50, 20, 0, 5, 30, overhead_ns), Link(100, 0, 1, 1)
    spec = parse(policy) if isinstance(policy, str) else policy
    return gpu_run(REQUESTS, SHAPE, SLOTS, spec, timing, link, cold, experts_per_layer=1.0)


@pytest.mark.parametrize("cold", [False, True])
def test_where_it_does_not_pay_it_is_lru_and_free(cold: bool) -> None:
    lru = compiled_engine.simulate(run("lru", 0, cold))
    blend = compiled_engine.simulate(run("eamc-blend", 100, cold))
    works = blend.stall_ns[:, PREDICTOR] > 0
    np.testing.assert_array_equal(works.nonzero()[0], [0, 1])  # until a token was heard
    second = slice(len(REQUESTS[0].phase), None)
    np.testing.assert_array_equal(blend.misses[second], lru.misses[second])
    np.testing.assert_array_equal(blend.step_ns[second], lru.step_ns[second])


@pytest.mark.parametrize("overhead_ns", [5, 100])
def test_engines_agree_on_when_it_works(overhead_ns: int) -> None:
    blend = compiled_engine.simulate(run("eamc-blend", overhead_ns))
    works = blend.stall_ns[:, PREDICTOR] > 0
    assert set(blend.stall_ns[:, PREDICTOR]) == {0, SHAPE.layers * overhead_ns}
    assert (np.diff(works.astype(int)) > 0).any() == (overhead_ns == 5)  # it works again
    assert_logs_equal(simpy_engine.simulate(run("eamc-blend", overhead_ns)), blend)


def test_what_lru_loads_is_counted_beside() -> None:
    own, misses = worth.nothing_saved(SHAPE), []
    own.numbers[worth.SLOTS] = SLOTS
    for request in REQUESTS:
        events = Events.of(request, SHAPE.layers)
        for step in range(len(request.phase)):
            before = own.recency[worth.USED].sum(), own.sums[worth.OF]
            own.sums[worth.SAVED] = 0
            for layer in range(SHAPE.layers):
                worth.count(own, events.event(step, layer), np.ones(SHAPE.total), 10**9)
            misses.append(round(own.sums[worth.SAVED]))
            if request.phase[step]:
                first = own.recency[worth.USED].sum() - before[0]
                assert round(own.sums[worth.OF] - before[1]) == misses[-1] - first
    decoded = np.concatenate([request.phase for request in REQUESTS]) == 1
    lru = compiled_engine.simulate(run("lru", 0))
    np.testing.assert_array_equal(np.array(misses)[decoded], lru.misses[decoded])


class EvenSteps(ScorePolicy):
    """Does something in every second step."""

    def observe(self, event: Event) -> bool:
        self.keep[0, event.experts] = event.serial
        return bool(event.steps[0] % 2)


def test_an_event_of_which_a_policy_does_nothing_is_free() -> None:
    spec = PolicySpec.of(EvenSteps)
    log = compiled_engine.simulate(run(spec, 7))
    steps = np.concatenate([np.arange(len(request.phase)) for request in REQUESTS])
    np.testing.assert_array_equal(log.stall_ns[:, PREDICTOR], np.where(steps % 2, 0, 7 * SHAPE.layers))
    assert_logs_equal(simpy_engine.simulate(run(spec, 7)), log)
