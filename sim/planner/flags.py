"""A plan as the command line of llama.cpp and of vLLM.

llama.cpp: `--n-cpu-moe N` keeps the experts of the first N layers of the file in host memory, layers without experts
counted; `-ot` says the same with a pattern over the names of tensors. vLLM: `--cpu-offload-gb` is in GiB.
"""

from sim.planner.ways import CPU, Fit, Way

GIB = 2**30


def llama_cpp(way: Way) -> list[str]:
    """Return the options of llama-server or llama-cli; the second spells out what the first says in short."""
    fit = way.fit
    context = f"-c {fit.context}"
    if way.kind == CPU or not fit.on_gpu:
        return [f"-ngl 0 {context}"]
    n = fit.host_layers
    if not n:
        return [f"-ngl 99 {context}"]
    profile = fit.profile
    last = profile.leading_dense_layers + n * (1 + profile.dense_layers_before_each)
    layers = "|".join(map(str, range(last)))
    return [
        f"-ngl 99 --n-cpu-moe {last} {context}",
        f'-ngl 99 -ot "blk\\.({layers})\\.ffn_(up|down|gate)_exps=CPU" {context}',
    ]


def vllm(fit: Fit) -> list[str]:
    """Return the options of `vllm serve`; none where the GPU cannot compute the model, or host memory not hold it."""
    if not fit.on_gpu or fit.missing_bytes:
        return []
    common = f"--max-model-len {fit.context}"
    if not fit.host_layers:
        return [common]
    return [f"--cpu-offload-gb {-(-int(fit.experts_bytes - fit.gpu_room) // GIB)} {common}"]
