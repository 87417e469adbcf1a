"""What the ids of drafted tokens foretell: `python -m benchmarks.drafted_ids TRACE...`, by default gpt-oss-20b's.

Decoded tokens a second of LRU, and of `eamc-blend` without prefetch, with, and with prefetch where the ids of drafted
tokens are withheld from it. A trace without a decode phase is run token by token.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from policies.core.spec import parse
from sim.engines.compiled_engine import simulate
from sim.experiment import Experiment
from sim.loaded import TimedRun, load
from sim.loop.requests import Requests
from traces.board import FOLDER
from traces.shards import Shards
from traces.steps import DECODE, RequestSteps

SIZES, LENGTHS, ACCEPTANCES, REQUESTS = (0.25, 0.5), (0, 1, 3), (0.5, 0.9), 60
POLICIES = "lru", "eamc-blend+none", "eamc-blend"


class FirstIds(Requests):
    """The requests, with the ids of drafted tokens withheld."""

    def _steps(self, i: int) -> RequestSteps:
        steps = super()._steps(i)
        if steps.token_ids is None:
            return steps
        first = np.zeros(len(steps.token_ids), np.bool_)
        first[(np.cumsum(steps.tokens) - steps.tokens)[steps.phase == DECODE]] = True
        prompt = np.arange(len(first)) < steps.tokens[steps.phase != DECODE].sum()
        return replace(steps, token_ids=np.where(first | prompt, steps.token_ids, -1))


@dataclass(frozen=True)
class Withheld(TimedRun):
    """A run whose policy sees the first id of each step alone."""

    @cached_property
    def requests(self) -> Requests:
        return FirstIds(self.trace)


def speeds(trace: str, size: float, length: int, acceptance: float) -> Iterator[float]:
    """Yield decoded tokens a second: of each of POLICIES with all ids, and of the last one without drafted ones."""
    opened = Shards.open(trace)
    experiment = Experiment(
        trace,
        draft=length,
        acceptance=acceptance if length else None,
        as_decode=opened.phases == "prefill",
        requests=min(REQUESTS, len(opened.requests)),
    )
    loaded = load(experiment)
    assert isinstance(loaded, TimedRun)
    fields = {name: getattr(loaded, name) for name in loaded.__dataclass_fields__}
    for kind, policy in [*((TimedRun, each) for each in POLICIES), (Withheld, POLICIES[-1])]:
        run = kind(**fields)
        log = simulate(run.run(parse(policy), round(size * run.all_experts)))
        decodes = log.phase[log.by_request.step] == DECODE
        kept = (log.by_request.tokens - log.by_request.rejected)[decodes].sum()
        yield float(1e9 * kept / log.by_request.latency_ns[decodes].sum())


def main() -> None:
    """Print a table for each trace."""
    for trace in [each for each in sys.argv[1:] if "/" in each] or [str(FOLDER / "gpt-oss-20b")]:
        print("| trace | cache | drafted, accepted | LRU | without prefetch | with | with, first ids alone |")
        print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
        cells = [(size, n, share) for size in SIZES for n in LENGTHS for share in (ACCEPTANCES if n else (0.0,))]
        for size, length, share in cells:
            found = [f"{speed:.1f}" for speed in speeds(trace, size, length, share)]
            what = f"{length}, {share:.0%}" if length else "none"
            print(f"| {' | '.join([Path(trace).name, f'{size:.0%}', what, *found])} |", flush=True)


if __name__ == "__main__":
    main()
