"""Sizes that make any model's profile small."""

TINY = {
    "moe_layers": 3,
    "experts": 8,
    "top_k": 2,
    "hidden_size": 32,
    "expert_intermediate_size": 24,
    "heads": 2,
    "head_size": 16,
    "vocabulary": 64,
    "kv_heads": 0,
}
