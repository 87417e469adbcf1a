"""The sweep: cells of policies x cache sizes over one trace, in as many processes as asked for.

A cell depends on nothing but its setup, so neither the number of workers nor the order in which they finish
changes a result; rows come in the order of sizes, then of policies as typed. Belady is the bound: where it
was not asked for, it is computed for the plots and gets no row.
"""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from policies.registry import PolicySpec, parse
from sim import plot, results, winner
from sim.cells import Loaded, Setup
from sim.log import RunLog
from sim.results import REQUESTS, RESULTS, Row
from sim.winner import Winner

Advance = Callable[[int], None]

T = TypeVar("T")

BOUND = "belady"


@dataclass(frozen=True)
class Grid:
    """What is swept, without repetitions."""

    policies: tuple[PolicySpec, ...]
    sizes: dict[str, int]  # as typed: slots, no two the same

    def cells(self) -> list[tuple[PolicySpec, int]]:
        """In the order of the rows, the bound's last."""
        asked = [(policy, slots) for slots in self.sizes.values() for policy in self.policies]
        return asked + [(parse(BOUND), slots) for slots in self.sizes.values() if not self.asks_for_bound]

    @property
    def asks_for_bound(self) -> bool:
        """Whether the bound is one of the policies, so that its rows are wanted."""
        return any(policy.text == BOUND for policy in self.policies)


@dataclass(frozen=True)
class Outcome:
    """What a sweep found, as far as it came."""

    rows: list[Row]
    requests: list[Row]
    bound: list[Row]  # of Belady, by size
    winners: list[Winner]
    judged_by: str  # the column that chose the winners
    complete: bool  # False: interrupted, and these are the cells that had finished


def sweep(loaded: Loaded, grid: Grid, workers: int = 1, advance: Advance | None = None) -> Outcome:
    """Play every cell of the grid; `advance` is told the number of requests played since its last call.

    Ctrl-C stops all workers, and the outcome then holds what was finished.
    """
    cells = grid.cells()
    done = play_all(loaded, _play, cells, workers, advance)
    rows = {(cell[0].text, cell[1]): found for cell, found in zip(cells, done, strict=True) if found}
    asked = [(policy, slots) for policy, slots in cells if policy in grid.policies]
    for policy, slots in asked:
        without = _misses_without_prefetch(policy, slots, grid, rows)
        if without is not None and (policy.text, slots) in rows:
            row = rows[policy.text, slots][0]
            row["prefetch_coverage"] = results.coverage(row["misses"], without)
    found = [rows[policy.text, slots] for policy, slots in asked if (policy.text, slots) in rows]
    table = [row for row, _ in found]
    return Outcome(
        rows=table,
        requests=[row for _, by_request in found for row in by_request],
        bound=[rows[BOUND, slots][0] for slots in grid.sizes.values() if (BOUND, slots) in rows],
        winners=winner.choose(table, grid.sizes),
        judged_by=winner.metric(table),
        complete=all(done),
    )


def save(outcome: Outcome, loaded: Loaded, folder: Path) -> list[Path]:
    """Write what was found, each file whole or not at all; the files.

    Of an interrupted sweep only the tables are kept, in a folder `interrupted` of their own, so that they
    replace nothing that is complete.
    """
    if not outcome.complete:
        folder = folder / "interrupted"
    results.writable(folder)
    tables = [folder / "results.parquet", folder / "requests.parquet"]
    results.write_rows(outcome.rows, RESULTS, tables[0])
    results.write_rows(outcome.requests, REQUESTS, tables[1])
    if not outcome.complete:
        return tables
    winner.write(folder / winner.NAME, loaded.setup, outcome.judged_by, outcome.winners)
    demand = loaded.token_experts / loaded.all_experts
    plots = plot.draw(outcome.rows, outcome.bound, demand, ("hit_rate", outcome.judged_by), folder)
    return [*tables, folder / winner.NAME, *plots]


Found = tuple[Row, list[Row]]


def _misses_without_prefetch(
    policy: PolicySpec, slots: int, grid: Grid, rows: dict[tuple[str, int], Found]
) -> int | None:
    """Of the cell that differs in nothing but prefetch; None if `policy` is one, or the grid has none."""
    plain = policy.without_prefetch().resolved()
    if policy.resolved() == plain:
        return None
    same = [other.text for other in grid.policies if other.resolved() == plain and (other.text, slots) in rows]
    return int(rows[same[0], slots][0]["misses"]) if same else None


def _play(loaded: Loaded, policy: PolicySpec, slots: int, played: Advance) -> Found:
    """One cell, summarised where it was run: logs are large."""
    summary = results.Summary(loaded.cell(policy, slots), loaded.trace.requests)

    def ended(log: RunLog) -> None:
        summary.add(log)
        played(1)

    loaded.play(policy, slots, ended)
    return summary.row(), summary.requests().to_pylist()


def play_all(
    loaded: Loaded,
    play: Callable[..., T],
    cells: Sequence[tuple[Any, ...]],
    workers: int = 1,
    advance: Advance | None = None,
) -> list[T | None]:
    """`play(loaded, *cell, played)` of each cell, in the order of the cells; None where Ctrl-C came first.

    `play` is a function of a module, which a worker process finds by its name; it calls `played` with the number of
    requests played since its last call, of which `advance` is told.
    """
    workers, tell = min(workers, len(cells)), advance or (lambda played: None)
    return _one_by_one(loaded, play, cells, tell) if workers == 1 else _in_processes(loaded, play, cells, workers, tell)


def _one_by_one(
    loaded: Loaded, play: Callable[..., T], cells: Sequence[tuple[Any, ...]], advance: Advance
) -> list[T | None]:
    """In this process."""
    done: list[T | None] = []
    try:
        for cell in cells:
            done += [play(loaded, *cell, advance)]
    except KeyboardInterrupt:
        done += [None] * (len(cells) - len(done))
    return done


def _in_processes(
    loaded: Loaded, play: Callable[..., T], cells: Sequence[tuple[Any, ...]], workers: int, advance: Advance
) -> list[T | None]:
    """In `workers` processes, each with the trace in memory once."""
    context = multiprocessing.get_context("spawn")
    counter = context.Value("q", 0)
    strangers = set(multiprocessing.active_children())
    seen = 0
    with ProcessPoolExecutor(workers, context, _begin_worker, (loaded.setup, counter)) as pool:
        futures: list[Future[T]] = []
        try:
            with _interrupts_later():
                futures += [pool.submit(_play_in_worker, play, cell) for cell in cells]
            running = set(futures)
            while running:
                finished, running = wait(running, timeout=0.1, return_when=FIRST_COMPLETED)
                advance(counter.value - seen)
                seen = counter.value
                for future in finished:
                    future.result()
        except BaseException as error:
            finished_now = [future.result() if _succeeded(future) else None for future in futures]
            for process in set(multiprocessing.active_children()) - strangers:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            if not isinstance(error, KeyboardInterrupt):
                raise
            return finished_now + [None] * (len(cells) - len(futures))
    return [future.result() for future in futures]


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Put Ctrl-C off to the end of the block; processes started in it leave it to this one for good."""
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "pthread_sigmask")):  # elsewhere, and on Windows, nothing can be put off
        yield
        return
    missed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: missed.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
    if missed:
        raise KeyboardInterrupt


def _succeeded(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


_worker: dict[str, Any] = {}
"""What a worker process holds between its cells; empty in every other process."""


def _begin_worker(setup: Setup, counter: Any) -> None:
    """Read the trace once, for all cells to come: each process reads it itself, all at the same time."""
    _worker.update(loaded=setup.load(), counter=counter)


def _play_in_worker(play: Callable[..., T], cell: tuple[Any, ...]) -> T:
    def played(requests: int) -> None:
        with _worker["counter"].get_lock():
            _worker["counter"].value += requests

    return play(_worker["loaded"], *cell, played)
