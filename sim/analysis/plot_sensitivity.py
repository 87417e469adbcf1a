"""The picture of a sensitivity: a tornado, the parameter of the largest effect on top."""

from typing import TYPE_CHECKING

from sim.results.plot import BOUND_COLOUR, COLOURS, DRAWN

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.analysis.sensitivity import Sensitivity

DRAWN_AT_MOST = 20
"""Parameters: those below are too small to be seen."""


def figure(found: "Sensitivity") -> "Figure":
    """The change of the metric, in %, for each parameter that has an effect: a bar where it is lower, one higher."""
    from matplotlib.figure import Figure

    shown = found.felt[:DRAWN_AT_MOST]
    drawing = Figure(figsize=(7, 1.6 + 0.34 * max(len(shown), 2)), layout="constrained")
    axes = drawing.add_subplot()
    for side, label, colour in ((0, "lower", COLOURS[1]), (1, "higher", COLOURS[0])):
        changes = [100 * (effect.changes[side] or 0.0) for effect in shown]
        axes.barh(range(len(shown)), changes, height=0.62, color=colour, alpha=0.85, label=f"parameter {label}")
    axes.axvline(0, color=BOUND_COLOUR, linewidth=0.8)
    axes.set_yticks(range(len(shown)), [effect.parameter.name for effect in shown])
    axes.invert_yaxis()
    axes.set_xlabel(f"change of {DRAWN[found.metric][1].removesuffix(' (ms)')} (%)")
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    row = found.row
    share = 100 * row["cache_fraction"]
    axes.set_title(f"{row['model']} on {row['hardware']}, {row['trace']}, {row['policy']} at {share:.3g}%", fontsize=9)
    drawing.legend(loc="outside lower right", ncols=2, frameon=False, fontsize=8)
    return drawing
