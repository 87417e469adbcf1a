"""What the page shows of one sweep: figures, and at its end the table of all cells."""

from collections.abc import Iterator, Sequence

from sim.loaded import Loaded, TimedRun, sample_text
from sim.loop.log import STALLS
from sim.report import bounds
from sim.report.elements import Item, Section, figure_item
from sim.report.inputs import Results
from sim.results import compare, plot
from sim.results.metrics import Row, cell_text, size_text, users_text
from sim.sweeps import notes, winner

BARS = 24
"""Cells in a figure of bars at most: those of the largest sizes."""


def sections(sweep: Results, several: bool) -> Iterator[Section]:
    rows, of = sweep.rows, f" ({sweep.folder.name})" if several else ""
    if not rows:
        yield Section(f"No cells{of}", (Item("text", f"{sweep.folder} holds no cells to show."),))
        return
    sections = {
        "How much memory": _against_size(sweep),
        "Which policy": _ranking(sweep),
        "Where the time goes": _time(sweep),
    }
    for title, items in sections.items():
        yield Section(f"{title}{of}", tuple(items))


def table(sweep: Results, several: bool) -> Iterator[Section]:
    """Yield what was run, and a row for each cell: the end of the page."""
    if sweep.rows:
        title = f"All cells ({sweep.folder.name})" if several else "All cells"
        yield Section(title, (Item("text", _run(sweep)), _table(sweep.rows), Item("text", " ".join(COLUMNS_MEAN))))


def _run(sweep: Results) -> str:
    first = sweep.rows[0]
    users = f", {users}" if (users := users_text(first)) else ""
    code = dict.fromkeys(row["commit"][:12] for row in sweep.rows)
    return (
        f"{where(sweep)}. {first['model']}: {first['requests']:,} requests and {first['tokens']:,} tokens of "
        f"{first['trace']}{users}; {'cold' if first['cold'] else 'warm'} between requests, "
        f"{first['warmup_requests']} requests to warm up. Made by {', '.join(code)}."
    )


def where(sweep: Results) -> str:
    """Return what the times of a sweep are: simulated on which machine, by which figures of it."""
    name = sweep.rows[0]["hardware"]
    if name is None:
        return "Counted without a clock"
    loaded = sweep.loaded
    if not isinstance(loaded, TimedRun):
        return f"Simulated on {name}"
    known = "measured rates" if loaded.hardware.calibration or loaded.hardware.measured else "data sheet"
    return f"Simulated on {loaded.hardware.title} ({known})"


def _against_size(sweep: Results) -> Iterator[Item]:
    rows, sizes = sweep.rows, list({row["cache_experts"]: row for row in sweep.rows}.values())
    bound, lowest, demand, by = [row for row in rows if row["policy"] == plot.BELADY], [], 0.0, winner.metric(rows)
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
    for column in [by] * (by in plot.DRAWN) + ["hit_rate"]:
        drawn = [row for row in rows if row[column] is not None]
        known = [row for row in bound if row.get(column) is not None]  # a bound has the hit rate alone
        floor = lowest if column == "tpot_mean_ms" else []
        if drawn:
            drawing = plot.figure(drawn, known, demand, column, floor, compare.spans(sweep.cells, column))
            yield figure_item(drawing, f"{_CAPTIONS[column]} {where(sweep)}; bars are intervals of 95%.")
    if lowest and (best := winner.best_of_sizes(rows, "tpot_mean_ms")):
        fastest = min(best, key=lambda row: row["tpot_mean_ms"])
        least = next(row for row in lowest if row["cache_experts"] == fastest["cache_experts"])
        ratio = fastest["tpot_mean_ms"] / least["tpot_mean_ms"]
        assert loaded
        sample = loaded.sampled()
        of = "" if sample is loaded else f" (of a sample: {sample_text(sample, loaded)})"
        yield Item(
            "text",
            f"At {size_text(fastest)} {fastest['policy']} takes {ratio:.2f} times the least possible time, the "
            "physical floor: the longer of computing with every expert at hand, and moving what Belady would miss"
            + of
            + ".",
        )


def _unbounded(loaded: Loaded) -> str:
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
    "tpot_mean_ms": "Mean time per output token. Between two sizes that were run it may jump.",
    "ttft_mean_ms": "Mean time to the first token. Between two sizes that were run it may jump.",
}


def _ranking(sweep: Results) -> Iterator[Item]:
    by, groups = winner.metric(sweep.rows), {}
    rows = {(row["policy"], row["cache_experts"]): row for row in sweep.rows if not row["oracle"]}
    for slots in dict.fromkeys(cell.cache_experts for cell in sweep.cells):
        here = [cell for cell in sweep.cells if cell.cache_experts == slots and (cell.policy, slots) in rows]
        here = [cell for cell in here if rows[cell.policy, slots][by] is not None]
        if len(here) < 2:
            continue
        here.sort(key=lambda cell: rows[cell.policy, slots][by])
        found = (compare.difference(here[0], cell, compare.measure_of(by)) for cell in here[1:])
        if differences := list(filter(None, found)):
            groups[f"{size_text(rows[here[0].policy, slots])}: best is {here[0].policy}"] = differences
    if not groups:
        yield Item("text", "There are fewer than two policies, or fewer than two requests, to compare at one size.")
        return
    measure = next(iter(groups.values()))[0].measure
    policies = list(dict.fromkeys(row["policy"] for row in sweep.rows))
    unit = f"{measure.meaning} ({measure.unit}), less the best policy's"
    ends = [end for differences in groups.values() for each in differences for end in (each.low, each.high, 0.0)]
    few = f", and so may all of fewer than {compare.FEWEST} requests"
    yield Item(
        "text", f"{where(sweep)}. A 95% interval (of paired requests) that reaches the dashed line may be chance{few}."
    )
    for title, differences in groups.items():
        size, _, best = title.partition(": best is ")
        caption = f"What other policies take beyond {best}, at {size} of the experts."
        yield figure_item(plot.ranking(title, differences, policies, unit, (min(ends), max(ends))), caption)


def _time(sweep: Results) -> Iterator[Item]:
    rows = sweep.rows
    timed = [row for row in rows if row["compute_busy_ms"] is not None and row["tokens"]]
    shown = sorted(timed, key=lambda row: row["cache_experts"])[-BARS:]
    if not shown:
        yield Item("text", "Nothing was timed.")
        return
    stalls = {
        cell_text(row): {
            "compute": row["compute_busy_ms"] / row["tokens"],
            **{
                cause: row[f"stall_{cause}_ms"] / row["tokens"]
                for cause in STALLS
                if any(each[f"stall_{cause}_ms"] for each in shown)
            },
        }
        for row in shown
    }
    caption = f"Of all steps, over all tokens, prompts included: computing, and what it waited for. {where(sweep)}."
    yield figure_item(plot.stacked(stalls, "ms a token, prompts included", "compute and stalls"), caption)


def _table(rows: Sequence[Row]) -> Item:
    known = notes.columns(rows)
    head = [name.replace("\n", " ") for name in known]
    return Item("table", head=head, rows=list(zip(*known.values(), strict=True)))


COLUMNS_MEAN = (
    "Hits and times are of all requests together.",
    *(f"{text[0].upper()}{text[1:]}." for text in notes.GAPS),
    "Tokens/s: decoded ones over all time, also that of prompts. MB a token: over all tokens, also those of prompts.",
)
