"""The picture of an adaptation: what a shift takes off the hit rate, request by request, until it is made up for."""

from typing import TYPE_CHECKING

import numpy as np

from sim.analysis.adaptation import TOLERANCE, windows
from sim.results.plot import BOUND_COLOUR, COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.analysis.adaptation import Adaptation
    from sim.sweep.setup import Loaded


def figure(found: "Adaptation", loaded: "Loaded") -> "Figure":
    """Mean paired difference in hit rate against requests since the shift: a panel per kind, a line per policy.

    Thin: of single requests; thick: of windows, which is what is judged, each drawn where it begins.
    """
    from matplotlib.figure import Figure

    protocol = found.plan.protocol
    drawing = Figure(figsize=(3 + 4 * len(found.kinds), 4.2), layout="constrained")
    panels = drawing.subplots(1, len(found.kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, found.kinds, strict=True):
        for policy, colour in zip(found.policies, COLOURS * len(found.policies), strict=False):
            measured = found.of(kind, policy)
            if not measured:
                continue
            points = 100 * np.mean([one.differences for one in measured], axis=0)
            axes.plot(points, color=colour, linewidth=0.7, alpha=0.4)
            axes.plot(windows(points, protocol.window), color=colour, linewidth=1.8, label=policy)
        axes.axhline(0, color=BOUND_COLOUR, linewidth=0.8)
        axes.axhline(-100 * TOLERANCE, color=BOUND_COLOUR, linestyle=":", linewidth=1)
        axes.set_title(f"{kind}: {len(found.of(kind, found.policies[0]))} shifts", fontsize=9)
        axes.set_xlabel("requests since the shift")
        axes.set_xlim(0, protocol.after - 1)
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("hit rate less the undisturbed one (points)")
    share = 100 * found.slots / loaded.all_experts
    drawing.suptitle(
        f"{loaded.trace.meta.model}, untimed, {loaded.trace.name} by {protocol.by}, cache {share:.3g}%", fontsize=9
    )
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return drawing
