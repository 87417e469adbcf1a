"""Hot-expert profiles: how often a trace uses each expert, as files that engines load; and does it carry over?

Formats, as their loaders read them: ExLlamaV3's census (turboderp-org/exllamav3 pull request 315), the counts that
SGLang and KTransformers start from (sglang srt/eplb/expert_location.py), and the routing that thecodacus/llama.cpp
ranks experts by (tools/moe-trace). No engine was run on them here.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.check import count_eams
from traces.output import replacing
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

Counts = NDArray[np.int64]

ENOUGH = 20
"""Choices an expert, in the mean, from which on a group has a profile: ExLlamaV3's loader warns below that."""


def numbers(names: Sequence[str]) -> list[int]:
    """Return the numbers of MoE layers in the model, from 0, by their names; where these do not say, 0, 1, 2, ..."""
    found = [int(digits[0]) if (digits := re.findall(r"\d+", name)) else -1 for name in names]
    return found if found == sorted(set(found)) and min(found) >= 0 else list(range(len(names)))


def write_exllamav3(trace: Trace, out: Path, overwrite: bool = True) -> int:
    """Write counts_prefill and counts_decode, int64[requests, L, E], for `--moe_cpu_profile`; return the choices."""
    counts = {"counts_prefill": trace.eams(PREFILL), "counts_decode": trace.eams(DECODE)}
    held = {name: each for name, each in counts.items() if each.any()}
    with replacing(out, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **held)  # type: ignore[arg-type]  # its stub takes names for options
    return int(sum(each.sum() for each in held.values()))


def write_sglang(trace: Trace, out: Path, overwrite: bool = True) -> int:
    """Write logical_count [layers of the model, 0 if dense][E] for `--init-expert-location`; return the choices."""
    counts, places = _counts(trace).sum(axis=0), numbers(trace.meta.layer_names)
    rows = np.zeros((max(places) + 1, trace.num_experts), np.int64)
    rows[places] = counts
    with replacing(out, overwrite=overwrite) as temporary:
        temporary.write_text(json.dumps({"logical_count": rows.tolist()}), encoding="utf-8")
    return int(counts.sum())


def write_llama_moe_trace(trace: Trace, out: Path, overwrite: bool = True) -> int:
    """Write a line `position,layer,expert,...` a token and layer for `--moe-cache-profile`; return the choices.

    Positions count over all requests, below 0 in prompts. Tokens without all their experts in a layer have no line.
    """
    row, layer = (each.ravel() for each in np.indices(trace.experts.shape[:2]))
    position = np.where(trace.phase == DECODE, np.arange(len(trace.phase)), -1 - np.arange(len(trace.phase)))
    columns = np.column_stack([position[row], np.array(numbers(trace.meta.layer_names))[layer]])
    routed = (trace.experts != trace.sentinel).all(axis=-1).ravel()
    table = np.column_stack([columns, trace.experts.reshape(-1, trace.top_k).astype(np.int64)])[routed]
    with replacing(out, overwrite=overwrite) as temporary:
        pd.DataFrame(table).to_csv(temporary, index=False, header=False)
    return int(routed.sum()) * trace.top_k


@dataclass(frozen=True)
class Format:
    """What an engine loads."""

    about: str
    suffix: str
    write: Callable[..., int]


FORMATS = {
    "exllamav3": Format("ExLlamaV3's --moe_cpu_profile", ".npz", write_exllamav3),
    "sglang": Format("SGLang's --init-expert-location", ".json", write_sglang),
    "llama-moe-trace": Format("--moe-cache-profile of thecodacus/llama.cpp", ".csv", write_llama_moe_trace),
}


def carry_over(trace: Trace, slots: Sequence[int]) -> dict[str, list[float]]:
    """Return the share of choices that `slots` hottest experts of each layer serve, by what the profile is tried on.

    "chance": experts at random. "itself": what it is of. "other half": every second request (of one the halves of its
    tokens) by the profile of the others. "other dataset", "other task": requests of one label by the profiles of others
    that have ENOUGH choices, in the mean; left out where there are no two.
    """
    counts = _counts(trace)
    found = {"chance": [n / trace.num_experts for n in slots], "itself": _served([counts], [counts], slots)}
    parts = counts
    if len(parts) == 1 and (tokens := len(trace.experts)) > 1:
        ends = np.array([0, tokens // 2, tokens])
        parts = count_eams(trace.experts, ends, np.ones(tokens, np.bool_), trace.num_experts)
    if len(parts) > 1:
        even, odd = parts[::2], parts[1::2]
        found["other half"] = _served([even, odd], [odd, even], slots)
    for label in ("dataset", "task"):
        groups = [counts[places] for places in trace.requests.reset_index(drop=True).groupby(label).indices.values()]
        known = [group for group in groups if group.sum() >= ENOUGH * trace.layers * trace.num_experts]
        pairs = [(one, other) for one in known for other in groups if one is not other]
        if pairs:
            found[f"other {label}"] = _served([one for one, _ in pairs], [other for _, other in pairs], slots)
    return found


def _counts(trace: Trace) -> Counts:
    """Return tokens of both phases by expert: int64[R, L, E]."""
    return trace.eams(PREFILL) + trace.eams(DECODE)


def _served(profiles: Sequence[Counts], used: Sequence[Counts], slots: Sequence[int]) -> list[float]:
    """Return the share of all choices `used` on the hottest `slots` experts of each layer of the profile beside it."""
    hits, total = np.zeros(len(slots)), 0
    for profile, tried in zip(profiles, used, strict=True):
        hottest = np.argsort(-profile.sum(axis=0), axis=1, kind="stable")  # ties to the lower id
        by_rank = np.take_along_axis(tried.sum(axis=0), hottest, axis=1).sum(axis=0).cumsum()
        hits += by_rank[np.array(slots) - 1]
        total += int(by_rank[-1])
    return [float(each) / max(total, 1) for each in hits]
