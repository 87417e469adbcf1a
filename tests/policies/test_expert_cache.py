"""The cache for engines of others decides as the simulator does, and its slots hold what they should."""

from itertools import pairwise

import pytest

from policies import ExpertCache, ScorePolicy, make_policy
from sim.engines.untimed import count
from sim.loop.requests import Requests
from traces.steps import RequestSteps
from traces.synthetic import synthetic

L, E = 3, 16


class Recent(ScorePolicy):
    """Recency, in Python."""

    def observe(self, event):
        self.keep[0, event.experts] = event.serial


def steps(request: RequestSteps):
    """Each step's phase, and its experts and their tokens by layer."""
    for step, phase in enumerate(request.phase):
        ends = request.offsets[step * L : step * L + L + 1]
        parts = [slice(*pair) for pair in pairwise(ends)]
        yield phase, [(request.experts[part] % E, request.counts[part]) for part in parts]


@pytest.mark.parametrize("slots", [2, 9, 30])
@pytest.mark.parametrize("policy", ["lru", "lfu", "clock", "eamc", "eamc-blend", "lru@layer", Recent])
def test_without_prefetching_its_counts_are_those_of_the_simulator(policy, slots: int) -> None:
    requests = Requests(synthetic(4, tokens=12, layers=L, experts=E, top_k=2, seed=3, prompt_tokens=5))
    spec = make_policy(policy).without_prefetch()
    if "layer" in spec.text and slots < L:
        pytest.skip("a slot for each layer is the least")
    log = count(requests, L, E, slots, spec)
    cache = ExpertCache(spec, L, E, slots)
    for request in requests:
        cache.begin_request()
        for phase, layers in steps(request):
            cache.begin_step(prefill=phase == 0)
            for layer, (experts, counts) in enumerate(layers):
                cache.route(layer, experts[::-1], counts[::-1])
        cache.end_request()
    assert cache.counters == {"hits": log.hits.sum(), "misses": log.misses.sum()}


@pytest.mark.parametrize("policy", ["lru+popular:n=3", "eamc", "eamc-blend"])
def test_slots_hold_what_was_loaded_also_early(policy: str) -> None:
    requests = Requests(synthetic(3, tokens=20, layers=L, experts=E, top_k=2, seed=4, prompt_tokens=2))
    cache, early = ExpertCache(policy, L, E, 12), 0
    memory: dict[int | None, tuple[int, int]] = {}
    for request in requests:
        cache.begin_request()
        for phase, layers in steps(request):
            cache.begin_step([7], prefill=phase == 0)
            for layer, (experts, counts) in enumerate(layers):
                for load in cache.route(layer, experts, counts):
                    memory[load.slot] = (load.layer, load.expert)
                for load in cache.prefetch(at_most=2):
                    memory[load.slot] = (load.layer, load.expert)
                    early += 1
                assert [memory[cache.slot(layer, e)] for e in experts] == [(layer, e) for e in experts]
        cache.end_request()
    assert len(memory) == 12
    assert early


@pytest.mark.parametrize(
    ("policy", "early"), [("lru+gate", 1), ("lru+gate:distance=2", 2), ("lru+gate:threshold=0.7", 0)]
)
def test_what_the_next_routers_would_choose_is_fetched_before_their_layers_run(policy: str, early: int) -> None:
    requests = Requests(synthetic(3, tokens=20, layers=L, experts=E, top_k=2, seed=4))
    cache = ExpertCache(policy, L, E, 3 * L)
    for request in requests:
        cache.begin_request()
        for _, layers in steps(request):
            cache.begin_step()
            for layer, (experts, _) in enumerate(layers):
                ahead = [(ids[::-1], [0.6] * len(ids)) for ids, _ in layers[layer + 1 :]]
                loads = cache.route(layer, experts, weights=[0.5, 0.25], ahead=ahead)
                assert not (loads and layer and early)
                fetched = {load.layer for load in cache.prefetch(at_most=9)}
                assert fetched <= set(range(layer + 1, layer + 1 + early))
        cache.end_request()


@pytest.mark.parametrize("policy", ["belady", "lru+oracle"])
def test_a_policy_that_needs_what_no_engine_knows_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="needs to know what comes later"):
        ExpertCache(policy, L, E, 8)
