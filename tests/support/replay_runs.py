"""Random runs from a source of integers, so that random.Random (fast) and Hypothesis (shrinks) serve alike.

Numbers are small, so that transfers and computes tie, contend and take no time at all; proposals are arbitrary.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from policies.core.policy import Event, Float, Int, Prefetcher, Shape
from policies.core.spec import Part, PolicySpec, parse
from sim.engines.cases import case_request
from sim.loop.run import Run, gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.steps import RequestSteps


@dataclass(frozen=True)
class ScriptedOptions:
    seed: int = 0


class Scripted(Prefetcher):
    """Proposes anything, the same for the same seed."""

    name = "scripted"
    Options = ScriptedOptions

    def __init__(self, shape: Shape, options: ScriptedOptions) -> None:
        super().__init__(shape, options)
        self._random = random.Random(options.seed)

    def propose(self, event: Event) -> tuple[Int, Float]:
        total = self.shape.total
        experts = self._random.sample(range(total), self._random.randint(0, min(total, 9)))
        return np.array(experts, np.int64), np.array([self._random.randint(0, 4) for _ in experts], np.float64)


def draw(integer: Callable[[int, int], int]) -> Run:
    """`integer` draws from a closed range. Of a third of the runs, experts differ in size by layer."""

    def choice(*options: Any) -> Any:
        return options[integer(0, len(options) - 1)]

    L, E = integer(1, 5), integer(1, 8)
    longest = choice(1, 3, 10, 40)
    expert_bytes = integer(1, 12)
    density, most_tokens = integer(1, 4), choice(1, 3)

    def duration() -> int:
        return int(choice(0, integer(0, longest), integer(0, longest)))

    def event() -> list[list[int]]:
        if integer(0, 9) == 0:
            return []
        return [[expert, integer(1, most_tokens)] for expert in range(E) if integer(1, 4) <= density]

    def request(ordinal: int) -> RequestSteps:
        return case_request(ordinal, [[event() for _ in range(L)] for _ in range(integer(1, 5))], E)

    evict = choice("lru", "lfu", "fifo", "belady", "eamc", "clock")
    prefetch = choice("none", "oracle1", "eamc", f"popular:n={integer(1, E + 1)}", "scripted", "scripted")
    seed = integer(0, 1_000)
    slots = choice(integer(1, 3), integer(1, L * E + 2), integer(1, max(1, L * E // 2)))
    scope = choice("global", "layer") if slots >= L else "global"
    policy = PolicySpec.of(evict, Part.of(Scripted, seed=seed), scope)
    chunk_bytes = choice(None, integer(1, expert_bytes + 3), integer(1, max(1, expert_bytes // 3)))
    run = gpu_run(
        requests=[request(ordinal) for ordinal in range(integer(1, 4))],
        shape=Shape(L, E),
        slots=slots,
        policy=policy if prefetch == "scripted" else parse(f"{evict}+{prefetch}@{scope}"),
        timing=FixedTiming(
            duration(), duration(), choice(0, 0, integer(0, 3)), duration(), duration(), choice(0, duration())
        ),
        link=Link(choice(0, integer(0, 6)), choice(0, 1, 1, integer(0, 5)), integer(1, 4), expert_bytes, chunk_bytes),
        cold=choice(False, False, True),
    )
    if integer(0, 2) or L == 1:
        return run
    link = replace(run.gpu.link, layer_bytes=(expert_bytes, *(integer(1, expert_bytes) for _ in range(L - 1))))
    run = run.on(run.timing, link, None)
    return run.with_slots(slots * expert_bytes if scope == "global" else run.gpu.room(L, -(-slots // L)))
