"""How long the parts of live steps take, timed on the thread that computes them, and the machine that follows.

Dense parts, experts, sums and what lies between two passes are timed as they run. Transfers are timed alone, before and
behind a run (`replay.calibration.parts`). Together they are a machine as the simulator takes it.
"""

from collections import defaultdict
from collections.abc import Iterable
from time import perf_counter_ns

import numpy as np

from replay.calibration.meter import rising
from sim.profiles.measured import Curve, MeasuredModel, Surface

CONTEXTS = 6  # points along the context, at most


class Mean:
    """Of numbers that come one by one."""

    def __init__(self) -> None:
        self.total = self.count = 0

    def add(self, value: int, count: int = 1) -> None:
        self.total += value
        self.count += count

    @property
    def value(self) -> int:
        return self.total // max(1, self.count)


class Parts:
    """Sums by kind and size of work; `lap` returns the time since it was called last."""

    def __init__(self) -> None:
        self.dense: dict[tuple[bool, int, int], Mean] = defaultdict(Mean)  # by first layer or not, tokens, context
        self.expert: dict[int, Mean] = defaultdict(Mean)  # by tokens
        self.combine: dict[int, Mean] = defaultdict(Mean)
        self.head: dict[int, Mean] = defaultdict(Mean)
        self.answer = Mean()  # from a router's end to the first work, where that was there
        self._since = 0

    def lap(self) -> int:
        now = perf_counter_ns()
        took, self._since = now - self._since, now
        return took

    def machine(self, expert_bytes: int, transfer_ns: int, latency_ns: int, predictor_ns: int) -> MeasuredModel:
        """Return the machine on which these parts took so long; predictor_ns: of the answer, the policy overhead."""
        return MeasuredModel(
            model="this machine",
            expert_bytes=expert_bytes,
            transfer_ns=transfer_ns,
            latency_ns=latency_ns,
            turnaround_ns=max(0, self.answer.value - predictor_ns),
            launch_ns=0,
            first_dense=self._surface(True),
            dense=self._surface(False) or self._surface(True),
            expert=_curve(self.expert),
            combine=_curve(self.combine),
            head=_curve(self.head),
        )

    def _surface(self, first: bool) -> Surface:
        by_tokens: dict[int, list[tuple[int, Mean]]] = defaultdict(list)
        for (is_first, tokens, context), mean in sorted(self.dense.items()):
            if is_first == first:
                by_tokens[tokens].append((context, mean))
        return tuple((tokens, *point) for tokens, points in by_tokens.items() for point in _thinned(points))


def _thinned(points: list[tuple[int, Mean]]) -> Iterable[tuple[int, int]]:
    """Return a few points of (context, ns), each the mean of those around it."""
    groups = [points[part[0] : part[-1] + 1] for part in np.array_split(range(len(points)), CONTEXTS) if len(part)]
    contexts = [group[len(group) // 2][0] for group in groups]
    means = [sum(mean.total for _, mean in group) // sum(mean.count for _, mean in group) for group in groups]
    return zip(contexts, rising(means), strict=True)


def _curve(means: dict[int, Mean]) -> Curve:
    """Return ns by tokens, rising; one for a single token where nothing was timed."""
    sizes = sorted(means) or [1]
    return tuple(zip(sizes, rising([means[size].value if means else 0 for size in sizes]), strict=True))
