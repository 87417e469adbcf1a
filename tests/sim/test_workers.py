"""Cells in threads, processes and on a real Dask cluster; each runs what one thread alone would."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from policies.core.policy import ScorePolicy
from policies.core.spec import PolicySpec, parse
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.results.files import REQUESTS_FILE, RESULTS_FILE
from sim.sweeps.grid import Grid, Table, outcome, run_grid, save, sweep
from sim.sweeps.store import Store
from sim.sweeps.workers import Cluster, Local, Task
from tests.support.tiny import SIZES
from traces import InputError
from traces.synthetic import synthetic
from traces.writer import write_trace

GRID = Grid(tuple(map(parse, ("lru", "clock", "eamc", "lru+popular"))), {"25%": 16, "50%": 32})
REQUESTS = 12


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    made = synthetic(REQUESTS, tokens=30, layers=4, experts=16, top_k=3, seed=3, prompt_tokens=6)
    folder = tmp_path_factory.mktemp("traces") / "tiny"
    write_trace(replace(made, meta=replace(made.meta, model="tiny", **SIZES)), folder)
    return TimedRun.of(Experiment(str(folder)))


def files(loaded, folder, players, advance=None):
    table, store = Table(loaded, GRID, folder), Store(folder)
    sweep([table], store, players, advance)
    save([outcome(table, store)], store, folder)
    return [(folder / name).read_bytes() for name in (RESULTS_FILE, REQUESTS_FILE)]


@pytest.fixture(scope="module")
def alone(loaded, tmp_path_factory):
    return files(loaded, tmp_path_factory.mktemp("alone"), Local(1))


def test_two_workers_write_the_bytes_that_one_writes_and_tell_of_every_request(loaded, alone, tmp_path):
    told = list[int]()
    assert files(loaded, tmp_path, Local(2), told.append) == alone
    assert sum(told) == REQUESTS * len(GRID.cells())


@pytest.mark.skipif(sys.platform == "win32", reason="has no masks")
def test_compiled_cells_and_what_only_this_process_knows_run_in_it_and_other_python_in_others(loaded):
    """Which have the machine of their task, also one made on the spot, and leave Ctrl-C to their parent."""
    policies = [*map(parse, PLACES), here_alone()]
    tasks = [Task(loaded, process_of_cell, (policy,), policy.compiled) for policy in policies]
    assert not tasks[-1].compiled
    other = replace(loaded, hardware=replace(loaded.hardware, link_bandwidth_gb_per_s=1.5))
    links = [Task(one, link_of, (), compiled) for one in (loaded, other) for compiled in (True, False)]
    results = dict(Local(2).results([*tasks, *links, Task(loaded, blocked, (), False)], lambda requests: None))
    found = [results[i] for i in range(len(results))]
    assert [process == os.getpid() for process in found[: len(tasks)]] == [*PLACES.values(), True]
    assert found[len(tasks) : -1] == [24, 24, 1.5, 1.5]
    assert signal.SIGINT in found[-1]


PLACES = {"lru": True, "clock": False, "eamc-blend": True, "sieve+markov": False}
"""Policies: whether threads run them."""


def process_of_cell(loaded, policy, advance):
    return os.getpid()


def link_of(loaded, advance):
    return loaded.hardware.link_bandwidth_gb_per_s


def blocked(loaded, advance):
    return signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_trace_that_another_one_replaces_is_not_run_by_other_processes(tmp_path):
    for seed in (3, 4):  # as many requests, tokens and experts
        made = synthetic(4, tokens=20, layers=4, experts=16, top_k=3, seed=seed)
        made = replace(made, meta=replace(made.meta, model="tiny", **SIZES))
        write_trace(made, tmp_path / "t", overwrite=True)
        if seed == 3:
            loaded = TimedRun.of(Experiment(str(tmp_path / "t")))
    tasks = [Task(loaded, process_of_cell, (parse("clock"),), False) for _ in range(2)]
    with pytest.raises(InputError):
        list(Local(2).results(tasks, lambda requests: None))


def test_an_error_in_a_cell_ends_the_others_and_is_told(loaded):
    for compiled in (True, False):
        tasks = [Task(loaded, fails, (i,), compiled) for i in range(6)]
        with pytest.raises(InputError, match="cell 2 failed"):
            list(Local(2).results(tasks, lambda requests: None))


def fails(loaded, number, advance):
    if number == 2:
        raise InputError(f"cell {number} failed")
    for _ in range(3):
        advance(1)


def test_stopping_ends_threads_and_processes_at_their_next_request(loaded):
    for compiled in (True, False):
        tasks = [Task(loaded, endless, (i,), compiled) for i in range(4)]
        playing, threads = Local(2).results(tasks, lambda requests: None), set(threading.enumerate())
        assert next(playing)[0] == 0
        playing.close()
        for thread in set(threading.enumerate()) - threads:
            thread.join(timeout=300)
            assert not thread.is_alive()


def endless(loaded, number, advance):
    while number:
        time.sleep(0.01)
        advance(1)


def test_a_worker_process_that_is_killed_is_told_in_one_line(loaded):
    tasks = [Task(loaded, killed, (), False) for _ in range(2)]
    with pytest.raises(InputError):
        list(Local(2).results(tasks, lambda requests: None))


def killed(loaded, advance):
    os.kill(os.getpid(), signal.SIGKILL)


ORPHANS = """
import os, sys, time
from sim.experiment import Experiment
from sim.loaded import CountedRun, TimedRun, load
from sim.sweeps.workers import Local, Task
from tests.sim.test_workers import endless, process_of_cell
loaded = TimedRun.of(Experiment(sys.argv[1]))
tasks = [Task(loaded, process_of_cell, (None,), False)] + [Task(loaded, endless, (1,), False)] * 2
for _, pid in Local(2).results(tasks, lambda requests: None):
    print(pid, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_processes_end_with_the_sweep_that_is_killed(loaded):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", ORPHANS, loaded.experiment.trace]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as sweeping:
        assert sweeping.stdout
        worker = Path("/proc") / sweeping.stdout.readline().strip()
        assert worker.exists()
        sweeping.kill()
    ends = time.monotonic() + 300
    while worker.exists() and time.monotonic() < ends:
        time.sleep(0.05)
    assert not worker.exists()


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    root = str(Path(__file__).parents[2])
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=":0", env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    ) as made:
        yield made


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGKILL")
def test_a_cluster_that_loses_a_worker_loses_nothing_and_counts_nothing_twice(loaded, alone, tmp_path, cluster):
    told = []

    def kill_one(requests):
        told.append(requests)
        if len(told) == 2:
            os.kill(next(iter(cluster.workers.values())).pid, signal.SIGKILL)

    assert files(loaded, tmp_path, Cluster(cluster.scheduler_address), kill_one) == alone
    assert sum(told) == REQUESTS * len(GRID.cells())


def here_alone() -> PolicySpec:
    """A policy that no other process can import, as one in a notebook: it runs as LRU does."""

    class Here(ScorePolicy):
        def observe(self, event):
            self.keep[0, event.experts] = event.serial

    return parse(Here)


def test_a_policy_that_only_this_process_knows_plays_in_it(loaded):
    here = here_alone()
    policies = (here, parse("lru+none"), parse("clock"))
    grid = Grid(policies, {"25%": 16})
    with_lru = {row["policy"]: row for row in run_grid(loaded, grid, workers=2)[0].rows}
    assert list(with_lru) == ["Here", "lru+none", "clock"]
    assert with_lru["Here"]["misses"] == with_lru["lru+none"]["misses"] > 0


def test_a_cluster_refuses_a_policy_that_only_this_process_knows(loaded, cluster):
    tasks = [Task(loaded, process_of_cell, (here_alone(),), False)]
    with pytest.raises(InputError):
        list(Cluster(cluster.scheduler_address).results(tasks, lambda requests: None))
