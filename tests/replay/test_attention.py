"""The attention of the dense part against that of transformers' models, with the same weights."""

from typing import Any

import pytest
import torch
import transformers

from replay.model.dense import GroupedQueryAttention, LatentAttention, Source
from tests.support.profiles import plain

H = 32
SHAPE: dict[str, Any] = {
    "experts": 4,
    "hidden_size": H,
    "expert_intermediate_size": 24,
    "head_size": 8,
    "vocabulary": 64,
}
COMMON = {
    "hidden_size": H,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "intermediate_size": 24,
}
MIXTRAL = transformers.MixtralConfig(**COMMON, num_local_experts=4, num_key_value_heads=2)
WINDOWED = transformers.GptOssConfig(**COMMON, num_local_experts=4, num_key_value_heads=2, head_dim=8, sliding_window=5)
LATENT = transformers.DeepseekV2Config(
    **COMMON,
    n_routed_experts=4,
    moe_intermediate_size=24,
    num_key_value_heads=4,
    q_lora_rank=None,
    kv_lora_rank=12,
    qk_nope_head_dim=8,
    v_head_dim=8,
    qk_rope_head_dim=4,
)


def unrotated(config: Any, n: int) -> Any:
    """Position embeddings that leave queries and keys as they are."""
    if config.model_type == "deepseek_v2":
        return torch.ones(1, n, config.qk_rope_head_dim // 2, dtype=torch.complex64)
    width = config.head_dim // 2 if config.model_type == "gpt_oss" else config.hidden_size // config.num_attention_heads
    return torch.ones(1, n, width), torch.zeros(1, n, width)


def with_weights_of(theirs: Any, window: int) -> GroupedQueryAttention | LatentAttention:
    source = Source(torch.device("cpu"), torch.float32, seed=0)
    if not hasattr(theirs, "kv_b_proj"):
        grouped = GroupedQueryAttention(plain(**SHAPE, kv_heads=2), source, 64, window)
        grouped.projection.copy_(torch.cat([each.weight for each in (theirs.q_proj, theirs.k_proj, theirs.v_proj)]))
        grouped.output.copy_(theirs.o_proj.weight)
        return grouped
    latent = LatentAttention(plain(**SHAPE, kv_latent_size=12, rope_head_size=4), source, 64)
    latent.projection.copy_(torch.cat([theirs.q_proj.weight, theirs.kv_a_proj_with_mqa.weight]))
    latent.query *= 12**-0.5
    latent.norm.copy_(theirs.kv_a_layernorm.weight)
    latent.expand.copy_(theirs.kv_b_proj.weight)
    latent.output.copy_(theirs.o_proj.weight)
    return latent


@pytest.mark.parametrize("chunks", [[23], [20, 1, 1, 1], [1] * 23], ids=["prefill", "then-decode", "decode"])
@pytest.mark.parametrize(
    ("config", "layer", "window"), [(MIXTRAL, 1, 0), (WINDOWED, 0, 5), (WINDOWED, 1, 0), (LATENT, 0, 0)]
)
@torch.no_grad()
def test_attention_is_the_models_but_for_rotation(config: Any, layer: int, window: int, chunks: list[int]) -> None:
    """Grouped heads, a sliding window, latents both plain and absorbed."""
    torch.manual_seed(1)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        parameter.normal_(std=0.3)
        if name.endswith("bias"):
            parameter.zero_()
        if name.endswith("sinks"):
            parameter.fill_(-1e4)  # nobody looks there
    theirs, n = model.model.layers[layer].self_attn, sum(chunks)
    tokens, distance = torch.randn(n, H), torch.arange(n)[:, None] - torch.arange(n)
    hidden = (distance < 0) | (distance >= (window or n))
    mask = torch.zeros(1, 1, n, n).masked_fill(hidden, torch.finfo(torch.float32).min)
    embeddings = unrotated(model.config, n)
    expected = theirs(hidden_states=tokens[None], position_embeddings=embeddings, attention_mask=mask)[0][0]
    ours, outputs, done = with_weights_of(theirs, window), [], 0
    for step in tokens.split(chunks):
        done += len(step)
        outputs.append(torch.zeros_like(step))
        ours.add(outputs[-1], step, done)
    torch.testing.assert_close(torch.cat(outputs), expected, rtol=1e-4, atol=1e-5)
