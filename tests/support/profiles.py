"""Model profiles made up, what a layer holds reckoned from heads, latents and widths; and a published config."""

from typing import Any

from traces.models.profile import LayerKind, ModelProfile

SMALL: dict[str, Any] = {
    "experts": 8,
    "top_k": 2,
    "hidden_size": 32,
    "expert_intermediate_size": 24,
    "expert_bytes_per_parameter": 4.0,
    "heads": 4,
    "head_size": 16,
    "vocabulary": 100,
    "dense_bytes_per_parameter": 4.0,
}

HALF: dict[str, Any] = {"expert_bytes_per_parameter": 2.0, "dense_bytes_per_parameter": 2.0}


def plain(
    name: str = "plain", *layers: str, mlp: int = 0, shared: int = 0, window: int = 0, **changed: Any
) -> ModelProfile:
    """Return a small model of runs such as "1 dense", "2 moe-window"; widths of MLP and shared experts; two MoE layers.

    A kind's name says what it is: moe or dense (which has the MLP), window, cross (of a decoder under an encoder).
    """
    layers, fields = layers or ("2 moe",), {**SMALL, **changed}
    H, E, heads, each = (fields[key] for key in ("hidden_size", "experts", "heads", "head_size"))
    values = 2 * (fields.get("kv_heads") or heads) * each
    attention = H * (2 * heads * each + values)
    if latent := fields.get("kv_latent_size", 0):
        query, values = each + fields["rope_head_size"], latent + fields["rope_head_size"]
        compressed = fields.get("query_latent_size", 0)
        queries = compressed * (H + heads * query) if compressed else H * heads * query
        attention = queries + H * values + latent * heads * 2 * each + heads * each * H
    width = fields.get("expert_matrices", 3) * H

    def kind(words: list[str]) -> LayerKind:
        routed, near = "moe" in words, "window" in words
        own, beside = (0, width * shared + H * E) if routed else (width * mlp, 0)
        return LayerKind(
            attention * (1 + ("cross" in words)) + own + beside,
            routed,
            own,
            width * shared if routed else 0,
            *((0, window, values) if near else (values,)),
        )

    fields.setdefault("embedding_parameters", fields["vocabulary"] * H)
    fields.setdefault("kv_bytes_per_value", fields["dense_bytes_per_parameter"])
    kinds = {name: kind(name.split("-")) for name in (run.split(" ")[1] for run in layers)}
    return ModelProfile(name=name, hub_ids=(), layers=layers, kinds=kinds, **fields)


QWEN3: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}
"""The config of Qwen3-30B-A3B."""
