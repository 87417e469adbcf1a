"""Defaults that commands and functions share: each stands here once."""

POLICY = "eamc-blend"
POLICIES = "lru,class-lru,eamc-blend"
CACHE_SIZE = "25%"
CACHE_SIZES = "10%,25%,50%"
HARDWARE = "a5000"

OF_SHIPPED_TRACE = {"model_profile": "demo-stand-in", "hardware": ("demo",)}
"""Of a sweep that names no trace, machine or model: a model that does not fit into the machine, which has to cache."""
