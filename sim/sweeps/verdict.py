"""What results mean, in a few sentences: what to do, what it gains over LRU, how sure that is, what memory buys.

All of it follows from the rows of results.parquet and, for intervals, those of requests.parquet. `sentences` is of a
sweep, `of_run` of one run, `of_pairs` of comparisons.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import geometric_mean

import numpy as np

from policies.core.grammar import policy_title
from sim.quantities import show_memory, show_ms, show_share
from sim.results import compare
from sim.results.compare import Difference, Measure, SweptRun
from sim.results.metrics import Row
from sim.sweeps import winner

KNEE = 2.0
"""How many times as much a byte buys up to the knee as behind it, at least."""

WHAT = {"tpot_mean_ms": "a token", "ttft_mean_ms": "the first token"}
"""What the column by which a sweep is judged is the time of; not of misses."""

JUDGED = ("tpot_mean_ms", "ttft_ms", "hit_rate")
"""Measures of requests, the first of which that is known decides between two runs."""

UNITS = {"a GiB": 2**30, "100 MiB": 100 * 2**20, "a MiB": 2**20}
"""Of memory that is bought, in bytes."""


def sentences(rows: Sequence[Row], runs: Sequence[SweptRun]) -> list[str]:
    """Return the answer of a sweep: rows of results.parquet, and the same runs with their requests, as far as known."""
    by = winner.metric(rows)
    whole, best = [*lossy(rows), *_whole(rows[0], by)], winner.best_of_sizes(rows, by)
    predicted = list(_lookahead(rows, best))
    if all(row["oracle"] for row in rows):
        return [*lossy(rows), "Only oracles were run, which know the future: there is nothing to choose.", *predicted]
    if not best:
        card = rows[0]["hardware"]
        return [*lossy(rows), f"None of these caches fits {card} beside dense weights and KV cache: nothing to choose."]
    chosen = best[_knee(best, by) or -1]
    if len({row["policy"] for row in rows if not row["oracle"]}) == 1:
        name = chosen["policy"]
        answer = [*whole, _gain(chosen, runs, by, f" under {name}"), *_memory(best, by), *_misses(best, name)]
        return [*answer, *predicted]
    gain = f"{_gain(chosen, runs, by)}{_too_dear(rows, chosen, by)}"
    misses = _misses(best, "the best policy")
    return [*whole, _fastest(best, by, bool(whole)), gain, *_memory(best, by), *misses, *predicted]


def joint(tables: Sequence[Sequence[Row]]) -> list[str]:
    """Return which policy serves several tables best, by its time or misses over the best of each size, if any does."""
    ratios: dict[str, list[float]] = {}
    for rows in tables:
        by = winner.metric(rows)
        for best in winner.best_of_sizes(rows, by):
            least = _value(best, by)
            for row in rows:
                if row["cache_experts"] == best["cache_experts"] and not row["oracle"] and least > 0:
                    ratios.setdefault(row["policy"], []).append(_value(row, by) / least)
    sizes = max(map(len, ratios.values()), default=0)
    means = {policy: (geometric_mean(each), max(each)) for policy, each in ratios.items() if len(each) == sizes}
    if len(tables) < 2 or len(means) < 2:
        return []
    first, *others = sorted(means, key=lambda policy: means[policy])
    what = "time" if winner.metric(tables[0]) in WHAT else "misses"
    texts = [f"{policy} {means[policy][0]:.2f} (at most {means[policy][1]:.2f})" for policy in others]
    return [
        f"One policy for all {len(tables)} tables: {first}, with {means[first][0]:.2f} times the {what} of the best "
        f"one at each of {sizes} sizes, in the geometric mean (at most {means[first][1]:.2f}); {', '.join(texts)}."
    ]


def of_run(row: Row, runs: Sequence[SweptRun]) -> list[str]:
    """Return the answer of one run: its row with what `grid.measures` adds, and the run and LRU's at the same size."""
    by = winner.metric([row])
    room = [] if row["fits"] is not False else [f"This cache does not fit the {row['hardware']}: choose a smaller one."]
    title = policy_title(row["policy"], row["oracle"])
    return [*lossy([row]), *_whole(row, by), *room, _gain(row, runs, by, f" under {title}"), *_misses([row], title)]


def of_pairs(pairs: Sequence[tuple[SweptRun, SweptRun, Sequence[Difference]]]) -> list[str]:
    """Return which to choose at which sizes, of runs that were compared with one baseline one sentence for each size.

    pairs: (baseline, cell, differences). It is judged by time where it was measured. An oracle is nothing to choose.
    """
    groups: dict[tuple[str, str, str, Measure], dict[str, SweptRun]] = {}
    for baseline, cell, found in pairs:
        if baseline.oracle or cell.oracle:
            continue
        measure = min((each.measure for each in found), key=lambda each: JUDGED.index(each.name))
        same = baseline.cache_experts == cell.cache_experts
        size = f"{100 * cell.cache_experts / cell.row['all_experts']:.3g}%" if same else ""
        runs = groups.setdefault((baseline.where, baseline.policy, size, measure), {})
        runs |= {found[0].baseline: baseline, found[0].cell: cell}
    sizes: dict[str, list[str]] = {}
    bent = [f"Not lossless: these are runs under {rule}." for _, cell, _ in pairs[:1] if (rule := cell.row["routing"])]
    for (_, _, size, measure), runs in groups.items():
        sizes.setdefault(_choice(runs, measure), []).extend([size] if size else [])
    return bent + [f"{text} at {_listed(at)}." if at else f"{text.rstrip(',')}." for text, at in sizes.items()]


def _choice(runs: Mapping[str, SweptRun], measure: Measure) -> str:
    names = list(runs)
    totals = {name: compare.total(run, measure) for name, run in runs.items()}
    best = min(names, key=lambda name: totals[name] * (-1 if measure.name == "hit_rate" else 1))
    samples = [compare.sample(runs[best], run, measure) for run in runs.values()]
    if not all(each.is_enough for each in samples):
        few = f"({min(each.totals.shape[1] for each in samples)}; {compare.FEWEST} are needed)"
        return f"Too few requests to choose between {_listed(names)} {few}"
    others = [name for name in names if name != best]
    equal = [name for name in others if compare.indistinct(runs[best], [runs[name]], measure)]
    if equal == others:
        return f"{_listed(names)} differ in {measure.meaning} by no more than chance"
    beaten = _listed([name for name in others if name not in equal])
    if not equal:
        return f"Choose {best}, which beats {beaten} in {measure.meaning},"
    chance = f"differ in {measure.meaning} by no more than chance"
    return f"Choose {' or '.join([best, *equal])}, which {chance} and beat {beaten},"


def lossy(rows: Sequence[Row]) -> Iterator[str]:
    """Yield that a rule changed what the model computes, and how much of it (rule 22)."""
    if rows[0]["routing"]:
        lost, changed = (
            " to ".join(dict.fromkeys(f"{100 * each(row[name] for row in rows):.3g}%" for each in (min, max)))
            for name in ("lost_weight", "changed_choices")
        )
        yield (
            f"Not lossless: {rows[0]['routing']} changes {changed} of the routers' choices, with {lost} of their "
            "weight; compare it with runs under the same rule alone."
        )


def _whole(row: Row, by: str) -> Iterator[str]:
    if row["resident_ms"] is not None:
        size = show_memory(row["all_experts"] * row["expert_bytes"])
        yield (
            f"All {row['all_experts']:,} experts ({size}) fit the {row['hardware']}: no cache is needed, and "
            f"{WHAT[by]} takes {show_ms(row['resident_ms'])} ms."
        )


def _fastest(best: Sequence[Row], by: str, less: bool) -> str:
    sizes: dict[str, list[str]] = {}
    for row in best:
        sizes.setdefault(row["policy"], []).append(_share(row))
    if len(sizes) == 1 and len(best) > 3:
        sizes = {policy: [f"each of {len(best)} sizes"] for policy in sizes}
    what = "misses least" if by == "misses" else "is the fastest"
    texts = [f"{policy} {what} at {_listed(each)}" for policy, each in sizes.items()]
    return f"{'Where less memory is free, ' if less else ''}{', '.join(texts)}."


def _gain(row: Row, runs: Sequence[SweptRun], by: str, under: str = "") -> str:
    """Return what the best policy of a size takes, or the one named by `under`, and what it gains over LRU."""
    memory = f" ({show_memory(row['cache_bytes'])})" if row["cache_bytes"] else ""
    takes = (
        f"{WHAT[by]} takes {show_ms(row[by])} ms" if by in WHAT else f"{show_share(_value(row, by))} of lookups miss"
    )
    text = f"With {_share(row)} of the experts in the cache{memory} {takes}{under}"
    if row["policy"] == "lru" and under:
        return f"{text}, the baseline of other policies."
    if row["policy"] == "lru":
        return f"{text}; no policy that was run is better than LRU there."
    here = {each.policy: each for each in runs if each.cache_experts == row["cache_experts"]}
    mine, lru = here.get(row["policy"]), here.get("lru")
    gain = f", {_against(lru, mine, by)}" if mine and lru else ""
    gap = row["gap_latency" if by in WHAT else "gap_hits"]
    if gap is None or gap <= 0:
        return f"{text}{gain}."
    closes = f"closes {gap:.0%} of the gap from LRU to Belady"
    return f"{text}{gain}; that {closes if gap <= 1 else 'is less than under Belady, which prefetches nothing'}."


def _too_dear(rows: Sequence[Row], chosen: Row, by: str) -> str:
    """Return which policy hits more than LRU but, with its overhead, takes no less; empty where LRU is not chosen."""
    beside = [row for row in rows if row["cache_experts"] == chosen["cache_experts"] and not row["oracle"]]
    most = max(beside, key=lambda row: row["hit_rate"] or 0.0, default=chosen)
    points = 100 * ((most["hit_rate"] or 0.0) - (chosen["hit_rate"] or 0.0))
    if by not in WHAT or chosen["policy"] != "lru" or points < 1 or not most["predictor_us"]:
        return ""
    overhead = f"{most['predictor_us']:.3g} us an event"
    return f" {most['policy']} hits {points:.1f} points more, but with an overhead of {overhead} it takes longer."


def _against(lru: SweptRun, mine: SweptRun, by: str) -> str:
    gain = compare.gain(lru, mine, by)
    if gain is None or not gain.is_enough:
        count = gain.requests if gain else len(mine.requests)
        return f"but these are too few requests to compare it with LRU ({count}; {compare.FEWEST} are needed)"
    if gain.low <= 0 <= gain.high:
        return f"which differs from LRU by no more than chance ({gain.sample})"
    more = "less" if by in WHAT and gain.more > 0 else "fewer" if gain.more > 0 else "more"
    unit = "%" if by in WHAT else " points"
    low, mean, high = sorted(abs(each) for each in (gain.low, gain.more, gain.high))
    of = f", {gain.sample}" if gain.tokens else ""
    return f"{mean:.0f}{unit} {more} than under LRU (95%: {low:.0f} to {high:.0f}{of})"


def _memory(best: Sequence[Row], by: str) -> Iterator[str]:
    slopes, knee, size = _slopes(best, by), _knee(best, by), best[0]["expert_bytes"]
    if not slopes or size is None:
        return
    unit = next((unit for unit in UNITS if best[0]["all_experts"] * size >= 4 * UNITS[unit]), "a MiB")
    more = [slope * UNITS[unit] / size for slope in slopes]
    texts = [f"{show_ms(each)} ms" if by in WHAT else f"{each:.3g} points" for each in more]
    if knee is not None:
        yield f"Up to {_share(best[knee])} {unit} more of cache saves {texts[knee - 1]}, above it {texts[knee]}."
    else:
        yield f"From {_share(best[-2])} to {_share(best[-1])} {unit} more of cache saves {texts[-1]}."


def _slopes(best: Sequence[Row], by: str) -> list[float]:
    """Return what an expert more buys from each size to the next: ms, or points of misses."""
    scale = 1 if by in WHAT else 100
    return [
        scale * (_value(one, by) - _value(other, by)) / (other["cache_experts"] - one["cache_experts"])
        for one, other in pairwise(best)
    ]


def _knee(best: Sequence[Row], by: str) -> int | None:
    drops = [
        (one / other if other > 0 else float("inf"), place)
        for place, (one, other) in enumerate(pairwise(_slopes(best, by)), 1)
        if one > 0
    ]
    ratio, place = max(drops, key=lambda drop: drop[0], default=(0.0, 0))
    return place if ratio >= KNEE else None


def _misses(best: Sequence[Row], under: str) -> Iterator[str]:
    """Yield whose the misses are: what Belady misses too is due to the size, and the rest to the policy."""
    rows = [row for row in best if row["belady_hit_rate"] is not None and row["lookups"]]
    moves = [(row, (row["misses"] + row["prefetch_used"]) / row["lookups"]) for row in rows]  # of what was not kept
    known = [(row, moved) for row, moved in moves if moved >= 1 - row["belady_hit_rate"]]
    shown = known if len(known) <= 4 else [known[0], known[len(known) // 2], known[-1]]
    if not shown:
        return
    what = "miss or hit what was just prefetched" if any(row["prefetch_used"] for row, _ in shown) else "miss"
    missed = _listed([f"{100 * moved:.0f}" for _, moved in shown])
    own = _listed([f"{100 * (moved - 1 + row['belady_hit_rate']):.0f}" for row, moved in shown])
    sizes = _listed([_share(row) for row, _ in shown])
    yield (
        f"Of 100 lookups {missed} {what} at {sizes} under {under}: {own} of them because of the policy, as "
        "Belady, which knows the future, hits them; the others because of the size."
    )


def _lookahead(rows: Sequence[Row], best: Sequence[Row]) -> Iterator[str]:
    """Yield from which recall on a predictor of the next layers pays, by size; between recalls time is linear."""
    beside = {row["cache_experts"]: row for row in best}
    swept: dict[tuple[int, str], dict[float, list[Row]]] = {}
    for row in rows:
        prefetch = json.loads(row["options"])["prefetch"]
        if prefetch["name"] == "lookahead" and row["gap_latency"] is not None:
            policy = re.sub(":(recall|seed)=[^:@/]*", "", row["policy"])
            swept.setdefault((row["cache_experts"], policy), {}).setdefault(prefetch["recall"], []).append(row)
    for (size, policy), by_recall in swept.items():
        other = beside.get(size)
        recalls = sorted(by_recall)
        closed = [np.mean([row["gap_latency"] for row in by_recall[recall]]) for recall in recalls]
        gains = np.array(closed) - (other["gap_latency"] if other else 0.0)
        lost = np.flatnonzero(gains <= 0)
        if not len(lost):
            when = f"from a recall of {recalls[0]:g} on, the least that was run"
        elif lost[-1] == len(recalls) - 1:
            when = f"at no recall up to {recalls[-1]:g}, the highest that was run"
        else:
            last = lost[-1] + np.arange(2)
            when = f"from a recall of {np.interp(0, gains[last], np.array(recalls)[last]):.2f} on"
        name = other["policy"] if other else "lru"
        share = _share(by_recall[recalls[0]][0])
        yield f"At {share} {policy_title(policy, True)} is faster than {name} {when}."


def _share(row: Row) -> str:
    percent = 100 * float(row["cache_fraction"])
    return f"{round(percent, 1):g}%" if percent >= 1 else f"{percent:.3g}%"


def _value(row: Row, by: str) -> float:
    """Return what a sweep is judged by: ms, or the share of lookups that miss."""
    return float(row[by]) if by in WHAT else 1 - float(row["hit_rate"] or 0)


def _listed(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
