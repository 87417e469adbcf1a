"""SGLang's expert distribution recorder: forward passes (mode per_token) or counts, as .pt, one file for each rank.

A file holds `records`, a dict for each forward pass, and `last_physical_to_logical_map` [layers, physical experts]
(python/sglang/srt/eplb/expert_distribution.py, _DetailSinglePassGatherer and _DetailAccumulator). It does not name
requests: they are rebuilt from positions, and what fits several requests is refused. A request that SGLang retracts and
prefills again looks like another one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.errors import InputError, located
from traces.importers.dump import UNROUTED, Counts, Dump, integers
from traces.importers.source import Count, Request, Size, Source, convert
from traces.steps import DECODE, PREFILL

EXTEND, DECODING, IDLE = 1, 2, 4
"""Of forward_mode, by forward_batch_info.py."""

PER_PASS = {"global_physical_count"}
"""What a record of mode per_pass has."""

ADVICE = (
    'record with requests sent one at a time and say {"concurrency": 1} in --meta, '
    "or take the answers of return_routed_experts instead"
)


@dataclass(frozen=True)
class Pass:
    """One forward pass, as it is recorded."""

    forward_pass_id: int
    forward_mode: int
    positions: list[Count]  # [tokens]
    topk_ids_of_layer: Any  # int32 [layers, tokens, 8] physical ids, dense layers too, padded with -1
    input_ids: list[Count] | None = None  # [tokens]
    extend_seq_lens: list[Size] | None = None  # tokens of each request in a prefill

    @property
    def lengths(self) -> list[int]:
        return (self.extend_seq_lens or []) if self.forward_mode == EXTEND else [1] * len(self.positions)

    @property
    def place(self) -> str:
        return f"forward pass {self.forward_pass_id}"


@dataclass(frozen=True)
class Recording:
    """The content of a file."""

    records: list[Pass]
    last_physical_to_logical_map: Any  # [layers, physical experts]


@dataclass
class Rebuilt:
    """Requests as they are rebuilt from passes; SGLang keeps their order, drops the finished and appends new ones."""

    alone: bool  # requests were sent one at a time
    count: int = 0  # requests so far
    next: dict[int, int] = field(default_factory=dict)  # of those that may continue, in the order of the batch
    chunked: int | None = None  # whose prompt the pass before may have left unfinished
    chunks: int = 0
    cached: int = 0
    shared: int = 0

    def extend(self, batch: Pass) -> list[tuple[int, int]]:
        """Return (request, tokens that the cache held) of each prefill in the pass."""
        prefills = []
        before, self.chunked = self.chunked, None
        for i, (end, length) in enumerate(zip(np.cumsum(batch.lengths).tolist(), batch.lengths, strict=True)):
            positions = batch.positions[end - length : end]
            start = positions[0]
            if positions != list(range(start, start + length)):
                raise InputError(f"{batch.place}: the positions of request {i} are not consecutive")
            if start and before is not None and self.next.get(before) == start:
                request, before = before, None
                self.chunks += 1
                prefills.append((request, 0))
            else:
                if self.alone:
                    self.next.clear()
                request = self.count
                self.count += 1
                self.cached += start
                prefills.append((request, start))
            self.next[request] = start + length
            self.chunked = request
        return prefills

    def decode(self, batch: Pass) -> list[int]:
        """Return the request of each token in the pass; requests that are not in it are finished."""
        waiting: dict[int, list[int]] = {}
        for request, position in self.next.items():
            waiting.setdefault(position, []).append(request)
        places, tokens = np.unique(batch.positions, return_counts=True)
        for position, count in zip(places.tolist(), tokens.tolist(), strict=True):
            fitting = len(waiting.get(position, []))
            if fitting != count:
                advice = ADVICE if fitting > count else "the recording began in the middle of a request"
                raise InputError(
                    f"{batch.place}: {count} tokens at position {position} may be of {fitting} requests: {advice}"
                )
            self.shared += count if count > 1 else 0
        requests = [waiting[position].pop(0) for position in batch.positions]
        self.chunked = None
        self.next = {request: place + 1 for request, place in zip(requests, batch.positions, strict=True)}
        return requests


Piece = tuple[int, int, int, int, NDArray[np.integer], NDArray[np.int64]]
"""request, phase, position, step, rows and the ids of their tokens."""


def is_recording(content: Any) -> bool:
    """Return whether a loaded file is of the recorder."""
    return isinstance(content, dict) and ("logical_count" in content or "last_physical_to_logical_map" in content)


def read(source: Source, files: list[tuple[Path, dict[str, Any]]]) -> Dump | Counts:
    """Return the loaded files of all ranks: passes (per_token) or counts (per_pass, stat). Raises InputError."""
    records = files[0][1].get("records")
    if records is not None and not (records and set(records[0]) >= PER_PASS and "topk_ids_of_layer" not in records[0]):
        return read_passes(source, files)
    source.says(f"{source.path}: SGLang's recorder, counts of {len(files)} files")
    counted = []
    for path, content in files:
        passes = [_physical(path, content, each) for each in content["records"]] if "records" in content else None
        counts = np.asarray(content["logical_count"]) if passes is None else np.array(passes)
        counts = integers(counts[None] if counts.ndim == 2 else counts, str(path), "logical_count")
        if (counts < 0).any():
            raise InputError(f"{path}: logical_count has negative numbers")
        counted.append(counts.astype(np.int64).sum(axis=0))
    return Counts(np.stack(counted), source.requests([Request(id=path.stem) for path, _ in files]))


def _physical(path: Path, content: dict[str, Any], record: dict[str, Any]) -> NDArray[np.int64]:
    """Return the counts of physical experts of one pass as [layers, logical experts]."""
    mapping = integers(content["last_physical_to_logical_map"], str(path), "last_physical_to_logical_map", 2)
    counts = np.zeros((len(mapping), int(mapping.max()) + 1), np.int64)
    np.add.at(counts, (np.arange(len(mapping))[:, None], mapping), record["global_physical_count"])
    return counts


def read_passes(source: Source, files: list[tuple[Path, dict[str, Any]]]) -> Dump:
    """Return the requests in the loaded files of all ranks. Raises InputError."""
    source.says(f"{source.path}: SGLang's recorder, passes of {len(files)} files")
    pieces: list[Piece] = []
    names: list[str] = []
    step, E = 0, 0
    for path, recording in _distinct(source, files):
        mapping = integers(recording.last_physical_to_logical_map, str(path), "last_physical_to_logical_map", 2)
        E = max(E, int(mapping.max(initial=0)) + 1)
        rebuilt = Rebuilt(alone=source.facts.concurrency == 1)
        for batch in sorted(recording.records, key=lambda one: one.forward_pass_id):
            if batch.forward_mode == IDLE and not batch.positions:
                continue
            experts, ids = _rows(path, batch, mapping), np.array(batch.input_ids or [-1] * len(batch.positions))
            with located(str(path)):
                if batch.forward_mode == EXTEND:
                    of = [(PREFILL, *each) for each in rebuilt.extend(batch)]
                else:
                    of = [(DECODE, request, 0) for request in rebuilt.decode(batch)]
            for (phase, request, cached), length, end in zip(of, batch.lengths, np.cumsum(batch.lengths), strict=True):
                number, rows = request + len(names), slice(end - length, end)
                if cached:
                    nothing = np.full((cached, *experts.shape[1:]), -1, experts.dtype)
                    pieces.append((number, phase, 0, step, nothing, np.full(cached, -1)))
                pieces.append((number, phase, batch.positions[end - length], step, experts[rows], ids[rows]))
            step += 1
        for amount, text in (
            (rebuilt.chunks, "prefills start where the one before them ended: they are taken as chunks of one prompt"),
            (rebuilt.cached, f"tokens came from the prefix cache: {UNROUTED}"),
            (rebuilt.shared, "decoded tokens share their position with others: the order of the batch told them apart"),
        ):
            if amount:
                source.notes.append(f"{path}: {amount} {text}")
        names += [str(n) if len(files) == 1 else f"{path.stem}-{n}" for n in range(rebuilt.count)]
    return _dump(source, pieces, names, E)


def _distinct(source: Source, files: list[tuple[Path, dict[str, Any]]]) -> Iterator[tuple[Path, Recording]]:
    """Yield the files without those that repeat another: tensor-parallel ranks all record the same passes."""
    kept: list[tuple[Path, Recording]] = []
    for path, content in files:
        recording = convert(content, Recording, str(path))
        if not any(_equal(recording.records, other.records) for _, other in kept):
            kept.append((path, recording))
    if len(kept) < len(files):
        source.notes.append(f"{len(files) - len(kept)} of {len(files)} files repeat another rank's passes: left out")
    if len(kept) > 1:
        source.notes.append(
            f"{len(kept)} ranks recorded different passes: they are taken as data-parallel, "
            "each with the routing of its own tokens (so with DeepEP; other dispatch mixes them up)"
        )
    yield from kept


def _equal(a: list[Pass], b: list[Pass]) -> bool:
    keys = ("forward_pass_id", "positions", "input_ids", "topk_ids_of_layer")
    same = (np.array_equal(getattr(x, key), getattr(y, key)) for x, y in zip(a, b, strict=False) for key in keys)
    return len(a) == len(b) and all(same)


def _rows(path: Path, batch: Pass, mapping: NDArray[np.integer]) -> NDArray[np.integer]:
    """[tokens, layers, 8] logical ids of a pass, -1: not routed."""
    physical, tokens = (
        integers(batch.topk_ids_of_layer, f"{path} {batch.place}", "topk_ids_of_layer"),
        len(batch.positions),
    )
    if batch.forward_mode not in (EXTEND, DECODING):
        raise InputError(
            f"{path} {batch.place} has forward_mode {batch.forward_mode}: only prefill (1) and decode (2) can be told "
            "apart by request; record without mixed chunks and speculative decoding"
        )
    if physical.shape[:2] != (len(mapping), tokens) or sum(batch.lengths) != tokens:
        raise InputError(
            f"{path} {batch.place}: topk_ids_of_layer is {physical.shape} [layers, tokens, k], but there are "
            f"{len(mapping)} layers, {tokens} positions and {sum(batch.lengths)} tokens of requests"
        )
    logical = mapping[np.arange(len(mapping))[:, None, None], physical]
    return np.where(physical < 0, -1, logical).astype(np.int32).transpose(1, 0, 2)


def _dump(source: Source, pieces: list[Piece], names: list[str], E: int) -> Dump:
    pieces.sort(key=lambda piece: piece[0])  # stable: the order of passes stays
    request, phase, first, step = (np.array(column) for column in zip(*(piece[:4] for piece in pieces), strict=True))
    lengths = np.array([len(piece[4]) for piece in pieces])
    begins = np.cumsum(lengths) - lengths
    experts, token_id = (np.concatenate([piece[part] for piece in pieces]) for part in (4, 5))
    used = np.flatnonzero((experts >= 0).any(axis=(0, 1)))
    return Dump(
        experts[:, :, : int(used[-1]) + 1 if used.size else 1],
        np.concatenate([[0], np.cumsum(np.bincount(request, lengths, len(names)))]).astype(np.int64),
        source.requests([Request(id=name) for name in names]),
        phase=np.repeat(phase, lengths).astype(np.uint8),
        position=(np.arange(lengths.sum()) - np.repeat(begins - first, lengths)).astype(np.uint32),
        step=np.repeat(step, lengths).astype(np.uint32),
        token_id=token_id.astype(np.int32) if (token_id >= 0).any() else None,
        num_experts=E,
    )
