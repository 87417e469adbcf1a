"""A plan as the command line of llama.cpp and of vLLM.

`--n-cpu-moe N` keeps the experts of the first N layers of the file in host memory, layers without experts counted;
`-ot` states the same by the names of tensors. `-ts` splits layers over GPUs, and an expert cache likewise. vLLM:
`--cpu-offload-gb` is in GiB.
"""

from collections.abc import Sequence

from sim.planner.placements import Layout, Placement
from sim.planner.resources import GIB, reserved


def llama_cpp(layout: Layout) -> list[str]:
    """Return the options of llama-server or llama-cli; the second spells out what the first says in short."""
    n, common = layout.host_layers, _common(layout)
    if not layout.on_gpu:
        return [f"-ngl 0 {common}"]
    if not n:
        return [f"-ngl 99 {common}"]
    last = layers_of_file(layout, n)
    layers = "|".join(map(str, range(last)))
    return [
        f"-ngl 99 --n-cpu-moe {last} {common}",
        f'-ngl 99 -ot "blk\\.({layers})\\.ffn_(up|down|gate|gate_up)_(ch|)exps=CPU" {common}',
    ]


def fitted(layout: Layout) -> str:
    """Return the options with which llama.cpp places layers and experts by the memory that it finds; empty: no GPU."""
    return f"{_common(layout)} --fit-target 1024" if layout.machine.gpus else ""


def with_cache(placement: Placement) -> str:
    """Return the options of llama.cpp's own expert cache, of its release b11480 and later."""
    layout, size = placement.layout, placement.cache_bytes
    last, machine = layers_of_file(layout, layout.cached_layers), layout.machine
    free = [gpu.memory_gib - kept / GIB for gpu, kept in zip(machine.gpus, reserved(machine), strict=True)]
    return f"-ngl 99 --n-cpu-moe {last} --moe-cache-mib {size // 2**20} {_common(layout, free)}"


def vllm(layout: Layout) -> list[str]:
    """Return the options of `vllm serve`; none where the GPU cannot compute the model, or host memory not hold it."""
    if not layout.on_gpu or layout.missing_bytes:
        return []
    cards = len(layout.machine.gpus)
    common = f"--max-model-len {layout.context}" + (f" --tensor-parallel-size {cards}" if cards > 1 else "")
    if not layout.host_layers:
        return [common]
    return [f"--cpu-offload-gb {-(-int(layout.experts_bytes - layout.gpu_free) // 2**30)} {common}"]


def _common(layout: Layout, split: Sequence[float] = ()) -> str:
    """Return what all runs have. split: shares of layers, and of a cache, by GPU; else each GPU is filled."""
    threads, split = layout.machine.host_threads, split or layout.layers_by_gpu
    several = layout.on_gpu and len(layout.machine.gpus) > 1
    return (
        f"-c {layout.context}"
        + (f" -t {threads}" if threads else "")
        + (f" -ts {','.join(f'{share:g}' for share in split)}" if several else "")
        + (" --no-repack" if layout.missing_bytes else "")
    )


def layers_of_file(layout: Layout, moe_layers: int) -> int:
    """Return how many layers of the file the first MoE layers end; 0: none."""
    return layout.profile.places[moe_layers - 1] + 1 if moe_layers else 0
