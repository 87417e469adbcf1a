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
from functools import cached_property
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

SHIFTS = pa.schema(
    [
        ("policy", TEXT),
        ("oracle", pa.bool_()),
        *[(name, TEXT) for name in ("trace", "model", "label", "kind", "group_before", "group_after")],
        ("cache_experts", COUNT),
        ("cache_fraction", SHARE),
        *[(name, COUNT) for name in ("warmup", "after", "window", "seed", "requests_needed", "requests_needed_above")],
        *[(f"{name}_{when}", SHARE) for when in ("first", "settled") for name in ("hit_rate", "undisturbed")],
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
        if min(self.warmup, self.after, self.window, self.pairs) < 1:
            raise InputError("--warmup, --after, --window and --pairs must be at least 1")
        if self.after < self.window:
            raise InputError(f"--after {self.after}: a window of {self.window} requests does not fit into it")


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


@dataclass(frozen=True, eq=False)
class Measured:
    """One shift under one policy."""

    policy: str
    oracle: bool
    shift: Shift
    window: int
    hit_rates: Float  # [after]
    undisturbed: Float  # [after] of the same requests

    @property
    def differences(self) -> Float:
        """[after] of each request, what the shift did to it."""
        return self.hit_rates - self.undisturbed

    @cached_property
    def needed(self) -> int | None:
        """Requests until back within one point; None: more than `last`."""
        return requests_needed(self.differences, self.window)

    @property
    def last(self) -> int:
        """The most requests needed that can be known."""
        return len(self.hit_rates) - self.window

    @property
    def rates(self) -> dict[str, float]:
        """Of the first request and, as a mean, of the last window, by their columns in `SHIFTS`."""
        return {
            f"{name}_{when}": float(rates[part].mean())
            for when, part in (("first", slice(1)), ("settled", slice(-self.window, None)))
            for name, rates in (("hit_rate", self.hit_rates), ("undisturbed", self.undisturbed))
        }


@dataclass(frozen=True)
class Summary:
    """The shifts of one kind under one policy. Rates are means over them."""

    kind: str
    policy: str
    oracle: bool
    shifts: int
    censored: int  # shifts that needed more than `last` requests
    last: int
    needed_min: int | None  # None: all are censored
    needed_mean: float  # censored ones taken as last + 1: where there are any, a lower bound
    needed_max: int | None  # None: some are censored
    needed_none: float  # share of shifts
    hit_rate_first: float  # of the first request after the shift
    undisturbed_first: float
    hit_rate_settled: float  # of the last window
    undisturbed_settled: float


@dataclass(frozen=True)
class Adaptation:
    """The shifts that were measured."""

    plan: Plan
    capacity: int  # of the cache (`Loaded.slots`)
    measured: list[Measured]  # by shift, then by policy
    complete: bool  # False: interrupted, and these are the shifts that had finished

    def of(self, kind: str, policy: str) -> list[Measured]:
        return [one for one in self.measured if (one.shift.kind, one.policy) == (kind, policy)]

    @property
    def policies(self) -> list[str]:
        return list(dict.fromkeys(one.policy for one in self.measured))

    @property
    def kinds(self) -> list[str]:
        return list(dict.fromkeys(one.shift.kind for one in self.measured))

    def summaries(self) -> list[Summary]:
        """Return them by kind, then by policy."""
        return [summary(self.of(kind, policy)) for kind in self.kinds for policy in self.policies]

    def rows(self, loaded: Loaded) -> list[Row]:
        """Return the rows of `SHIFTS`."""
        ids, protocol, experts = loaded.trace.requests["id"], self.plan.protocol, loaded.experts_in(self.capacity)
        return [
            {
                "policy": one.policy,
                "oracle": one.oracle,
                "trace": loaded.trace.name,
                "model": loaded.trace.meta.model,
                "label": protocol.by,
                "kind": one.shift.kind,
                "group_before": one.shift.before,
                "group_after": one.shift.after,
                "cache_experts": experts,
                "cache_fraction": experts / loaded.all_experts,
                **{name: getattr(protocol, name) for name in ("warmup", "after", "window", "seed")},
                "requests_needed": one.needed,
                "requests_needed_above": one.last if one.needed is None else None,
                **one.rates,
                "requests": ids.iloc[self.plan.after(one.shift)].tolist(),
                "hit_rates": one.hit_rates.tolist(),
                "undisturbed_hit_rates": one.undisturbed.tolist(),
                "commit": commit(),
            }
            for one in self.measured
        ]


def summary(measured: Sequence[Measured]) -> Summary:
    """Sum up shifts of one kind under one policy, at least one."""
    one = measured[0]
    known = [each.needed for each in measured if each.needed is not None]
    censored = len(measured) - len(known)
    return Summary(
        kind=one.shift.kind,
        policy=one.policy,
        oracle=one.oracle,
        shifts=len(measured),
        censored=censored,
        last=one.last,
        needed_min=min(known, default=None),
        needed_mean=(sum(known) + censored * (one.last + 1)) / len(measured),
        needed_max=None if censored else max(known),
        needed_none=known.count(0) / len(measured),
        **{name: float(np.mean([each.rates[name] for each in measured])) for name in one.rates},
    )


def adapt(loaded: Loaded, grid: Grid, planned: Plan, workers: int = 1, advance: Advance | None = None) -> Adaptation:
    """Measure the shifts of a plan, for an untimed setup and a grid of one cache size.

    `advance` gets the number of requests run since its last call, of `to_run` in all. Ctrl-C stops all workers; what
    was finished is then returned.
    """
    (slots,) = grid.sizes.values()
    runs, policies = planned.runs, grid.policies
    cells = [(policy, slots, planned.before(run), planned.after(run)) for run in runs for policy in policies]
    tasks = [Task(loaded, hit_rates, cell, compiled=False) for cell in cells]
    results = Local(workers).results(tasks, advance or (lambda requests: None))
    done: dict[int, Float] = {}
    with suppress(KeyboardInterrupt), closing(results):
        done.update(results)
    places = {cell: place for place, cell in enumerate(product(runs, policies))}
    measured = []
    for shift, policy in product(planned.shifts, policies):
        rates, undisturbed = (done.get(places[run, policy]) for run in (shift, Shift(shift.after, shift.after)))
        if rates is not None and undisturbed is not None:
            window = planned.protocol.window
            measured.append(Measured(policy.text, policy.oracle, shift, window, rates, undisturbed))
    return Adaptation(planned, slots, measured, len(done) == len(cells))


def to_run(grid: Grid, planned: Plan) -> int:
    """Return the number of requests that `adapt` runs."""
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
    from matplotlib.figure import Figure

    protocol = found.plan.protocol
    drawing = Figure(figsize=(3 + 4 * len(found.kinds), 4.2), layout="constrained")
    panels = drawing.subplots(1, len(found.kinds), sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, found.kinds, strict=True):
        for i, policy in enumerate(found.policies):
            if measured := found.of(kind, policy):
                colour, points = plot.look(i)["color"], 100 * np.mean([one.differences for one in measured], axis=0)
                axes.plot(points, color=colour, linewidth=0.7, alpha=0.4)
                label = policy_title(policy, measured[0].oracle)
                axes.plot(windows(points, protocol.window), color=colour, linewidth=1.8, label=label)
        axes.axhline(0, color=plot.BOUND_COLOUR, linewidth=0.8)
        axes.axhline(-100 * TOLERANCE, color=plot.BOUND_COLOUR, linestyle=":", linewidth=1)
        plot.frame(axes, f"{kind}: {len(found.of(kind, found.policies[0]))} shifts", "requests since the shift")
        axes.set_xlim(0, protocol.after - 1)
    panels[0].set_ylabel("hit rate less the undisturbed one (points)")
    share = 100 * loaded.experts_in(found.capacity) / loaded.all_experts
    drawing.suptitle(
        f"{loaded.trace.meta.model}, untimed, {loaded.trace.name} by {protocol.by}, cache {share:.3g}%", fontsize=9
    )
    drawing.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    return drawing


def save(found: Adaptation, loaded: Loaded, folder: Path) -> list[Path]:
    """Write the table and the plot, of an interrupted call the table alone, into `INTERRUPTED`; return the files."""
    table, picture = NAMES
    tables = {table: (found.rows(loaded), SHIFTS)}
    if not found.complete:
        return files.save(folder / INTERRUPTED, MAKER, tables, {})
    return files.save(folder, MAKER, tables, {picture: lambda: figure(found, loaded)})
