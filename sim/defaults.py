"""Defaults that commands and functions share: each stands here once."""

POLICY = "eamc-blend"
POLICIES = "lru,eamc,eamc-blend"
CACHE_SIZE = "25%"
CACHE_SIZES = "10%,25%,50%"
HARDWARE = "a5000"
