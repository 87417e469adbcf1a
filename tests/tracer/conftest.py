"""Tiny random models of each architecture, and the shipped one."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    DbrxConfig,
    DbrxForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LongcatFlashConfig,
    LongcatFlashForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tracer import demo
from tracer.models import LoadedModel

COMMON: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
MOE = {"num_experts": 6, "moe_intermediate_size": 16}
ARCHITECTURES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 6}),
    "qwen2_moe": (Qwen2MoeForCausalLM, Qwen2MoeConfig, {**MOE, "shared_expert_intermediate_size": 16}),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {**MOE, "head_dim": 8}),
    "deepseek_v2": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config,
        {**LATENT, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config, {**LATENT, "n_group": 4, "topk_group": 2}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 6}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "num_local_experts": 6,
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "dbrx": (
        DbrxForCausalLM,
        DbrxConfig,
        {
            "d_model": 32,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 6, "moe_top_k": 2},
        },
    ),
    "longcat_flash": (
        LongcatFlashForCausalLM,
        LongcatFlashConfig,
        {
            **{name: size for name, size in LATENT.items() if name != "first_k_dense_replace"},
            "num_hidden_layers": 4,  # two attentions a layer
            "head_dim": 8,
            "zero_expert_num": 3,
            "expert_ffn_hidden_size": 16,
        },
    ),
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=list(ARCHITECTURES))
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    return tiny(request.param)


def tiny(architecture: str, **changes: Any) -> LoadedModel:
    """A random model with weights large enough for tokens to route apart, and correction biases that matter."""
    model_class, config_class, extra = ARCHITECTURES[architecture]
    torch.manual_seed(1)
    model = model_class(config_class(**{**COMMON, **extra, **changes})).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.1)
    return LoadedModel(architecture, model, AutoTokenizer.from_pretrained(demo.MODEL))
