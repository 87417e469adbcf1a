"""Models of transformers as GGUF files in float32: what llama.cpp's converter does with five architectures.

Names are those that the package gguf maps; the rest is as conversion/*.py of llama.cpp has it.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.support.tokenizer import letter
from tracer.answers import LoadedModel

ARCHITECTURES = {
    "olmoe": "OLMOE",
    "qwen3_moe": "QWEN3MOE",
    "mixtral": "LLAMA",
    "gpt_oss": "GPT_OSS",
    "deepseek_v2": "DEEPSEEK2",
}
"""By the model type that a config of transformers states."""

CHANGES: dict[str, dict[str, Any]] = {
    "olmoe": {"num_key_value_heads": 4},  # llama.cpp knows it with as many as heads only
    "qwen3_moe": {"norm_topk_prob": True},  # as llama.cpp does it whatever the file says
    "mixtral": {"sliding_window": None},
    "gpt_oss": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}
    },  # not YaRN, which both scale apart
    "deepseek_v2": {"topk_method": "greedy"},
}
"""Configs that both run alike."""

Weights = dict[str, NDArray[np.float32]]


def write_model(path: Path, loaded: LoadedModel, quantized: bool = False) -> Path:
    """Write a model of ARCHITECTURES with a byte-level tokenizer; quantized: all but routers and norms in Q8_0."""
    config = loaded.model.config
    name = config.model_type
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[name]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    stated = (getattr(config, field, None) for field in ("num_experts", "num_local_experts", "n_routed_experts"))
    writer.add_expert_count(next(experts for experts in stated if experts))
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0 if quantized else gguf.LlamaFileType.ALL_F32)
    if name == "deepseek_v2":
        _add_latent_attention(writer, config)
    else:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(head)
    if name == "gpt_oss":
        writer.add_sliding_window(config.sliding_window)
    _add_tokenizer(writer, loaded.tokenizer)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for key, tensor in loaded.model.state_dict().items():
        for own, data in _converted(key, tensor.float().numpy(), config).items():
            _add(writer, _named(own, names), np.ascontiguousarray(data), quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, data: NDArray[np.float32], quantized: bool) -> None:
    if quantized and data.ndim > 1 and "gate_inp" not in name:
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, data)


def _add_latent_attention(writer: Any, config: Any) -> None:
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_head_count_kv(1)
    writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    writer.add_key_length(config.kv_lora_rank + config.qk_rope_head_dim)
    writer.add_value_length(config.kv_lora_rank)
    writer.add_key_length_mla(config.qk_nope_head_dim + config.qk_rope_head_dim)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(config.qk_rope_head_dim)


def _add_tokenizer(writer: Any, tokenizer: Any) -> None:
    """Write a byte-level tokenizer, whose added tokens are marks, as GPT-2's, which it is."""
    said = json.loads(tokenizer.backend_tokenizer.to_str())
    marks = {added["content"] for added in said["added_tokens"]}
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in marks else gguf.TokenType.NORMAL for token in tokens])
    merges = said["model"]["merges"] or [(letter(0), letter(1))]  # one is needed: one that no text has
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _converted(key: str, data: NDArray[np.float32], config: Any) -> Weights:
    """Return a weight by the names that gguf maps, in the layout of llama.cpp."""
    kind = config.model_type
    base, _, last = key.rpartition(".")
    if last.startswith("gate_up_proj"):  # gate and up of all experts: in turns (gpt-oss), or one behind the other
        if kind == "gpt_oss":
            data = data if last.endswith("bias") else data.swapaxes(1, 2)
            gate, up = data[:, ::2], data[:, 1::2]
        else:
            gate, up = np.split(data, 2, axis=1)
        end = "bias" if last.endswith("bias") else "weight"
        return {f"{base}.gate_proj.{end}": gate, f"{base}.up_proj.{end}": up}
    if last.startswith("down_proj") and base.endswith("experts"):
        end = "bias" if last.endswith("bias") else "weight"
        return {f"{base}.down_proj.{end}": data.swapaxes(1, 2) if kind == "gpt_oss" and end == "weight" else data}
    if kind == "mixtral" and (".q_proj." in key or ".k_proj." in key):  # rotated in pairs side by side
        heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
        return {key: data.reshape(heads, 2, -1, data.shape[-1]).swapaxes(1, 2).reshape(data.shape)}
    if ".kv_b_proj." in key:
        heads, nope = config.num_attention_heads, config.qk_nope_head_dim
        keys, values = np.split(data.reshape(heads, -1, data.shape[-1]), [nope], axis=1)
        return {key.replace("kv_b", "k_b"): keys.swapaxes(1, 2), key.replace("kv_b", "v_b"): values}
    return {f"{key}.weight" if last == "sinks" else key: data}


def _named(key: str, names: Any) -> str:
    name = names.get_name(key, try_suffixes=(".weight", ".bias"))
    assert name is not None, key
    return str(name)
