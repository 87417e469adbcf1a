"""What Belady knows of the future, and what it takes to know it."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.core.events import Events, routing_of_batch
from policies.core.policy import Options, Shape
from policies.retention.belady import NEVER, Belady
from traces.steps import RequestSteps
from traces.synthetic import synthetic


def slow_next_uses(requests: list[RequestSteps]) -> list[list[int]]:
    """By request and access, the number of the next event of the run with the same expert, by looking for it."""
    events: list[set[int]] = []
    at = []
    for request in requests:
        ends = request.offsets.tolist()
        here = []
        for first, last in pairwise(ends):
            here += [(len(events), expert) for expert in request.experts[first:last].tolist()]
            events.append(set(request.experts[first:last].tolist()))
        at.append(here)

    def after(number: int, expert: int) -> int:
        found = [later for later in range(number + 1, len(events)) if expert in events[later]]
        return 1 + found[0] if found else NEVER  # events are numbered from 1

    return [[after(number, expert) for number, expert in here] for here in at]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 18), st.integers(0, 3), st.integers(0, 2), st.integers(0, 99))
def test_next_uses_are_those_that_a_search_through_the_whole_run_finds(
    requests: int, tokens: int, prompt: int, seed: int
) -> None:
    trace = synthetic(requests, tokens, 2, 7, 2, seed=seed, prompt_tokens=prompt)
    run = [trace.steps(i) for i in range(requests)]
    belady = Belady(Shape(2, 7), Options())
    belady.foresee(run)
    for i, wanted in enumerate(slow_next_uses(run)):
        belady.begin_request(i, 0)
        assert belady.state.following.tolist() == wanted


def test_requests_may_begin_in_any_order() -> None:
    trace = synthetic(11, 3, 2, 7, 2, seed=0)
    run = [trace.steps(i) for i in range(11)]
    belady = Belady(Shape(2, 7), Options())
    belady.foresee(run)
    wanted = slow_next_uses(run)
    for i in (4, 0, 10, 4, 9, 5):
        belady.begin_request(i, 0)
        assert belady.state.following.tolist() == wanted[i]


def test_an_empty_run_can_be_foreseen() -> None:
    belady = Belady(Shape(2, 7), Options())
    belady.foresee([])
    assert (belady.keep[0] == -NEVER).all()


def nearest_use(run: list[RequestSteps], at: dict[int, int], begun: int, expert: int) -> tuple[int, float]:
    """How far an expert's next use is: in a request that runs (`at`: its latest event), else behind `begun`."""

    def events(requests: list[RequestSteps]) -> list[set[int]]:
        return [set(each.experts[a:b].tolist()) for each in requests for a, b in pairwise(each.offsets)]

    own = [
        number - latest
        for request, latest in at.items()
        for number, chosen in enumerate(events([run[request]]))
        if number > latest and expert in chosen
    ]
    behind = [number for number, chosen in enumerate(events(run[begun + 1 :])) if expert in chosen]
    return (0, min(own)) if own else (1, min(behind, default=np.inf))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)])
def test_of_several_requests_the_nearest_next_use_decides_and_then_the_order_of_the_trace(
    order: tuple[int, ...],
) -> None:
    """Two users; `order`: in which the requests of the trace begin."""
    L, E = 2, 5
    trace = synthetic(5, 4, L, E, 2, seed=1)
    run = [trace.steps(i) for i in range(5)]
    belady = Belady(Shape(L, E, batch_slots=2), Options())
    belady.foresee(run)
    waiting, batch_slots, steps = list(order), dict[int, int](), dict[int, int]()
    begun, serial = -1, 0
    while waiting or batch_slots:
        for batch_slot in range(2):
            if (
                batch_slot not in batch_slots and waiting and (batch_slot == 0 or serial > L)
            ):  # the second begins a step later
                batch_slots[batch_slot], steps[batch_slot] = waiting.pop(0), 0
                begun = max(begun, batch_slots[batch_slot])
                belady.begin_request(batch_slots[batch_slot], batch_slot)
        taking_part = [
            (batch_slot, steps[batch_slot], run[batch_slots[batch_slot]]) for batch_slot in sorted(batch_slots)
        ]
        events = Events(routing_of_batch(taking_part, 1, Shape(L, E)), L, serial)
        for layer in range(L):
            belady.observe(events.event(0, layer))
            at = {batch_slots[batch_slot]: step * L + layer for batch_slot, step, _ in taking_part}
            uses = [nearest_use(run, at, begun, expert) for expert in range(L * E)]
            nearest_first = np.argsort(-belady.keep[0], kind="stable").tolist()
            assert nearest_first == sorted(range(L * E), key=lambda expert: uses[expert])
        serial += L
        for batch_slot in list(batch_slots):
            steps[batch_slot] += 1
            if steps[batch_slot] == len(run[batch_slots[batch_slot]].phase):
                belady.end_request(batch_slot)
                del batch_slots[batch_slot]
