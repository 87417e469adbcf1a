"""What a sweep says on the terminal: warnings before it, a progress bar, a table after it."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich import box
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Task as ProgressTask
from rich.table import Column, Table
from rich.text import Text

from sim.engines import compiling
from sim.quantities import show_bytes
from sim.results.metrics import Row
from sim.sweep.grid import Grid, Outcome
from sim.sweep.setup import Loaded
from sim.sweep.workers import Advance
from traces import console


def warnings(loaded: Loaded, grid: Grid) -> list[str]:
    """Cache sizes below one token's demand or above the GPU's memory, and policies whose cost is unknown."""
    found = []
    demand = loaded.token_experts
    shared = not all(policy.scope.cls.per_layer for policy in grid.policies)  # a layer's slots are used once a token
    for slots in grid.sizes.values() if shared and loaded.trace.phases != "prefill" else ():
        if slots < demand:
            none = slots <= demand - loaded.trace.top_k
            found.append(
                f"a cache of {slots} experts is below one token's demand of {demand}: what is kept by "
                f"recency goes before its next use{', LRU hits nothing' if none else ''}"
            )
    if loaded.hardware and loaded.profile:
        memory = loaded.hardware.memory_gib * 2**30
        for slots in grid.sizes.values():
            needed = slots * loaded.profile.expert_bytes + loaded.profile.dense_bytes
            if needed > memory:
                found.append(
                    f"a cache of {slots} experts and the dense weights need {show_bytes(needed)}, "
                    f"{loaded.hardware.name} has {show_bytes(memory)}"
                )
    costless = [policy.text for policy in grid.policies if loaded.predictor_us(policy) is None]
    if loaded.hardware and costless:
        found.append(
            f"nobody has measured what {', '.join(costless)} costs an event: it is free unless --predictor-us says more"
        )
    return found


class _Compiling(ProgressColumn):
    """What else is going on."""

    def render(self, task: ProgressTask) -> Text:
        return Text(compiling.words(), style="dim")


@contextmanager
def progress(total: int, quiet: bool, what: str = "requests") -> Iterator[Advance]:
    """A bar on standard error that counts requests played, or other things; yields what advances it."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(f"{what} played"), TimeRemainingColumn(), _Compiling())
    with Progress(*columns, console=console.err, disable=quiet, transient=True) as bar:
        task = bar.add_task("played", total=total)
        yield lambda played: bar.advance(task, played)


def title(outcome: Outcome) -> str:
    """What was played on what."""
    first, loaded = outcome.rows[0], outcome.table.loaded
    machine = f" on {loaded.hardware.title}" if loaded.hardware else ", untimed"
    played = f"{first['requests']} requests of {first['trace']}, {first['tokens']:,} tokens"
    return f"{first['model']}{machine}: {played}"


def table(outcome: Outcome) -> Table:
    """A row per cell, those of one size together, the recommended ones marked."""
    latencies = _latencies(outcome.rows)
    shown = Table("cache", Column("policy", overflow="fold"), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    moved = ["MB/token"] if outcome.table.loaded.expert_bytes else []
    for heading in ("hit rate", *latencies, "idle" if latencies else "misses", *moved, ""):
        shown.add_column(heading, justify="right", no_wrap=True)
    best = {(winner.cache_experts, winner.policy) for winner in outcome.winners}
    for row, following in zip(outcome.rows, [*outcome.rows[1:], None], strict=True):
        wins = (row["cache_experts"], row["policy"]) in best
        cells = [_size(row), row["policy"], _share(row["hit_rate"])]
        cells += [f"{row[column]:,.2f}" for column in latencies.values()]
        cells.append(_idle(row) if latencies else f"{row['misses']:,}")
        if moved:
            cells.append(_megabytes((row["bytes_demand"] + row["bytes_prefetch"]) / row["tokens"]))
        last = following is None or following["cache_experts"] != row["cache_experts"]
        note = "best" if wins else "oracle" if row["oracle"] else ""
        shown.add_row(*cells, note, style="bold green" if wins else None, end_section=last)
    return shown


def _latencies(rows: list[Row]) -> dict[str, str]:
    """Headings and their columns, as far as the rows have them."""
    offered = {"TTFT ms": "ttft_mean_ms", "TPOT ms": "tpot_mean_ms", "p99": "tpot_p99_ms"}
    return {heading: column for heading, column in offered.items() if all(row[column] is not None for row in rows)}


def _size(row: Row) -> str:
    return f"{row['cache_experts']} ({100 * row['cache_fraction']:.3g}%)"


def _idle(row: Row) -> str:
    """The share of the time in which the GPU waited for weights."""
    elapsed = row["gpu_idle_ms"] + row["compute_busy_ms"]
    return _share(row["gpu_idle_ms"] / elapsed if elapsed else None)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f}" if size >= 1e7 else f"{size / 1e6:.3g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
