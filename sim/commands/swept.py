"""The table that `moe-sim sweep` prints of each trace and machine."""

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from sim.loaded import TimedRun
from sim.quantities import show_share
from sim.results.compare import SweptRun
from sim.results.metrics import Row, size_text
from sim.sweeps import report
from sim.sweeps.grid import Outcome


def shown(outcome: Outcome, runs: Sequence[SweptRun]) -> Iterator[str | Table]:
    """Yield what was run on what, the table, and what its marks mean. runs: those of the rows."""
    marks = report.marks(outcome, runs)
    yield _title(outcome)
    yield _table(outcome, marks)
    if report.EQUAL in marks.values():
        yield report.equal_note(runs[0], outcome.judged_by)


def _title(outcome: Outcome) -> str:
    first, loaded = outcome.rows[0], outcome.table.loaded
    machine = f" on {loaded.hardware.title}" if isinstance(loaded, TimedRun) else ", untimed"
    played = f"{first['requests']} requests of {first['trace']}, {first['tokens']:,} tokens"
    return f"{first['model']}{machine}: {played}"


def _table(outcome: Outcome, marks: Mapping[tuple[int, str], str]) -> Table:
    """A row per cell, those of one size together, which stands there as stated."""
    latencies = _latencies(outcome.rows)
    sized = ["GiB"] if outcome.rows[0]["cache_bytes"] else []
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("cache", "experts", *sized, "policy"):
        shown.add_column(heading, justify="left" if heading in ("cache", "policy") else "right", no_wrap=True)
    moved = ["MB/token"] if outcome.table.loaded.expert_bytes else []
    for heading in ("hit rate", *latencies, "idle" if latencies else "misses", *moved, ""):
        shown.add_column(heading, justify="right", no_wrap=True)
    stated = {slots: text for text, slots in outcome.table.grid.sizes.items()}
    typed = [stated[slots] for _, slots in outcome.table.grid.requested()]
    for size, row, following in zip(typed, outcome.rows, [*typed[1:], None], strict=True):
        mark = marks.get((row["cache_experts"], row["policy"]), "oracle" if row["oracle"] else "")
        cells = [size, size_text(row)]
        cells += [f"{row['cache_bytes'] / 2**30:.3g}"] if sized else []
        cells += [row["policy"], show_share(row["hit_rate"])]
        cells += [f"{row[column]:,.2f}" for column in latencies.values()]
        cells.append(_idle(row) if latencies else f"{row['misses']:,}")
        if moved:
            cells.append(_megabytes((row["bytes_demand"] + row["bytes_prefetch"]) / row["tokens"]))
        style = {report.BEST: "bold green", report.EQUAL: "green"}.get(mark)
        shown.add_row(*cells, mark, style=style, end_section=following != size)
    return shown


def _latencies(rows: list[Row]) -> dict[str, str]:
    offered = {"TTFT ms": "ttft_mean_ms", "TPOT ms": "tpot_mean_ms", "p99": "tpot_p99_ms"}
    return {heading: column for heading, column in offered.items() if all(row[column] is not None for row in rows)}


def _idle(row: Row) -> str:
    elapsed = row["gpu_idle_ms"] + row["compute_busy_ms"]
    return show_share(row["gpu_idle_ms"] / elapsed if elapsed else None)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f}" if size >= 1e7 else f"{size / 1e6:.3g}"
