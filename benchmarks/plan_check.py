"""Plans against llama.cpp on this machine: four files of random weights, short and behind 2,048 tokens.

    python -m benchmarks.plan_check FOLDER --write    # 22 GB of files, once
    python -m benchmarks.plan_check FOLDER            # on a quiet machine: all cores, about 9 minutes
    python -m benchmarks.plan_check FOLDER --one-thread [NAME ...]    # on a busy one: a thread's processor time

Prints measured tokens a second, and the errors of the plan, uncalibrated and calibrated (predicted / measured - 1).
STREAM Triad is read before each file.
"""

import argparse
import time
from pathlib import Path

from benchmarks.llama_bench import BINDING
from sim.planner import random_gguf
from sim.planner.calibration import TOKENS, calibrate, seconds
from sim.planner.placements import Layout
from sim.planner.resources import resources
from sim.planner.verification import DEPTHS, Variant, predicted_s
from sim.prediction.described import Model
from sim.probe import busy
from sim.probe.cores import core_classes, processor
from sim.probe.stream import triad
from traces.models.profile import model

FILES = {
    "olmoe-1b-7b-q4_k_m": 16,
    "deepseek-v2-lite-q4_k_m": 16,
    "gpt-oss-20b-mxfp4": 12,
    "qwen3-30b-a3b-q8_0": 10,
}
"""Layers of each file, whose name is that of a model and of a precision."""


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, layers in FILES.items():
        profile, precision = next((each, name[len(each) + 1 :]) for each in _names() if name.startswith(f"{each}-"))
        whole = random_gguf.of_profile(model(profile), precision)
        random_gguf.write(folder / f"{name}.gguf", random_gguf.cut(whole, layers))


def _names() -> tuple[str, ...]:
    return ("olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b", "qwen3-30b-a3b")


def check(path: Path, one_thread: bool) -> None:
    cpus = core_classes()[0].cpus[: 1 if one_thread else None]
    rate = triad(cpus, clock=time.thread_time if one_thread else time.perf_counter)
    measured = f"{rate}GB/s measured"
    machine = resources(host_memory="64GiB", cpu_bandwidth=measured, threads=len(cpus), cpu=processor())
    layout, bench = Layout(Model(path.stem, str(path)), machine, 512), BINDING
    flags = ["-t", str(len(cpus)), *(["--processor-time"] if one_thread else [])]
    calibration = calibrate(layout, str(path), bench, flags, lambda text: None)
    took = seconds(bench, [path], DEPTHS, [*flags, "-ngl", "0"])
    variant = Variant(len(cpus), layout.profile.moe_layers, True)
    for depth in DEPTHS:
        plain, calibrated = (predicted_s(layout, variant, depth + TOKENS, each) for each in (None, calibration))
        measured = took[path, depth]
        print(
            f"| {path.stem} | {rate:.1f} | {depth:,} | {1 / measured:.2f} | {measured / plain - 1:+.1%} "
            f"| {measured / calibrated - 1:+.1%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(FILES))
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one-thread", action="store_true")
    options = parser.parse_args()
    if options.write:
        write(options.folder)
        return
    if not options.one_thread:
        busy.require_quiet(busy.load())
    print("| file | Triad, GB/s | behind | tokens/s | plan | calibrated |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for name in options.names:
        check(options.folder / f"{name}.gguf", options.one_thread)


if __name__ == "__main__":
    main()
