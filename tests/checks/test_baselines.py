"""Schedules and data paths of others: every expert computes from its own bytes, and what moves is what they say."""

import numpy as np
import pytest
import torch

from benchmarks.checks.baselines import LayerStream, OnDemand, Resident, SwapOut, SyncPerCopy, ZeroCopy, fill
from policies.core.policy import Shape
from policies.core.spec import parse
from replay.comparison.cell import FixedOrder
from replay.devices.cuda import Launches
from replay.devices.gpu import pinned
from replay.devices.store import HostStore
from replay.model.network import Network
from sim.engines.simpy_engine import SimpyDevice
from sim.loop.requests import Requests
from sim.loop.run import Run
from sim.profiles.timing import FixedTiming, Link
from tests.support.devices import AnyOrder, Watch, run_of
from tests.support.driven import play
from tests.support.fake_gpu import FakeGpu
from tests.support.tiny import PROFILE, SIZE, E, K, L
from traces.synthetic import synthetic

TRACE = synthetic(3, 12, layers=L, experts=E, top_k=K, seed=1, prompt_tokens=5)
LOOKUPS = sum(len(request.experts) for request in Requests(TRACE))
SHAPE = Shape(L, E)


def plan(slots: int, bytes_: int = SIZE) -> Run:
    return run_of(Requests(TRACE), SHAPE, slots, parse("lru"), bytes_)


@pytest.mark.parametrize("tail_bytes", [0, 3])
@pytest.mark.parametrize(("schedule", "slots"), [(OnDemand, E), (LayerStream, 2 * E)])
def test_a_schedule_computes_what_has_arrived_and_overwrites_nothing_that_computes(schedule, slots, tail_bytes):
    for seed in range(20):
        watch = Watch(SHAPE, slots, 16, tail_bytes)
        log = play(plan(slots, 16), AnyOrder(watch, seed), decider=FixedOrder(schedule(SHAPE)))
        assert watch.computed == LOOKUPS == (log.hits + log.late + log.misses).sum()


def test_an_odd_number_of_layers_streams_as_well_as_a_single_one():
    for layers in (1, 2, 5):
        trace, shape = synthetic(2, 6, layers=layers, experts=4, top_k=2, seed=2), Shape(layers, 4)
        for seed in range(10):
            watch = Watch(shape, 8, 16, 2)
            streamed = run_of(Requests(trace), shape, 8, parse("lru"), 16)
            play(streamed, AnyOrder(watch, seed), decider=FixedOrder(LayerStream(shape)))
            assert watch.computed == sum(len(request.experts) for request in Requests(trace))


def test_on_demand_moves_every_expert_of_every_event_and_takes_the_time_of_it():
    """Closed form: nothing overlaps but all of an event's experts with the transfers behind them."""
    dense, expert, combine, head, transfer = 7, 2, 1, 3, 10
    device = SimpyDevice(FixedTiming(dense, expert, 0, combine, head), Link(0, 1, 1, transfer))
    log = play(plan(E, transfer), device, decider=FixedOrder(OnDemand(SHAPE)))
    assert log.demand_transfers.sum() == log.misses.sum() == LOOKUPS
    decoded = log.tokens == 1
    assert (log.step_ns[decoded] == L * (dense + K * transfer + expert + combine) + head).all()


def test_resident_moves_nothing_and_a_layer_stream_moves_every_layer_once_a_step():
    timing, link = FixedTiming(7, 2, 0, 1, 3), Link(0, 1, 1, 10)
    log = play(plan(L * E, 10), SimpyDevice(timing, link), decider=FixedOrder(Resident(SHAPE, L * E)))
    assert log.demand_transfers.sum() == 0
    assert log.hits.sum() == LOOKUPS
    assert (log.step_ns[log.tokens == 1] == L * (7 + K * 2 + 1) + 3).all()
    log = play(plan(2 * E, 10), SimpyDevice(timing, link), decider=FixedOrder(LayerStream(SHAPE)))
    steps = len(log.step_ns)
    assert (steps - 1) * L * E < log.demand_transfers.sum() <= (steps * L + 1) * E
    assert log.step_ns[-1] == pytest.approx(L * E * 10, rel=0.1), "bound by the link"


def with_device(kind, slots, decider, seed):
    gpu = FakeGpu(seed)
    with torch.inference_mode():
        network, store = Network(PROFILE, gpu.device, 16, 64, seed=0), HostStore.of(L * E, SIZE, seed=0)
        before = [store[expert].copy() for expert in range(L * E)]
        with pinned(store.memory, gpu, is_required=True):
            device = kind(store, network, slots, gpu, Launches(gpu, network), verify=kind is not ZeroCopy)
            fill(device, slots, SIZE)
            counts, copies = gpu.counts.copy(), device._link.runs
            log = play(plan(slots), device, decider=decider)
            spent = gpu.counts - counts
            spent["copies"] = device._link.runs - copies
            device.close()
        assert network.finite()
        for expert in range(L * E):
            np.testing.assert_array_equal(store[expert], before[expert])
    return log, spent


def test_sync_per_copy_waits_for_every_copy_and_decides_as_lru_does():
    log, spent = with_device(SyncPerCopy, 9, None, 1)
    ours, _ = with_device(SwapOut, 9, None, 2)
    assert spent["synchronize"] == log.demand_transfers.sum() > 0
    assert log.misses.sum() == ours.misses.sum() == ours.demand_transfers.sum()


def test_lru_swap_copies_every_victim_back():
    log, spent = with_device(SwapOut, 9, None, 3)
    assert log.demand_transfers.sum() > 9
    assert spent["copies"] == 2 * log.demand_transfers.sum(), "every slot held an expert from the start"


@pytest.mark.parametrize("seed", range(3))
def test_zero_copy_computes_from_the_host_without_a_transfer(seed):
    log, spent = with_device(ZeroCopy, L * E, FixedOrder(Resident(SHAPE, L * E)), seed)
    assert log.demand_transfers.sum() == 0
    assert log.hits.sum() == LOOKUPS
    assert spent["wait"] == 0
