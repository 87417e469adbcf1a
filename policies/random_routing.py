"""Scripted random routing for the conformance kit: small models, caches of all sizes, all kinds of requests."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from policies.core.policy import Int, Shape
from traces.steps import DECODE, PREFILL, Flat, Lookahead, RequestSteps

Layers = list[dict[int, int]]  # of each layer: tokens by expert, ids within the layer
Step = tuple[int, Layers]  # phase, layers
Play = list[list[Step]]  # requests


@dataclass(frozen=True)
class Script:
    """One run: routing, the cache, and the seed of the order in which link and compute stream take turns."""

    shape: Shape
    slots: int
    play: Play
    seed: int
    cold: bool = False

    def __str__(self) -> str:
        L, E = self.shape.layers, self.shape.experts
        how = [f"{L} x {E} experts", f"{self.slots} slots"] + ["cold"] * self.cold
        return ", ".join(how)

    @property
    def events(self) -> int:
        return self.shape.layers * sum(map(len, self.play))

    def requests(self) -> list[RequestSteps]:
        return [_steps(i, request, self.shape) for i, request in enumerate(self.play)]

    def with_another_future(self, cut: int, rng: random.Random) -> "Script":
        """Return the same first `cut` events and the phase of the step that runs; then other routing and requests."""
        L, E = self.shape.layers, self.shape.experts
        play: Play = []
        for request in self.play:
            whole, layers = divmod(cut, L)
            if whole < len(request):
                phase, known = request[whole][0], request[whole][1][:layers]
                other = _draw_step(rng, L, E, phase)[1]
                more = [_draw_step(rng, L, E, DECODE) for _ in range(rng.randrange(4))]
                play.append([*request[:whole], (phase, known + other[layers:]), *more])
                return replace(self, play=play + _draw(rng, self.shape, rng.randrange(3)))
            play.append(request)
            cut -= len(request) * L
        return self


def scripts(seed: int) -> Iterator[Script]:
    rng = random.Random(seed)
    shapes = [(1, 1, 1), (1, 4, 2), (2, 3, 1), (3, 5, 1), (3, 5, 2), (3, 5, 3), (4, 8, 9), (4, 8, 20), (2, 6, 12)]
    for L, E, slots in shapes:
        shape = Shape(L, E)
        script = Script(shape, slots, _draw(rng, shape, 5), rng.randrange(2**31))
        yield script
        yield replace(script, cold=True)


def _draw(rng: random.Random, shape: Shape, requests: int) -> Play:
    L, E = shape.layers, shape.experts
    return [
        [_draw_step(rng, L, E, PREFILL) for _ in range(rng.random() < 0.5)]
        + [_draw_step(rng, L, E, DECODE) for _ in range(rng.choice([0, 1, 3, 6]))]
        for _ in range(requests)
    ]


def _draw_step(rng: random.Random, L: int, E: int, phase: int) -> Step:
    """One forward pass of one token or of several; some events have no experts, some experts are popular."""
    k = min(2, E)
    tokens = rng.randint(2, 5) if phase == PREFILL else 1
    layers: Layers = []
    for _ in range(L):
        chosen: dict[int, int] = {}
        for _ in range(tokens if rng.random() < 0.9 else 0):
            for expert in sorted(range(E), key=lambda e: rng.random() * (1 + e % 3))[:k]:
                chosen[expert] = chosen.get(expert, 0) + 1
        layers.append(dict(sorted(chosen.items())))
    return phase, layers


def _steps(request: int, steps: list[Step], shape: Shape) -> RequestSteps:
    L, E = shape.layers, shape.experts
    events = [{layer * E + e: n for e, n in each.items()} for _, layers in steps for layer, each in enumerate(layers)]
    # picks that follow from an event alone, when they are known: its experts' neighbours in the next layer
    ahead = [
        dict(sorted(((layer + 1) * E + (e + 1) % E, n) for e, n in chosen.items())) if layer + 1 < L else {}
        for _, layers in steps
        for layer, chosen in enumerate(layers)
    ]
    (offsets, experts, counts), picks = _flat(events), _flat(ahead)
    tokens = [max([1, *(n for chosen in layers for n in chosen.values())]) for _, layers in steps]
    return RequestSteps(
        request=request,
        phase=np.array([phase for phase, _ in steps], np.uint8),
        tokens=np.array(tokens, np.int64),
        context=np.cumsum(np.array(tokens, np.int64)),
        offsets=offsets,
        experts=experts,
        counts=counts,
        weights=counts / 2,
        lookahead=Lookahead(L, 1, *picks, scores=picks[2] / 2),
        token_ids=_token_ids(steps, tokens),
    )


def _flat(events: list[dict[int, int]]) -> Flat:
    """Return offsets, ids and tokens of events, each the tokens by id."""
    offsets = np.cumsum(np.array([0, *map(len, events)], np.int64))
    table = [pair for event in events for pair in event.items()]
    experts, counts = np.array(table, np.int64).reshape(-1, 2).T.copy()
    return offsets, experts, counts


def _token_ids(steps: list[Step], tokens: list[int]) -> Int:
    """Ids of which each step's last one follows from the step before, as what a head samples.

    It is the first expert of that step's last layer, however many tokens the step has: their number follows from its
    own routing, which is not known when it starts.
    """
    sampled = [0, *(next(iter(layers[-1]), 0) for _, layers in steps)]
    return np.array([last + i for last, n in zip(sampled, tokens, strict=False) for i in reversed(range(n))], np.int64)
