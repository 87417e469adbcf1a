"""Untimed misses by libcachesim, which this project did not write; and where the real traces are."""

import json
from pathlib import Path

import numpy as np
import pytest

from traces import Trace
from traces.steps import RequestSteps

NEVER = np.iinfo(np.int64).max

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces"


def accesses(ids: np.ndarray, total: int) -> list[RequestSteps]:
    """A model of one layer and one expert a token: a plain sequence of accesses."""
    return [Trace.from_arrays([ids.reshape(-1, 1, 1)], total).steps(0)]


HASH_POWER = 14
"""A table of 2 ** 14 entries; libCacheSim's own choice of 2 ** 24 takes longer to make than a trace to run."""


def oracle_misses(cache_class: object, ids: np.ndarray, slots: int) -> int:
    libcachesim = pytest.importorskip("libcachesim", reason="libcachesim, the independent oracle, is not installed")
    cache = getattr(libcachesim, str(cache_class))(slots, hashpower=HASH_POWER)
    request = libcachesim.Request()
    request.obj_size = 1
    accessed: list[int] = ids.tolist()
    upcoming: dict[int, int] = {}
    following: list[int] = []
    for i in reversed(range(len(accessed))):
        following.append(upcoming.get(accessed[i], NEVER))
        upcoming[accessed[i]] = i
    misses = 0
    for expert, after in zip(accessed, reversed(following), strict=True):
        request.obj_id, request.next_access_vtime = expert, after
        misses += not cache.get(request)
    return misses


EXPECTED = (
    [json.loads(line) for line in (SHARED / "expected-misses.jsonl").read_text().splitlines()]
    if (SHARED / "expected-misses.jsonl").exists()
    else []
)
