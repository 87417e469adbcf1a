"""The CPU device: real bytes, real matrices. Structure is asserted, never times."""

import dataclasses
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from policies.core.policy import Shape
from policies.core.spec import parse
from replay.calibration.pace import pausing
from replay.device_choice import DeviceChoice
from replay.devices import cpu
from replay.devices import store as store_module
from replay.devices.stage import open_stage
from replay.devices.store import STAMP_BYTES, HostMemory, HostStore
from replay.devices.waiting import Pace
from replay.model.network import Network, expert_output
from sim.engines.untimed import count
from sim.loop.driver import Driver
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from tests.support.devices import Watch, run_of
from tests.support.driven import play
from tests.support.tiny import PROFILE, SIZE, E, K, L
from tests.support.watched import WatchedCpu, watched
from traces import DECODE, InputError, Trace
from traces.models.profile import ModelProfile, model
from traces.synthetic import synthetic


@contextmanager
def device(slots: int, profile: ModelProfile = PROFILE, dedup: int | None = None) -> Iterator[WatchedCpu]:
    network = Network(profile, torch.device("cpu"), max_tokens=16, max_context=16, seed=0)
    store = HostStore.of(L * E, profile.expert_bytes, seed=0, distinct=dedup)
    watch = Watch(Shape(L, E), slots, profile.expert_bytes, profile.expert_bytes // 8)
    with watched(WatchedCpu(store, network, slots, verify=True), watch) as made:
        yield made


@pytest.mark.parametrize("stuck_in", ["copy of expert", "router"])
def test_a_copy_or_a_compute_that_never_ends_is_told_in_one_line_with_what_it_was(stuck_in, monkeypatch):
    go_on, told = threading.Event(), f"stuck: nothing has ended for 1 s, under way since: {stuck_in}"
    plan = run_of(Requests(synthetic(1, 3, layers=L, experts=E, top_k=K, seed=1)), Shape(L, E), 4, parse("lru"), SIZE)
    place = (Network, "dense") if stuck_in == "router" else (np, "copyto")
    with device(4) as made:
        made.watchdog_s = 1.0
        monkeypatch.setattr(*place, lambda *_: go_on.wait())
        with pytest.raises(InputError, match=told) as caught:
            play(plan, made)
    assert "\n" not in str(caught.value)
    go_on.set()


def test_in_decoding_an_encoders_experts_have_no_sum(monkeypatch):
    summed: list[int] = []
    with device(4, dataclasses.replace(PROFILE, encoder_layers=1)) as made:
        monkeypatch.setattr(made._network, "combine", summed.append)
        for layer, tokens, context in ((0, 5, 5), (0, 1, 6), (1, 1, 6)):
            made.combine(layer, tokens, context)
            made.next_completion()
    assert summed == [5, 1]


def replay(slots: int, policy: str, top_k: int = K, cold: bool = False, chunks: int = 4, prompt: int = 5) -> RunLog:
    """Every expert is compared with its stamp before and after each of its computes (verify)."""
    trace = synthetic(4, 10, layers=L, experts=E, top_k=top_k, seed=1, prompt_tokens=prompt)
    size = PROFILE.expert_bytes
    with device(slots) as made:
        log = play(run_of(Requests(trace), Shape(L, E), slots, parse(policy), size, -(-size // chunks), cold), made)
        assert made.watch.computed == (log.hits + log.late + log.misses).sum()
    return log


@pytest.mark.parametrize("policy", ["lru", "fifo", "eamc", "lru+popular:n=4", "belady+oracle1"])
@pytest.mark.parametrize("slots", [1, 2, 9, L * E])
def test_every_slot_holds_its_expert_whenever_it_computes(policy: str, slots: int) -> None:
    log = replay(slots, policy)
    assert log.step_ns.min() > 0
    assert (log.stall_ns >= 0).all()
    assert (log.compute_busy_ns + log.stall_ns.sum(axis=1) <= log.step_ns).all()
    if slots == L * E:
        assert len(log.evictions) == 0


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_without_prefetch_hits_misses_and_evictions_are_those_of_the_untimed_analysis(policy: str) -> None:
    trace = synthetic(4, 10, layers=L, experts=E, top_k=1, seed=1)
    expected = count(Requests(trace), L, E, 7, parse(policy))
    log = replay(7, policy, top_k=1, prompt=0)
    np.testing.assert_array_equal(log.hits, expected.hits)
    np.testing.assert_array_equal(log.misses, expected.misses)
    np.testing.assert_array_equal(log.evictions, expected.evictions)
    assert log.demand_transfers.sum() == expected.misses.sum()


@pytest.mark.parametrize("policy", ["lru", "eamc", "lru+popular:n=4"])
def test_a_run_that_pauses_after_every_step_decides_as_before_and_its_clock_stands_still(policy, monkeypatch):
    """Bytes are verified as ever, also of what was on its way when the run paused."""
    monkeypatch.setattr("replay.calibration.pace.SECONDS", 0.0)
    trace, waits = synthetic(2, 8, layers=L, experts=E, top_k=K, seed=1, prompt_tokens=5), 0.002
    paces: list[Pace] = []
    with device(9) as made:
        run = run_of(Requests(trace), Shape(L, E), 9, parse(policy), SIZE)
        read = made.store.read

        def slow(expert: int, first: int, last: int, slot: NDArray[np.uint8]) -> None:
            if any(np.shares_memory(slot, each) for each in made._spare):
                time.sleep(waits)
            read(expert, first, last, slot)

        monkeypatch.setattr(made.store, "read", slow)
        began, clock = time.perf_counter_ns(), made.now()
        log = Driver(run, made).run(pausing(made, paces, lambda row: None))
        took, clock = time.perf_counter_ns() - began, made.now() - clock
        assert made.watch.computed == (log.hits + log.late + log.misses).sum()
    assert len(paces) == (log.phase == DECODE).sum() < len(log.step_ns)
    assert all(pace.read_ns >= waits * 1e9 for pace in paces)
    assert all(pace.compute_ns > 0 for pace in paces)
    paused = sum(cpu.MOST_PACED * max(pace.read_ns, pace.compute_ns) for pace in paces)
    assert took - clock >= paused
    assert log.step_ns.sum() <= clock
    if policy == "lru":
        alone = replay_of(trace, 9)
        np.testing.assert_array_equal(log.misses, alone.misses)
        np.testing.assert_array_equal(log.evictions, alone.evictions)


def replay_of(trace: Trace, slots: int) -> RunLog:
    """The same run under LRU without a pause."""
    with device(slots) as made:
        return play(run_of(Requests(trace), Shape(L, E), slots, parse("lru"), SIZE), made)


def test_cold_empties_the_cache_between_requests() -> None:
    warm, cold = replay(L * E, "lru"), replay(L * E, "lru", cold=True)
    assert cold.misses.sum() > warm.misses.sum()
    firsts = np.flatnonzero(np.diff(cold.request, prepend=-1))
    assert (cold.hits[firsts] == 0).all()


def test_cold_discards_prefetches_under_way() -> None:
    for _ in range(3):
        log = replay(6, "eamc", cold=True, chunks=8)
        unused = int(log.prefetch_transfers.sum() - log.prefetch_used.sum() - log.prefetch_wasted.sum())
        assert log.prefetch_wasted.sum() > 0
        assert 0 <= unused <= 6, "what the last request left in its slots"


def test_an_expert_is_computed_as_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    for matrices, bytes_per_parameter, tolerance in ((3, 4.0, 1e-5), (3, 2.0, 2e-2), (2, 4.0, 1e-5)):
        profile = dataclasses.replace(PROFILE, expert_matrices=matrices, expert_bytes_per_parameter=bytes_per_parameter)
        with device(1, profile) as made:
            network = Network(profile, torch.device("cpu"), max_tokens=4, max_context=4, seed=0)
            weights = network.weights(torch.from_numpy(made.store[3].copy()))
            tokens = torch.randn(4, 32, generator=generator).to(network.expert_dtype)
            first, down = (matrix.double() for matrix in weights)
            inner = tokens.double() @ first.T
            if matrices == 3:
                gate, up = inner[:, :24], inner[:, 24:]
                exact = (gate / (1 + torch.exp(-gate)) * up) @ down.T
            else:
                exact = inner.clamp(min=0) @ down.T
            got = expert_output(weights, tokens, matrices).double()
            assert (got - exact).norm() <= tolerance * exact.norm()


def test_experts_differ_and_fill_their_buffers() -> None:
    store = HostStore.of(6, expert_bytes=1_000, seed=1)
    stamps = {bytes(store[expert][:STAMP_BYTES]) for expert in range(6)}
    assert len(stamps) == 6
    assert all((store[expert] != 0).mean() > 0.9 for expert in range(6))
    assert not store.holds(1, store[2])


def test_host_buffers_can_be_shared() -> None:
    with device(4, dedup=5) as made:
        assert made.store.distinct == 5
        assert made.store[7].ctypes.data == made.store[2].ctypes.data
    with pytest.raises(InputError, match="--host-dedup 99"), device(4, dedup=99):
        pass


def test_slabs_hold_all_experts_where_one_slab_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SLAB_BYTES", 4096)
    store = HostStore.of(7, expert_bytes=1_000, seed=1)
    assert [len(slab) for slab in store.memory.slabs] == [4096, 3 * 1024]
    assert len({store[expert].ctypes.data for expert in range(7)}) == 7


def test_too_little_host_memory_is_refused_before_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "available_memory_bytes", lambda: 10**9)
    stage = open_stage(DeviceChoice("cpu"), model("olmoe-1b-7b"), 1, 1)
    with pytest.raises(InputError, match="--host-dedup"), stage:
        pass


def test_stores_of_two_models_lie_over_one_memory_and_share_buffers_where_it_is_short() -> None:
    memory = HostMemory(6, 1_024, seed=2)
    small, large = HostStore(memory, 100, 500), HostStore(memory, 4, 1_500)
    assert (small.distinct, large.distinct) == (12, 4)
    assert len({bytes(small[expert]) for expert in range(12)}) == 12
    assert small[0].ctypes.data == large[0].ctypes.data
    for store in (small, large):
        at = sorted(store[expert].ctypes.data for expert in range(store.distinct))
        assert (np.diff(at) >= store.expert_bytes).all()


def test_a_wrong_slot_is_noticed() -> None:
    with device(2) as made:
        made.watch.content[0] = made.watch.submitted[0] = 5, PROFILE.expert_bytes
        made.watch.layer = 5 // E
        made.experts([(5, 0, 1)])
        with pytest.raises(InputError, match="slot 0 computes as expert 5"):
            made.next_completion()
