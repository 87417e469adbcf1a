"""A dump becomes a trace: layers, ids and facts are compared with each other, and what disagrees is refused before
anything is written.
"""

from dataclasses import replace
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.check import check_steps, first_fault
from traces.errors import InputError, located
from traces.importers.dump import Counts, Dump
from traces.importers.layers import HINT, first_dense, parse_layer_map
from traces.importers.plain import token_ids
from traces.importers.source import Request, Source
from traces.index import Index
from traces.schema import AGGREGATE, TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace, in_turn, listed

BF16_BYTES = 2
IMPORT = "import"

_AS_STATED = ("expert_bytes", "dtype", "revision", "hidden_size", "expert_intermediate_size")
"""Facts of the JSON that are taken as they are."""


def trace_of(dump: Dump, source: Source) -> Trace:
    where, layers = str(source.path), _layers(source, dump.experts.shape[1])
    if dump.phase is not None and source.options.phase is not None:
        raise InputError(f"{where} says itself which tokens are prompt: leave --phase out")
    experts = dump.experts if layers is None else dump.experts[:, _index(layers)]
    E = source.agreed("experts", dump.num_experts)
    if layers is None and source.facts.layer_names is None and (dense := first_dense(experts)):
        raise InputError(f"{where}: layer {dense[0]} {dense[1]}; {HINT.format(last=experts.shape[1] - 1)}")
    phase = dump.phase if dump.phase is not None else np.full(len(experts), _phase(source), np.uint8)
    if E is None:
        E = int(experts.max()) + 1
        source.notes.append(f"the number of experts is taken from the largest id: {E} (--experts says otherwise)")
    meta = _meta(source, experts.shape[1], experts.shape[2], E, layers, IMPORT)
    if fault := first_fault(experts, E):
        row, layer, reason = fault
        request = int(np.searchsorted(dump.offsets, row, side="right")) - 1
        dumped = f" (layer {layers[layer]} of the dump)" if layers else ""
        place = f"request {request}, row {row - int(dump.offsets[request])}, MoE layer {layer}{dumped}"
        raise InputError(f"{where}: {place}: {reason}")
    requests = _frame(dump.requests, dump.offsets, phase)
    prefilled = np.diff(np.concatenate([[0], np.cumsum(phase == PREFILL)])[dump.offsets])
    columns = in_turn(np.diff(dump.offsets), prefilled)
    position, step = dump.position, dump.step if dump.step is not None else columns["step"]
    if position is None:  # after the prompt where only decoded tokens are there
        before = np.where(prefilled > 0, 0, requests["prompt_tokens"].fillna(0).to_numpy(np.int64))
        position = columns["position"] + np.repeat(before, np.diff(dump.offsets)).astype(np.uint32)
    index = Index(len(requests))
    index.add(np.repeat(np.arange(len(requests)), np.diff(dump.offsets)), position, phase)
    index.check(meta, requests, where)
    check_steps(step, phase, dump.offsets, where)
    if source.options.token_ids is not None:
        if dump.token_id is not None:
            raise InputError(f"{where} holds token ids itself: leave --token-ids out")
        dump = replace(dump, token_id=token_ids(source.options.token_ids, len(experts)))
    ids = np.where(experts < 0, meta.sentinel, experts) if experts.dtype.kind == "i" else experts
    return Trace(
        name=source.path.stem,
        meta=meta,
        requests=requests,
        offsets=dump.offsets,
        experts=ids.astype(meta.id_type),
        phase=phase,
        position=position,
        step=step,
        weights=dump.weights if dump.weights is None or layers is None else dump.weights[:, _index(layers)],
        token_id=dump.token_id,
    )


def aggregate_of(counts: Counts, source: Source) -> Trace:
    """Return the trace of counts: EAMs, and no sequences. Raises InputError."""
    R, dumped, E = counts.counts.shape
    layers = _layers(source, dumped) or counts.layers
    if layers is None and (empty := np.flatnonzero(~counts.counts.any(axis=(0, 2)))).size:
        raise InputError(f"{source.path}: layer {empty[0]} counts no token; {HINT.format(last=dumped - 1)}")
    held = counts.counts if layers is None else counts.counts[:, _index(layers)]
    if held.max() >= 2**32:
        raise InputError(f"{source.path}: a count of {held.max()} is more than a trace can hold (2^32 - 1)")
    if source.options.token_ids is not None:
        raise InputError(f"{source.path} holds counts, which have no tokens: leave --token-ids out")
    k = source.agreed("top_k")
    if k is None:
        raise InputError(f"{source.path} holds counts, which do not tell how many experts a token chose: give --top-k")
    source.agreed("experts", E)
    meta = _meta(source, held.shape[1], k, E, layers, AGGREGATE)
    aggregate = np.zeros((2, R, held.shape[1] * E), np.uint32)
    aggregate[_phase(source)] = held.reshape(R, -1)
    columns = in_turn(np.zeros(R, np.int64), np.zeros(R, np.int64))
    return Trace(
        name=source.path.stem,
        meta=meta,
        requests=_frame(counts.requests, columns["offsets"], columns["phase"], AGGREGATE),
        experts=np.zeros((0, meta.layers, k), meta.id_type),
        aggregate=aggregate,
        **columns,
    )


def _layers(source: Source, dumped: int) -> tuple[int, ...] | None:
    """Return the dump's layers that are MoE layers, as the user states them; None if nothing is stated."""
    if source.options.layers not in (None, dumped):
        raise InputError(f"{source.path} has {dumped} layers, but --layers says {source.options.layers}")
    return None if source.options.layer_map is None else parse_layer_map(source.options.layer_map, dumped)


def _index(layers: tuple[int, ...]) -> slice | NDArray[np.int64]:
    """Return an index that takes `layers`: without a copy where they are consecutive."""
    first, last = layers[0], layers[-1]
    return slice(first, last + 1) if last - first + 1 == len(layers) else np.array(layers)


def _phase(source: Source) -> int:
    """Return the phase of all tokens of a dump that does not state it."""
    word = source.options.phase or next(iter((source.facts.phase or "").replace(",", " ").split()), None)
    if word is None:
        source.notes.append("no phase is stated: the tokens are taken as decoded (--phase prefill says otherwise)")
    if word not in ("prefill", "decode", None):
        raise InputError(f"phase {word!r} is neither prefill nor decode; say --phase prefill or decode")
    return PREFILL if word == "prefill" else DECODE


def _meta(source: Source, L: int, k: int, E: int, layers: tuple[int, ...] | None, mode: str) -> TraceMeta:
    facts = source.facts
    if facts.moe_layers not in (None, L):
        hint = f"; {HINT.format(last=L - 1)}" if facts.moe_layers < L else ""
        raise InputError(f"{source.facts_path} says moe_layers {facts.moe_layers}, but {source.path} has {L}{hint}")
    source.agreed("top_k", k)
    first = facts.first_moe_layer or 0
    names = facts.layer_names or tuple(f"layers.{layer}" for layer in layers or range(first, first + L))
    stated: dict[str, Any] = {name: getattr(facts, name) for name in _AS_STATED}
    hidden, inner = facts.hidden_size, facts.expert_intermediate_size
    if facts.expert_bytes is None and hidden and inner and facts.dtype in (None, "bfloat16"):
        stated |= {"expert_bytes": 3 * hidden * inner * BF16_BYTES, "dtype": "bfloat16"}
    tools = {"moe-expert-cache": version("moe-expert-cache")}
    with located(str(source.facts_path or source.path)):
        model = source.path.stem if facts.model is None else facts.model
        return TraceMeta(model, L, E, k, names, mode=mode, tools=tools, **stated)


def _frame(
    requests: list[Request], offsets: NDArray[np.int64], phase: NDArray[np.uint8], mode: str = IMPORT
) -> pd.DataFrame:
    """Return a row for each request; what the dump does not count follows from its rows."""
    decoded = np.diff(np.concatenate([[0], np.cumsum(phase == DECODE)])[offsets]).tolist()
    prefilled = [rows - d for rows, d in zip(np.diff(offsets).tolist(), decoded, strict=True)]
    outputs = [
        0 if mode == AGGREGATE else one.output_tokens if one.output_tokens is not None else d + 1 if d else 0
        for one, d in zip(requests, decoded, strict=True)
    ]
    return listed(
        [str(one.id) for one in requests],
        [str(one.dataset) for one in requests],
        [str(one.task) for one in requests],
        [p or one.prompt_tokens for one, p in zip(requests, prefilled, strict=True)],
        outputs,
        mode,
        [one.arrival_ns for one in requests],
    )
