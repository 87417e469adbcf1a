"""A trace ten times as long takes no more memory: the peak of a process that plays one of 0.5 M tokens from its shards,
and of one that plays 5 M, and how long opening and going through them takes.

Tokens are of 26 layers x top-6 of 64. Both draw their routing from one small pool, so that little is written.
`python -m benchmarks.streaming --play FOLDER` is one of the two processes.
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


def play(path: str) -> None:
    """Open a trace and go through it; print seconds to open, seconds to play, accesses and the peak in MB."""
    began = time.perf_counter()
    trace = Shards.open(path)
    opened = time.perf_counter()
    accesses = sum(len(trace.steps(i).experts) for i in range(len(trace.requests)))
    played = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(opened - began, played - opened, accesses, peak)


def measure(path: Path) -> tuple[float, float, int, float]:
    """What `play` prints, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.streaming", "--play", str(path)]
    opened, played, accesses, peak = subprocess.run(command, capture_output=True, check=True).stdout.split()
    return float(opened), float(played), int(accesses), float(peak)


def main() -> None:
    peaks = []
    for name, pieces in PIECES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace"
            write(path, pieces)
            opened, played, accesses, peak = measure(path)
            disk = sum(file.stat().st_size for file in path.rglob("*.parquet")) / 1e6
        peaks.append(peak)
        tokens = pieces * REQUESTS * (PROMPT + DECODED)
        ids = tokens * LAYERS * TOP_K / 1e6
        print(
            f"a trace of {name} tokens ({ids:.0f} MB of ids, {disk:.0f} MB on disk, {accesses:,} accesses): "
            f"opened in {opened:.1f} s, gone through in {played:.1f} s, peak {peak:.0f} MB"
        )
    print(f"ten times the tokens take {peaks[1] / peaks[0]:.2f} times the memory (at most {BOUND})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--play")
    path = parser.parse_args().play
    play(path) if path else main()
