"""Sizes that make any model's profile small, a small profile, and what a trace says of a small model."""

from dataclasses import fields
from typing import Any

from tests.support.profiles import HALF, plain

L, E, K = 3, 8, 2

PROFILE = plain("olmoe-1b-7b", f"{L} moe", experts=E, top_k=K, heads=2, vocabulary=64, **HALF)

TINY: dict[str, Any] = {
    each.name: getattr(PROFILE, each.name) for each in fields(PROFILE) if each.name not in ("name", "hub_ids")
}

SIZE = PROFILE.expert_bytes

SIZES: dict[str, Any] = {"hidden_size": 128, "expert_intermediate_size": 96, "expert_bytes": 73_728}
"""Of an expert, as the metadata of a trace have them."""
