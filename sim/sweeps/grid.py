"""The sweep: cells of policies x cache sizes over traces and machines, each run once, wherever there is room.

A cell depends on nothing but its setup, and its key holds all of it, code and files included: a sweep that continues
runs no finished cell again (`sim.sweeps.store`). Rows come in the order of tables, sizes, then policies. LRU and Belady
at each size, and a cache of all experts where it fits, are what rows are judged by: without a row if not asked for.
"""

import dataclasses
import hashlib
import json
import marshal
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from policies.core import user_file
from policies.core.grammar import file_and_class
from policies.core.guard import PolicyError, own_classes
from policies.core.spec import Part, PolicySpec
from sim.engines import compiled_engine
from sim.loaded import Loaded, TimedRun
from sim.loop.log import Ended, RunLog
from sim.results import compare, files, metrics, plot
from sim.results.files import REQUESTS_FILE, RESULTS_FILE
from sim.results.metrics import RESULTS, Row
from sim.results.provenance import sources
from sim.sweeps import config, winner
from sim.sweeps.store import CELLS, MAKER, WRITTEN, Store, clear
from sim.sweeps.winner import Winner
from sim.sweeps.workers import Advance, Local, Task, Workers
from traces.errors import InputError
from traces.output import claim
from traces.reader import open_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LRU, BELADY = PolicySpec.of("lru"), PolicySpec.of("belady")


@dataclass(frozen=True)
class Grid:
    """What is swept over one trace on one machine, without repetitions."""

    policies: tuple[PolicySpec, ...]
    sizes: dict[str, int]  # as stated: slots, no two the same
    whole: int | None = None  # slots of a cache of all experts, if GPU memory has room for it
    measures: tuple[PolicySpec, ...] = (LRU, BELADY)  # what rows are judged by; Belady bounds no bent routing

    def cells(self) -> list[tuple[PolicySpec, int]]:
        """Return all cells in the order of the rows; behind them those that rows are measured by."""
        cells = {(policy.text, slots): (policy, slots) for policy, slots in self.requested()}
        measures = [(policy, slots) for slots in self.sizes.values() for policy in self.measures]
        for policy, slots in [*measures, *([(LRU, self.whole)] if self.whole else [])]:
            cells.setdefault((policy.text, slots), (policy, slots))
        return list(cells.values())

    def requested(self) -> list[tuple[PolicySpec, int]]:
        return [(policy, slots) for slots in self.sizes.values() for policy in self.policies]


def grid_of(loaded: Loaded, policies: Sequence[PolicySpec], cache_sizes: Sequence[str]) -> Grid:
    """Return the grid without repetitions: of sizes that hold the same number of experts, the first.

    Raise InputError for a size or a policy that this trace cannot have.
    """
    if not (cache_sizes and policies):
        raise InputError("`policies` or `cache_sizes` is empty: use lru,eamc and 10%,25% or 64, 12/layer or 8GiB")
    sizes: dict[str, int] = {}
    for text in cache_sizes:
        slots = loaded.slots(text)
        if loaded.experts_in(slots) not in map(loaded.experts_in, sizes.values()):
            sizes[text] = slots
    for policy in policies:
        loaded.require(policy, min(sizes.values()))
    whole = loaded.whole_slots
    fits = isinstance(loaded, TimedRun) and loaded.fits(whole)
    return Grid(tuple(policies), sizes, whole if fits else None, (LRU,) if loaded.rule else (LRU, BELADY))


@dataclass(frozen=True)
class Table:
    """The cells of one trace on one machine, and the folder for what was found of them."""

    loaded: Loaded
    grid: Grid
    folder: Path

    @cached_property
    def cells(self) -> dict[str, tuple[PolicySpec, int]]:
        """Each cell by its key, in the order of the rows, the bound's last."""
        return {key(self.loaded, *cell): cell for cell in self.grid.cells()}

    @property
    def keys(self) -> list[str]:
        return list(self.cells)[: len(self.grid.requested())]


Group = tuple[list[str], Task[list[tuple[Row, pa.Table]]]]
"""Cells that run together, by their keys: of one policy, which learns once for all of them, or a single one."""


@dataclass(frozen=True)
class Outcome:
    """What was found of a table."""

    table: Table
    rows: list[Row]
    bound: list[Row]  # of Belady, by size
    winners: list[Winner]
    judged_by: str  # the column that chose the winners


def sweep(
    tables: Sequence[Table], store: Store, workers: Workers | None = None, advance: Advance | None = None
) -> None:
    """Run every cell that `store` does not hold; each is there as soon as it has ended, whatever happens then.

    `advance` is told the number of requests run since its last call.
    """
    groups, workers = missing(tables, store), workers or Local(1)
    if isinstance(workers, Local):
        compiled = [task for _, task in groups if task.compiled]
        versions = (version for task in compiled for version in task.loaded.versions(task.arguments[:1]))
        compiled_engine.compile_policies({task.arguments[0]: task.cells > 1 for task in compiled}, versions)
    playing = workers.results([task for _, task in groups], advance or (lambda requests: None))
    with closing(playing):
        for place, found in playing:
            for key, (row, requests) in zip(groups[place][0], found, strict=True):
                store.put(key, {**row, "cell": key}, _labelled(requests, key))


def run_grid(loaded: Loaded, grid: Grid, workers: int = 1) -> tuple[Outcome, pd.DataFrame]:
    """Sweep one grid, nothing of which stays on disk; return its outcome, and a row for each run and request."""
    with TemporaryDirectory() as scratch:
        table, store = Table(loaded, grid, Path(scratch)), Store(Path(scratch))
        sweep([table], store, Local(workers))
        requests = [store.requests(key) for key in table.keys]
        return outcome(table, store), pa.concat_tables(requests).to_pandas()


def missing(tables: Sequence[Table], store: Store) -> list[Group]:
    groups = list[Group]()
    for table in tables:
        held: dict[object, dict[str, int]] = {}
        for each, (policy, slots) in table.cells.items():
            if each not in store:
                held.setdefault(policy if table.loaded.learns_once(policy) else each, {})[each] = slots
        for keys in map(list, held.values()):
            policy = table.cells[keys[0]][0]
            arguments = policy, [table.cells[each][1] for each in keys]
            groups.append((keys, Task(table.loaded, run_cells, arguments, policy.compiled, len(keys))))
    return groups


def outcome(table: Table, store: Store) -> Outcome:
    found = (store.row(key) for key in table.cells)
    cells = [(cell, {**row, "prefetch_coverage": None}) for cell, row in zip(table.grid.cells(), found, strict=True)]
    shown = cells[: len(table.grid.requested())]
    misses = {cell: row["misses"] for cell, row in shown}
    rows = [row for _, row in shown]
    by = winner.metric(rows)
    known = {(policy.text, slots): row for (policy, slots), row in cells}
    for (policy, slots), row in cells:
        if slots not in table.grid.sizes.values():  # all experts, which are run for their time alone
            continue
        without = misses.get((policy.without_prefetch(), slots))
        if policy.prefetches and without:
            row["prefetch_coverage"] = (without - row["misses"]) / without
        if (BELADY.text, slots) in known:
            lru, belady = (known[each.text, slots] for each in (LRU, BELADY))
            row |= measures(row, lru, belady, by)
        if table.grid.whole and by != "misses":
            row["resident_ms"] = known[LRU.text, table.grid.whole][by]
    return Outcome(
        table=table,
        rows=rows,
        bound=[row for (policy, _), row in cells if policy.text == BELADY.text],
        winners=winner.choose(rows, {text: table.loaded.experts_in(n) for text, n in table.grid.sizes.items()}),
        judged_by=by,
    )


def measures(row: Row, lru: Row, belady: Row, by: str) -> Row:
    """Return the columns that measure a row by LRU and Belady at its size; by: the column that judges policies."""
    return {
        "belady_hit_rate": belady["hit_rate"],
        "gap_hits": _closed(*(each["misses"] + each["prefetch_used"] for each in (row, lru, belady))),
        "gap_latency": _closed(row[by], lru[by], belady[by]) if by != "misses" else None,
    }


def _closed(mine: float, lru: float, belady: float) -> float | None:
    """Return the share of the gap from LRU to Belady that is closed in what is better less; None without a gap."""
    return (lru - mine) / (lru - belady) if belady < lru else None


def save(outcomes: Sequence[Outcome], store: Store, folder: Path) -> list[Path]:
    """Write what was found, each file whole or not at all, and clear the store; the files.

    Tables of several traces or machines have a folder each, and `folder` a table of all rows.
    """
    claim(folder, MAKER, names([found.table for found in outcomes], folder))
    written = [file for found in outcomes for file in _save(found, store)]
    if len(outcomes) > 1:
        rows = [row for found in outcomes for row in found.rows]
        files.write_rows(rows, RESULTS, folder / RESULTS_FILE)
        written = [folder / RESULTS_FILE, *plot.draw_users(by_source(outcomes), folder)]
    clear(store.folder)
    return written


def by_source(outcomes: Sequence[Outcome]) -> dict[str, list[Row]]:
    named = [(each.table.loaded.experiment.trace, each.table.loaded.experiment.hardware) for each in outcomes]
    differ = [place for place, names in enumerate(zip(*named, strict=True)) if len({*names}) > 1]
    found: dict[str, list[Row]] = {}
    for names, each in zip(named, outcomes, strict=True):
        found.setdefault(", ".join(names[place] for place in differ), []).extend(each.rows)
    return found


def names(tables: Sequence[Table], folder: Path) -> list[str]:
    """What a sweep of these writes to `folder`, folders of tables included (`traces.output`)."""
    below = [str(table.folder.relative_to(folder)) for table in tables if table.folder != folder]
    return [*WRITTEN, config.NAME, plot.USERS, CELLS, *below]


def _save(found: Outcome, store: Store) -> list[Path]:
    folder, loaded = found.table.folder, found.table.loaded
    claim(folder, MAKER, WRITTEN)
    tables = [folder / RESULTS_FILE, folder / REQUESTS_FILE]
    files.write_rows(found.rows, RESULTS, tables[0])
    store.write_requests(found.table.keys, tables[1])
    winner.write(folder / winner.NAME, loaded.experiment, found.judged_by, found.winners)
    swept = runs(found, store)
    columns = (column for column in ("hit_rate", found.judged_by) if column in plot.DRAWN)
    plots = files.write_figures({plot.DRAWN[each][0]: partial(drawn, found, swept, each) for each in columns}, folder)
    return [*tables, folder / winner.NAME, *plots]


def runs(found: Outcome, store: Store) -> list[compare.SweptRun]:
    """Return the cells that have a row, with their requests, as long as the store holds these."""
    cells = zip(found.rows, found.table.keys, strict=True)
    return [compare.swept_run(row, store.requests(key).to_pandas()) for row, key in cells]


def drawn(found: Outcome, swept: Sequence[compare.SweptRun], column: str) -> "Figure":
    """Return a column of results against cache size, with the intervals of its cells. Needs matplotlib."""
    loaded = found.table.loaded
    demand = loaded.token_experts / loaded.all_experts
    return plot.figure(found.rows, found.bound, demand, column, spans=compare.spans(swept, column))


def run_cells(loaded: Loaded, policy: PolicySpec, slots: Sequence[int], advance: Advance) -> list[tuple[Row, pa.Table]]:
    return [(each.row(), each.requests()) for each in summed(loaded, policy, slots, advance)]


def summed(
    loaded: Loaded, policy: PolicySpec, slots: Sequence[int], advance: Advance, on_log: Ended = lambda log: None
) -> list[metrics.Summary]:
    """Run cells of one policy and sum each up; name them in what a user's policy raises.

    `advance` gets the number of requests, `on_log` each part of the log.
    """
    summaries = [metrics.Summary(loaded.cell(policy, each), loaded.trace.requests) for each in slots]

    def add(summary: metrics.Summary, log: RunLog) -> None:
        on_log(log)
        advance(summary.add(log))

    ended = [partial(add, summary) for summary in summaries]
    try:
        if len(slots) == 1:
            loaded.play(policy, slots[0], ended[0])
        else:
            loaded.play_cells(policy, slots, ended)
    except PolicyError as error:
        raise PolicyError(f"{error}, in {policy.text} at {', '.join(map(str, slots))} experts") from error
    return summaries


def key(loaded: Loaded, policy: PolicySpec, slots: int) -> str:
    """Sixteen hexadecimal digits of all that a cell's rows depend on."""
    timed = loaded if isinstance(loaded, TimedRun) else None
    resolved = policy.resolved()
    depends = {
        "experiment": loaded.experiment.key(),
        "trace": [loaded.trace.name, loaded.fingerprint],
        "model": loaded.profile and dataclasses.asdict(loaded.profile),
        "machine": timed and dataclasses.asdict(timed.hardware),
        "drafter": timed and timed.drafter and dataclasses.asdict(timed.drafter),
        "predictor_us": timed and timed.predictor_us(policy),
        "policy": [policy.text, resolved],
        "files": [_sources(half) for half in (policy.evict, policy.prefetch)]
        + [_digest(text) for text in _texts(resolved)],
        "slots": slots,
        "code": sources(),
    }
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _texts(resolved: dict[str, dict[str, Any]]) -> list[str]:
    """Options that are texts, of which some name files: a profile, a collection."""
    options = (value for half in resolved.values() for name, value in half.items() if name != "name")
    return [value for value in options if isinstance(value, str)]


def _sources(half: Part) -> str | None:
    """Of a policy in a file of its own: the digest of that file and what it imports; else of a class's code."""
    if file_and_class(half.name):
        return user_file.content(half.cls)
    own = own_classes(half.cls)  # a cell's `code` stands for the others
    held = [each.__code__ for cls in own for each in vars(cls).values() if hasattr(each, "__code__")]
    codes = [marshal.dumps(code, 2) for code in held]  # later versions write what else refers to a constant
    return hashlib.sha256(b"".join(codes)).hexdigest() if own else None


@cache
def _digest(name: str) -> str | None:
    """Of a file's or a trace's content; None of what is neither."""
    if os.path.isdir(name):  # of a Path it raises for a text that is too long for a name
        return open_folder(name).fingerprint
    return hashlib.sha256(Path(name).read_bytes()).hexdigest() if os.path.isfile(name) else None


def _labelled(requests: pa.Table, key: str) -> pa.Table:
    place = requests.schema.get_field_index("cell")
    return requests.set_column(place, requests.schema.field(place), pa.array([key] * len(requests), pa.string()))
