"""A check of a GPU made small: shipped profiles with tiny sizes, few tokens, short measurements."""

import dataclasses
from collections.abc import Callable
from typing import Any

from benchmarks.checks import cells, runner
from replay.calibration import rates
from tests.support.short_calibrations import shorten
from tests.support.tiny import TINY
from traces.models import profile as model_profile

MODELS = ("olmoe-1b-7b", "qwen3-30b-a3b")
FULL, SHORT = 40, 20
"""Tokens of a cell whose 99th percentile is judged, and of every other."""

PLAN = cells.GPU._replace(tokens=dict.fromkeys(MODELS, SHORT), long_tokens=FULL)


def shrink(change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Change the modules that the check is made of: (module, name, value) each."""
    shorten(change)
    real = model_profile.model
    change(model_profile, "model", lambda name: dataclasses.replace(real(name), **TINY))
    change(cells, "PROMPT_TOKENS", 6)
    change(runner, "BUFFER_BYTES", 1 << 16)
    change(runner, "PASSES", 1)
    change(rates, "BUFFER_BYTES", 1 << 20)
