"""How time and memory grow with a trace: commands over traces of 10^5 to 10^7 tokens, and policies over models of
24 x 32 to 90 x 512 experts, with the exponents between one size and the next.

`python -m benchmarks scale` takes half an hour, most of it for 10^7 tokens, and 3 GB of disk: `--small` does without.
"""

import os
import subprocess
import sys
import tempfile
from math import log
from pathlib import Path
from time import process_time
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np

from policies.core.policy import Shape
from policies.core.spec import parse
from sim.engines import compiled_engine
from sim.loop.run import gpu_run
from sim.profiles.timing import FixedTiming, Link
from traces.synthetic import synthetic

TOKENS = (100_000, 1_000_000, 10_000_000)
LENGTH, DISTINCT = 250, 40  # tokens of a request; requests that differ
SHAPES = ((24, 32, 4), (48, 128, 8), (90, 512, 8))
POLICIES = ("lru", "lfu", "belady", "eamc", "eamc-blend")
GB = 0.7
"""What a command may hold; a report twice as much."""
EXPONENT = 1.05

GRID = "--policies lru --cache-sizes 25%"
COMMANDS = {
    "import": "moe-trace import x.npz --phase decode --experts 32 --out trace --overwrite --quiet",
    "check": "moe-trace check trace",
    "info": "moe-trace info trace --json",
    "run": "moe-sim run trace --model-profile gpt-oss-20b --policy lru --cache-size 25% --quiet",
    "sweep": f"moe-sim sweep trace --model-profile gpt-oss-20b {GRID} --out swept --overwrite --quiet",
    "report": "moe-sim report swept --out report.html --overwrite --quiet",
    "analyze": f"moe-sim analyze trace {GRID} --out analysis --quiet",
}


def write(folder: Path, tokens: int) -> None:
    """Write a dump of so many tokens, of requests in random order."""
    routing = synthetic(DISTINCT, LENGTH, *SHAPES[0], seed=0).experts.reshape(DISTINCT, -1)
    offsets = np.arange(0, tokens + 1, LENGTH)
    head = {"descr": "|u1", "fortran_order": False, "shape": (tokens, SHAPES[0][0], SHAPES[0][2])}
    with ZipFile(folder / "x.npz", "w", ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("experts.npy", "w", force_zip64=True) as file:
            np.lib.format.write_array_header_1_0(file, head)
            for request in np.random.default_rng(0).integers(DISTINCT, size=len(offsets) - 1):
                file.write(routing[request].tobytes())
        with archive.open("offsets.npy", "w") as file:
            np.lib.format.write_array(file, offsets)


def measured(command: str, folder: Path) -> tuple[float, float]:
    """Return the CPU seconds of a command, and the GB that it held at most."""
    program, *options = command.split()
    path = str(Path(sys.executable).with_name(program))
    with subprocess.Popen([path, *options], cwd=folder, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with status {process.returncode}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1e6


def growth(values: list[float], sizes: tuple[int, ...]) -> str:
    """Return the exponents between one size and the next."""
    pairs = zip(values, values[1:], sizes, sizes[1:], strict=False)
    return ", ".join(f"{log(b / a) / log(n / m):.2f}" for a, b, m, n in pairs)


def commands(sizes: tuple[int, ...]) -> bool:
    """Measure the commands; whether each stays within its bounds."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as scratch:
        for tokens in sizes:
            write(Path(scratch), tokens)
            for name, command in COMMANDS.items():
                found[name].append(measured(command, Path(scratch)))
    print(f"{'':<10}{'CPU s':>24}  {'exponents':<12}{'GB':>20}, at {', '.join(f'{n:,}' for n in sizes)} tokens")
    good = True
    for name, values in found.items():
        seconds, gb = [each for each, _ in values], [each for _, each in values]
        good &= gb[-1] <= GB * (2 if name == "report" else 1)
        good &= len(sizes) < 2 or log(seconds[-1] / seconds[-2]) / log(sizes[-1] / sizes[-2]) <= EXPONENT
        shown = (" ".join(f"{each:{form}}" for each in parts) for parts, form in ((seconds, "7.1f"), (gb, "6.2f")))
        print(f"{name:<10}{next(shown):>24}  {growth(seconds, sizes):<12}{next(shown):>20}", flush=True)
    return good


def policies() -> None:
    """Measure what an event takes under policies, with a quarter of the experts cached."""
    sizes = tuple(layers * experts for layers, experts, _ in SHAPES)
    print(f"{'':<12}{'us an event':>24}  exponents, at {', '.join(f'{n:,}' for n in sizes)} experts")
    for name in POLICIES:
        us = []
        for layers, experts, top_k in SHAPES:
            requests, tokens = 6, 4_800 // layers
            trace = synthetic(requests, tokens, layers, experts, top_k, seed=1)
            steps = [trace.steps(i) for i in range(requests)]
            timing, link = FixedTiming(90_000, 1_000, 10, 100, 1_000), Link(1_000, 1, 24, 200_000)
            run = gpu_run(steps, Shape(layers, experts), layers * experts // 4, parse(name), timing, link)
            spent = []
            for _ in range(4):  # the first one compiles
                began = process_time()
                compiled_engine.simulate(run)
                spent.append(process_time() - began)
            us.append(min(spent) * 1e6 / (requests * tokens * layers))
        print(f"{name:<12}{' '.join(f'{each:7.2f}' for each in us):>24}  {growth(us, sizes)}", flush=True)


def main() -> None:
    policies()
    if not commands(TOKENS[: 2 if "--small" in sys.argv else 3]):
        raise SystemExit("memory or time grows faster than it should")
