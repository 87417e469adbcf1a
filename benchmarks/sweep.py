"""Sweeps of eight policies: two workers against one, and with a recorded trace how long ten cache sizes take.

`python -m benchmarks sweep --trace=FOLDER` sweeps that trace at ten sizes with two workers; the target, for the 2.96 M
layer-steps of gpt-oss-20b, is five minutes on two cores of 2025. Without, a short synthetic one of that shape is swept
at three sizes with one worker and with two, which have to be at least 1.6 times as fast.
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.experiment import Experiment
from sim.loaded import TimedRun
from sim.sweeps.grid import Grid, grid_of, run_grid
from traces.synthetic import synthetic
from traces.writer import write_trace

POLICIES = ("lru", "lfu", "fifo", "lrfu", "lru+popular", "eamc", "eamc-blend", "belady")
SIZES = ("5%", "10%", "15%", "20%", "25%", "30%", "40%", "50%", "60%", "75%")
FEW_SIZES = ("10%", "25%", "50%")
GAIN = 1.6
ROUNDS = 3


def seconds(loaded: TimedRun, grid: Grid, workers: int) -> float:
    began = time.perf_counter()
    run_grid(loaded, grid, workers)
    return time.perf_counter() - began


def two_against_one() -> None:
    made = synthetic(20, 200, layers=24, experts=32, top_k=4, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        write_trace(replace(made, meta=replace(made.meta, model="openai/gpt-oss-20b")), Path(folder) / "t")
        loaded = TimedRun.of(Experiment(str(Path(folder) / "t")))
        grid = grid_of(loaded, list(map(parse, POLICIES)), FEW_SIZES)
        gains = [seconds(loaded, grid, 1) / seconds(loaded, grid, 2) for _ in range(ROUNDS)]
    print(
        f"sweep of {len(grid.cells())} cells: two workers {statistics.median(gains):.2f} times as fast as one "
        f"(at least {GAIN}, on {os.cpu_count()} idle cores)"
    )


def whole(folder: str) -> None:
    loaded = TimedRun.of(Experiment(folder))
    grid = grid_of(loaded, list(map(parse, POLICIES)), SIZES)
    steps = int(loaded.trace.offsets[-1]) * loaded.trace.layers
    took = seconds(loaded, grid, 2)
    print(f"sweep of {len(grid.cells())} cells of {steps:,} layer-steps with two workers: {took:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sweep", allow_abbrev=False)
    parser.add_argument("--trace", metavar="FOLDER", help="sweep this trace at ten sizes, once")
    folder = parser.parse_known_args()[0].trace
    compiled_engine.prepare()
    if folder:
        whole(folder)
    else:
        two_against_one()
