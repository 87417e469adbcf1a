"""A dump becomes a trace: layers, ids and facts are held against each other, and what disagrees is refused with
the file, the row and the reason, before anything is written.
"""

from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.check import first_fault, step_fault
from traces.errors import InputError, located
from traces.facts import text, texts, whole
from traces.importers.dump import Counts, Dump
from traces.importers.layers import HINT, first_dense, parse_layer_map
from traces.importers.plain import token_ids
from traces.importers.source import Request, Source, count, require_modest
from traces.index import Index
from traces.schema import AGGREGATE, TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace

BF16_BYTES = 2
IMPORT = "import"

_AS_TOLD = ("expert_bytes", "dtype", "revision", "hidden_size", "expert_intermediate_size")
"""Facts that are taken from the JSON as they are; TraceMeta checks them."""


def trace_of(dump: Dump, source: Source) -> Trace:
    """The trace of a dump. Raises InputError."""
    layers = _layers(source, dump.experts.shape[1])
    experts = dump.experts if layers is None else dump.experts[:, _index(layers)]
    stated = source.agreed("experts", "experts", dump.num_experts)
    if stated != 1 and not experts.any():
        raise InputError(f"{source.path}: all expert ids are 0: the array was never filled")
    if layers is None and "layer_names" not in source.facts and (dense := first_dense(experts)):
        raise InputError(f"{source.path}: layer {dense[0]} {dense[1]}; {HINT.format(last=experts.shape[1] - 1)}")
    if layers is not None and (idle := np.flatnonzero(~(experts >= 0).any(axis=(0, 2)))).size:
        idler = layers[int(idle[0])]
        raise InputError(f"{source.path}: layer {idler} routes nothing in any row; leave it out of --layer-map")
    phase = dump.phase if dump.phase is not None else np.full(len(experts), _phase(source), np.uint8)
    if dump.phase is not None and source.options.phase is not None:
        raise InputError(f"{source.path} says itself which tokens are prompt: leave --phase out")
    if stated is None:
        stated = int(experts.max()) + 1
        if stated < 1:
            raise InputError(f"{source.path}: no row routes anything: all ids are -1")
        source.notes.append(f"the number of experts is taken from the largest id: {stated} (--experts says otherwise)")
    meta = _meta(source, experts.shape[1], experts.shape[2], stated, layers, IMPORT)
    eams = f"{source.path}: EAMs of {len(dump.requests)} requests x {meta.layers} layers x {meta.experts} experts"
    require_modest(len(dump.requests) * meta.layers * meta.experts * 16, dump.experts.nbytes, eams)
    requests = _frame(source, dump, phase)
    _check_ids(replace(dump, experts=experts), meta, layers)
    position = dump.position if dump.position is not None else _positions(dump.offsets, phase, requests)
    index = Index(len(requests))
    index.add(np.repeat(np.arange(len(requests)), np.diff(dump.offsets)), position, phase)
    index.check_order(str(source.path))
    if dump.step is not None:
        _check_steps(dump, dump.step, phase)
    token_id, apart = dump.token_id, source.options.token_ids
    if apart is not None:
        if token_id is not None:
            raise InputError(f"{source.path} holds token ids itself: leave --token-ids out")
        token_id = token_ids(apart, len(experts))
    ids = np.where(experts < 0, meta.sentinel, experts) if experts.dtype.kind == "i" else experts
    return Trace(
        name=source.path.stem,
        meta=meta,
        requests=requests,
        offsets=dump.offsets,
        experts=ids.astype(meta.id_type),
        phase=phase,
        position=position,
        step=dump.step if dump.step is not None else _steps(dump.offsets, phase),
        weights=dump.weights if dump.weights is None or layers is None else dump.weights[:, _index(layers)],
        token_id=token_id,
    )


def aggregate_of(counts: Counts, source: Source) -> Trace:
    """The trace of counts: EAMs, and no sequences. Raises InputError."""
    R, dumped, E = counts.counts.shape
    layers = _layers(source, dumped) or counts.layers
    if layers is None and (empty := np.flatnonzero(~counts.counts.any(axis=(0, 2)))).size:
        raise InputError(f"{source.path}: layer {empty[0]} counts no token; {HINT.format(last=dumped - 1)}")
    held = counts.counts if layers is None else counts.counts[:, _index(layers)]
    if not held.any():
        raise InputError(f"{source.path}: all counts are 0: nothing was recorded")
    if int(held.max()) >= 2**32:
        raise InputError(f"{source.path}: a count of {int(held.max())} is more than a trace can hold (2^32 - 1)")
    if source.options.token_ids is not None:
        raise InputError(f"{source.path} holds counts, which have no tokens: leave --token-ids out")
    k = source.agreed("top_k", "top_k", None)
    if k is None:
        raise InputError(f"{source.path} holds counts, which do not tell how many experts a token chose: give --top-k")
    source.agreed("experts", "experts", E)
    meta = _meta(source, held.shape[1], k, E, layers, AGGREGATE)
    phase = _phase(source)
    aggregate = np.zeros((2, R, held.shape[1] * E), np.uint32)
    aggregate[phase] = held.reshape(R, -1)
    nothing = np.zeros(0, np.uint32)
    return Trace(
        name=source.path.stem,
        meta=meta,
        requests=_table([_row(one, one.prompt_tokens, 0, AGGREGATE) for one in counts.requests]),
        offsets=np.zeros(R + 1, np.int64),
        experts=np.zeros((0, meta.layers, k), meta.id_type),
        phase=nothing.astype(np.uint8),
        position=nothing,
        step=nothing,
        aggregate=aggregate,
    )


def _layers(source: Source, dumped: int) -> tuple[int, ...] | None:
    """The dump's layers that are MoE layers, as the user says; None if nothing is said."""
    if source.options.layers not in (None, dumped):
        raise InputError(f"{source.path} has {dumped} layers, but --layers says {source.options.layers}")
    return None if source.options.layer_map is None else parse_layer_map(source.options.layer_map, dumped)


def _index(layers: tuple[int, ...]) -> slice | NDArray[np.int64]:
    """An index that takes `layers`: without a copy where they are consecutive."""
    first, last = layers[0], layers[-1]
    return slice(first, last + 1) if last - first + 1 == len(layers) else np.array(layers)


def _phase(source: Source) -> int:
    """The phase of all tokens of a dump that does not tell it."""
    word = source.options.phase
    if word is None:
        stated = source.fact("phase", text, "").replace(",", " ").split()
        if not stated:
            source.notes.append("no phase is stated: the tokens are taken as decoded (--phase prefill says otherwise)")
        word = stated[0] if stated else "decode"
    if word not in ("prefill", "decode"):
        raise source.disagrees(f"phase {word!r} is neither prefill nor decode; say --phase prefill or decode")
    return DECODE if word == "decode" else PREFILL


def _meta(source: Source, L: int, k: int, E: int, layers: tuple[int, ...] | None, mode: str) -> TraceMeta:
    for key, have in (("moe_layers", L), ("top_k", k)):
        if (stated := source.fact(key, whole, have)) != have:
            hint = f"; {HINT.format(last=L - 1)}" if key == "moe_layers" and stated < have else ""
            raise source.disagrees(f"it says {key} {stated}, but the arrays in {source.path} have {have}{hint}")
    if source.options.top_k not in (None, k):
        raise InputError(f"{source.path} has the top-{k} of each layer, but --top-k says {source.options.top_k}")
    first = source.fact("first_moe_layer", count, 0)
    names = tuple(f"layers.{layer}" for layer in layers or range(first, first + L))
    model, names = source.fact("model", text, source.path.stem), source.fact("layer_names", texts, names)
    rest: dict[str, Any] = {name: source.stated(name) for name in _AS_TOLD}
    tools = {"moe-expert-cache": version("moe-expert-cache")}
    with located(source.told):
        meta = TraceMeta(model, L, E, k, names, mode=mode, tools=tools, **rest)
    hidden, inner = meta.hidden_size, meta.expert_intermediate_size
    if meta.expert_bytes is None and hidden and inner and meta.dtype in (None, "bfloat16"):
        return replace(meta, expert_bytes=3 * hidden * inner * BF16_BYTES, dtype="bfloat16")
    return meta


def _frame(source: Source, dump: Dump, phase: NDArray[np.uint8]) -> pd.DataFrame:
    """One row per request; its token counts and its rows must agree."""
    decoded = np.concatenate([[0], np.cumsum(phase == DECODE)])[dump.offsets]
    rows = []
    for i, one in enumerate(dump.requests):
        d = int(decoded[i + 1] - decoded[i])
        p = int(dump.offsets[i + 1] - dump.offsets[i]) - d
        output = one.output_tokens if one.output_tokens is not None else d + 1 if d else 0
        with located(source.told), located(f"request {i}"):
            if one.routed_tokens not in (None, p + d):
                raise InputError(f"it says {one.routed_tokens} routed_tokens, but has {p + d} rows")
            if p and one.prompt_tokens not in (None, p):
                raise InputError(f"it says {one.prompt_tokens} prompt_tokens, but has {p} rows of prefill")
            if d != max(output - 1, 0):
                raise InputError(f"it says {output} output_tokens, so {max(output - 1, 0)} decoded rows, but has {d}")
        rows.append(_row(one, p or one.prompt_tokens, output, IMPORT))
    return _table(rows)


def _row(one: Request, prompt: int | None, output: int, mode: str) -> dict[str, Any]:
    return {
        "id": one.id,
        "dataset": one.dataset,
        "task": one.task,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "arrival_ns": one.arrival_ns,
        "mode": mode,
    }


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    types = {
        **dict.fromkeys(("id", "dataset", "task", "mode"), "str"),
        **dict.fromkeys(("prompt_tokens", "output_tokens", "arrival_ns"), "Int64"),
    }
    return pd.DataFrame(rows, dtype=object).astype(types)


def _check_ids(dump: Dump, meta: TraceMeta, layers: tuple[int, ...] | None) -> None:
    """Refuse ids beyond E and repeats within a (token, layer)."""
    if fault := first_fault(dump.experts, meta.experts):
        row, layer, reason = fault
        request = int(np.searchsorted(dump.offsets, row, side="right")) - 1
        dumped = f" (layer {layers[layer]} of the dump)" if layers else ""
        raise InputError(f"{dump.locate(row, request)}, MoE layer {layer}{dumped}: {reason}")


def _check_steps(dump: Dump, step: NDArray[np.uint32], phase: NDArray[np.uint8]) -> None:
    """Refuse steps that do not follow each other within a request."""
    if (row := step_fault(step, phase, dump.offsets)) is not None:
        request = int(np.searchsorted(dump.offsets, row, side="right")) - 1
        raise InputError(f"{dump.locate(row, request)}: step {step[row]} does not follow step {step[row - 1]}")


def _positions(offsets: NDArray[np.int64], phase: NDArray[np.uint8], requests: pd.DataFrame) -> NDArray[np.uint32]:
    """Consecutive: from 0, or after the prompt where only decoded tokens are there."""
    request = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    position = np.arange(len(phase)) - offsets[request]
    prefilled = np.zeros(len(requests), bool)
    prefilled[request[phase == PREFILL]] = True
    prompts = requests["prompt_tokens"].fillna(0).to_numpy(np.int64)
    position += np.where(prefilled, 0, prompts)[request]
    return position.astype(np.uint32)


def _steps(offsets: NDArray[np.int64], phase: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Requests one after the other; a prefill is one step, and each decoded token."""
    begins = phase == DECODE
    begins[offsets[:-1][np.diff(offsets) > 0]] = True
    return (np.cumsum(begins) - 1).astype(np.uint32)
