"""The requests of a trace as engines run them, and when they arrive where several run at a time (rule 18)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sim.experiment import POISSON, TRACE, Experiment
from sim.loop.run import Users
from traces.errors import InputError
from traces.shards import Shards
from traces.steps import RequestSteps
from traces.trace import Trace


@dataclass(frozen=True, eq=False)
class Requests(Sequence[RequestSteps]):
    """A trace's requests as an engine runs them, laid out again each time: only one is held at once."""

    trace: Shards | Trace
    draft_ns: Callable[[int], int] | None = None  # of one drafted token at a context (rule 20); None: no time

    def __len__(self) -> int:
        return len(self.trace.requests)

    def __getitem__(self, i: Any) -> Any:
        places = range(len(self))[i]
        return list(map(self._steps, places)) if isinstance(i, slice) else self._steps(places)

    def __iter__(self) -> Iterator[RequestSteps]:
        return (self._steps(i) for i in range(len(self)))

    def _steps(self, i: int) -> RequestSteps:
        steps = self.trace.steps(i)
        if self.draft_ns is None or steps.drafted is None:
            return steps
        each = np.array([self.draft_ns(context) for context in steps.context.tolist()], np.int64)
        return replace(steps, draft_ns=steps.drafted * each)


def users(experiment: Experiment, trace: Shards | Trace) -> Users | None:
    """Return who sends requests, and when; None: one after another. Raise InputError for arrivals that cannot be."""
    if experiment.max_batch is None:
        return None
    most = min(experiment.max_batch, len(trace.requests))  # memory is taken for each
    if experiment.arrivals == TRACE:
        return Users(most, _recorded(experiment, trace))
    if experiment.arrivals == POISSON:
        rate = experiment.arrival_rate or 0.0
        draws = np.random.default_rng(experiment.seed).exponential(1e9 / rate, len(trace.requests))
        arrivals_ns = np.cumsum(np.ceil(draws))
        if arrivals_ns[-1] >= 2**62:
            raise InputError(f"`arrival_rate` {rate}: its last request comes after more than a century")
        return Users(most, tuple(arrivals_ns.astype(np.int64).tolist()))
    return Users(most)


def _recorded(experiment: Experiment, trace: Shards | Trace) -> tuple[int, ...]:
    """Return when each request of the trace arrived, counted from the first."""
    recorded = trace.requests["arrival_ns"]
    if recorded.isna().any():
        raise InputError(f"{experiment.trace} does not say when its requests arrived: use `arrival_rate`")
    ns = recorded.astype("int64")
    return tuple((ns - ns.min()).tolist())
