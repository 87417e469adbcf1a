"""The KV cache of a transformers model: its name there."""

from inspect import signature
from typing import Any

NAMES = ("cache", "past_key_values")
"""What transformers calls it: since 5.24, and before that. A model with code of its own may still use the second."""


def name_in(model: Any) -> str:
    """Return what a model calls it, as an argument of forward() and in its output."""
    return NAMES[0] if NAMES[0] in signature(model.forward).parameters else NAMES[1]
