"""Ranges for profilers: balanced, nested, one for each step, layer and submission; and nothing else changes."""

import numpy as np

from policies.core import Shape, parse
from replay.devices import marked
from sim.engines import SimpyDevice
from sim.loop import Requests, play
from sim.profiles.timing import FixedTiming, Link
from tests.support.devices import run_of
from traces.synthetic import synthetic


def test_steps_hold_layers_hold_submissions_and_all_are_closed() -> None:
    trace = synthetic(2, 6, layers=3, experts=8, top_k=2, seed=1, prompt_tokens=4)
    plan = run_of(Requests(trace), Shape(3, 8), 7, parse("lru"), 10)

    def device() -> SimpyDevice:
        return SimpyDevice(FixedTiming(9, 2, 0, 1, 1), Link(0, 1, 1, 10))

    opened: list[str] = []
    seen: list[tuple[str, ...]] = []

    def push(name: str) -> None:
        opened.append(name.split()[0])
        seen.append(tuple(opened))

    log, plain = play(plan, marked(device(), push, opened.pop)), play(plan, device())
    assert opened == []
    np.testing.assert_array_equal(log.step_ns, plain.step_ns)
    steps = len(log.step_ns)
    assert seen.count(("step",)) == seen.count(("step", "head")) == steps
    assert seen.count(("step", "layer")) == 3 * steps
    assert sum(path[-1] == "copy" for path in seen) == log.demand_transfers.sum()
    assert {path[:-1] for path in seen if path[-1] == "experts"} == {("step", "layer")}
