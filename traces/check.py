"""What must hold between the rows of a trace.

A pass over the ids, in threads, checks their range, finds repeats within a (token, layer) and compares EAMs.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.errors import InputError
from traces.schema import TraceMeta
from traces.steps import DECODE, Int

BLOCK = 1 << 20
"""Ids that are looked at together."""


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
            raise InputError(
                f"{where}: request {i} ({name!r}) disagrees in {what}: {listed[i]} listed, {rows[i]} there"
            )


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


def check_ids(
    meta: TraceMeta,
    experts: NDArray[np.unsignedinteger],
    offsets: NDArray[np.int64],
    phase: NDArray[np.uint8],
    eams: NDArray[np.uint32],
    where: str,
    first: int = 0,
) -> None:
    """Check ids [tokens, L, k] and EAMs [2, requests, L * E] as listed. The first request is number `first`."""
    found = _scan_in_threads(experts, offsets, phase, eams, meta)
    if found is None:
        return
    request, row, layer = found
    if row < 0:
        raise InputError(f"{where}: the EAM listed for request {first + request} is unlike its routing")
    ids = experts[row, layer]
    token = row - int(offsets[request])
    place = f"{where}: request {first + request}, token {token}, MoE layer {layer}: expert ids {ids.tolist()}"
    beyond = bool(((ids >= meta.experts) & (ids != meta.sentinel)).any())
    raise InputError(
        f"{place} {f'go beyond the {meta.experts} experts of the model' if beyond else 'repeat an expert'}"
    )


def check_lookahead(meta: TraceMeta, lookahead: NDArray[np.unsignedinteger], where: str, first: int = 0) -> None:
    """Raise InputError for an id [tokens, L, distances, picks] that is no expert's, or twice; first: token's number."""
    unrouted = np.where(lookahead == meta.sentinel, np.int32(-1), lookahead.astype(np.int32))
    tokens, layers, distances, picks = lookahead.shape
    unrouted = unrouted.reshape(tokens, layers * distances, picks)
    if fault := first_fault(unrouted, meta.experts):
        row, place, reason = fault
        layer = place // distances
        raise InputError(f"{where}: lookahead of token row {first + row}, MoE layer {layer}: {reason}")


def check_candidates(
    meta: TraceMeta,
    candidates: NDArray[np.unsignedinteger],
    experts: NDArray[np.unsignedinteger],
    where: str,
    first: int = 0,
) -> None:
    """Raise InputError for candidates [tokens, L, C] of which the first are not the choices [tokens, L, k]."""
    check_lookahead(meta, candidates[:, :, None], where, first)
    wrong = (candidates[:, :, : meta.top_k] != experts).any(axis=(1, 2))
    if wrong.any():
        raise InputError(f"{where}: candidates of token row {first + int(np.argmax(wrong))}: the first are no choices")


Fault = tuple[int, int, int]
"""A request, its row, and the layer; a row below 0: the EAM of the request is wrong."""


def _scan_in_threads(
    experts: NDArray[np.unsignedinteger],
    offsets: NDArray[np.int64],
    phase: NDArray[np.uint8],
    eams: NDArray[np.uint32],
    meta: TraceMeta,
) -> Fault | None:
    """Return the first fault by `_scan_ids`, over ranges of requests of about as many rows each."""
    threads = min(os.cpu_count() or 1, 1 + len(experts) // 65_536)
    cuts = np.searchsorted(offsets, np.linspace(0, len(experts), threads + 1)[1:-1]).tolist()

    def scan(first: int, last: int) -> Fault | None:
        return _scan_ids(experts, offsets, phase, eams, meta, range(first, last))

    with ThreadPoolExecutor(threads) as pool:
        faults = pool.map(scan, [0, *cuts], [*cuts, len(offsets) - 1])
        return next(filter(None, faults), None)


def _scan_ids(
    experts: NDArray[np.unsignedinteger],
    offsets: NDArray[np.int64],
    phase: NDArray[np.uint8],
    eams: NDArray[np.uint32],
    meta: TraceMeta,
    requests: range,
) -> Fault | None:
    """Return the first fault of these requests; of a request, what is wrong with its rows before its EAM."""
    begin, end = int(offsets[requests.start]), int(offsets[requests.stop])
    found = _first_wrong(experts[begin:end], meta.experts, meta.sentinel)
    row, layer = (begin + found[0], found[1]) if found else (end, 0)
    for r in requests:
        rows = slice(int(offsets[r]), int(offsets[r + 1]))
        if row < rows.stop:
            return r, row, layer
        for p in range(2):
            if (_counts(experts[rows], phase[rows] == p, meta.experts) != eams[p, r]).any():
                return r, -1, 0
    return None


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


def first_fault(experts: NDArray[np.integer], E: int) -> tuple[int, int, str] | None:
    """Return the first (row, layer, reason) that no model routes. experts: [tokens, L, k], -1: not routed."""
    if (found := _first_wrong(experts, E, -1)) is None:
        return None
    row, layer = found
    ids = experts[row, layer].tolist()
    wrong = [e for e in ids if not -1 <= e < E]
    reason = f"{wrong[0]} is no id of {E} experts (0 to {E - 1})" if wrong else "an expert is repeated"
    return row, layer, f"expert ids {ids}: {reason}"


def _first_wrong(experts: NDArray[np.integer], E: int, sentinel: int) -> tuple[int, int] | None:
    """Return the first (row, layer) with an id that is neither the sentinel nor one of 0 to E - 1, or with a repeat."""
    rows = max(1, BLOCK // max(1, experts[:1].size))
    for first in range(0, len(experts), rows):
        ids = np.sort(experts[first : first + rows], axis=2)
        wrong = (((ids < 0) | (ids >= E)) & (ids != sentinel)).any(axis=2)
        wrong |= ((ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] != sentinel)).any(axis=2)
        if wrong.any():
            row, layer = divmod(int(wrong.argmax()), wrong.shape[1])
            return first + row, layer
    return None
