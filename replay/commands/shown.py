"""What `moe-replay run` and `generate` print: a verdict, and a table with predicted beside measured."""

import shlex
import sys
from collections.abc import Sequence

import numpy as np
from rich import box
from rich.table import Table

from replay.run import Outcome
from sim.loop.log import RunLog
from sim.probe.busy import QUIET
from sim.quantities import show_bytes
from sim.results.metrics import cell_text

AMPLE_HOST_BYTES = 8 << 30  # distinct host buffers of less than this may be served by the host's caches
JUST = 0.02
"""Of the measured time: a prediction misses its range by so much at most, to be just outside of it."""

ROWS = {
    "TTFT mean (ms)": ("ttft_mean_ms", "{:,.3f}"),
    "TPOT mean (ms)": ("tpot_mean_ms", "{:,.3f}"),
    "TPOT p99 (ms)": ("tpot_p99_ms", "{:,.3f}"),
    "hit rate": ("hit_rate", "{:.1%}"),
    "misses": ("misses", "{:,}"),
    "demanded (MB)": ("bytes_demand", ""),
    "prefetched (MB)": ("bytes_prefetch", ""),
    "stalled (ms)": ("gpu_idle_ms", "{:,.1f}"),
    "link (GB/s)": ("copy_gb_per_s", "{:,.2f}"),
}


def verdict(outcome: Outcome) -> str:
    """Return what was measured, how good the prediction is, and what LRU would take: sentences of a line."""
    row, (expected, *_) = outcome.row, outcome.predictions.values()
    decodes = row["tpot_mean_ms"] is not None
    column, unit = ("tpot_mean_ms", "a token") if decodes else ("ttft_mean_ms", "to the first token")
    measured, predicted = row[column], expected[column]
    if row["device"] == "virtual":
        said = "as" if measured == predicted else f"where it is {_ms(predicted)} ms"
        text = f"Simulated {_ms(measured)} ms {unit} for {row['hardware']}, {said} in moe-sim: nothing was measured."
    else:
        low, high = outcome.interval_ms or (predicted, predicted)
        interval = f" ({_ms(low)} to {_ms(high)})" if outcome.interval_ms else ""
        text = f"Measured {_ms(measured)} ms {unit}; predicted {_ms(predicted)} ms{interval}: "
        error = predicted / measured - 1 if measured else 0.0
        text += f"{abs(error):.0%} too {'slow' if error > 0 else 'fast'}" if round(abs(error), 2) else "right to 1%"
        if outcome.interval_ms:
            beyond = max(low - measured, measured - high)
            just = "just " if beyond <= JUST * measured else ""
            text += ", within the range" if beyond <= 0 else f", {just}outside of the range"
        text += "."
    lru = row.get("predicted_lru_tpot_ms")
    if lru is None or not decodes or row["policy"] == "lru":
        return text
    saved = 1 - predicted / lru
    better = f"{abs(saved):.0%} {'less' if saved > 0 else 'more'} than LRU"
    return f"{text} {row['policy']} is predicted to take {better} ({_ms(lru)} ms) here."


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(outcome: Outcome) -> Table:
    """Return a line for each figure, measured beside predicted; on a logical clock both are one."""
    shown = Table("", box=box.SIMPLE_HEAD)
    rows, (machine, predicted), *_ = [outcome.row], *outcome.predictions.items()
    if outcome.row["device"] == "virtual":
        shown.add_column("simulated", justify="right")
    else:
        rows.append(predicted)
        shown.add_column("measured", justify="right")
        shown.add_column(f"predicted for\n{machine}", justify="right")
    for heading, (column, form) in ROWS.items():
        values = [row.get(column) for row in rows]
        if any(value is not None for value in values):
            shown.add_row(heading, *(_show(value, form) for value in values))
    return shown


def drafts(log: RunLog) -> str:
    """Return how many tokens were drafted, and how many of them were accepted."""
    rows = log.by_request
    tokens, rejected = (each[rows.prefills == 0] for each in (rows.tokens, rows.rejected))
    drafted, accepted = tokens - 1, tokens - 1 - rejected
    if not drafted.any():
        return f"Drafted nothing in {len(tokens):,} decode steps: no end of the text had occurred before."
    steps = np.bincount(accepted[drafted > 0])
    lengths = ", ".join(f"{length} in {count:,}" for length, count in enumerate(steps.tolist()) if count)
    return (
        f"Drafted {drafted.sum():,} tokens in {(drafted > 0).sum():,} of {len(tokens):,} decode steps and accepted "
        f"{accepted.sum():,} ({accepted.sum() / drafted.sum():.0%}): {(1 + accepted).mean():.2f} tokens a step. "
        f"Accepted, by step that drafted: {lengths}."
    )


def typed_again(*more: str) -> str:
    """Return the command that runs, so that it can be run again: it replaces what it has written.

    more: an option and its value, where the command has it not.
    """
    typed = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    added = more if more and not any(word.split("=")[0] == more[0] for word in typed) else ()
    return shlex.join(["moe-replay", *typed, *added, "--overwrite"])


def title(outcome: Outcome) -> str:
    row = outcome.row
    machine = row["device_name"] or f"a logical clock for {row['hardware']}"
    ran = f"{row['requests']} requests of {row['trace']}, {row['tokens']:,} tokens"
    return f"{row['model']} on {row['device']} ({machine}), {cell_text(row)} of the experts: {ran}"


def notes(outcome: Outcome) -> list[str]:
    """Return what a reader of the figures must know."""
    row = outcome.row
    lines = [
        f"on another machine, {machine}, the simulator says {_ms(ms)} ms a token"
        for machine, other in list(outcome.predictions.items())[1:]
        if (ms := other["tpot_mean_ms"]) is not None
    ]
    if (others := row.get("others_processors") or 0.0) > QUIET:
        lines.append(
            f"other programs took {others:.1f} processors during the run ({row['other_program']} most), which slows it"
        )
    if row["device"] == "cpu":
        lines.append("on the cpu device the link is memcpy and the GPU is this CPU")
    if row.get("computed_in"):
        lines.append(packed(row["computed_in"], outcome.layer_bytes or [row["expert_bytes"]]))
    if row.get("past_cache") is False:
        lines.append(
            "the file is read through the operating system's page cache, since its file system knows no direct reads: "
            "the link's figures may be those of memory"
        )
    if row.get("fallbacks"):
        lines.append(f"launched kernel by kernel, and slower: {row['fallbacks']}")
    experts = row["all_experts"]
    distinct = row.get("host_experts") or experts
    if distinct < experts:
        size = distinct * row["expert_bytes"]
        flattered = ": the host's caches may flatter the link" if size < AMPLE_HOST_BYTES else ""
        lines.append(f"--host-dedup: {experts} experts share {distinct} host buffers, {show_bytes(size)}{flattered}")
    return lines


def packed(dtype: str, sizes: Sequence[int]) -> str:
    """Return what is moved and what is computed of packed experts of these bytes."""
    least, most = (show_bytes(size) for size in (min(sizes), max(sizes)))
    each = f"{most} each" if least == most else f"{least} to {most} each, by layer"
    return (
        f"experts travel packed, {each}; what is computed is {dtype}, on matrices of their shape that lie ready: "
        "nothing is unpacked"
    )


def _show(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return form.format(value) if form else f"{value / 1e6:,.1f}"
