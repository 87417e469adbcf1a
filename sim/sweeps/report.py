"""What a sweep says on the terminal: warnings before it, a table after it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.table import Table

from policies.core.spec import PolicySpec
from sim.quantities import show_bytes, show_share
from sim.results import compare
from sim.results.metrics import Row, size_text
from sim.sweeps.grid import Grid, Outcome
from sim.sweeps.setup import Loaded

BEST, EQUAL = "best", "equal"


def warnings(loaded: Loaded, grid: Grid) -> list[str]:
    """Cache sizes and memories that are too small or too large for the model, and policies of unknown cost."""
    found = [
        f"a cache of {text} is larger than all {loaded.all_experts:,} experts: it holds them all (100%)"
        for text in grid.sizes
        if loaded.exceeds(text)
    ]
    demand = loaded.token_experts
    shared = not all(policy.scope.cls.per_layer for policy in grid.policies)  # a layer's slots are used once a token
    sizes = [loaded.experts_in(room) for room in grid.sizes.values()]
    for slots in sizes if shared and loaded.trace.phases != "prefill" else ():
        if slots < demand:
            none = slots <= demand - loaded.trace.top_k
            found.append(
                f"a cache of {slots} experts is below the working set of one token ({demand} experts): LRU evicts "
                f"experts before their next use{' and never hits' if none else ''}"
            )
    if loaded.hardware and loaded.profile:
        memory = loaded.hardware.memory_gib * 2**30
        for slots in sizes:
            needed = slots * loaded.mean_expert_bytes + loaded.profile.dense_bytes
            if needed > memory:
                found.append(
                    f"a cache of {slots} experts and the dense weights need {show_bytes(needed)}, "
                    f"{loaded.hardware.name} has {show_bytes(memory)}"
                )
        experts = loaded.all_experts * loaded.mean_expert_bytes
        held = loaded.hardware.host_memory_gib * 2**30
        asked = loaded.setup.host_memory
        if asked and loaded.exceeds(asked):
            found.append(f"`host_memory` {asked} is larger than all experts: it holds them all (100%)")
        if asked is None and 0 < held < experts:
            found.append(
                f"all experts take {show_bytes(experts)} of host memory, {loaded.hardware.name} has "
                f"{show_bytes(held)}: `host_memory` puts a disk below it"
            )
    if loaded.hardware and loaded.hardware.measured and loaded.profile and not loaded.measured:
        known = ", ".join(f"{each.model} ({each.expert_bytes} bytes an expert)" for each in loaded.hardware.measured)
        size = loaded.profile.expert_bytes if loaded.sizes is None else "experts of several sizes"
        asked = f"{loaded.profile.name} ({size})"
        found.append(f"{loaded.hardware.name} was measured with {known}, not with {asked}: times go by its rates")
    costless = [policy.text for policy in grid.policies if loaded.predictor_us(policy) is None]
    if loaded.hardware and costless:
        found.append(f"no measured policy overhead for {', '.join(costless)}: assuming 0 (set `predictor_us`)")
    return found


def sizes_note(loaded: Loaded, grid: Grid, cache_sizes: Iterable[str]) -> Iterator[str]:
    """Yield a note on each size, as given, that is not run since it holds as many experts as another one."""
    held = {loaded.experts_in(room): text for text, room in grid.sizes.items()}
    for text in dict.fromkeys(cache_sizes):
        if text not in grid.sizes:
            experts = loaded.experts_in(loaded.slots(text))
            yield f"a cache of {text} holds {experts} experts, as many as one of {held[experts]}, which alone is run"


def untimed_note(loaded: Loaded, policies: Iterable[PolicySpec]) -> Iterator[str]:
    """Yield a note on policies that an untimed run does not run whole."""
    partly = [policy.text for policy in policies if policy.prefetches or policy.uses_host]
    if partly and not loaded.hardware:
        yield (
            "untimed runs neither prefetch nor compute on the host: "
            f"of {', '.join(partly)} only the eviction policy counts"
        )


def shown(outcome: Outcome) -> Iterator[str | Table]:
    """What was run on what, the table, and what its marks mean. The results of `outcome` are on disk."""
    played = compare.read(outcome.table.folder)
    marks = _marks(outcome, played)
    yield _title(outcome)
    yield _table(outcome, marks)
    if EQUAL in marks.values():
        yield equal_note(played[0], outcome.judged_by)


def equal_note(cell: compare.SweptRun, judged_by: str) -> str:
    """Return what EQUAL means in a sweep of which `cell` is one."""
    few = cell.requests[compare.OF_A_REQUEST[judged_by]].count() < compare.FEWEST
    note = f"; fewer than {compare.FEWEST} requests show no difference" if few else ""
    noise = f"the noise ({compare.CONFIDENCE:.0%}, paired over requests)"
    return f"{EQUAL}: differs from the best mean by no more than {noise}{note}"


def _title(outcome: Outcome) -> str:
    first, loaded = outcome.rows[0], outcome.table.loaded
    machine = f" on {loaded.hardware.title}" if loaded.hardware else ", untimed"
    played = f"{first['requests']} requests of {first['trace']}, {first['tokens']:,} tokens"
    return f"{first['model']}{machine}: {played}"


def _table(outcome: Outcome, marks: Mapping[tuple[int, str], str]) -> Table:
    """A row per cell, those of one size together, which stands there as given."""
    latencies = _latencies(outcome.rows)
    sized = ["GiB"] if outcome.rows[0]["cache_bytes"] else []
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("cache", "experts", *sized, "policy"):
        shown.add_column(heading, justify="left" if heading in ("cache", "policy") else "right", no_wrap=True)
    moved = ["MB/token"] if outcome.table.loaded.expert_bytes else []
    for heading in ("hit rate", *latencies, "idle" if latencies else "misses", *moved, ""):
        shown.add_column(heading, justify="right", no_wrap=True)
    asked = {slots: text for text, slots in outcome.table.grid.sizes.items()}
    typed = [asked[slots] for _, slots in outcome.table.grid.asked()]
    for size, row, following in zip(typed, outcome.rows, [*typed[1:], None], strict=True):
        mark = marks.get((row["cache_experts"], row["policy"]), "oracle" if row["oracle"] else "")
        cells = [size, size_text(row)]
        cells += [f"{row['cache_bytes'] / 2**30:.3g}"] if sized else []
        cells += [row["policy"], show_share(row["hit_rate"])]
        cells += [f"{row[column]:,.2f}" for column in latencies.values()]
        cells.append(_idle(row) if latencies else f"{row['misses']:,}")
        if moved:
            cells.append(_megabytes((row["bytes_demand"] + row["bytes_prefetch"]) / row["tokens"]))
        style = {BEST: "bold green", EQUAL: "green"}.get(mark)
        shown.add_row(*cells, mark, style=style, end_section=following != size)
    return shown


def _marks(outcome: Outcome, played: Sequence[compare.SweptRun]) -> dict[tuple[int, str], str]:
    """What stands beside a size and policy: BEST, or EQUAL for each of several within the noise."""
    causal = {(row["cache_experts"], row["policy"]) for row in outcome.rows if not row["oracle"]}
    marks = {}
    for winner in outcome.winners:
        here = [each for each in played if each.cache_experts == winner.cache_experts]
        best = next(each for each in here if each.policy == winner.policy)
        others = [each for each in here if each is not best and (each.cache_experts, each.policy) in causal]
        equal = compare.indistinct(best, others, outcome.judged_by)
        for each in (best, *equal):
            marks[each.cache_experts, each.policy] = EQUAL if equal else BEST
    return marks


def _latencies(rows: list[Row]) -> dict[str, str]:
    """Headings and their columns, as far as the rows have them."""
    offered = {"TTFT ms": "ttft_mean_ms", "TPOT ms": "tpot_mean_ms", "p99": "tpot_p99_ms"}
    return {heading: column for heading, column in offered.items() if all(row[column] is not None for row in rows)}


def _idle(row: Row) -> str:
    """The share of the time in which the GPU waited for weights."""
    elapsed = row["gpu_idle_ms"] + row["compute_busy_ms"]
    return show_share(row["gpu_idle_ms"] / elapsed if elapsed else None)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f}" if size >= 1e7 else f"{size / 1e6:.3g}"
