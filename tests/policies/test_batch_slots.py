"""Two requests at a time: what is a request's own is kept by batch slot, and is as if the request ran alone."""

from dataclasses import replace

import numpy as np
import pytest

from policies.blend import neighbours
from policies.core.dispatch import is_compiled
from policies.core.events import Events
from policies.core.policy import Event, Listener, Prefetcher, ScorePolicy, Shape
from policies.core.registry import built_in
from policies.core.spec import parse
from policies.eamc import expert_map
from policies.eamc.eamc import EamcRetention
from policies.eamc.matching import REQUEST
from traces.synthetic import synthetic

L, E, K = 4, 6, 2
LEARNED = 3
MADE = synthetic(LEARNED + 2, 7, L, E, K, seed=5, prompt_tokens=3)
TRACE = replace(MADE, token_id=np.random.default_rng(0).integers(0, 3, len(MADE.experts)).astype(np.int32))
REQUESTS = [TRACE.steps(i) for i in range(LEARNED + 2)]

OWN = {
    "previous": lambda state, batch_slot: [chosen_so_far(state.chosen, state.sizes, batch_slot)],
    "markov": lambda state, batch_slot: [state.before[batch_slot, : state.before[batch_slot, E]].tolist()],
    "least-stale": lambda state, batch_slot: [state.steps[batch_slot]],
    "multi-criteria": lambda state, batch_slot: [state.last[batch_slot].tolist(), state.used[batch_slot].tolist()],
    "expert-map": lambda state, batch_slot: [
        state.own[batch_slot].tolist(),
        state.own_numbers[batch_slot, [expert_map.STEP, expert_map.SQUARE]].tolist(),
    ],
    "eamc-blend": lambda state, batch_slot: [
        state.known.request[batch_slot].tolist(),
        state.known.passes.request[batch_slot, neighbours.ROUTED :].tolist(),
        passes_of(state.known.passes, state.known.passes.request[batch_slot, neighbours.LATEST]),
    ],
    "eamc": lambda state, batch_slot: [
        *(bucket.eam[batch_slot, REQUEST].tolist() for bucket in (state.prefill, state.decode)),
        *(array[batch_slot].tolist() for array in at_play(state, batch_slot)),
    ],
}


def chosen_so_far(table, sizes, batch_slot):
    return [table[batch_slot, layer, : sizes[batch_slot, layer]].tolist() for layer in range(L)]


def passes_of(passes, place):
    """A pass and those of its request before it, the latest first."""
    routed = []
    while place >= 0:
        routed.append([used[1 : 1 + used[0]].tolist() for used in passes.used[:, place]])
        place = passes.links[neighbours.BACK, place]
    return routed


def at_play(state, batch_slot):
    """Of the collection of the phase that runs."""
    bucket = state.decode if state.says.steps[batch_slot] else state.prefill
    return bucket.eam, bucket.dots, bucket.squares, bucket.past, bucket.matched


def built(name: str, batch_slots: int) -> tuple[ScorePolicy, Prefetcher]:
    prefetches = name in (
        "previous",
        "markov",
        "oracle",
        "oracle1",
        "fewest-reads",
        "lookahead",
        "gate",
        "popular",
        "all",
    )
    keeper, prefetcher = parse(f"lru+{name}" if prefetches else name).build(Shape(L, E, batch_slots))
    assert isinstance(keeper, ScorePolicy)
    for half in (keeper, prefetcher):
        half.foresee(REQUESTS)
    return keeper, prefetcher


def telling(halves: tuple[ScorePolicy, Prefetcher]) -> Listener:
    """The half that learns."""
    return next((half for half in halves if half.observes), halves[1])


def hear(halves, event: Event) -> dict[int, float]:
    """What is proposed."""
    for half in halves:
        if half.observes:
            half.observe(event)
    ids, priorities = halves[1].propose(event)
    assert len(set(ids.tolist())) == len(ids)
    return dict(zip(ids.tolist(), priorities.tolist(), strict=True))


def play(halves, ordinal: int, batch_slot: int):
    """One event of a request after the other, with what is proposed after each."""
    events = Events.of(REQUESTS[ordinal], L)
    for half in halves:
        half.begin_request(ordinal, batch_slot)
    for step in range(len(REQUESTS[ordinal].phase)):
        for layer in range(L):
            yield hear(halves, events.event(step, layer)._replace(batch_slots=np.array([batch_slot])))
    for half in halves:
        half.end_request(batch_slot)


def learned(name: str, batch_slots: int):
    halves = built(name, batch_slots)
    for ordinal in range(LEARNED):
        list(play(halves, ordinal, 0))
    return halves


@pytest.mark.parametrize("name", OWN)
def test_what_is_a_requests_own_is_as_if_it_ran_alone(name):
    together = learned(name, 2)
    alone = [learned(name, 1) for _ in range(2)]
    running = [play(together, LEARNED + batch_slot, batch_slot) for batch_slot in range(2)]
    single = [play(alone[batch_slot], LEARNED + batch_slot, 0) for batch_slot in range(2)]
    events = 0
    for batch_slot in [0, 1] * (L * len(REQUESTS[LEARNED].phase)):
        next(running[batch_slot])
        next(single[batch_slot])
        ours, theirs = telling(together).state, telling(alone[batch_slot]).state
        assert OWN[name](ours, batch_slot) == OWN[name](theirs, 0)
        events += 1
    assert events == 2 * L * 8


@pytest.mark.parametrize(
    "name", ["previous", "oracle", "oracle1", "oracle:horizon=9", "lookahead:recall=0.5:distance=2"]
)
def test_what_a_request_alone_decides_is_proposed_as_if_it_ran_alone(name):
    together = built(name, 2) if ":" not in name else built(f"lru+{name}", 2)
    single = [built(name, 1) if ":" not in name else built(f"lru+{name}", 1) for _ in range(2)]
    ours = [play(together, batch_slot, batch_slot) for batch_slot in range(2)]
    theirs = [play(single[batch_slot], batch_slot, 0) for batch_slot in range(2)]
    for batch_slot in [0, 1] * (L * len(REQUESTS[0].phase)):
        assert next(ours[batch_slot]) == next(theirs[batch_slot])


def test_a_request_that_ends_teaches_the_collection_its_own_and_the_others_go_on_against_it():
    halves = built("eamc:capacity=3:split=false:source=both", 2)
    for ordinal in range(2):
        list(play(halves, ordinal, 0))
    running = [play(halves, ordinal, batch_slot) for batch_slot, ordinal in ((0, 2), (1, 3))]
    for _ in range(L):
        next(running[1])
    list(running[0])
    assert isinstance(halves[0], EamcRetention)
    collection = halves[0].predictor.collections[0]
    bucket = collection.bucket
    newest = bucket.eams[collection.oldest_first[-1]]
    assert newest.tolist() == np.bincount(REQUESTS[2].experts, REQUESTS[2].counts, L * E).astype(int).tolist()
    assert not bucket.eam[0, REQUEST].any()
    for _ in range(L * 3):
        next(running[1])
        for q in range(2):
            products = (bucket.eams * bucket.eam[1, q]).reshape(-1, L, E).sum(axis=2).T
            assert bucket.dots[1, q].tolist() == products.tolist()


def test_a_map_that_is_stored_while_another_request_runs_is_compared_with_that():
    halves = built("expert-map:capacity=5", 2)
    running = [play(halves, batch_slot, batch_slot) for batch_slot in range(2)]
    for batch_slot in [0, 0, 0, 1] * L * 2:
        next(running[batch_slot])
        maps = halves[0].state
        size = maps.numbers[expert_map.SIZE]
        assert maps.dots[batch_slot, :size].tolist() == (maps.own[batch_slot] @ maps.stored)[:size].tolist()
    assert size == 5


def merged(one: Event, other: Event) -> Event:
    """One event of both."""
    own = np.concatenate([one.own_experts, other.own_experts]), np.concatenate([one.own_counts, other.own_counts])
    tokens = np.bincount(*own, minlength=L * E).astype(np.int64)
    experts = np.flatnonzero(tokens)
    steps, offsets = np.concatenate([one.steps, other.steps]), np.array([0, len(one.experts), len(own[0])])
    tokens_of_all = experts, tokens[experts], np.arange(2), steps, offsets, *own
    ids = np.concatenate([one.token_ids, other.token_ids])
    return Event(one.serial, one.phase, one.layer, *tokens_of_all, ids)


@pytest.mark.parametrize("name", sorted({cls.name for cls in built_in() if is_compiled(cls)} - {"static"}))
def test_a_step_of_two_requests_is_one_event_with_one_proposal(name):
    halves = built(name, 2)
    own = OWN.get(name)
    alone = [built(name, 1) for _ in range(2)]
    single = [play(alone[batch_slot], batch_slot, 0) for batch_slot in range(2)]
    events = [Events.of(REQUESTS[batch_slot], L) for batch_slot in range(2)]
    for batch_slot in range(2):
        for half in halves:
            half.begin_request(batch_slot, batch_slot)
    for step in range(len(REQUESTS[0].phase)):
        for layer in range(L):
            proposed = hear(halves, merged(*(each.event(step, layer) for each in events)))
            assert np.isfinite(halves[0].keep).all()
            assert np.isfinite(list(proposed.values())).all()
            wanted = [next(each) for each in single]
            if name in ("previous", "oracle", "oracle1", "lookahead"):
                assert proposed == {i: max(each.get(i, -np.inf) for each in wanted) for each in wanted for i in each}
            if own and name not in ("eamc",):
                for batch_slot in range(2):
                    assert own(telling(halves).state, batch_slot) == own(telling(alone[batch_slot]).state, 0)
    for half in halves:
        half.end_request(0)
        half.end_request(1)
