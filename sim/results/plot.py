"""The pictures of a sweep: hit rate and latency against cache size, with Belady as the bound."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from policies.core.grammar import pieces
from sim.loop.log import STALLS
from sim.results.files import write_figures
from sim.results.metrics import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
BOUND_COLOUR = "#777777"
BOUND: dict[str, Any] = {"color": BOUND_COLOUR, "linestyle": "--", "linewidth": 1.3, "label": "belady (bound)"}
DEMAND: dict[str, Any] = {"color": BOUND_COLOUR, "linestyle": ":", "linewidth": 1, "label": "one token's experts"}

DRAWN = {
    "hit_rate": ("hit_rate.png", "hit rate"),
    "tpot_mean_ms": ("tpot.png", "mean time per output token (ms)"),
    "ttft_mean_ms": ("ttft.png", "mean time to first token (ms)"),
}
"""Columns of results that there is a plot of: its file, its axis."""

USERS = "users.png"

BINS = 200
"""Groups of steps that a figure of a long run shows."""


def draw(rows: Sequence[Row], bound: Sequence[Row], demand: float, columns: Iterable[str], folder: Path) -> list[Path]:
    """Write a PNG for each of `columns` that is one of `DRAWN`; the files.

    `bound`: Belady's rows; `demand`: one token's experts as a share of all, below which recency is of no use.
    """
    drawn = {DRAWN[column][0]: figure(rows, bound, demand, column) for column in columns if column in DRAWN}
    return write_figures(drawn, folder)


def figure(rows: Sequence[Row], bound: Sequence[Row], demand: float, column: str) -> "Figure":
    """One column of the results against cache size."""
    first = rows[0]
    machine = f" on {first['hardware']}" if first["hardware"] else ""
    title = f"{first['model']}{machine}, {first['trace']}, {first['requests']} requests"
    with against_size(DRAWN[column][1], title) as (drawing, axes):
        policies = list(dict.fromkeys(row["policy"] for row in rows if row["policy"] != "belady"))
        for i, policy in enumerate(policies):
            points = _points([row for row in rows if row["policy"] == policy], column)
            axes.plot(*points, **look(i), label=wrapped(policy), linewidth=1.6)
        if bound:
            axes.plot(*_points(bound, column), **BOUND, marker=".")
        if any(row["phase"] != "prefill" for row in rows):
            axes.axvline(100 * demand, **DEMAND)
        axes.set_xlim(left=0)
        axes.set_ylim(0, 1 if column == "hit_rate" else None)
    return drawing


def steps(table: "pd.DataFrame", title: str) -> "Figure":
    """Return a figure of where the time of each step went; of untimed steps, the hit rate.

    table: from `sim.results.steps.frame`. Many steps are shown as the means of `BINS` groups.
    """
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 4.2), layout="constrained")
    axes = drawing.add_subplot()
    frame(axes, title, "step")
    group = np.arange(len(table)) * min(BINS, len(table)) // max(1, len(table))
    means = table.select_dtypes("number").groupby(group).mean()
    at = pd.Series(table.index).groupby(group).mean()
    if not table["step_ms"].any():
        axes.set_ylabel("hit rate")
        axes.plot(at, means["hits"] / means[["hits", "late", "misses"]].sum(axis=1), color=COLOURS[0])
        axes.set_ylim(0, 1)
        return drawing
    stalls = [f"stall_{cause}_ms" for cause in STALLS if means[f"stall_{cause}_ms"].any()]
    columns = {"compute_busy_ms": "compute", **{name: name[:-3].replace("_", " ") for name in stalls}}
    axes.stackplot(at, *(means[name] for name in columns), labels=list(columns.values()), colors=COLOURS)
    axes.set_ylabel("time of a step (ms)")
    axes.set_ylim(bottom=0)
    drawing.legend(loc="outside right upper", frameon=False, fontsize=8)
    return drawing


def draw_users(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Write users.png where numbers of users differ: throughput and latency against how many requests run at a time."""
    if len({row["max_batch"] for row in rows} - {None}) < 2:
        return []
    return write_figures({USERS: users(rows)}, folder)


def users(rows: Sequence[Row]) -> "Figure":
    """Tokens a second, and the mean time between two tokens of a request, against requests at a time."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 4.2), layout="constrained")
    columns = {"tokens_per_s": "tokens per second, all requests", "tpot_mean_ms": "mean time per output token (ms)"}
    groups: dict[tuple[str, ...], list[Row]] = {}
    differ = [name for name in ("trace", "hardware") if len({row[name] for row in rows}) > 1]
    for row in rows:
        key = row["policy"], f"{100 * row['cache_fraction']:.3g}%", *(str(row[name]) for name in differ)
        groups.setdefault(key, []).append(row)
    for axes, (column, label) in zip(drawing.subplots(1, 2), columns.items(), strict=True):
        frame(axes, f"{rows[0]['model']}, {rows[0]['trace']}", "requests at a time")
        axes.set_ylabel(label)
        for i, (told, own) in enumerate(groups.items()):
            points = sorted((row["max_batch"], row[column]) for row in own)
            axes.plot(*zip(*points, strict=True), **look(i), linewidth=1.6, label=wrapped(", ".join(told)))
        axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return drawing


@contextmanager
def against_size(ylabel: str, title: str) -> "Iterator[tuple[Figure, Axes]]":
    """A figure for what depends on the cache size, and the axes to plot on, whose legend comes last."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawing.add_subplot()
    frame(axes, title, "cache size (% of all experts)")
    axes.set_ylabel(ylabel)
    yield drawing, axes
    drawing.legend(loc="outside right upper", frameon=False, fontsize=8)


def frame(axes: "Axes", title: str, xlabel: str, grid: Literal["x", "both"] = "both", fontsize: int = 9) -> None:
    """Title and grid, no lines above and to the right."""
    axes.set_title(title, fontsize=fontsize)
    axes.set_xlabel(xlabel)
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def look(i: int) -> dict[str, Any]:
    """Colour and marker of the policy with this number."""
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5}


def wrapped(policy: str, width: int = 28) -> str:
    """A policy as typed, broken before its options so that a legend has room for it.

    A space stands before what begins with an underscore, which matplotlib leaves out of legends.
    """
    lines = [""]
    for part in pieces(policy):
        lines[-1:] = [lines[-1] + part] if len(lines[-1]) + len(part) <= width else [lines[-1], part]
    text = "\n".join(filter(None, lines))
    return f" {text}" if text.startswith("_") else text


def _points(rows: Sequence[Row], column: str) -> tuple[list[float], list[float]]:
    """Cache sizes in % and the column's values, by size."""
    ordered = sorted(rows, key=lambda row: row["cache_experts"])
    return [100 * row["cache_fraction"] for row in ordered], [row[column] for row in ordered]
