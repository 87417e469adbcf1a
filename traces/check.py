"""What must hold between the rows of a trace, checked at the speed of reading it.

One compiled pass over the ids, in threads, checks their range, finds repeats within a (token, layer) and compares EAMs.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.compiled import loop
from traces.errors import InputError
from traces.schema import TraceMeta
from traces.steps import DECODE, Int

_OK, _RANGE, _REPEAT, _EAM = range(4)


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


def check_unique(ids: "pd.Series[str]", where: str) -> None:
    repeated = ids[ids.duplicated()]
    if len(repeated):
        raise InputError(f"{where}: the request id {repeated.iloc[0]!r} occurs twice")


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
    code, request, row, layer = _scan_in_threads(experts, offsets, phase, eams, meta)
    if code == _OK:
        return
    if code == _EAM:
        raise InputError(f"{where}: the EAM listed for request {first + request} is unlike its routing")
    ids = experts[row, layer].tolist()
    token = row - int(offsets[request])
    place = f"{where}: request {first + request}, token {token}, MoE layer {layer}: expert ids {ids}"
    fault = f"go beyond the {meta.experts} experts of the model" if code == _RANGE else "repeat an expert"
    raise InputError(f"{place} {fault}")


def check_lookahead(meta: TraceMeta, lookahead: NDArray[np.unsignedinteger], where: str, first: int = 0) -> None:
    """Raise InputError for an id [tokens, L, k] that is no expert's, or twice; `first`: number of the first token."""
    unrouted = np.where(lookahead == meta.sentinel, np.int32(-1), lookahead.astype(np.int32))
    if fault := first_fault(unrouted, meta.experts):
        row, layer, reason = fault
        raise InputError(f"{where}: lookahead of token row {first + row}, MoE layer {layer}: {reason}")


def _scan_in_threads(
    experts: NDArray[np.unsignedinteger],
    offsets: NDArray[np.int64],
    phase: NDArray[np.uint8],
    eams: NDArray[np.uint32],
    meta: TraceMeta,
) -> tuple[int, int, int, int]:
    """Return the first fault by `_scan_ids`, over ranges of requests of about as many rows each."""
    threads = min(os.cpu_count() or 1, 1 + len(experts) // 65_536)
    cuts = np.searchsorted(offsets, np.linspace(0, len(experts), threads + 1)[1:-1]).tolist()
    ranges = list(pairwise([0, *cuts, len(offsets) - 1]))

    def scan(first: int, last: int) -> tuple[int, int, int, int]:
        own = slice(first, last)
        code, request, row, layer = _scan_ids(
            experts, offsets[first : last + 1], phase, eams[:, own], meta.experts, meta.sentinel
        )
        return code, first + request, row, layer

    if threads == 1:
        return scan(0, len(offsets) - 1)
    with ThreadPoolExecutor(threads) as pool:
        faults = list(pool.map(scan, *zip(*ranges, strict=True)))
    return next((fault for fault in faults if fault[0] != _OK), faults[0])


def count_eams(
    experts: NDArray[np.unsignedinteger], offsets: NDArray[np.int64], keep: NDArray[np.bool_], E: int
) -> NDArray[np.int64]:
    """Count the tokens that chose each expert, int64[requests, L, E], over the rows where `keep` holds."""
    eams = np.zeros((len(offsets) - 1, experts.shape[1], E), np.int64)
    _count_ids(experts, offsets, keep, eams)
    return eams


def first_fault(experts: NDArray[np.integer], E: int) -> tuple[int, int, str] | None:
    """Return the first (row, layer, reason) that no model routes. experts: [tokens, L, k], -1: not routed."""
    row, layer = _scan_fault(experts, E)
    if row < 0:
        return None
    ids = experts[row, layer].tolist()
    wrong = [e for e in ids if not -1 <= e < E]
    reason = f"{wrong[0]} is no id of {E} experts (0 to {E - 1})" if wrong else "an expert is repeated"
    return row, layer, f"expert ids {ids}: {reason}"


@loop
def _scan_ids(experts: Any, offsets: Any, phase: Any, eams: Any, E: int, sentinel: int) -> tuple[int, int, int, int]:
    """Return (what is wrong, request, row, layer) of the first fault."""
    _, L, k = experts.shape
    counts = np.zeros((2, L * E), np.uint32)
    mark = np.zeros(E, np.int64)
    serial = 0
    for r in range(len(offsets) - 1):
        counts[:] = 0
        for t in range(offsets[r], offsets[r + 1]):
            p = phase[t]
            for layer in range(L):
                serial += 1
                for j in range(k):
                    e = np.int64(experts[t, layer, j])
                    if e >= E:
                        if e == sentinel:
                            continue
                        return _RANGE, r, t, layer
                    if mark[e] == serial:
                        return _REPEAT, r, t, layer
                    mark[e] = serial
                    counts[p, layer * E + e] += np.uint32(1)
        for p in range(2):
            for i in range(L * E):
                if counts[p, i] != eams[p, r, i]:
                    return _EAM, r, 0, i // E
    return _OK, 0, 0, 0


@loop
def _scan_fault(experts: Any, E: int) -> tuple[int, int]:
    """Return (row, layer) of the first id outside -1 to E-1 or repeat; (-1, -1) if there is none."""
    tokens, L, k = experts.shape
    mark = np.full(E, -1, np.int64)
    for t in range(tokens):
        for layer in range(L):
            for j in range(k):
                e = np.int64(experts[t, layer, j])
                if e == -1:
                    continue
                if e < -1 or e >= E or mark[e] == t * L + layer:
                    return t, layer
                mark[e] = t * L + layer
    return -1, -1


@loop
def _count_ids(experts: Any, offsets: Any, keep: Any, eams: Any) -> None:
    _, L, k = experts.shape
    for r in range(len(offsets) - 1):
        for t in range(offsets[r], offsets[r + 1]):
            if keep[t]:
                for layer in range(L):
                    for j in range(k):
                        e = np.int64(experts[t, layer, j])
                        if e < eams.shape[2]:
                            eams[r, layer, e] += 1
