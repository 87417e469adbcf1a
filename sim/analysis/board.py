"""The board: policies over the traces of `traces.board`, at fixed sizes and on one machine, with one score.

A share is how much of the gap from LRU to Belady a policy closes in one trace at one size: in hits, counted without a
clock, and in mean TPOT on a machine whose link is the wall. The score is the mean of the shares in hits. A trace begins
with an empty cache, and each further request of it finds what the one before has left.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from policies.core.spec import PolicySpec
from sim.experiment import Experiment
from sim.loaded import NONE, CountedRun, TimedRun, load
from sim.sweeps import grid
from sim.sweeps.config import specs
from sim.sweeps.grid import Table
from sim.sweeps.store import Store
from sim.sweeps.workers import Local
from traces.board import Card, board, sum_of
from traces.errors import InputError, unknown
from traces.files import read_toml
from traces.models.profile import known
from traces.output import replacing
from traces.typed import typed

SIZES = ("5%", "10%", "25%", "50%")
POLICIES = ("lfu", "lrfu", "eamc", "eamc-blend")
"""Those that are compared where none are named."""

MACHINE = "a5000"
"""Where it is timed."""

DIGITS = 6
"""Of a share."""

NO_SHARE = float("nan")


@dataclass(frozen=True)
class Entry:
    """A policy's shares, by trace and size (`kimi-linear-48b 5%`): NaN where Belady is no better than LRU."""

    digest: str  # SHA-256 of a user's own file; empty: built in
    oracle: bool
    score: float  # mean of the shares in hits
    worst: float
    tpot_score: float  # the same of the shares in TPOT; NaN: nothing is timed
    tpot_worst: float
    hits: dict[str, float]
    tpot: dict[str, float]  # of traces of models whose profile is known

    @classmethod
    def of(cls, policy: PolicySpec, hits: dict[str, float], tpot: dict[str, float]) -> "Entry":
        digest = " ".join(each for each in dict.fromkeys(policy.files.values()) if each)
        return cls(digest, policy.oracle, *_mean_and_least(hits), *_mean_and_least(tpot), hits, tpot)

    def of_trace(self, trace: str) -> float:
        """Return the mean of a trace's shares in hits."""
        return _mean_and_least({name: self.hits[name] for name in (f"{trace} {size}" for size in SIZES)})[0]


@dataclass(frozen=True)
class Result:
    """All that a file of results holds, LRU and Belady among the policies."""

    version: int  # of the set of traces
    machine: str
    traces: dict[str, str]  # SHA-256 of each
    overhead_us: dict[str, float]  # of an event, of own policies: as it was measured first
    policies: dict[str, Entry]  # as named

    @property
    def ranking(self) -> list[tuple[str, Entry]]:
        """Return policies with their entries, the best score first."""
        return sorted(self.policies.items(), key=lambda each: -each[1].score)


def cards_of(names: Collection[str] = ()) -> list[Card]:
    """Return the cards of these traces, or of all that are here. Raise InputError for another name."""
    here = {card.name: card for card in board().cards if card.sha256}
    if missing := [name for name in names if name not in here]:
        raise unknown("trace of the board", missing[0], here)
    return [here[name] for name in names] or list(here.values())


def tables(cards: Sequence[Card], policies: Sequence[str], us: Mapping[str, float] = NONE) -> list[Table]:
    """Return what is to be run: each trace counted, and timed where its model is known.

    us: what own policies take for an event; what it does not have is measured now. Raise InputError for a policy that
    there is not.
    """
    named = specs(["lru", *policies, "belady"], None)
    counted = [load(Experiment(str(card.folder), untimed=True)) for card in cards]
    timed = [
        TimedRun.of(Experiment(str(card.folder), MACHINE, card.model_profile or None))
        for card in cards
        if card.model_profile or known(card.model)
    ]
    if timed:  # one figure for all, of the model with the most experts
        measured = max(timed, key=lambda each: each.all_experts).measured_us(named, us)
        timed = [each.charging(measured) for each in timed]
    runs: list[CountedRun | TimedRun] = [*counted, *timed]
    return [Table(each, grid.grid_of(each, named, SIZES), Path()) for each in runs]


def requests(tables: Sequence[Table]) -> int:
    """Return how many requests `run` runs."""
    return sum(len(table.cells) * len(table.loaded.trace.requests) for table in tables)


def run(
    cards: Sequence[Card],
    tables: Sequence[Table],
    workers: int = 1,
    advance: Callable[[int], None] = lambda requests: None,
) -> Result:
    """Run all cells; `advance` gets the number of requests run. Raise PolicyError for a fault of a policy."""
    policies = tables[0].grid.policies
    hits, tpot = ({each.text: dict[str, float]() for each in policies} for _ in range(2))
    with TemporaryDirectory() as scratch:
        store = Store(Path(scratch))
        grid.sweep(tables, store, Local(workers), advance)
        for table in tables:
            found, column = (tpot, "gap_latency") if isinstance(table.loaded, TimedRun) else (hits, "gap_hits")
            cells = ((policy.text, size) for size in table.grid.sizes for policy in table.grid.policies)
            for (policy, size), row in zip(cells, grid.outcome(table, store).rows, strict=True):
                share = NO_SHARE if row[column] is None else round(row[column], DIGITS)
                found[policy][f"{row['trace']} {size}"] = share
    return Result(
        version=board().version,
        machine=MACHINE,
        traces={card.name: sum_of(card.folder) for card in cards},
        overhead_us=measured(tables),
        policies={each.text: Entry.of(each, hits[each.text], tpot[each.text]) for each in policies},
    )


def measured(tables: Sequence[Table]) -> dict[str, float]:
    """Return what own policies are charged for an event, in microseconds."""
    runs = ((table.loaded.experiment, policy.text) for table in tables for policy in table.grid.policies)
    stated = ((text, experiment.overhead_us(text)) for experiment, text in runs)
    return {text: us for text, us in stated if us is not None}


def _mean_and_least(shares: Mapping[str, float]) -> tuple[float, float]:
    held = [share for share in shares.values() if share == share]
    return (round(fmean(held), DIGITS), min(held)) if held else (NO_SHARE, NO_SHARE)


def sentence(found: Result) -> str:
    """Return which policy leads, by how much, and how far the ceiling is."""
    able = [(text, entry) for text, entry in found.ranking if not entry.oracle]
    (leader, best), *others = able
    before = f", {100 * (best.score - others[0][1].score):.1f} points more than {others[0][0]}" if others else ""
    timed = f"; in TPOT on {found.machine} {best.tpot_score:.1%}" if best.tpot else ""
    return (
        f"{leader} leads: it closes {best.score:.1%} of the gap from LRU to Belady in hits{before}, and "
        f"{100 * (1 - best.score):.1f} points are left to Belady{timed}"
    )


def write(found: Result, path: Path, overwrite: bool = False) -> None:
    """Write a file that `read` reads, whole or not at all."""
    import tomli_w  # which a machine with a GPU need not have

    with replacing(path, overwrite=overwrite) as part:
        heading = "# Shares of the gap from LRU to Belady. `moe-sim board --check THIS` runs the same again.\n"
        part.write_text(heading + tomli_w.dumps(asdict(found)), encoding="utf-8")


def read(path: Path) -> Result:
    """Return the result of a file. Raise InputError for one that holds none."""
    found = typed(Result, read_toml(path), str(path))
    if found.version != board().version:
        raise InputError(f"{path} is of version {found.version} of the traces, and version {board().version} is here")
    return found


def difference(stored: Result, found: Result) -> str | None:
    """Return the first figure that differs, with both values; None: all are equal."""
    one, other = (dict(_figures(asdict(each))) for each in (stored, found))
    for name in {**one, **other}:
        if repr(one.get(name)) != repr(other.get(name)):
            return f"{name} is {one.get(name)} in the file, and {other.get(name)} now"
    return None


def _figures(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, each in value.items():
        yield from _figures(each, f"{name} {key}".strip())
