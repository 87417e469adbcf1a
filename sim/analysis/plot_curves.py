"""The picture of an analysis: hit rates of LRU and of Belady at every cache size, and of the policies that were played.

Below the line of one token's experts what recency keeps goes before its next use.
"""

from typing import TYPE_CHECKING

import numpy as np

from sim.results.plot import BOUND_COLOUR, COLOURS, MARKERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sim.analysis.misses import Analysis
    from sim.sweep.setup import Loaded


def figure(found: "Analysis", loaded: "Loaded") -> "Figure":
    """Hit rate against cache size: two curves, and a point for each other policy and size."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(7, 4.2), layout="constrained")
    axes = drawing.add_subplot()
    total = len(found.lru) - 1
    sizes = 100 * np.arange(total + 1) / total
    lookups = max(found.lookups, 1)
    axes.plot(sizes, 1 - found.lru / lookups, color=COLOURS[0], linewidth=1.6, label="lru")
    axes.plot(sizes, 1 - found.belady / lookups, "--", color=BOUND_COLOUR, linewidth=1.3, label="belady (bound)")
    others = dict.fromkeys(split.policy for split in found.splits if split.policy not in ("lru", "belady"))
    for i, policy in enumerate(others, start=1):
        points = [split for split in found.splits if split.policy == policy]
        axes.plot(
            [100 * split.cache_fraction for split in points],
            [1 - split.misses / lookups for split in points],
            MARKERS[i % len(MARKERS)],
            color=COLOURS[i % len(COLOURS)],
            label=policy,
            markersize=5,
        )
    if loaded.trace.phases != "prefill":
        demand = 100 * found.demand / total
        axes.axvline(demand, color=BOUND_COLOUR, linestyle=":", linewidth=1, label="one token's experts")
    axes.set_xlabel("cache size (% of all experts)")
    axes.set_ylabel("hit rate")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, 1)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    requests = len(loaded.trace.requests)
    axes.set_title(f"{loaded.trace.meta.model}, untimed, {loaded.trace.name}, {requests} requests", fontsize=9)
    drawing.legend(loc="outside right upper", frameon=False, fontsize=8)
    return drawing
