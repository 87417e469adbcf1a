"""What `moe-replay run` and `generate` print: a table, and a last line with predicted beside measured."""

from rich import box
from rich.table import Table

from replay.run import Outcome
from sim.quantities import show_bytes
from sim.results.metrics import Row, cell_text

AMPLE_HOST_BYTES = 8 << 30
"""Distinct host buffers of less than this may be served by the host's caches."""

STALLED = {
    "predictor": "by the policy",
    "demand": "for a demand",
    "late": "for a late prefetch",
    "behind_prefetch": "behind a prefetch",
    "slot": "for a slot",
}
"""Causes of a stall, in words."""

ROWS = {
    "TTFT mean (ms)": ("ttft_mean_ms", "{:,.3f}"),
    "TPOT mean (ms)": ("tpot_mean_ms", "{:,.3f}"),
    "TPOT p50 (ms)": ("tpot_p50_ms", "{:,.3f}"),
    "TPOT p99 (ms)": ("tpot_p99_ms", "{:,.3f}"),
    "hit rate": ("hit_rate", "{:.1%}"),
    "late": ("late", "{:,}"),
    "misses": ("misses", "{:,}"),
    "demanded (MB)": ("bytes_demand", ""),
    "prefetched (MB)": ("bytes_prefetch", ""),
    "prefetch precision": ("prefetch_precision", "{:.1%}"),
    "link busy (ms)": ("link_busy_ms", "{:,.1f}"),
    "compute busy (ms)": ("compute_busy_ms", "{:,.1f}"),
    "stalled (ms)": ("gpu_idle_ms", "{:,.1f}"),
    **{f"  {words}": (f"stall_{cause}_ms", "{:,.1f}") for cause, words in STALLED.items()},
    "host alone (ms)": ("host_ms", "{:,.1f}"),
    "host a layer (us)": ("host_us_per_layer", "{:,.1f}"),
    "link (GB/s)": ("copy_gb_per_s", "{:,.2f}"),
}


def table(outcome: Outcome) -> Table:
    """Return a line for each figure, measured beside every prediction."""
    shown = Table("", box=box.SIMPLE_HEAD)
    for heading in (_measured(outcome.row), *(f"predicted for {one.machine}" for one in outcome.predictions)):
        shown.add_column(heading, justify="right")
    rows = [outcome.row, *(prediction.row for prediction in outcome.predictions)]
    for heading, (column, form) in ROWS.items():
        values = [row.get(column) for row in rows]
        if any(value is not None for value in values):
            shown.add_row(heading, *(_show(value, form) for value in values))
    return shown


def title(outcome: Outcome) -> str:
    row = outcome.row
    machine = row["device_name"] or f"a logical clock for {row['hardware']}"
    ran = f"{row['requests']} requests of {row['trace']}, {row['tokens']:,} tokens"
    return f"{row['model']} on {row['device']} ({machine}), {cell_text(row)} of the experts: {ran}"


def last_line(outcome: Outcome) -> str:
    """Return predicted beside measured: TPOT (TTFT where nothing is decoded) and hit rate."""
    row = outcome.row
    column = "tpot_mean_ms" if row["tpot_mean_ms"] is not None else "ttft_mean_ms"
    name = column[:4].upper()
    measured = _measured(row)
    expected = outcome.predictions[0]
    off = expected.row[column] / row[column] - 1 if row[column] else 0.0
    low, high = expected.interval_ms or (0.0, 0.0)
    apart = f"; {low:.4g} to {high:.4g} as the machine's pace varied" if expected.interval_ms else ""
    return (
        f"predicted for {expected.machine}: {name} mean {expected.row[column]:.4g} ms ({off:+.1%}{apart}), "
        f"hit rate {_show(expected.row['hit_rate'], '{:.1%}')}; {measured}: {name} mean {row[column]:.4g} ms, "
        f"hit rate {_show(row['hit_rate'], '{:.1%}')}"
    )


def notes(outcome: Outcome) -> list[str]:
    """Return what a reader of the figures must know."""
    row = outcome.row
    lines = []
    if row["device"] == "cpu":
        lines.append("on the cpu device the link is memcpy and the GPU is this CPU")
    if row.get("computed_in"):
        lines.append(packed(row["computed_in"], row["expert_bytes"]))
    if row.get("past_cache") is False:
        lines.append(
            "the file is read through the operating system's page cache, since its file system knows no direct reads: "
            "the link's figures may be those of memory"
        )
    if row.get("fallbacks"):
        lines.append(f"launched kernel by kernel, and slower: {row['fallbacks']}")
    if (loaded := row.get("dense_loaded")) is not None and loaded < 1:
        lines.append(f"--weights gave {loaded:.0%} of the dense parameters; the others are random")
    experts = row["all_experts"]
    distinct = row.get("host_experts") or experts
    if distinct < experts:
        size = distinct * row["expert_bytes"]
        flattered = ": the host's caches may flatter the link" if size < AMPLE_HOST_BYTES else ""
        lines.append(f"--host-dedup: {experts} experts share {distinct} host buffers, {show_bytes(size)}{flattered}")
    return lines


def packed(dtype: str, expert_bytes: int) -> str:
    """Return what is moved and what is computed of packed experts."""
    return (
        f"experts travel packed, {show_bytes(expert_bytes)} each; what is computed is {dtype}, on matrices of their "
        "shape that lie ready: nothing is unpacked"
    )


def _measured(row: Row) -> str:
    return "replayed" if row["device"] == "virtual" else "measured"  # nothing is measured on a logical clock


def _show(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return form.format(value) if form else f"{value / 1e6:,.1f}"


def as_json(outcome: Outcome) -> Row:
    return {**outcome.row, "predictions": {one.machine: one.row for one in outcome.predictions}}
