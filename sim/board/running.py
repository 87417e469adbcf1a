"""Policies over all cases: what is run, and what is found. A policy of a user's own is charged what it takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from policies.core.spec import PolicySpec
from policies.overhead import measured_bytes
from sim.board.cases import HITS, SIZES, Case, cases_of
from sim.board.result import BELADY, DIGITS, KNOWABLE, LRU, UNKNOWN, Figures, Gain, Result, entry
from sim.loaded import TimedRun, load
from sim.loop.requests import Requests
from sim.results import compare
from sim.results.metrics import Row
from sim.sweeps import grid
from sim.sweeps.config import specs
from sim.sweeps.grid import Table
from sim.sweeps.store import Store
from sim.sweeps.workers import Local
from traces.board import Card, board, sum_of

COLUMNS = {True: "misses", False: "tpot_mean_ms"}


@dataclass(frozen=True)
class Board:
    """All that is to be run."""

    cards: Sequence[Card]
    policies: Sequence[PolicySpec]
    cases: Sequence[Case]
    tables: Sequence[Table]  # one of each case
    costs: Mapping[str, tuple[float, float]]  # by policy: microseconds of an event, and MiB

    @classmethod
    def of(cls, cards: Sequence[Card], policies: Sequence[str], stored: Result | None = None) -> "Board":
        """Return the board of these policies, LRU and both ceilings; costs: `stored`, or measured. Raise InputError."""
        named = specs([LRU, *policies, KNOWABLE, BELADY], None)
        cases = list(cases_of(cards))
        loaded = [load(case.experiment) for case in cases]
        timed = [each for each in loaded if isinstance(each, TimedRun)]
        before = {text: each.overhead_us for text, each in stored.policies.items()} if stored else {}
        if timed:  # one figure for all, of the model with the most experts
            us = max(timed, key=lambda each: each.all_experts).measured_us(named, before)
            loaded = [each.charging(us) if isinstance(each, TimedRun) else each for each in loaded]
            timed = [each for each in loaded if isinstance(each, TimedRun)]
        tables = [Table(each, grid.grid_of(each, named, SIZES), Path()) for each in loaded]
        largest = max(loaded, key=lambda each: each.all_experts)
        requests = Requests(largest.trace)

        def cost(policy: PolicySpec) -> tuple[float, float]:
            if stored:
                return stored.policies[policy.text].overhead_us, stored.policies[policy.text].memory_mib
            us = max((each.predictor_us(policy) or 0.0 for each in timed), default=UNKNOWN)
            return float(f"{us:.3g}"), round(measured_bytes(policy, largest.shape, requests) / 2**20, 2)

        return cls(cards, named, cases, tables, {policy.text: cost(policy) for policy in named})

    @property
    def own(self) -> dict[str, float]:
        """Return what policies of the user's own are charged for an event, in microseconds, where anything is timed."""
        us = {each.text: self.costs[each.text][0] for each in self.policies if each.files}
        return {policy: each for policy, each in us.items() if each == each}

    @property
    def requests(self) -> int:
        return sum(len(table.cells) * len(table.loaded.trace.requests) for table in self.tables)

    def run(self, workers: int = 1, advance: Callable[[int], None] = lambda requests: None) -> Result:
        """Run all cells; `advance` gets the number of requests run. Raise PolicyError for a fault of a policy."""
        requests: dict[str, dict[str, int]] = {}
        for case in self.cases:
            requests.setdefault(case.start, {})[case.measure] = case.counted
        figures: dict[str, Figures] = {policy.text: {} for policy in self.policies}
        gains: dict[str, dict[str, dict[str, tuple[Gain, ...]]]] = {policy.text: {} for policy in self.policies}
        with TemporaryDirectory() as scratch:
            store = Store(Path(scratch))
            grid.sweep(self.tables, store, Local(workers), advance)
            for case, table in zip(self.cases, self.tables, strict=True):
                found = grid.runs(outcome := grid.outcome(table, store), store)
                for place, policy in enumerate(self.policies):
                    at = slice(place, None, len(self.policies))  # rows come by size, then by policy
                    values = tuple(_figure(row, case) for row in outcome.rows[at])
                    figures[policy.text].setdefault(case.measure, {})[case.start] = values
                    if policy.text != LRU:
                        over = tuple(map(_gain, found[:: len(self.policies)], found[at], [case] * len(SIZES)))
                        if all(one == one for one, *_ in over):
                            gains[policy.text].setdefault(case.measure, {})[case.start] = over
        return Result(
            version=board().version,
            traces={card.name: sum_of(card.folder) for card in self.cards},
            requests=requests,
            policies={
                each.text: entry(
                    figures,
                    each.text,
                    gains[each.text],
                    digest=" ".join(digest for digest in dict.fromkeys(each.files.values()) if digest),
                    oracle=each.oracle,
                    overhead_us=self.costs[each.text][0],
                    memory_mib=self.costs[each.text][1],
                )
                for each in self.policies
            },
        )


def _figure(row: Row, case: Case) -> float:
    counted = case.measure == HITS
    return round(float(row["hit_rate" if counted else "tpot_mean_ms"]), DIGITS + 2 * counted)


def _gain(lru: compare.SweptRun, mine: compare.SweptRun, case: Case) -> Gain:
    found = compare.gain(lru, mine, COLUMNS[case.measure == HITS])
    if found is None or not found.is_enough:
        return UNKNOWN, UNKNOWN, UNKNOWN
    low, middle, high = (round(each, 4) for each in (found.low, found.more, found.high))
    return middle, low, high
