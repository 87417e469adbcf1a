"""`eamc` against its definition, written out with whole matrices and no shortcuts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from policies.contract import Event, Shape
from policies.registry import parse
from traces.steps import DECODE, PREFILL


def event_of(request: int, step: int, phase: int, layer: int, experts: np.ndarray, counts: np.ndarray) -> Event:
    return Event(request, step, phase, layer, 0, experts, counts, 0, len(experts))


class Definition:
    """The method of MoE-Infinity with the defaults of this project, by the formulas (arXiv 2401.14361v3)."""

    def __init__(self, shape: Shape, capacity: int, eps: float) -> None:
        self.shape, self.capacity, self.eps = shape, capacity, eps
        self.stored: dict[int, list[np.ndarray]] = {PREFILL: [], DECODE: []}  # the oldest first
        self.request = {phase: np.zeros((shape.layers, shape.experts), np.int64) for phase in (PREFILL, DECODE)}
        self.place: tuple[int, int] | None = None
        self.matched = np.zeros((shape.layers, shape.experts))

    @staticmethod
    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        norms = np.linalg.norm(a) * np.linalg.norm(b)
        return float((a * b).sum() / norms) if norms else 0.0

    def nearest(self, phase: int, eam: np.ndarray) -> int:
        cosines = [round(self.cosine(eam, other), 12) for other in self.stored[phase]]
        return int(np.argmax(cosines))

    def observe(self, event: Event) -> None:
        if self.place != (event.request, event.step):
            self.place, self.iteration = (event.request, event.step), np.zeros_like(self.matched, np.int64)
        for expert, count in zip(event.experts, event.counts, strict=True):
            self.iteration[divmod(expert, self.shape.experts)] += count
            self.request[event.phase][divmod(expert, self.shape.experts)] += count
        stored = self.stored[event.phase]
        eam = stored[self.nearest(event.phase, self.iteration)] if stored else np.zeros_like(self.iteration)
        sums = eam.sum(axis=1, keepdims=True)
        self.matched = np.divide(eam, sums, out=np.zeros(eam.shape), where=sums > 0)

    def keep(self) -> np.ndarray:
        L = self.shape.layers
        return (self.matched + self.eps) * (1 - np.arange(L) / L)[:, None]

    def proposal(self, layer: int) -> dict[int, float]:
        L, E = self.matched.shape
        return {
            i * E + e: (self.matched[i, e] + self.eps) * (1 - (i - layer) / L)
            for i in range(layer + 1, L)
            for e in range(E)
            if self.matched[i, e] > 0
        }

    def end_request(self) -> None:
        for phase, eam in self.request.items():
            if eam.any():
                if len(self.stored[phase]) == self.capacity:
                    del self.stored[phase][self.nearest(phase, eam)]
                self.stored[phase].append(eam.copy())
            eam[:] = 0


@st.composite
def histories(draw):
    """A shape, a capacity, and requests of steps of events, with token counts."""
    shape = Shape(draw(st.integers(1, 4)), draw(st.integers(1, 5)))
    chosen = st.dictionaries(st.integers(0, shape.experts - 1), st.integers(1, 9), max_size=shape.experts)
    step = st.tuples(st.sampled_from([PREFILL, DECODE]), st.lists(chosen, min_size=shape.layers, max_size=shape.layers))
    requests = draw(st.lists(st.lists(step, min_size=1, max_size=3), min_size=1, max_size=6))
    return shape, draw(st.integers(1, 3)), requests


@given(histories())
def test_eamc_scores_and_proposals_are_those_of_the_definition(history):
    shape, capacity, requests = history
    keeper, prefetcher = parse(f"eamc:capacity={capacity}").build(shape)
    definition = Definition(shape, capacity, 1e-8)
    for request, steps in enumerate(requests):
        for step, (phase, layers) in enumerate(steps):
            for layer, chosen in enumerate(layers):
                experts = np.array(sorted(chosen), np.int64)
                counts = np.array([chosen[e] for e in experts], np.int64)
                event = event_of(request, step, phase, layer, experts=experts + layer * shape.experts, counts=counts)
                keeper.observe(event)
                definition.observe(event)
                np.testing.assert_allclose(keeper.keep[0], definition.keep().ravel(), rtol=1e-12)
                ids, priorities = prefetcher.propose(event)
                proposal = definition.proposal(layer)
                assert ids.tolist() == sorted(proposal)
                np.testing.assert_allclose(priorities, [proposal[i] for i in ids.tolist()], rtol=1e-12)
        keeper.end_request()
        prefetcher.end_request()
        definition.end_request()


@given(histories())
def test_a_prefetcher_on_its_own_proposes_as_the_pair_does(history):
    shape, capacity, requests = history
    keeper, beside = parse(f"eamc:capacity={capacity}").build(shape)
    _, alone = parse(f"lru+eamc:capacity={capacity}").build(shape)
    assert alone.observes
    assert not beside.observes, "the pair matches once, not twice"
    for request, steps in enumerate(requests):
        for step, (phase, layers) in enumerate(steps):
            for layer, chosen in enumerate(layers):
                experts = np.array(sorted(chosen), np.int64) + layer * shape.experts
                counts = np.array([chosen[e] for e in sorted(chosen)], np.int64)
                event = event_of(request, step, phase, layer, experts=experts, counts=counts)
                keeper.observe(event)
                alone.observe(event)
                for ours, theirs in zip(alone.propose(event), beside.propose(event), strict=True):
                    assert ours.tolist() == theirs.tolist()
        for listener in (keeper, alone, beside):
            listener.end_request()


def test_an_eam_and_its_multiple_are_equally_near_and_the_older_is_matched():
    shape = Shape(1, 3)
    keeper, _ = parse("eamc").build(shape)
    for request, times in enumerate((3, 1)):
        experts, counts = np.array([0, 1, 2]), np.array([1, 1, 2]) * times
        keeper.observe(event_of(request, 0, DECODE, 0, experts=experts, counts=counts))
        keeper.end_request()
    keeper.observe(event_of(2, 0, DECODE, 0, experts=np.array([0, 2]), counts=np.array([1, 1])))
    assert keeper.predictor.matched == (DECODE, 0)


def test_eamc_starts_empty_and_learns_only_when_a_request_has_ended():
    shape = Shape(2, 2)
    keeper, prefetcher = parse("eamc").build(shape)
    event = event_of(0, 0, DECODE, 0, experts=np.array([1]), counts=np.array([1]))
    later = event_of(0, 0, DECODE, 1, experts=np.array([2]), counts=np.array([1]))
    for each in (event, later):
        keeper.observe(each)
        assert len(prefetcher.propose(each)[0]) == 0
    keeper.end_request()
    event.request = 1
    keeper.observe(event)
    assert prefetcher.propose(event)[0].tolist() == [2]
