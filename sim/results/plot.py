"""The figures of results, in one style: those of a sweep, of README, notebooks and report.

Colours are distinct without colour vision (Okabe and Ito), and each goes with a marker of its own; a policy has the
same ones in all figures, and nothing else has them: parts of a time and measurements have others.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from policies.core.grammar import pieces, policy_title
from sim.loop.log import STALLS
from sim.results.files import write_figures
from sim.results.metrics import Row, size_text
from traces.errors import unknown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from sim.results.compare import Difference

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
BOUND_COLOUR = "#777777"

PARTS = {
    "compute": ("#B8B8B8", "", "compute"),
    "demand": ("#5E3C99", "///", "wait for a miss"),
    "late": ("#9C7BC9", "...", "wait for a late prefetch"),
    "behind_prefetch": ("#CDB9E6", "xxx", "wait behind another prefetch"),
    "predictor": ("#7F2F3B", "\\\\\\", "policy overhead"),
    "host": ("#5F6B2D", "++", "wait for the CPU"),
    "disk": ("#2F5D62", "oo", "wait for the disk"),
    "slot": ("#A8B5B2", "**", "wait for a slot"),
}
"""Colour, hatch and title of what a time is made of: computing, and the causes of stalls."""

MEASURED: dict[str, Any] = {"color": "#444444", "marker": "D", "markersize": 5, "linestyle": "none"}
PREDICTED: dict[str, Any] = {**MEASURED, "marker": "o", "markerfacecolor": "white"}

Span = tuple[float, float]
Spans = Mapping[tuple[str, int], Span]
"""Intervals by policy and cache size in experts."""

NO_SPANS: Spans = MappingProxyType({})
WIDTH = 5.2
"""Of a figure, in inches."""
BOUND: dict[str, Any] = {"color": BOUND_COLOUR, "linestyle": "--", "linewidth": 1.3, "label": "belady (oracle)"}
FLOOR: dict[str, Any] = {"color": BOUND_COLOUR, "linestyle": "-.", "linewidth": 1.3, "label": "physical floor"}
DEMAND: dict[str, Any] = {"color": BOUND_COLOUR, "linestyle": ":", "linewidth": 1, "label": "working set of one token"}

DRAWN = {
    "hit_rate": ("hit_rate.png", "hit rate"),
    "tpot_mean_ms": ("tpot.png", "mean time per output token (ms)"),
    "ttft_mean_ms": ("ttft.png", "mean time to first token (ms)"),
}
"""Columns of results that there is a plot of: its file, its axis."""

USERS = "users.png"

BELADY = "belady"

FIXED = ("lru", "eamc", "eamc-blend", "lfu", "lrfu")
"""Policies that have the first colours; others get those that are left, in the order in which they come."""

LABELS_APART = 0.07
"""Of an axis' height, between two labels beside it."""

BINS = 200
"""Groups of steps that a figure of a long run shows."""


def figure(
    rows: Sequence[Row],
    bound: Sequence[Row],
    demand: float,
    column: str,
    floor: Sequence[Row] = (),
    spans: Spans = NO_SPANS,
) -> "Figure":
    """Return one column of the results against cache size, with intervals where there are any.

    floor: rows below which no policy gets in that column.
    """
    if column not in DRAWN:
        raise unknown("column", column, DRAWN)
    first = rows[0]
    machine = f" on {first['hardware']}, simulated" if first["hardware"] else ""
    title = f"{first['model']}{machine}\n{first['requests']} requests of {first['trace']}"
    drawing, axes = single((WIDTH, 3.8), title, "cache size (% of all experts)")
    axes.set_ylabel(DRAWN[column][1])
    policies = {row["policy"]: row["oracle"] for row in rows if row["policy"] != BELADY}
    styles = looks(policies)
    for policy, oracle in policies.items():
        points = _points([row for row in rows if row["policy"] == policy], column)
        axes.plot(*points, **styles[policy], label=wrapped(policy_title(policy, oracle), 18), linestyle="none")
        for row in rows:
            if row["policy"] == policy and (ends := spans.get((policy, row["cache_experts"]))):
                low, high = (abs(end - row[column]) for end in ends)
                style = {"color": styles[policy]["color"], "linewidth": 1, "capsize": 4, "label": "_"}
                axes.errorbar(100 * row["cache_fraction"], row[column], [[low], [high]], **style)
    if bound:
        axes.plot(*_points(bound, column), **{**BOUND, "linestyle": "none"}, marker="_", markersize=10)
    if floor:
        axes.plot(*_points(floor, column), **{**FLOOR, "linestyle": "none"}, marker="_", markersize=10)
    if any(row["phase"] != "prefill" for row in rows):
        axes.axvline(100 * demand, **{**DEMAND, "label": "_"})
        axes.annotate(DEMAND["label"], (100 * demand, 1), xycoords=("data", "axes fraction"), **_BESIDE_A_LINE)
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1 if column == "hit_rate" else None)
    if first["cache_bytes"]:
        gib = first["cache_bytes"] / first["cache_fraction"] / 100 / 2**30  # of a percent
        top = axes.secondary_xaxis("top", functions=(lambda x: x * gib, lambda x: x / gib))
        top.set_xlabel("GiB", fontsize=8)
        top.tick_params(labelsize=8)
    _label_directly(axes)
    return drawing


_BESIDE_A_LINE: dict[str, Any] = {
    "xytext": (3, -3),
    "textcoords": "offset points",
    "rotation": 90,
    "va": "top",
    "fontsize": 7,
    "color": BOUND_COLOUR,
}


_TO_A_POINT: dict[str, Any] = {
    "arrowstyle": "-",
    "linewidth": 0.5,
    "alpha": 0.6,
    "relpos": (0, 0.5),
    "patchA": None,  # from the text's edge on: to clip the line there takes longer than to draw the plot
    "shrinkA": 2,
    "shrinkB": 2,
}


def _label_directly(axes: "Axes") -> None:
    drawn = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    ends = [(float(np.asarray(line.get_xdata())[-1]), float(np.asarray(line.get_ydata())[-1])) for line in drawn]
    (low, high), place, places = axes.get_ylim(), -1.0, {}
    for height, i in sorted(((y - low) / (high - low), i) for i, (_, y) in enumerate(ends)):
        place = places[i] = max(height, place + LABELS_APART)
    for i, (line, end) in enumerate(zip(drawn, ends, strict=True)):
        axes.annotate(
            str(line.get_label()).strip(),
            end,
            (1.03, places[i] - max(0.0, place - 1)),
            textcoords="axes fraction",
            arrowprops={"color": line.get_color(), **_TO_A_POINT},
            color=line.get_color(),
            va="center",
            fontsize=8,
            annotation_clip=False,
        )


def steps(table: "pd.DataFrame", title: str) -> "Figure":
    """Return a figure of where the time of each step went; of untimed steps, the hit rate.

    table: from `sim.results.steps.frame`. Many steps are shown as the means of `BINS` groups.
    """
    drawing, axes = single((WIDTH, 3.8), title, "step")
    group = np.arange(len(table)) * min(BINS, len(table)) // max(1, len(table))
    means = table.select_dtypes("number").groupby(group).mean()
    at = pd.Series(table.index).groupby(group).mean()
    if not table["step_ms"].any():
        axes.set_ylabel("hit rate")
        axes.plot(at, means["hits"] / means[["hits", "late", "misses"]].sum(axis=1), color=COLOURS[0])
        axes.set_ylim(0, 1)
        return drawing
    columns = {"compute": "compute_busy_ms"}
    columns |= {cause: name for cause in STALLS if means[name := f"stall_{cause}_ms"].any()}
    colours, _, labels = zip(*(PARTS[part] for part in columns), strict=True)
    axes.stackplot(at, *(means[name] for name in columns.values()), labels=labels, colors=colours)
    axes.set_ylabel("time of a step (ms)")
    axes.set_ylim(bottom=0)
    drawing.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return drawing


def draw_users(tables: "dict[str, list[Row]]", folder: Path) -> list[Path]:
    """Write users.png where numbers of users differ: throughput and latency against how many requests run at a time."""
    if len({row["max_batch"] for rows in tables.values() for row in rows} - {None}) < 2:
        return []
    return write_figures({USERS: partial(users, tables)}, folder)


def users(tables: "dict[str, list[Row]]") -> "Figure":
    """Return tokens a second, and the mean time between two tokens of a request, against requests at a time.

    tables: rows by what they were run on, which labels them where there are several.
    """
    columns = {"tokens_per_s": "tokens per second, all requests", "tpot_mean_ms": "mean time per output token (ms)"}
    groups: dict[tuple[str, ...], list[Row]] = {}
    for source, rows in tables.items():
        for row in rows:
            policy = policy_title(row["policy"], row["oracle"])
            key = policy, size_text(row), *([source] if len(tables) > 1 else [])
            groups.setdefault(key, []).append(row)
    everywhere = [{row[name] for rows in tables.values() for row in rows} for name in ("model", "trace")]
    title = ", ".join(name for names in everywhere if len(names) == 1 for name in names)
    drawing, grid = panels([title, title], "requests at a time", (9, 4.2), share=False)
    for axes, (column, label) in zip(grid, columns.items(), strict=True):
        axes.set_ylabel(label)
        for i, (names, own) in enumerate(groups.items()):
            points = sorted((row["max_batch"], row[column]) for row in own)
            axes.plot(*zip(*points, strict=True), **look(i), linewidth=1.6, label=wrapped(", ".join(names)))
        axes.set_ylim(bottom=0)
    handles, labels = axes.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return drawing


def single(
    size: tuple[float, float], title: str, xlabel: str, grid: Literal["x", "both"] = "both"
) -> "tuple[Figure, Axes]":
    drawing, (axes,) = panels([title], xlabel, size, grid)
    return drawing, axes


def looks(policies: Iterable[str]) -> dict[str, dict[str, Any]]:
    names = list(dict.fromkeys(policies))
    places = {name: FIXED.index(name) for name in names if name in FIXED}
    others = (place for place in count() if place not in places.values())
    return {name: look(places.get(name, -1) if name in places else next(others)) for name in names}


def look(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 5}


def wrapped(policy: str, width: int = 28) -> str:
    """Return a policy's text, broken before its options so that it fits into a legend.

    A space stands before what begins with an underscore, which matplotlib leaves out of legends.
    """
    lines = [""]
    for part in pieces(policy):
        lines[-1:] = [lines[-1] + part] if len(lines[-1]) + len(part) <= width else [lines[-1], part]
    text = "\n".join(filter(None, lines))
    return f" {text}" if text.startswith("_") else text


def _points(rows: Sequence[Row], column: str) -> tuple[list[float], list[float]]:
    ordered = sorted((row for row in rows if row[column] is not None), key=lambda row: row["cache_experts"])
    return [100 * row["cache_fraction"] for row in ordered], [row[column] for row in ordered]


def panels(
    titles: Sequence[str],
    xlabel: str,
    size: tuple[float, float] | None = None,
    grid: Literal["x", "both"] = "both",
    share: bool = True,
    height: float = 3.4,
) -> "tuple[Figure, list[Axes]]":
    """Return a figure of small multiples side by side, three in a row, whose scales are shared if `share`."""
    from sim.results.drawing import Drawing

    columns = min(3, max(1, len(titles)))
    lines = -(-len(titles) // columns)
    drawing = Drawing(figsize=size or (max(WIDTH, 3.4 * columns + 1.2), height * lines), layout="constrained")
    every = drawing.subplots(lines, columns, sharex=share, sharey=share, squeeze=False).ravel().tolist()
    for axes, title in zip(every, titles, strict=False):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(xlabel)
        axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in every[len(titles) :]:
        axes.set_visible(False)
    return drawing, every[: len(titles)]


def stacked(bars: "dict[str, dict[str, float]]", xlabel: str, title: str) -> "Figure":
    drawing, axes = single((WIDTH, 1.8 + 0.26 * len(bars)), title, xlabel, "x")
    left = np.zeros(len(bars))
    for part in (part for part in PARTS if any(part in parts for parts in bars.values())):
        widths = np.array([parts.get(part, 0.0) for parts in bars.values()])
        style: dict[str, Any] = dict(zip(("color", "hatch", "label"), PARTS[part], strict=True))
        axes.barh(list(bars), widths, left=left, linewidth=0.5, edgecolor="white", **style)
        left += widths
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlim(left=0)
    drawing.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return drawing


def ranking(
    title: str, differences: "Sequence[Difference]", policies: Sequence[str], unit: str, scale: Span
) -> "Figure":
    """Return the differences to the best policy with their intervals. policies: all, for their colours."""
    drawing, axes = single((WIDTH, 1.5 + 0.35 * len(differences)), title, unit, "x")
    styles = looks([*policies, *(each.cell for each in differences)])
    axes.axvline(0, **{**BOUND, "label": "the best policy"})
    for i, each in enumerate(differences):
        ends = [[each.more - each.low], [each.high - each.more]]
        axes.errorbar([each.more], [i], xerr=ends, capsize=3, linestyle="none", **styles[each.cell])
    several = len({each.cache_experts for each in differences}) > 1
    names = [wrapped(each.cell, 20) + (f"\n{each.cache_experts:,} experts" if several else "") for each in differences]
    axes.set_yticks(range(len(differences)), names, fontsize=8)
    axes.set_ylim(len(differences) - 0.5, -0.5)
    room = 0.05 * (scale[1] - scale[0])
    axes.set_xlim(scale[0] - room, scale[1] + room)
    return drawing


def predicted_and_measured(pairs: "dict[str, tuple[float, float, float, float]]", unit: str) -> "Figure":
    """Return predicted, at least, at most and measured, by name."""
    drawing, axes = single((WIDTH, 1.5 + 0.4 * len(pairs)), "predicted against measured", unit, "x")
    for i, (predicted, low, high, measured) in enumerate(pairs.values()):
        ends = [[max(0.0, predicted - low)], [max(0.0, high - predicted)]]
        axes.errorbar([predicted], [i - 0.1], xerr=ends, capsize=3, label="_" if i else "predicted", **PREDICTED)
        axes.plot([measured], [i + 0.1], label="_" if i else "measured", **MEASURED)
    axes.set_yticks(range(len(pairs)), [textwrap.fill(name, 24) for name in pairs], fontsize=8)
    axes.set_ylim(len(pairs) - 0.5, -0.5)
    axes.set_xlim(left=0)
    drawing.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return drawing


def _legend_below(drawing: "Figure", grid: "Sequence[Axes]") -> None:
    handles: dict[str, Any] = {}
    for axes in grid:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    letters = drawing.get_figwidth() * 14  # of this size in a line
    columns = int(letters // (6 + max(map(len, handles), default=0)))
    style: dict[str, Any] = {"ncols": min(4, max(1, columns)), "frameon": False, "fontsize": 8}
    drawing.legend(list(handles.values()), list(handles), loc="outside lower center", **style)


def line_panels(held: "dict[str, dict[str, tuple[Any, Any]]]", xlabel: str, ylabel: str) -> "Figure":
    """Return lines by panel and name, as x and y; one called belady is the bound."""
    drawing, grid = panels(list(held), xlabel)
    names = [name for name in dict.fromkeys(name for each in held.values() for name in each) if name != BELADY]
    styles = looks(names)
    for axes, each in zip(grid, held.values(), strict=True):
        for name, (x, y) in each.items():
            style = BOUND if name == BELADY else {**styles[name], "linewidth": 1.6, "label": wrapped(name)}
            axes.plot(x, y, **style)
    grid[0].set_ylabel(ylabel)
    _legend_below(drawing, grid)
    return drawing
