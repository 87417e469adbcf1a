"""Published pairs with and without speculation beside what rule 20 predicts: `python -m benchmarks speculation`.

The speeds without are rows of a back-test (benchmarks/speculation.toml): machine, model, cache and, where it was
published, the hit rate, which the routing is made to reach; else the reuse of a recorded model stands in. A step of
drafted tokens is the union of neighbours. Its compute takes as long as its tokens one by one, as the engines' kernels
for few rows do: the issues say so of colibri and oMLX, and a step of 4 takes 3.9 times as long as one of 1 in
ik_llama.cpp (issue 1630). A drafted token costs one more layer and the vocabulary matmul, as of an MTP head.

Then how many experts rejected tokens, which rule 20 routes as tokens half a request away, need over those of the next
tokens, whose own routing would be a perfect prefetch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from sim.analysis.speculation import union
from sim.backtest import file
from sim.engines.compiled_engine import simulate
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.loop.run import Run
from sim.prediction import routing
from sim.prediction.case import SETTLING, Case
from sim.profiles.derived import Derived
from traces.board import FOLDER
from traces.drafts import Drafts

ROWS = Path(__file__).with_suffix(".toml")

CONTEXT = 512


class Drafted(NamedTuple):
    """The same run with speculation, as published."""

    length: int
    kept: float  # tokens a step
    speed: float  # tokens/s
    hit_rate: float | None = None


PUBLISHED = {
    "ik_llama.cpp 2369, code": Drafted(4, 1 + 320 / 191, 11.4),
    "ik_llama.cpp 2369, prose": Drafted(4, 1 + 264 / (985 / 4), 7.83),
    "ik_llama.cpp 2369, code, 1 drafted": Drafted(1, 1.97, 22.1),
    "ik_llama.cpp 2369, extract, 1 drafted": Drafted(1, 1.85, 20.1),
    "colibri 640": Drafted(3, 2.29, 0.32, 0.41),
    "colibri 467": Drafted(3, 2.46, 0.65, 0.795),
    "colibri 280": Drafted(3, 1 + 3 * 0.34, 0.65),
    "colibri 389": Drafted(3, 2.55, 3.82, 1.0),
    "oMLX 2077": Drafted(1, 1.9, 16.05, 1.0),
}
"""By the figure of the run without."""


@dataclass(frozen=True)
class RowByRow(Derived):
    """An expert takes several tokens one after another."""

    def expert_ns(self, tokens: int, layer: int = 0) -> int:
        return tokens * self.timing.expert_ns(1, layer)

    def host_ns(self, tokens: int, layer: int = 0) -> int:
        return tokens * self.timing.host_ns(1, layer)


def run_of(row: file.Row) -> Run:
    """Return the run without speculation, on routing that reaches the published hit rate, if there is one."""
    case = Case(row)
    case = case.aimed(case.hardware)
    run, profile = case.as_run(case.hardware), case.profile
    if row.setting.hit_rate < 0:
        E, k, tokens = profile.experts, profile.top_k, SETTLING + row.setting.tokens
        reuse, loaded = routing.like(routing.nearest(E), E, k), round(case.slots_per_layer)
        run = replace(run, requests=[routing.made(reuse, profile.moe_layers, k, tokens, loaded, CONTEXT)])
    return replace(run, timing=RowByRow(run.timing))


def drafting(run: Run, length: int, top_k: int) -> Run:
    """Return the run whose steps have `length` drafted tokens behind one that is decoded for certain."""
    timing, shape = run.timing, run.shape
    ns = timing.dense_ns(0, 1, CONTEXT) + top_k * timing.expert_ns(1) + timing.head_ns(1)
    steps = (Drafts(length, 1.0).of(each, shape.layers, shape.experts) for each in run.requests)
    return replace(run, requests=[replace(each, draft_ns=ns * (each.tokens - 1)) for each in steps])


def speed(run: Run, kept: float, skipped: int) -> tuple[float, float]:
    """Return tokens/s where a step keeps `kept` tokens, and the hit rate; without the first and the last steps."""
    log, counted = simulate(run), slice(skipped, -1)
    lookups = (log.hits + log.late + log.misses)[counted].sum()
    return kept / (log.step_ns[counted].mean() / 1e9), float(log.hits[counted].sum() / lookups)


def pairs() -> Iterator[str]:
    """Yield a line of the table for each pair."""
    for row in file.read(ROWS):
        drafted, run = PUBLISHED[row.figure], run_of(row)
        assert row.model
        before, hits = speed(run, 1.0, 1 + SETTLING)
        after, later = speed(drafting(run, drafted.length, Case(row).profile.top_k), drafted.kept, 3)
        published, predicted = 100 * (drafted.speed / row.value - 1), 100 * (after / before - 1)
        measured = "" if drafted.hit_rate is None else f" ({drafted.hit_rate:.0%})"
        yield " | ".join(
            [
                f"| {row.figure}",
                f"{drafted.length}",
                f"{drafted.kept:.2f}",
                f"{row.value:.3g} ({before:.3g})",
                f"{published:+.0f}%",
                f"{predicted:+.0f}%",
                f"{predicted - published:+.0f}",
                f"{hits:.0%} to {later:.0%}{measured} |" if row.setting.cache != "0" else "none |",
            ]
        )


def unions(trace: str, profile: str, lengths: tuple[int, ...] = (1, 3, 7)) -> str:
    """Return by how much the experts of a step grow where what is drafted lies half a request away."""
    loaded = TimedRun.of(Experiment(str(FOLDER / trace), model_profile=profile))

    def mean(length: int, acceptance: float) -> float:
        steps = loaded.whole.in_steps(None, Drafts(length, acceptance))
        return float(union(replace(loaded, trace=steps), length).mean())

    more = ", ".join(f"{mean(length, 0.0) / mean(length, 1.0) - 1:+.1%}" for length in lengths)
    return f"{trace}: {more} for {', '.join(str(1 + length) for length in lengths)} tokens"


def main() -> None:
    """Print the table of docs/results.md, and the figures of rule 20."""
    print("| published | L | kept a step | tok/s without (predicted) | gain | predicted | off by | hits (published) |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for line in pairs():
        print(line, flush=True)
    for trace, profile in (
        ("gpt-oss-20b", "gpt-oss-20b"),
        ("qwen3-30b-a3b", "qwen3-30b-a3b"),
        ("kimi-linear-48b", "kimi-linear-48b-a3b"),
    ):
        print(unions(trace, profile))
