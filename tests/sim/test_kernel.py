"""The compiled engine against the SimPy engine, in every column of the log and every eviction; and against the oracle.

Rules 5, 10 to 15 and 17 to 19 are written twice, and this holds the two equal.

`MOE_FUZZ_CASES` sets how many seeded cases are run (`make fuzz-engines`: 50,000).
"""

import dataclasses
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core import Prefetcher, ScorePolicy, Shape, dispatch, parse
from policies.core.registry import built_in
from sim.engines import compiled_engine, engine, simpy_engine
from sim.experiment import ENGINES, Experiment
from sim.loaded import TimedRun
from sim.loop import decider_of, gpu_run, joined, whole
from sim.profiles.timing import DurationTables, FixedTiming, Link
from tests import reference
from tests.support.logs import columns
from tests.support.reference_cases import (
    STORED_CASES,
    STORED_TIERS_CASES,
    draw_case,
    draw_tiers_case,
    play,
    stored_cases,
)
from tests.support.runs import Draw, Drawn, Lopsided, draw_request, draw_run, draw_tiers_run
from traces import InputError, demo_trace, write_trace
from traces.synthetic import synthetic

CASES = int(os.environ.get("MOE_FUZZ_CASES", "2000"))
BATCHES = 40
TIERS = int(os.environ.get("MOE_FUZZ_CASES", "150"))


def difference(run: Drawn) -> list[str]:
    """Columns in which the engines differ."""
    ours, theirs = run.on(compiled_engine.play), run.on(simpy_engine.play)
    if run.users:  # the engines cut such a run into parts in different places
        ours, theirs = ([joined(parts)] if parts else [] for parts in (ours, theirs))
    assert len(ours) == len(theirs)
    assert run.users or len(ours) == sum(len(request.tokens) > 0 for request in run.requests)
    both = [(columns(our), columns(their)) for our, their in zip(ours, theirs, strict=True)]
    return [
        f"{name} of part {number}"
        for number, (our, their) in enumerate(both)
        for name in our
        if (our[name].dtype, our[name].shape, our[name].tobytes())
        != (their[name].dtype, their[name].shape, their[name].tobytes())
    ]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_engines_are_equal_in_every_column_on_seeded_random_runs(batch: int) -> None:
    for seed in range(batch, CASES, BATCHES):
        run = draw_run(random.Random(seed).randint)
        assert not difference(run), f"draw_run(random.Random({seed}).randint): {run.policy}"


@pytest.mark.parametrize("batch", range(BATCHES))
def test_the_engines_are_equal_in_every_column_on_seeded_random_runs_of_tiers_and_users(batch: int) -> None:
    for seed in range(batch, TIERS, BATCHES):
        run = draw_tiers_run(random.Random(seed).randint)
        assert not difference(run), f"draw_tiers_run(random.Random({seed}).randint): {run.policy}"


@pytest.mark.parametrize("draw", [draw_run, draw_tiers_run])
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_the_engines_are_equal_on_runs_that_hypothesis_shrinks(
    draw: Callable[[Draw], Drawn], data: st.DataObject
) -> None:
    run = draw(lambda low, high: data.draw(st.integers(low, high)))
    assert not difference(run), run


def test_the_random_runs_reach_every_policy_and_every_counter() -> None:
    runs = [draw_run(random.Random(seed).randint) for seed in range(600)]
    played = Counter(name.partition(":")[0] for run in runs for name in run.policy.partition("@")[0].split("+"))
    assert set(played) == {cls.name for cls in dispatch.SERVED} - {"static"}
    assert min(played.values()) >= 10
    logs = [joined(parts) for run in runs if (parts := run.on(compiled_engine.play))]
    for column in ("late", "misses", "prefetch_used", "prefetch_wasted", "evictions"):
        assert sum(getattr(log, column).any() for log in logs) >= 50, column
    reached = np.sum([log.stall_ns.any(axis=0) for log in logs], axis=0)
    assert (reached[:4] >= 20).all()
    assert not reached[4:].any()


def test_the_random_runs_of_tiers_and_users_reach_every_policy_and_every_counter() -> None:
    runs = [draw_tiers_run(random.Random(seed).randint) for seed in range(600)]
    played = Counter(name.partition(":")[0] for run in runs for name in re.split("[+@/]", run.policy))
    assert set(played) >= {cls.name for cls in dispatch.SERVED} - {"static"}
    assert min(played[cls.name] for cls in dispatch.SERVED if cls.name != "static") >= 10
    logs = [joined(parts) for run in runs if (parts := run.on(compiled_engine.play))]
    for column in ("on_host", "reads_demand", "reads_prefetch", "host_evictions", "host_busy_ns", "disk_busy_ns"):
        assert sum(getattr(log, column).any() for log in logs) >= 50, column
    for column in ("late", "prefetch_used", "wasted_bytes", "evictions"):
        assert sum(getattr(log, column).any() for log in logs) >= 50, column
    shared = [log for log in logs if len(log.by_request.step) > len(log.step_ns)]
    assert len(shared) >= 50, "steps of several requests"
    assert sum(log.by_request.waited_ns.any() for log in logs) >= 50
    reached = np.sum([log.stall_ns.any(axis=0) for log in logs], axis=0)
    assert (reached[:6] >= 20).all()


def test_what_is_compiled_is_served_and_so_is_every_score_policy_and_prefetcher_of_today() -> None:
    assert {cls for cls in built_in() if cls.compiled} <= dispatch.SERVED
    assert {cls.name for cls in dispatch.SERVED if issubclass(cls, ScorePolicy)} >= {
        *("lru", "lfu", "fifo", "lfu-perfect", "lfu-aged", "lrfu", "static", "belady", "least-stale"),
        *("multi-criteria", "eamc", "eamc-blend", "expert-map"),
    }
    assert {cls.name for cls in dispatch.SERVED if issubclass(cls, Prefetcher)} >= {
        *("none", "all", "previous", "popular", "markov", "gate", "oracle", "oracle1", "stride"),
        *("eamc", "eamc-blend", "expert-map"),
    }


def test_static_popularity_plays_alike_on_both(tmp_path: Path) -> None:
    trace = synthetic(requests=3, tokens=20, layers=3, experts=6, top_k=2, seed=4)
    write_trace(trace, tmp_path / "profile")
    run = draw_run(random.Random(0).randint)._replace(
        requests=[trace.steps(i) for i in range(3)],
        shape=Shape(3, 6),
        slots=5,
        policy=f"static:profile={tmp_path / 'profile'}+oracle1",
    )
    assert not difference(run)


@pytest.mark.parametrize("batch", range(4))
@pytest.mark.parametrize(("draw", "cases"), [(draw_case, 400), (draw_tiers_case, TIERS)])
def test_the_compiled_engine_equals_the_reference_on_seeded_random_cases(draw, cases: int, batch: int) -> None:
    drawn = [draw(random.Random(seed).randint) for seed in range(batch, cases, 4)]
    served = [case for case in drawn if case["prefetch"] != "scripted"]
    assert len(served) > len(drawn) // 2
    for case in served:
        assert play(case, "compiled") == reference.run_case(case), json.dumps(case)


@pytest.mark.parametrize("path", [STORED_CASES, STORED_TIERS_CASES], ids=lambda path: path.name)
def test_the_compiled_engine_serves_every_stored_case_and_ends_as_two_independent_engines_agreed(path: Path) -> None:
    for number, case in enumerate(stored_cases(path), 1):
        result = play(case, "compiled")
        assert {key: result[key] for key in case["expected"]} == case["expected"], f"stored case {number}"


def test_a_log_of_evictions_that_fills_up_is_read_in_between() -> None:
    trace = synthetic(requests=2, tokens=40, layers=2, experts=5, top_k=2, seed=3)
    run = gpu_run([trace.steps(i) for i in range(2)], Shape(2, 5), 2, parse("lru+all"), TIMING, LINK)
    theirs = simpy_engine.simulate(run)
    short = compiled_engine.Engine(run, decider_of(run))
    most = 4 * (10 + 5)
    short.state = short.state._replace(evictions=np.zeros(most + 3, np.int64))
    ours = whole(lambda _, ended: short.play(ended), run)
    assert len(theirs.evictions) > 4 * most
    np.testing.assert_array_equal(ours.evictions, theirs.evictions)
    np.testing.assert_array_equal(ours.step_ns, theirs.step_ns)


TIMING = FixedTiming(dense=5, expert=2, expert_per_token=1, combine=1, head=3)
LINK = Link(latency_ns=1, ns_per_byte_num=1, ns_per_byte_den=2, expert_bytes=4)


@pytest.mark.parametrize("host", [False, True])
def test_duration_tables_hold_the_timings_own_values_stretch_after_stretch(host: bool) -> None:
    timing = Lopsided(dense=9, expert=7, expert_per_token=5, combine=3, head=11, host=13, host_per_token=2)
    tables = DurationTables(timing, 3, host)
    for seed in range(20):
        request, users = draw_request(random.Random(seed).randint, seed, Shape(3, 4)), 1 + seed % 3
        most = int(request.counts.max(initial=1))
        found = tables.of(request.tokens, request.context, most, users)
        steps = list(zip(request.tokens.tolist(), request.context.tolist(), strict=True))
        dense = [[timing.dense_ns(layer, *step, users) for layer in range(3)] for step in steps]
        np.testing.assert_array_equal(found.dense, np.array(dense, np.int64).reshape(-1, 3))
        combine = [[timing.combine_ns(tokens, layer, context) for layer in range(3)] for tokens, context in steps]
        assert found.combine.tolist() == combine
        assert found.head.tolist() == [timing.head_ns(tokens, users) for tokens, _ in steps]
        for table, ns in ((found.expert, timing.expert_ns), (found.host, timing.host_ns))[: 1 + host]:
            assert table.shape[1] > most
            for layer in range(3):
                assert table[layer, 1:].tolist() == [ns(n, layer) for n in range(1, table.shape[1])]
    assert found.host.size or not host


MY_POLICY = """
from policies.core.policy import ScorePolicy
class Mine(ScorePolicy):
    name = "mine"
    def observe(self, event):
        self.keep[0, event.experts] = event.serial
"""


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("clock", "clock is not one of the built-in"),
        ("clock@layer", "not one of the built-in"),
        ("eamc:capacity=5+eamc:capacity=9", "two different eamc"),
        ("{mine}", "not one of the built-in"),
    ],
)
def test_what_is_not_served_is_one_line_on_compiled_and_plays_on_simpy_under_auto(policy, says, tmp_path) -> None:
    (tmp_path / "mine.py").write_text(MY_POLICY)
    spec = parse(policy.format(mine=f"{tmp_path / 'mine.py'}:Mine"))
    trace = synthetic(requests=2, tokens=10, layers=2, experts=5, top_k=2, seed=3)
    run = [trace.steps(i) for i in range(2)], Shape(2, 5), 4, spec, TIMING, LINK
    with pytest.raises(InputError, match=says):
        engine.simulate("compiled", gpu_run(*run))
    auto, simpy = engine.simulate("auto", gpu_run(*run)), engine.simulate("simpy", gpu_run(*run))
    assert auto.step_ns.tolist() == simpy.step_ns.tolist()
    assert auto.evictions.tolist() == simpy.evictions.tolist()


def test_a_cell_is_the_same_on_either_engine_and_a_sweep_on_compiled_refuses_before_it_plays() -> None:
    cells = {name: TimedRun.of(Experiment(trace=str(demo_trace()), engine=name, requests=2)) for name in ENGINES}
    for policy in ("lru", "eamc-blend"):
        logs = [loaded.log(parse(policy), loaded.all_experts // 4) for loaded in cells.values()]
        assert all(log.step_ns.tolist() == logs[0].step_ns.tolist() for log in logs)
        assert logs[0].evictions.any()
    with pytest.raises(InputError, match="clock"):
        cells["compiled"].require(parse("clock"), 8)
    cells["auto"].require(parse("clock"), 8)
    with pytest.raises(InputError, match="engine"):
        Experiment(trace=str(demo_trace()), engine="compild")


def test_auto_takes_the_compiled_engine_where_it_serves() -> None:
    with patch.object(simpy_engine, "play", side_effect=AssertionError("SimPy was asked")):
        trace = synthetic(requests=1, tokens=5, layers=2, experts=5, top_k=2, seed=3)
        log = engine.simulate("auto", gpu_run([trace.steps(0)], Shape(2, 5), 4, parse("lru"), TIMING, LINK))
    assert log.hits.sum() + log.misses.sum() == 5 * 2 * 2


@pytest.mark.parametrize(
    ("timing", "link"),
    [
        (dataclasses.replace(TIMING, dense=2**53), LINK),
        (TIMING, dataclasses.replace(LINK, expert_bytes=2**53, ns_per_byte_num=2**53)),
    ],
)
def test_times_that_would_wrap_around_are_refused(timing: FixedTiming, link: Link) -> None:
    trace = synthetic(requests=1, tokens=400, layers=2, experts=5, top_k=2, seed=3)
    run = gpu_run([trace.steps(0)], Shape(2, 5), 4, parse("lru"), timing, link)
    with pytest.raises(OverflowError, match="62 bits"):
        compiled_engine.simulate(run)
    endless = dataclasses.replace(run, timing=dataclasses.replace(timing, dense=2**63))
    for name, each in itertools.product(ENGINES[:2], (run, endless)):
        with pytest.raises(InputError, match="64 bits counts in ns: check the times, sizes and rates"):
            engine.simulate(name, each)


SECOND_PROCESS = """
import sys
from numba.core.dispatcher import Dispatcher
from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.engines.compiled_streams import run_steps
from sim.loop.run import Tier, Users, gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.synthetic import synthetic
trace = synthetic(requests=2, tokens=10, layers=2, experts=5, top_k=2, seed=3)
requests = [trace.steps(i) for i in range(2)]
times = FixedTiming(5, 2, 1, 1, 3), Link(1, 1, 2, 4)
for policy in ("lru", "lfu+oracle1", "eamc", "eamc-blend", "belady+markov", "expert-map", "lru+popular:budget=1"):
    compiled_engine.simulate(gpu_run(requests, Shape(2, 5), 4, parse(policy), *times, experts_per_layer=1.0))
disk, users = Tier(5, None, Link(9, 1, 1, 4)), Users(2, (0, 50))
for policy in ("lru/split", "eamc/host", "belady+oracle1"):
    compiled_engine.simulate(gpu_run(requests, Shape(2, 5), 4, parse(policy), *times, host=disk, users=users))
used = {
    id(value): value
    for name, module in sys.modules.items()
    if name.partition(".")[0] in ("policies", "sim")
    for value in vars(module).values()
    if isinstance(value, Dispatcher)
}
compiled = [value.py_func.__qualname__ for value in used.values() if value.stats.cache_misses]
print(len(run_steps.signatures), sum(run_steps.stats.cache_hits.values()), compiled)
"""


def test_a_second_process_compiles_nothing_and_two_kernels_serve_all_policies_and_tiers() -> None:
    exec(SECOND_PROCESS, {})  # here: what is still to be compiled
    command = [sys.executable, "-c", SECOND_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    answer = done.stdout.split(maxsplit=2)
    assert answer == ["2", "2", "[]\n"]
