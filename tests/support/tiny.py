"""Sizes that make any model's profile small, and a small profile."""

import dataclasses
from typing import Any, cast

from sim.profiles.model_profile import model

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

L, E, K = TINY["moe_layers"], TINY["experts"], TINY["top_k"]

PROFILE = dataclasses.replace(model("olmoe-1b-7b"), **cast(Any, TINY))

SIZE = PROFILE.expert_bytes
