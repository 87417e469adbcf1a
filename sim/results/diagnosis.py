"""Diagnose a run in one line: the failure signatures of MoE-Infinity (arXiv 2401.14361) in its row.

Misses are the placement's where most are computed on the host, else the policy's where Belady, at the same size, would
have fetched far fewer, and the cache size's where it would not. An idle GPU waits for fetches that came too late or
were not made early. A busy link carries experts that are never looked up, or holds up what is needed at once. Below the
working set of one token no recency helps.
"""

from collections.abc import Sequence

from sim.results.metrics import Row, size_text

MANY_MISSES = 0.3
"""Share of all lookups below which misses are not reported."""

POLICY_GAP = 0.1
"""Points of fetched misses beyond Belady's above which misses are the policy's."""

IDLE = 0.3
"""Of the time, waiting for weights or for the policy."""

WASTED = 0.3
"""Of the bytes over the link, prefetched and never looked up."""

MINOR = 0.05
"""Share of the time or of lookups below which nothing is reported."""


def lines(rows: Sequence[Row], bound: Sequence[Row], demand: float) -> list[str]:
    """A line for each row that needs one.

    bound: Belady's rows, as far as there are any; demand: one token's experts as a share of all.
    """
    best = {row["cache_experts"]: row["hit_rate"] for row in bound}
    each = ((row, _findings(row, best.get(row["cache_experts"]), demand)) for row in rows)
    return [f"{row['policy']} at {size_text(row)}: {'; '.join(findings)}" for row, findings in each if findings]


def _findings(row: Row, best: float | None, demand: float) -> list[str]:
    if row["oracle"] or row["hit_rate"] is None:
        return []
    return [*_misses(row, best, demand), *_idle(row), *_link(row)]


def _misses(row: Row, best: float | None, demand: float) -> list[str]:
    missed = row["misses"] / row["lookups"]
    if missed < MANY_MISSES:
        return []
    late = row["late"] / row["lookups"]
    text = f"{missed:.0%} of lookups miss" + (f", {late:.0%} are late prefetches" if late >= MINOR else "")
    on_host = row["on_host"] / row["lookups"]
    if on_host > missed / 2:
        return [f"{text}, because of the placement: the host computes {on_host:.0%}"]
    text += f", {on_host:.0%} are computed on the host" if on_host >= MINOR else ""
    if row["phase"] != "prefill" and row["cache_fraction"] < demand:
        return [f"{text}, the cache is below the working set of one token ({demand:.0%})"]
    if best is None:
        return [text]
    if best - row["hit_rate"] - on_host > POLICY_GAP:
        return [f"{text}, because of the policy: Belady hits {best:.0%}, not {row['hit_rate']:.0%}"]
    return [f"{text}, because of the cache size: Belady hits {best:.0%}; a larger cache would help"]


def _idle(row: Row) -> list[str]:
    if row["gpu_idle_ms"] is None:
        return []
    elapsed = row["gpu_idle_ms"] + row["compute_busy_ms"]
    shares = {
        "for experts that were not fetched early": row["stall_demand_ms"],
        "for late prefetches": row["stall_late_ms"],
        "behind other prefetches on the link (--chunk-bytes lets misses interrupt)": row["stall_behind_prefetch_ms"],
        "for policy overhead": row["stall_predictor_ms"],
        "for the disk": row["stall_disk_ms"],
        "for the host to compute": row["stall_host_ms"],
        "for a slot": row["stall_slot_ms"],
    }
    if not elapsed or row["gpu_idle_ms"] / elapsed < IDLE:
        return []
    worst = sorted(((ms / elapsed, why) for why, ms in shares.items() if ms / elapsed >= MINOR), reverse=True)
    reasons = ", ".join(f"{share:.0%} {why}" for share, why in worst)
    return [f"the GPU waits {row['gpu_idle_ms'] / elapsed:.0%} of the time: {reasons}"]


def _link(row: Row) -> list[str]:
    prefetched = row["bytes_prefetch"] or 0
    moved = (row["bytes_demand"] or 0) + prefetched
    wasted = min(row["bytes_wasted"] or 0, prefetched)  # what is above that, the warm-up had prefetched
    if not moved or wasted / moved < WASTED:
        return []
    return [f"{wasted / moved:.0%} of the bytes moved were wasted prefetches"]
