"""The compiled engine against the SimPy engine, in every column of the log and every eviction.

Rules 5, 10 to 15 and 17 to 19 are written twice, and this holds the two equal.

`MOE_FUZZ_CASES` sets how many seeded cases are run (`make fuzz-engines`: 50,000).
"""

import dataclasses
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from policies.core.calling import put
from policies.core.compiled import kept_for
from policies.core.dispatch import is_compiled
from policies.core.guard import PolicyError
from policies.core.policy import Event, Int, Options, Policy, Prefetcher, ScorePolicy, Shape
from policies.core.registry import built_in
from policies.core.residency_compiled import FEW_SLOTS
from policies.core.runner import AskedRunner
from policies.core.spec import PolicySpec, parse
from sim.engines import compiled_engine, simpy_engine
from sim.engines.untimed import count
from sim.loop.log import RunLog, joined, whole
from sim.loop.run import Run, gpu_run
from sim.loop.session import decider_of
from sim.profiles.timing import DurationTables, FixedTiming, Link
from tests.support.logs import columns
from tests.support.runs import PLAIN, Draw, Drawn, Lopsided, draw_request, draw_run, draw_tiers_run
from traces import InputError
from traces.synthetic import synthetic
from traces.writer import write_trace

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


def together(sizes: list[Drawn]) -> list[list[RunLog]]:
    """What the compiled engine leaves behind of runs that differ in their slots alone, run together."""
    logs: list[list[RunLog]] = [[] for _ in sizes]
    runs = [each.run for each in sizes]
    sizes[0].on(lambda run, ended: compiled_engine.play_cells(runs, [parts.append for parts in logs]))
    return logs


@pytest.mark.parametrize("batch", range(10))
def test_runs_of_several_sizes_together_are_as_each_alone(batch: int) -> None:
    for seed in range(batch, CASES // 4, 10):
        integer = random.Random(seed).randint
        drawn = (draw_run, draw_tiers_run)[seed % 3 == 0](integer)
        if seed % 2:
            drawn = drawn._replace(policy=("eamc-blend", "eamc-blend:wrong=0.01:distance=1")[integer(0, 1)])
        sizes = [drawn._replace(slots=drawn.slots * times) for times in (2, 1, 3)]
        for each, parts in zip(sizes, together(sizes), strict=True):
            alone = each.on(compiled_engine.play)
            assert len(alone) == len(parts)
            for ours, theirs in zip(map(columns, parts), map(columns, alone), strict=True):
                for name in ours:
                    np.testing.assert_array_equal(ours[name], theirs[name], f"{name}, seed {seed}: {drawn.policy}")


@pytest.mark.parametrize("policy", ["eamc", "eamc:keep=least-visited+none", "lfu", "lru+eamc", "eamc-blend", "belady"])
def test_the_engines_are_equal_where_victims_are_sought_by_blocks(policy: str) -> None:
    shape, slots = Shape(4, 512), FEW_SLOTS + 1
    trace = synthetic(3, 60, 4, 512, top_k=32, seed=1)
    requests, timing = [trace.steps(i) for i in range(3)], FixedTiming(90_000, 1_000, 10, 100, 1_000)
    run = gpu_run(requests, shape, slots, parse(policy), timing, Link(1_000, 1, 24, 200_000))
    ours, theirs = (columns(each.simulate(run)) for each in (compiled_engine, simpy_engine))
    assert len(ours["evictions"]) > FEW_SLOTS
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], name)


def test_the_random_runs_reach_every_policy_and_every_counter() -> None:
    runs = [draw_run(random.Random(seed).randint) for seed in range(600)]
    played = Counter(name.partition(":")[0] for run in runs for name in run.policy.partition("@")[0].split("+"))
    assert set(played) == {cls.name for cls in PLAIN} | {"none"}
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
    assert min(played[cls.name] for cls in PLAIN) >= 10
    logs = [joined(parts) for run in runs if (parts := run.on(compiled_engine.play))]
    for column in ("on_host", "reads_demand", "reads_prefetch", "host_evictions", "host_busy_ns", "disk_busy_ns"):
        assert sum(getattr(log, column).any() for log in logs) >= 50, column
    for column in ("late", "prefetch_used", "wasted_bytes", "evictions", "admitted", "bypassed", "copies"):
        assert sum(getattr(log, column).any() for log in logs) >= 50, column
    shared = [log for log in logs if len(log.by_request.step) > len(log.step_ns)]
    assert len(shared) >= 50, "steps of several requests"
    assert sum(log.by_request.waited_ns.any() for log in logs) >= 50
    reached = np.sum([log.stall_ns.any(axis=0) for log in logs], axis=0)
    assert (reached[:6] >= 20).all()


def test_every_score_policy_and_prefetcher_of_today_is_compiled() -> None:
    compiled = {cls.name for cls in built_in() if is_compiled(cls)}
    assert compiled >= {
        *("lru", "lfu", "fifo", "lfu-perfect", "lfu-aged", "lrfu", "static", "belady", "least-stale"),
        *("multi-criteria", "eamc", "eamc-blend", "expert-map"),
        *("all", "previous", "popular", "markov", "gate", "oracle", "oracle1"),
    }


class Newest(ScorePolicy):
    """Keeps what was looked up last, as `lru` does."""

    def observe(self, event: Event) -> None:
        self.keep[0, event.experts] = event.serial


class Stack(Policy):
    """Evicts what came last, of what was hit the least; hears all that a policy may hear of."""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.came, self.hits, self.gone, self.events = np.zeros(shape.total), np.zeros(shape.total), list[int](), 0

    def observe(self, event: Event) -> None:
        self.events += len(event.token_ids) + event.layer

    def on_hit(self, expert: int, serial: int) -> None:
        self.hits[expert] = serial

    def on_insert(self, expert: int, serial: int, start: int) -> None:
        self.came[expert] = serial + start + self.events

    def on_evict(self, expert: int) -> None:
        self.hits[expert] = self.came[expert] = 0
        self.gone.append(expert)

    def victim(self, evictable: Int) -> int:
        order = np.lexsort((-self.came[evictable], self.hits[evictable] + len(self.gone) % 3))
        return int(evictable[order[0]])


class Neighbours(Prefetcher):
    """Fetches of the next layer what was chosen in this one, and of the first one when a step starts."""

    at_start = True

    def observe(self, event: Event) -> None:
        self.latest = event

    def propose(self, event: Event) -> tuple[Int, NDArray[np.float64]]:
        shape = self.shape
        ids = np.unique(event.token_ids % shape.experts if event.layer < 0 else event.experts + shape.experts)
        ids = ids % shape.total
        return ids, -ids.astype(np.float64)


OWN = [PolicySpec.of(Newest), PolicySpec.of(Stack), PolicySpec.of("lru", Neighbours), PolicySpec.of(Stack, Neighbours)]
OWN += [PolicySpec.of(Newest, "eamc-blend"), PolicySpec.of("eamc", Neighbours), PolicySpec.of(Stack, scope="layer")]


@pytest.mark.parametrize("spec", OWN, ids=lambda spec: spec.text)
def test_a_users_policy_in_python_decides_alike_on_both(spec: PolicySpec) -> None:
    tiered = {False: 0, True: 0}
    for seed in range(60):
        drawn = (draw_tiers_run if seed % 3 else draw_run)(random.Random(seed).randint)
        if drawn.link.layer_bytes and spec.scope.cls.per_layer:
            continue
        run = drawn._replace(slots=max(drawn.slots, drawn.shape.layers)).run
        placed = PolicySpec.of(spec.evict, spec.prefetch, spec.scope, run.policy.placement, run.policy.admission)
        ours, theirs = (columns(whole(engine.play, run.under(placed))) for engine in (compiled_engine, simpy_engine))
        for name, column in ours.items():
            assert column.tobytes() == theirs[name].tobytes(), f"{name} of seed {seed}"
        tiered[compiled_engine.tiered(run)] += len(ours["evictions"]) > 0
    assert min(tiered.values()) >= 5


@pytest.mark.parametrize("where", ["victim", "observe", "propose", "on_insert"])
def test_what_a_users_policy_raises_comes_through_compiled_code(where: str) -> None:
    def broken(self: object, *given: object) -> None:
        raise KeyError("deliberate")

    half = type("Broken", (Neighbours if where == "propose" else Stack,), {where: broken})
    spec = PolicySpec.of("lru", half) if where == "propose" else PolicySpec.of(half)
    trace = synthetic(requests=2, tokens=10, layers=2, experts=5, top_k=2, seed=3)
    run = gpu_run([trace.steps(i) for i in range(2)], Shape(2, 5), 4, spec, TIMING, LINK)
    for play_on in (compiled_engine.simulate, simpy_engine.simulate):
        with pytest.raises(PolicyError, match=r"test_kernel\.py:.*KeyError: 'deliberate'"):
            play_on(run)
    with pytest.raises(PolicyError, match="deliberate") if where != "propose" else nullcontext():
        count(run.requests, 2, 5, 4, spec)


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


def test_a_log_of_evictions_that_fills_up_is_read_in_between() -> None:
    trace = synthetic(requests=2, tokens=40, layers=2, experts=5, top_k=2, seed=3)
    run = gpu_run([trace.steps(i) for i in range(2)], Shape(2, 5), 2, parse("lru+all"), TIMING, LINK)
    theirs = simpy_engine.simulate(run)
    short, most = compiled_engine.Engine([run], decider_of(run)), 4 * (10 + 5)
    cell = short.cells[0]
    cell.evictions = np.zeros(most + 3, np.int64)
    cell.held.hold(cell.state._replace(evictions=cell.evictions))
    ours = whole(lambda _, ended: short.play([ended]), run)
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
    endless = dataclasses.replace(run, timing=dataclasses.replace(timing, dense=2**63))
    for each in (run, endless):
        with pytest.raises(InputError, match="64 bits counts in ns: check the times, sizes and rates"):
            compiled_engine.simulate(each)


SECOND_PROCESS = """
import sys
from numba.core.dispatcher import Dispatcher
from policies.core.dispatch import MADE
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
compiled += [key for key, made in MADE.items() if not made.kept]
print(len(run_steps.signatures), sum(run_steps.stats.cache_hits.values()), compiled)
"""


def test_a_second_process_compiles_nothing_and_two_kernels_serve_all_policies_and_tiers() -> None:
    exec(SECOND_PROCESS, {})  # here: what is still to be compiled
    command = [sys.executable, "-c", SECOND_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True)
    answer = done.stdout.split(maxsplit=2)
    assert answer == ["2", "2", "[]\n"]


OWN_KERNEL = """
from typing import NamedTuple
import numpy as np
from policies.core.compiled import compiled
from policies.core.policy import Compiled, Prefetcher, ScorePolicy

class Seen(NamedTuple):
    latest: np.ndarray  # [L*E]
    half: float

def begin(shape, options):
    return Seen(np.zeros(shape.total, np.int64), 0.5)

@compiled
def observe(seen, keep, event):
    for expert in event.experts:
        seen.latest[expert] = event.serial
        keep[1, expert] = seen.half * event.serial

@compiled
def on_lookup(keep, expert, serial):
    keep[0, expert] += 1

@compiled
def propose(seen, event, ids, priorities):
    n = 0
    for expert in event.experts:
        ids[n], priorities[n] = (expert + 1) % len(ids), seen.half
        n += 1
    return n

class Often(ScorePolicy):
    compiled = Compiled(begin, observe, on_lookup=on_lookup)

class Next(Prefetcher):
    compiled = Compiled(begin, propose=propose)
"""


@pytest.mark.parametrize("simulated", [compiled_engine.simulate, simpy_engine.simulate])
def test_ids_that_no_expert_has_are_refused_of_a_users_own_kernel(
    simulated: Callable[[Run], RunLog], tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text(OWN_KERNEL.replace("(expert + 1) % len(ids)", "expert + 1"))
    trace = synthetic(requests=3, tokens=30, layers=3, experts=8, top_k=2, seed=3)
    spec = parse(f"lru+{tmp_path / 'wrong.py'}:Next")
    run = gpu_run([trace.steps(i) for i in range(3)], Shape(3, 8), 9, spec, TIMING, LINK)
    with pytest.raises(ValueError, match="proposes ids that no expert has"):
        simulated(run)


@pytest.mark.parametrize("simulated", [compiled_engine.simulate, simpy_engine.simulate])
def test_an_error_of_a_users_own_kernel_ends_the_run(simulated: Callable[[Run], RunLog], tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(
        OWN_KERNEL.replace("keep[0, expert] += 1", "keep[0, expert] += 1 // (serial - 9)")
    )
    trace = synthetic(requests=3, tokens=30, layers=3, experts=8, top_k=2, seed=3)
    run = gpu_run(
        [trace.steps(i) for i in range(3)], Shape(3, 8), 9, parse(f"{tmp_path / 'wrong.py'}:Often"), TIMING, LINK
    )
    with pytest.raises(RuntimeError, match="a compiled policy raised an error: call the `py_func`"):
        simulated(run)


def test_a_kernel_in_a_users_own_file_runs_as_a_built_in_ones_does(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_KERNEL)
    spec = parse(f"{tmp_path / 'own.py'}:Often+{tmp_path / 'own.py'}:Next")
    assert spec.compiled
    trace = synthetic(requests=3, tokens=30, layers=3, experts=8, top_k=2, seed=3)
    run = gpu_run([trace.steps(i) for i in range(3)], Shape(3, 8), 9, spec, TIMING, LINK)
    with patch.object(AskedRunner, "__init__", side_effect=AssertionError("Python was asked")):
        ours = columns(compiled_engine.simulate(run))
    theirs = columns(simpy_engine.simulate(run))
    assert ours["prefetch_used"].sum() > 0 < len(ours["evictions"])
    assert "Seen" not in str(kept_for(put))  # what is on disk is read by processes that do not know the file
    assert all(column.tobytes() == theirs[name].tobytes() for name, column in ours.items())
