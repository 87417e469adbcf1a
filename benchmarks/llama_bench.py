"""`python -m benchmarks.llama_bench` takes options of llama-bench and prints JSON of the same keys, on the CPU.

It calls llama.cpp in the binding of the extra `llama`, where no llama-bench is on PATH. A token of each model and depth
is decoded in turns, so that what else the machine does slows all alike. It is a process of its own, which llama.cpp
ends where an assertion fails.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from sim.planner.calibration import REPEATS, TOKENS
from traces.errors import InputError
from traces.llama_library import library

BATCH = 512
"""Tokens of a prompt that run at once."""

WARM = 3
"""Tokens that are decoded first and not counted."""

BINDING = (sys.executable, "-m", "benchmarks.llama_bench")


def _context(path: str, model: int, depth: int, options: argparse.Namespace) -> int:
    """Return a context of the model that has run a prompt of so many tokens."""
    llama = library()
    size = -(-(depth + WARM + options.n_gen * options.repetitions) // 256) * 256
    threads = {"n_threads": options.threads, "n_threads_batch": options.threads}
    context = llama.context(model, n_ctx=size, n_batch=BATCH, n_ubatch=BATCH, swa_full=False, **threads)
    if not context:
        raise InputError(f"{path} has no context of {size} tokens: {'; '.join(llama.errors[:1])}")
    words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    for begin in range(0, depth, BATCH):
        _decode(context, np.random.default_rng(begin).integers(0, words, min(BATCH, depth - begin)).tolist())
    return context


def _decode(context: int, tokens: list[int]) -> None:
    llama = library()
    if status := llama.decode(context, tokens):
        raise InputError(f"llama.cpp ran {len(tokens)} tokens with status {status}: {'; '.join(llama.errors[:1])}")


def _measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each model and depth; the process ends with what it has opened."""
    clock = time.thread_time_ns if options.processor_time else time.perf_counter_ns
    llama, contexts, rows = library(), list[int](), list[dict[str, Any]]()
    for path in options.model:
        model = llama.load(Path(path), n_gpu_layers=0, use_extra_bufts=bool(options.repack))
        for depth in map(int, options.n_depth.split(",")):
            contexts.append(_context(path, model, depth, options))
            shape = {"n_gen": 1, "n_depth": depth, "n_threads": options.threads}
            rows.append({"model_filename": path, **shape, "samples_ns": [], **llama.tools})
    for number in range(WARM + options.n_gen * options.repetitions):
        for context, row in zip(contexts, rows, strict=True):
            began = clock()
            _decode(context, [1 + 7 * number])
            row["samples_ns"] += [clock() - began] * (number >= WARM)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama_bench", description=__doc__)
    parser.add_argument("-m", "--model", action="append", required=True)
    parser.add_argument("-n", "--n-gen", type=int, default=TOKENS)
    parser.add_argument("-r", "--repetitions", type=int, default=REPEATS)
    parser.add_argument("-d", "--n-depth", default="0")
    parser.add_argument("-t", "--threads", type=int, required=True)
    parser.add_argument("--repack", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="of the one thread: not of what else runs")
    parser.add_argument("-p", "--n-prompt", choices=["0"], default="0")
    parser.add_argument("-ngl", "--n-gpu-layers", choices=["0"], default="0")
    parser.add_argument("-o", "--output", choices=["json"], default="json")
    try:
        print(json.dumps(_measured(parser.parse_args())))
    except InputError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
