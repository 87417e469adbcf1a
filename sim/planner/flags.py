"""A plan as the command line of llama.cpp and of vLLM.

llama.cpp: `--n-cpu-moe N` keeps the experts of the first N layers of the file in host memory, layers without experts
counted; `-ot` states the same with a pattern over the names of tensors. vLLM: `--cpu-offload-gb` is in GiB.
"""

from sim.planner.placements import Layout


def llama_cpp(layout: Layout) -> list[str]:
    """Return the options of llama-server or llama-cli; the second spells out what the first says in short."""
    n, context = layout.host_layers, f"-c {layout.context}"
    if not layout.on_gpu:
        return [f"-ngl 0 {context}"]
    if not n:
        return [f"-ngl 99 {context}"]
    last = layout.profile.leading_dense_layers + n * (1 + layout.profile.dense_layers_before_each)
    layers = "|".join(map(str, range(last)))
    return [
        f"-ngl 99 --n-cpu-moe {last} {context}",
        f'-ngl 99 -ot "blk\\.({layers})\\.ffn_(up|down|gate)_exps=CPU" {context}',
    ]


def vllm(layout: Layout) -> list[str]:
    """Return the options of `vllm serve`; none where the GPU cannot compute the model, or host memory not hold it."""
    if not layout.on_gpu or layout.missing_bytes:
        return []
    common = f"--max-model-len {layout.context}"
    if not layout.host_layers:
        return [common]
    return [f"--cpu-offload-gb {-(-int(layout.experts_bytes - layout.gpu_free) // 2**30)} {common}"]
