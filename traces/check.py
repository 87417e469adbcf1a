"""What must hold between the rows of a trace.

A pass over the ids, in threads, checks their range, finds repeats within a (token, layer) and compares EAMs.
"""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.errors import InputError
from traces.schema import TraceMeta
from traces.steps import DECODE, Int

Rows = Mapping[str, NDArray[Any]]

BLOCK = 1 << 20
"""Ids that are looked at together."""

FLOATS = {"weights", "lookahead_scores", "scores"}
"""Columns that hold floating-point numbers."""


def check_requests(requests: pd.DataFrame, prefill: Int, decode: Int, where: str) -> None:
    """Compare token counts with rows [R] of each phase: prefill none or the prompt, decode the output less one."""
    prompt = requests["prompt_tokens"].fillna(0).to_numpy(np.int64)
    output = requests["output_tokens"].to_numpy(np.int64)
    for what, listed, rows in (
        ("prompt_tokens and its prefill rows", np.where(prefill != 0, prompt, 0), prefill),
        ("output_tokens less one and its decode rows", np.maximum(output - 1, 0), decode),
    ):
        if (listed != rows).any():
            i = int(np.argmax(listed != rows))
            name = requests["id"].iloc[i]
            raise InputError(f"{where}: request {i} ({name!r}): {what} differ, {listed[i]} and {rows[i]}")


def check_steps(
    step: NDArray[np.uint32], phase: NDArray[np.uint8], offsets: NDArray[np.int64], where: str, first: int = 0
) -> None:
    """Require steps to ascend in a request, a decoded token to have its own. `first`: number of the first request."""
    wrong = (step[1:] < step[:-1]) | ((step[1:] == step[:-1]) & (phase[1:] == DECODE))
    begins = offsets[1:-1]
    wrong[begins[(begins > 0) & (begins < len(step))] - 1] = False
    if wrong.any():
        row = int(np.argmax(wrong)) + 1
        request = int(np.searchsorted(offsets, row, side="right")) - 1
        place = f"{where}: request {first + request}, token {row - int(offsets[request])}"
        raise InputError(f"{place}: step {step[row]} does not follow step {step[row - 1]} of the token before it")


def check_finite(name: str, values: NDArray[np.floating], where: str, first: int = 0) -> None:
    """Raise InputError unless every value is a number. values: [rows, ...], the first is number `first`."""
    finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
    if not finite.all():
        raise InputError(f"{where}: row {first + int(np.argmin(finite))} of {name} holds a value that is no number")


def check_rows(
    meta: TraceMeta, rows: Rows, offsets: Int, eams: NDArray[Any], where: str, first: int = 0, row: int = 0
) -> None:
    """Check the columns of requests, and their EAMs [2, requests, L * E] as listed. Raises InputError.

    first: number of the first request. row: number of its first row.
    """
    experts, phase = rows["experts"], rows["phase"]

    def check(begin: int, end: int) -> None:
        """Check the ids of some requests; of each its rows before its EAM."""
        at = int(offsets[begin])
        fault = first_fault(experts[at : offsets[end]], meta.experts, meta.sentinel)
        for r in range(begin, end):
            own = slice(int(offsets[r]), int(offsets[r + 1]))
            if fault and at + fault[0] < own.stop:
                token, layer, reason = at + fault[0] - own.start, *fault[1:]
                raise InputError(f"{where}: request {first + r}, token {token}, MoE layer {layer}: {reason}")
            if any((_counts(experts[own], phase[own] == p, meta.experts) != eams[p, r]).any() for p in range(2)):
                raise InputError(f"{where}: the EAM listed for request {first + r} is unlike its routing")

    threads = min(os.cpu_count() or 1, 1 + len(experts) // 65_536)
    cuts = np.searchsorted(offsets, np.linspace(0, len(experts), threads + 1)[1:-1]).tolist()
    with ThreadPoolExecutor(threads) as pool:  # which starts no thread for a single part
        list((pool.map if threads > 1 else map)(check, [0, *cuts], [*cuts, len(offsets) - 1]))
    if "step" in rows:
        check_steps(rows["step"], phase, offsets, where, first)
    for name in ("lookahead", "candidates"):
        if name in rows:
            tokens, *places, count = rows[name].shape
            picks = rows[name].reshape(tokens, prod(places), count)
            if fault := first_fault(picks, meta.experts, meta.sentinel):
                layer = fault[1] * meta.layers // prod(places)
                raise InputError(f"{where}: {name} of token row {row + fault[0]}, MoE layer {layer}: {fault[2]}")
    if "candidates" in rows:
        wrong = (rows["candidates"][:, :, : meta.top_k] != experts).any(axis=(1, 2))
        if wrong.any():
            token = row + int(np.argmax(wrong))
            raise InputError(f"{where}: candidates of token row {token}: the first are no choices")
    for name in FLOATS & rows.keys():
        check_finite(name, rows[name], where, row)


def count_eams(
    experts: NDArray[np.unsignedinteger], offsets: NDArray[np.int64], keep: NDArray[np.bool_], E: int
) -> NDArray[np.int64]:
    """Count the tokens that chose each expert, int64[requests, L, E], over the rows where `keep` holds."""
    R, L = len(offsets) - 1, experts.shape[1]
    rows = (slice(int(offsets[r]), int(offsets[r + 1])) for r in range(R))
    eams = [_counts(experts[own], keep[own], E) for own in rows]
    return np.array(eams, np.int64).reshape(R, L, E)


def _counts(experts: NDArray[np.integer], keep: NDArray[np.bool_], E: int) -> Int:
    """Count the rows that chose each expert, int64[L * E], of those where `keep` holds."""
    L, rows = experts.shape[1], np.flatnonzero(keep)
    counts, layer = np.zeros(L * E, np.int64), E * np.arange(L)[:, None]
    for part in np.array_split(rows, 1 + len(rows) * experts[:1].size // BLOCK):
        ids = experts[part]
        counts += np.bincount((ids + layer)[ids < E], minlength=L * E)
    return counts


def first_fault(experts: NDArray[np.integer], E: int, sentinel: int = -1) -> tuple[int, int, str] | None:
    """Return the first (row, layer, reason) that no model routes. experts: [tokens, L, k], sentinel: not routed."""
    rows = max(1, BLOCK // max(1, experts[:1].size))
    for first in range(0, len(experts), rows):
        ids = np.sort(experts[first : first + rows], axis=2)
        wrong = (((ids < 0) | (ids >= E)) & (ids != sentinel)).any(axis=2)
        wrong |= ((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != sentinel)).any(axis=2)
        if wrong.any():
            row, layer = divmod(int(wrong.argmax()), wrong.shape[1])
            chosen = experts[first + row, layer].tolist()
            odd = [e for e in chosen if e != sentinel and not 0 <= e < E]
            reason = f"{odd[0]} is no id of {E} experts (0 to {E - 1})" if odd else "an expert is repeated"
            return first + row, layer, f"expert ids {chosen}: {reason}"
    return None
