"""What the simulator must say where the answer can be written down by hand: rules 7, 11 to 14, 17 and 18."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.engines.simpy_engine import simulate
from sim.loop.log import STALLS, RunLog
from sim.loop.run import Tier, Users, gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces import DECODE, Trace
from traces.steps import RequestSteps

L, E, K = 3, 8, 2
TIMING = FixedTiming(dense=1_000, expert=300, expert_per_token=20, combine=50, head=700)
COMPUTE_NS = L * (1_000 + K * 320 + 50) + 700
LINK = Link(latency_ns=100, ns_per_byte_num=1, ns_per_byte_den=4, expert_bytes=40_000)
TRANSFER_NS = 100 + 10_000


def request_of(tokens: np.ndarray) -> RequestSteps:
    return Trace.from_arrays([tokens], E).steps(0)


def random_tokens(n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.random((n, L, E)).argsort(axis=-1)[:, :, :K].astype(np.uint8)


def play(tokens: np.ndarray, slots: int, policy: str = "lru", timing=TIMING, link=LINK) -> RunLog:
    return simulate(gpu_run([request_of(tokens)], Shape(L, E), slots, parse(policy), timing, link))


def test_when_everything_fits_tpot_is_compute_alone_after_the_first_touches():
    """Rule 11: dense, experts and combine of each layer, then the head."""
    log = play(random_tokens(200), slots=L * E)
    untouched = log.misses == 0
    assert untouched[-50:].all()
    assert set(log.step_ns[untouched].tolist()) == {COMPUTE_NS}
    assert log.misses.sum() == len(log.evictions) + L * E


@pytest.mark.parametrize("slots", [1, K, L * K - K])
def test_identical_tokens_in_too_few_slots_miss_at_every_lookup(slots):
    """LRU forgets each expert just before it comes round again; every event waits for each of its transfers.

    The first expert computes while the second one loads, which takes longer: only the last compute is exposed.
    """
    tokens = np.repeat(random_tokens(1), 30, axis=0)
    log = play(tokens, slots)
    assert log.hits.sum() == 0
    if slots > 1:
        exposed = 320
        expected = L * (1_000 + K * TRANSFER_NS + exposed + 50) + 700
        assert log.step_ns.tolist() == [expected] * 30
    else:  # the one slot is free only when the expert in it has been computed
        assert log.step_ns.tolist() == [L * (1_000 + K * (TRANSFER_NS + 320) + 50) + 700] * 30


def test_identical_tokens_hit_at_every_lookup_once_one_token_fits():
    tokens = np.repeat(random_tokens(1), 30, axis=0)
    log = play(tokens, slots=L * K)
    assert log.misses.tolist() == [L * K] + [0] * 29
    assert log.step_ns[1:].tolist() == [COMPUTE_NS] * 29


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "eamc", "belady", "lru+popular", "lru+oracle1"])
def test_an_infinite_link_equals_everything_resident(policy):
    tokens = random_tokens(60)
    infinite = Link(latency_ns=0, ns_per_byte_num=0, ns_per_byte_den=1, expert_bytes=40_000)
    log = play(tokens, slots=5, policy=policy, link=infinite)
    assert log.step_ns.tolist() == [COMPUTE_NS] * 60
    assert log.stall_ns.sum() == 0


def test_eviction_moves_no_bytes():
    """Rule 7: the link is busy for what comes in and for nothing else, though each transfer but five evicts."""
    log = play(random_tokens(50), slots=5)
    assert len(log.evictions) == log.demand_transfers.sum() - 5
    assert log.link_busy_ns.sum() == log.demand_transfers.sum() * TRANSFER_NS


def test_doubling_the_bandwidth_halves_the_transfer_stall():
    """Without prefetch, latency and expert compute, all stall is bytes over bandwidth."""
    timing = FixedTiming(dense=1_000, expert=0, expert_per_token=0, combine=0, head=700)
    tokens = random_tokens(80)
    slow = play(tokens, 6, timing=timing, link=Link(0, 1, 4, 40_000))
    fast = play(tokens, 6, timing=timing, link=Link(0, 1, 8, 40_000))
    assert slow.misses.tolist() == fast.misses.tolist()
    assert slow.stall_ns.sum() == 2 * fast.stall_ns.sum() > 0
    assert slow.stall_ns.sum() == slow.misses.sum() * 10_000


def test_chunks_alone_never_change_a_transfers_time():
    """Rule 12."""
    tokens = random_tokens(40)
    chunked = Link(100, 1, 4, 40_000, chunk_bytes=999)
    assert play(tokens, 6).step_ns.tolist() == play(tokens, 6, link=chunked).step_ns.tolist()


def test_perfect_prefetch_hides_transfers_that_fit_under_the_compute_before_them():
    fast = Link(latency_ns=0, ns_per_byte_num=1, ns_per_byte_den=100, expert_bytes=40_000)  # 400 ns each
    log = play(random_tokens(60), slots=L * E // 2, policy="lru+oracle1", link=fast)
    stall_by_layer = log.stall_ns.sum(axis=1)
    assert (stall_by_layer <= K * 400).all(), "only the first layer's experts can be missing"
    assert log.prefetch_used.sum() > 0
    assert log.stall_ns.sum() < play(random_tokens(60), slots=L * E // 2, link=fast).stall_ns.sum()


def test_the_predictors_time_is_paid_once_an_event():
    """Rule 14."""
    paid = FixedTiming(1_000, 300, 20, 50, 700, predictor_ns=70)
    log = play(random_tokens(20), slots=L * E, timing=paid)
    assert log.stall_ns[:, STALLS.index("predictor")].tolist() == [70 * L] * 20


def test_a_prefill_is_one_step_that_loads_each_of_its_experts_once():
    tokens = random_tokens(50)
    step = Trace.from_arrays([tokens], E, len(tokens)).steps(0)
    log = simulate(gpu_run([step], Shape(L, E), 4, parse("lru"), TIMING, LINK))
    assert log.tokens.tolist() == [50]
    assert log.misses.tolist() == [len(np.unique(tokens + E * np.arange(L)[None, :, None]))]
    assert step.counts.sum() == 50 * L * K


def test_every_step_is_compute_plus_stall_and_the_link_never_overruns():
    for policy in ("lru", "eamc", "lru+popular", "belady"):
        log = play(random_tokens(100, seed=3), slots=9, policy=policy)
        assert (log.compute_busy_ns == COMPUTE_NS).all()
        assert (log.link_busy_ns <= log.step_ns).all()
        assert log.link_busy_ns.sum() <= (log.demand_transfers.sum() + log.prefetch_transfers.sum()) * TRANSFER_NS
        assert (log.phase == DECODE).all()
        assert (log.hits + log.late + log.misses == L * K).all()


# Host and disk

HOST_TIMING = FixedTiming(1_000, 300, 20, 50, 700, hop_ns=90, host=2_000, host_per_token=10)
DISK = Link(latency_ns=500, ns_per_byte_num=1, ns_per_byte_den=2, expert_bytes=40_000)
READ_NS = 500 + 20_000
ENGINES = pytest.mark.parametrize("engine", [simulate, compiled_engine.simulate], ids=["simpy", "compiled"])


def play_tiers(tokens, policy="lru", slots=1, engine=simulate, timing=HOST_TIMING, host_slots=0, chunk_bytes=None):
    link = dataclasses.replace(LINK, chunk_bytes=chunk_bytes)
    host = Tier(host_slots, None, DISK) if host_slots else None
    return engine(gpu_run([request_of(tokens)], Shape(L, E), slots, parse(policy), timing, link, host=host))


@ENGINES
def test_with_every_expert_on_the_host_a_step_is_dense_hop_host_compute_and_combine(engine):
    """Rule 13: nothing is fetched, so every lookup misses; the hop is paid once an event."""
    log = play_tiers(random_tokens(40), "lru/host", engine=engine)
    assert log.step_ns.tolist() == [L * (1_000 + 90 + K * 2_010 + 50) + 700] * 40
    assert log.on_host.tolist() == log.misses.tolist() == [L * K] * 40
    assert log.host_busy_ns.tolist() == [L * K * 2_010] * 40
    assert log.stall_ns[:, STALLS.index("host")].tolist() == [L * (90 + K * 2_010)] * 40
    assert not log.link_busy_ns.any()


@ENGINES
def test_a_token_whose_experts_are_all_on_disk_waits_for_each_read_and_the_last_transfer(engine):
    """Rule 17: reads follow one another, a transfer begins when its read has ended, and hides under the next read."""
    log = play_tiers(np.repeat(random_tokens(1), 10, axis=0), slots=K, engine=engine, host_slots=K)
    assert log.step_ns.tolist() == [L * (1_000 + K * READ_NS + TRANSFER_NS + 320 + 50) + 700] * 10
    assert log.reads_demand.tolist() == [L * K] * 10
    assert log.disk_busy_ns.tolist() == [L * K * READ_NS] * 10
    assert log.stall_ns[:, STALLS.index("disk")].tolist() == [L * (K * READ_NS - TRANSFER_NS - 320)] * 10


@ENGINES
def test_where_host_memory_holds_everything_each_expert_is_read_once(engine):
    tokens = random_tokens(60)
    log = play_tiers(tokens, slots=K, engine=engine, host_slots=L * E)
    without = play_tiers(tokens, slots=K, engine=engine)
    used = len(np.unique(tokens + E * np.arange(L)[None, :, None]))
    assert log.reads_demand.sum() == used
    assert len(log.host_evictions) == 0
    assert log.step_ns[30:].tolist() == without.step_ns[30:].tolist()


@pytest.mark.parametrize("seed", range(30))
def test_split_is_never_slower_than_fetch_or_host_on_one_event(seed):
    """Rule 13: from an idle link, with as many slots as misses and computes that hide under the next transfer."""
    rng = np.random.default_rng(seed)
    host, most = int(rng.integers(0, 30_000)), int(rng.integers(1, 9))
    timing = FixedTiming(1_000, 300, 20, 50, 700, hop_ns=int(rng.integers(0, 5_000)), host=host, host_per_token=100)
    experts = np.sort(rng.permutation(8)[:most])
    tokens = rng.integers(1, 4, most)
    whole, none = np.array([0, most]), np.array([int(tokens.max())])
    request = RequestSteps(0, np.array([DECODE], np.uint8), none, none, whole, experts, tokens)

    def took(placement: str) -> int:
        run = gpu_run([request], Shape(1, E), E, parse(f"lru/{placement}"), timing, LINK)
        return int(simulate(run).step_ns[0])

    assert took("split") <= min(took("fetch"), took("host"))


# Several users (rule 18)


def users_run(
    users: Users, requests: int = 12, steps: int = 8, engine: Any = simulate, slots: int = 6, seed: int = 0
) -> RunLog:
    played = [dataclasses.replace(request_of(random_tokens(steps, seed + i)), request=i) for i in range(requests)]
    log: RunLog = engine(gpu_run(played, Shape(L, E), slots, parse("lru"), TIMING, LINK, users=users))
    return log


def spans_of(log: RunLog, arrivals: np.ndarray) -> np.ndarray:
    """int64[requests, 3]: arrival, admission and end of each."""
    rows, n = log.by_request, len(arrivals)
    waited, served = (
        np.bincount(rows.request, column, n).astype(np.int64) for column in (rows.waited_ns, rows.latency_ns)
    )
    return np.stack([arrivals, arrivals + waited, arrivals + waited + served], axis=1)


@ENGINES
def test_littles_law_holds_in_a_closed_loop_of_users(engine):
    """Requests in the system = throughput x time in the system: users who never pause keep every batch slot taken."""
    for users in (1, 2, 3):
        log = users_run(Users(users), requests=4 * users, engine=engine)
        rows = log.by_request
        active = np.bincount(rows.step, minlength=len(log.step_ns))
        assert (active == users).all(), "requests are equally long and end together"
        assert rows.latency_ns.sum() == users * log.ended_ns
        assert log.step_ns.sum() == log.ended_ns


@ENGINES
@pytest.mark.parametrize("seed", range(4))
def test_littles_law_and_the_utilisation_law_hold_with_poisson_arrivals(engine, seed):
    """The time that requests spend in the system is the integral of how many are in it, waiting ones apart too."""
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(300_000, 12)).astype(np.int64)
    log = users_run(Users(2, tuple(arrivals.tolist())), engine=engine, seed=seed)
    spans = spans_of(log, arrivals)
    assert spans[:, 2].max() == log.ended_ns
    assert (spans[:, 1] > spans[:, 0]).any()
    for since in (0, 1):  # in the system from arrival on, in service from admission on
        moments = np.unique(spans[:, [since, 2]])
        inside = [((spans[:, since] <= at) & (at < spans[:, 2])).sum() for at in moments[:-1]]
        assert np.dot(inside, np.diff(moments)) == (spans[:, 2] - spans[:, since]).sum()
        assert since == 0 or max(inside) == 2, "no more are in service than may be"
    idle = log.ended_ns - log.step_ns.sum()
    assert idle >= arrivals[0]
    assert log.link_busy_ns.sum() == log.demand_transfers.sum() * TRANSFER_NS  # utilisation = throughput x service
    assert log.compute_busy_ns.sum() + log.stall_ns.sum() + idle == log.ended_ns


@ENGINES
def test_requests_that_arrive_when_the_one_before_has_long_ended_run_as_if_alone(engine):
    alone = users_run(Users(1), engine=engine)
    ends = np.cumsum(alone.step_ns)[7::8]
    apart = tuple((np.arange(12) * 2 * int(np.diff(ends, prepend=0).max())).tolist())
    log = users_run(Users(3, apart), engine=engine)
    assert log.step_ns.tolist() == alone.step_ns.tolist() == log.by_request.latency_ns.tolist()
    assert not log.by_request.waited_ns.any()
    assert log.evictions.tolist() == alone.evictions.tolist()
