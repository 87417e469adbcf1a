"""Partitioned retention: slots of each layer's own, against simulators of one layer and brute force."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.per_layer import PerLayer
from policies.core.policy import Shape
from policies.core.residency import PolicyResidency
from policies.core.residency_compiled import BLOCKED, NO_EXPERT
from policies.core.scope import even, lru_curves, optimal
from policies.core.spec import parse
from policies.core.stack_distances import lru_misses
from sim.engines.simpy_engine import simulate
from sim.engines.untimed import count
from sim.loop.requests import Requests
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from tests.support.logs import assert_logs_equal
from tests.support.tiny import SIZES
from tests.support.untimed_oracle import SHARED, oracle_misses
from traces import InputError, Trace
from traces.importers import import_dump
from traces.steps import RequestSteps
from traces.synthetic import synthetic
from traces.writer import write_trace

THEIRS = {
    "lru": "LRU",
    "fifo": "FIFO",
    "lfu": "LFU",
    "clock": "Clock",
    "sieve": "Sieve",
    "arc": "ARC",
    "belady": "Belady",
}
TIMING = FixedTiming(dense=100, expert=20, expert_per_token=1, combine=2, head=300)
LINK = Link(latency_ns=10, ns_per_byte_num=1, ns_per_byte_den=4, expert_bytes=400, chunk_bytes=100)


def request_of(experts: np.ndarray, E: int) -> RequestSteps:
    """experts: [tokens, L, k] ids within a layer."""
    return Trace.from_arrays([experts], E).steps(0)


def by_layer(requests: list[RequestSteps], L: int, E: int) -> list[np.ndarray]:
    """The ids within each layer, in order."""
    ids = np.concatenate([request.experts for request in requests])
    return [ids[ids // E == layer] % E for layer in range(L)]


def misses(requests, L, E, slots, policy):
    return int(count(requests, L, E, slots, parse(policy)).misses.sum())


def assert_sum_of_layers(requests, L, E, slots, policy):
    parts = zip(by_layer(requests, L, E), even(L, slots), strict=True)
    expected = sum(oracle_misses(THEIRS[policy], ids, own) for ids, own in parts)
    assert misses(requests, L, E, slots, f"{policy}@layer") == expected, (policy, slots)


def one_at_a_time(request: RequestSteps, L: int) -> RequestSteps:
    """As many steps for each as a layer has experts in it at most, of which each takes one of every layer."""
    events = np.split(request.experts, request.offsets[1:-1])
    ids, sizes = list[int](), list[int]()
    for step in range(len(request.phase)):
        layers = [event.tolist() for event in events[step * L : (step + 1) * L]]
        for turn in range(max(map(len, layers))):
            ids += [layer[turn] for layer in layers if turn < len(layer)]
            sizes += [turn < len(layer) for layer in layers]
    steps, chosen = len(sizes) // L, np.array(ids, np.int64)
    phase, ones, offsets = np.ones(steps, np.uint8), np.ones(steps, np.int64), np.cumsum([0, *sizes])
    return RequestSteps(request.request, phase, ones, np.arange(steps) + 1, offsets, chosen, np.ones_like(chosen))


def routing(kind: str, tokens: int, L: int, E: int) -> np.ndarray:
    rng = np.random.default_rng(11)
    uniform = rng.integers(0, E, (tokens, L, 1))
    zipf = (rng.zipf(1.4, (tokens, L, 1)) + np.arange(L)[:, None] * 5) % E
    cyclic = np.broadcast_to((np.arange(tokens) % 11)[:, None, None], (tokens, L, 1))
    shuffled = np.where(rng.random((tokens, L, 1)) < 0.5, zipf, cyclic)
    return {"random": uniform, "mixed": np.where(np.arange(L)[:, None] == 1, cyclic, shuffled)}[kind]


# What a scope of layers counts


@pytest.mark.parametrize("policy", THEIRS)
@pytest.mark.parametrize("kind", ["random", "mixed"])
def test_misses_per_layer_are_the_sum_of_independent_caches_of_libcachesim(policy, kind):
    L, E = 3, 20
    requests = [request_of(routing(kind, 500, L, E), E)]
    for slots in (3, 5, 19, 30, 59):
        assert_sum_of_layers(requests, L, E, slots, policy)


@pytest.mark.parametrize("dump", ["gpt-oss-20b-decode", "deepseek-v2-lite-prefill"])
@pytest.mark.parametrize("part", [4, pytest.param(10, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_misses_per_layer_of_real_traces_are_the_sum_of_libcachesims(dump, part):
    if not (SHARED / f"{dump}.npz").exists():
        pytest.skip("needs the real traces in ../shared/traces")
    trace, _ = import_dump(SHARED / f"{dump}.npz", SHARED / f"{dump}.json")
    short = trace.select(np.array([2, 3]))
    played = short if short.phases == "decode" else short.as_decode()
    L, E = trace.layers, trace.num_experts
    requests = [one_at_a_time(played.steps(i), L) for i in range(2)]
    for policy in THEIRS:
        assert_sum_of_layers(requests, L, E, L * E // part + 5, policy)


@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=1, max_size=40), st.integers(2, 9))
def test_belady_per_layer_is_never_beaten_by_what_keeps_per_layer(chosen, slots):
    requests = [request_of(np.array(chosen)[:, :, None], 5)]
    best = misses(requests, 2, 5, slots, "belady@layer")
    others = ("lru", "lfu", "fifo", "clock", "sieve", "arc", "s3fifo", "random", "eamc", "least-stale", "eamc-blend")
    assert all(best <= misses(requests, 2, 5, slots, f"{policy}@layer") for policy in others)
    assert misses(requests, 2, 5, slots, "belady") <= best, "and shared slots are worth no less to it"


def test_slots_of_its_own_save_lru_from_a_layer_that_cycles_through_more_than_fits():
    quiet, noisy = np.arange(300) % 2, np.arange(300) % 12
    requests = [request_of(np.stack([quiet, noisy], axis=1)[:, :, None], 12)]
    hits = [int(count(requests, 2, 12, 3, parse(policy)).hits.sum()) for policy in ("lru", "lru@layer")]
    assert hits == [0, 298], "its two experts stay after their first uses"


ALIKE = ["lru", "lfu", "fifo", "clock", "sieve", "s3fifo", "arc", "random", "eamc", "belady+oracle1", "lru+popular"]


@pytest.mark.parametrize("policy", ALIKE)
def test_one_layer_plays_alike_in_either_scope(policy):
    trace = synthetic(3, tokens=12, layers=1, experts=16, top_k=3, seed=2, prompt_tokens=5)
    requests = list(Requests(trace))
    for slots in (1, 5, 11):
        timed = [
            simulate(gpu_run(requests, Shape(1, 16), slots, parse(policy + s), TIMING, LINK, True))
            for s in ("", "@layer")
        ]
        untimed = [count(requests, 1, 16, slots, parse(policy + s)) for s in ("", "@layer")]
        for one, other in (timed, untimed):
            assert_logs_equal(one, other)
            assert one.misses.sum() > 0


def test_a_users_policy_with_state_of_its_own_is_one_for_each_layer(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from policies.core.policy import Policy\n"
        "class First(Policy):\n"
        "    def __init__(self, shape, options):\n"
        "        super().__init__(shape, options)\n"
        "        self.queue, self.layers = [], set()\n"
        "    def observe(self, event):\n"
        "        self.layers.add(event.layer)\n"
        "    def on_insert(self, expert, serial, start):\n"
        "        self.queue.append(expert)\n"
        "        assert self.layers == {expert // self.shape.experts}\n"
        "    def on_evict(self, expert):\n"
        "        self.queue.remove(expert)\n"
        "    def victim(self, evictable):\n"
        "        return next(e for e in self.queue if e in evictable)\n"
    )
    spec = parse(f"{tmp_path / 'mine.py'}:First@layer")
    requests = list(Requests(synthetic(3, tokens=12, layers=4, experts=16, top_k=3, seed=2)))
    ours, fifo = (count(requests, 4, 16, 21, policy) for policy in (spec, parse("fifo@layer")))
    assert ours.evictions.tolist() == fifo.evictions.tolist() != []
    keeper, _ = spec.build(Shape(4, 16))
    assert isinstance(keeper, PerLayer)
    assert keeper.name == "First"


# Slots, victims and the queue


def machine(policy: str = "lru") -> PolicyResidency:
    """Two layers of three experts (0 to 2, 3 to 5), one slot each."""
    return PolicyResidency(Shape(2, 3), (1, 1), parse(f"{policy}@layer").build(Shape(2, 3))[0])


def propose(machine: PolicyResidency, *pairs: tuple[int, float]) -> None:
    machine.propose(np.array([expert for expert, _ in pairs]), np.array([priority for _, priority in pairs]))


@pytest.mark.parametrize("policy", ["lru", "clock"])
def test_of_the_queued_prefetches_the_best_that_can_have_a_slot_starts(policy):
    ours = machine(policy)
    ours.route(np.array([0]))
    assert ours.next_transfer() == (0, NO_EXPERT, False)
    ours.arrived()
    propose(ours, (1, 9.0), (2, 8.0), (4, 2.0), (5, 3.0))
    assert ours.next_transfer() == (5, NO_EXPERT, True), "0 is pinned in the slot that 1 and 2 are for"
    assert ours.slot(5) == 1
    ours.arrived()
    assert ours.next_transfer() == (BLOCKED, NO_EXPERT, True), "5 is protected from 4"
    ours.computed(0)
    assert ours.next_transfer() == (1, 0, True)
    assert ours.slot(1) == 0


def test_a_demand_without_a_slot_holds_back_prefetches_of_every_layer():
    ours = machine()
    ours.route(np.array([0, 1]))
    assert ours.next_transfer() == (0, NO_EXPERT, False)
    ours.arrived()
    propose(ours, (4, 1.0))
    assert ours.next_transfer() == (BLOCKED, NO_EXPERT, False)
    ours.computed(0)
    assert ours.next_transfer() == (1, 0, False)


@pytest.mark.parametrize("policy", ["lru@layer", "sieve@layer"])
def test_an_event_larger_than_its_partition_runs_in_waves(policy):
    L, k, tokens = 2, 4, 3
    requests = [request_of(np.broadcast_to(np.arange(k), (tokens, L, k)), k)]
    link = replace(LINK, chunk_bytes=None)
    transfer, compute, rest = link.used_ns(400), 21, L * 102 + 300
    log = simulate(gpu_run(requests, Shape(L, k), L, parse(policy), TIMING, link))
    assert log.misses.tolist() == [L * k] + [L * (k - 1)] * (tokens - 1), "what came last stays"
    assert log.step_ns.tolist() == [rest + L * (n * transfer + k * compute) for n in [k] + [k - 1] * (tokens - 1)], (
        "with one slot nothing overlaps"
    )


# How many slots each layer gets


def test_what_is_left_over_goes_to_the_first_layers_and_no_layer_has_more_than_it_can_use():
    assert even(3, 11) == (4, 4, 3)
    assert parse("lru@layer").divide(Shape(3, 8), 11) == (4, 4, 3)
    assert parse("lru@layer").divide(Shape(3, 8), 100) == (8, 8, 8)
    assert parse("lru").divide(Shape(3, 8), 2) == (2,)


curves = st.integers(1, 4).flatmap(
    lambda E: st.lists(
        st.lists(st.integers(0, 6), min_size=E + 1, max_size=E + 1).map(lambda c: sorted(c, reverse=True)),
        min_size=1,
        max_size=4,
    )
)


@given(curves, st.data())
def test_dynamic_programming_finds_what_brute_force_finds_and_breaks_ties_for_earlier_layers(curves, data):
    L, E = len(curves), len(curves[0]) - 1
    slots = data.draw(st.integers(L, L * E))
    divisions = [own for own in itertools.product(range(1, E + 1), repeat=L) if sum(own) == slots]
    cost = {own: sum(curve[n] for curve, n in zip(curves, own, strict=True)) for own in divisions}
    least = min(cost.values())
    assert optimal(np.array(curves), slots) == max(own for own in divisions if cost[own] == least)


def test_lru_curves_of_layers_equal_those_of_the_analysis_layer_by_layer():
    trace = synthetic(4, tokens=20, layers=3, experts=16, top_k=3, seed=9)
    requests = list(Requests(trace))
    found = lru_curves(requests, Shape(3, 16))
    sizes = np.concatenate([np.diff(request.offsets) for request in requests]).reshape(-1, 3).T
    for curve, ids, each in zip(found, by_layer(requests, 3, 16), sizes, strict=True):
        np.testing.assert_array_equal(curve, lru_misses(ids.astype(np.int32), 16, np.cumsum(each)))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A trace whose layers differ in how many experts they use."""
    home = tmp_path_factory.mktemp("home")
    rng = np.random.default_rng(0)
    trace = synthetic(3, tokens=30, layers=3, experts=16, top_k=2, seed=4)
    ids = np.sort(rng.permuted(np.broadcast_to(np.arange(16), (*trace.experts.shape[:2], 16)), axis=-1)[..., :2])
    ids[:, 0] = [0, 1]
    ids[:, 1] = np.sort(rng.permuted(np.broadcast_to(np.arange(5), (len(ids), 5)), axis=-1)[:, :2])
    meta = replace(trace.meta, model="tiny", **SIZES)
    write_trace(replace(trace, meta=meta, experts=ids.astype(np.uint8)), home / "tiny")
    return home


def test_a_profile_never_costs_misses_on_itself(home):
    from traces import Trace

    trace = Trace.read(home / "tiny")
    requests = list(Requests(trace))
    profiled = f"lru@layer:profile={home / 'tiny'}"
    found = [(misses(requests, 3, 16, n, profiled), misses(requests, 3, 16, n, "lru@layer")) for n in range(3, 50)]
    assert all(ours <= theirs for ours, theirs in found)
    assert sum(ours < theirs for ours, theirs in found) > 10
    assert parse(profiled).divide(Shape(3, 16), 12) == (2, 5, 5)
    assert parse(profiled).divide(Shape(3, 16), 99) == (16, 16, 16)
    curves = lru_curves(requests, Shape(3, 16))
    assert found[9][0] == sum(curve[own] for curve, own in zip(curves, (2, 5, 5), strict=True)), "of 12 slots"


# As typed


def test_a_scope_belongs_to_the_text_and_to_the_options_of_a_policy():
    spec = parse("eamc:capacity=3+popular:n=2@layer:profile=some/trace")
    assert (spec.evict.values["capacity"], spec.prefetch.values["n"]) == (3, 2)
    assert spec.options()["scope"] == {"name": "layer", "profile": "some/trace"}
    assert parse("lru").options() == parse("lru@global").options() != parse("lru@layer").options()
    assert spec.without_prefetch().text == "eamc:capacity=3+none@layer:profile=some/trace"
    assert parse(spec.without_prefetch().text) == spec.without_prefetch()
    assert parse("lru").with_part("scope", "layer") == parse("lru@layer")
    assert parse("lru@global").with_part("scope", "layer").text == "lru@global"
    assert parse("lru").with_part("scope", "global").text == "lru"
    with pytest.raises(InputError, match="unknown scope"):
        parse("lru@layer").with_part("scope", "layr")


def test_a_profile_of_another_model_and_too_few_slots_are_refused(home):
    with pytest.raises(InputError, match="is of 3 layers of 16 experts, not 2 of 16"):
        parse(f"lru@layer:profile={home / 'tiny'}").divide(Shape(2, 16), 8)
    with pytest.raises(InputError, match="5 slots cannot be divided among 6 layers"):
        parse("lru@layer").divide(Shape(6, 4), 5)


@settings(max_examples=30)
@given(st.integers(2, 5), st.integers(0, 1_000))
def test_a_layer_never_holds_more_than_its_slots(L, seed):
    rng = np.random.default_rng(seed)
    partitions = tuple(int(n) for n in rng.integers(1, 4, L))
    ours = PolicyResidency(Shape(L, 4), partitions, parse("lru@layer").build(Shape(L, 4))[0])
    first = np.cumsum([0, *partitions])
    for _ in range(20):
        layer = int(rng.integers(L))
        ids = layer * 4 + np.sort(rng.permutation(4)[:2])
        for i in range(2):
            if not ours.route(ids[i : i + 1])[0]:
                ours.next_transfer()
                ours.arrived()
            ours.computed(int(ids[i]))
            assert first[layer] <= ours.slot(int(ids[i])) < first[layer + 1]
        held = np.bincount(ours.resident() // 4, minlength=L)
        assert (held <= partitions).all()
