"""Published pairs with and without speculation beside what rule 20 predicts: `python -m benchmarks speculation`.

The routing of none of these models is at hand: Kimi-Linear-48B (256 experts, top-8), whose trace is shipped, stands for
GLM-5.2 (256, top-8) and Qwen3.8-Flash-Next (512, top-10). The time of drafting is not stated, and counts as nothing.

Then how many experts rejected tokens, which rule 20 routes as tokens half a request away, need over those of the next
tokens, whose own routing would be a perfect prefetch.
"""

from dataclasses import replace
from typing import NamedTuple

from sim import simulate
from sim.analysis.speculation import union
from sim.experiment import Experiment
from sim.loaded import TimedRun
from traces.board import FOLDER
from traces.drafts import Drafts

TRACE = FOLDER / "kimi-linear-48b"
PROFILE = "kimi-linear-48b-a3b"


class Pair(NamedTuple):
    """What was published, and the cell that stands for it."""

    source: str
    what: str
    draft: int
    kept: float  # tokens a step, as published
    published: float  # speed over that without
    policy: str
    cache_size: str


PAIRS = (
    Pair(
        "ik_llama.cpp 2369",
        "Qwen3.8-Flash-Next, experts on the CPU",
        4,
        1 + 320 / 191,
        11.4 / 19.6,
        "lru/host",
        "1/layer",
    ),
    Pair("colibri 8, code", "GLM-5.2 from a disk, small cache", 3, 2.76, 0.87 / 1.0, "lru", "10%"),
    Pair("colibri 8, prose", "GLM-5.2 from a disk, small cache", 3, 2.17, 0.63 / 1.0, "lru", "10%"),
    Pair("colibri 640", "GLM-5.2 from a disk, 54% hits", 3, 2.29, 0.32 / 0.35, "lru", "10%"),
)


def acceptance(kept: float, length: int) -> float:
    """Return the probability of each drafted token at which a step keeps so many in the mean."""
    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**n for n in range(length + 1)) < kept else (low, middle)
    return low


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
    print("| published | what | L | acceptance | gain | predicted | off by | hits, predicted |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |")
    for pair in PAIRS:
        likely = acceptance(pair.kept, pair.draft)
        ms, hits = [], []
        for draft in (0, pair.draft):
            run = simulate(TRACE, pair.policy, pair.cache_size, model_profile=PROFILE, draft=draft, acceptance=likely)
            ms.append(run.row["tpot_mean_ms"])
            hits.append(f"{run.row['hit_rate']:.0%}")
        published, predicted = 100 * (pair.published - 1), 100 * (ms[0] / ms[1] - 1)
        figures = f"{likely:.2f}", f"{published:+.0f}%", f"{predicted:+.0f}%", f"{predicted - published:+.0f}"
        print(f"| {' | '.join([pair.source, pair.what, str(pair.draft), *figures, ' to '.join(hits)])} |", flush=True)
    for trace, profile in (("gpt-oss-20b", "gpt-oss-20b"), ("qwen3-30b-a3b", "qwen3-30b-a3b"), (TRACE.name, PROFILE)):
        print(unions(trace, profile))
