"""A simulated run's decisions, executed: exactly on SimPy's device, in order on devices that end in any order."""

import dataclasses
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from policies.core import residency_compiled as core
from policies.core.policy import Shape
from policies.core.residency import PolicyResidency
from policies.core.script import Act, Decision, Script
from policies.core.spec import PolicySpec, parse
from replay.comparison.cell import Lockstep, LoopRecorder
from replay.warmup import undisturbed
from sim.engines.simpy_engine import SimpyDevice, simulate
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from sim.loop.run import Run, gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.devices import AnyOrder, Watch, run_of
from tests.support.driven import play
from tests.support.logs import assert_logs_equal
from tests.support.replay_runs import draw
from traces.synthetic import synthetic

seeded = pytest.mark.parametrize("seeds", [range(120), pytest.param(range(120, 600), marks=pytest.mark.slow)], ids=str)


def script_of(run: Run) -> tuple[Script, RunLog]:
    """What the simulated run decides, and its log."""
    recorder = LoopRecorder()
    log = play(run, SimpyDevice.of(run), observer=recorder)
    return recorder.script, log


def executed(plan: Run, script: Script, seed: int) -> tuple[LoopRecorder, RunLog, Watch]:
    """On a device whose streams end in any order; what the link was really told stands in the recorder."""
    watch = Watch.of(plan, tail_bytes=seed % 2 * (1 + seed % 5))
    recorder = LoopRecorder()
    log = play(plan, AnyOrder(watch, seed), observer=recorder, decider=Lockstep(plan, script))
    return recorder, log, watch


@seeded
def test_on_the_simulated_machine_lockstep_equals_the_run_that_was_scripted_on_seeded_random_runs(seeds: range) -> None:
    interrupted = resumed = predicted = cut = 0
    for seed in seeds:
        case = draw(random.Random(seed).randint)
        script, log = script_of(case)
        assert_logs_equal(play(case, SimpyDevice.of(case), decider=Lockstep(case, script)), log, f"seed {seed}")
        interrupted += any(decision.interrupts for decision in script.decisions)
        resumed += any(decision.act is Act.RESUME for decision in script.decisions)
        predicted += case.timing.predictor_ns > 0 and script.proposes
        cut += bool(script.cuts)
    assert min(interrupted, resumed, predicted, cut) > len(seeds) // 30, "these cases were there"


def stretches(script: Script) -> list[list[tuple[Act, int, tuple[int, ...]]]]:
    """The transfers started, by the cuts between them."""
    bounds = [0, *script.cuts, len(script.decisions)]
    return [
        [(one.act, one.expert, one.victims) for one in script.decisions[first:last] if one.act is not Act.RESUME]
        for first, last in pairwise(bounds)
    ]


def assert_executed(plan: Run, script: Script, log: RunLog, seed: int) -> bool:
    """All that a run in lockstep promises on any device; whether it met other experts in time than the simulator."""
    recorder, ours, watch = executed(plan, script, seed)
    asked, done = stretches(script), stretches(recorder.script)
    assert len(asked) == len(done)
    for wanted, found in zip(asked, done, strict=True):
        assert found == wanted[: len(found)], f"seed {seed}: transfers, slots and kinds are the script's, in its order"
    victims = [victim for stretch in done for _, _, those in stretch for victim in those]
    assert ours.evictions.tolist() == victims
    lookups = sum(len(request.experts) for request in plan.requests)
    assert watch.computed == lookups
    np.testing.assert_array_equal(ours.hits + ours.late + ours.misses, log.hits + log.late + log.misses)
    # What the simulator demanded in a step may be there still, as its victim leaves late, and be missed in a later one.
    assert (ours.misses.cumsum() <= log.misses.cumsum()).all(), "an expert that was not demanded is no miss"
    left = ours.prefetch_transfers.sum() - ours.prefetch_used.sum() - ours.prefetch_wasted.sum()
    assert 0 <= left <= plan.gpu.slots
    return bool((ours.late != log.late).any())


@seeded
def test_on_any_device_lockstep_never_stands_still_and_transfers_and_evictions_are_the_scripts(seeds: range) -> None:
    differ = 0
    for seed in seeds:
        case = draw(random.Random(seed).randint)
        script, log = script_of(case)
        for order in (seed, seed + 1):  # with and without tails
            differ += assert_executed(case, script, log, order)
    assert differ > len(seeds) // 4, "the devices were not like the simulator"


@seeded
def test_nothing_starts_before_the_event_after_which_the_simulator_decided_it(seeds: range) -> None:
    early = behind = 0
    for seed in seeds:
        case = draw(random.Random(seed).randint)
        script, _ = script_of(case)
        recorder, _, _ = executed(case, script, seed)
        if script.cuts:
            continue  # the two would have to be laid over each other, stretch by stretch
        starts = [[one for one in each.decisions if one.act is not Act.RESUME] for each in (script, recorder.script)]
        for scripted, started in zip(*starts, strict=False):
            assert started.moment >= scripted.moment, f"seed {seed}"
            behind += started.moment > scripted.moment
            early += 1
    assert early > 4 * len(seeds)
    assert behind > len(seeds), "the devices were not late"


@pytest.mark.parametrize("policy", ["belady", "belady+oracle1", "lru", "eamc", "lru+popular:n=4"])
def test_the_decisions_of_real_policies_and_oracles_are_executed_as_the_simulator_took_them(policy: str) -> None:
    trace = synthetic(requests=5, tokens=12, layers=4, experts=8, top_k=2, seed=5, prompt_tokens=4)
    timing, link = FixedTiming(9, 2, 1, 1, 5), Link(2, 3, 2, expert_bytes=64)
    plan = gpu_run(list(Requests(trace)), Shape(4, 8), 10, parse(policy), timing, link, experts_per_layer=1.0)
    script, theirs = script_of(plan)
    assert_logs_equal(simulate(plan), theirs, policy)
    for seed in range(20):
        _, ours, _ = executed(plan, script, seed)
        np.testing.assert_array_equal(ours.evictions, theirs.evictions[: len(ours.evictions)])
        if not plan.policy.prefetches:
            np.testing.assert_array_equal(ours.misses, theirs.misses)
            np.testing.assert_array_equal(ours.demand_transfers, theirs.demand_transfers)


def driven(*decisions: Decision, slots: int) -> PolicyResidency:
    """The machine of a script for four experts of one layer."""
    plan = run_of([], Shape(1, 4), slots, parse("lru"), 1)
    return Lockstep(plan, Script(list(decisions))).residency(slots)


NOTHING_STARTS = (-1, -1)
INTERRUPTION = (
    Decision(Act.PREFETCH, 0, (), 0),
    Decision(Act.DEMAND, 2, (), 1, interrupts=True),
    Decision(Act.RESUME, 0, (), 1),
    Decision(Act.DEMAND, 3, (), 1),
)


def test_a_prefetch_is_interrupted_once_the_demands_event_has_come_and_resumed_behind_it() -> None:
    machine = driven(*INTERRUPTION, slots=3)
    assert machine.next_transfer() == (0, -1, True)
    assert machine.interrupt() == NOTHING_STARTS
    machine.route(np.array([2, 3]))
    assert machine.interrupt() == (2, -1)
    machine.arrived()
    assert machine.next_transfer() == (0, -1, True)
    assert machine.interrupt() == NOTHING_STARTS
    machine.arrived()
    assert machine.next_transfer() == (3, -1, False)


def test_a_prefetch_that_was_never_interrupted_is_not_resumed() -> None:
    machine = driven(*INTERRUPTION, slots=3)
    machine.next_transfer()
    machine.arrived()
    machine.route(np.array([2, 3]))
    assert machine.next_transfer() == (2, -1, False)
    machine.arrived()
    assert machine.next_transfer() == (3, -1, False)
    machine.arrived()
    assert machine.next_transfer()[0] == core.NO_EXPERT


def test_a_prefetch_that_the_event_waits_for_is_not_interrupted() -> None:
    machine = driven(*INTERRUPTION, slots=3)
    machine.next_transfer()
    machine.route(np.array([0, 2, 3]))
    assert machine.interrupt() == NOTHING_STARTS


def test_a_prefetch_that_the_link_has_not_come_to_is_late_and_what_the_script_demands_is_a_miss() -> None:
    decided = Decision(Act.PREFETCH, 1, (), 0), Decision(Act.DEMAND, 2, (), 1), Decision(Act.DEMAND, 3, (1,), 1)
    machine = driven(*decided, slots=2)
    assert machine.route(np.array([1, 2]))[0] == []
    assert machine.counters()[:3] == [0, 1, 1]
    assert machine.next_transfer() == (1, -1, True)
    assert machine.counters()[3:7] == [0, 1, 1, 0], "a prefetch that was looked up as it started"
    machine.arrived()
    assert machine.next_transfer() == (2, -1, False)
    machine.arrived()
    assert machine.next_transfer()[0] == core.BLOCKED, "expert 1 waits to be computed"
    machine.computed(1)
    assert machine.next_transfer() == (3, 1, False)


def test_a_victim_that_is_landing_holds_its_slot_until_it_is_whole() -> None:
    machine = driven(Decision(Act.PREFETCH, 1, (), 0), Decision(Act.PREFETCH, 2, (1,), 0), slots=1)
    assert machine.next_transfer() == (1, -1, True)
    machine.land()
    assert machine.next_transfer()[0] == core.BLOCKED
    machine.arrived()
    assert machine.next_transfer() == (2, 1, True)


@dataclasses.dataclass(frozen=True)
class Unasked(PolicySpec):
    """A policy that cannot be built."""

    def build(self, shape: Shape, guarded: bool = True):
        raise AssertionError("lockstep asked the policy")


def test_the_devices_policy_is_not_asked() -> None:
    case = draw(random.Random(3).randint)
    script, log = script_of(case)
    unasked = Unasked(**{f.name: getattr(parse("lru"), f.name) for f in dataclasses.fields(PolicySpec)})
    plan = case.under(dataclasses.replace(unasked, scope=case.policy.scope))
    assert_logs_equal(play(plan, SimpyDevice.of(case), decider=Lockstep(plan, script)), log)


def test_a_device_that_is_slower_in_copying_takes_longer_for_the_same_decisions() -> None:
    trace = synthetic(requests=3, tokens=10, layers=3, experts=8, top_k=2, seed=1)
    timing, link = FixedTiming(40, 5, 0, 1, 5), Link(0, 1, 1, 64)
    plan = gpu_run(list(Requests(trace)), Shape(3, 8), 8, parse("eamc"), timing, link, experts_per_layer=1.0)
    script, log = script_of(plan)
    slow = play(plan, SimpyDevice(timing, Link(0, 3, 1, 64)), decider=Lockstep(plan, script))
    assert slow.step_ns.sum() > log.step_ns.sum()
    np.testing.assert_array_equal(slow.misses, log.misses)


def test_before_a_run_in_lockstep_its_own_decisions_are_gone_through_and_left_as_they_were() -> None:
    """So that nothing is compiled or loaded in the run; what decides there is no policy."""
    plan = draw(random.Random(3).randint)
    script, log = script_of(plan)
    asked: list[PolicyResidency] = []

    class Heard(Lockstep):
        def residency(self, *given: Any) -> PolicyResidency:
            asked.append(super().residency(*given))
            return asked[-1]

    decider = Heard(plan, script)
    with undisturbed(plan, decider):
        assert len(asked) == 1
        again = play(plan, SimpyDevice(plan.timing, plan.gpu.link), decider=decider)
    assert_logs_equal(again, log)
