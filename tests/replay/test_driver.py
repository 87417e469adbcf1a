"""Driver and pump where completions come in any order, as on real devices: invariants that need no clock."""

import random
from collections import deque

import numpy as np
import pytest

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines.simpy_engine import SimpyDevice
from sim.engines.untimed import count
from sim.loop.device import Completion, Kind, Transfer
from sim.loop.driver import Driver
from sim.loop.log import COLUMNS, RunLog, Share, StepRow
from sim.loop.observer import LoopObserver
from sim.loop.requests import Requests
from sim.loop.run import Run, gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.devices import AnyOrder, Watch, run_of
from tests.support.driven import play
from tests.support.replay_runs import draw
from traces.synthetic import synthetic

SEEDS = 250


def watched(seed: int) -> tuple[Run, Watch]:
    plan = draw(random.Random(seed).randint)
    return plan, Watch.of(plan, tail_bytes=seed % 2 * (1 + seed % 5))


def test_no_slot_is_overwritten_while_it_computes_or_loads_and_nothing_computes_before_it_arrived() -> None:
    for seed in range(SEEDS):
        plan, watch = watched(seed)
        log = play(plan, AnyOrder(watch, seed))
        lookups = sum(len(request.experts) for request in plan.requests)
        assert watch.computed == lookups == (log.hits + log.late + log.misses).sum(), f"seed {seed}"
        assert log.demand_transfers.sum() == log.misses.sum()
        left = log.prefetch_transfers.sum() - log.prefetch_used.sum() - log.prefetch_wasted.sum()
        assert 0 <= left <= plan.gpu.slots, f"seed {seed}: what was prefetched is used, wasted or still there"


def test_the_next_piece_is_there_when_one_ends_so_that_the_link_never_waits_for_the_host() -> None:
    """The link falls empty at most once an event, when all that the event misses has come."""
    trace = synthetic(requests=2, tokens=20, layers=3, experts=8, top_k=3, seed=5)
    shape, requests = Shape(3, 8), list(Requests(trace))
    events = sum(len(request.tokens) for request in requests) * 3
    for seed in range(10):
        device = AnyOrder(Watch(shape, 6, 64, tail_bytes=8), seed)
        device.computes_first = True  # an expert takes less time to compute than to copy
        log = play(run_of(requests, shape, 6, parse("lru"), 64), device)
        assert len(device.behind_a_copy) >= log.demand_transfers.sum() > events
        assert device.behind_a_copy.count(0) <= events


class Lateness(LoopObserver):
    """Checks that nothing is chosen earlier than it need be."""

    def __init__(self, tail_bytes: int) -> None:
        self.flying: deque[tuple[Transfer, int, int]] = deque()
        self.tail_bytes = tail_bytes
        self.computing = self.most = self.whole = 0
        self.event: set[int] = set()

    def event_routed(self, tokens: dict[int, int], hits: list[int], late: list[int]) -> None:
        self.event, self.computing = set(tokens), len(hits)

    def ended(self, completion: Completion) -> None:
        self.computing -= completion.kind is Kind.EXPERT

    def copying(self, transfer: Transfer, first: int, upto: int) -> None:
        if self.flying:
            before, _, sent = self.flying[-1]
            tail_flies = sum(last - first for _, first, last in self.flying) <= self.tail_bytes
            follows = before is transfer and first == sent
            assert follows or tail_flies or (before.demand and not self.computing)
            self.whole += not follows and not tail_flies
        self.flying.append((transfer, first, upto))
        self.most = max(self.most, len({id(transfer) for transfer, _, _ in self.flying}))

    def copied(self) -> None:
        transfer, _, upto = self.flying.popleft()
        self.computing += upto == transfer.size and transfer.expert in self.event


def test_the_next_transfer_is_chosen_as_a_tail_flies_or_behind_a_demand_when_all_that_arrived_is_computed() -> None:
    whole = 0
    for seed in range(SEEDS):
        plan, watch = watched(seed)
        if not plan.cold:
            observer = Lateness(watch.tail_bytes)
            play(plan, AnyOrder(watch, seed), observer=observer)
            assert observer.most <= (2 if watch.tail_bytes else 1)
            whole += observer.whole
    assert whole > SEEDS


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu"])
def test_without_prefetch_the_order_of_completions_decides_nothing_but_time(policy: str) -> None:
    """One expert a layer: then nothing is left to chance, and misses are those of the untimed analysis."""
    trace = synthetic(requests=4, tokens=20, layers=4, experts=8, top_k=1, seed=3)
    requests, shape = Requests(trace), Shape(4, 8)
    expected = count(requests, 4, 8, 10, parse(policy))
    for seed in range(5):
        plan = run_of(requests, shape, 10, parse(policy), expert_bytes=64, chunk_bytes=16)
        log = play(plan, AnyOrder(Watch(shape, 10, 64, tail_bytes=4), seed))
        np.testing.assert_array_equal(log.misses, expected.misses)
        np.testing.assert_array_equal(log.evictions, expected.evictions)


class Unstoppable(SimpyDevice):
    """A copy that is under way ends before it is forgotten, as on threads and GPUs."""

    def discard_copies(self) -> None:
        while self._copies:
            self.next_completion()


def test_the_link_is_busy_until_what_cold_discards_has_ended() -> None:
    link = Link(0, 1, 1, expert_bytes=400)
    requests = Requests(synthetic(requests=9, tokens=3, layers=3, experts=8, top_k=2, seed=5))
    timing = FixedTiming(30, 20, 0, 10, 10)
    plan = gpu_run(requests, Shape(3, 8), 12, parse("lru+all"), timing, link, cold=True)
    log = play(plan, Unstoppable(timing, link))
    transfers = int(log.demand_transfers.sum() + log.prefetch_transfers.sum())
    assert 0 <= transfers * 400 - log.link_busy_ns.sum() < 400, "but for a transfer that the run's end cuts off"


def test_each_step_is_reported_as_it_ends() -> None:
    plan, watch = watched(5)
    reported: list[StepRow] = []
    log = play(plan, AnyOrder(watch, 5), reported.append)
    assert [row.numbers[COLUMNS.index("step_ns")] for row in reported] == log.step_ns.tolist()
    assert [share.request for row in reported for share in row.shares] == log.request.tolist()


def resumed(plan: Run, done: list[StepRow], device: AnyOrder) -> RunLog:
    """What comes behind `done`, run on `device`."""
    driver = Driver(plan, SimpyDevice(FixedTiming(9, 2, 0, 1, 1), Link(0, 1, 1, 16)))
    driver.resume(done, device)
    return driver.run(lambda row: None, done)


@pytest.mark.parametrize("policy", ["lru", "eamc", "lru+popular:n=3"])
def test_a_run_goes_on_behind_requests_that_were_played_before(policy: str) -> None:
    """Every expert computes from its own bytes, and rows of before stay as they were."""
    trace = synthetic(5, 8, layers=3, experts=8, top_k=2, seed=4)
    shape = Shape(3, 8)
    plan = run_of(Requests(trace), shape, 9, parse(policy), 16, 4)
    whole = play(plan, AnyOrder(Watch(shape, 9, 16, 2), 1))
    rest = [0] * (len(COLUMNS) - 3)
    rows = [StepRow([1, 1, 1_000 + request, *rest], [Share(request, 1, 1_000)]) for request in (0, 0, 1)]
    watch = Watch(shape, 9, 16, 2)
    log = resumed(plan, rows, AnyOrder(watch, 2))
    assert log.step_ns[:3].tolist() == [1_000, 1_000, 1_001]
    assert log.request.tolist() == [0, 0, 1, *whole.request[whole.request > 1].tolist()]
    assert watch.computed == (log.hits + log.late + log.misses)[3:].sum() > 0


def test_a_run_that_goes_on_misses_what_it_would_have_missed_uninterrupted() -> None:
    """One expert a layer and no prefetch: nothing is left to chance."""
    trace = synthetic(5, 8, layers=3, experts=8, top_k=1, seed=4)
    shape = Shape(3, 8)
    for cold in (False, True):
        plan = run_of(Requests(trace), shape, 9, parse("lfu"), 16, cold=cold)
        rows: list[StepRow] = []
        whole = play(plan, AnyOrder(Watch(shape, 9, 16, 2), 1), rows.append)
        done = [row for row in rows if row.shares[0].request < 2]
        log = resumed(plan, done, AnyOrder(Watch(shape, 9, 16, 2), 2))
        np.testing.assert_array_equal(log.misses, whole.misses)


def test_what_is_done_with_a_row_is_in_no_tokens_time() -> None:
    trace = synthetic(requests=2, tokens=5, layers=3, experts=8, top_k=3, seed=5)
    plan = run_of(Requests(trace), Shape(3, 8), 12, parse("lru"), 64)
    device = AnyOrder(Watch(Shape(3, 8), 12, 64), seed=1)

    def slow(row: StepRow) -> None:
        device.now_ns += 1_000_000

    log = play(plan, device, slow)
    assert log.by_request.latency_ns.max() < 10_000
