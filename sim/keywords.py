"""The keywords of `simulate` and `sweep` as types: the fields of `Experiment`.

`python -m tests.keywords` writes this file.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict


class RunKeywords(TypedDict, total=False):
    """Options of a run."""

    hardware: str | Path
    model_profile: str | Path | None
    requests: int | None
    warmup_requests: int
    as_decode: bool
    decode_only: bool
    cold: bool
    untimed: bool
    seed: int
    chunk_bytes: int | str | None
    predictor_us: float | str | Mapping[str, float] | None
    host_memory: str | int | float | None
    expert_sizes: str | Path | None
    max_batch: int | None
    arrivals: str
    arrival_rate: float | None
    draft: int
    acceptance: float | str | list[int] | tuple[int, ...] | None
    draft_us: float | None
    draft_model: str | Path | None
    routing: str | None
    prefill_chunk: int | None
