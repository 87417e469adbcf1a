"""A dump becomes a trace: layers, ids and facts are compared with each other, and what disagrees is refused before
anything is written.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.check import check_steps
from traces.defects import Routing, find, layer_map, parts_of_counts
from traces.errors import InputError, located
from traces.importers.dump import Counts
from traces.importers.plain import token_ids
from traces.importers.source import Request, Source
from traces.index import Index
from traces.schema import AGGREGATE, TraceMeta
from traces.steps import DECODE, PREFILL
from traces.trace import Trace, in_turn, listed

BF16_BYTES = 2
IMPORT = "import"

_PART = re.compile(r"(\d+)|(\d+)-(\d+)|(\d*):")
"""One layer, an inclusive range, or "N:" for all from N on."""

_AS_STATED = ("expert_bytes", "layer_expert_bytes", "dtype", "revision", "hidden_size", "expert_intermediate_size")
"""Facts of the JSON that are taken as they are."""


def trace_of(dump: Routing, source: Source) -> Trace:
    where, layers = str(source.path), _layers(source, dump.experts.shape[1])
    if dump.phase is not None and source.options.phase is not None:
        raise InputError(f"{where} says itself which tokens are prompt: leave --phase out")
    if source.options.token_ids is not None:
        dump = replace(dump, token_id=token_ids(source.options.token_ids, len(dump.experts)))
    if layers is not None:
        numbers = layers if dump.layers is None else tuple(dump.layers[each] for each in layers)
        dump = replace(dump.choices(lambda held: held[:, layers]), layers=numbers)
    E, profile = source.agreed("experts", dump.E), source.profile
    if E is None and profile is not None and dump.experts.max(initial=-1) < profile.experts:
        E = profile.experts
    if dump.phase is None and source.phase is not None:
        dump = replace(dump, phase=np.full(len(dump.experts), _phase(source), np.uint8))
    dump = _sound(dump, source, E)
    E = source.experts_of(dump.experts) if E is None else E
    phase = dump.phase if dump.phase is not None else np.full(len(dump.experts), _phase(source), np.uint8)
    _, L, k = dump.experts.shape
    meta = _meta(source, L, k, E, dump.layers, IMPORT)
    prefilled = np.diff(np.concatenate([[0], np.cumsum(phase == PREFILL)])[dump.offsets])
    requests, lengths = _frame(dump.requests, dump.offsets, prefilled, IMPORT), np.diff(dump.offsets)
    columns, position = in_turn(lengths, prefilled), dump.position
    if position is None:  # after the prompt where only decoded tokens are there
        before = np.where(prefilled > 0, 0, requests["prompt_tokens"].fillna(0).to_numpy(np.int64))
        position = columns["position"] + np.repeat(before, lengths).astype(np.uint32)
    step = dump.step if dump.step is not None else columns["step"]
    index = Index(len(requests))
    index.add(np.repeat(np.arange(len(requests)), lengths), position, phase)
    index.check(meta, requests, where)
    check_steps(step, phase, dump.offsets, where)
    return Trace(
        name=source.stem,
        meta=meta,
        requests=requests,
        offsets=dump.offsets,
        experts=meta.stored(dump.experts),
        phase=phase,
        position=position,
        step=step,
        weights=None if dump.weights is None else dump.weights.astype(np.float16),
        hits=None if dump.hits is None else np.where(dump.routed, dump.hits, -1).astype(np.int8),
        token_id=dump.token_id,
    )


def _sound(dump: Routing, source: Source, E: int | None) -> Routing:
    """Return the dump as `traces.defects` leaves it: its findings are the source's, and those unfixed may refuse it."""
    experts = dump.experts
    routed = experts[experts >= 0]
    if E is not None and routed.size >= 64 and routed.min() == 1 and routed.max() == E:
        source.notes.append(f"expert ids run from 1 to {E}: they are taken as 0 to {E - 1}")
        experts = np.where(experts > 0, experts.astype(np.int64) - 1, -1)
    dump = _chosen(_by_layer(replace(dump, experts=experts, E=E), source), source)
    experts, E = dump.experts, dump.E
    stated, profile = source.agreed("top_k") or 0, source.profile
    used = int((experts != -1).any(axis=(0, 1)).nonzero()[0].max(initial=0)) + 1
    used = min(experts.shape[2], max(used, stated))  # slots behind are padding
    top_k = max(stated, 0 if profile is None else profile.top_k) or None
    held = replace(dump.choices(lambda held: held[:, :, :used]), model_top_k=top_k)
    findings, sound = find(held, source.options.fix)
    if source.facts.layer_names is not None:  # who names the layers says that they are MoE layers
        findings = [one for one in findings if one.name != "dense layer"]
    # rows are named as they are in the dump, before others were left out
    source.findings.extend(find(held)[0] if source.options.fix and len(findings) > 1 else findings)
    for one in findings:
        if one.unusable and (one.fixed is None or not source.options.fix):
            raise InputError(f"{source.path}: {one}")
    if len(sound.requests) == len(dump.requests) and len(sound.experts) == len(experts):
        return sound
    parts = (one if isinstance(one, Request) else Request(one, dataset="", task="") for one in sound.requests)
    return replace(sound, requests=[replace(one, output_tokens=None) for one in parts])


def _by_layer(dump: Routing, source: Source) -> Routing:
    """Return ids that count through all layers as ids within theirs. Raises InputError if nothing says how many."""
    routed, profile = dump.routed, source.profile
    least = np.where(routed, dump.experts, np.iinfo(np.int64).max).min(axis=(0, 2))
    most = dump.experts.max(axis=(0, 2), initial=-1).astype(np.int64)
    if len(most) < 2 or routed.sum() < 64 or (most < 0).any() or (most[:-1] >= least[1:]).any():
        return dump
    E = dump.E or (None if profile is None else profile.experts)
    first = np.arange(len(most)) * (E or 0)
    if E is None or (least < first).any() or (most >= first + E).any():
        raise InputError(
            f"{source.path}: no id of a layer is one of the next: they count through all layers, up to {most[-1]}; "
            "say how many experts a layer has with --experts"
        )
    source.notes.append(f"expert ids count through all layers: {E} of each")
    return replace(dump, experts=np.where(routed, dump.experts - first[:, None], -1), E=E)


def _chosen(dump: Routing, source: Source) -> Routing:
    """Return the k experts of the largest weights where most choices name all experts. Raises InputError without k."""
    routed = dump.routed.sum(axis=2)
    E = dump.E or int(dump.experts.max(initial=0)) + 1
    if E < 2 or 2 * (routed == E).sum() <= (routed > 0).sum():
        return dump
    profile = source.profile
    k = source.agreed("top_k") or (None if profile is None else profile.top_k)
    if k == E:
        return dump
    if k is None or k > E or dump.weights is None:
        raise InputError(
            f"{source.path} names all {E} experts in a choice, so not which were chosen: "
            + (
                "it has no weights that say so (numbers of uses are read from columns count_0, count_1, ...)"
                if dump.weights is None
                else "say how many of the largest with --top-k"
            )
        )
    source.notes.append(f"all {E} experts have weights: the {k} largest are taken as chosen")
    order = np.argsort(-dump.weights, axis=2, kind="stable")[:, :, :k]
    return dump.choices(lambda held: np.take_along_axis(held, order, axis=2))


def aggregate_of(counts: Counts, source: Source) -> Trace:
    """Return the trace of counts: EAMs, and no sequences. Raises InputError."""
    names, requests = [str(one.id) for one in counts.requests], counts.requests
    held, finding = parts_of_counts(counts.counts, names)
    if finding is not None:
        source.findings.append(finding)
        if finding.unusable and not source.options.fix:
            raise InputError(f"{source.path}: {finding}; --fix does it")
        requests = [replace(requests[0], id=source.stem)]
    R, dumped, E = held.shape
    layers, k = _layers(source, dumped) or counts.layers, source.agreed("top_k")
    if layers is None and (empty := np.flatnonzero(~held.any(axis=(0, 2)))).size:
        raise InputError(f"{source.path}: layer {empty[0]} counts no token; {layer_map(dumped)}")
    held = held if layers is None else held[:, layers]
    if held.min() < 0 or held.max() >= 2**32:
        raise InputError(f"{source.path} has counts from {held.min()} to {held.max()}; a trace holds 0 to 2^32 - 1")
    if k is None:
        raise InputError(f"{source.path} holds counts, which do not say how many experts a token chose: give --top-k")
    source.agreed("experts", E)
    meta = _meta(source, held.shape[1], k, E, layers, AGGREGATE)
    aggregate = np.zeros((2, R, held.shape[1] * E), np.uint32)
    if counts.by_phase is None:
        aggregate[_phase(source)] = held.reshape(R, -1)
    else:
        parts = [parts_of_counts(part, names)[0] for part in counts.by_phase]
        aggregate[:] = np.stack([part if layers is None else part[:, layers] for part in parts]).reshape(2, R, -1)
    columns = in_turn(np.zeros(R, np.int64), np.zeros(R, np.int64))
    return Trace(
        name=source.stem,
        meta=meta,
        requests=_frame(requests, columns["offsets"], np.zeros(R, np.int64), AGGREGATE),
        experts=np.zeros((0, meta.layers, k), meta.id_type),
        aggregate=aggregate,
        **columns,
    )


def parse_layer_map(spec: str, layers: int) -> tuple[int, ...]:
    """Return the layers, of `layers`, that `spec` names, ascending: "1-26", "3:", "0,2,4-8" or in brackets."""
    numbers: list[int] = []
    parts = [_PART.fullmatch(part.strip()) for part in spec.strip().removeprefix("[").removesuffix("]").split(",")]
    for match in filter(None, parts):
        one, first, last, begin = match.groups()
        numbers += range(int(one or first or begin or 0), int(one or last or layers - 1) + 1)
    if None in parts or not numbers or numbers[-1] >= layers or any(b <= a for a, b in pairwise(numbers)):
        raise InputError(f"--layer-map {spec!r} must name layers from 0 to {layers - 1}, as in 1-26, 3: or 0,2,4-8")
    return tuple(numbers)


def _layers(source: Source, dumped: int) -> tuple[int, ...] | None:
    """Return the dump's layers that are MoE layers, as the user states them; None if nothing is stated."""
    if source.options.layers not in (None, dumped):
        raise InputError(f"{source.path} has {dumped} layers, but --layers says {source.options.layers}")
    return None if source.options.layer_map is None else parse_layer_map(source.options.layer_map, dumped)


def _phase(source: Source) -> int:
    """Return the phase of all tokens of a dump that does not state it."""
    if source.phase is None:
        source.notes.append("no phase is stated: the tokens are taken as decoded (--phase prefill says otherwise)")
    return DECODE if source.phase is None else source.phase


def _meta(source: Source, L: int, k: int, E: int, layers: Sequence[int] | None, mode: str) -> TraceMeta:
    facts = source.facts
    source.agreed("moe_layers", L)
    if (most := source.agreed("top_k")) is not None and k > most:
        raise InputError(f"{source.path} has {k} experts of a token in a layer, top_k is said to be {most}")
    first, profile = facts.first_moe_layer or 0, source.profile
    numbers = tuple(layers or range(first, first + L))
    if (
        facts.first_moe_layer is None
        and not source.stated.get("layer_names")
        and profile
        and profile.moe_layers == L == numbers[-1] - numbers[0] + 1
    ):
        of_model = tuple(number for number, kind in enumerate(profile.order) if kind.routed)
        if of_model != numbers:  # the dump counts MoE layers only, or from 1
            whose = f"the layers {of_model[0]} to {of_model[-1]} of {profile.name}"
            source.found.append(f"layers {numbers[0]} to {numbers[-1]} are {whose}")
            numbers = of_model
    named = source.stated.get("layer_names")
    names = facts.layer_names or tuple(named[n] if named else f"layers.{n}" for n in numbers)
    stated: dict[str, Any] = {name: getattr(facts, name) for name in _AS_STATED}
    hidden, inner = facts.hidden_size, facts.expert_intermediate_size
    if facts.expert_bytes is None and hidden and inner and facts.dtype in (None, "bfloat16"):
        stated |= {"expert_bytes": 3 * hidden * inner * BF16_BYTES, "dtype": "bfloat16"}
    if sizes := source.stated.get("expert_bytes_by_layer"):
        by_layer = tuple(sizes.get(layer) for layer in tuple(layers or range(L)))
        if None not in by_layer:
            stated |= {"layer_expert_bytes": by_layer, "expert_bytes": max(by_layer)}
    tools = {"moe-expert-cache": version("moe-expert-cache")}
    with located(str(source.facts_path or source.path)):
        model = source.stem if facts.model is None and not source.model else source.model
        return TraceMeta(model, L, E, k, names, mode=mode, tools=tools, **stated)


def _frame(
    requests: Sequence[Request], offsets: NDArray[np.int64], prefilled: NDArray[np.int64], mode: str
) -> pd.DataFrame:
    """Return a row for each request; what the dump does not count follows from its rows."""
    decoded = np.diff(offsets) - prefilled
    follows = np.where(decoded > 0, decoded + 1, 0).tolist()
    outputs = [n if one.output_tokens is None else one.output_tokens for one, n in zip(requests, follows, strict=True)]
    return listed(
        [str(one.id) for one in requests],
        [str(one.dataset) for one in requests],
        [str(one.task) for one in requests],
        [n or one.prompt_tokens for one, n in zip(requests, prefilled.tolist(), strict=True)],
        [0] * len(requests) if mode == AGGREGATE else outputs,
        mode,
        [one.arrival_ns for one in requests],
    )
