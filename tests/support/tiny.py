"""Sizes that make any model's profile small, a small profile, and what a trace says of a small model."""

import dataclasses
from typing import Any

from sim.profiles.model_profile import model

L, E, K = 3, 8, 2

TINY: dict[str, Any] = {
    "moe_layers": L,
    "experts": E,
    "top_k": K,
    "hidden_size": 32,
    "expert_intermediate_size": 24,
    "heads": 2,
    "head_size": 16,
    "vocabulary": 64,
    "kv_heads": 0,
}

PROFILE = dataclasses.replace(model("olmoe-1b-7b"), **TINY)

SIZE = PROFILE.expert_bytes

SIZES: dict[str, Any] = {"hidden_size": 128, "expert_intermediate_size": 96, "expert_bytes": 73_728}
"""Of an expert, as the metadata of a trace have them."""
