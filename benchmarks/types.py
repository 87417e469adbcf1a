"""What a weight takes one thread to multiply in llama.cpp, by its type: `python -m benchmarks.types [TYPE ...]`.

Decodes with one and with three layers of OLMoE's shape, eight experts each, all matrices of a layer in one type; the
difference is the time of two layers. Reading at STREAM Triad's rate is taken out as the side of a right angle
(`sim.prediction.timing`). Processor time of one thread, the least of ROUNDS. Writes 2 GB beside temporary files.
"""

import sys
import time
from dataclasses import replace
from math import prod, sqrt
from pathlib import Path
from tempfile import TemporaryDirectory

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from benchmarks.llama_bench import BINDING
from sim.planner import random_gguf
from sim.prediction.tables import FACTORS
from sim.probe.cores import core_classes
from sim.probe.stream import triad
from traces.models.gguf_files import GgufFile
from traces.models.profile import model

TYPES = (
    *(
        "F16",
        "BF16",
        "Q8_0",
        "Q6_K",
        "Q5_K",
        "Q5_0",
        "Q4_K",
        "Q4_0",
        "Q4_1",
        "IQ4_NL",
        "IQ4_XS",
        "MXFP4",
        "Q3_K",
        "Q2_K",
    ),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
)
UNIT = "Q4_K"
LAYERS, EXPERTS, ROUNDS = (1, 3), 8, 2


def of_type(whole: GgufFile, dtype: str, layers: int) -> tuple[GgufFile, int]:
    """Return so many layers with all matrices in a type, and how many weights these have."""
    count, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    file, tensors, weights = random_gguf.cut(whole, layers, EXPERTS), [], 0
    for each in file.tensors:
        if each.name.startswith("blk.") and each.dtype != "F32":
            weights += prod(each.shape)
            each = replace(each, dtype=dtype, size=prod(each.shape) // count * size)
        tensors.append(each)
    return replace(file, tensors=tensors), weights


def ns_a_weight(dtype: str, folder: Path) -> float:
    whole, paths, weights = random_gguf.of_profile(model("olmoe-1b-7b"), "q4_k_s"), [], []
    for layers in LAYERS:
        file, count = of_type(whole, dtype, layers)
        paths.append(folder / f"{layers}.gguf")
        weights.append(count)
        random_gguf.write(paths[-1], file)
    rounds = [BINDING.seconds(paths, (0,), ["-t", "1", "--processor-time"]) for _ in range(ROUNDS)]
    few, many = (min(took[path, 0] for took in rounds) for path in paths)
    return 1e9 * (many - few) / (weights[1] - weights[0])


def main() -> None:
    """Print the time of each type, and how many times that of UNIT its multiplying is."""
    gb_per_s = triad(core_classes()[0].cpus[:1], clock=time.thread_time) * FACTORS.host_experts_of_stream
    multiplying = dict[str, float]()
    print(f"llama.cpp, one thread, which reads {gb_per_s:.1f} GB/s\n| type | ns a weight | multiplying | x {UNIT} |")
    with TemporaryDirectory() as folder:
        for dtype in (UNIT, *(each for each in sys.argv[1:] or TYPES if each != UNIT)):
            count, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
            took = ns_a_weight(dtype, Path(folder))
            multiplying[dtype] = sqrt(max(0.0, took**2 - (size / count / gb_per_s) ** 2))
            times = multiplying[dtype] / multiplying[UNIT]
            print(f"| {dtype} | {took:.4f} | {multiplying[dtype]:.4f} | {times:.2f} |", flush=True)


if __name__ == "__main__":
    main()
