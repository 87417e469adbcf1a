"""The picture of a comparison: per cell the residual of each token, and all cells' measured against predicted."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from policies.core.grammar import policy_title
from sim.results.files import write_figure
from sim.results.metrics import Row, cell_text
from sim.results.plot import BOUND_COLOUR, COLOURS, frame
from traces.steps import DECODE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

NAME = "residuals.png"
ACROSS = 3
PANEL_INCHES = (4.0, 2.2)
SCATTER_INCHES = 4.6


def draw(cells: Sequence[Row], folder: Path) -> None:
    """Write residuals.png of recorded cells, whose tokens lie in `folder`."""
    steps = [pd.read_csv(folder / cell["per_token"]) for cell in cells]
    tokens = [each[(each["phase"] == DECODE) & each["counted"].astype(bool)] for each in steps]
    write_figure(figure(cells, tokens), folder / NAME)


def figure(cells: Sequence[Row], tokens: Sequence[pd.DataFrame]) -> "Figure":
    """Draw cells. tokens: of each, measured_ns and predicted_ns of the counted decode steps in order."""
    from matplotlib.figure import Figure

    across = min(ACROSS, len(cells))
    down = -(-len(cells) // across)
    width, height = max(across * PANEL_INCHES[0], SCATTER_INCHES + 2), down * PANEL_INCHES[1]
    drawing = Figure(figsize=(width, height + SCATTER_INCHES), layout="constrained")
    panels, below = drawing.subfigures(2, 1, squeeze=False, height_ratios=[height, SCATTER_INCHES])[:, 0]
    axes = panels.subplots(down, across, squeeze=False).ravel()
    for place, cell, steps in zip(axes, cells, tokens, strict=False):
        _residuals(place, cell, steps)
    for place in axes[len(cells) :]:
        place.set_visible(False)
    panels.supylabel("predicted - measured (ms)", fontsize=9)
    panels.supxlabel("decoded token", fontsize=9)
    _scatter(below, cells, tokens)
    return drawing


def _residuals(axes: "Axes", cell: Row, tokens: pd.DataFrame) -> None:
    residual = (tokens["predicted_ns"] - tokens["measured_ns"]) / 1e6
    axes.plot(range(len(residual)), residual, ".", color=COLOURS[0], markersize=2.5)
    axes.axhline(0, color=BOUND_COLOUR, linewidth=0.8)
    frame(axes, f"{cell_text(cell)}, {cell['mode']}\nTPOT mean {cell['errors']['tpot_mean']:+.1%}", "", fontsize=7)
    axes.tick_params(labelsize=7)


def _scatter(below: "SubFigure", cells: Sequence[Row], tokens: Sequence[pd.DataFrame]) -> None:
    """Give each policy a colour; on the line the prediction is exact."""
    axes = below.subplots()
    titles = [policy_title(cell["policy"], cell["oracle"]) for cell in cells]
    policies = list(dict.fromkeys(titles))
    for title, steps in zip(titles, tokens, strict=True):
        colour = COLOURS[policies.index(title) % len(COLOURS)]
        axes.plot(steps["predicted_ns"] / 1e6, steps["measured_ns"] / 1e6, ".", color=colour, markersize=2.5)
    for place, policy in enumerate(policies):
        axes.plot([], [], "o", color=COLOURS[place % len(COLOURS)], label=policy)
    axes.axline((0, 0), slope=1, color=BOUND_COLOUR, linewidth=0.8)
    longest = max(each[side].max() for each in tokens for side in ("predicted_ns", "measured_ns")) / 1e6
    axes.set(xlim=(0, 1.05 * longest), ylim=(0, 1.05 * longest), aspect="equal")
    axes.set_ylabel("measured (ms a token)")
    frame(axes, "", "predicted (ms a token)")
    below.legend(loc="outside right upper", frameon=False, fontsize=8)
