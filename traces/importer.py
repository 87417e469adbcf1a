"""Other tools' dumps as traces: plain arrays in a .npz, with a JSON that says what they are.

Nothing is believed: ids, repeats, offsets and the counts in the JSON are held against each other, and a dump
that disagrees is refused with the file, the row and the reason.
"""

import json
import zipfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.check import first_fault
from traces.errors import InputError
from traces.schema import TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

BF16_BYTES = 2


@dataclass(frozen=True)
class Dump:
    """What a .npz holds."""

    path: Path
    experts: NDArray[np.integer]  # [tokens, L, k] ids within a layer, -1: not routed
    offsets: NDArray[np.int64]  # [requests + 1]
    weights: NDArray[np.float16] | None  # [tokens, L, k]


def import_npz(
    path: Path, meta_path: Path | None = None, phase: str | None = None, experts: int | None = None
) -> tuple[Trace, list[str]]:
    """Read a .npz (`experts`, `offsets`, optional `weights`) and its JSON as a trace, and what was assumed.

    phase: "prefill" or "decode"; default the first word of the JSON's `phase`, else decode. experts: E, where
    no JSON says it. All rows have one phase. Raises InputError.
    """
    dump = _read_dump(path)
    facts = _read_json(meta_path) if meta_path else {}
    where = str(meta_path or path)
    assumed = []
    if phase is None:
        stated = str(facts.get("phase", "")).replace(",", " ").split()
        if not stated:
            assumed.append("no phase is stated, so the tokens are taken as decoded (--phase prefill says otherwise)")
        phase = stated[0] if stated else "decode"
    if phase not in ("prefill", "decode"):
        raise InputError(f"{where}: phase {phase!r} is neither prefill nor decode; say --phase prefill or decode")
    E = facts.get("experts", experts)
    if experts is not None and experts != E:
        raise InputError(f"{where} says {E} experts, --experts says {experts}: leave --experts out")
    if E is None:
        E = int(dump.experts.max(initial=0)) + 1
        assumed.append(f"the number of experts is taken from the largest id: {E} (--experts says otherwise)")
    meta = _meta(dump, facts, E, where)
    _check_ids(dump, meta)
    requests = _requests(dump, facts, phase, where)
    return _trace(dump, meta, requests, DECODE if phase == "decode" else PREFILL), assumed


def _read_dump(path: Path) -> Dump:
    if not path.is_file():
        raise InputError(f"no file {path} to import")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in arrays.files if name in ("experts", "offsets", "weights")}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise InputError(f"{path} is no .npz, or damaged: {error}") from error
    for name in ("experts", "offsets"):
        if name not in held:
            raise InputError(f"{path} has no array {name!r}; it must hold experts[tokens, layers, k] and offsets")
        if held[name].dtype.kind not in "iu":
            raise InputError(f"{path}: {name} has the type {held[name].dtype}; integers are needed")
    experts, offsets, weights = held["experts"], held["offsets"].astype(np.int64), held.get("weights")
    if experts.ndim != 3:
        raise InputError(f"{path}: experts has the shape {experts.shape}; [tokens, layers, k] is needed")
    if not experts.size:
        raise InputError(f"{path}: experts is empty {experts.shape}")
    if weights is not None and (weights.shape != experts.shape or weights.dtype.kind != "f"):
        raise InputError(
            f"{path}: weights is {weights.dtype} {weights.shape}; floats of the shape {experts.shape} are needed"
        )
    _check_offsets(path, offsets, len(experts))
    return Dump(path, experts, offsets, None if weights is None else weights.astype(np.float16))


def _check_offsets(path: Path, offsets: NDArray[np.int64], tokens: int) -> None:
    if offsets.ndim != 1 or len(offsets) < 2:
        raise InputError(f"{path}: offsets has the shape {offsets.shape}; [requests + 1] is needed")
    if offsets[0] != 0 or offsets[-1] != tokens:
        raise InputError(
            f"{path}: offsets run from {offsets[0]} to {offsets[-1]}; they must run from 0 to the {tokens} tokens"
        )
    falling = np.diff(offsets) <= 0
    if falling.any():
        i = int(np.argmax(falling))
        raise InputError(
            f"{path}: offsets must rise, but go from {offsets[i]} to {offsets[i + 1]} at request {i}: "
            "no request may be empty"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"no file {path} to take the meta from") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no JSON: {error}") from error
    if not isinstance(facts, dict):
        raise InputError(f"{path} holds no JSON object")
    return facts


def _meta(dump: Dump, facts: dict[str, Any], E: Any, where: str) -> TraceMeta:
    _, L, k = dump.experts.shape
    for key, have in (("moe_layers", L), ("top_k", k)):
        if facts.get(key, have) != have:
            raise InputError(f"{where} says {key} {facts[key]}, but the arrays in {dump.path} have {have}")
    if not isinstance(E, int) or E < 1:
        raise InputError(f"{where} says {E!r} experts; a number above 0 is needed")
    hidden, inner = (_size(facts, key, where) for key in ("hidden_size", "expert_intermediate_size"))
    expert_bytes, dtype = _size(facts, "expert_bytes", where), facts.get("dtype")
    if expert_bytes is None and hidden and inner and dtype in (None, "bfloat16"):
        expert_bytes, dtype = 3 * hidden * inner * BF16_BYTES, "bfloat16"
    first = int(facts.get("first_moe_layer", 0))
    names = facts.get("layer_names") or [f"layers.{first + layer}" for layer in range(L)]
    return TraceMeta(
        model=str(facts.get("model", dump.path.stem)),
        layers=L,
        experts=E,
        top_k=k,
        layer_names=tuple(map(str, names)),
        expert_bytes=expert_bytes,
        dtype=dtype,
        mode="import",
        revision=facts.get("revision"),
        hidden_size=hidden,
        expert_intermediate_size=inner,
        tools={"moe-expert-cache": version("moe-expert-cache")},
    )


def _size(facts: dict[str, Any], key: str, where: str) -> int | None:
    value = facts.get(key)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise InputError(f"{where}: {key} is {value!r}; a number above 0 is needed")
    return value


def _check_ids(dump: Dump, meta: TraceMeta) -> None:
    """Refuse ids beyond E, repeats within a (token, layer), and arrays that were never filled."""
    if not dump.experts.any():
        raise InputError(f"{dump.path}: all expert ids are 0: the array was never filled")
    fault = first_fault(dump.experts, meta.experts)
    if fault:
        row, layer, reason = fault
        request = int(np.searchsorted(dump.offsets, row, side="right")) - 1
        raise InputError(f"{dump.path}: row {row} (request {request}), MoE layer {layer}: {reason}")


def _requests(dump: Dump, facts: dict[str, Any], phase: str, where: str) -> pd.DataFrame:
    """One row per request, from the JSON's `requests`: a list of objects, a count, or absent."""
    count, stated = len(dump.offsets) - 1, facts.get("requests")
    listed = stated if isinstance(stated, list) else [{}] * (count if stated is None else stated)
    if len(listed) != count:
        raise InputError(f"{where} tells of {len(listed)} requests, but the offsets in {dump.path} of {count}")
    if not all(isinstance(request, dict) for request in listed):
        raise InputError(f"{where}: `requests` must list objects, or be a count")
    tokens = np.diff(dump.offsets)
    for i, request in enumerate(listed):
        if request.get("routed_tokens", tokens[i]) != tokens[i]:
            raise InputError(
                f"{where}: request {i} has {request['routed_tokens']} routed_tokens, "
                f"but {tokens[i]} rows in {dump.path}"
            )
    prompt = [request.get("prompt_tokens") for request in listed] if phase == "decode" else tokens
    return pd.DataFrame(
        {
            "id": [str(request.get("id", i)) for i, request in enumerate(listed)],
            "dataset": [str(request.get("dataset", facts.get("dataset", ""))) for request in listed],
            "task": [str(request.get("task", request.get("category", ""))) for request in listed],
            "prompt_tokens": pd.array(prompt, dtype="Int64"),
            "output_tokens": tokens + 1 if phase == "decode" else np.zeros(count, np.int64),
            "arrival_ns": pd.array([request.get("arrival_ns") for request in listed], dtype="Int64"),
            "mode": "import",
        }
    )


def _trace(dump: Dump, meta: TraceMeta, requests: pd.DataFrame, phase: int) -> Trace:
    """Decoded tokens are a step each and start after the prompt; a prefill is one step and starts at 0."""
    tokens = np.diff(dump.offsets)
    request = np.repeat(np.arange(len(tokens)), tokens)
    position = np.arange(len(request)) - dump.offsets[request]
    if phase == DECODE:
        position += requests["prompt_tokens"].fillna(0).to_numpy(np.int64)[request]
    ids = np.where(dump.experts < 0, meta.sentinel, dump.experts) if dump.experts.dtype.kind == "i" else dump.experts
    return Trace(
        name=dump.path.stem,
        meta=meta,
        requests=requests,
        offsets=dump.offsets,
        experts=ids.astype(meta.id_type),
        phase=np.full(len(request), phase, np.uint8),
        position=position.astype(np.uint32),
        step=(np.arange(len(request)) if phase == DECODE else request).astype(np.uint32),
        weights=dump.weights,
    )
