"""What the parts of a model take in this machine's llama.cpp, from cuts of its shape with random weights.

docs/planner.md says how (`--calibrate`). With a GPU each cut runs with its experts on either side.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import psutil

from sim.planner import random_gguf
from sim.planner.placements import Layout
from traces.errors import InputError
from traces.models import gguf_files
from traces.models.gguf_files import GgufFile
from traces.models.gguf_profile import of_file
from traces.models.profile import ModelProfile

BENCH = "llama-bench"

TOKENS, REPEATS = 8, 5
"""That are decoded at a time, and how often."""

LAYERS = (2, 4, 8)

LARGEST_BYTES = 3 << 30
"""Of the largest cut, unless less memory is free: models of larger layers are cut to fewer experts."""

DEPTH = 2048

OFF = 0.06
"""How far off a calibrated prediction is taken to be: docs/planner.md shows what was measured."""


@dataclass(frozen=True)
class Calibration:
    """Seconds of a token: `fixed_s`, and for each byte of layers that the GPU, or the CPU, reads for it.

    profile: the model with the sizes of its file. Without a GPU the CPU's rate is that of all bytes. value_s: for each
    value in the cache of keys and values.
    """

    profile: ModelProfile
    fixed_s: float
    gpu_byte_s: float
    cpu_byte_s: float
    value_s: float

    def seconds(self, host_layers: int, on_gpu: bool, context: float) -> float:
        """Return the seconds of a token behind so many others, with the experts of the first layers on the CPU."""
        gpu, cpu = bytes_read(self.profile, host_layers, on_gpu)
        layers_s = gpu * self.gpu_byte_s + cpu * self.cpu_byte_s
        return self.fixed_s + layers_s + values(self.profile, context) * self.value_s

    def facts(self) -> dict[str, float]:
        gpu, cpu = bytes_read(self.profile, self.profile.moe_layers, on_gpu=False)
        layers = len(self.profile.order)
        return {
            "fixed_ms": 1e3 * self.fixed_s,
            "ms_per_layer": 1e3 * (gpu + cpu) * self.cpu_byte_s / layers,
            "ms_per_layer_and_1000_tokens": 1e3 * self.value_s * values(self.profile, 1000) / layers,
        }


def bytes_read(profile: ModelProfile, host_layers: int, on_gpu: bool) -> tuple[float, float]:
    """Return the bytes of layers that GPU and CPU read for a token."""
    dense = profile.layers_parameters * profile.dense_bytes_per_parameter
    sizes = [profile.top_k * profile.bytes_of(layer) for layer in range(profile.moe_layers)]
    if not on_gpu:
        return 0.0, dense + sum(sizes)
    return dense + sum(sizes[host_layers:]), float(sum(sizes[:host_layers]))


def values(profile: ModelProfile, context: float) -> float:
    return sum(kind.kept(context) for kind in profile.order)


def calibrate(
    layout: Layout, path: str, bench: Sequence[str], flags: Sequence[str], say: Callable[[str], None]
) -> Calibration:
    """Measure cuts of a model; path: its GGUF file, URL or ""; flags: of every run; say: gets progress. InputError."""
    whole = gguf_files.read(path) if path else random_gguf.of_profile(layout.profile, layout.precision)
    named = of_file(whole, layout.profile.name)
    profile = replace(named, layers=layout.profile.layers, kinds=layout.profile.kinds)  # its own windows of attention
    shapes = [random_gguf.cut(whole, layers, experts_of(whole, profile)) for layers in sizes_of(profile)]
    profiles = [of_file(shape, "cut") for shape in shapes]
    with TemporaryDirectory(prefix="moe-sim-") as folder:
        files = [Path(folder) / f"{len(one.order)}.gguf" for one in profiles]
        for file, shape in zip(files, shapes, strict=True):
            say(f"writing a cut of {shape.key('block_count')} layers")
            random_gguf.write(file, shape)
        rows = list[tuple[float, float, float, float]]()  # 1, bytes of the GPU, bytes of the CPU, seconds
        for on_cpu in (False, True) if layout.on_gpu else (True,):
            say(f"decoding with experts on the {'CPU' if on_cpu else 'GPU'}")
            own = [*flags, *placed(999 if on_cpu else 0, layout.on_gpu)]
            took = seconds(bench, files, (0,), own)
            for file, one in zip(files, profiles, strict=True):
                gpu, cpu = bytes_read(one, one.moe_layers if on_cpu else 0, layout.on_gpu)
                rows.append((1.0, gpu, cpu, took[file, 0]))
        say(f"decoding behind {DEPTH:,} tokens")
        middle = len(files) // 2
        deep = seconds(bench, [files[middle]], (0, DEPTH), own)
    fixed, gpu_s, cpu_s = _fitted(np.array(rows))
    alone = took[files[middle], 0]  # of the same run as the others
    slower = max(0.0, deep[files[middle], DEPTH] / deep[files[middle], 0] - 1)
    value_s = slower * alone / values(profiles[middle], DEPTH)
    return Calibration(profile, fixed, gpu_s, cpu_s, value_s)


def bench_on_path() -> list[str]:
    """Return the command of llama-bench. Raise InputError where there is none."""
    if path := shutil.which(BENCH):
        return [path]
    raise InputError(f"no {BENCH} here: put that of your llama.cpp on PATH")


def seconds(
    bench: Sequence[str], files: Sequence[Path], depths: Sequence[int], flags: Sequence[str]
) -> dict[tuple[Path, int], float]:
    """Return the seconds of a token decoded behind so many others, by file and depth. Raise InputError."""
    models = [part for file in files for part in ("-m", str(file))]
    shape = ["-p", "0", "-n", str(TOKENS), "-r", str(REPEATS), "-d", ",".join(map(str, depths)), "-o", "json"]
    done = subprocess.run([*bench, *models, *shape, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise InputError(f"{BENCH} ended with status {done.returncode}: {'; '.join(last)}")
    rows = json.loads(done.stdout)
    return {
        (Path(row["model_filename"]), row["n_depth"]): median(row["samples_ns"]) / row["n_gen"] / 1e9 for row in rows
    }


def placed(host_layers: int, on_gpu: bool) -> list[str]:
    """Return the options of llama-bench that keep the experts of the first layers of a file on the CPU."""
    if not on_gpu:
        return ["-ngl", "0"]
    return ["-ngl", "99", *(["-ncmoe", str(host_layers)] if host_layers else [])]


def sizes_of(profile: ModelProfile) -> list[int]:
    """Return the layers of the cuts: those before the first MoE layer, and a few more."""
    first = profile.places[0]
    return sorted({min(first + layers, len(profile.order)) for layers in LAYERS})


def experts_of(whole: GgufFile, profile: ModelProfile) -> int:
    """Return the experts of the cuts: half as many again and again, until the largest is small enough."""
    most, layers = min(LARGEST_BYTES, psutil.virtual_memory().available // 6), sizes_of(profile)[-1]

    def size(experts: int) -> int:
        return sum(each.size for each in random_gguf.cut(whole, layers, experts).tensors)

    experts = profile.experts
    while experts // 2 >= 2 * profile.top_k and size(experts) > most:
        experts //= 2
    return experts


def _fitted(rows: np.ndarray) -> tuple[float, float, float]:
    """Return what is fixed, and the seconds of a byte that GPU and CPU read, by least squares of relative errors."""
    x, seconds = rows[:, :3], rows[:, 3]
    scale = np.where(x.max(axis=0) > 0, x.max(axis=0), 1.0)
    found = np.linalg.lstsq(x / scale / seconds[:, None], np.ones(len(seconds)), rcond=None)[0] / scale
    fixed, gpu_s, cpu_s = found.tolist()
    return fixed, gpu_s, cpu_s
