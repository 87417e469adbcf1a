"""Other tools' dumps as traces: plain arrays in a .npz, with a JSON that says what they are.

Nothing is believed: ids, repeats, offsets and the facts in the JSON are held against each other, and a dump
that disagrees is refused with the file, the row and the reason, before anything is written.
"""

import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.check import check_unique, first_fault
from traces.errors import InputError, located
from traces.facts import parse_json, text, texts, whole
from traces.schema import TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

BF16_BYTES = 2

LONGEST_PROMPT = 2**31 - 1
"""Tokens; positions after it must fit into 32 bits."""

T = TypeVar("T")


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
    assumed = []
    with located(str(meta_path or path)):
        if phase is None:
            stated = _fact(facts, "phase", text, "").replace(",", " ").split()
            if not stated:
                assumed.append("no phase is stated: the tokens are taken as decoded (--phase prefill says otherwise)")
            phase = stated[0] if stated else "decode"
        if phase not in ("prefill", "decode"):
            raise InputError(f"phase {phase!r} is neither prefill nor decode; say --phase prefill or decode")
        E = _fact(facts, "experts", whole, experts)
        if experts not in (None, E):
            raise InputError(f"it says {E} experts, --experts says {experts}: leave --experts out")
        if E is None:
            E = int(dump.experts.max(initial=0)) + 1
            assumed.append(f"the number of experts is taken from the largest id: {E} (--experts says otherwise)")
        meta = _meta(dump, facts, E)
        requests = _requests(dump, facts, phase)
    _check_ids(dump, meta)
    return _trace(dump, meta, requests, DECODE if phase == "decode" else PREFILL), assumed


def _fact(facts: dict[str, Any], key: str, kind: Callable[[str, Any], T], default: T) -> T:
    """What the JSON says of `key`, held against its kind; `default` where it says nothing."""
    value = facts.get(key)
    return default if value is None else kind(key, value)


def _read_dump(path: Path) -> Dump:
    if not path.is_file():
        raise InputError(f"no file {path} to import")
    try:
        with zipfile.ZipFile(path) as members:
            names = {"experts", "offsets", "weights"} & {name.removesuffix(".npy") for name in members.namelist()}
        with np.load(path, allow_pickle=False) as arrays:
            held = {name: np.asarray(arrays[name]) for name in names}
    except Exception as error:  # zipfile and numpy raise a dozen kinds for a damaged file
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
        content = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"no file {path} to take the meta from") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    facts = parse_json(content, str(path))
    if not isinstance(facts, dict):
        raise InputError(f"{path} holds no JSON object")
    return facts


def _meta(dump: Dump, facts: dict[str, Any], E: int) -> TraceMeta:
    _, L, k = dump.experts.shape
    for key, have in (("moe_layers", L), ("top_k", k)):
        if (stated := _fact(facts, key, whole, have)) != have:
            raise InputError(f"it says {key} {stated}, but the arrays in {dump.path} have {have}")
    sizes = {name: facts.get(name) for name in ("expert_bytes", "hidden_size", "expert_intermediate_size")}
    first = _fact(facts, "first_moe_layer", _count, 0)
    meta = TraceMeta(
        model=_fact(facts, "model", text, dump.path.stem),
        layers=L,
        experts=E,
        top_k=k,
        layer_names=_fact(facts, "layer_names", texts, tuple(f"layers.{first + layer}" for layer in range(L))),
        dtype=facts.get("dtype"),
        mode="import",
        revision=facts.get("revision"),
        tools={"moe-expert-cache": version("moe-expert-cache")},
        **sizes,
    )
    hidden, inner = meta.hidden_size, meta.expert_intermediate_size
    if meta.expert_bytes is None and hidden and inner and meta.dtype in (None, "bfloat16"):
        return replace(meta, expert_bytes=3 * hidden * inner * BF16_BYTES, dtype="bfloat16")
    return meta


def _check_ids(dump: Dump, meta: TraceMeta) -> None:
    """Refuse ids beyond E, repeats within a (token, layer), and arrays that were never filled."""
    if not dump.experts.any():
        raise InputError(f"{dump.path}: all expert ids are 0: the array was never filled")
    fault = first_fault(dump.experts, meta.experts)
    if fault:
        row, layer, reason = fault
        request = int(np.searchsorted(dump.offsets, row, side="right")) - 1
        raise InputError(f"{dump.path}: row {row} (request {request}), MoE layer {layer}: {reason}")


def _requests(dump: Dump, facts: dict[str, Any], phase: str) -> pd.DataFrame:
    """One row per request, from the JSON's `requests`: a list of objects, a count, or absent."""
    tokens = np.diff(dump.offsets).tolist()
    stated = facts.get("requests")
    count = len(stated) if isinstance(stated, list) else _fact(facts, "requests", whole, len(tokens))
    if count != len(tokens):
        raise InputError(f"it tells of {count} requests, but the offsets in {dump.path} of {len(tokens)}")
    dataset, rows = _fact(facts, "dataset", _label, ""), []
    for i, request in enumerate(stated if isinstance(stated, list) else [{}] * count):
        with located(f"request {i}"):
            rows.append(_request(i, request, dataset, phase, tokens[i]))
    frame = pd.DataFrame(rows, dtype=object).astype(_TYPES)
    check_unique(frame["id"])
    return frame


_TYPES = {
    **dict.fromkeys(("id", "dataset", "task", "mode"), "str"),
    **dict.fromkeys(("prompt_tokens", "output_tokens", "arrival_ns"), "Int64"),
}


def _request(i: int, told: Any, dataset: str, phase: str, tokens: int) -> dict[str, Any]:
    """The row of one request that has `tokens` tokens; `told` is its object in the JSON."""
    if not isinstance(told, dict):
        raise InputError("it is no object; `requests` must list objects, or be a count")
    routed, prompt = _fact(told, "routed_tokens", _count, tokens), _fact(told, "prompt_tokens", _prompt, None)
    if routed != tokens:
        raise InputError(f"it says {routed} routed_tokens, but has {tokens} rows")
    return {
        "id": _fact(told, "id", _label, str(i)),
        "dataset": _fact(told, "dataset", _label, dataset),
        "task": _fact(told, "task", _label, _fact(told, "category", _label, "")),
        "prompt_tokens": prompt if phase == "decode" else tokens,
        "output_tokens": tokens + 1 if phase == "decode" else 0,
        "arrival_ns": _fact(told, "arrival_ns", _count, None),
        "mode": "import",
    }


def _count(what: str, value: Any) -> int:
    return whole(what, value, low=0)


def _prompt(what: str, value: Any) -> int:
    return whole(what, value, low=0, high=LONGEST_PROMPT)


def _label(what: str, value: Any) -> str:
    """A text, or a whole number as one: ids and tasks are often numbered."""
    return str(_count(what, value)) if isinstance(value, int) else text(what, value)


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
