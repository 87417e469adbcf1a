"""What a policy costs an event, as an engine pays it: `python -m benchmarks predictors [--write]`.

Every policy runs the decode of synthetic requests at two shapes: popular experts, topics and reuse make its matches
change. What passes `observe` and `propose` of a `PolicyRunner` is timed, Python included, less the same loop over a
policy that has nothing to be told (`lru`): what a cache does anyway is left out. A policy that is timed has its
collections full (`eamc` starts from a file, others run WARM_UP requests), a profile, or a trace with lookahead. Of
SETS x ROUNDS requests the least of the sets' medians counts: what disturbs a measurement only makes it longer. An
event's share of what is asked when a step starts is included.

Retention is measured alone, a prefetcher beside `lru`, a name that stands for both also as a pair, and a preset where
it sets other options than the defaults. Learning at the end of a request is shown and not charged; oracles are shown,
and are charged nothing. `--write` makes this the table that ships (`sim/profiles/policy_overhead.py`).
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np

from policies.core.catalog import available
from policies.core.events import Events
from policies.core.policy import Shape
from policies.core.runner import PolicyRunner
from policies.core.spec import parse
from policies.eamc.build import build
from sim.profiles.policy_overhead import MEASURED, TABLE
from sim.results.provenance import commit
from traces.schema import Picks
from traces.steps import RequestSteps
from traces.synthetic import synthetic
from traces.trace import Trace
from traces.writer import write_trace

TOKENS = 32  # of a request; fewer make EAMs that are cheaper to match, more do not make them dearer
LEARNED = 1_000  # requests: the capacity of `eamc-code`
WARM_UP = 35  # requests: as many tokens fill the 1,000 maps of `expert-map`
SETS, ROUNDS = 5, 9
KINDS = ("retention", "prefetch", "pair", "preset")


@dataclass(frozen=True)
class Measured:
    """One policy at one shape, in microseconds."""

    event: float
    request: float  # at its end


@dataclass(frozen=True)
class Row:
    """What is measured."""

    kind: str
    name: str
    typed: tuple[str, ...]  # retention, and prefetcher if it is named
    oracle: bool

    def policy(self, needs: dict[str, str]) -> str:
        """As typed, with the options that it cannot do without."""
        return "+".join(f"{name}:{needs[name]}" if name in needs else name for name in self.typed)


def rows() -> Iterator[Row]:
    for info in available():
        if info.kind in ("retention", "pair"):
            alone = (info.name, "none") if info.kind == "pair" else (info.name,)
            yield Row("retention", info.name, alone, info.oracle)
        if info.kind in ("prefetch", "pair"):
            yield Row("prefetch", info.name, ("lru", info.name), info.oracle)
        if info.kind == "pair":
            yield Row("pair", info.name, (info.name,), info.oracle)
        if info.kind == "preset":
            spec = parse(info.name)
            plain = parse(f"{spec.evict.name}+{spec.prefetch.name}")
            if (spec.evict, spec.prefetch) != (plain.evict, plain.prefetch):
                yield Row("preset", info.name, (info.name,), info.oracle)


def prepared(learned: Trace, folder: Path) -> dict[str, str]:
    """Options by policy: what some need before they can run, and full collections for `eamc` and its presets."""
    write_trace(learned.head(4), folder / "profile")
    needs = {"static": f"profile={folder / 'profile'}"}
    for name in ("eamc", "eamc-code", "eamc-v1"):
        file = folder / f"{name}.npz"
        capacity = parse(name).resolved()["evict"]["capacity"]
        with file.open("wb") as out:
            build(learned.head(capacity), f"{name}:replacement=fifo").saved(learned.name).write(out)
        needs[name] = f"collection={file}"
    return needs


def seconds(runner: PolicyRunner, ordinal: int, request: RequestSteps) -> tuple[float, float]:
    """Of all events of a request of decode, and of its end."""
    events = Events.of(request, runner.shape.layers)
    steps = [[events.event(step, layer) for layer in range(events.layers)] for step in range(TOKENS)]
    starts = [events.start(step) for step in range(TOKENS)]
    runner.begin_request(ordinal)
    began = time.process_time()
    for start, of_layers in zip(starts, steps, strict=True):
        if runner.at_start:
            runner.propose(start)
        for event in of_layers:
            runner.observe(event)
            runner.propose(event)
    ended = time.process_time()
    runner.end_request()
    return ended - began, time.process_time() - ended


def measure(policy: str, shape: Shape, requests: Sequence[RequestSteps]) -> Measured:
    runner, idle = (PolicyRunner(parse(text), shape, requests) for text in (policy, "lru"))
    if runner.silent:
        return Measured(0.0, 0.0)
    events, ends = [], []
    for ordinal, request in enumerate(requests):
        event, end = seconds(runner, ordinal, request)
        nothing, _ = seconds(idle, ordinal, request)
        events.append(1e6 * (event - nothing) / (TOKENS * shape.layers))
        ends.append(1e6 * end)
    return Measured(least(events), least(ends))


def least(took: Sequence[float]) -> float:
    """Of the sets' medians, warm-up left out."""
    firsts = range(WARM_UP, len(took), ROUNDS)
    return max(0.0, min(statistics.median(took[first : first + ROUNDS]) for first in firsts))


def all_at(layers: int, experts: int, top_k: int, measured: Sequence[Row]) -> list[Measured]:
    played = WARM_UP + SETS * ROUNDS
    trace = synthetic(LEARNED + played, TOKENS, layers, experts, top_k, seed=1)
    ids = np.random.default_rng(0).zipf(1.3, len(trace.experts)).clip(0, 50_000).astype(np.int32)
    # Picks are of other tokens, so they are right now and then.
    meta, picks = replace(trace.meta, lookahead=Picks((1,), top_k)), trace.experts[::-1, :, None]
    scores = np.ones(picks.shape, np.float16)
    looking = replace(trace, meta=meta, lookahead=picks, lookahead_scores=scores, token_id=ids)
    requests = [looking.steps(LEARNED + i) for i in range(played)]
    with tempfile.TemporaryDirectory() as folder:
        needs = prepared(trace.head(LEARNED), Path(folder))
        return [measure(row.policy(needs), Shape(layers, experts), requests) for row in measured]


def cpu() -> str:
    """Its name, as Linux has it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))


def write(found: dict[Row, list[Measured]]) -> None:
    """The table that ships."""
    lines = [
        "# What a policy costs: microseconds an event, at 26 x 64 experts (top-6) and at 58 x 256 (top-8).",
        "# Written by `python -m benchmarks predictors --write`; sim/profiles/policy_overhead.py tells how it is used.",
        f'commit = "{commit()}"',
        f'cpu = "{cpu()}"',
        f"date = {date.today().isoformat()}",
    ]
    for kind in KINDS:
        lines += ["", f"[us.{kind}]"]
        for row, both in found.items():
            if row.kind == kind:
                figures = [round(one.event, 2) for one in both]
                cost = f"[0.0, 0.0]  # an oracle: measured {figures}" if row.oracle else figures
                lines.append(f"{row.name} = {cost}")
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    measured = list(rows())
    by_shape = [all_at(*shape, measured) for shape in MEASURED]
    found = {row: list(both) for row, *both in zip(measured, *by_shape, strict=True)}
    heads = [f"{layers} x {experts}" for layers, experts, _ in MEASURED]
    print(f"predictors on {cpu()}: us an event at {heads[0]} and {heads[1]}; us a request, to learn at its end")
    for kind in KINDS:
        for row, (small, large) in found.items():
            if row.kind == kind:
                costs = f"{small.event:7.2f} {large.event:7.2f}   {small.request:9.1f} {large.request:9.1f}"
                print(f"  {kind:9}  {row.name:15} {costs}  {'oracle, free' if row.oracle else ''}".rstrip())
    if "--write" in sys.argv:
        write(found)


if __name__ == "__main__":
    main()
