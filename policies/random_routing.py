"""Scripted random routing for the conformance kit: small models, caches of all sizes, all kinds of requests."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from policies.core.policy import Int, Shape
from traces.schema import Picks, TraceMeta
from traces.steps import RequestSteps, steps_of_rows


@dataclass(frozen=True)
class Routed:
    """A request: `prompt` tokens, then decoded ones, and the experts of each, int64[T, L, k], -1 for none."""

    prompt: int
    experts: Int

    @property
    def steps(self) -> int:
        return len(self.experts) - self.prompt + (self.prompt > 0)

    def rows_of(self, step: int) -> slice:
        """Return the tokens of a step."""
        ends = [*([self.prompt] if self.prompt else []), *range(self.prompt + 1, len(self.experts) + 1)]
        return slice(ends[step - 1] if step else 0, ends[step])

    def of(self, request: int, E: int) -> RequestSteps:
        """Return it as engines run it, as request number `request`.

        Picks ahead of time follow from an event alone, when they are known: its experts' neighbours in the next layer.
        Ids of tokens follow from the step before, as what a head samples.
        """
        (tokens, L, k), ids = self.experts.shape, self.experts
        meta = TraceMeta("", L, E, k, tuple(map(str, range(L))), lookahead=Picks((1,), k))
        first, sampled = max(1, self.prompt), ids[:, -1].max(axis=1)
        picked = np.roll(np.where(ids < 0, -1, (ids + 1) % E), 1, axis=1)[:, :, None]
        rows = {
            "experts": meta.stored(ids),
            "position": np.arange(tokens),
            "weights": np.full(ids.shape, 0.5),
            "lookahead": meta.stored(picked),
            "lookahead_scores": np.full(picked.shape, 0.5),
            "token_id": np.append(np.arange(first), sampled[first - 1 :])[:tokens],
        }
        return steps_of_rows(request, rows, self.prompt, meta)


@dataclass(frozen=True)
class Script:
    """One run: routing, the cache, and the seed of the order in which link and compute stream take turns."""

    shape: Shape
    slots: int
    play: list[Routed]
    seed: int
    cold: bool = False

    def __str__(self) -> str:
        L, E = self.shape.layers, self.shape.experts
        return ", ".join([f"{L} x {E} experts", f"{self.slots} slots"] + ["cold"] * self.cold)

    @property
    def events(self) -> int:
        return self.shape.layers * sum(request.steps for request in self.play)

    def requests(self) -> list[RequestSteps]:
        return [request.of(number, self.shape.experts) for number, request in enumerate(self.play)]

    def with_another_future(self, cut: int, rng: np.random.Generator) -> "Script":
        """Return the same first `cut` events and the tokens of the step that runs; then other routing and requests."""
        for number, request in enumerate(self.play):
            step, layer = divmod(cut, self.shape.layers)
            if step < request.steps:
                rows = request.rows_of(step)
                known = request.experts[: rows.stop].copy()
                known[rows, layer:] = drawn(rng, self.shape, rows.stop - rows.start)[:, layer:]
                other = Routed(request.prompt, np.concatenate([known, drawn(rng, self.shape, int(rng.integers(4)))]))
                more = _requests(rng, self.shape, int(rng.integers(3)))
                return replace(self, play=[*self.play[:number], other, *more])
            cut -= request.steps * self.shape.layers
        return self


def scripts(seed: int) -> Iterator[Script]:
    rng = np.random.default_rng(seed)
    shapes = [(1, 1, 1), (1, 4, 2), (2, 3, 1), (3, 5, 1), (3, 5, 2), (3, 5, 3), (4, 8, 9), (4, 8, 20), (2, 6, 12)]
    for L, E, slots in shapes:
        shape = Shape(L, E)
        script = Script(shape, slots, _requests(rng, shape, 5), int(rng.integers(2**31)))
        yield script
        yield replace(script, cold=True)


def _requests(rng: np.random.Generator, shape: Shape, count: int) -> list[Routed]:
    prompts = [int(n) for n in rng.choice([0, 0, 0, 0, 2, 3, 4, 5], count)]
    return [Routed(n, drawn(rng, shape, n + int(rng.choice([0, 1, 3, 6])))) for n in prompts]


def drawn(rng: np.random.Generator, shape: Shape, tokens: int, k: int = 2, none: float = 0.1) -> Int:
    """Return what tokens choose, [tokens, L, k]; some experts are popular. none: share of layers without any."""
    likely = rng.random((tokens, shape.layers, shape.experts)) * (1 + np.arange(shape.experts) % 3)
    chosen = np.argsort(likely, axis=-1)[..., :k]
    return np.where(rng.random((tokens, shape.layers, 1)) < none, -1, chosen)
