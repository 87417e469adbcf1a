"""Tiny random models of every MoE architecture of transformers: each config shrunk field by field, by name."""

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, model_type_to_module_name

from tests.support.tokenizer import byte_tokenizer
from tracer.answers import LoadedModel
from traces.models.architectures import architectures

SMALL: dict[str, Any] = {
    "vocab_size": 257,
    "vocab_size_per_layer_input": 257,
    "unpadded_vocab_size": 257,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    # widths
    **dict.fromkeys(("hidden_size", "d_model", "out_hidden_size", "text_hidden_size", "output_dim", "embed_dim"), 32),
    **dict.fromkeys(("projector_hidden_size", "projector_input_dim", "projector_output_dim", "vision_output_dim"), 32),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size", "d_ff"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim"), 16),
    **dict.fromkeys(("dense_intermediate_size", "intermediate_size_mlp", "moe_hidden_size", "mlp_dim"), 16),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "merged_hidden_size", "projection_intermediate_size"), 16),
    **dict.fromkeys(("projection_hidden_dim", "downsample_hidden_size", "router_hidden_size"), 16),
    # depth
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(
        ("encoder_sparse_step", "decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step"), 1
    ),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), 0.0),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 2),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers", "num_kv_shared_layers"), 0),
    "depth": 2,
    "moe_layer_end_index": 2,
    # attention
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_sliding_attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "kv_n_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "d_kv"), 8),
    **dict.fromkeys(("kv_channels", "index_head_dim", "global_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "gated_norm_rank", "hc_lowrank"), 16),
    **dict.fromkeys(("index_n_heads", "o_groups", "index_local_blocks", "index_kpool"), 2),
    **dict.fromkeys(("index_topk", "index_topk_blocks", "index_block_size"), 8),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "rel_extent", "attention_chunk_size"), 8),
    "qk_head_dim": 16,
    # linear attention
    **dict.fromkeys(("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "mamba_d_head", "mamba_head_dim", "ssm_state_size", "mamba_dt_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 2),
    # experts
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    "top_k_experts": 2,
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "num_expert_group"), 4),
    "topk_group": 2,
    "enable_moe_block": True,
    "is_moe": True,
    "zero_expert_num": 3,
    # towers
    **dict.fromkeys(("num_position_embeddings", "image_size"), 16),
    "patch_size": 4,
}
"""What a field becomes, wherever a config has it."""

MIXED = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
LATENT = {"num_key_value_heads": 4}
CHANGES: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": {**MIXED, **LATENT},
    "beam": SPARSE,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_ocr2": {"text_config": SPARSE},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    "dots3_note": {**LATENT, "layer_types": ["indexed_attention"] * 3},
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [16, 16], "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}
    },
    "flint": {"mlp_only_layers": []},
    "glm4_moe_lite": LATENT,
    "glm4v_moe": {
        "text_config": {
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        }
    },
    "glm5_next": {**LATENT, "text_config": {"qk_rope_head_dim": 0, **SPARSE, **MIXED}},
    "glm_moe_dsa": LATENT,
    "granitemoehybrid": MIXED,
    "hy_v4_vl": {"text_config": {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]}}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": {**MIXED, **LATENT},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {**LATENT, "num_layers": 2, "num_hidden_layers": 4},
    "mistral4": {**LATENT, "head_dim": 16},
    "mistral_large4": LATENT,
    "muse_spark": {"audio_config": {"num_hidden_layers": 4, "hidden_sizes": [16] * 4, "depths": [1] * 4}},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
    "qwen3_5_moe": MIXED,
    "qwen3_next": MIXED,
    "qwen4_exp": {
        **MIXED,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "indexer_head_dim": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
    },
    "step3p7": {"text_config": SPARSE},
    "zaya": {"num_experts_per_tok": 1},
}
"""What an architecture needs besides."""

AUTO = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)


def tiny_model(architecture: str, **changes: Any) -> Any:
    """A random model of an architecture, by the name of its module in transformers.

    Its weights are large enough for tokens to route apart, and its correction biases matter.
    """
    model_type, name = _model_class(architecture)
    config_class: Any = CONFIG_MAPPING[model_type]
    config = config_class(**_small_fields(config_class, {**CHANGES.get(architecture, {}), **changes}))
    torch.manual_seed(1)
    model = getattr(import_module(f"transformers.models.{architecture}"), name)(config).eval()
    with torch.no_grad():
        for label, weight in [*model.named_parameters(), *model.named_buffers()]:
            if label.endswith("tid2eid"):  # DeepSeek-V4: the experts of each word, all the same when new
                weight.copy_(torch.rand(len(weight), 8).argsort(-1)[:, : weight.shape[1]])
            elif label.endswith(("bias", "biases")):
                weight.normal_(0.0, 0.1 if label.endswith("bias") else 0.01)
            elif isinstance(weight, nn.Parameter) and weight.dim() > 1:
                routes = ".gate." in label or ".router." in label
                weight.normal_(0.0, (3 if routes else 1) * weight.shape[-1] ** -0.5)
    return model


def _model_class(architecture: str) -> tuple[str, str]:
    """Model type and class of what a user loads: a text model that generates, if there is one."""
    types = [t for t in CONFIG_MAPPING if model_type_to_module_name(t) == architecture]
    types.sort(key=lambda t: not t.endswith("_text"))
    for mapping in AUTO:
        for model_type in types:
            name = getattr(modeling_auto, mapping).get(model_type)
            if isinstance(name, str):
                return model_type, name
    raise LookupError(architecture)


def _small_fields(config_class: Any, changes: dict[str, Any]) -> dict[str, Any]:
    """Arguments for a config: the small values of those fields that it has, also for the configs in it."""
    default = config_class()
    parts = {key: type(getattr(default, key)) for key in config_class.sub_configs if getattr(default, key, None)}
    known = {*default.to_dict(), *dir(config_class)}
    fields = {key: value for key, value in {**SMALL, **changes}.items() if key in known}
    for key, part in parts.items():
        own = changes.get(key, {})
        fields[key] = {**_small_fields(part, {**changes, **own}), **own}
    return fields


@cache
def names() -> list[str]:
    """Every architecture of the installed transformers that has routed experts."""
    return [a.name for a in architectures()]


def tiny(architecture: str, **changes: Any) -> LoadedModel:
    """A random model of an architecture, its tokens bytes."""
    return LoadedModel(architecture, tiny_model(architecture, **changes), byte_tokenizer())


COMMON: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
"""The config of a small dense model."""
