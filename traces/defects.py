"""What recorders get wrong, found in the routing itself: one function a defect, none of which a healthy trace shows.

A check takes a Routing and returns a Finding, or None. A finding that can be fixed without guessing holds what is left
of the routing then. The checks run in the order of CHECKS, since a fill value must be known before rows are compared.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import comb
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.steps import PREFILL
from traces.trace import Trace

Int = NDArray[np.int64]

FILLS = (255, 65_535, 2**31 - 1, 2**32 - 1)
"""Ids that arrays are filled with where nothing was chosen."""

FEW = 64
"""Choices of a token in a layer below which nothing is said about all of them."""

BLOCK_ROWS, BLOCK_ROWS_OF_FEW_LAYERS = 8, 32
"""Equal rows in a row that no text makes, with at least 4 layers and with fewer: of 174,000 real rows of 24, 26 and 32
layers no two in a row are equal, and at most 14 in a single layer."""


PER_CHOICE = ("experts", "weights", "hits")
PER_ROW = (*PER_CHOICE, "phase", "position", "step", "token_id")


@dataclass(frozen=True)
class Routing:
    """Routing of R requests, T rows, as a dump or a trace has it."""

    experts: NDArray[np.integer]  # [T, L, k] ids within a layer, negative: not routed
    offsets: Int  # [R + 1]
    requests: Sequence[Any]  # [R] their texts are their names
    phase: NDArray[np.uint8] | None = None  # [T]; None: all rows have one phase, which is not stated
    weights: NDArray[np.floating] | None = None  # [T, L, k]
    E: int | None = None
    model_top_k: int | None = None  # of the model, or as the dump states it
    layers: Sequence[int] | None = None  # their numbers; None: from 0
    restarts: Int | None = None  # rows whose token index does not follow the one before
    position: NDArray[np.uint32] | None = None  # [T]; None: consecutive
    step: NDArray[np.uint32] | None = None  # [T]; None: a prefill is one, and each decoded token
    token_id: NDArray[np.int32] | None = None  # [T]
    hits: NDArray[np.integer] | None = None  # [T, L, k] 1: the engine had it in its cache, 0: it had not, -1: not said

    @staticmethod
    def of(trace: Trace) -> "Routing":
        """Return that of a trace; only what `moe-trace check` can say of one."""
        from traces.models.profile import known  # a profile is read only where a trace is checked

        profile = known(trace.meta.model)
        ids = np.where(trace.experts == trace.sentinel, -1, trace.experts.astype(np.int32))
        return Routing(
            ids,
            trace.offsets,
            trace.requests["id"].tolist(),
            trace.phase,
            trace.weights,
            trace.num_experts,
            max(trace.top_k, profile.top_k if profile is not None and profile.experts == trace.num_experts else 0),
        )

    @property
    def routed(self) -> NDArray[np.bool_]:
        return self.experts >= 0

    def layer(self, at: int) -> int:
        return at if self.layers is None else self.layers[at]

    def place(self, row: int, last: int | None = None) -> str:
        """Return where a row, or the rows up to `last`, lie."""
        request = int(np.searchsorted(self.offsets, row, side="right")) - 1
        first = row - int(self.offsets[request])
        rows = f"row {first}" if last in (None, row) else f"rows {first} to {first + (last or row) - row}"
        return f"request {str(self.requests[request])!r}, {rows}"

    def choices(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> "Routing":
        """Return it with each array of experts, and of what stands beside them, changed alike."""
        changed: dict[str, Any] = {
            name: change(array) for name in PER_CHOICE if (array := getattr(self, name)) is not None
        }
        return replace(self, **changed)

    def without(self, drop: NDArray[np.bool_]) -> "Routing":
        """Return it without some rows, [T], and without requests of which none is left."""
        lengths = np.diff(np.concatenate([[0], np.cumsum(~drop)])[self.offsets])
        held = (lengths > 0) | (np.diff(self.offsets) == 0)
        rows = {name: array[~drop] for name in PER_ROW if (array := getattr(self, name)) is not None}
        names = [name for name, there in zip(self.requests, held, strict=True) if there]
        offsets = np.concatenate([[0], np.cumsum(lengths[held])]).astype(np.int64)
        restarts = None
        if self.restarts is not None:
            after = np.cumsum(~drop) - 1
            restarts = np.setdiff1d(np.unique(after[self.restarts[~drop[self.restarts]]]), offsets)
        return replace(self, offsets=offsets, requests=names, restarts=restarts, **rows)


@dataclass(frozen=True)
class Finding:
    """A defect: which one, where and how much, and what to do. fixed: the routing without it."""

    name: str
    what: str
    advice: str
    fixed: Routing | None = field(default=None, repr=False, compare=False)
    unusable: bool = False  # no trace can be made unless it is fixed

    def __str__(self) -> str:
        return f"{self.name}: {self.what}: {self.advice}" + ("; --fix does it" if self.fixed is not None else "")


def layer_map(layers: int) -> str:
    """Return how to say which of a dump's layers are MoE layers."""
    return (
        f"if dense layers are counted, say which are MoE layers, such as --layer-map 1-{layers - 1} or --layer-map 1:"
    )


def dense_layer(held: Routing) -> Finding | None:
    """A layer that routes nothing, or one id everywhere: engines that count dense layers leave them so."""
    rows, layers, k = held.experts.shape
    for layer in range(layers if rows else 0):
        first = int(held.experts[0, layer, 0])
        if (first > 0 and k == 1) or not (held.experts[:64, layer] == first).all():
            continue
        if (held.experts[:, layer] == first).all() and (first < 0 or k > 1 or rows > 1):
            what = "routes nothing in any row" if first < 0 else f"has expert id {first} everywhere"
            return Finding("dense layer", f"layer {held.layer(layer)} {what}", layer_map(layers), unusable=True)
    return None


def fill_values(held: Routing) -> Finding | None:
    """Ids that no expert has, or that fill a slot, and experts that a token chose twice in a layer."""
    ids = held.experts
    T, L, k = ids.shape
    repeated = _repeated(ids)
    wrong = ids < -1
    if held.E is not None:
        wrong |= ids >= held.E
    elif len(used := np.unique(ids)) > 1 and used[-1] in FILLS and used[-1] >= 2 * used[-2]:
        wrong |= ids == used[-1]
    if repeated.any():
        values, times = np.unique(ids[repeated], return_counts=True)
        value = values[times.argmax()]
        if times.max() > max(1, 0.9 * times.sum() - 1):  # one id is behind the repeats: none of its copies was chosen
            wrong |= (ids == value) & (repeated & (ids == value)).any(axis=2, keepdims=True)
    for j in range(k if k > 1 and T * L >= FEW else 0):
        same = (ids[:, :, j] == ids[0, 0, j]) & (ids[0, 0, j] >= 0)
        if same.mean() > 0.99:
            wrong[:, :, j] |= same
    bad = wrong | repeated
    if not bad.any():
        return None
    row, layer, _slot = (int(each[0]) for each in np.nonzero(bad))
    values = sorted({int(each) for each in np.unique(ids[wrong])})
    beyond = "" if held.E is None or not values or values[-1] < held.E else f" (beyond {held.E} experts)"
    kinds = [f"fill value {', '.join(map(str, values[:3]))}{beyond}"] if values else []
    kinds += ["a repeated expert"] if (repeated & ~wrong).any() else []
    cells = int(bad.any(axis=2).sum())
    return Finding(
        "fill values and repeats",
        f"{held.place(row)}, layer {held.layer(layer)} has ids {ids[row, layer].tolist()}: {' and '.join(kinds)} in "
        f"{cells} choices of {T * L}",
        "such slots chose nothing; take them as not routed",
        replace(held, experts=np.where(bad, -1, ids)),
        unusable=True,
    )


def parts_of_ranks(held: Routing) -> Finding | None:
    """Files of ranks that each hold some of a token's experts, as requests of their own; or one such file alone."""
    R, lengths = len(held.requests), np.diff(held.offsets)
    T, L, k = held.experts.shape
    if not T or not L:
        return None
    routed = held.routed.sum(axis=2)
    for n in range(2, min(R, 64) + 1):
        if R % n or not (lengths.reshape(n, -1) == lengths[: R // n]).all() or lengths[0] == 0:
            continue
        each = routed.reshape(n, -1, L)
        total = each.sum(axis=0)
        if (
            (total == total.max()).mean() > 0.9
            and (each < total.max()).mean() > 0.5
            and total.max() <= max(k, held.model_top_k or k)
        ):
            whole, first = held.choices(partial(_side_by_side, ranks=n)), len(total)
            order = np.argsort(whole.experts < 0, axis=2, kind="stable")[:, :, : int(total.max())]
            whole = whole.choices(partial(np.take_along_axis, indices=order, axis=2))
            if _repeated(whole.experts).any():
                continue
            joined: dict[str, Any] = {name: getattr(whole, name) for name in PER_CHOICE}
            fixed = replace(held.without(np.arange(T) >= first), **joined)
            names = ", ".join(repr(str(name)) for name in held.requests[:: R // n][:4])
            what = f"requests {names} have the same {first} tokens and other experts"
            return Finding("parts of ranks", what, f"{n} ranks each hold a part: put the parts together", fixed)
    lowest, highest = int(held.experts[held.routed].min(initial=0)), int(held.experts.max())
    for n in (2, 3, 4, 6, 8, 12, 16, 32, 64):
        share = (held.E or 0) // n
        inside = share > 0 and (held.E or 0) % n == 0 and lowest // share == highest // share
        if inside and routed.sum() >= FEW and len(np.unique(routed)) > 1 and routed.max() > 0:
            what = (
                f"only experts {lowest} to {highest} of {held.E}, and {routed.mean():.1f} of a token's {k} in a layer"
            )
            return Finding(
                "parts of ranks", what, f"this is one rank of {n}: import the files of all ranks as one folder"
            )
    return None


def _side_by_side(array: NDArray[Any], ranks: int) -> NDArray[Any]:
    """Return [T, L, k] of ranks, one behind the other, as [T / ranks, L, ranks * k]."""
    _, L, k = array.shape
    return array.reshape(ranks, -1, L, k).transpose(1, 2, 0, 3).reshape(-1, L, ranks * k)


def parts_of_counts(counts: Int, names: Sequence[str]) -> tuple[Int, Finding | None]:
    """Return counts [files, L, E] of ranks, by the names of their files, as one; a finding where ranks are there."""
    if len(names) < 2 or not all(re.search(r"rank\d", name) for name in names):
        return counts, None
    if len({re.sub(r"rank\d+.*", "", name) for name in names}) > 1:
        return counts, None
    if (counts == counts[0]).all():
        return counts[:1], Finding("parts of ranks", f"{len(names)} ranks counted the same", "one of them is taken")
    what = f"{len(names)} ranks counted differently"
    advice = "each holds its share of the tokens: add them up"
    return counts.sum(axis=0, keepdims=True), Finding("parts of ranks", what, advice, unusable=True)


def lowered_top_k(held: Routing) -> Finding | None:
    """Fewer experts of a token than the model routes to."""
    found = int(held.routed.sum(axis=2).max(initial=0))
    if not held.model_top_k or found >= held.model_top_k or not found:
        return None
    return Finding(
        "lowered top-k",
        f"no token chose more than {found} experts in a layer, the model routes to {held.model_top_k}",
        "the run had a lowered top-k: record again without it, or compare with runs of the same top-k only",
    )


def equal_layers(held: Routing) -> Finding | None:
    """Layers whose routing is that of another one in all rows."""
    if len(held.experts) < 8:
        return None
    prints: dict[bytes, int] = {}
    pairs = []
    for layer in range(held.experts.shape[1]):
        if held.routed[:, layer].sum() < FEW:
            continue
        of = prints.setdefault(np.ascontiguousarray(held.experts[:, layer]).tobytes(), layer)
        if of != layer:
            pairs.append((layer, of))
    if not pairs:
        return None
    layer, of = pairs[0]
    what = f"layer {held.layer(layer)} repeats layer {held.layer(of)} in all rows; {len(pairs)} layers are such copies"
    keep = ",".join(str(each) for each in range(held.experts.shape[1]) if each not in {pair[0] for pair in pairs})
    return Finding("equal layers", what, f"leave the copies out: --layer-map {keep}")


def constant_block(held: Routing) -> Finding | None:
    """Equal rows one behind the other: a profiling batch at the start, padding elsewhere."""
    T, L, _ = held.experts.shape
    if T < 2:
        return None
    flat = np.sort(held.experts, axis=2).reshape(T, -1)
    new = np.concatenate([[True], (flat[1:] != flat[:-1]).any(axis=1)])
    starts = np.flatnonzero(new)
    lengths = np.diff(np.append(starts, T))
    routed = (flat[starts] >= 0).any(axis=1)
    long = (lengths >= (BLOCK_ROWS if L >= 4 else BLOCK_ROWS_OF_FEW_LAYERS)) & routed
    if not long.any():
        return None
    first, length = int(starts[long][0]), int(lengths[long][0])
    kind = "a profiling batch" if first in held.offsets else "padding"
    ids = held.experts[first, 0].tolist()
    return Finding(
        "constant block",
        f"{held.place(first, first + length - 1)}: {length} equal rows, layer {held.layer(0)} has {ids}"
        + (f"; {int(long.sum())} such blocks" if long.sum() > 1 else ""),
        f"{kind}, no traffic: leave the rows out",
        held.without(np.repeat(long, lengths)),
    )


def restarted_index(held: Routing) -> Finding | None:
    """Token indices that start again within a request."""
    if held.restarts is None or not len(held.restarts):
        return None
    row, n = int(held.restarts[0]), len(held.restarts)
    cuts = np.unique(np.concatenate([held.offsets, held.restarts]))
    names = [
        name if b - a == 0 else f"{name}-{i}"
        for name, a, b in zip(held.requests, held.offsets[:-1], held.offsets[1:], strict=True)
        for i in range(int(((cuts >= a) & (cuts < b)).sum()) or 1)
    ]
    fixed = replace(held, offsets=cuts, requests=names, restarts=None, position=None)
    return Finding(
        "restarted index",
        f"{held.place(row)}: the token index starts again, {n} times in all; the order is that of the file",
        "if each start is a new request, split there; if each is a pass over a batch, record one request at a time",
        fixed if len(cuts) == len(names) + 1 else None,
    )


def strided_rows(held: Routing) -> Finding | None:
    """Rows that hold every expert once between them: one token's ranking, read through a wrong stride."""
    T, L, k = held.experts.shape
    E = held.E or int(held.experts.max(initial=0)) + 1
    m = E // k
    if m < 2 or m > T:
        return None
    chance = np.prod([comb(E - i * k, k) / comb(E, k) for i in range(m)])
    fewest = next((n for n in range(max(1, (L + 1) // 2), L + 1) if T * chance**n < 1e-6), None)
    if fewest is None:
        return None
    ends = _disjoint(held.experts, held.offsets, E) >= m
    at = np.flatnonzero(ends.sum(axis=1) >= fewest)
    if not len(at):
        return None
    inside = np.zeros(T + 1, np.int64)
    np.add.at(inside, at - m + 1, 1)
    np.add.at(inside, at + 1, -1)
    hit = np.cumsum(inside[:-1]) > 0
    requests = np.unique(np.searchsorted(held.offsets, at, side="right") - 1)
    for r in requests:  # the rest of such a prompt is of the same ranking, or the next one's
        own = slice(int(held.offsets[r]), int(held.offsets[r + 1]))
        if held.phase is not None:
            hit[own] |= (held.phase[own] == PREFILL) & hit[own].any()
    first = int(np.flatnonzero(hit)[0])
    last = first + int(np.argmin(np.append(hit[first:], False))) - 1
    return Finding(
        "strided rows",
        f"{held.place(first, last)}: {m} consecutive rows hold {m * k} different experts of {E} between them, in "
        f"{int(ends[at[0]].sum())} of {L} layers; {int(hit.sum())} rows of {len(requests)} requests",
        "one token's ranking was read through a wrong stride: record again with the strides of the tensor (nb[1]), and "
        "take these rows as not routed",
        replace(held, experts=np.where(hit[:, None, None], -1, held.experts)),
    )


def sorted_ids(held: Routing) -> Finding | None:
    """Ids that ascend in every choice: which expert came first is lost."""
    ids = held.experts
    ascending = np.where(ids < 0, np.iinfo(ids.dtype).max, ids)
    several = held.routed.sum(axis=2) > 1
    if several.sum() < FEW or not (ascending[..., 1:] >= ascending[..., :-1]).all():
        return None
    if held.weights is None:
        advice = "the order by weight is lost: policies that use it see the lowest id as the first"
        return Finding("sorted ids", f"ids ascend in all {int(several.sum())} choices", advice)
    order = np.argsort(-np.where(held.routed, held.weights, -np.inf), axis=2, kind="stable")
    if np.array_equal(np.take_along_axis(ids, order, 2), ids):
        return None
    fixed = held.choices(lambda array: np.take_along_axis(array, order, 2))
    return Finding(
        "sorted ids", f"ids ascend in all {int(several.sum())} choices", "order them by their weights", fixed
    )


def last_token_only(held: Routing) -> Finding | None:
    """A last layer that has but the last token of each prompt."""
    missing = _missing(held)
    if held.phase is None or missing.shape[1] < 2:
        return None
    prompt = held.phase == PREFILL
    last = np.zeros(len(prompt), bool)
    ends = np.flatnonzero(
        prompt & np.append(~prompt[1:], True) | prompt & np.isin(np.arange(1, len(prompt) + 1), held.offsets)
    )
    last[ends] = True
    inner = prompt & ~last & ~missing[:, :-1].any(axis=1)
    if not inner.any() or missing[inner, -1].mean() < 0.9 or missing[last, -1].any():
        return None
    row = int(np.flatnonzero(inner & missing[:, -1])[0])
    layer = held.layer(missing.shape[1] - 1)
    return Finding(
        "last token only",
        f"{held.place(row)}: layer {layer} has only the last token of the prompt, "
        f"{int((inner & missing[:, -1]).sum())} tokens lack it",
        "the engine computes the last layer for tokens whose logits are asked for: ask for those of all tokens",
    )


def uneven_layers(held: Routing) -> Finding | None:
    """Layers that hold fewer tokens than others."""
    missing = _missing(held)
    if last_token_only(held) is not None and held.phase is not None:
        missing[held.phase == PREFILL, -1] = False
    if not missing.any():
        return None
    row, layer = (int(each[0]) for each in np.nonzero(missing))
    counts = (~missing).sum(axis=0)
    lacking: Any = missing.any(axis=1)
    tail = np.zeros(lacking.shape, np.bool_)
    for a, b in zip(held.offsets[:-1], held.offsets[1:], strict=True):
        whole = np.flatnonzero(~lacking[a:b])
        if len(whole):
            tail[a + int(whole[-1]) + 1 : b] = True
    return Finding(
        "uneven layers",
        f"{held.place(row)} has no experts in layer {held.layer(layer)}; layers hold {int(counts.min())} to "
        f"{int(counts.max())} tokens, {int(lacking.sum())} tokens lack some",
        "the recording was cut off: leave the tokens at the end out"
        if tail.any()
        else "tokens are not routed in those layers",
        held.without(tail) if tail.any() else None,
    )


CHECKS: tuple[Callable[[Routing], Finding | None], ...] = (
    dense_layer,
    fill_values,
    parts_of_ranks,
    lowered_top_k,
    equal_layers,
    constant_block,
    restarted_index,
    strided_rows,
    last_token_only,
    uneven_layers,
    sorted_ids,
)


def find(held: Routing, fix: bool = False) -> tuple[list[Finding], Routing]:
    """Return all findings, and the routing: with `fix` without those that can be fixed."""
    findings, clean = [], held
    for check in CHECKS:
        finding = check(clean)
        if finding is None:
            continue
        findings.append(finding)
        if finding.unusable and finding.fixed is None:
            break  # the rest would see nothing else
        if finding.fixed is not None and (fix or check is fill_values):
            clean = finding.fixed
    return findings, clean if fix else held


def of_trace(pieces: Iterable[Trace]) -> tuple[list[Finding], int]:
    """Return the findings in the pieces of a trace, each defect where it is first, and how many tokens they have."""
    found: dict[str, Finding] = {}
    tokens = 0
    for piece in pieces:
        tokens += len(piece.experts)
        if piece.aggregate is None and len(piece.experts):
            for finding in find(Routing.of(piece))[0]:
                found.setdefault(finding.name, replace(finding, fixed=None))
    return list(found.values()), tokens


def _repeated(ids: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return where an id, not negative, stands in a slot before too. ids: [T, L, k]."""
    ascending = np.sort(ids, axis=2)
    if not ((ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0)).any():
        return np.zeros(ids.shape, bool)
    order = np.argsort(ids, axis=2, kind="stable")
    ascending = np.take_along_axis(ids, order, 2)
    again = np.zeros(ids.shape, bool)
    again[..., 1:] = (ascending[..., 1:] == ascending[..., :-1]) & (ascending[..., 1:] >= 0)
    found = np.zeros(ids.shape, bool)
    np.put_along_axis(found, order, again, 2)
    return found


def _missing(held: Routing) -> NDArray[np.bool_]:
    """Return [T, L], where a token that is routed in other layers is not; layers that route nothing do not count."""
    routed: Any = held.routed.any(axis=2)
    return np.asarray(~routed & routed.any(axis=1, keepdims=True) & routed.any(axis=0, keepdims=True))


def _disjoint(ids: NDArray[np.integer], offsets: NDArray[np.int64], E: int) -> NDArray[np.int64]:
    """Return how many rows up to each one, in its request, hold full choices without an expert in common, [T, L]."""
    T, L, _ = ids.shape
    chosen = (ids >= 0) & (ids < E)
    begin = np.where(chosen.all(axis=2), 0, np.arange(1, T + 1)[:, None])  # of those rows, without the rows before
    for layer in range(L):
        row, _ = np.nonzero(chosen[:, layer])
        expert = ids[:, layer][chosen[:, layer]]
        order = np.argsort(expert, kind="stable")
        expert, row = expert[order], row[order]
        again = (expert[1:] == expert[:-1]) & (row[1:] > row[:-1])
        np.maximum.at(begin[:, layer], row[1:][again], row[:-1][again] + 1)
    begin = np.maximum(begin, np.repeat(offsets[:-1], np.diff(offsets))[:, None])
    return np.arange(1, T + 1)[:, None] - np.maximum.accumulate(begin, axis=0)
