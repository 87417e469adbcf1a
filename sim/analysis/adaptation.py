"""Adaptation: after a task shift, requests until the hit rate is back within one point. Untimed, so counts are exact.

A shift runs `warmup` requests of one group (those of one label), then `after` requests of another. Requests differ in
difficulty, so each of the latter is set against itself in the *undisturbed* run, where other requests of its own group
went before it, as many. d[i], the difference in hit rate of request i after the shift, is what the shift did to it.

Requests needed: the least i with mean(d[i : i + window]) >= -1 point. Windows are whole: the last begins at
i = after - window, and a shift that none of them ends is *censored*: it needed more than that.

Source: MoE-Infinity (arXiv 2401.14361), which prints the requests needed, but neither its own definition nor hit rates.
"""

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from policies.core.grammar import policy_title
from policies.core.spec import PolicySpec
from sim.loaded import Loaded
from sim.loop.log import RunLog
from sim.results import files, plot
from sim.results.metrics import COUNT, SHARE, TEXT, Row
from sim.results.provenance import commit
from sim.sweeps.grid import Grid
from sim.sweeps.workers import Advance, Local, Task
from traces.errors import InputError, unknown
from traces.trace import Trace, concatenate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Float = NDArray[np.float64]

LABELS = ("dataset", "task")
"""Columns of requests whose values are groups, the coarser first."""

TOLERANCE = 0.01
"""How far below the undisturbed hit rate counts as back: one point."""

WITHIN, ACROSS = "within", "across"
"""Kinds of shifts: between tasks that have a dataset in common, and all others."""

RATES = ("hit_rate_first", "undisturbed_first", "hit_rate_settled", "undisturbed_settled")

SHIFTS = pa.schema(
    [
        ("policy", TEXT),
        ("oracle", pa.bool_()),
        *[(name, TEXT) for name in ("trace", "model", "label", "kind", "group_before", "group_after")],
        ("cache_experts", COUNT),
        ("cache_fraction", SHARE),
        *[(name, COUNT) for name in ("warmup", "after", "window", "seed", "requests_needed", "requests_needed_above")],
        *[(name, SHARE) for name in RATES],
        ("requests", pa.list_(TEXT)),
        *[(name, pa.list_(SHARE)) for name in ("hit_rates", "undisturbed_hit_rates")],
        ("commit", TEXT),
    ]
)
"""Columns of adaptation.parquet, a row per shift and policy.

requests_needed is null where censored, and requests_needed_above, what is known then, everywhere else. `first`: of the
first request after the shift, `settled`: mean of the last window. The lists have an entry for each request after it.
"""


NAMES = ("adaptation.parquet", "adaptation.png")
"""The files that `save` writes."""

INTERRUPTED, MAKER = "interrupted", "moe-sim adapt"


@dataclass(frozen=True)
class Protocol:
    """How a shift is made, and how many are."""

    by: str = "dataset"  # of LABELS
    warmup: int = 50  # requests before the shift
    after: int = 50  # requests after it
    window: int = 5  # requests of which the mean is judged
    pairs: int = 6  # shifts of each kind, at most
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in LABELS:
            raise unknown("label", self.by, LABELS)
        if min(self.warmup, self.window, self.pairs) < 1 or self.after < self.window:
            raise InputError("--warmup, --window and --pairs must be at least 1, --after at least --window")


@dataclass(frozen=True)
class Shift:
    """From one group to another; the undisturbed run is one from a group to itself."""

    before: str
    after: str
    kind: str = ""


@dataclass(frozen=True)
class Plan:
    """Which requests are run, by their number in the trace.

    Each group is shuffled once: its first `warmup` requests come before a shift away from it and in its undisturbed
    run, its next `after` requests after every shift to it. So a run runs no request twice, and all shifts to a group
    share one undisturbed run.
    """

    protocol: Protocol
    orders: dict[str, list[int]]  # group: its requests, shuffled
    shifts: list[Shift]

    @property
    def runs(self) -> list[Shift]:
        """Every run, an undisturbed one before the shifts that are set against it."""
        runs: dict[Shift, None] = {}
        for shift in self.shifts:
            runs |= {Shift(shift.after, shift.after): None, shift: None}
        return list(runs)

    def before(self, run: Shift) -> list[int]:
        return self.orders[run.before][: self.protocol.warmup]

    def after(self, run: Shift) -> list[int]:
        return self.orders[run.after][self.protocol.warmup :][: self.protocol.after]


def plan(trace: Trace, protocol: Protocol) -> Plan:
    """Return all ordered pairs of groups with enough requests, at most `pairs` of each kind, drawn with the seed.

    Requests without a label, or of which nothing was routed, are in no group. Raise InputError where there is no pair.
    """
    starts = trace.offsets[:-1].tolist()
    ends = trace.offsets[1:].tolist()
    routed = [bool((trace.experts[a:b] != trace.sentinel).any()) for a, b in zip(starts, ends, strict=True)]
    requests = trace.requests.reset_index(drop=True)[routed]
    labelled = requests[requests[protocol.by] != ""]
    groups: dict[str, list[int]] = {str(name): list(of.index) for name, of in labelled.groupby(protocol.by)}
    datasets = {str(name): set(of["dataset"]) for name, of in labelled.groupby(protocol.by)}
    whole = protocol.warmup + protocol.after
    pairs = [
        (before, after)
        for after in groups
        for before in groups
        if before != after and len(groups[before]) >= protocol.warmup and len(groups[after]) >= whole
    ]
    if not pairs:
        largest = sorted(((len(of), name) for name, of in groups.items()), reverse=True)[:3]
        raise InputError(
            f"{trace.name}: no shift by {protocol.by} can be made: one group needs {whole} requests (--warmup and "
            f"--after) and another {protocol.warmup}; the largest are "
            f"{', '.join(f'{name} ({size})' for size, name in largest) or 'none: its requests have no such label'}"
        )
    rng = np.random.default_rng(protocol.seed)
    orders = {name: rng.permutation(numbers).tolist() for name, numbers in groups.items()}
    drawn: dict[str, list[Shift]] = {WITHIN: [], ACROSS: []}
    for i in rng.permutation(len(pairs)).tolist():
        before, after = pairs[i]
        kind = WITHIN if protocol.by != LABELS[0] and datasets[before] & datasets[after] else ACROSS
        if len(drawn[kind]) < protocol.pairs:
            drawn[kind].append(Shift(before, after, kind))
    shifts = [shift for of_kind in drawn.values() for shift in of_kind]
    return Plan(protocol, orders, sorted(shifts, key=lambda shift: (shift.kind == ACROSS, shift.after, shift.before)))


def requests_needed(differences: Float, window: int) -> int | None:
    """Return the least i with mean(differences[i : i + window]) >= -TOLERANCE; None where no whole window has it.

    differences: [n], n >= window, hit rates after the shift less the undisturbed ones.
    """
    back = np.flatnonzero(windows(differences, window) >= -TOLERANCE)
    return int(back[0]) if len(back) else None


def windows(differences: Float, window: int) -> Float:
    """Return the means [n - window + 1] of whole windows."""
    means: Float = np.lib.stride_tricks.sliding_window_view(differences, window).mean(axis=-1)
    return means


@dataclass(frozen=True)
class Adaptation:
    """The shifts that were measured: rows of `SHIFTS`, by shift, then by policy."""

    plan: Plan
    share: float  # of all experts that the cache holds
    rows: list[Row]
    complete: bool  # False: interrupted, and these are the shifts that had finished

    def groups(self) -> dict[tuple[str, str], list[Row]]:
        kinds, policies = (dict.fromkeys(row[name] for row in self.rows) for name in ("kind", "policy"))
        return {
            (kind, policy): [row for row in self.rows if (row["kind"], row["policy"]) == (kind, policy)]
            for kind, policy in product(kinds, policies)
        }

    def summaries(self) -> list[Row]:
        return [summary(rows) for rows in self.groups().values()]


def summary(rows: Sequence[Row]) -> Row:
    """Sum up the shifts of one kind under one policy, at least one; rates are means over them.

    needed_min: None where all are censored; needed_max: where some are. needed_mean takes censored ones as last + 1:
    where there are any, it is a lower bound. needed_none: share of shifts.
    """
    known = [row["requests_needed"] for row in rows if row["requests_needed"] is not None]
    censored, last = len(rows) - len(known), rows[0]["after"] - rows[0]["window"]
    return {
        **{name: rows[0][name] for name in ("kind", "policy", "oracle")},
        "shifts": len(rows),
        "censored": censored,
        "last": last,
        "needed_min": min(known, default=None),
        "needed_mean": (sum(known) + censored * (last + 1)) / len(rows),
        "needed_max": None if censored else max(known),
        "needed_none": known.count(0) / len(rows),
        **{name: float(np.mean([row[name] for row in rows])) for name in RATES},
    }


def adapt(loaded: Loaded, grid: Grid, planned: Plan, workers: int = 1, advance: Advance | None = None) -> Adaptation:
    """Measure the shifts of a plan, for an untimed setup and a grid of one cache size.

    `advance` gets the number of requests run since its last call, of `to_run` in all. Ctrl-C stops all workers; what
    was finished is then returned.
    """
    (slots,) = grid.sizes.values()
    share = loaded.experts_in(slots) / loaded.all_experts
    runs, policies = planned.runs, grid.policies
    cells = [(policy, slots, planned.before(run), planned.after(run)) for run in runs for policy in policies]
    tasks = [Task(loaded, hit_rates, cell, cell[0].compiled) for cell in cells]
    results = Local(workers).results(tasks, advance or (lambda requests: None))
    done: dict[int, Float] = {}
    with suppress(KeyboardInterrupt), closing(results):
        done.update(results)
    places = {cell: place for place, cell in enumerate(product(runs, policies))}
    rows = []
    for shift, policy in product(planned.shifts, policies):
        rates, undisturbed = (done.get(places[run, policy]) for run in (shift, Shift(shift.after, shift.after)))
        if rates is not None and undisturbed is not None:
            cell = {
                "policy": policy.text,
                "oracle": policy.oracle,
                "trace": loaded.trace.name,
                "model": loaded.trace.meta.model,
                "cache_experts": loaded.experts_in(slots),
                "cache_fraction": share,
                "requests": loaded.trace.requests["id"].iloc[planned.after(shift)].tolist(),
                "commit": commit(),
            }
            rows.append(cell | measured(planned.protocol, shift, rates, undisturbed))
    return Adaptation(
        planned, share, [{name: row[name] for name in SHIFTS.names} for row in rows], len(done) == len(cells)
    )


def measured(protocol: Protocol, shift: Shift, rates: Float, undisturbed: Float) -> Row:
    """Return what a shift did, by columns of `SHIFTS`. rates: [after], with the shift and without it."""
    window, last = protocol.window, protocol.after - protocol.window
    needed = requests_needed(rates - undisturbed, window)
    parts = rates[:1], undisturbed[:1], rates[-window:], undisturbed[-window:]
    return {
        "label": protocol.by,
        "kind": shift.kind,
        "group_before": shift.before,
        "group_after": shift.after,
        **{name: getattr(protocol, name) for name in ("warmup", "after", "window", "seed")},
        "requests_needed": needed,
        "requests_needed_above": last if needed is None else None,
        **{name: float(part.mean()) for name, part in zip(RATES, parts, strict=True)},
        "hit_rates": rates.tolist(),
        "undisturbed_hit_rates": undisturbed.tolist(),
    }


def to_run(grid: Grid, planned: Plan) -> int:
    protocol = planned.protocol
    return len(planned.runs) * len(grid.policies) * (protocol.warmup + protocol.after)


def hit_rates(
    loaded: Loaded, policy: PolicySpec, slots: int, before: list[int], after: list[int], advance: Advance
) -> Float:
    """Return the hit rates [len(after)] of the requests `after`, once those `before` have run from an empty cache."""
    order, whole = [*before, *after], loaded.whole
    trace = concatenate([whole.select(np.array([number])) for number in order])
    rates: list[float] = []

    def ended(log: RunLog) -> None:
        rates.append(log.hits.sum() / max(1, log.hits.sum() + log.misses.sum()))
        advance(1)

    replace(loaded, trace=trace).play(policy, slots, ended)
    return np.array(rates[len(before) :])


def figure(found: Adaptation, loaded: Loaded) -> "Figure":
    """Draw the mean paired difference in hit rate against requests since the shift: a panel a kind, a line a policy.

    Thin: of single requests; thick: of windows, which is what is judged, each drawn where it begins.
    """
    from sim.results.drawing import Drawing

    protocol, kinds = found.plan.protocol, list(dict.fromkeys(kind for kind, _ in found.groups()))
    drawing = Drawing(figsize=(3 + 4 * len(kinds), 4.2), layout="constrained")
    panels = dict(zip(kinds, drawing.subplots(1, len(kinds), sharey=True, squeeze=False)[0], strict=True))
    colours = {policy: style["color"] for policy, style in plot.looks(p for _, p in found.groups()).items()}
    for (kind, policy), rows in found.groups().items():
        axes, of_all = panels[kind], [np.subtract(row["hit_rates"], row["undisturbed_hit_rates"]) for row in rows]
        points = 100 * np.mean(of_all, axis=0)
        axes.plot(points, color=colours[policy], linewidth=0.7, alpha=0.4)
        label = policy_title(policy, rows[0]["oracle"])
        axes.plot(windows(points, protocol.window), color=colours[policy], linewidth=1.8, label=label)
        plot.frame(axes, f"{kind}: {len(rows)} shifts", "requests since the shift")
    for axes in panels.values():
        axes.axhline(0, color=plot.BOUND_COLOUR, linewidth=0.8)
        axes.axhline(-100 * TOLERANCE, color=plot.BOUND_COLOUR, linestyle=":", linewidth=1)
        axes.set_xlim(0, protocol.after - 1)
    panels[kinds[0]].set_ylabel("hit rate less the undisturbed one (points)")
    drawing.suptitle(
        f"{loaded.trace.meta.model}, untimed, {loaded.trace.name} by {protocol.by}, cache {100 * found.share:.3g}%",
        fontsize=9,
    )
    handles = panels[kinds[0]].get_legend_handles_labels()
    drawing.legend(*handles, loc="outside right upper", frameon=False, fontsize=8)
    return drawing


def save(found: Adaptation, loaded: Loaded, folder: Path) -> list[Path]:
    """Write the table and the plot, of an interrupted call the table alone, into `INTERRUPTED`; return the files."""
    table, picture = NAMES
    if not found.complete:
        return files.save(folder / INTERRUPTED, MAKER, {table: (found.rows, SHIFTS)}, {})
    return files.save(folder, MAKER, {table: (found.rows, SHIFTS)}, {picture: lambda: figure(found, loaded)})
