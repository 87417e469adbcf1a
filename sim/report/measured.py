"""Replays on the page: what was predicted beside what was measured. A logical clock measures nothing."""

from collections.abc import Iterator, Sequence

from sim.quantities import show_share
from sim.report.elements import Item, Section, figure_item
from sim.report.inputs import Results
from sim.results import plot
from sim.results.metrics import cell_text

VIRTUAL = "virtual"
"""The device on a logical clock, which takes what the simulator says."""


def section(replays: Sequence[Results]) -> Section:
    title, pairs, rows = "Predicted against measured", {}, []
    measured = [replay for replay in replays if any(row["device"] != VIRTUAL for row in replay.rows)]
    for replay in measured:
        for name, pair, row in _predicted(replay, f" ({replay.folder})" if len(measured) > 1 else ""):
            pairs[name] = pair
            rows.append(row)
    if not pairs:
        missing = (
            "Nothing was measured. moe-replay --from FOLDER --device disk measures a sweep's winner; name its folder."
        )
        return Section(title, (Item("text", missing),))
    figure = plot.predicted_and_measured(pairs, "mean time per output token (ms)")
    head = ("run", "machine", "predicted TPOT, ms", "measured TPOT, ms", "error", "predicted hits", "measured hits")
    caption = (
        "Measured on the machine that the table names, and simulated for that one. Bars are the prediction as the "
        "machine's pace varied, where that was measured."
    )
    return Section(title, (figure_item(figure, caption), Item("table", head=head, rows=rows)))


def _predicted(replay: Results, of: str) -> Iterator[tuple[str, tuple[float, float, float, float], tuple[str, ...]]]:
    """Yield of each row its name, which ends in `of`, predicted, low, high and measured TPOT, and its table's row."""
    for row in replay.rows:
        predicted, measured = row.get("predicted_tpot_mean_ms"), row["tpot_mean_ms"]
        if predicted is None or measured is None:
            replay.note(f"{replay.folder}: nothing was predicted, or nothing decoded, to compare")
            continue
        low, high = (row.get(f"predicted_tpot_{end}_ms") or predicted for end in ("low", "high"))
        name = f"{row['device']}: {cell_text(row)}{of}"
        error = predicted / measured - 1
        hits = map(show_share, (row.get("predicted_hit_rate"), row["hit_rate"]))
        shown = (
            name,
            row["device_name"] or "not stated",
            f"{predicted:,.3f}",
            f"{measured:,.3f}",
            f"{error:+.1%}",
            *hits,
        )
        yield name, (predicted, low, high, measured), shown
