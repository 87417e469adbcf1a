"""SGLang's expert distribution recorder: forward passes (mode per_token) or counts, as .pt, one file for each rank.

A file holds `records`, a dict for each forward pass, and `last_physical_to_logical_map` [layers, physical experts]
(python/sglang/srt/eplb/expert_distribution.py). It does not name requests: they are rebuilt from positions, and what
fits several requests is refused. One that SGLang retracts and prefills again looks like another one.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces.defects import Routing
from traces.errors import InputError, located
from traces.importers.cells import whole
from traces.importers.dump import UNROUTED, Counts, integers
from traces.importers.source import Request, Source
from traces.steps import DECODE, PREFILL

EXTEND, DECODING, IDLE = 1, 2, 4
"""Of forward_mode, by forward_batch_info.py."""

PASS = ("forward_pass_id", "positions", "input_ids", "topk_ids_of_layer")
"""In what the records of tensor-parallel ranks are alike. [tokens], and [layers, tokens, 8] physical ids, -1: none."""

CHUNKS = "prefills start where the one before them ended: they are taken as chunks of one prompt"
CACHED = f"tokens came from the prefix cache: {UNROUTED}"
SHARED = "decoded tokens share their position with others: the order of the batch decided whose they are"

ADVICE = (
    'record with requests sent one at a time and say {"concurrency": 1} in --meta, '
    "or take the answers of return_routed_experts instead"
)

File = tuple[Path, dict[str, Any]]


@dataclass
class Rebuilt:
    """Requests as they are rebuilt from passes; SGLang keeps their order, drops the finished and appends new ones."""

    alone: bool  # requests were sent one at a time
    count: int = 0  # requests so far
    next: dict[int, int] = field(default_factory=dict)  # position of those that may continue, in the batch's order
    unfinished: int | None = None  # whose prompt the pass before may have left unfinished
    said: Counter[str] = field(default_factory=Counter)  # how often what was assumed

    def extend(self, positions: list[int], lengths: list[int]) -> list[int]:
        """Return the request of each token of a prefill of requests of these lengths."""
        requests = []
        before, self.unfinished = self.unfinished, None
        for i, (end, length) in enumerate(zip(np.cumsum(lengths).tolist(), lengths, strict=True)):
            own = positions[end - length : end]
            if own != list(range(own[0], own[0] + length)):
                raise InputError(f"the positions of request {i} are not consecutive")
            if own[0] and before is not None and self.next.get(before) == own[0]:
                request, before = before, None
                self.said[CHUNKS] += 1
            else:
                if self.alone:
                    self.next.clear()
                request = self.count
                self.count += 1
                self.said[CACHED] += own[0]
            self.next[request] = own[0] + length
            self.unfinished = request
            requests += [request] * length
        return requests

    def decode(self, positions: list[int]) -> list[int]:
        """Return the request of each token; requests that are not in the pass are finished."""
        waiting: dict[int, list[int]] = {}
        for request, position in self.next.items():
            waiting.setdefault(position, []).append(request)
        for position, count in Counter(positions).items():
            fitting = len(waiting.get(position, []))
            if fitting != count:
                advice = ADVICE if fitting > count else "the recording began in the middle of a request"
                raise InputError(f"{count} tokens at position {position} may be of {fitting} requests: {advice}")
            self.said[SHARED] += count if count > 1 else 0
        requests = [waiting[position].pop(0) for position in positions]
        self.unfinished = None
        self.next = {request: place + 1 for request, place in zip(requests, positions, strict=True)}
        return requests


def reads(content: Any) -> bool:
    """Return whether a loaded file is of the recorder."""
    return isinstance(content, dict) and ("logical_count" in content or "last_physical_to_logical_map" in content)


def read(source: Source, files: list[File]) -> Routing | Counts:
    """Return the loaded files of all ranks: passes (per_token) or counts (per_pass, stat). Raises InputError."""
    first = files[0][1]
    passes = "records" in first and "topk_ids_of_layer" in first["records"][0]
    source.found.append(f"{source.path}: SGLang's recorder, {'passes' if passes else 'counts'} of {len(files)} files")
    with located(str(source.path)):
        return _of_passes(source, _distinct(source, files)) if passes else _of_counts(source, files)


def _of_counts(source: Source, files: list[File]) -> Counts:
    """Return the counts [layers, logical experts] of each rank: of all passes, or of each pass by physical experts."""
    counted = []
    for path, content in files:
        if "records" in content:
            mapping = integers(content["last_physical_to_logical_map"], path.name, "map", 2, 0)
            counts = np.zeros((len(mapping), int(mapping.max()) + 1), np.int64)
            physical = np.stack([one["global_physical_count"] for one in content["records"]])
            physical = integers(physical, path.name, "global_physical_count", 3, 0).sum(axis=0, dtype=np.int64)
            np.add.at(counts, (np.arange(len(mapping))[:, None], mapping), physical)
        else:
            held = np.asarray(content["logical_count"])
            held = integers(held[None] if held.ndim == 2 else held, path.name, "logical_count", 3, 0)
            counts = held.sum(axis=0, dtype=np.int64)
        counted.append(counts)
    return Counts(np.stack(counted), source.requests([Request(id=path.stem) for path, _ in files]))


def _distinct(source: Source, files: list[File]) -> list[File]:
    """Return the files without those that repeat another: tensor-parallel ranks all record the same passes."""
    passes = [tuple(np.asarray(one[key]).tobytes() for one in held["records"] for key in PASS) for _, held in files]
    kept = [file for i, file in enumerate(files) if passes[i] not in passes[:i]]
    if len(kept) < len(files):
        source.notes.append(f"{len(files) - len(kept)} of {len(files)} files repeat another rank's passes: left out")
    if len(kept) > 1:
        source.notes.append(
            f"{len(kept)} ranks recorded different passes: they are taken as data-parallel, "
            "each with the routing of its own tokens (so with DeepEP; other dispatch mixes them up)"
        )
    return kept


def _of_passes(source: Source, files: list[File]) -> Routing:
    """Return the requests of the files of ranks that recorded different passes."""
    rows: list[tuple[Any, ...]] = []  # of each pass, for its tokens: request, phase, step, position, experts, token id
    names: list[str] = []
    for path, content in files:
        rebuilt = Rebuilt(alone=source.facts.concurrency == 1)
        for one in sorted(content["records"], key=lambda one: one["forward_pass_id"]):
            mode, positions = one["forward_mode"], one["positions"]
            if mode == IDLE and not positions:
                continue
            with located(f"{path.name}, forward pass {one['forward_pass_id']}"):
                experts = _logical(one, content["last_physical_to_logical_map"])
                of = rebuilt.extend(positions, one["extend_seq_lens"]) if mode == EXTEND else rebuilt.decode(positions)
            n = len(positions)
            known = whole(one["input_ids"] or [-1] * n, f"{path.name}: input_ids", 1, -1)
            kind = PREFILL if mode == EXTEND else DECODE
            rows.append((np.array(of) + len(names), [kind] * n, [len(rows)] * n, positions, experts, known))
        source.notes.extend(f"{path}: {amount} {text}" for text, amount in rebuilt.said.items() if amount)
        names += [str(n) if len(files) == 1 else f"{path.stem}-{n}" for n in range(rebuilt.count)]
    joined = [np.concatenate(column) for column in zip(*rows, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    request, phase, step, position, experts, ids = (column[order] for column in joined)
    begins = np.flatnonzero(np.diff(request, prepend=-1))
    cached = np.repeat(begins, position[begins])  # the tokens before a request's first row, without experts
    token_id = np.insert(ids, cached, -1).astype(np.int32)
    return Routing(
        np.insert(experts, cached, -1, axis=0),
        np.append(begins + np.cumsum(position[begins]) - position[begins], len(token_id)),
        source.requests([Request(id=name) for name in names]),
        phase=np.insert(phase, cached, PREFILL).astype(np.uint8),
        step=np.insert(step, cached, step[cached]).astype(np.uint32),
        token_id=token_id if (token_id >= 0).any() else None,
        E=max(int(content["last_physical_to_logical_map"].max()) + 1 for _, content in files),
    )


def _logical(one: dict[str, Any], mapping: NDArray[np.integer]) -> NDArray[np.integer]:
    """[tokens, layers, 8] logical ids of a pass, -1: not routed."""
    mode, tokens = one["forward_mode"], len(one["positions"])
    physical = integers(one["topk_ids_of_layer"], "pass", "topk_ids_of_layer", 3, -1, mapping.shape[1] - 1)
    if mode not in (EXTEND, DECODING):
        raise InputError(f"forward_mode {mode}: record without mixed chunks and speculative decoding")
    of_requests = sum(one["extend_seq_lens"]) if mode == EXTEND else tokens
    if physical.shape[:2] != (len(mapping), tokens) or of_requests != tokens:
        raise InputError(f"ids {physical.shape}, but {len(mapping)} layers, {tokens} positions, {of_requests} tokens")
    logical = mapping[np.arange(len(mapping))[:, None, None], physical]
    return np.where(physical < 0, -1, logical).astype(np.int32).transpose(1, 0, 2)
