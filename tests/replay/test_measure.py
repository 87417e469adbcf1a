"""Measuring a device: on a simulated one the answer is known, and devices made worse show what is made of it."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from policies.core.policy import Shape
from policies.core.spec import parse
from replay.calibration.in_loop import (
    FIRST_STEPS,
    at_most_as_beside,
    effective,
    half_missing,
    half_missing_in_loop,
    parts_ns,
    same_again,
    slowed_by,
    tokens_in_loop,
    with_host,
)
from replay.calibration.measure import PASSES, combined, measure_model, one_pass, policy_ns, steady_ns
from replay.calibration.meter import Meter, rising
from replay.calibration.parts import _pumped, decoded_contexts, ladder, slowed, top_k, transfers
from replay.devices.cuda import CudaDevice, Launches
from replay.devices.store import HostStore
from replay.devices.waiting import Pace
from replay.model.network import Network
from sim.engines.compiled_engine import simulate
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.device import Completion, Device, Kind, Work
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from sim.loop.run import Run
from sim.profiles.measured import MeasuredModel, MeasuredTiming
from sim.profiles.timing import FixedTiming, Link, Timing
from tests.support.devices import AnyOrder, Watch, run_of
from tests.support.driven import play
from tests.support.fake_gpu import FakeGpu
from tests.support.profiles import HALF, plain
from tests.support.short_calibrations import shorten
from traces.steps import DECODE, PREFILL
from traces.synthetic import synthetic

LAYERS, EXPERTS, TOP_K = 3, 8, 2
SHAPE = Shape(LAYERS, EXPERTS)
LINK = Link(40, 3, 1, expert_bytes=400, chunk_bytes=100)


def plan_of(
    slots: int = 6,
    policy: str = "lru",
    prompt: int = 0,
    expert_bytes: int = LINK.expert_bytes,
    chunk_bytes: int | None = LINK.chunk_bytes,
) -> Run:
    requests = Requests(synthetic(2, 5, LAYERS, EXPERTS, TOP_K, seed=1, prompt_tokens=prompt))
    return run_of(requests, SHAPE, slots, parse(policy), expert_bytes, chunk_bytes, experts_per_layer=1.0)


@dataclass(frozen=True)
class Growing(FixedTiming):
    """Layer 0 is longer, and tokens and context count."""

    def dense_ns(self, layer: int, tokens: int, context: int, requests: int = 1) -> int:
        return (self.dense if layer else 5 * self.dense) + 7 * tokens + context


TIMING = Growing(11, 5, 2, 3, 7)


def measure(device: Device, plan: Run, most_tokens: int) -> tuple[MeasuredTiming, Link]:
    model = measure_model(device, plan, most_tokens, "this machine").model
    return model.timing(policy_ns(plan, device)), model.link(plan.gpu.link.chunk_bytes)


def all_hit_ns(device: Device, plan: Run, context: int) -> int:
    """A token whose experts are all there, run."""
    request = same_again(plan, TOP_K, LAYERS, context, steps=3)
    return int(play(replace(plan, requests=[request]), device).step_ns[-1])


def predicted_ns(timing: Timing, context: int) -> int:
    dense = sum(timing.dense_ns(layer, 1, context) for layer in range(LAYERS))
    return dense + LAYERS * (TOP_K * timing.expert_ns(1) + timing.combine_ns(1)) + timing.head_ns(1)


@pytest.mark.parametrize("slots", [1, 2, 4, 6, 24])
@pytest.mark.parametrize("prompt", [0, 9])
def test_measuring_a_simulated_device_gives_back_its_profile(slots: int, prompt: int) -> None:
    plan = plan_of(slots, prompt=prompt)
    found, link = measure(SimpyDevice(TIMING, LINK), plan, most_tokens=9)
    assert (found.predictor_ns, found.model.turnaround_ns) == (0, 0)
    for tokens in range(1, 10):
        assert found.expert_ns(tokens) == TIMING.expert_ns(tokens)
        assert found.combine_ns(tokens) == 3
        assert found.head_ns(tokens) == 7
    contexts = set(np.concatenate([request.context[request.tokens == 1] for request in plan.requests]).tolist())
    assert len(contexts) > 1
    steps = [(1, context) for context in contexts] + [(tokens, tokens) for tokens in (2, 8, 9)]
    for layer in range(LAYERS):
        for step in steps:
            assert found.dense_ns(layer, *step) == TIMING.dense_ns(layer, *step)
    assert [link.used_ns(sent) for sent in (0, 100, 400)] == [0, 340, 1240]
    assert link.chunk_bytes == LINK.chunk_bytes


class SlowHost(SimpyDevice):
    """The host takes 500 ns to answer a router, and in that time the compute stream is empty."""

    HOST_NS = 500
    _answering = False
    completions = Device.completions

    def next_completion(self) -> Completion:
        completion = super().next_completion()
        self._answering = completion.kind is Kind.ROUTER
        return completion

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        self._answer()
        super().copy(expert, slot, first, last)

    def experts(self, works: Sequence[Work]) -> None:
        self._answer()
        super().experts(works)

    def combine(self, layer: int, tokens: int, context: int) -> None:
        self._answer()
        super().combine(layer, tokens, context)

    def _answer(self) -> None:
        if self._answering:
            self.env.run(until=self.env.now + self.HOST_NS)
        self._answering = False


@pytest.mark.parametrize("slots", [1, 4, 6])
def test_what_the_loop_takes_beyond_its_parts_is_the_hosts_turnaround(slots: int) -> None:
    device, plan = SlowHost(TIMING, LINK), plan_of(slots)
    found, _ = measure(device, plan, most_tokens=1)
    assert (found.model.turnaround_ns, found.model.launch_ns) == (SlowHost.HOST_NS, 0)
    assert found.without_host().dense_ns(1, 1, 3) == TIMING.dense_ns(1, 1, 3)
    assert found.expert_ns(1) == TIMING.expert_ns(1)


class Asynchronous(Device):
    """Host, compute stream and link, a clock each: submitting takes the host time, and so does a look at what ended."""

    SUBMIT_NS, LAUNCH_NS, POLL_NS = 10_000, 25_000, 1_500
    tail_bytes = 200

    def __init__(self, timing: FixedTiming, link: Link) -> None:
        self._timing, self._link = timing, link
        self._host_ns = 0
        self._free_ns = {"compute": 0, "link": 0}
        self._under_way: dict[str, deque[tuple[int, Completion]]] = {"compute": deque(), "link": deque()}
        self._arrival_ns: dict[int, int] = {}

    def now(self) -> int:
        return self._host_ns

    def copy(self, expert: int, slot: int, first: int, last: int) -> None:
        self._submit("link", [Completion(Kind.COPY, expert)], self._link.used_ns(last) - self._link.used_ns(first))
        self._arrival_ns[expert] = self._free_ns["link"]

    def dense(self, layer: int, tokens: int, context: int, requests: int = 1) -> None:
        self._submit("compute", [Completion(Kind.ROUTER)], self._timing.dense_ns(layer, tokens, context, requests))

    def experts(self, works: Sequence[Work]) -> None:
        """As on a GPU: all that are there in one launch, each that is landing in its own, behind its arrival."""
        here = [work for work in works if self._arrival_ns[work[0]] <= self._host_ns]
        groups = [here] if here else []
        for group in [*groups, *([work] for work in works if work not in here)]:
            self._host_ns += self.LAUNCH_NS - self.SUBMIT_NS
            arrival_ns = max(self._arrival_ns[expert] for expert, _, _ in group)
            self._free_ns["compute"] = max(self._free_ns["compute"], arrival_ns)
            took = sum(self._timing.expert_ns(tokens) for _, _, tokens in group)
            self._submit("compute", [Completion(Kind.EXPERT, expert) for expert, _, _ in group], took)

    def combine(self, layer: int, tokens: int, context: int) -> None:
        self._submit("compute", [Completion(Kind.COMBINE)], self._timing.combine_ns(tokens))

    def head(self, tokens: int, requests: int = 1) -> None:
        self._submit("compute", [Completion(Kind.HEAD)], self._timing.head_ns(tokens, requests))

    def next_completion(self) -> Completion:
        first = min((pending for pending in self._under_way.values() if pending), key=lambda pending: pending[0][0])
        ended_ns, completion = first.popleft()
        self._host_ns = max(self._host_ns, ended_ns) + self.POLL_NS
        return completion

    def poll(self) -> None:
        """Nothing looks in between."""

    def discard_copies(self) -> None:
        self._under_way["link"].clear()

    def close(self) -> None:
        pass

    def _submit(self, stream: str, completions: list[Completion], took: int) -> None:
        self._host_ns += self.SUBMIT_NS
        self._free_ns[stream] = max(self._free_ns[stream], self._host_ns) + took
        self._under_way[stream].extend((self._free_ns[stream], completion) for completion in completions)


def test_the_devices_time_is_found_also_where_the_host_submits_more_slowly_than_the_device_works() -> None:
    timing, link = Growing(25_000, 3_000, 0, 3_000, 100_000), Link(400, 1_000, 1, expert_bytes=400)
    device, plan = Asynchronous(timing, link), plan_of(6)
    found, measured_link = measure(device, plan, most_tokens=2)
    context = decoded_contexts(plan)[0]
    for layer in range(LAYERS):
        own = found.without_host().dense_ns(layer, 1, context)
        assert own == pytest.approx(timing.dense_ns(layer, 1, context), rel=0.02)
    assert found.without_host().expert_ns(1) == pytest.approx(3_000, rel=0.03)
    assert found.combine_ns(1) == pytest.approx(3_000, rel=0.03)
    assert found.head_ns(1) == pytest.approx(100_000, rel=0.02)
    assert measured_link.used_ns(400) == pytest.approx(400_400, rel=0.001)
    assert found.model.turnaround_ns > 0 < found.model.launch_ns
    played = all_hit_ns(device, plan, context)
    assert 0 <= played - predicted_ns(found, context) <= LAYERS


@pytest.mark.parametrize("policy", ["lru", "eamc", "lfu"])
@pytest.mark.parametrize("slots", [8, 16, 32, 60])
def test_a_host_that_takes_time_is_predicted_from_its_measurement(policy: str, slots: int) -> None:
    """Of an asynchronous device that takes constant times, whatever share of the experts is there."""
    layers, experts, together, size = 8, 16, 4, 17_301_504
    timing, link = FixedTiming(30_000, 4_300, 0, 3_000, 110_000), Link(0, 1, 55, size)
    device = Asynchronous(timing, link)
    device.tail_bytes = 2 << 20
    requests = Requests(synthetic(2, 40, layers, experts, together, seed=3))
    plan = run_of(requests, Shape(layers, experts), slots, parse(policy), size, experts_per_layer=1.0)
    found, found_link = measure(device, plan.under(parse("lru")), most_tokens=1)
    played = play(plan, device)
    predicted, free = (
        simulate(plan.on(timing, found_link, 1.0)).step_ns[FIRST_STEPS:] for timing in (found, found.without_host())
    )
    assert (played.misses > 0).sum() > 5
    measured = played.step_ns[FIRST_STEPS:]
    assert predicted.mean() == pytest.approx(measured.mean(), rel=0.005)
    assert np.abs(predicted / measured - 1).mean() < 0.01
    assert free.mean() < measured.mean()


class LooksInBetween(Asynchronous):
    """As a GPU: while more is being submitted, the host can look at what has ended."""

    def poll(self) -> Completion | None:  # type: ignore[override]
        first = min((pending[0][0] for pending in self._under_way.values() if pending), default=None)
        self._host_ns += self.POLL_NS
        return None if first is None or first > self._host_ns else self.next_completion()


def test_the_time_to_submit_compute_does_not_count_as_a_transfers() -> None:
    """300 computes take 7.5 ms to submit, three transfers 1 ms; the link is slowed by nothing."""
    size = 17_301_504
    device = LooksInBetween(FixedTiming(30_000, 4_300, 0, 3_000, 110_000), Link(0, 1, 55, size))
    device.copy(0, 0, 0, size)
    device.next_completion()
    for place in range(8):
        device._arrival_ns[place] = 0
    _, transfer = slowed(Meter(device), plan_of(8, expert_bytes=size), 8, transfer_ns=314_573, expert_ns=4_300)
    assert 1 <= transfer < 1.1


@pytest.mark.parametrize("top_k", [2, 3, 5])
def test_half_of_the_experts_of_each_token_miss(top_k: int) -> None:
    plan = plan_of()
    request = half_missing(plan, top_k, LAYERS, context=3, steps=9)
    mixed = replace(plan.with_slots(LAYERS * top_k), requests=[request])
    log = play(mixed, SimpyDevice(TIMING, LINK))
    assert log.misses[FIRST_STEPS:].tolist() == [LAYERS * (top_k // 2)] * 8
    assert log.hits[FIRST_STEPS:].tolist() == [LAYERS * (top_k - top_k // 2)] * 8


@pytest.mark.parametrize(("compute", "transfer"), [(1.0, 1.0), (1.4, 1.0), (1.0, 1.2), (1.5, 1.3), (1.0, 0.8)])
def test_a_slow_down_found_in_the_loop_predicts_what_was_run(compute: float, transfer: float) -> None:
    """Experts and transfers take longer than alone, and most of them are beside each other."""
    layers, experts, together = 4, 16, 4
    requests = Requests(synthetic(2, 40, layers, experts, together, seed=3))
    plan = run_of(requests, Shape(layers, experts), 16, parse("lru"), 400, experts_per_layer=1.0)
    timing, link = FixedTiming(3_000, 40_000, 0, 300, 11_000), Link(0, 200, 1, 400)
    alone = measure_model(SimpyDevice(timing, link), plan, 1, "m").model
    slow = SimpyDevice(replace(timing, expert=round(40_000 * compute)), Link(0, round(200 * transfer), 1, 400))
    found = half_missing_in_loop(Meter(slow), plan, alone, together, 3, [])
    assert found
    model = slowed_by(found, at_most_as_beside(found, alone, plan, together), plan, together, 3)
    assert [model.compute_slowed > 1, model.transfer_slowed > 1] == [compute > 1, transfer > 1]
    assert model.transfer_ns == round(min(transfer, 1) * alone.transfer_ns)
    mixed = replace(plan, requests=[half_missing(plan, together, layers, context=3, steps=20)])
    played = play(mixed, slow).step_ns[FIRST_STEPS:].mean()

    def predicted(model: MeasuredModel) -> RunLog:
        return simulate(mixed.on(model.timing(), model.link(), 1.0))

    assert predicted(effective(model, predicted)).step_ns[FIRST_STEPS:].mean() == pytest.approx(played, rel=0.03)


class KnowsItsHost(SimpyDevice):
    """The host spends time in its calls, as in those of a real device."""

    @cached_property
    def inside_ns(self) -> Counter[str]:
        return Counter(dense=1)


@pytest.mark.parametrize("longer", [0.8, 1.0, 1.7])
def test_parts_are_scaled_to_what_they_take_in_the_loop(longer: float) -> None:
    """What the driver took cannot explain such a difference."""
    plan, unit = plan_of(6), 10**9
    timing, link = FixedTiming(11 * unit, 5 * unit, 0, 3 * unit, 7 * unit), Link(0, unit, 1, LINK.expert_bytes)
    model = measure_model(SimpyDevice(timing, link), plan, 1, "m").model
    loop = FixedTiming(
        *(round(longer * each) for each in (timing.dense, timing.expert, 0, timing.combine, timing.head))
    )
    found = with_host(model, plan, TOP_K, 3, *tokens_in_loop(Meter(KnowsItsHost(loop, link)), plan, model, TOP_K, 3))
    in_loop = longer * parts_ns(model, LAYERS, LAYERS * TOP_K, 3)
    launches = LAYERS * (found.turnaround_ns + TOP_K * found.launch_ns)
    assert parts_ns(found, LAYERS, LAYERS * TOP_K, 3) + launches == pytest.approx(in_loop, rel=1e-3)


class WithPace(SimpyDevice):
    """It reports its pace, as devices that share the machine with others do."""

    def __init__(self, timing: Timing, link: Link) -> None:
        super().__init__(timing, link)
        self._found = Pace(float(link.used_ns(LINK.expert_bytes)), float(timing.expert_ns(1)))

    def pace(self) -> Pace:
        return self._found


QUIET = WithPace(FixedTiming(11_000, 5_000, 0, 3_000, 7_000), Link(0, 9, 1, LINK.expert_bytes))
DISTURBED = WithPace(FixedTiming(90_000, 20_000, 0, 9_000, 8_000), Link(40_000, 20, 1, LINK.expert_bytes))


def test_a_pass_that_was_disturbed_is_left_out() -> None:
    plan = plan_of(6)
    found, disturbed = (one_pass(device, plan, 1, "m") for device in (QUIET, DISTURBED))
    assert found.mixed
    assert found.pace == Pace(3_600.0, 5_000.0)
    for passes in ([found, disturbed, found], [disturbed, found, found]):
        assert combined(plan, passes).model == combined(plan, [found]).model != combined(plan, [disturbed]).model


def test_a_machine_that_shares_its_processors_is_measured_in_passes() -> None:
    found = measure_model(QUIET, plan_of(6), 1, "m")
    assert found.paces == (Pace(3_600.0, 5_000.0),) * PASSES
    assert (found.model.transfer_ns, found.model.expert[0]) == (3_600, (1, 5_000))
    assert (found.model.compute_slowed, found.model.transfer_slowed) == (1, 1)


def test_transfers_that_were_timed_slowly_alone_take_what_they_take_in_the_loop() -> None:
    plan = plan_of(6)
    found = one_pass(QUIET, plan, 1, "m")
    slowly = replace(found.alone, transfer_ns=5_000, latency_ns=1_000)
    model = combined(plan, [replace(found, alone=slowly)]).model
    assert model == replace(combined(plan, [found]).model, latency_ns=720)


def test_transfers_are_timed_with_experts_from_all_over_the_store() -> None:
    asked = []

    class Asked(SimpyDevice):
        def copy(self, expert: int, slot: int, first: int, last: int) -> None:
            asked.append(expert)
            assert 0 <= slot < 5
            super().copy(expert, slot, first, last)

    transfers(Meter(Asked(TIMING, LINK)), replace(plan_of(), shape=Shape(1, 1_000)), places=5)
    timed = asked[:-5]
    assert max(timed) > 900
    assert len(set(timed)) > 100
    assert sorted(asked[-5:]) == [0, 1, 2, 3, 4], "at the end each slot holds its own"


def test_where_half_an_expert_takes_as_long_as_a_whole_one_no_latency_is_told_apart() -> None:
    """Two passes like that gave a profile of a disk without any time for a byte: its bandwidth was a division by 0."""
    latency = replace(LINK, latency_ns=700, ns_per_byte_num=0)
    assert transfers(Meter(SimpyDevice(TIMING, latency)), plan_of(), places=5) == (700, 0)
    assert transfers(Meter(SimpyDevice(TIMING, LINK)), plan_of(), places=5)[1] == LINK.latency_ns


class SlowToSubmit(SimpyDevice):
    """Alone, experts take 90 ns longer each than in the loop: the host cannot submit them as fast."""

    _in_the_loop = False
    completions = Device.completions

    def next_completion(self) -> Completion:
        completion = super().next_completion()
        self._in_the_loop = completion.kind in (Kind.ROUTER, Kind.COPY)
        return completion

    def experts(self, works: Sequence[Work]) -> None:
        for work in works:
            super().experts([work])
            self._free_at += 0 if self._in_the_loop else 90
            self._computing[-1] = self._free_at


def test_parts_that_take_longer_alone_than_together_are_shortened_to_what_they_are_together() -> None:
    device, plan = SlowToSubmit(replace(TIMING, dense=10_000, head=9_000), LINK), plan_of(6)
    found, _ = measure(device, plan, most_tokens=1)
    context = decoded_contexts(plan)[0]
    played = all_hit_ns(device, plan, context)
    assert 0 <= played - predicted_ns(found, context) <= LAYERS * (TOP_K + 3) + 1  # each part is rounded down
    assert predicted_ns(found.without_host(), context) == pytest.approx(played, rel=0.01)


@pytest.mark.parametrize("tail_bytes", [0, 3, 5, 10, 40])
@pytest.mark.parametrize("places", [1, 2, 5])
def test_transfers_go_through_the_pump_as_in_a_run(tail_bytes: int, places: int) -> None:
    for seed in range(10):
        watch = Watch(SHAPE, places, expert_bytes=10, tail_bytes=tail_bytes)
        device = AnyOrder(watch, seed)
        assert len(_pumped(device, 10, places, range(13))) == 13
        assert not watch.copies
        assert watch.content == {place: (place, 10) for place in range(places)}
        if tail_bytes == 0 or places > 1:
            assert max(device.behind_a_copy) == (tail_bytes > 0)


@pytest.mark.parametrize("slots", [1, 3, 24])
def test_a_gpu_is_measured_on_whole_experts_with_its_graphs_and_replays_afterwards(
    slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch.setattr)
    gpu, profile = FakeGpu(seed=1), plain("tiny", f"{LAYERS} moe", experts=EXPERTS, top_k=TOP_K, **HALF)
    size = profile.expert_bytes
    plan = plan_of(slots, prompt=9, expert_bytes=size, chunk_bytes=None)
    with torch.inference_mode():
        network = Network(profile, gpu.device, max_tokens=9, max_context=64, seed=0)
        store = HostStore.of(LAYERS * EXPERTS, size, seed=0)
        made = CudaDevice(store, network, slots, gpu, Launches(gpu, network), verify=True)
        made.tail_bytes = size // 8
        made.prepare(decoded_contexts(plan))
        captured = gpu.counts["capture"]
        found, link = measure(made, plan, most_tokens=9)
        assert gpu.counts["capture"] == captured
        assert link.used_ns(size) == found.model.transfer_ns > 0
        assert {tokens for tokens, _, _ in found.model.dense} == {1, 2, 8, 9}
        assert play(plan, made).demand_transfers.sum() > 0
        assert network.finite()
        made.close()


@given(st.lists(st.integers(0, 1_000), max_size=8))
def test_what_rises_is_the_nearest_that_does(took: list[int]) -> None:
    """Isotonic regression by its min-max formula: max over a <= i of min over b >= i of the mean of a..b."""

    def mean(a: int, b: int) -> Fraction:
        return Fraction(sum(took[a : b + 1]), b + 1 - a)

    places = range(len(took))
    expected = [max(min(mean(a, b) for b in places[i:]) for a in places[: i + 1]) for i in places]
    assert rising(took) == [int(value) for value in expected]


def test_the_points_to_measure_follow_from_the_plan() -> None:
    assert ladder(1) == []
    assert ladder(2) == [2]
    assert ladder(40) == [2, 8, 32, 40]
    assert top_k(plan_of()) == top_k(plan_of(prompt=9)) == TOP_K
    assert decoded_contexts(plan_of(prompt=9)) == [10, 11, 12, 13, 14]
    long = Requests(synthetic(1, 1_001, 1, EXPERTS, TOP_K, seed=1))
    contexts = decoded_contexts(replace(plan_of(), requests=long, shape=Shape(1, EXPERTS)))
    assert contexts == [1, 201, 401, 601, 801, 1_001]
    prefill = Requests(synthetic(1, 0, LAYERS, EXPERTS, TOP_K, seed=1, prompt_tokens=9))
    assert decoded_contexts(replace(plan_of(), requests=prefill)) == [1]


class Clocked(SimpyDevice):
    """Transfers and compute on the logical clock, so that a policy meets what it would; host time on the wall's."""

    stands_still = False
    completions = Device.completions

    def now(self) -> int:
        return time.perf_counter_ns()


@pytest.mark.parametrize("policy", ["eamc", "lru+popular:n=2", "belady+oracle1", "lfu+eamc"])
def test_a_policy_that_looks_at_events_takes_time(policy: str) -> None:
    requests = Requests(synthetic(3, 80, LAYERS, EXPERTS, TOP_K, seed=1, prompt_tokens=4))
    plan = run_of(requests, SHAPE, 4, parse(policy), LINK.expert_bytes)
    device = Clocked(TIMING, LINK)
    assert 0 < policy_ns(plan, device) < 50_000_000
    assert policy_ns(plan.under(parse("lru")), device) == 0


def test_what_a_policy_is_compiled_in_is_not_what_an_event_costs() -> None:
    rows = [(PREFILL, 10**10), *[(DECODE, 16_000)] * 20]
    assert steady_ns(rows, layers=16) == 1_000
    assert steady_ns(rows[:1], layers=16) == 10**10 // 16  # a prompt alone has no other step
    assert steady_ns([], layers=16) == 0


SLEEPER = """
import time
from policies.core.policy import Prefetcher


class Sleeper(Prefetcher):
    def propose(self, event):
        time.sleep(0.004)
        return super().propose(event)
"""


def test_a_policys_cost_is_that_of_an_event_and_a_slow_one_is_not_asked_for_long(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("replay.calibration.measure.POLICY_S", 0.1)
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    requests = Requests(synthetic(1, 10**5, 1, EXPERTS, TOP_K, seed=1))  # 400 s, if all of it were run
    plan = replace(plan_of(policy=f"lru+{tmp_path}/sleeper.py:Sleeper"), requests=requests, shape=Shape(1, EXPERTS))
    assert policy_ns(plan, Clocked(TIMING, LINK)) >= 4_000_000
