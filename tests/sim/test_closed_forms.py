"""What the simulator must say where the answer can be written down by hand."""

import numpy as np
import pytest

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines.simpy_engine import simulate
from sim.loop.log import STALLS, RunLog
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.steps import DECODE, RequestSteps, decode_steps, prefill_step

L, E, K = 3, 8, 2
TIMING = FixedTiming(dense=1_000, expert=300, expert_per_token=20, combine=50, head=700)
COMPUTE_NS = L * (1_000 + K * 320 + 50) + 700
LINK = Link(latency_ns=100, ns_per_byte_num=1, ns_per_byte_den=4, expert_bytes=40_000)
TRANSFER_NS = 100 + 10_000


def request_of(tokens: np.ndarray) -> RequestSteps:
    return decode_steps(0, tokens, E, 255, np.arange(1, len(tokens) + 1))


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
    step = prefill_step(0, tokens, E, 255)
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
