"""Arrays: .npz and .npy of routing, of one layer a file, or of one request of vLLM's.

`experts` is an integer array [tokens, layers, k] of ids within a layer, -1 where nothing was routed; `offsets`
[requests + 1] rises from 0 to the number of tokens. `moe-trace export --to npz` writes these and the optional ones.
A .npz with other names is read as nested records are (`traces.importers.tree`).
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces import arrays
from traces.defects import PER_CHOICE, Routing
from traces.errors import InputError
from traces.importers.cells import FLOAT16, INT32, UINT32
from traces.importers.dump import Again, Sequence, integers, join
from traces.importers.source import Request, Source
from traces.importers.words import layer_number
from traces.steps import DECODE, PREFILL

BESIDE = ".offsets.npy"

LENGTHS = ("seq_lens", "lengths", "lens", "sequence_lengths", "tokens_per_request")

_PER_TOKEN: dict[str, tuple[type[np.integer], int, int]] = {
    "phase": (np.uint8, PREFILL, DECODE),
    "position": (np.uint32, 0, UINT32),
    "step": (np.uint32, 0, UINT32),
    "token_id": (np.int32, -1, INT32),
}
"""Optional arrays [tokens]: their types in a trace, and what they hold."""


PART = 2**24
"""Expert ids of a part of a dump, about: larger ones are read in parts of whole requests."""


def reads(content: Any) -> bool:
    """Return whether the content of a file is routing as arrays."""
    return isinstance(content.get("experts") if isinstance(content, dict) else content, np.ndarray)


def read(source: Source, files: list[tuple[Path, list[Any]]]) -> Routing | Again:
    """Return arrays by name, one file behind the other, or files of one array each. Raises InputError."""
    held = [content for _, (content,) in files]
    if isinstance(held[0], np.ndarray):
        return _of_arrays(source, dict(zip([path for path, _ in files], held, strict=True)))
    names = [name for name in (*PER_CHOICE, *_PER_TOKEN) if name in held[0]]
    whole = {name: held[0][name] if len(held) == 1 else np.concatenate([each[name] for each in held]) for name in names}
    return _dump(source, whole, np.concatenate([_lengths(each) for each in held]))


def _of_arrays(source: Source, files: dict[Path, Any]) -> Routing | Again:
    """Return arrays with offsets beside them or in the JSON, of a layer each, or of a request each."""
    own, layers = source.path.with_suffix(BESIDE), None
    files |= {own: arrays.read_npy(own)} if own.is_file() else {}
    beside = {file: "offsets" if file.name.endswith(BESIDE) else file.stem for file in files}
    values = {name: files[file] for file, name in beside.items() if name in ("offsets", *LENGTHS)}
    held = {file: array for file, array in files.items() if beside[file] not in values}
    if source.facts.offsets is not None:
        values.setdefault("offsets", np.array(source.facts.offsets))
    experts = next(iter(held.values()))
    if experts.ndim == 2:
        by_layer = {layer_number(file.stem): array for file, array in held.items()}
        layers = tuple(sorted(number for number in by_layer if number is not None))
        if len(layers) < len(held):
            raise InputError(f"{source.path}: files of arrays [tokens, k] need their layers' numbers as names")
        source.found.append(f"a layer a file: {len(layers)} layers, from the files' names")
        experts = np.stack([by_layer[layer] for layer in layers], axis=1)
    if not values and layers is None:
        return join(source, [Sequence(str(file), array, Request(file.stem)) for file, array in held.items()])
    values["experts"] = experts
    return _dump(source, values, _lengths(values), layers)


def token_ids(path: Path, tokens: int) -> NDArray[np.int32]:
    """Return the ids of the tokens of a dump, which lie in a file of their own. Raises InputError."""
    held = arrays.read_npy(path) if path.suffix == ".npy" else arrays.read_npz(path)["token_ids"]
    return _column(path, "token_id", held, tokens)


def _lengths(values: dict[str, Any]) -> NDArray[Any]:
    """Return how many tokens each request has: by offsets, as stated, or those of one request."""
    if "offsets" in values:
        return np.diff(integers(values["offsets"], "offsets", ndim=1))
    return next((values[name] for name in LENGTHS if name in values), np.array([len(values["experts"])]))


def _dump(
    source: Source, values: dict[str, Any], lengths: NDArray[Any], layers: tuple[int, ...] | None = None
) -> Routing | Again:
    path, experts = source.path, values["experts"]
    lengths = integers(lengths, str(path), "offsets", ndim=1)
    if (weights := values.get("weights")) is not None and (weights.shape != experts.shape or weights.dtype.kind != "f"):
        raise InputError(f"{path}: weights is {weights.dtype} {weights.shape}; floats {experts.shape} are needed")
    if not len(lengths) or lengths.min() < 0 or lengths.sum() != len(experts):
        raise InputError(f"{path}: offsets must rise from 0 to the {len(experts)} tokens, [requests + 1]")
    if "hits" in values and values["hits"].shape != experts.shape:
        raise InputError(f"{path}: hits is {values['hits'].shape}, but experts {experts.shape}")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int64)
    columns: dict[str, Any] = {
        name: _column(path, name, values[name], len(experts)) for name in _PER_TOKEN if name in values
    }
    source.found.append(f"experts [tokens, layers, k] {experts.shape}, {len(lengths)} requests")
    requests = source.requests([Request()] * len(lengths))
    if any(one.start for one in requests):
        raise InputError(f"{path} is of no server, and only servers leave leading tokens out: leave `start` out")
    position, again = columns.get("position"), None  # that of the file is taken where it ascends within requests
    if position is not None:
        again = np.setdiff1d(np.flatnonzero(position[1:] <= position[:-1]) + 1, offsets)
        columns |= {"position": None} if again.size else {}
    ends, rows = [0], max(1, PART // max(1, math.prod(experts.shape[1:])))
    while ends[-1] < len(lengths):
        whole = int(np.searchsorted(offsets, offsets[ends[-1]] + rows, "right")) - 1
        ends.append(max(whole, ends[-1] + 1))

    def parts() -> Iterator[Routing]:
        cuts = offsets[ends].tolist()
        names = [name for name in PER_CHOICE if name in values]
        for (a, b), (first, last) in zip(pairwise(ends), pairwise(cuts), strict=True):
            made: dict[str, Any] = {name: _choices(path, name, values[name][first:last], first) for name in names}
            made |= {name: None if column is None else column[first:last] for name, column in columns.items()}
            restarts = again[(again >= first) & (again < last)] - first if again is not None and again.size else None
            bounds = offsets[a : b + 1] - first
            yield Routing(offsets=bounds, requests=requests[a:b], layers=layers, restarts=restarts, **made)
            for name in names:
                arrays.forget(values[name])

    return Again(parts) if len(ends) > 2 else next(parts())


def _choices(path: Path, name: str, values: NDArray[Any], first: int) -> NDArray[Any]:
    """Return an array as `experts`; first: number of its first row. Raises InputError for what it cannot hold."""
    if name != "weights":
        return (
            integers(values, str(path), name, 3, -1, 1) if name == "hits" else integers(values, str(path), first=first)
        )
    if (odd := np.argwhere(~(np.abs(values) <= FLOAT16))).size:
        at = odd[0].tolist()
        value, at[0] = values[tuple(at)], at[0] + first
        raise InputError(f"{path}: weights{at} is {value}, no number that float16 holds")
    return values


def _column(path: Path, name: str, values: NDArray[Any], tokens: int) -> NDArray[Any]:
    kind, least, most = _PER_TOKEN[name]
    column = integers(values, str(path), name, 1, least, most).astype(kind)
    if len(values) != tokens:
        raise InputError(f"{path}: {name} must hold a number for each of {tokens} tokens")
    return column
