"""SGLang's expert distribution recorder in mode per_token: forward passes as .pt, one file for each rank.

A file holds `records`, a dict for each forward pass, and `last_physical_to_logical_map` [layers, physical experts]
(python/sglang/srt/eplb/expert_distribution.py, _DetailSinglePassGatherer and _DetailAccumulator). A record has
forward_pass_id, rank, input_ids and positions [tokens], extend_seq_lens (of each request in a prefill),
forward_mode (of forward_batch_info.py: 1 extend, 2 decode, 4 idle) and topk_ids_of_layer int32 [layers, tokens, 8],
padded with -1: physical ids, dense layers too. It does not name requests (`rids` is planned in its source, and
used where it is there): they are rebuilt from positions, and what fits several requests is refused. A request that
SGLang retracts and prefills again looks like another one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.check import first_fault
from traces.errors import InputError
from traces.facts import whole
from traces.importers.dump import UNROUTED, Dump, integers, row_bytes
from traces.importers.source import LONGEST_CONTEXT, Source, requests_of, require_modest
from traces.steps import DECODE, PREFILL

EXTEND, DECODING, IDLE = 1, 2, 4

MOST_EXPERTS = 65_534
"""Tokens; a position beyond it is damage."""

ADVICE = (
    'record with requests sent one at a time and say {"concurrency": 1} in --meta, '
    "or take the answers of return_routed_experts instead"
)


@dataclass
class Batch:
    """One forward pass."""

    place: str
    mode: int
    positions: NDArray[np.int64]  # [tokens]
    lengths: list[int]  # tokens of each request
    rids: list[str] | None
    experts: NDArray[np.integer]  # [tokens, layers, 8] logical ids, -1: not routed
    token_ids: NDArray[np.int64]  # [tokens] -1 where the pass does not tell them


@dataclass
class Rebuilt:
    """Requests as they are found pass by pass, each with the position that it will continue from.

    SGLang keeps the order of requests in a batch, drops those that are finished, and appends new ones.
    """

    alone: bool  # requests were sent one at a time
    names: list[str] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)  # of named requests
    next: dict[int, int] = field(default_factory=dict)  # of those that may continue, in the order of the batch
    chunked: int | None = None  # whose prompt the pass before may have left unfinished
    chunks: int = 0
    cached: int = 0
    shared: int = 0

    def extend(self, batch: Batch) -> list[tuple[int, int]]:
        """(request, tokens that the cache held) of each prefill in the pass."""
        found = []
        ends = np.cumsum(batch.lengths)
        before, self.chunked = self.chunked, None
        for i, (end, length) in enumerate(zip(ends.tolist(), batch.lengths, strict=True)):
            positions = batch.positions[end - length : end]
            start = int(positions[0])
            if (np.diff(positions) != 1).any():
                raise InputError(f"{batch.place}: the positions of request {i} are not consecutive")
            name = batch.rids[i] if batch.rids else None
            request = None if name is None else self.numbers.get(name)
            if request is not None and self.next.get(request) != start:
                raise InputError(f"{batch.place}: the request {name!r} continues at position {start}, out of turn")
            if name is None and start and before is not None and self.next.get(before) == start:
                request, before = before, None
            if request is None:
                if self.alone:
                    self.next.clear()
                request = len(self.names)
                self.names.append(str(request) if name is None else name)
                self.numbers[self.names[-1]] = request
                self.cached += start
                found.append((request, start))
            else:
                self.chunks += 1
                found.append((request, 0))
            self.next[request] = start + length
            self.chunked = request
        return found

    def decode(self, batch: Batch) -> list[int]:
        """The request of each token in the pass; requests that are not in it are finished."""
        if batch.rids:
            return self._go_on(batch, [self.numbers.get(name, -1) for name in batch.rids])
        waiting: dict[int, list[int]] = {}
        for request, position in self.next.items():
            waiting.setdefault(position, []).append(request)
        places, tokens = np.unique(batch.positions, return_counts=True)
        for position, count in zip(places.tolist(), tokens.tolist(), strict=True):
            fitting = len(waiting.get(position, []))
            if fitting < count:
                raise InputError(
                    f"{batch.place}: {count} tokens at position {position} continue from {fitting} requests: "
                    "the recording began in the middle of a request"
                )
            if fitting > count:
                raise InputError(
                    f"{batch.place}: {count} tokens at position {position} may be of {fitting} requests: {ADVICE}"
                )
            self.shared += count if count > 1 else 0
        return self._go_on(batch, [waiting[position].pop(0) for position in batch.positions.tolist()])

    def _go_on(self, batch: Batch, requests: list[int]) -> list[int]:
        following = {}
        for i, (request, position) in enumerate(zip(requests, batch.positions.tolist(), strict=True)):
            if self.next.get(request) != position:
                name = batch.rids[i] if batch.rids else request
                raise InputError(f"{batch.place}: the request {name!r} continues at position {position}, out of turn")
            following[request] = position + 1
        self.chunked, self.next = None, following
        return requests


Piece = tuple[int, int, int, int, NDArray[np.integer], NDArray[np.int64]]
"""request, phase, position, step, rows and the ids of their tokens."""


def read_passes(source: Source, files: list[tuple[Path, dict[str, Any]]]) -> Dump:
    """The requests in the loaded files of all ranks. Raises InputError."""
    pieces: list[Piece] = []
    names: list[str] = []
    step, E, held, made = 0, 0, 0, 0
    for path, content in _distinct(source, files):
        mapping = integers(content.get("last_physical_to_logical_map"), str(path), "last_physical_to_logical_map", 2)
        if mapping.min(initial=0) < 0 or mapping.max(initial=0) >= MOST_EXPERTS or not mapping.size:
            raise InputError(f"{path}: last_physical_to_logical_map names no experts, or impossible ones")
        E = max(E, int(mapping.max(initial=0)) + 1)
        rebuilt = Rebuilt(alone=source.fact("concurrency", whole, 2) == 1)
        for batch in _batches(path, content["records"], mapping, E):
            end, held = 0, held + batch.experts.nbytes
            if batch.mode == EXTEND:
                for (request, cached), length in zip(rebuilt.extend(batch), batch.lengths, strict=True):
                    if cached:
                        made += cached * row_bytes(batch.experts.shape[1:], batch.experts.dtype)
                        require_modest(made, held, f"{batch.place}: tokens from the prefix cache")
                        nothing = np.full((cached, *batch.experts.shape[1:]), -1, batch.experts.dtype)
                        pieces.append((request + len(names), PREFILL, 0, step, nothing, np.full(cached, -1)))
                    rows = slice(end, end + length)
                    own = batch.experts[rows], batch.token_ids[rows]
                    pieces.append((request + len(names), PREFILL, int(batch.positions[end]), step, *own))
                    end += length
            else:
                for token, request in enumerate(rebuilt.decode(batch)):
                    own = batch.experts[token : token + 1], batch.token_ids[token : token + 1]
                    pieces.append((request + len(names), DECODE, int(batch.positions[token]), step, *own))
            step += 1
        _note(source, path, rebuilt)
        names += rebuilt.names if len(files) == 1 else [f"{path.stem}-{name}" for name in rebuilt.names]
    if not pieces:
        raise InputError(f"{source.path} holds no forward pass of tokens")
    return _dump(source, pieces, names, E)


def _note(source: Source, path: Path, rebuilt: Rebuilt) -> None:
    for number, text in (
        (rebuilt.chunks, "prefills start where the one before them ended: they are taken as chunks of one prompt"),
        (rebuilt.cached, f"tokens came from the prefix cache: {UNROUTED}"),
        (rebuilt.shared, "decoded tokens share their position with others: the order of the batch told them apart"),
    ):
        if number:
            source.notes.append(f"{path}: {number} {text}")


def _distinct(source: Source, files: list[tuple[Path, dict[str, Any]]]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The files without those that repeat another: tensor-parallel ranks all record the same passes."""
    kept: list[tuple[Path, dict[str, Any]]] = []
    for path, content in files:
        if not any(_equal(content["records"], other["records"]) for _, other in kept):
            kept.append((path, content))
    if len(kept) < len(files):
        source.notes.append(f"{len(files) - len(kept)} of {len(files)} files repeat another rank's passes: left out")
    if len(kept) > 1:
        source.notes.append(
            f"{len(kept)} ranks recorded different passes: they are taken as data-parallel, "
            "each with the routing of its own tokens (so with DeepEP; other dispatch mixes them up)"
        )
    yield from kept


def _equal(a: Any, b: Any) -> bool:
    keys = ("forward_pass_id", "positions", "input_ids", "topk_ids_of_layer")
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
        return False
    return all(
        isinstance(x, dict) and isinstance(y, dict) and all(_same(x.get(key), y.get(key)) for key in keys)
        for x, y in zip(a, b, strict=True)
    )


def _same(a: Any, b: Any) -> bool:
    return bool(np.array_equal(a, b))


def _batches(path: Path, records: Any, mapping: NDArray[np.integer], E: int) -> Iterator[Batch]:
    """The passes of one file in their order, each checked."""
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise InputError(f"{path}: records is no list of forward passes")
    for i, record in enumerate(records):
        if not isinstance(record.get("forward_pass_id"), int):
            raise InputError(f"{path} record {i} has no forward_pass_id")
    passes = [record["forward_pass_id"] for record in records]
    if len(set(passes)) < len(passes):
        twice = next(number for number in passes if passes.count(number) > 1)
        raise InputError(f"{path} holds forward pass {twice} twice")
    for record in sorted(records, key=lambda one: int(one["forward_pass_id"])):
        place = f"{path} forward pass {record['forward_pass_id']}"
        if "topk_ids_of_layer" not in record:
            raise InputError(f"{place} has no topk_ids_of_layer: record with mode per_token")
        batch = _batch(place, record, mapping)
        if batch.mode == IDLE and not len(batch.positions):
            continue
        if batch.mode not in (EXTEND, DECODING):
            raise InputError(
                f"{place} has forward_mode {batch.mode}: only prefill (1) and decode (2) can be told apart by request; "
                "record without mixed chunks and speculative decoding"
            )
        if fault := first_fault(batch.experts, E):
            raise InputError(f"{place} token {fault[0]}, layer {fault[1]}: {fault[2]}")
        yield batch


def _batch(place: str, record: dict[str, Any], mapping: NDArray[np.integer]) -> Batch:
    physical = integers(record["topk_ids_of_layer"], place, "topk_ids_of_layer")  # [layers, tokens, 8]
    positions = record.get("positions")
    if not isinstance(positions, list) or not all(
        isinstance(at, int) and 0 <= at < LONGEST_CONTEXT for at in positions
    ):
        raise InputError(f"{place}: positions {str(positions)[:80]} are no list of places in a sequence")
    mode, rids, tokens = record.get("forward_mode"), record.get("rids"), len(positions)
    if not isinstance(mode, int):
        raise InputError(f"{place}: forward_mode is {mode!r}; a number is needed")
    if len(physical) != len(mapping) or physical.shape[1] != tokens:
        raise InputError(
            f"{place}: topk_ids_of_layer is {physical.shape} [layers, tokens, k], "
            f"but there are {len(mapping)} layers and {tokens} positions"
        )
    lengths = record.get("extend_seq_lens") if mode == EXTEND else [1] * tokens
    if (
        not isinstance(lengths, list)
        or not all(isinstance(n, int) and n > 0 for n in lengths)
        or sum(lengths) != tokens
    ):
        raise InputError(f"{place}: extend_seq_lens {str(lengths)[:80]} do not add up to its {tokens} tokens")
    if rids is not None and (not isinstance(rids, list) or len(rids) != len(lengths)):
        raise InputError(f"{place}: rids are not one for each of its {len(lengths)} requests")
    outside = (physical < -1) | (physical >= mapping.shape[1])
    if outside.any():
        layer, token, slot = np.argwhere(outside)[0].tolist()
        raise InputError(
            f"{place} token {token}, layer {layer}: {int(physical[layer, token, slot])} is no physical expert of "
            f"{mapping.shape[1]}"
        )
    layers = np.arange(len(mapping))[:, None, None]
    logical = np.where(physical < 0, -1, mapping[layers, physical]).astype(np.int32)
    return Batch(
        place,
        mode,
        np.array(positions, np.int64),
        lengths,
        rids and [str(rid) for rid in rids],
        logical.transpose(1, 0, 2),
        _token_ids(place, record.get("input_ids"), tokens),
    )


def _token_ids(place: str, ids: Any, tokens: int) -> NDArray[np.int64]:
    """[tokens] -1 where the pass does not tell them."""
    if ids is None:
        return np.full(tokens, -1)
    if not isinstance(ids, list) or len(ids) != tokens or not all(type(x) is int and 0 <= x < 2**31 for x in ids):
        raise InputError(f"{place}: input_ids {str(ids)[:80]} are no ids of its {tokens} tokens")
    return np.array(ids, np.int64)


def _dump(
    source: Source,
    pieces: list[Piece],
    names: list[str],
    E: int,
) -> Dump:
    pieces.sort(key=lambda piece: piece[0])  # stable: the order of passes stays
    request, phase, first, step = (np.array(column) for column in zip(*(piece[:4] for piece in pieces), strict=True))
    lengths = np.array([len(piece[4]) for piece in pieces])
    begins = np.cumsum(lengths) - lengths
    offsets = np.zeros(len(names) + 1, np.int64)
    np.cumsum(np.bincount(request, weights=lengths, minlength=len(names)).astype(np.int64), out=offsets[1:])
    experts = np.concatenate([piece[4] for piece in pieces])
    used = np.flatnonzero((experts >= 0).any(axis=(0, 1)))
    k = int(used[-1]) + 1 if used.size else 1
    token_id = np.concatenate([piece[5] for piece in pieces]).astype(np.int32)
    requests = requests_of(source, [{"id": name} for name in names])
    return Dump(
        experts[:, :, :k],
        offsets,
        requests,
        locate=lambda row, r: f"{source.path}: request {names[r]!r} row {row - int(offsets[r])}",
        phase=np.repeat(phase, lengths).astype(np.uint8),
        position=(np.arange(lengths.sum()) - np.repeat(begins - first, lengths)).astype(np.uint32),
        step=np.repeat(step, lengths).astype(np.uint32),
        token_id=token_id if (token_id >= 0).any() else None,
        num_experts=E,
    )
