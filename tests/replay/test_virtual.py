"""The virtual device against the simulator: every column of the log, to the nanosecond."""

import dataclasses
import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.policy import Shape
from policies.core.spec import parse
from replay.devices.device import Kind
from replay.devices.virtual import VirtualDevice
from replay.driver import Plan, play
from sim.engines.cases import case_request, case_result
from sim.engines.simpy_engine import simulate
from sim.loop.log import Run, RunLog
from sim.profiles.hardware_profile import hardware
from sim.profiles.model_profile import model
from sim.profiles.timing import FixedTiming, Link, Roofline, Timing, experts_per_layer, host_link
from sim.sweep.setup import Requests
from tests.replay.cases import Case, draw
from traces.synthetic import synthetic

STORED_CASES = Path(__file__).parents[1] / "sim" / "cases.jsonl.gz"


def both(plan: Plan, timing: Timing, link: Link) -> tuple[RunLog, RunLog]:
    """The same run on the virtual device and in the simulator."""
    L, E = plan.shape.layers, plan.shape.experts
    ours = play(plan, VirtualDevice(timing, link))
    return ours, simulate(
        Run(
            *(plan.requests, L, E, plan.slots, plan.policy, timing, link, plan.cold),
            experts_per_layer=plan.experts_per_layer,
        )
    )


def assert_equal(ours: RunLog, theirs: RunLog) -> None:
    for field in dataclasses.fields(RunLog):
        np.testing.assert_array_equal(getattr(ours, field.name), getattr(theirs, field.name), field.name)


def stored(case: dict[str, Any]) -> Case:
    """A case of the conformance format."""
    prefetch = f"popular:n={case['popular_n']}" if case["prefetch"] == "popular" else case["prefetch"]
    durations = [case[key] for key in ("dense_ns", "expert_ns", "expert_ns_per_token", "combine_ns", "head_ns")]
    link = [case[key] for key in ("link_latency_ns", "link_ns_per_byte_num", "link_ns_per_byte_den")]
    plan = Plan(
        [case_request(ordinal, steps, case["E"]) for ordinal, steps in enumerate(case["requests"])],
        Shape(case["L"], case["E"]),
        case["slots"],
        parse(f"{case['evict']}+{prefetch}"),
        case["expert_bytes"],
        case["chunk_bytes"],
        case["cold"],
    )
    timing = FixedTiming(*durations, predictor_ns=case["predictor_ns"])
    return Case(plan, timing, Link(*link, case["expert_bytes"], case["chunk_bytes"]))


def test_virtual_replay_of_every_stored_case_is_as_expected_and_equals_the_simulator() -> None:
    with gzip.open(STORED_CASES, "rt", encoding="utf-8") as lines:
        cases = [json.loads(line) for line in lines]
    assert len(cases) == 400
    for one in cases:
        case = stored(one)
        ours, theirs = both(case.plan, case.timing, case.link)
        assert case_result(ours) == one["expected"]
        assert_equal(ours, theirs)


def test_virtual_replay_equals_the_simulator_on_seeded_random_runs() -> None:
    for seed in range(500):
        case = draw(random.Random(seed).randint)
        assert_equal(*both(case.plan, case.timing, case.link))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_virtual_replay_equals_the_simulator_on_runs_that_hypothesis_shrinks(data: st.DataObject) -> None:
    case = draw(lambda low, high: data.draw(st.integers(low, high)))
    assert_equal(*both(case.plan, case.timing, case.link))


@pytest.mark.parametrize(
    "policy",
    [
        *("eamc", "lru+eamc", "lfu", "fifo", "belady+oracle1", "lru+popular:n=8"),
        *("lru+popular:n=8@layer", "eamc@layer", "arc+oracle1@layer"),
        *("lru+gate", "lru+markov:n=8:threshold=0.1:budget=2"),
    ],
)
@pytest.mark.parametrize(("chunks", "cold", "predictor_ns"), [(1, False, 0), (3, True, 0), (3, False, 30_000)])
def test_virtual_replay_equals_the_simulator_on_profiles_prefills_and_real_policies(
    policy: str, chunks: int, cold: bool, predictor_ns: int
) -> None:
    profile = dataclasses.replace(model("olmoe-1b-7b"), moe_layers=6, experts=16, top_k=4)
    machine = hardware("rtx4090")
    trace = synthetic(requests=6, tokens=12, layers=6, experts=16, top_k=4, seed=7, prompt_tokens=9)
    trace = dataclasses.replace(trace, lookahead=np.roll(trace.experts, 1, axis=0))
    timing = Roofline(machine, profile, predictor_ns)
    link = host_link(machine, profile, -(-profile.expert_bytes // chunks))
    plan = Plan(
        *(Requests(trace), Shape(6, 16), 30, parse(policy), link.expert_bytes, link.chunk_bytes, cold),
        experts_per_layer=experts_per_layer(timing, link, layers=6, top_k=4),
    )
    ours, theirs = both(plan, timing, link)
    assert_equal(ours, theirs)
    assert ours.misses.sum() > 0
    assert (ours.step_ns == ours.compute_busy_ns + ours.stall_ns.sum(axis=1)).all()


def test_a_chunk_precedes_a_compute_of_the_same_instant() -> None:
    device = VirtualDevice(FixedTiming(5, 0, 0, 0, 0), Link(0, 1, 1, expert_bytes=5))
    device.dense(0, 1, 1)
    device.copy(3, 0, 0, 5)
    assert [device.next_completion().kind for _ in range(2)] == [Kind.COPY, Kind.ROUTER]
    assert device.now() == 5
    with pytest.raises(RuntimeError, match="nothing is under way"):
        device.next_completion()
