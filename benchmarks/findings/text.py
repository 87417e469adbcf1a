"""FINDINGS.md and its figures, from the tables of the studies: every number in the text is computed here.

Intervals are 95% percentile bootstraps over requests, drawn with replacement. A hit rate is hits over lookups.
"""

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from benchmarks.findings.studies import (
    CAPACITIES,
    DEEPSEEK,
    DROPS,
    GPT_OSS,
    HYBRID,
    HYBRID_SIZES,
    MIXTRAL,
    MOST,
    SHIPPED,
    SIZES,
    SPECULATED,
    TRAINED,
    USERS,
    WINDOW,
)
from sim.results import plot
from sim.results.drawing import Drawing
from sim.results.files import write_figure

NAME = "FINDINGS.md"
FIGURES = Path("notebooks") / "figures"
if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESAMPLES = 2_000
CLAIMED = 5
"""Points of hit rate: no online policy is said to be further above LRU."""
WORKING_SETS = {GPT_OSS: (24, 4), DEEPSEEK: (26, 6)}
ONLINE = ("lfu-aged", "lrfu", "least-stale", "eamc+none", "eamc-blend+none")
PLAIN = {"eamc+none": "eamc", "eamc-blend+none": "eamc-blend"}
"""Retention alone, as the text names it."""

Float = NDArray[np.float64]
Table = pd.DataFrame


def write(results: Path, root: Path) -> None:
    """Write the text and the figures."""
    held = tables(results)
    (root / NAME).write_text(text(held), "utf-8")
    for name, figure in figures(held).items():
        write_figure(figure, root / FIGURES / name)


def tables(results: Path) -> dict[str, Table]:
    """Return the tables of the studies by name."""
    return {file.stem: pd.read_parquet(file) for file in sorted(results.glob("*.parquet"))}


def share(value: float) -> str:
    """Return a share with three decimals."""
    return f"{value:.3f}"


def _of(table: Table, trace: str, size: str | None = None) -> Table:
    found = table.loc[table["trace"] == trace]
    if size is None:
        return found
    fractions = found["cache_fraction"].to_numpy()
    own: Table = found.loc[fractions == np.unique(fractions)[SIZES.index(size)]]
    return own


def _counts(table: Table) -> tuple[dict[str, Float], Float]:
    """Return the hits of each policy, and the lookups, by request."""
    by_policy = dict(iter(table.groupby("policy", sort=False)))
    hits = {str(name): part["hits"].to_numpy(np.float64) for name, part in by_policy.items()}
    return hits, next(iter(by_policy.values()))["lookups"].to_numpy(np.float64)


def _interval(n: int, value: Callable[[NDArray[np.int64]], float]) -> tuple[float, float, float]:
    """Return a value over all requests, and the bootstrap interval of it."""
    rng = np.random.default_rng(0)
    drawn = [value(rng.integers(n, size=n)) for _ in range(RESAMPLES)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return value(np.arange(n)), float(low), float(high)


def _share_of(more: Float, of: Float) -> tuple[float, float, float]:
    """Return 100 times the sum of `more` over that of `of`, both by request, and its interval."""
    return _interval(len(of), lambda i: 100 * float(more[i].sum() / of[i].sum()))


def _rate(table: Table, policy: str) -> float:
    hits, lookups = _counts(table)
    return float(hits[policy].sum() / lookups.sum())


def gap(table: Table) -> tuple[float, float, float]:
    """Return the points of hit rate between LRU and Belady."""
    hits, lookups = _counts(table)
    apart = hits["belady"] - hits["lru"]
    return _share_of(apart, lookups)


def recovered(table: Table, policy: str) -> tuple[float, float, float]:
    """Return the points of hit rate that a policy has over LRU."""
    hits, lookups = _counts(table)
    more = hits[policy] - hits["lru"]
    return _share_of(more, lookups)


def _points(found: tuple[float, float, float]) -> str:
    value, low, high = found
    return f"{value:.1f} points (95%: {low:.1f} to {high:.1f})"


def _slower(table: Table, policy: str, baseline: str) -> tuple[float, float, float]:
    """Return how much longer a policy takes per token than another, in %."""
    by_policy = {str(name): part for name, part in table.groupby("policy", sort=False)}
    tokens = by_policy[policy]["tokens"].to_numpy(np.float64)
    one, other = (by_policy[name]["tpot_mean_ms"].to_numpy(np.float64) * tokens for name in (policy, baseline))
    return _interval(len(tokens), lambda i: 100 * (one[i].sum() / other[i].sum() - 1))


def _percent(found: tuple[float, float, float]) -> str:
    value, low, high = found
    return f"{value:+.0f}% (95%: {low:+.0f} to {high:+.0f})"


def text(held: dict[str, Table]) -> str:
    """Return FINDINGS.md."""
    policies, loops = held["policies"], _of(held["policies"], GPT_OSS, "25%")
    once = loops[loops["policy"] == "lru"]
    parts = [
        HEAD.format(
            gpt=once["request"].nunique(),
            gpt_tokens=int(once["tokens"].sum()),
            loops=int(once["loop"].sum()),
            cut=int(once["cut"].sum()),
            ds=_of(policies, DEEPSEEK, "25%").query("policy == 'lru'")["request"].nunique(),
            ds_tokens=int(_of(policies, DEEPSEEK, "25%").query("policy == 'lru'")["tokens"].sum()),
        ),
        *(f"## {i}. {each(held)}" for i, each in enumerate(FINDINGS, 1)),
        TAIL,
    ]
    lines = "\n\n".join(part.strip() for part in parts).splitlines()
    return "\n".join(line if line.startswith(("|", "#", "!")) else fill(line) for line in lines) + "\n"


def fill(line: str) -> str:
    """Return a line broken at 120 columns."""
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False) if len(line) > 120 else line


HEAD = """
# Findings

What the project's own tools say of two large traces, and in the last four findings of smaller ones. Every number is
computed from the tables in `benchmarks/findings/results` (counts and times by request, no routing), which one command
regenerates:

```
python -m benchmarks.findings TRACES MODEL    # the studies that have no result yet, then this text and its figures
python -m benchmarks.findings           # this text and its figures alone
```

- **gpt-oss-20b**: {gpt} requests, {gpt_tokens:,} decoded tokens, 24 layers x 32 experts, top-4
  (AmanPriyanshu/GPT-OSS-MoE-ExpertFingerprinting, Apache-2.0), requests 205 on: on the others `eamc-blend`
  was fitted. Its source flags {loops} of them as repetition loops; {cut} are cut off at 512 tokens. *Loops out* means
  that figures leave them out; the cache has still seen them.
- **DeepSeek-V2-Lite**: {ds} prompts, {ds_tokens:,} tokens, 26 x 64, top-6 (ngavhane/moe-beyond), from 250 on, run
  token by token: the model did not write these tokens. `eamc-blend` was fitted on the other prompts, too.
- **Mixtral-8x7B**, of findings 10 and 11 alone: 4 requests, 577 tokens, 32 x 8, top-2 (Mario928/speculative-moe).
  Finding 11 has the traces of [the board](docs/board.md) too, finding 13 two small models, which run:
  the shipped one, and MODEL, a folder that the command in finding 13 writes.

`eamc-blend`, here as it was before 2026-11-28, is given the ids of the tokens, which it no longer uses:
[policies/README.md](policies/README.md#eamc-blend-and-what-it-is-made-of).

One cache for all layers, kept between requests; A5000 profile, policy overhead included. Intervals are 95%
bootstraps over requests. Both traces are real recordings, no stand-ins. Times are simulated, not measured.
"""


def _gap(held: dict[str, Table]) -> str:
    rows = []
    for trace in (GPT_OSS, DEEPSEEK):
        for size in SIZES:
            here = _of(held["policies"], trace, size)
            best = max(ONLINE, key=lambda policy: _rate(here, policy))
            out = here[~here["loop"]]
            bare = "-" if trace == DEEPSEEK else f"{gap(out)[0]:.1f}, {recovered(out, best)[0]:.1f}"
            cells = [
                trace,
                size,
                share(_rate(here, "lru")),
                share(_rate(here, "belady")),
                "{:.1f} ({:.1f} to {:.1f})".format(*gap(here)),
                PLAIN.get(best, best),
                "{:.1f} ({:.1f} to {:.1f})".format(*recovered(here, best)),
                bare,
            ]
            rows.append(f"| {' | '.join(cells)} |")
    here = _of(held["policies"], GPT_OSS, "25%")
    head = "| trace | cache | LRU | Belady | gap, points | best online | over LRU, points | loops out: gap, over LRU |"
    return "\n".join(
        [
            "Online policies recover half of the gap between LRU and the optimum on one model, and less on the other",
            "",
            f"On gpt-oss-20b at 25% `eamc-blend`, without prefetch, is "
            f"{_points(recovered(here, 'eamc-blend+none'))} above "
            f"LRU, where Belady is {_points(gap(here))} above it. **This contradicts the claim in the field that "
            f"no online policy recovers more than {CLAIMED} of the 11 to 23 points between LRU and the optimum.** "
            f"On DeepSeek-V2-Lite {_claim(held)}. Leaving out the loops changes little.",
            "",
            head,
            "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: |",
            *rows,
            "",
            f"![LRU, Belady and policies]({FIGURES}/findings-hit-rate.png)",
        ]
    )


def _claim(held: dict[str, Table]) -> str:
    """What DeepSeek-V2-Lite says of the claim, by size: an interval above or below what is claimed, or around it."""
    found: dict[str, list[str]] = {}
    for size in SIZES:
        here = _of(held["policies"], DEEPSEEK, size)
        _, low, high = recovered(here, max(ONLINE, key=lambda policy: _rate(here, policy)))
        verdict = "fails" if low > CLAIMED else "holds" if high < CLAIMED else "is neither refuted nor confirmed"
        found.setdefault(verdict, []).append(size)
    return "the claim " + ", and ".join(f"{verdict} at {' and '.join(sizes)}" for verdict, sizes in found.items())


def _paper(held: dict[str, Table]) -> str:
    parts = []
    for trace in (GPT_OSS, DEEPSEEK):
        here = _of(held["policies"], trace, "25%")
        alone, whole = recovered(here, "eamc+none"), _slower(here, "eamc", "lru")
        parts.append(
            f"On {trace} at 25% its hit rate differs from LRU's by {_points(alone)} without prefetch, and the "
            "time of a "
            f"token by {_percent(whole)} with it"
        )
    small = _of(held["policies"], GPT_OSS, "10%")
    return "\n".join(
        [
            "The paper's policy beats LRU only where the cache is below one token's experts",
            "",
            f"`eamc` is Algorithm 1 of arXiv 2401.14361 as printed. {'. '.join(parts)}. At 10% of gpt-oss-20b, "
            "below one token's "
            f"96 experts, where LRU hits {share(_rate(small, 'lru'))}, it is "
            f"{_points(recovered(small, 'eamc+none'))} above "
            f"it, and `lrfu` {_points(recovered(small, 'lrfu'))}. The paper prints no hit rates, and compares "
            "with LRU at no stated cache size.",
        ]
    )


def _capacity(held: dict[str, Table]) -> str:
    parts = []
    for trace in (GPT_OSS, DEEPSEEK):
        here = _of(held["capacities"], trace)
        hits, lookups = _counts(here)
        rates = {n: hits[f"eamc:capacity={n}+none"].sum() / lookups.sum() for n in CAPACITIES}
        more = hits["eamc:capacity=120+none"] - hits["eamc:capacity=10+none"]
        found = _share_of(more, lookups)
        listed = ", ".join(f"{n}: {share(rate)}" for n, rate in rates.items())
        parts.append(
            f"{trace}, {len(lookups)} requests, {listed}, LRU {share(_rate(here, 'lru'))}; 120 against 10: "
            f"{_points(found)}"
        )
    return "\n".join(
        [
            "Ten past requests do most of what an EAMC can do",
            "",
            f"Hit rate of `eamc` without prefetch at 25%, by entries: {'. '.join(parts)}. The paper reports the lowest "
            "latency from 120 entries on, 3% of its requests. More than ten help, but even 300 stay below LRU.",
            "",
            f"![Hit rate by entries]({FIGURES}/findings-capacity.png)",
        ]
    )


def _collapse(held: dict[str, Table]) -> str:
    parts = []
    for trace, (layers, k) in WORKING_SETS.items():
        curve = _of(held["curves"], trace).set_index("slots")["lru"]
        last, whole = (layers - 1) * k, layers * k
        listed = ", ".join(f"{n}: {share(curve[n])}" for n in (last, whole - 1, whole, 2 * whole))
        parts.append(f"{trace} (a token needs {whole}) {listed}")
    return "\n".join(
        [
            "LRU hits nothing up to one layer less than a token's experts, and jumps at them",
            "",
            f"LRU's hit rate by slots: {'; '.join(parts)}. A token cycles through all layers, so a cache smaller "
            "than a token "
            "evicts each expert just before its next use. A bigger cache that is still below that size is no faster.",
        ]
    )


def _frozen(held: dict[str, Table]) -> str:
    parts = []
    for trace in (GPT_OSS, DEEPSEEK):
        here = _of(held["policies"], trace, "25%")
        parts.append(
            f"{trace} {share(_rate(here, 'lfu-perfect'))} unaged, {share(_rate(here, 'lfu-aged'))} aged, "
            f"{share(_rate(here, 'least-stale'))} least-stale, {share(_rate(here, 'lru'))} LRU"
        )
    return "\n".join(
        [
            "LFU without aging is a weak baseline, and LRU is a strong one",
            "",
            f"Hit rates at 25%: {'; '.join(parts)}. Without aging, LFU stops adapting, so a gain over it shows little. "
            "`least-stale`, the rule of SpecMD (arXiv 2602.03921), is below LRU here.",
        ]
    )


def _activation(held: dict[str, Table]) -> str:
    parts = []
    for trace in (GPT_OSS, DEEPSEEK):
        here = _of(held["activation"], trace)
        n = len(here)
        used, repeated = (here[name].to_numpy() for name in ("used", "repeated"))
        found = _share_of(repeated, np.ones(n))
        parts.append(
            f"{trace}, {n} requests of {here['tokens'].median():.0f} tokens in the median: "
            f"{100 * used.mean():.0f}% of all "
            f"experts are used, {found[0]:.0f}% (95%: {found[1]:.0f} to {found[2]:.0f}) by several tokens"
        )
    short = _of(held["activation"], GPT_OSS)
    short = short[short["tokens"] <= 100]
    return "\n".join(
        [
            "A long answer activates most of a small model's experts, again and again",
            "",
            f"{'; '.join(parts)}. Answers of gpt-oss-20b of at most 100 tokens ({len(short)}): "
            f"{100 * short['repeated'].mean():.0f}%. **The paper prints under 5% used repeatedly for models of "
            "about 100 "
            "experts a layer, and 25% for Mixtral.** It decodes 32 tokens a request, of models with more and "
            "larger experts; "
            "sparsity within a request is a matter of length.",
            "",
            f"![Experts by length]({FIGURES}/findings-activation.png)",
        ]
    )


def _groups(held: dict[str, Table]) -> str:
    row = _of(held["similarity"], GPT_OSS).iloc[0]
    times = row["nearest_same_task"] / row["chance"]
    return "\n".join(
        [
            "Requests do fall into groups",
            "",
            f"On gpt-oss-20b the request with the nearest EAM is of the same category in "
            f"{row['nearest_same_task']:.1%} of "
            f"{row['compared']:.0f} requests, against {row['chance']:.1%} by chance, {times:.0f} times as often. The "
            "paper's "
            "observation holds, though what its policy makes of it (2, 3) is little.",
        ]
    )


def _prefetch(held: dict[str, Table]) -> str:
    parts = []
    for trace in (GPT_OSS, DEEPSEEK):
        here = _of(held["policies"], trace, "25%")
        parts.append(
            f"{trace} `eamc` {_percent(_slower(here, 'eamc', 'eamc+none'))}, "
            f"`eamc-blend` {_percent(_slower(here, 'eamc-blend', 'eamc-blend+none'))}"
        )
    return "\n".join(
        [
            "Prefetching what is merely possible slows a token down",
            "",
            f"Time per token with prefetch over that without, at 25% and with the same eviction policy: "
            f"{'; '.join(parts)}. `eamc` "
            "fetches whatever its match used, `eamc-blend` only what is likelier than a wrong guess costs. A "
            "link that is busy "
            "with guesses delays misses.",
        ]
    )


def _users(held: dict[str, Table]) -> str:
    parts, gains = list[str](), list[str]()
    for trace in (GPT_OSS, DEEPSEEK):
        here = _of(held["users"], trace).set_index(["policy", "users"])
        shown = ("tokens_per_s", "tpot_mean_ms", "hit_rate")
        one, most = ({name: float(here[name].loc[("eamc-blend", n)]) for name in shown} for n in (USERS[0], USERS[-1]))
        gains.append(f"{most['tokens_per_s'] / one['tokens_per_s'] - 1:+.1%} tokens per second on {trace}")
        parts.append(
            f"{trace} {one['tokens_per_s']:.1f} to {most['tokens_per_s']:.1f} tokens/s, {one['tpot_mean_ms']:.0f} to "
            f"{most['tpot_mean_ms']:.0f} ms between two tokens of a request, hit rate {share(one['hit_rate'])} to "
            f"{share(most['hit_rate'])}"
        )
    return "\n".join(
        [
            f"{USERS[-1]} users at once: {', '.join(gains)}, and each waits several times as long",
            "",
            f"`eamc-blend` at 25%, {MOST // 2} requests, from 1 to {USERS[-1]} users: {'; '.join(parts)}. A step "
            "needs the "
            "experts of "
            "all its requests, so what a batch saves in reading dense weights it pays in misses.",
            "",
            f"![Users]({FIGURES}/findings-users.png)",
        ]
    )


SHOWN_DRAFTS = (1, 4)


def _speculation(held: dict[str, Table]) -> str:
    table = held["speculation"]
    names, shown, sentences = (GPT_OSS, DEEPSEEK, MIXTRAL), [], []
    for trace in names:
        for fraction, cell in table[table["trace"] == trace].groupby("cache_fraction"):
            for row in cell[cell["draft"].isin(SHOWN_DRAFTS)].sort_values("draft").to_dict("records"):
                speeds = [f"{row[f'speedup_{n}0']:.2f}" for n in (5, 7, 9)]
                figures = [f"{row['union']:.1f}", f"{row['step_bytes'] / 2**20:,.0f}", f"{row['step_ms']:.1f}"]
                where = [trace, f"{fraction:.0%}", str(row["draft"])]
                shown.append(f"| {' | '.join([*where, *figures, _break_even(row), *speeds])} |")
    single = table[table["draft"] == 1]
    for size in SPECULATED:
        here = single[(single["cache_fraction"] - float(size[:-1]) / 100).abs() < 0.01].set_index("trace")
        sentences.append(f"at {size} {', '.join(f'{trace} {_break_even(here.loc[trace])}' for trace in names)}")
    requests = [f"{int(single.loc[single['trace'] == trace, 'requests'].iloc[0])} of {trace}" for trace in names]
    return "\n".join(
        [
            "Where experts move, drafted tokens have to be right far more often than where they do not",
            "",
            f"Acceptance from which on one drafted token a step pays, with LRU and the 95% interval: "
            f"{'; '.join(sentences)}. A step of several tokens needs the experts of all of them, and rejected ones "
            "cost as much as others (rule 20 of [docs/contract.md](docs/contract.md) says what stands for them). "
            "Drafting takes no time here, as of a lookup in the prompt. At 100%, which need not fit, nothing moves "
            "after the first touches, and compute alone is left. A step whose experts exceed the cache misses at "
            "every lookup: then more "
            "drafted tokens can be better than few, as little more is missed.",
            "",
            f"Requests: {', '.join(requests)}; four are few, and their interval says little. Experts are those of a "
            "layer in 1 + L tokens in turn. MiB and ms are of a step whose drafts are accepted half of the time. The "
            "last three columns are speed over that without drafts at an acceptance of 0.5, 0.7 and 0.9.",
            "",
            "| trace | cache | L | experts | MiB | ms | break-even | 0.5 | 0.7 | 0.9 |",
            "| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
            *shown,
            "",
            "`moe-sim speculate TRACE --policies lru --cache-sizes 25%,50%,100%` prints the same of any trace, and of "
            "other drafts.",
        ]
    )


def _break_even(row: Any) -> str:
    """`0.62 (0.58 to 0.66)`; never: not even if all are accepted."""
    value, low, high = ("never" if pd.isna(row[name]) else f"{row[name]:.2f}" for name in ("break_even", "low", "high"))
    return value if low == "never" else f"{value} ({low} to {high})"


MEASURED = {
    "one read": (1.286, 1.316, 1.254),
    "fewest reads, lead": (1.453, 1.664, 1.493),
    "two reads": (0.910, 1.137, 1.266),
}
"""Speed over the peer's online policy in its engine, gpt-oss-120b at 11%, 25% and 40%: foresight_outcome_095.md."""


def _hybrid(held: dict[str, Table]) -> str:
    table: Any = held["hybrid"].set_index(["run", "size"])
    times = {
        name: [table.loc[name, size].tokens_per_s / table.loc["online", size].tokens_per_s for size in HYBRID_SIZES]
        for name in HYBRID
    }
    rows, off = [], []
    for name, policy in HYBRID.items():
        cells = []
        for i, size in enumerate(HYBRID_SIZES):
            row, measured = table.loc[name, size], MEASURED.get(name)
            beside = f" ({measured[i]:.2f})" if measured else ""
            off += [abs(times[name][i] - measured[i])] if measured else []
            moved = f"{row.host_reads:.1f} + {row.copies:.1f}"
            cells += [share(row.hit_rate), moved, f"{times[name][i]:.2f}{beside}"]
        rows.append(f"| {name}: `{policy}` | {' | '.join(cells)} |")
    blend, order, fetched = (
        f"{min(times[name]):.2f} to {max(times[name]):.2f}"
        for name in ("eamc-blend", "eamc-blend, order alone", "eamc-blend, fetched")
    )
    return "\n".join(
        [
            "Where the CPU computes misses, a copy in time counts and a hit does not",
            "",
            f"There `eamc-blend` is {blend} times as fast as a policy of recency and frequency with the same engine, "
            f"and its order of eviction alone {order} times: the gain is its prefetch. Without the CPU, with every "
            f"miss fetched, it is {fetched} times as fast. A peer measured oracles in its engine "
            "(moe-speed-of-light, gpt-oss-120b); their ratios are in brackets, and come out here in their order and "
            f"with their signs, {100 * max(off):.0f} points off at most. Reading each miss once, where the oracle "
            "admits it, is worth more than the hits of copying all; copies that begin three tokens ahead are worth "
            "most of what was measured. A learned order of the peer, with 6 to 18% fewer reads, was 0.90 to 1.05 "
            "times as fast.",
            "",
            f"gpt-oss-20b in MXFP4, the first {MOST // 2} requests, on that peer's machine as it describes it "
            "([hybrid.toml](benchmarks/findings/hybrid.toml)). *Reads* a token: experts computed on the CPU + copied "
            "over the link. *Times*: speed over the first row. The contract's streams do not slow each other down; "
            "CPU and link read one memory, so the rates of each run are those at which its own overlap is consistent.",
            "",
            f"| run | {' | '.join(f'{size}: hits | reads | times' for size in HYBRID_SIZES)} |",
            f"| --- |{' ---: |' * 3 * len(HYBRID_SIZES)}",
            *rows,
            "",
            "*Two reads* stands for the peer's oracle of most hits, which copied each expert and computed it "
            "meanwhile, since its copies landed two steps later. *Most hits, lead* is what that oracle would be if "
            "they landed in time: then a copy for a single use hides behind compute, and fewest reads is not the "
            "fastest. What the peer's online policy decides is known in outline alone (some misses of a layer are "
            "fetched, the CPU computes the others, some four copies a token), and the first row was chosen among a few "
            "that fit: the ratios to the second, which computes all of them on the CPU, differ by as much as it does.",
        ]
    )


def _models(held: dict[str, Table]) -> str:
    table = held["models"].sort_values("num_experts").to_dict("records")
    above = {str(row["trace"]): row["reuse"] / row["chance"] for row in table}
    kept = {str(row["trace"]): (row["carried"] - 0.25) / (row["popular"] - 0.25) for row in table}
    gaps = [100 * (row["belady"] - row["lru"]) for row in table]
    rows = [
        f"| {row['trace']} | {row['num_layers']} x {row['num_experts']}, top-{row['top_k']} | {row['requests']}, "
        f"{row['tokens']:,} | {row['reuse']:.0%} ({row['chance']:.0%}) | {row['popular']:.0%}, {row['carried']:.0%} "
        f"| {row['window']:.0%}, {row['window_hits']:.0%} | {share(row['lru'])} | {share(row['belady'])} |"
        for row in table
    ]
    (low, high), (least, most) = (
        (min(each, key=each.__getitem__), max(each, key=each.__getitem__)) for each in (above, kept)
    )
    return "\n".join(
        [
            f"On {len(table)} models a token repeats its predecessor's experts {above[low]:.1f} to {above[high]:.1f} "
            "times as often as chance, and a hot list carries over on some alone",
            "",
            f"Least on {low}, most on {high}: the finer the experts, the more a repeated one says. "
            "Of what the hottest quarter of each layer serves beyond chance (25%), "
            f"{kept[least]:.0%} ({least}) to {kept[most]:.0%} ({most}) is left where the quarter is chosen on the "
            "other half of the requests, or of the one request's tokens. Belady is "
            f"{min(gaps):.1f} to {max(gaps):.1f} points above LRU at a quarter of the experts.",
            "",
            "*Repeated*: the share of a token's experts that the token before used, and chance. *Hottest quarter*: the "
            "share of choices it serves, chosen on the same tokens and on the other half. *Window*: of all experts "
            f"those that {WINDOW} tokens use, and what a cache of them hits. LRU and Belady: hit rates at a quarter of "
            "the experts, hits counted without a clock, from cold.",
            "",
            "| trace | experts | requests, tokens | repeated (chance) | hottest quarter: same, other half "
            "| window: experts, hits | LRU | Belady |",
            "| --- | --- | --- | --- | --- | --- | ---: | ---: |",
            *rows,
            "",
            "`moe-trace info TRACE` prints the first figures of any trace, `moe-trace export` tries its hot list.",
        ]
    )


def _more_perplexity(row: dict[Any, Any], interval: str = "95%: ") -> str:
    more, low, high = (100 * row[f"perplexity_more{end}"] for end in ("", "_low", "_high"))
    return f"{more:+.1f}% ({interval}{low:+.1f} to {high:+.1f})"


def _cheapest(rows: list[dict[Any, Any]]) -> tuple[dict[Any, Any], float]:
    """Return the rule that fetches least for a per cent of perplexity, and the share of the fetches that it saves."""
    row = min(
        (row for row in rows if row["perplexity_more"] <= 0.01), key=lambda row: row["fetches"] / row["fetches_whole"]
    )
    return row, 1 - row["fetches"] / row["fetches_whole"]


def _bent(held: dict[str, Table]) -> str:
    rows, table = held["bent"].to_dict("records"), held["quality"]
    shipped, trained = (table[table["model"] == name].to_dict("records") for name in (SHIPPED, TRAINED))
    quarter = [row for row in rows if row["cache_fraction"] == 0.25]
    whole = {row["policy"]: row["fetches"] for row in quarter if not row["routing"]}
    least, one = (next(row for row in quarter if row["routing"] == rule) for rule in (DROPS[0], DROPS[-1]))
    (near, saved), (other, other_saved) = _cheapest(shipped), _cheapest(trained)
    return "\n".join(
        [
            f"A per cent of perplexity buys {saved:.0%} and {other_saved:.0%} of the fetches of two small models",
            "",
            f"`{near['routing']}` fetches {near['fetches']:.1f} experts a token instead of "
            f"{near['fetches_whole']:.1f} on the shipped model with {near['cache_fraction']:.0%} of the experts in the "
            f"cache, at {_more_perplexity(near)} of perplexity. `{other['routing']}` fetches {other['fetches']:.1f} "
            f"instead of {other['fetches_whole']:.1f} on a Mixtral of 8 layers x 16 experts, top-2, at "
            f"{_more_perplexity(other)} with {other['cache_fraction']:.0%}. "
            "Committing to what the layer before foresees saves next to none by itself: it is for prefetchers. "
            f"Weights of gpt-oss-20b differ less: at 25% `{DROPS[0]}` fetches {least['fetches']:.1f} "
            f"experts a token, and `{DROPS[-1]}` {one['fetches']:.1f} with {one['lost_weight']:.1%} of the weight "
            f"lost, where LRU fetches {whole['lru']:.1f} and Belady, which knows the future and changes nothing, "
            f"{whole['belady']:.1f}: what is lossy passes what is optimal.",
            "",
            f"{shipped[0]['tokens']:,} tokens of GSM8K's test set, each read as a decoded one, under LRU. *Same*: "
            "tokens at which the likeliest next one is the whole model's. The shipped model is an OLMoE of 5 million "
            "parameters; the Mixtral has 4 million, trained on the same text for 600 steps (`python -m "
            "benchmarks.demo.train TEXT --architecture mixtral --steps 600`). Choices of large models are sharper.",
            "",
            "| rule | cache | shipped: fetches | perplexity | same | Mixtral: fetches | perplexity | same |",
            "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
            *(
                f"| {one['routing']} | {one['cache_fraction']:.0%} | {_price(one)} | {_price(two)} |"
                for one, two in zip(shipped, trained, strict=True)
            ),
            "",
            "![Fetches against perplexity](notebooks/figures/findings-bent.png)",
            "",
            f"gpt-oss-20b, the first 40 requests ({rows[0]['tokens']:,} tokens), whose weights were recorded; "
            "its routing is as recorded, so what a dropped expert changes in later layers is not seen.",
            "",
            "| policy | rule | cache | fetches a token | weight lost | choices changed |",
            "| --- | --- | --- | ---: | ---: | ---: |",
            *(
                f"| {row['policy']} | {row['routing'] or '-'} | {row['cache_fraction']:.0%} | {row['fetches']:.1f} "
                f"| {row['lost_weight']:.1%} | {row['changed_choices']:.1%} |"
                for row in rows
            ),
            "",
            "`moe-replay quality --routing RULE --text FILE` measures the same of any model.",
        ]
    )


def _price(row: dict[Any, Any]) -> str:
    return f"{row['fetches']:.1f} of {row['fetches_whole']:.1f} | {_more_perplexity(row, '')} | {row['agreement']:.1%}"


FINDINGS = (
    *(_gap, _paper, _capacity, _collapse, _frozen, _activation, _groups, _prefetch, _users),
    *(_speculation, _models, _hybrid, _bent),
)

TAIL = """
## What is not here

Adaptation to a task shift is in [docs/results.md](docs/results.md), with its command; predictions against measured
hardware are in [replay/results](replay/results/README.md) and [docs/backtest.md](docs/backtest.md); what a machine
allows is in [docs/planner.md](docs/planner.md). Two models are few: DeepSeek-V2-Lite's trace has no decoding, and
gpt-oss-20b's is greedy. The other traces are of few requests.
"""


def activation_figure(points: "dict[str, tuple[Any, Any]]") -> "Figure":
    drawing, axes = plot.single((plot.WIDTH, 3.4), "", "tokens of the request")
    for i, (model, (tokens, share)) in enumerate(points.items()):
        axes.plot(tokens, share, **plot.look(i), linestyle="none", alpha=0.7, label=model)
    axes.set_ylabel("share of all experts, used repeatedly")
    axes.set_ylim(bottom=0)
    axes.set_xscale("log")
    axes.legend(frameon=False, fontsize=8)
    return drawing


def bent_figure(rows: Sequence[dict[str, Any]]) -> "Figure":
    """Return fetches against what perplexity rises by, a line for each kind of rule, policy and size."""
    drawing = Drawing(figsize=(6.4, 4.0), layout="constrained")
    axes, lines = drawing.subplots(), dict[str, list[dict[str, Any]]]()
    for row in rows:
        kind = row["routing"].partition(":")[0]
        lines.setdefault(f"{kind}, {row['policy']}, {row['cache_fraction']:.1%}", []).append(row)
    for number, (name, points) in enumerate(lines.items()):
        points = sorted(points, key=lambda row: row["fetches"])
        more, low, high = (
            np.array([100 * row[f"perplexity_more{end}"] for row in points]) for end in ("", "_low", "_high")
        )
        x, colour = [row["fetches"] for row in points], plot.COLOURS[number % len(plot.COLOURS)]
        axes.errorbar(x, more, [more - low, high - more], fmt="o-", color=colour, label=name, capsize=2, markersize=4)
        axes.axvline(points[0]["fetches_whole"], color=colour, linewidth=0.8, linestyle=":")
    axes.axhline(0, color="grey", linewidth=0.8)
    axes.set_xlabel("experts fetched a token (dotted: by the whole model)")
    axes.set_ylabel("perplexity, % more than of the whole model")
    axes.legend(fontsize=8)
    return drawing


def figures(held: dict[str, Table]) -> "dict[str, Figure]":
    """Return the figures by file."""
    hit_rates: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    for trace in (GPT_OSS, DEEPSEEK):
        here = _of(held["policies"], trace)
        sizes = [float(each) for each in np.sort(here["cache_fraction"].unique())]
        panel = hit_rates.setdefault(trace, {})
        for policy in ("lru", *ONLINE):
            rates = [_rate(_of(held["policies"], trace, size), policy) for size in SIZES]
            panel[PLAIN.get(policy, policy)] = ([100 * each for each in sizes], rates)
        curve = _of(held["curves"], trace)
        shown = curve["slots"].between(1, curve["slots"].max() * 0.6)
        x = (100 * curve["slots"] / curve["slots"].max())[shown].tolist()
        panel[plot.BELADY] = (x, curve["belady"][shown].tolist())
    entries: dict[str, dict[str, tuple[list[int], list[float]]]] = {}
    for trace in (GPT_OSS, DEEPSEEK):
        here = _of(held["capacities"], trace)
        panel_of = entries.setdefault(trace, {})
        panel_of["eamc, retention alone"] = (
            list(CAPACITIES),
            [_rate(here, f"eamc:capacity={n}+none") for n in CAPACITIES],
        )
        panel_of["lru"] = (list(CAPACITIES), [_rate(here, "lru")] * len(CAPACITIES))
        panel_of[plot.BELADY] = (list(CAPACITIES), [_rate(here, "belady")] * len(CAPACITIES))
    points = {}
    for trace in (GPT_OSS, DEEPSEEK):
        here = _of(held["activation"], trace)
        points[trace] = (here["tokens"], here["repeated"])
    users = {
        "tokens/s, all requests": {
            f"{trace}, {policy}": (list(USERS), part.sort_values("users")["tokens_per_s"].tolist())
            for trace in (GPT_OSS, DEEPSEEK)
            for policy, part in _of(held["users"], trace).groupby("policy")
        }
    }
    quality: Any = held["quality"].query("model == @SHIPPED").to_dict("records")
    return {
        "findings-hit-rate.png": plot.line_panels(hit_rates, "cache size (% of all experts)", "hit rate"),
        "findings-capacity.png": plot.line_panels(entries, "entries of the EAMC", "hit rate at 25%"),
        "findings-activation.png": activation_figure(points),
        "findings-bent.png": bent_figure(quality),
        "findings-users.png": plot.line_panels(users, "requests at a time", "tokens per second"),
    }
