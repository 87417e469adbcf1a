"""A dump becomes a trace: layers, ids and facts are compared with each other, and what disagrees is refused.

A dump that is larger than memory comes in parts, from its file each time: one pass decides for all of them how ids are
read, the next gives the traces.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from traces.check import check_steps
from traces.defects import Routing, find, layer_map, parts_of_counts
from traces.errors import InputError, located
from traces.importers.dump import Again, Counts
from traces.importers.plain import token_ids
from traces.importers.source import Request, Source
from traces.index import Index
from traces.schema import AGGREGATE, TraceMeta
from traces.steps import DECODE, PREFILL, Int
from traces.trace import Trace, in_turn, listed

BF16_BYTES = 2
IMPORT = "import"

_PART = re.compile(r"(\d+)|(\d+)-(\d+)|(\d*):")
"""One layer, an inclusive range, or "N:" for all from N on."""

_AS_STATED = ("expert_bytes", "layer_expert_bytes", "dtype", "revision", "hidden_size", "expert_intermediate_size")
"""Facts of the JSON that are taken as they are."""


Parts = Iterable[Routing]
"""A dump in parts of whole requests: in memory a list, else read from its file each time."""


@dataclass(frozen=True)
class Extent:
    """What decides of all parts how their ids are read. Ids below 0: nothing was routed."""

    least: Int  # [L] of the ids that are routed; where there are none, no less than any id
    most: Int  # [L]
    used: NDArray[np.bool_]  # [k] slots that hold more than -1
    choices: Int  # [k + 1] how many name so many experts

    @staticmethod
    def of(dump: Parts) -> "Extent":
        parts = []
        for part in dump:
            ids, routed = part.experts, part.routed
            top = np.iinfo(ids.dtype).max
            least = np.where(routed, ids, top).min(axis=(0, 2), initial=top)
            most, used = ids.max(axis=(0, 2), initial=-1), (ids != -1).any(axis=(0, 1))
            parts.append((least, most, used, np.bincount(routed.sum(axis=2).ravel(), minlength=ids.shape[2] + 1)))
        least, most, used, choices = zip(*parts, strict=True)
        return Extent(np.min(least, axis=0), np.max(most, axis=0), np.any(used, axis=0), np.sum(choices, axis=0))

    @property
    def routed(self) -> int:
        return int(self.choices @ np.arange(len(self.choices)))

    @property
    def largest(self) -> int:
        return int(self.most.max(initial=-1))


def traces_of(dump: Parts, source: Source) -> Iterator[Trace]:
    """Yield the traces of the parts of a dump, one behind the other. Raises InputError."""
    where = str(source.path)
    dump = _again(dump, lambda parts: _stated(parts, source))
    extent, E, profile = Extent.of(dump), source.agreed("experts", next(iter(dump)).E), source.profile
    if E is None and profile is not None and extent.largest < profile.experts:
        E = profile.experts
    dump, E = _sound(dump, extent, source, E)
    E = source.experts_of(np.array([part.experts.max(initial=-1) for part in dump])) if E is None else E
    steps, names = 0, set[str]()
    for part in dump:
        trace = _trace(part, source, E, steps)
        steps = int(trace.step[-1]) + 1 if part.step is None and len(trace.step) else steps
        if repeated := names.intersection(trace.requests["id"]):
            raise InputError(f"{where}: the request id {min(repeated)!r} occurs twice")
        names.update(trace.requests["id"])
        yield trace


def _again(dump: Parts, change: Callable[[Parts], Iterator[Routing]]) -> Parts:
    """Return a dump with its parts changed, in memory where it is."""
    return list(change(dump)) if isinstance(dump, list) else Again(lambda: change(dump))


def _stated(dump: Parts, source: Source) -> Iterator[Routing]:
    """Yield parts with the phase, the ids of tokens and the layers that the user states."""
    ids, row = None, 0
    if source.options.token_ids is not None:
        ids = token_ids(source.options.token_ids, sum(len(part.experts) for part in dump))
    for part in dump:
        rows, layers = len(part.experts), _layers(source, part.experts.shape[1])
        if part.phase is not None and source.options.phase is not None:
            raise InputError(f"{source.path} says itself which tokens are prompt: leave --phase out")
        if ids is not None:
            part, row = replace(part, token_id=ids[row : row + rows]), row + rows
        if layers is not None:
            numbers = layers if part.layers is None else tuple(part.layers[each] for each in layers)
            part = replace(part.choices(itemgetter((slice(None), layers))), layers=numbers)
        if part.phase is None and source.phase is not None:
            part = replace(part, phase=np.full(rows, source.phase, np.uint8))
        yield part


def _trace(dump: Routing, source: Source, E: int, steps: int) -> Trace:
    """Return a part as a trace of a model of E experts; steps: those of the parts before it."""
    where = str(source.path)
    phase = dump.phase if dump.phase is not None else np.full(len(dump.experts), _phase(source), np.uint8)
    _, L, k = dump.experts.shape
    meta = _meta(source, L, k, E, dump.layers, IMPORT)
    prefilled = np.diff(np.concatenate([[0], np.cumsum(phase == PREFILL)])[dump.offsets])
    requests, lengths = _frame(dump.requests, dump.offsets, prefilled, IMPORT), np.diff(dump.offsets)
    columns, position = in_turn(lengths, prefilled), dump.position
    if position is None:  # after the prompt where only decoded tokens are there
        before = np.where(prefilled > 0, 0, requests["prompt_tokens"].fillna(0).to_numpy(np.int64))
        position = columns["position"] + np.repeat(before, lengths).astype(np.uint32)
    step = dump.step if dump.step is not None else columns["step"] + np.uint32(steps)
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


def _sound(dump: Parts, extent: Extent, source: Source, E: int | None) -> tuple[Parts, int | None]:
    """Return the dump as `traces.defects` leaves it, and E: the findings are the source's, and may refuse it."""
    if E is not None and extent.routed >= 64 and extent.least.min() == 1 and extent.largest == E:
        source.notes.append(f"expert ids run from 1 to {E}: they are taken as 0 to {E - 1}")
        dump, extent = _with_ids(dump, lambda ids: np.where(ids > 0, ids.astype(np.int64) - 1, -1))
    dump, extent, E = _by_layer(dump, extent, source, E)
    dump, extent = _chosen(dump, extent, source, E)
    stated, profile = source.agreed("top_k") or 0, source.profile
    used = int(extent.used.nonzero()[0].max(initial=0)) + 1
    used = min(len(extent.used), max(used, stated))  # slots behind are padding
    top_k = max(stated, 0 if profile is None else profile.top_k) or None

    def checked(part: Routing) -> Routing:
        held = replace(part.choices(lambda array: array[:, :, :used]), model_top_k=top_k, E=E)
        return _checked(held, source)

    return _again(dump, lambda parts: map(checked, parts)), E


def _with_ids(dump: Parts, change: Callable[[NDArray[Any]], NDArray[Any]]) -> tuple[Parts, Extent]:
    dump = _again(dump, lambda parts: (replace(part, experts=change(part.experts)) for part in parts))
    return dump, Extent.of(dump)


def _checked(held: Routing, source: Source) -> Routing:
    """Return a part without what is wrong with it; what is found is the source's, each defect where it is first."""
    findings, sound = find(held, source.options.fix)
    if source.facts.layer_names is not None:  # who names the layers says that they are MoE layers
        findings = [one for one in findings if one.name != "dense layer"]
    # rows are named as they are in the dump, before others were left out
    found = find(held)[0] if source.options.fix and len(findings) > 1 else findings
    source.findings.extend(one for one in found if one.name not in {known.name for known in source.findings})
    for one in findings:
        if one.unusable and (one.fixed is None or not source.options.fix):
            raise InputError(f"{source.path}: {one}")
    if len(sound.requests) == len(held.requests) and len(sound.experts) == len(held.experts):
        return sound
    parts = (one if isinstance(one, Request) else Request(one, dataset="", task="") for one in sound.requests)
    return replace(sound, requests=[replace(one, output_tokens=None) for one in parts])


def _by_layer(dump: Parts, extent: Extent, source: Source, E: int | None) -> tuple[Parts, Extent, int | None]:
    """Return ids that count through all layers as ids within theirs. Raises InputError if nothing says how many."""
    least, most, profile = extent.least, extent.most, source.profile
    if len(most) < 2 or extent.routed < 64 or (most < 0).any() or (most[:-1] >= least[1:]).any():
        return dump, extent, E
    E = E or (None if profile is None else profile.experts)
    first = np.arange(len(most)) * (E or 0)
    if E is None or (least < first).any() or (most >= first + E).any():
        raise InputError(f"{source.path}: ids count through all layers, up to {most[-1]}: give --experts of a layer")
    source.notes.append(f"expert ids count through all layers: {E} of each")
    return *_with_ids(dump, lambda ids: np.where(ids >= 0, ids - first[:, None], -1)), E


def _chosen(dump: Parts, extent: Extent, source: Source, E: int | None) -> tuple[Parts, Extent]:
    """Return the k experts of the largest weights where most choices name all experts. Raises InputError without k."""
    E = E or max(extent.largest, 0) + 1
    named = extent.choices[E] if len(extent.choices) > E else 0
    if E < 2 or 2 * named <= extent.choices[1:].sum():
        return dump, extent
    profile = source.profile
    k = source.agreed("top_k") or (None if profile is None else profile.top_k)
    if k == E:
        return dump, extent
    weighed = next(iter(dump)).weights is not None
    if k is None or k > E or not weighed:
        advice = "say how many of the largest with --top-k" if weighed else "it has no weights that say so"
        raise InputError(f"{source.path} names all {E} experts in a choice, not those chosen: {advice}")
    source.notes.append(f"all {E} experts have weights: the {k} largest are taken as chosen")

    def largest(part: Routing) -> Routing:
        assert part.weights is not None
        order = np.argsort(-part.weights, axis=2, kind="stable")[:, :, :k]
        return part.choices(lambda array: np.take_along_axis(array, order, axis=2))

    dump = _again(dump, lambda parts: map(largest, parts))
    return dump, Extent.of(dump)


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
