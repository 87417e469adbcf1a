"""A trace ten times as long takes no more memory: the peak of a process that goes through one of 0.5 M tokens from its
shards, or sweeps it, and of one that does so with 5 M.

Tokens are of 26 layers x top-6 of 64. Both draw their routing from one small pool, so that little is written.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.experiment import Experiment
from sim.loaded import load
from sim.sweeps.grid import grid_of, run_grid
from traces.shards import Shards
from traces.synthetic import synthetic
from traces.writer import TraceWriter

LAYERS, EXPERTS, TOP_K = 26, 64, 6
REQUESTS, PROMPT, DECODED = 20, 250, 250  # of a piece; requests of a piece ran together
PIECES = {"0.5 M": 50, "5 M": 500}
BOUND = 1.2
"""Of the peak of the long trace, in that of the short one."""


def write(path: Path, pieces: int) -> None:
    """Write the trace piece by piece."""
    piece = synthetic(REQUESTS, DECODED, LAYERS, EXPERTS, TOP_K, seed=0, prompt_tokens=PROMPT)
    step = piece.step - np.repeat(piece.step[piece.offsets[:-1]], np.diff(piece.offsets))
    with TraceWriter(path, piece.meta) as writer:
        for n in range(pieces):
            names = piece.requests.assign(id=[f"{n}-{i}" for i in range(REQUESTS)])
            writer.add(replace(piece, requests=names, step=step + np.uint32(n * (DECODED + 1))))


def walk(path: str) -> None:
    """Open a trace and go through it; print seconds and the peak in MB."""
    began = time.perf_counter()
    trace = Shards.open(path)
    for i in range(len(trace.requests)):
        trace.steps(i)
    report(began)


def sweep(path: str) -> None:
    """Sweep a trace under LRU, and Belady for the bound; the same."""
    compiled_engine.prepare()
    began = time.perf_counter()
    loaded = load(Experiment(str(path), model_profile="deepseek-v2-lite"))
    run_grid(loaded, grid_of(loaded, [parse("lru")], ["25%"]))
    report(began)


def report(began: float) -> None:
    print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)


DOES = {"walk": walk, "sweep": sweep}


def measure(what: str, path: Path) -> tuple[float, float]:
    """Seconds and MB of one of the above, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.streaming", what, str(path)]
    took, peak = subprocess.run(command, capture_output=True, check=True).stdout.split()
    return float(took), float(peak)


def main() -> None:
    peaks: dict[str, list[float]] = {what: [] for what in DOES}
    for name, pieces in PIECES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace"
            write(path, pieces)
            disk = sum(file.stat().st_size for file in path.rglob("*.parquet")) / 1e6
            ids = pieces * REQUESTS * (PROMPT + DECODED) * LAYERS * TOP_K / 1e6
            print(f"a trace of {name} tokens, {ids:.0f} MB of ids, {disk:.0f} MB on disk:", end="")
            for what in DOES:
                took, peak = measure(what, path)
                peaks[what].append(peak)
                print(f" {what} {took:.1f} s, peak {peak:.0f} MB;", end="", flush=True)
            print()
    for what, (short, long) in peaks.items():
        print(f"{what}: ten times the tokens take {long / short:.2f} times the memory (at most {BOUND})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=DOES, nargs="?")
    parser.add_argument("trace", nargs="?")
    asked = parser.parse_args()
    DOES[asked.what](asked.trace) if asked.what else main()
