"""GGUF files with a model's shape and random weights, to time llama.cpp with: some of a model's layers, and the rest.

A shape is a `GgufFile` without data: the header of a file, or what llama.cpp's quantisation makes of a model profile
(`llama_tensor_get_type` of src/llama-quant.cpp). A profile becomes an architecture of the same sizes: deepseek2 with
latent attention, else ernie4_5-moe. Scales of blocks are such that weights are near 0.02.
"""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError
from traces.files import read_toml
from traces.models.gguf_files import GgufFile
from traces.models.profile import LayerKind, ModelProfile
from traces.models.safetensors_files import StoredTensor

TYPES = read_toml(Path(__file__).parent / "gguf_types.toml")
MIXES: dict[str, tuple[str, str]] = TYPES["mixes"]
NARROW: dict[str, str] = TYPES["narrow"]
SCALES: dict[str, list[tuple[int, float]]] = TYPES["scales"]

Shapes = dict[str, tuple[int, ...]]
"""Of tensors by name, outermost first."""

POOL_BYTES = 16 << 20
"""Of random blocks, which a tensor repeats."""


def cut(file: GgufFile, layers: int, experts: int = 0) -> GgufFile:
    """Return so many layers of a model, of its mean bytes, and what belongs to none; experts: of a layer, 0: all."""
    whole, count = file.key("block_count"), file.key("expert_count", 0)
    groups, experts = file.key("expert_group_count", 0) or 1, experts or count
    experts = -(-experts // groups) * groups
    blocks, rest = _blocks(file)
    places = _representative(blocks, layers)
    keys = {
        key: [value[place] for place in places] if isinstance(value, list) and len(value) == whole else value
        for key, value in file.keys.items()
        if value is not None and not key.startswith(("tokenizer.", "split.")) and "nextn_predict" not in key
    }
    tensors = [*rest]
    for layer, place in enumerate(places):
        for each in blocks[place]:
            named = replace(each, name=f"blk.{layer}." + each.name.split(".", 2)[2])
            of_experts = each.shape[0] == count and any(
                part in each.name for part in ("exps", "gate_inp.", "exp_probs")
            )
            if of_experts:
                named = replace(named, shape=(experts, *each.shape[1:]), size=each.size * experts // count)
            tensors.append(named)
    begin = keys["general.architecture"]
    return GgufFile(keys | {f"{begin}.block_count": layers, f"{begin}.expert_count": experts}, tensors)


def _blocks(file: GgufFile) -> tuple[list[list[StoredTensor]], list[StoredTensor]]:
    blocks: list[list[StoredTensor]] = [[] for _ in range(file.key("block_count"))]
    rest: list[StoredTensor] = []
    for each in file.tensors:
        (blocks[int(each.name.split(".")[1])] if each.name.startswith("blk.") else rest).append(each)
    return blocks, rest


def _representative(blocks: list[list[StoredTensor]], layers: int) -> list[int]:
    shapes = [sorted((each.name.split(".", 2)[2], each.shape) for each in block) for block in blocks]
    sizes = [sum(each.size for each in block) for block in blocks]
    places, ahead = list[int](), 0.0
    for first in range(layers):
        alike = [place for place, shape in enumerate(shapes) if shape == shapes[first]]
        mean = sum(sizes[place] for place in alike) / len(alike)
        places.append(min(alike, key=lambda place: (abs(ahead + sizes[place] - mean), place in places)))
        ahead += sizes[places[-1]] - mean
    return places


def write(path: Path, file: GgufFile) -> None:
    import gguf  # an extra

    kinds, types = gguf.GGMLQuantizationType, gguf.GGUFValueType
    writer = gguf.GGUFWriter(path, file.keys["general.architecture"])
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(next(each.shape[0] for each in file.tensors if each.name == "token_embd.weight"))
    for key, value in file.keys.items():
        if key != "general.architecture" and not key.endswith(".vocab_size"):
            kind = types.get_type(value)
            is_count = kind is types.INT32 and value >= 0  # which llama.cpp reads unsigned
            writer.add_key_value(key, value, types.UINT32 if is_count else kind)
    for each in file.tensors:
        writer.add_tensor_info(each.name, each.shape, np.dtype(np.float32), each.size, kinds[each.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random, pools = np.random.default_rng(0), dict[str, NDArray[np.uint8]]()
    for each in file.tensors:
        writer.write_tensor_data(_data(each, random, pools))
    writer.close()


def _data(tensor: StoredTensor, random: np.random.Generator, pools: dict[str, NDArray[np.uint8]]) -> NDArray[np.uint8]:
    """Return weights; of vectors ones, zeros where they are added, and -1 where they are exponents of a decay."""
    name, kind = tensor.name, tensor.dtype
    if kind == "F32" and len(tensor.shape) == 1:
        value = 0 if name.endswith((".bias", "sinks.weight")) else -1 if "ssm_a" in name else 1
        return np.full(tensor.shape, value, np.float32).view(np.uint8)
    if kind not in pools:
        pools[kind] = _pool(kind, random)
    return np.resize(pools[kind], tensor.size)


def _pool(kind: str, random: np.random.Generator) -> NDArray[np.uint8]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if weights == 1:
        values = random.normal(0, 0.02, POOL_BYTES // 4).astype(np.float32)
        return np.asarray(quantize(values, GGMLQuantizationType[kind])).view(np.uint8)
    blocks = random.integers(0, 256, (POOL_BYTES // size, size), np.uint8)
    if kind == "MXFP4":
        blocks[:, 0] = 121  # 2 to the power of -6
    else:
        for place, scale in SCALES.get(kind, SCALES["others"]):
            blocks[:, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(-1)


# A profile as a file


def of_profile(profile: ModelProfile, precision: str) -> GgufFile:
    """Return a model as a file of an architecture of its sizes. Raise InputError where llama.cpp has none for it."""
    odd = [kind for kind in profile.order if kind.state or not kind.mixes or not (kind.kv or kind.windowed)]
    if odd or profile.expert_hidden_size or profile.expert_matrices != 3 or profile.encoder_layers:
        raise InputError(
            f"{profile.name} has layers that no random model stands for: name one of its GGUF files by its path or URL "
            "(--model), of which the header is read"
        )
    if precision not in MIXES:
        raise InputError(f"no random model has {precision}: use {', '.join(MIXES)}")
    attention, keys = _latent(profile) if profile.kv_latent_size else _grouped(profile)
    H, E, F, L = profile.hidden_size, profile.experts, profile.expert_intermediate_size, len(profile.order)
    first = profile.places[0]

    def width(kind: LayerKind) -> int:
        """Return the width of an MLP that holds all parameters of a layer beside attention and router."""
        rest = kind.parameters - sum(prod(shape) for shape in attention.values() if len(shape) > 1)
        rest -= E * H * kind.routed
        return round(rest / 3 / H / 32) * 32 if rest > 0.01 * kind.parameters else 0

    dense = max((width(kind) for kind in profile.order if not kind.routed), default=0)
    shared = max(width(kind) for kind in profile.order if kind.routed)
    if profile.kv_latent_size:  # llama.cpp knows whole numbers of shared experts there
        count = max(1, round(shared / F)) if shared else 0
        shared, keys = count * F, keys | {"expert_shared_count": count}
    else:
        keys |= {"expert_shared_count": int(shared > 0), "expert_shared_feed_forward_length": shared}
    keys |= {
        "block_count": L,
        "context_length": 1 << 17,
        "embedding_length": H,
        "feed_forward_length": dense or F,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.head_count": profile.heads,
        "expert_count": E,
        "expert_used_count": profile.top_k,
        "expert_feed_forward_length": F,
        "leading_dense_block_count": first,
    }
    architecture = "deepseek2" if profile.kv_latent_size else "ernie4_5-moe"

    def mlp(width: int, end: str = "", *count: int) -> Shapes:
        matrices = {"gate": (width, H), "up": (width, H), "down": (H, width)}
        return {f"ffn_{name}{end}": (*count, *shape) for name, shape in matrices.items()}

    ends: Shapes = {"token_embd": (profile.vocabulary, H)}
    if profile.embedding_parameters:  # else one matrix is both
        ends["output"] = (profile.vocabulary, H)
    ends["output_norm"] = (H,)
    tensors = [_tensor(precision, name, shape) for name, shape in ends.items()]
    experts = {"ffn_gate_inp": (E, H)} | mlp(F, "_exps", E) | (mlp(shared, "_shexp") if shared else {})
    for layer in range(L):
        has_more = layer < L // 8 or layer >= 7 * L // 8 or (layer - L // 8) % 3 == 2
        shapes = attention | (mlp(dense) if layer < first else experts)
        tensors += [_tensor(precision, f"blk.{layer}.{name}", shape, has_more) for name, shape in shapes.items()]
    return GgufFile(
        {"general.architecture": architecture} | {f"{architecture}.{key}": keys[key] for key in keys}, tensors
    )


def _grouped(profile: ModelProfile) -> tuple[Shapes, dict[str, Any]]:
    """Return the tensors of attention by heads, which share keys and values in groups, and its keys."""
    H, size, kv_heads = profile.hidden_size, profile.head_size, profile.kv_heads or profile.heads
    q, kv = profile.heads * size, kv_heads * size
    matrices = {"attn_q": (q, H), "attn_k": (kv, H), "attn_v": (kv, H), "attn_output": (H, q)}
    return {**matrices, "attn_norm": (H,), "ffn_norm": (H,)}, {
        "attention.head_count_kv": kv_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "interleave_moe_layer_step": 1,
    }


def _latent(profile: ModelProfile) -> tuple[Shapes, dict[str, Any]]:
    """Return the tensors of latent attention, and its keys.

    llama.cpp expects a latent of queries: without one it is that which has as many parameters.
    """
    H, heads, size = profile.hidden_size, profile.heads, profile.head_size
    latent, rope = profile.kv_latent_size, profile.rope_head_size
    q = heads * (size + rope)
    query = profile.query_latent_size or max(1, round(H * q / (H + q) / 256)) * 256
    return {
        "attn_q_a": (query, H),
        "attn_q_b": (q, query),
        "attn_kv_a_mqa": (latent + rope, H),
        "attn_k_b": (heads, latent, size),
        "attn_v_b": (heads, size, latent),
        "attn_output": (H, heads * size),
        "attn_norm": (H,),
        "ffn_norm": (H,),
        "attn_q_a_norm": (query,),
        "attn_kv_a_norm": (latent,),
    }, {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": query,
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + rope,
        "attention.value_length": latent,
        "attention.key_length_mla": size + rope,
        "attention.value_length_mla": size,
        "rope.dimension_count": rope,
        "expert_weights_scale": 1.0,
        "expert_gating_func": 1,
    }


def _tensor(precision: str, name: str, shape: tuple[int, ...], has_more: bool = False) -> StoredTensor:
    """Return a tensor of the type that a precision gives it. has_more: its layer's values and down matrices do."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = MIXES[precision][has_more and (name.endswith("attn_v") or "ffn_down" in name)]
    if len(shape) == 1 or "gate_inp" in name:
        kind = "F32"
    elif kind == "MXFP4" and "_exps" not in name:
        kind = "Q8_0"
    elif name == "output" and kind.startswith(("Q3", "Q4", "Q5", "IQ")):
        kind = "Q6_K"
    kind = NARROW.get(kind, kind) if shape[-1] % 256 else kind
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return StoredTensor(f"{name}.weight", kind, shape, 0, prod(shape) // weights * size)
