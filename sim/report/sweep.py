"""The sections of the page about one sweep, but for its recommendation and its routing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from policies.core.grammar import policy_title
from sim.loaded import Loaded
from sim.loop.log import STALLS
from sim.quantities import show_share
from sim.report import bounds, recommendation, routing
from sim.report.elements import Item, Section, Shown, figure_item
from sim.report.inputs import Results
from sim.results import diagnosis, plot
from sim.results.metrics import Row, cell_text, size_text, users_text
from sim.sweeps import winner

BARS = 24
"""Cells in a figure of bars at most: those of the largest sizes."""


def sections(sweep: Results, several: bool) -> Iterator[Section]:
    rows, of = sweep.rows, f" ({sweep.folder.name})" if several else ""
    if not rows:
        yield Section(f"What was run{of}", (Item("text", f"{sweep.folder} holds no cells to show."),))
        return
    sections: dict[str, Iterable[Item]] = {
        "What was run": (Item("text", _run(sweep)), _table(rows)),
        "Hit rate and time against cache size": _against_size(sweep),
        "Which policy": _ranking(sweep),
        "Latencies": _latencies(sweep),
        "Where the time goes": _time(rows),
        "The routing": routing.items(sweep),
    }
    for title, items in sections.items():
        yield Section(f"{title}{of}", tuple(items))


def _run(sweep: Results) -> str:
    first = sweep.rows[0]
    users = f", {users}" if (users := users_text(first)) else ""
    where = f" on {first['hardware']}" if first["hardware"] else ", counted without a clock"
    policies = ", ".join(dict.fromkeys(policy_title(row["policy"], row["oracle"]) for row in sweep.rows))
    sizes = ", ".join(dict.fromkeys(size_text(row) for row in sweep.rows))
    code = dict.fromkeys(row["commit"] for row in sweep.rows)
    return (
        f"{first['model']}{where}: {first['requests']:,} requests and {first['tokens']:,} tokens of "
        f"{first['trace']}{users}; policies {policies}; caches of {sizes} of {first['all_experts']:,} experts; "
        f"{'cold' if first['cold'] else 'warm'} between requests, {first['warmup_requests']} requests to warm up. "
        f"Made by {', '.join(code)}."
    )


def _against_size(sweep: Results) -> Iterator[Item]:
    rows, sizes = sweep.rows, list({row["cache_experts"]: row for row in sweep.rows}.values())
    bound, lowest, demand = [row for row in rows if row["policy"] == "belady"], [], 0.0
    loaded = sweep.loaded
    if loaded:
        demand = loaded.token_experts / loaded.all_experts
        if reason := _unbounded(loaded):
            missing = ["the physical floor"] if bound else ["Belady's bound", "the physical floor"]
            yield Item("text", f"Not computed: {' and '.join(missing)}, since {reason}.")
        else:
            bound = bound or bounds.belady(loaded, sizes)
            lowest = bounds.floor(loaded, sizes, any(row["on_host"] for row in rows))
    elif not bound:
        sweep.note(f"{sweep.folder}: without its trace, Belady's bound and the physical floor cannot be computed")
    for column in plot.DRAWN:
        drawn = [row for row in rows if row[column] is not None]
        if not drawn:
            continue
        known = [row for row in bound if row.get(column) is not None]  # a bound has the hit rate alone
        floor = lowest if column == "tpot_mean_ms" else []
        figure = plot.figure(drawn, known, demand, column, floor)
        yield figure_item(figure, _CAPTIONS[column] + (_FLOOR if floor else ""))
    if lowest:
        best = min((row for row in rows if row["tpot_mean_ms"] is not None), key=lambda row: row["tpot_mean_ms"])
        least = next(row for row in lowest if row["cache_experts"] == best["cache_experts"])
        ratio = best["tpot_mean_ms"] / least["tpot_mean_ms"]
        yield Item("text", f"The fastest cell takes {ratio:.2f} times the physical floor of its size.")
    for line in diagnosis.lines(rows, bound, demand):
        yield Item("text", f"{line}.")


def _unbounded(loaded: Loaded) -> str:
    """Return why neither Belady's misses nor the physical floor bound this sweep; empty where they do."""
    reasons = {
        "experts differ in size": loaded.sizes is not None,
        "several requests run at a time": loaded.experiment.max_batch is not None,
        "experts are read from a disk": loaded.experiment.host_memory is not None,
        "each request begins with an empty cache": loaded.experiment.cold,
    }
    return ", and ".join(reason for reason, holds in reasons.items() if holds)


_CAPTIONS = {
    "hit_rate": "Share of expert uses found in the cache. Belady knows the future: of experts of one size no policy "
    "that fetches on demand hits more. Left of the dotted line the cache is smaller than one token's experts.",
    "tpot_mean_ms": "Mean time per output token.",
    "ttft_mean_ms": "Mean time to the first token.",
}

_FLOOR = (
    " The physical floor is the longer of computing with every expert at hand, and moving what Belady would miss, "
    "whatever was loaded in prefills."
)


def _ranking(sweep: Results) -> Iterator[Item]:
    """Yield each policy's difference to the best one, with paired bootstrap intervals over requests."""
    by, cells, groups = winner.metric(sweep.rows), sweep.cells, {}
    oracles = _oracles(sweep)
    rows = {(row["policy"], row["cache_experts"]): row for row in sweep.rows}
    texts = []
    for slots in dict.fromkeys(cell.cache_experts for cell in cells):
        here = [cell for cell in cells if cell.cache_experts == slots and cell.policy not in oracles]
        here = [cell for cell in here if rows[cell.policy, slots][by] is not None]
        if len(here) < 2:
            continue
        here.sort(key=lambda cell: rows[cell.policy, slots][by])
        differences = [recommendation.difference(sweep, here[0], cell, by) for cell in here[1:]]
        kept = [each for each in differences if each]
        if kept:
            size = size_text(rows[here[0].policy, slots])
            groups[f"{size}: best is {here[0].policy}"] = kept
            texts += [f"{size}: {each.sentence()}." for each in kept]
    if not groups:
        yield Item("text", "There are fewer than two policies, or fewer than two requests, to compare at one size.")
        return
    measure = next(iter(groups.values()))[0].measure
    policies = list(dict.fromkeys(row["policy"] for row in sweep.rows))
    figure = plot.ranking(groups, policies, f"{measure.meaning} ({measure.unit}), less the best policy's")
    caption = (
        "Paired differences over requests, with 95% bootstrap intervals. An interval that reaches the dashed line may "
        "be chance, and so may all of fewer than six requests. The intervals take requests as independent, which a "
        "warm cache makes them a little less."
    )
    yield figure_item(figure, caption)
    yield Item("list", "\n".join(texts))


def _oracles(sweep: Results) -> set[str]:
    return {row["policy"] for row in sweep.rows if row["oracle"]}


def _latencies(sweep: Results) -> Iterator[Item]:
    requests, oracles = sweep.requests, _oracles(sweep)
    if requests is None or not len(requests):
        yield Item("text", "There are no rows of requests.")
        return
    for column, unit in (("tpot_mean_ms", "mean time per output token of a request (ms)"), ("ttft_ms", "TTFT (ms)")):
        timed = requests.dropna(subset=[column])
        panels: dict[str, dict[str, plot.Float]] = {}
        for (_, policy), part in timed.groupby(["cache_experts", "policy"], sort=False):
            title = f"{size_text(part.iloc[0])} of the experts"
            label = policy_title(str(policy), policy in oracles)
            panels.setdefault(title, {})[label] = part[column].to_numpy(np.float64)
        if panels:
            yield figure_item(plot.distributions(panels, unit), "Share of the requests that take at most so long.")
    if timed.empty and requests["tpot_mean_ms"].isna().all():
        yield Item("text", "Nothing was timed.")


def _time(rows: Sequence[Row]) -> Iterator[Item]:
    timed = [row for row in rows if row["compute_busy_ms"] is not None and row["tokens"]]
    shown = sorted(timed, key=lambda row: -row["cache_experts"])[:BARS]
    if not shown:
        yield Item("text", "Nothing was timed.")
        return
    stalls = {
        cell_text(row): {
            "compute": row["compute_busy_ms"] / row["tokens"],
            **{
                _STALLS.get(cause, cause): row[f"stall_{cause}_ms"] / row["tokens"]
                for cause in STALLS
                if any(each[f"stall_{cause}_ms"] for each in shown)
            },
        }
        for row in shown
    }
    caption = "Of all steps, prefills included, over all tokens: computing, and what it waited for."
    yield figure_item(plot.stacked(stalls, "ms of a token", "compute and stalls"), caption)
    moved = {
        cell_text(row): {
            "demand": row["bytes_demand"] / row["tokens"] / 1e6,
            "prefetched, not wasted": max(row["bytes_prefetch"] - row["bytes_wasted"], 0) / row["tokens"] / 1e6,
            "prefetched, wasted": min(row["bytes_wasted"], row["bytes_prefetch"]) / row["tokens"] / 1e6,
        }
        for row in shown
        if row["bytes_demand"] is not None
    }
    if moved:
        caption = (
            "Bytes over the link, by kind. What is not wasted was used, or is still in the cache. What requests that "
            "warm up have prefetched may be wasted later: no more is drawn than was prefetched."
        )
        yield figure_item(plot.stacked(moved, "MB of a token", "bytes over the link"), caption)


_STALLS = {
    "demand": "wait for a miss",
    "late": "wait for a late prefetch",
    "behind_prefetch": "wait behind another prefetch",
    "predictor": "policy overhead",
    "host": "wait for the CPU",
    "disk": "wait for the disk",
}


def _table(rows: Sequence[Row]) -> Item:
    shown = tuple(tuple(shown_of(row) for shown_of in COLUMNS.values()) for row in rows)
    return Item("table", head=tuple(COLUMNS), rows=shown)


def _figure(value: float | None, text: Callable[[float], str] | None = None) -> Shown:
    if value is None:
        return ("-", -1.0)
    plain = f"{value:,.0f}" if isinstance(value, int) or value > 1e5 else f"{value:,.4g}"
    return (text(value) if text else plain, float(value))


def _per_token(name: str, row: Row) -> Shown:
    return _figure(None if row[name] is None else row[name] / row["tokens"] / 1e6, "{:,.2f}".format)


def _idle(row: Row) -> Shown:
    idle, busy = row["gpu_idle_ms"], row["compute_busy_ms"]
    return _figure(None if idle is None or not idle + busy else idle / (idle + busy), show_share)


COLUMNS: dict[str, Callable[[Row], Shown]] = {
    "policy": lambda row: (policy_title(row["policy"], row["oracle"]), None),
    "cache": lambda row: (size_text(row), row["cache_fraction"]),
    "experts": lambda row: _figure(row["cache_experts"]),
    "a layer": lambda row: _figure(row["cache_experts"] / row["layers"]),
    "MiB": lambda row: _figure(row["cache_bytes"] / 2**20 if row["cache_bytes"] else None),
    "hit rate": lambda row: _figure(row["hit_rate"], show_share),
    "TPOT mean, ms": lambda row: _figure(row["tpot_mean_ms"]),
    "p50": lambda row: _figure(row["tpot_p50_ms"]),
    "p95": lambda row: _figure(row["tpot_p95_ms"]),
    "p99": lambda row: _figure(row["tpot_p99_ms"]),
    "TTFT mean, ms": lambda row: _figure(row["ttft_mean_ms"]),
    "tokens/s": lambda row: _figure(row["tokens_per_s"]),
    "misses": lambda row: _figure(row["misses"]),
    "late": lambda row: _figure(row["late"]),
    "demand MB/token": partial(_per_token, "bytes_demand"),
    "prefetch MB/token": partial(_per_token, "bytes_prefetch"),
    "wasted MB/token": partial(_per_token, "bytes_wasted"),
    "GPU idle": _idle,
}
"""The table of cells: what each column shows of a row."""
