"""Is it the policy or the cache size? What a trace lets any cache do, and what each policy makes of it, untimed.

docs/contract.md defines misses by cause. LRU and Belady are known from one pass at all sizes of at least the largest
event (`sim.analysis.curves`); other policies are run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from policies.core.grammar import policy_title
from policies.core.policy import Int
from policies.core.spec import PolicySpec
from policies.core.stack_distances import lru_misses
from sim.analysis.curves import accesses, belady_misses
from sim.loaded import Loaded
from sim.loop.log import RunLog
from sim.loop.requests import Requests
from sim.results import files, plot
from sim.results.metrics import COUNT, SHARE, TEXT, Row
from sim.sweeps.grid import BELADY, Grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMES = ("misses.parquet", "curves.parquet", "curves.png")

MAKER = "moe-sim analyze"

CURVED = ("lru", "belady")

SPLITS = pa.schema(
    [
        ("policy", TEXT),
        *[(name, COUNT) for name in ("cache_experts", "lookups", "misses", "compulsory", "capacity", "policy_misses")],
        ("cache_fraction", SHARE),
        ("hit_rate", SHARE),
        ("oracle", pa.bool_()),
    ]
)
"""Columns of misses.parquet, a row per policy and size."""

CURVES = pa.schema(
    [
        ("cache_experts", COUNT),
        ("cache_fraction", SHARE),
        *[(name, COUNT) for name in ("lru_misses", "belady_misses")],
        *[(name, SHARE) for name in ("lru_hit_rate", "belady_hit_rate")],
    ]
)
"""Columns of curves.parquet, a row per number of slots."""


@dataclass(frozen=True)
class Analysis:
    """What `moe-sim analyze` found."""

    lookups: int
    lru: Int  # [L * E + 1] misses by number of slots
    belady: Int  # the same
    smallest: int  # slots from which on these are known
    demand: int  # experts of one decoded token
    splits: list[Row]  # of `SPLITS`, by size as given, then by policy

    def curves(self) -> list[Row]:
        total = len(self.lru) - 1
        return [
            {
                "cache_experts": slots,
                "cache_fraction": slots / total,
                "lru_misses": int(self.lru[slots]),
                "belady_misses": int(self.belady[slots]),
                "lru_hit_rate": 1 - int(self.lru[slots]) / self.lookups if self.lookups else None,
                "belady_hit_rate": 1 - int(self.belady[slots]) / self.lookups if self.lookups else None,
            }
            for slots in range(self.smallest, total + 1)
        ]


def analyse(loaded: Loaded, grid: Grid, advance: Callable[[int], None] = lambda requests: None) -> Analysis:
    """Analyse a run that counts experts of one size. advance: gets the requests run, `to_play(grid)` times each."""
    experts, ends = accesses(Requests(loaded.trace))
    known = {"lru": lru_misses(experts, loaded.all_experts, ends)}
    known["belady"] = belady = belady_misses(experts, loaded.all_experts, ends=ends)
    smallest = int(np.diff(ends, prepend=0).max(initial=1))  # the largest event

    def misses(policy: PolicySpec, slots: int) -> int:
        if policy.text in CURVED and slots >= smallest:
            return int(known[policy.text][slots])
        missed: list[int] = []

        def ended(log: RunLog) -> None:
            missed.append(int(log.misses.sum()))
            advance(policy.text not in CURVED)

        loaded.play(policy, slots, ended)
        return sum(missed)

    lookups, first_uses = len(experts), int(belady[-1])

    def split(policy: PolicySpec, slots: int) -> Row:
        missed, best = misses(policy, slots), misses(BELADY, slots)
        return {
            "policy": policy.text,
            "cache_experts": slots,
            "lookups": lookups,
            "misses": missed,
            "compulsory": first_uses,
            "capacity": best - first_uses,
            "policy_misses": missed - best,
            "cache_fraction": slots / loaded.all_experts,
            "hit_rate": 1 - missed / lookups if lookups else None,
            "oracle": policy.oracle,
        }

    return Analysis(
        lookups=lookups,
        lru=known["lru"],
        belady=belady,
        smallest=smallest,
        demand=loaded.token_experts,
        splits=[split(policy, slots) for slots in grid.sizes.values() for policy in grid.policies],
    )


def to_play(grid: Grid) -> int:
    return len(grid.sizes) * sum(policy.text not in CURVED for policy in grid.policies)


def sentences(splits: Sequence[Row]) -> list[str]:
    """Return a sentence for each size: the best policy there that is no oracle (else the best), and why it misses."""
    found = []
    for slots in dict.fromkeys(split["cache_experts"] for split in splits):
        here = [split for split in splits if split["cache_experts"] == slots]
        best = min([split for split in here if not split["oracle"]] or here, key=lambda split: split["misses"])
        size = f"At {slots} slots ({100 * best['cache_fraction']:.3g}%)"
        found.append(f"{size} {_best(best, here)}; {_verdict(best)}.")
    return found


def _best(best: Row, here: Sequence[Row]) -> str:
    lookups = max(best["lookups"], 1)
    what = "misses least," if len(here) > 1 else "misses"
    text = f"{policy_title(best['policy'], best['oracle'])} {what} {100 * best['misses'] / lookups:.3g}% of lookups"
    lru = next((split for split in here if split["policy"] == "lru"), best)
    if lru is best or not lru["policy_misses"]:
        return text
    fewer = lru["misses"] - best["misses"]
    gain = f"{100 * fewer / lookups:.3g} points fewer than LRU"
    return f"{text}, {gain}, and closes {fewer / lru['policy_misses']:.0%} of the gap from LRU to Belady"


def _verdict(split: Row) -> str:
    name = split["policy"]
    if not split["misses"]:
        return f"neither policy nor cache size causes misses: {name} has none"
    own, room, first = (split[name] / split["misses"] for name in ("policy_misses", "capacity", "compulsory"))
    if own > max(room, first):
        return f"the policy is the main cause: {own:.0%} of {name}'s misses are not Belady's"
    if room >= first:
        return f"the cache size is the main cause: {room:.0%} of {name}'s misses are Belady's too, for lack of room"
    return f"neither policy nor size is the main cause: {first:.0%} of {name}'s misses are first uses"


def figure(found: Analysis, loaded: Loaded) -> "Figure":
    """Hit rate against cache size: LRU and Belady as curves, and a point for each other policy and size run."""
    total, lookups = len(found.lru) - 1, max(found.lookups, 1)
    title = f"{loaded.trace.meta.model}, untimed, {loaded.trace.name}, {len(loaded.trace.requests)} requests"
    drawing, axes = plot.single((7, 4.2), title, "cache size (% of all experts)")
    axes.set_ylabel("hit rate")
    slots = np.arange(found.smallest, total + 1)
    axes.plot(100 * slots / total, 1 - found.lru[slots] / lookups, color=plot.COLOURS[0], linewidth=1.6, label="lru")
    axes.plot(100 * slots / total, 1 - found.belady[slots] / lookups, **plot.BOUND)
    others = {split["policy"]: split["oracle"] for split in found.splits if split["policy"] not in CURVED}
    styles = plot.looks(["lru", *others])
    for policy, oracle in others.items():
        points = [split for split in found.splits if split["policy"] == policy]
        shares = [100 * one["cache_fraction"] for one in points]
        rates = [1 - one["misses"] / lookups for one in points]
        axes.plot(shares, rates, **styles[policy], linestyle="", label=plot.wrapped(policy_title(policy, oracle)))
    if loaded.trace.phases != "prefill":
        axes.axvline(100 * found.demand / total, **plot.DEMAND)
    axes.set(xlim=(0, 100), ylim=(0, 1))
    drawing.legend(loc="outside right upper", frameon=False, fontsize=8)
    return drawing


def save(found: Analysis, loaded: Loaded, folder: Path) -> list[Path]:
    tables = {NAMES[0]: (found.splits, SPLITS), NAMES[1]: (found.curves(), CURVES)}
    return files.save(folder, MAKER, tables, {NAMES[2]: lambda: figure(found, loaded)})
