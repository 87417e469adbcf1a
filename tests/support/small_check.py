"""A check of a GPU made small: shipped profiles with tiny sizes, few tokens, short measurements."""

import dataclasses
from collections.abc import Callable
from typing import Any

from replay.calibration import rates
from replay.gpu_check import check, routing
from sim.profiles import model_profile
from tests.support.short_calibrations import shorten
from tests.support.tiny import TINY

FULL, SHORT = 40, 20
"""Tokens of a cell whose 99th percentile is judged, and of every other."""


def shrink(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Change the modules that the check is made of: (module, name, value) each."""
    shorten(change)
    real = model_profile.model
    change(model_profile, "model", lambda name: dataclasses.replace(real(name), **TINY))
    change(check, "FULL_TOKENS", FULL)
    change(check, "SHORT_TOKENS", dict.fromkeys(("olmoe-1b-7b", "qwen3-30b-a3b"), SHORT))
    change(routing, "PROMPT_TOKENS", 6)
    change(check, "BUFFER_BYTES", 1 << 16)
    change(rates, "BUFFER_BYTES", 1 << 20)
